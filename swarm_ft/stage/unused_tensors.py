"""Stored tensors that a model does not use, and which of them make the result another model."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from transformers import PreTrainedModel

MOST_NAMES = 4
"""Names in a line for people."""
_QUANTISED = re.compile(
    r"(^|[._])(scales?|scale_inv|scale_2|scale_and_zero|zeros?|zero_points?|qweight|qzeros|qscales"
    r"|g_idx|weight_packed|weight_shape|amax|absmax|quant_map|quant_state\..*|SCB|weight_format"
    r"|codebooks?|codes|Qidxs|trellis|q_weight|W_q|blocks)$"
)
"""Endings of names of tensors with which other libraries store quantised weights."""
_ADAPTER = re.compile(r"(^|[._])(lora_[A-Za-z_]+|base_layer|dora_\w+)(\.|$)")
_BUFFER = re.compile(
    r"(^|\.)(rotary_emb\.(inv_freq|original_inv_freq|cos_cached|sin_cached)|rope\.freqs"
    r"|(attn|attention|self_attn)\.(bias|masked_bias|causal_mask)|position_ids|token_type_ids"
    r"|_float_tensor|decoder\.version)$"
)
"""Constants that earlier versions of transformers stored, and that follow from the config."""
_BIAS, _WEIGHT = ".bias", ".weight"


@dataclass(frozen=True, kw_only=True, slots=True)
class Unused:
    """Unused tensors of a checkpoint by kind.

    Attributes:
        refusal: Reason why the model cannot be trained; empty if it can.
        biases: Biases of layers that have none by the config.
        others: Tensors that transformers lists as unexpected: other heads, blocks beyond the
            config's.
    """

    refusal: str = ""
    biases: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Return lines about the unused tensors, for people."""
        groups = (
            (self.biases, "biases that the model's config.json switches off are not used"),
            (self.others, "tensors of the checkpoint that the model does not use"),
        )
        return [f"{words}: {in_short(names)}" for names, words in groups if names]


def find_unused(
    model: PreTrainedModel, blocks: str, stored: Iterable[str], used: Collection[str]
) -> Unused:
    """Sort the stored tensors that the model does not use.

    Args:
        model: Model with the task's head.
        blocks: Name of its list of blocks.
        stored: Names of all tensors of the checkpoint.
        used: Names of the tensors that the model uses.
    """
    ignored = [re.compile(one) for one in model._keys_to_ignore_on_load_unexpected or ()]  # noqa: SLF001
    place = _BlockPlace(model, blocks)
    biases, others = [], []
    for name in sorted(name for name in stored if name not in used):
        if _QUANTISED.search(name):
            return Unused(
                refusal=f"its safetensors have {name}, by which quantised weights are read, and "
                f"its config.json has no quantization_config; quantised checkpoints cannot be "
                f"trained"
            )
        if _ADAPTER.search(name):
            return Unused(
                refusal=f"its safetensors have {name}, of an adapter beside the weights; merge it "
                f"first (merge_and_unload of peft)"
            )
        if _BUFFER.search(name) or any(one.search(name) for one in ignored):
            continue
        if name.endswith(_BIAS) and name.removesuffix(_BIAS) + _WEIGHT in used:
            biases.append(name)
        elif place.is_within(name):
            return Unused(
                refusal=f"its safetensors have {name}, which a {model.config.model_type} of its "
                f"config.json does not use: weights and config.json belong to two models"
            )
        else:
            others.append(name)
    return Unused(biases=tuple(biases), others=tuple(others))


def in_short(names: Iterable[str]) -> str:
    """Return the first few names, with * in the place of numbers, each once."""
    short = list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names))
    more = f" and {len(short) - MOST_NAMES} more" if len(short) > MOST_NAMES else ""
    return ", ".join(short[:MOST_NAMES]) + more


class _BlockPlace:
    """The test whether a stored tensor belongs to one of the model's blocks, with any prefix."""

    def __init__(self, model: PreTrainedModel, blocks: str) -> None:
        own = re.escape(blocks.removeprefix(f"{model.base_model_prefix}."))
        self._pattern = re.compile(rf"^(?:{re.escape(model.base_model_prefix)}\.)?{own}\.(\d+)\.")
        self._num_blocks = int(model.config.num_hidden_layers)

    def is_within(self, name: str) -> bool:
        found = self._pattern.match(name)
        return found is not None and int(found[1]) < self._num_blocks
