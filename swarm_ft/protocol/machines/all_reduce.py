"""Sum of all members' gradients at one member, as a state machine: reduce-scatter, all-gather.

Member i sums shard i. Each other member sends it its share of every piece; once all shares of a
piece are there they are added up in the order of the members, and the sum goes out to everybody.
All members, the one that summed included, use the encoded sum, so all end with the same bits.
Members that listen send no shares and sum nothing; they receive every sum.

The machine receives encoded pieces and returns effects; it knows no gRPC, no tensor and no clock.
It lives as long as one attempt of a run; streams may break and come back under it. Rules:

- a piece has a unique key; a second arrival changes nothing and is acknowledged again;
- a share is acknowledged when its piece is summed, a sum when it is in the result;
- at most a window of each is unacknowledged, so a member holds at most a window of shares from
  each other member, and of its own; encoded sums wait for the slowest, a shard of them at most;
- shares may arrive before this member begins the step, and sums where it listens; they wait;
  a piece of an earlier step or attempt is void; anything else ends the stream.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from swarm_ft.codec.sizes import ROW_VALUES
from swarm_ft.codec.tensor import EncodedTensor
from swarm_ft.errors import BadFrame, OutOfTurn, ProtocolError
from swarm_ft.ids import Attempt, StepNumber
from swarm_ft.protocol.machines.outbox import Outbox
from swarm_ft.protocol.messages.reduction import (
    Division,
    EncodeShare,
    GradientPiece,
    Phase,
    PieceAck,
    PieceKey,
    PieceMessage,
    PieceSpan,
    Scope,
    SumShares,
    TakeSum,
)

WINDOW_PIECES = 32
"""Unacknowledged shares or sums from one member to another: 4 MiB at 4 bits.

That is enough for 250 Mbps at 130 ms.
"""


@dataclass(frozen=True, slots=True)
class TransmitPiece:
    """Effect: send this message on the stream to that member."""

    member: int
    message: GradientPiece | PieceAck


@dataclass(frozen=True, slots=True)
class BreakOff:
    """Effect: end the stream with that member, for this reason."""

    member: int
    error: ProtocolError


ReduceEffect = EncodeShare | SumShares | TakeSum | TransmitPiece | BreakOff
Effects = list[ReduceEffect]


class _Other:
    """State of the exchange with one other member."""

    def __init__(self) -> None:
        self.outboxes: dict[Phase, Outbox[PieceKey, GradientPiece]] = {
            phase: Outbox() for phase in Phase
        }
        self.early: dict[PieceKey, GradientPiece] = {}
        self.shares: set[int] = set()
        self.sums: set[int] = set()

    def begin(self) -> list[GradientPiece]:
        """Forget the last step; return the pieces that arrived early for the next ones."""
        early = list(self.early.values())
        for outbox in self.outboxes.values():
            outbox.clear()
        for pieces in (self.early, self.shares, self.sums):
            pieces.clear()
        return early


class AllReduce:
    """All-reduce at one member; members are numbered in the order in which they are summed."""

    def __init__(
        self, *, attempt: Attempt, num_members: int, own: int, scope: Scope = Scope.REPLICAS
    ) -> None:
        self._attempt = attempt
        self._scope = scope
        self._own = own
        self._num_members = num_members
        self._step = StepNumber(-1)
        self._spans: tuple[PieceSpan, ...] = ()
        self._givers: tuple[int, ...] = ()
        self._others = {i: _Other() for i in range(num_members) if i != own}
        self._to_encode: dict[int, deque[PieceSpan]] = {}
        self._open_shares: dict[int, set[int]] = {}
        self._encoded: set[int] = set()
        self._shares: dict[int, dict[int, EncodedTensor]] = {}
        self._done: set[int] = set()

    @property
    def is_settled(self) -> bool:
        """Whether this member has the whole result, and the others have all pieces sent to them."""
        outboxes = (box for other in self._others.values() for box in other.outboxes.values())
        return len(self._done) == len(self._spans) and not any(map(len, outboxes))

    @property
    def waits_for(self) -> tuple[int, ...]:
        """Members that this one waits for.

        First come those whose shares of the next piece of its own shard are missing: others may
        wait for them too, and so have no sums yet. Then come those whose sums are missing, though
        they have this member's share. Last come those that have not acknowledged a sum.
        """
        if self.is_settled:
            return ()
        undone = [span for span in self._spans if span.index not in self._done]
        own = next((span for span in undone if span.owner == self._own), None)
        shares = self._shares.get(own.index, {}) if own is not None else {}
        givers = [i for i in self._givers if own is not None and i != self._own and i not in shares]
        owners = {span.owner for span in undone if self._lacks_sum(span)}
        boxes = {i: other.outboxes[Phase.SUM] for i, other in self._others.items()}
        return tuple(givers or sorted(owners) or (i for i, box in boxes.items() if box))

    def _lacks_sum(self, span: PieceSpan) -> bool:
        if span.owner == self._own or span.index in self._others[span.owner].sums:
            return False
        return not self._gives or span.index in self._encoded

    @property
    def _gives(self) -> bool:
        return self._own in self._givers

    # ---- actions of this member

    def begin(self, step: StepNumber, division: Division) -> Effects:
        """Start a step: forget the last one, and process shares that arrived before it.

        Raises:
            OutOfTurn: The step is not a later one; a step is repeated in another attempt.
        """
        if step <= self._step:
            raise OutOfTurn(f"all-reduce of step {step} in this attempt: {self._step} has begun")
        self._step, self._spans, self._givers = step, division.spans, division.givers
        for pieces in (self._encoded, self._shares, self._done):
            pieces.clear()
        self._to_encode = {i: deque() for i in range(self._num_members)}
        self._open_shares = {i: set() for i in range(self._num_members)}
        for span in self._spans if self._gives else ():
            self._to_encode[span.owner].append(span)
        effects: Effects = []
        for member, other in self._others.items():
            for piece in other.begin():
                effects += self._early(member, piece)
        return effects + self._encode_more()

    def encoded(self, span: PieceSpan, tensor: EncodedTensor) -> Effects:
        """Record the encoded share of this member."""
        self._encoded.add(span.index)
        if span.owner == self._own:
            return self._keep_share(self._own, span, tensor)
        return self._put(span.owner, Phase.SHARE, span.index, tensor)

    def summed(self, span: PieceSpan, tensor: EncodedTensor) -> Effects:
        """Record the encoded sum of a piece of the own shard, which goes out to all."""
        self._done.add(span.index)
        del self._shares[span.index]
        self._open_shares[self._own].discard(span.index)
        effects: Effects = []
        for member, other in self._others.items():
            other.shares.discard(span.index)
            if member in self._givers:
                effects.append(TransmitPiece(member, PieceAck(self._key(Phase.SHARE, span.index))))
            effects += self._put(member, Phase.SUM, span.index, tensor)
        return effects + self._encode_more()

    def share_refused(self, span: PieceSpan, member: int) -> None:
        """Record that a member's share cannot be decoded; it arrives again over its next stream."""
        del self._shares[span.index][member]
        self._others[member].shares.discard(span.index)

    def taken(self, span: PieceSpan) -> Effects:
        """Record that the sum of a piece is in the result."""
        self._others[span.owner].sums.discard(span.index)
        self._done.add(span.index)
        return [TransmitPiece(span.owner, PieceAck(self._key(Phase.SUM, span.index)))]

    def sum_refused(self, span: PieceSpan) -> None:
        """Record that the sum of a piece cannot be decoded; it arrives again over the next one."""
        self._others[span.owner].sums.discard(span.index)

    # ---- events of the streams

    def connected(self, member: int) -> Effects:
        """Record that a stream to a member is up; return the pieces that it did not acknowledge."""
        boxes = self._others[member].outboxes.values()
        return [
            TransmitPiece(member, piece) for box in boxes for piece in box.connected(WINDOW_PIECES)
        ]

    def disconnected(self, member: int) -> None:
        """Record that the stream is gone: pieces wait, and early ones arrive again."""
        self._others[member].early.clear()
        for box in self._others[member].outboxes.values():
            box.disconnected()

    def receive(self, member: int, message: PieceMessage) -> Effects:
        """Process a message of a member.

        Raises:
            OutOfTurn: The message is not allowed now; the stream should be dropped.
            BadFrame: The piece has another shape than its span.
        """
        match message:
            case GradientPiece(key) if key.attempt != self._attempt or key.step < self._step:
                return []
            case GradientPiece(key) if key.step > self._step:
                return self._hold(member, message)
            case GradientPiece(key) if key.phase is Phase.SHARE:
                return self._share(member, message)
            case GradientPiece():
                return self._sum(member, message)
            case PieceAck(key):
                return self._acknowledge(member, key)

    def _hold(self, member: int, piece: GradientPiece) -> Effects:
        # Another member may begin a step before we do; its windows bound how far it can go. A sum
        # is early only where this member listens, since otherwise it needs this member's share.
        early, phase = self._others[member].early, piece.key.phase
        num_early = sum(key.phase is phase for key in early)
        if num_early >= WINDOW_PIECES and piece.key not in early:
            raise OutOfTurn(
                f"more than {WINDOW_PIECES} {phase.name.lower()}s arrived before their step began"
            )
        early[piece.key] = piece
        return []

    def _early(self, member: int, piece: GradientPiece) -> Effects:
        # The error becomes an effect: `begin` must not fail for another member's message.
        try:
            return self.receive(member, piece)
        except ProtocolError as error:
            return [BreakOff(member, error)]

    def _share(self, member: int, piece: GradientPiece) -> Effects:
        span, shares = self._span(self._own, piece), self._others[member].shares
        if member not in self._givers:
            raise OutOfTurn(f"got a share of step {self._step} from a member that listens")
        if span.index in self._done:
            return [TransmitPiece(member, PieceAck(piece.key))]
        if span.index in shares:
            return []
        _check_window(shares, "shares")
        shares.add(span.index)
        return self._keep_share(member, span, piece.tensor)

    def _keep_share(self, member: int, span: PieceSpan, tensor: EncodedTensor) -> Effects:
        shares = self._shares.setdefault(span.index, {})
        shares[member] = tensor
        if len(shares) < len(self._givers):
            return []
        return [SumShares(span, {i: shares[i] for i in self._givers})]

    def _sum(self, member: int, piece: GradientPiece) -> Effects:
        span, decoding = self._span(member, piece), self._others[member].sums
        if span.index in self._done:
            return [TransmitPiece(member, PieceAck(piece.key))]
        if span.index in decoding:
            return []
        if self._gives and span.index not in self._encoded:
            raise OutOfTurn(f"got the sum of piece {span.index} before this member sent its share")
        _check_window(decoding, "sums")
        decoding.add(span.index)
        return [TakeSum(span, piece.tensor)]

    def _span(self, owner: int, piece: GradientPiece) -> PieceSpan:
        index, tensor = piece.key.piece, piece.tensor
        if index >= len(self._spans) or self._spans[index].owner != owner:
            shard = [span.index for span in self._spans if span.owner == owner]
            expected = f"{shard[0]} to {shard[-1]}" if shard else "none"
            raise OutOfTurn(f"{piece.key.phase.name} of piece {index}: expected {expected}")
        span = self._spans[index]
        if (tensor.tokens, tensor.channels) != (span.rows, ROW_VALUES):
            raise BadFrame(
                f"piece {index}: expected {span.rows} x {ROW_VALUES} values, "
                f"got {tensor.tokens} x {tensor.channels}"
            )
        return span

    def _acknowledge(self, member: int, key: PieceKey) -> Effects:
        pieces = self._others[member].outboxes[key.phase].acknowledge(key)
        if key.phase is Phase.SHARE and (key.attempt, key.step) == (self._attempt, self._step):
            self._open_shares[member].discard(key.piece)
        return [*(TransmitPiece(member, piece) for piece in pieces), *self._encode_more()]

    def _put(self, member: int, phase: Phase, index: int, tensor: EncodedTensor) -> Effects:
        piece = GradientPiece(self._key(phase, index), tensor)
        pieces = self._others[member].outboxes[phase].put(piece.key, piece)
        return [TransmitPiece(member, piece) for piece in pieces]

    def _encode_more(self) -> Effects:
        """Return effects that encode shares for all members in turn, within their windows."""
        effects: Effects = []
        behind = [(self._own + i) % self._num_members for i in range(1, self._num_members + 1)]
        while ready := [member for member in behind if self._has_room(member)]:
            for member in ready:
                span = self._to_encode[member].popleft()
                self._open_shares[member].add(span.index)
                effects.append(EncodeShare(span))
        return effects

    def _has_room(self, member: int) -> bool:
        return bool(self._to_encode[member]) and len(self._open_shares[member]) < WINDOW_PIECES

    def _key(self, phase: Phase, index: int) -> PieceKey:
        return PieceKey(self._attempt, self._step, phase, index, self._scope)


def _check_window(pieces: set[int], what: str) -> None:
    if len(pieces) >= WINDOW_PIECES:
        raise OutOfTurn(f"more than {WINDOW_PIECES} {what} arrived that were not acknowledged")
