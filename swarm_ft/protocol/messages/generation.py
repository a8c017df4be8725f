"""What a client and a peer say while a text is continued at a trained stage, as frozen values.

A text is one call: `BeginText`, then part after part what stands in it, in order, each of which is
answered before the next. The first stage is told tokens and the others what the one in front of
them made of these; the last stage answers with the token that is to follow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from swarm_ft.protocol.messages.control import TokenIds
from swarm_ft.protocol.messages.shard import ShardName
from swarm_ft.protocol.spec.bounds import Length, Range
from swarm_ft.protocol.spec.run_spec import (
    BYTES_PER_FLOAT,
    BYTES_PER_TOKEN,
    MAX_HIDDEN_SIZE,
    MAX_VOCAB_SIZE,
)
from swarm_ft.protocol.spec.sampling import MAX_TEXT_TOKENS, Sampling
from swarm_ft.protocol.spec.version import PROTOCOL_VERSION, Spoken

MAX_VALUES_BYTES = 1 << 20
"""Of a part's activations: some seconds of a poor home link; 4 tokens at least."""
MAX_PART_TOKENS = 256
"""Read at once: memory for their attention to a whole text is taken beside what is kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BeginText:
    """A text begins.

    Attributes:
        name: the trained stage, as its result is fetched by.
        max_tokens: that will be told at most; the peer keeps room for them.
        sampling: None chooses the likeliest token.
    """

    name: ShardName
    max_tokens: Annotated[int, Range(1, MAX_TEXT_TOKENS)]
    sampling: Sampling | None = None
    protocol_version: Annotated[int, Spoken("client", "peer")] = PROTOCOL_VERSION


@dataclass(frozen=True, kw_only=True, slots=True)
class TextTokens:
    """The next tokens of a text, little-endian uint32."""

    token_ids: Annotated[TokenIds, Length(BYTES_PER_TOKEN * MAX_PART_TOKENS)]


@dataclass(frozen=True, kw_only=True, slots=True)
class TextActivation:
    """What a stage made of the next tokens, float32 [tokens, channels], little-endian."""

    values: Annotated[bytes, Length(MAX_VALUES_BYTES, BYTES_PER_FLOAT)]


@dataclass(frozen=True, kw_only=True, slots=True)
class NextToken:
    """Which token follows all that was told, by the last stage."""

    token: Annotated[int, Range(0, MAX_VOCAB_SIZE - 1)]


ToStage = BeginText | TextTokens | TextActivation
FromStage = TextActivation | NextToken


def tokens_in_part(channels: int) -> int:
    """How many tokens are told at once, of a model of so many channels."""
    fitting = MAX_VALUES_BYTES // (BYTES_PER_FLOAT * min(channels, MAX_HIDDEN_SIZE))
    return min(MAX_PART_TOKENS, fitting)
