"""Options of drawing a text's tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from swarm_ft.protocol.spec.bounds import Range
from swarm_ft.protocol.spec.run_spec import MAX_VOCAB_SIZE

MAX_TEXT_TOKENS = 1 << 15
"""Tokens of a text with its continuation; a peer may have room for fewer."""

Temperature = Annotated[float, Range(0.01, 100.0)]
TopK = Annotated[int, Range(0, MAX_VOCAB_SIZE)]
TopP = Annotated[float, Range(0.001, 1.0)]
Seed = Annotated[int, Range(0, (1 << 63) - 1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Options of drawing a token, as in `generate` of transformers.

    Attributes:
        temperature: Divisor of the logits.
        top_k: Number of the most likely tokens to draw from; 0: all.
        top_p: Total probability of the most likely tokens to draw from.
        seed: Seed of all draws of a text. Each draw also depends on its place, so that a text
            continues at another peer as it would have at the first.
    """

    temperature: Temperature = 1.0
    top_k: TopK = 50
    top_p: TopP = 1.0
    seed: Seed = 0
