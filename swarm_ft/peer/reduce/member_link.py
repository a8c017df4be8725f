"""The stream between this replica and another one: one at a time, replaced when a newer one comes.

Knows messages and how streams end; what messages mean is the all-reduce's to know.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count

from swarm_ft import failpoints
from swarm_ft.errors import OutOfTurn, RunMismatch, SwarmError
from swarm_ft.ids import PeerId
from swarm_ft.peer.links.stream_slot import StreamSlot, Work
from swarm_ft.protocol.machines.all_reduce import WINDOW_PIECES
from swarm_ft.protocol.messages.reduction import GradientPiece, PieceAck, ReduceHello, ReduceMessage
from swarm_ft.protocol.wire.frames import piece_wire_bytes
from swarm_ft.transport.base import MessageStream

ReduceStream = MessageStream[ReduceMessage, ReduceMessage]
_Outgoing = asyncio.PriorityQueue[tuple[bool, int, GradientPiece | PieceAck]]

_MAX_OUTGOING = 4 * WINDOW_PIECES
"""Shares and sums on their way, and acknowledgements of the other side's."""


async def receive_reduce_hello(stream: ReduceStream) -> ReduceHello:
    """The other side's first message.

    Raises:
        OutOfTurn: it is something else.
    """
    hello = await stream.receive()
    if not isinstance(hello, ReduceHello):
        raise OutOfTurn(f"{stream.remote}: expected a hello as the first message")
    return hello


def check_reduce_hello(ours: ReduceHello, theirs: ReduceHello, expected_peer: PeerId) -> None:
    """Whether the other side is that replica, of the same stage in the same attempt of the run.

    Raises:
        RunMismatch: it works by another RunSpec, or its gradient has another length.
        OutOfTurn: it is another peer, or at another stage or attempt.
    """
    if theirs.spec_digest != ours.spec_digest:
        raise RunMismatch(
            f"run {ours.run_id}: RunSpec digest {ours.spec_digest.hex()} here, "
            f"{theirs.spec_digest.hex()} at peer {theirs.peer_id}"
        )
    mine = (ours.run_id, str(ours.layers), ours.attempt, expected_peer)
    got = (theirs.run_id, str(theirs.layers), theirs.attempt, theirs.peer_id)
    if mine != got:
        raise OutOfTurn(f"all-reduce: expected run, layers, attempt, peer {mine}, got {got}")
    lengths = {hello.num_values for hello in (ours, theirs) if hello.num_values}
    if len(lengths) > 1:
        raise RunMismatch(
            f"run {ours.run_id}, layers {ours.layers}: gradients have {ours.num_values} values "
            f"here, {theirs.num_values} at peer {theirs.peer_id}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkEvents:
    """What a link tells of.

    Attributes:
        connected: a stream is up.
        disconnected: it is gone.
        received: a message came in; a SwarmError that this raises ends the stream.
        sent: a piece goes out, in a message of so many bytes.
    """

    connected: Callable[[], None]
    disconnected: Callable[[], None]
    received: Callable[[ReduceMessage], None]
    sent: Callable[[GradientPiece, int], None]


class MemberLink:
    """See the module's docstring."""

    def __init__(self, peer_id: PeerId, events: LinkEvents) -> None:
        self._events = events
        self._order = count()
        self._outgoing: _Outgoing | None = None
        self._slot = StreamSlot(f"replica {peer_id}", opened=events.connected, closed=self._closed)

    @property
    def is_up(self) -> bool:
        """Whether a stream is up."""
        return self._outgoing is not None

    async def watch(self) -> None:
        """Wait until cancelled; then no stream is served any more.

        Raises:
            ProtocolError: the other member's streams were broken off too often.
        """
        await self._slot.watch()

    async def serve(self, stream: ReduceStream) -> None:
        """Work on a stream whose hellos were exchanged, until it ends; replaces an older one.

        Raises:
            SwarmError: why the stream ended.
        """
        await self._slot.serve(stream, partial(self._begin, stream))

    def say(self, message: GradientPiece | PieceAck) -> None:
        """Send soon, acknowledgements first; lost if no stream is up."""
        if self._outgoing is None:
            return
        try:
            is_piece = isinstance(message, GradientPiece)
            self._outgoing.put_nowait((is_piece, next(self._order), message))
        except asyncio.QueueFull:
            self.break_off(OutOfTurn("the member sends, but does not read what it is answered"))

    def break_off(self, error: SwarmError) -> None:
        """End the present stream, if there is one."""
        self._slot.break_off(error)

    def _begin(self, stream: ReduceStream) -> Work:
        self._outgoing = asyncio.PriorityQueue(_MAX_OUTGOING)
        return self._write(stream, self._outgoing), self._read(stream)

    def _closed(self) -> None:
        self._outgoing = None
        self._events.disconnected()

    async def _write(self, stream: ReduceStream, outgoing: _Outgoing) -> None:
        while True:
            _, _, message = await outgoing.get()
            if isinstance(message, GradientPiece):  # told first: its answer may come at once
                self._events.sent(message, piece_wire_bytes(message))
            await stream.send(message)
            if isinstance(message, GradientPiece):
                failpoints.reached("mid-reduce")

    async def _read(self, stream: ReduceStream) -> None:
        while (message := await stream.receive()) is not None:
            self._events.received(message)
