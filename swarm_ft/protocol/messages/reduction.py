"""A piece of a gradient on its way between those who sum it, and who sums which. No torch, no I/O.

The flat gradient of n values is cut into rows of 128, the rows are shared out evenly among the
members in their order, and each member's share of them, its shard, is cut into pieces. Members
that listen, as a newcomer does before it has the weights, sum nothing and have no gradient.
Everybody computes the same division from n, the number of members and who of them listens.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, NamedTuple

from swarm_ft.ids import Attempt, PeerId, RunId, StepNumber
from swarm_ft.protocol.messages.boundary import EncodedTensor
from swarm_ft.protocol.spec.bounds import Digest, Range
from swarm_ft.protocol.spec.layers import LayerRange

MAX_GRADIENT_VALUES = 1 << 36
"""Of one stage."""
ROW_VALUES = 128
"""Values that share a step. Usual widths are multiples of it, so rows seldom hold values of two
tokens' embeddings or of two neurons."""
PIECE_ROWS = 2048
"""Of a piece at most: a megabyte of float32, so that coding, sending and summing overlap, and a
frame on another stream is not held up."""


class Phase(IntEnum):
    """What a piece holds; the numbers are those of the wire."""

    SHARE = 1
    """One member's values, for the member that sums them."""
    SUM = 2
    """The sum of all members' values, for each of them."""


class Scope(IntEnum):
    """Whose gradients are summed; the numbers are those of the wire.

    Two replicas of a stage may have both sums with each other.
    """

    REPLICAS = 1
    """All gradients of one stage, over its replicas."""
    STAGES = 2
    """Those of weights that several stages hold copies of, over these."""


class PieceKey(NamedTuple):
    """Names a piece for ever between two members; a second arrival changes nothing."""

    attempt: Attempt
    step: StepNumber
    phase: Phase
    piece: int
    scope: Scope = Scope.REPLICAS


@dataclass(frozen=True, slots=True)
class GradientPiece:
    """An encoded piece; its tensor is [rows, 128], the last row filled up with its own values."""

    key: PieceKey
    tensor: EncodedTensor


@dataclass(frozen=True, slots=True)
class PieceAck:
    """The piece of this key was summed, or taken in; its sender need not send it again."""

    key: PieceKey


@dataclass(frozen=True, kw_only=True, slots=True)
class ReduceHello:
    """First message of either side.

    Attributes:
        scope: what is summed.
        layers: the stage that both are replicas of; all of the model among stages.
        num_values: of the gradient; 0 if this side does not know, since it has no weights.
    """

    run_id: RunId
    spec_digest: Digest
    attempt: Attempt
    peer_id: PeerId
    layers: LayerRange
    scope: Scope = Scope.REPLICAS
    num_values: Annotated[int, Range(0, MAX_GRADIENT_VALUES)] = 0


PieceMessage = GradientPiece | PieceAck
"""What follows the hellos."""
ReduceMessage = ReduceHello | PieceMessage


def scope_of(message: ReduceMessage) -> Scope:
    """Of which sum a message is."""
    return message.scope if isinstance(message, ReduceHello) else message.key.scope


@dataclass(frozen=True, slots=True)
class PieceSpan:
    """Where a piece lies in the flat gradient.

    Attributes:
        index: of the piece, counted over the whole gradient.
        owner: the member that sums it.
        start: its first value.
        stop: one after its last value.
    """

    index: int
    owner: int
    start: int
    stop: int

    @property
    def num_values(self) -> int:
        """Its length, at least 1."""
        return self.stop - self.start

    @property
    def rows(self) -> int:
        """Rows of its tensor."""
        return -(-self.num_values // ROW_VALUES)


@dataclass(frozen=True, slots=True)
class EncodeShare:
    """Encode this member's values of a piece, then say `encoded`."""

    span: PieceSpan


@dataclass(frozen=True, slots=True)
class SumShares:
    """Add up the shares in this order and encode the sum; then say `summed` or `share_refused`.

    Attributes:
        shares: by member.
    """

    span: PieceSpan
    shares: Mapping[int, EncodedTensor]


@dataclass(frozen=True, slots=True)
class TakeSum:
    """Decode the sum of a piece into the result, then say `taken` or `sum_refused`."""

    span: PieceSpan
    tensor: EncodedTensor


PieceTask = EncodeShare | SumShares | TakeSum
"""What the all-reduce wants computed."""


class Division:
    """Shards and pieces of a gradient.

    Attributes:
        num_values: of the whole gradient, at least 1.
        givers: members whose gradients are summed, in order: all that do not listen.
        spans: of all pieces, in order.
    """

    def __init__(
        self, num_values: int, num_members: int, listeners: Set[int] = frozenset()
    ) -> None:
        self.num_values = num_values
        self.givers = tuple(i for i in range(num_members) if i not in listeners)
        self.spans: tuple[PieceSpan, ...] = ()
        for owner in self.givers:
            self.spans += _pieces(*self.shard(owner), owner, len(self.spans))

    def shard(self, member: int) -> tuple[int, int]:
        """The values that a member sums, start and stop; empty if there are few, or it listens."""
        if member not in self.givers:
            return 0, 0
        rank, rows = self.givers.index(member), -(-self.num_values // ROW_VALUES)
        start, stop = (rows * i // len(self.givers) * ROW_VALUES for i in (rank, rank + 1))
        return min(start, self.num_values), min(stop, self.num_values)


def _pieces(start: int, stop: int, owner: int, first_index: int) -> tuple[PieceSpan, ...]:
    size = PIECE_ROWS * ROW_VALUES
    return tuple(
        PieceSpan(first_index + i, owner, at, min(at + size, stop))
        for i, at in enumerate(range(start, stop, size))
    )
