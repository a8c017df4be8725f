"""Messages between a client and a peer that continue a text at a trained stage, as frozen values.

A text is one call: `BeginText`, then the text part after part, in order. Each part is answered
before the next. The first stage receives tokens, and the others the output of the stage before. The
last stage answers with the next token.
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
from swarm_ft.protocol.spec.version import PROTOCOL_VERSION, VersionField

MAX_VALUES_BYTES = 1 << 20
"""Bytes of a part's activations: some seconds of a poor home link, and at least 4 tokens."""
MAX_PART_TOKENS = 256
"""Tokens of a part, whose attention needs memory beside the key-value cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BeginText:
    """Client to peer: the begin of a text.

    Attributes:
        name: Name of the trained stage's result.
        max_tokens: Tokens of the text at most; the peer reserves room for them.
        sampling: How to draw tokens; None chooses the most likely one.
    """

    name: ShardName
    max_tokens: Annotated[int, Range(1, MAX_TEXT_TOKENS)]
    sampling: Sampling | None = None
    protocol_version: Annotated[int, VersionField("client", "peer")] = PROTOCOL_VERSION


@dataclass(frozen=True, kw_only=True, slots=True)
class TextTokens:
    """Client to the first stage: the next tokens of a text, little-endian uint32."""

    token_ids: Annotated[TokenIds, Length(BYTES_PER_TOKEN * MAX_PART_TOKENS)]


@dataclass(frozen=True, kw_only=True, slots=True)
class TextActivation:
    """Output of a stage for the next tokens, float32 [tokens, channels], little-endian."""

    values: Annotated[bytes, Length(MAX_VALUES_BYTES, BYTES_PER_FLOAT)]


@dataclass(frozen=True, kw_only=True, slots=True)
class NextToken:
    """Last stage to client: the token after all received ones."""

    token: Annotated[int, Range(0, MAX_VOCAB_SIZE - 1)]


ToStage = BeginText | TextTokens | TextActivation
FromStage = TextActivation | NextToken


def tokens_in_part(channels: int) -> int:
    """Return the tokens of a part, for a model with `channels` channels."""
    fitting = MAX_VALUES_BYTES // (BYTES_PER_FLOAT * min(channels, MAX_HIDDEN_SIZE))
    return min(MAX_PART_TOKENS, fitting)
