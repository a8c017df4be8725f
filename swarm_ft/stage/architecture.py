"""Where each architecture keeps its parts, and how to run them. Knows transformers; no weights.

Shape suffixes: b samples, t tokens, c channels. A new architecture is one row of the table at the
end, if its blocks take and give one hidden tensor.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from swarm_ft.errors import BadModel, BadOption

HEAD = "lm_head"
HEAD_WEIGHT = f"{HEAD}.weight"
ROTARY = "rotary_emb"

EMBED_PART = "embeddings"
HEAD_PART = "head"


class ModelConfig(Protocol):
    """What this package reads of a transformers config; GPT-2's aliases answer to these names."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: torch.dtype
    architectures: list[str]

    def save_pretrained(self, save_directory: str) -> None:
        """Write `config.json` into the directory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """Names of a model's parts below `base`, and the two calls that differ.

    Attributes:
        base: attribute of the causal model that holds all but the head.
        embeddings: modules that only the first stage needs; the first is the tokens' table.
        blocks: the list of transformer blocks.
        final_norm: the norm in front of the head.
        embed: (base, tokens [B, T] int64) -> hidden [B, T, C].
        block_arguments: (base, hidden [B, T, C]) -> what every block gets beside `hidden`.
        settings: fields of the config that change what the weights compute, and that the
            weights' shapes do not show.
        positions_are_learned: a longer sequence than the model's positions cannot be embedded.
        has_rotary: blocks need position embeddings that every stage computes for itself.
    """

    base: str
    embeddings: tuple[str, ...]
    blocks: str
    final_norm: str
    embed: Callable[[nn.Module, Tensor], Tensor]
    block_arguments: Callable[[nn.Module, Tensor], Mapping[str, object]]
    settings: tuple[str, ...]
    positions_are_learned: bool
    has_rotary: bool

    @property
    def embedding_weight(self) -> str:
        """Full name of the token embeddings' tensor."""
        return f"{self.base}.{self.embeddings[0]}.weight"

    def full_name(self, stored: str) -> str:
        """The causal model's name of a tensor that was saved with or without the base's prefix."""
        complete = stored.startswith((f"{self.base}.", f"{HEAD}."))
        return stored if complete else f"{self.base}.{stored}"

    def part_of(self, name: str) -> str:
        """`embeddings`, `block N` or `head`, by a tensor's full name."""
        first, _, rest = name.removeprefix(f"{self.base}.").partition(".")
        if first == self.blocks:
            return block_part(int(rest.partition(".")[0]))
        return EMBED_PART if first in self.embeddings else HEAD_PART


def block_part(index: int) -> str:
    """Name of a block, in messages and in `tensor_names`."""
    return f"block {index}"


def architecture_of(model_type: str) -> Architecture:
    """The table's row for a config's `model_type`.

    Raises:
        BadModel: no row.
    """
    found = ARCHITECTURES.get(model_type)
    if found is None:
        raise BadModel(f"architecture '{model_type}': expected one of {', '.join(ARCHITECTURES)}")
    return found


def settings_text(config: ModelConfig) -> str:
    """A config's `settings` as one canonical text: equal texts and weights, equal computation."""
    names = architecture_of(config.model_type).settings
    fields = {name: getattr(config, name, None) for name in names}
    return json.dumps(fields, sort_keys=True, default=str)


def build_skeleton(config: ModelConfig) -> nn.Module:
    """The whole causal model on the meta device: every name and shape, no memory.

    Head and embeddings are two tensors in it, tied or not: they may live on two machines.

    Raises:
        ValueError: transformers cannot build it from these numbers.
    """
    untied = copy.deepcopy(config)
    untied.tie_word_embeddings = False
    with torch.device("meta"):
        skeleton: nn.Module = AutoModelForCausalLM.from_config(untied, attn_implementation="sdpa")
    return skeleton


def check_seq_length(config: ModelConfig, seq_length: int) -> None:
    """Refuse samples that the model has no positions for, or that a sliding window would cut.

    Blocks run with plain causal attention, which a window at least as long as the sample equals.

    Raises:
        BadOption: the samples are too long.
    """
    longest = config.max_position_embeddings
    if architecture_of(config.model_type).positions_are_learned and seq_length > longest:
        raise BadOption(f"--seq-length {seq_length}: the model has {longest} positions")
    window = _sliding_window(config)
    if window is not None and seq_length > window:
        raise BadOption(
            f"--seq-length {seq_length}: the model attends over a sliding window of {window} "
            f"tokens, and training here needs all of a sample inside it"
        )


def _sliding_window(config: ModelConfig) -> int | None:
    layer_types: list[str] | None = getattr(config, "layer_types", None)
    if layer_types is not None and "sliding_attention" not in layer_types:
        return None
    window: int | None = getattr(config, "sliding_window", None)
    return window


def _positions(like_bt: Tensor) -> Tensor:
    return torch.arange(like_bt.shape[1], device=like_bt.device).unsqueeze(0)


def _gpt2_embed(base: nn.Module, tokens_bt: Tensor) -> Tensor:
    tokens_btc = base.get_submodule("wte")(tokens_bt)
    positions_1tc = base.get_submodule("wpe")(_positions(tokens_bt))
    hidden_btc: Tensor = base.get_submodule("drop")(tokens_btc + positions_1tc)
    return hidden_btc


def _gpt2_arguments(_base: nn.Module, _hidden_btc: Tensor) -> Mapping[str, object]:
    return {"attention_mask": None}


def _llama_embed(base: nn.Module, tokens_bt: Tensor) -> Tensor:
    hidden_btc: Tensor = base.get_submodule("embed_tokens")(tokens_bt)
    return hidden_btc


def _llama_arguments(base: nn.Module, hidden_btc: Tensor) -> Mapping[str, object]:
    positions_1t = _positions(hidden_btc)
    cos_and_sin = base.get_submodule(ROTARY)(hidden_btc, position_ids=positions_1t)
    return {
        "attention_mask": None,
        "position_ids": positions_1t,
        "position_embeddings": cos_and_sin,
    }


_GPT2 = Architecture(
    base="transformer",
    embeddings=("wte", "wpe", "drop"),
    blocks="h",
    final_norm="ln_f",
    embed=_gpt2_embed,
    block_arguments=_gpt2_arguments,
    settings=(
        "num_attention_heads",
        "activation_function",
        "layer_norm_epsilon",
        "scale_attn_weights",
        "scale_attn_by_inverse_layer_idx",
        "embd_pdrop",
        "resid_pdrop",
        "attn_pdrop",
    ),
    positions_are_learned=True,
    has_rotary=False,
)
_LLAMA = Architecture(
    base="model",
    embeddings=("embed_tokens",),
    blocks="layers",
    final_norm="norm",
    embed=_llama_embed,
    block_arguments=_llama_arguments,
    settings=(
        "num_attention_heads",
        "num_key_value_heads",
        "hidden_act",
        "rms_norm_eps",
        "rope_parameters",
        "max_position_embeddings",
        "attention_dropout",
        "pad_token_id",
    ),
    positions_are_learned=False,
    has_rotary=True,
)
ARCHITECTURES: Mapping[str, Architecture] = {
    "gpt2": _GPT2,
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
}
