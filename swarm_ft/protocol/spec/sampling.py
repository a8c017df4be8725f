"""How a token of a text is drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from swarm_ft.protocol.spec.bounds import Range
from swarm_ft.protocol.spec.run_spec import MAX_VOCAB_SIZE

MAX_TEXT_TOKENS = 1 << 15
"""Of a text with what is added to it; how many a peer has room for, it says."""

Temperature = Annotated[float, Range(0.01, 100.0)]
TopK = Annotated[int, Range(0, MAX_VOCAB_SIZE)]
TopP = Annotated[float, Range(0.001, 1.0)]
Seed = Annotated[int, Range(0, (1 << 63) - 1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How a token is drawn, as `generate` of transformers draws it.

    Attributes:
        temperature: by which logits are divided.
        top_k: so many of the likeliest are left; 0 leaves all.
        top_p: of these, the likeliest that come to this probability.
        seed: of all draws of a text; each also depends on its place, so that a text that is
            continued elsewhere goes on as it would have.
    """

    temperature: Temperature = 1.0
    top_k: TopK = 50
    top_p: TopP = 1.0
    seed: Seed = 0
