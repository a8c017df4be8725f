"""Messages of an all-reduce, and the division of a gradient into pieces. No torch, no I/O.

The flat gradient of n values is cut into rows of 128. The members get even shares of the rows in
their order, and each share, a shard, is cut into pieces. Members that listen, such as learners
without weights, sum nothing and have no gradient. Everybody computes the same division from n, the
number of members and the set of listeners.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, NamedTuple

from swarm_ft.codec.sizes import PIECE_ROWS, ROW_VALUES
from swarm_ft.codec.tensor import EncodedTensor
from swarm_ft.ids import Attempt, PeerId, RunId, StepNumber
from swarm_ft.protocol.spec.bounds import Digest, Range
from swarm_ft.protocol.spec.layers import LayerRange

MAX_GRADIENT_VALUES = 1 << 36
"""Values of one stage's gradient."""


class Phase(IntEnum):
    """Content of a piece; the numbers are those of the wire."""

    SHARE = 1
    """One member's values, for the member that sums them."""
    SUM = 2
    """The sum of all members' values, for each of them."""


class Scope(IntEnum):
    """Scope of a sum of gradients; the numbers are those of the wire.

    Two replicas of a stage may have both sums with each other.
    """

    REPLICAS = 1
    """All gradients of one stage, over its replicas."""
    STAGES = 2
    """Gradients of weights that several stages share, over these stages."""


class PieceKey(NamedTuple):
    """Unique name of a piece between two members; a second arrival changes nothing."""

    attempt: Attempt
    step: StepNumber
    phase: Phase
    piece: int
    scope: Scope = Scope.REPLICAS


@dataclass(frozen=True, slots=True)
class GradientPiece:
    """Member to member: an encoded piece, [rows, 128]; its own values fill the last row up."""

    key: PieceKey
    tensor: EncodedTensor


@dataclass(frozen=True, slots=True)
class PieceAck:
    """Receiver to sender of a piece: it was summed or applied, and need not be sent again."""

    key: PieceKey


@dataclass(frozen=True, kw_only=True, slots=True)
class ReduceHello:
    """Member to member: first message of each side.

    Attributes:
        scope: Scope of the sum.
        layers: Blocks of the stage of both replicas; all of the model among stages.
        num_values: Values of the gradient; 0 if this side has no weights, and does not know.
    """

    run_id: RunId
    spec_digest: Digest
    attempt: Attempt
    peer_id: PeerId
    layers: LayerRange
    scope: Scope = Scope.REPLICAS
    num_values: Annotated[int, Range(0, MAX_GRADIENT_VALUES)] = 0


PieceMessage = GradientPiece | PieceAck
"""Messages after the hellos."""
ReduceMessage = ReduceHello | PieceMessage


def scope_of(message: ReduceMessage) -> Scope:
    """Return the scope of a message's sum."""
    return message.scope if isinstance(message, ReduceHello) else message.key.scope


@dataclass(frozen=True, slots=True)
class PieceSpan:
    """Place of a piece in the flat gradient.

    Attributes:
        index: Number of the piece over the whole gradient.
        owner: Member that sums it.
        start: Index of its first value.
        stop: Index after its last value.
    """

    index: int
    owner: int
    start: int
    stop: int

    @property
    def num_values(self) -> int:
        """Values of the piece, at least 1."""
        return self.stop - self.start

    @property
    def rows(self) -> int:
        """Rows of its tensor."""
        return -(-self.num_values // ROW_VALUES)


@dataclass(frozen=True, slots=True)
class EncodeShare:
    """Task: encode this member's values of a piece, then call `encoded`."""

    span: PieceSpan


@dataclass(frozen=True, slots=True)
class SumShares:
    """Task: add up the shares in this order, encode the sum, then call `summed` or `share_refused`.

    Attributes:
        span: Place of the piece.
        shares: Encoded shares by member.
    """

    span: PieceSpan
    shares: Mapping[int, EncodedTensor]


@dataclass(frozen=True, slots=True)
class TakeSum:
    """Task: decode the sum of a piece into the result, then call `taken` or `sum_refused`."""

    span: PieceSpan
    tensor: EncodedTensor


PieceTask = EncodeShare | SumShares | TakeSum
"""Computations that the all-reduce requests."""


class Division:
    """Shards and pieces of a gradient.

    Attributes:
        num_values: Values of the whole gradient, at least 1.
        givers: Members whose gradients are summed, in order: all that do not listen.
        spans: Places of all pieces, in order.
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
        """Return start and stop of a member's shard; empty for a listener, or for few values."""
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
