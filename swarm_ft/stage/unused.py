"""Stored tensors that a model does not use: which make its result another one, and which do not."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from transformers import PreTrainedModel

MOST_NAMES = 4
"""In a line for people."""
_QUANTISED = re.compile(
    r"(^|[._])(scales?|scale_inv|scale_2|scale_and_zero|zeros?|zero_points?|qweight|qzeros|qscales"
    r"|g_idx|weight_packed|weight_shape|amax|absmax|quant_map|quant_state\..*|SCB|weight_format"
    r"|codebooks?|codes|Qidxs|trellis|q_weight|W_q|blocks)$"
)
"""How the names of tensors end by which other libraries make weights of codes."""
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
    """Stored tensors of a checkpoint, by what they say about it.

    Attributes:
        refusal: why the model cannot be trained; empty if it can.
        biases: of layers that the config gives none.
        others: what transformers lists as unexpected: other heads, blocks beyond the config's.
    """

    refusal: str = ""
    biases: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """What is left out, for people."""
        told = (
            (self.biases, "biases that the model's config.json switches off are not used"),
            (self.others, "tensors of the checkpoint that the model does not use"),
        )
        return [f"{words}: {in_short(names)}" for names, words in told if names]


def find_unused(
    model: PreTrainedModel, blocks: str, stored: Iterable[str], used: Collection[str]
) -> Unused:
    """Sort the stored tensors that no tensor of a model is made of.

    Args:
        model: with the task's head.
        blocks: the name of its list of blocks.
        stored: names of all tensors of the checkpoint.
        used: those that the model's tensors are made of.
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
    """Names with * in the place of numbers, each once; the first few."""
    short = list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names))
    more = f" and {len(short) - MOST_NAMES} more" if len(short) > MOST_NAMES else ""
    return ", ".join(short[:MOST_NAMES]) + more


class _BlockPlace:
    """Whether a stored tensor is of a block that the model has; with the base's name or without."""

    def __init__(self, model: PreTrainedModel, blocks: str) -> None:
        own = re.escape(blocks.removeprefix(f"{model.base_model_prefix}."))
        self._pattern = re.compile(rf"^(?:{re.escape(model.base_model_prefix)}\.)?{own}\.(\d+)\.")
        self._num_blocks = int(model.config.num_hidden_layers)

    def is_within(self, name: str) -> bool:
        found = self._pattern.match(name)
        return found is not None and int(found[1]) < self._num_blocks
