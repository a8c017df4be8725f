"""The kinds of models that the study trains: how a small one of each is made, and its parts' names.

Knows no cuts and no codecs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from transformers import GPT2Config, GPT2Model, LlamaConfig, LlamaModel, PreTrainedModel

DEFAULT_FAMILY = "gpt2"
"""Of a record that names none."""


class Sizes(NamedTuple):
    """The sizes of a model."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Family:
    """One kind of decoder.

    Attributes:
        body: makes one with weights drawn from torch's generator, without a head.
        blocks: the name of its stack.
        attention: linear layers of a block's attention.
        mlp: those of its feed-forward part.
        is_transposed: whether they keep their weights as [inputs, outputs].
    """

    body: Callable[[Sizes], PreTrainedModel]
    blocks: str
    attention: tuple[str, ...]
    mlp: tuple[str, ...]
    is_transposed: bool


def _gpt2(sizes: Sizes) -> PreTrainedModel:
    return GPT2Model(
        GPT2Config(
            vocab_size=sizes.vocabulary,
            n_positions=sizes.tokens,
            n_embd=sizes.width,
            n_layer=sizes.layers,
            n_head=sizes.heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def _llama(sizes: Sizes) -> PreTrainedModel:
    """RMSNorm, rotary positions, a gated feed-forward part, a key head for two query heads.

    Three widths within the feed-forward part: a block's matrices then have as many weights as
    GPT-2's of that width, 12 times its square.
    """
    return LlamaModel(
        LlamaConfig(
            vocab_size=sizes.vocabulary,
            max_position_embeddings=sizes.tokens,
            hidden_size=sizes.width,
            intermediate_size=3 * sizes.width,
            num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.heads,
            num_key_value_heads=sizes.heads // 2,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


FAMILIES = {
    DEFAULT_FAMILY: Family(
        _gpt2, "h", ("attn.c_attn", "attn.c_proj"), ("mlp.c_fc", "mlp.c_proj"), is_transposed=True
    ),
    "llama": Family(
        _llama,
        "layers",
        tuple(f"self_attn.{part}_proj" for part in "qkvo"),
        tuple(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
        is_transposed=False,
    ),
}
