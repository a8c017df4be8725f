"""How the two ends of a boundary meet: upstream dials, downstream answers, both check hellos."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial

from torch import Tensor

from swarm_ft import failpoints
from swarm_ft.clock import Clock
from swarm_ft.discovery.directory import Directory
from swarm_ft.errors import BadFrame, OutOfTurn, RunMismatch
from swarm_ft.ids import BlockIndex, PeerId, StepNumber
from swarm_ft.log import get_logger
from swarm_ft.peer.boundary.coder import FrameCoder, Refusal, uncompressed_bytes
from swarm_ft.peer.links.dialling import Redialler
from swarm_ft.peer.links.stream_slot import StreamSlot, Work
from swarm_ft.peer.timeline import Timeline
from swarm_ft.protocol.machines.session import (
    WINDOW_FRAMES,
    BoundarySession,
    Deliver,
    Reencode,
    SessionEffect,
    Transmit,
)
from swarm_ft.protocol.messages.boundary import (
    Ack,
    BoundaryHello,
    BoundaryMessage,
    Frame,
    FrameKey,
    FrameKind,
    KeyFrameRequest,
)
from swarm_ft.protocol.messages.reports import Traffic
from swarm_ft.protocol.messages.timeline import SpanKind
from swarm_ft.protocol.spec.codec_spec import Direction
from swarm_ft.protocol.wire.frames import frame_wire_bytes
from swarm_ft.transport.base import Channel, MessageStream, Transport
from swarm_ft.transport.methods import BOUNDARY

# ---- one end of a boundary at work: its session on a stream, its coder in the codec threads
#
# The session decides, the coder computes; this shell only moves things between them. Streams may
# break and be replaced under it; what belongs to an older step is dropped on the way.

logger = get_logger(__name__)

BoundaryStream = MessageStream[BoundaryMessage, BoundaryMessage]
Outgoing = asyncio.Queue[Frame | Ack | KeyFrameRequest]


class Boundary:
    """See the module's docstring.

    Args:
        hello: what this side says first; its `received` is filled in at every connection.
        session: the protocol's state, new for this attempt.
        coder: the arithmetic, with this end's buffers.
        pool: the codec threads.
        deliver: called with every decoded sample.
        timeline: told when frames are sent and received.
    """

    def __init__(
        self,
        hello: BoundaryHello,
        *,
        session: BoundarySession,
        coder: FrameCoder,
        pool: Executor,
        deliver: Callable[[FrameKey, Tensor], None],
        timeline: Timeline,
    ) -> None:
        self.connected = asyncio.Event()
        self._hello = hello
        self._session = session
        self._coder = coder
        self._pool = pool
        self._deliver = deliver
        self._timeline = timeline
        self._encode_jobs: asyncio.Queue[FrameKey | Frame] = asyncio.Queue()
        self._decode_jobs: asyncio.Queue[Frame] = asyncio.Queue()
        self._outgoing: Outgoing | None = None
        self._slot = StreamSlot(
            f"boundary {hello.boundary}", opened=self.connected.set, closed=self._closed
        )
        self._expected: frozenset[FrameKey] = frozenset()
        self._unencoded: dict[FrameKey, Tensor] = {}
        self._changed = asyncio.Event()
        self._step = StepNumber(-1)
        self._traffic = Traffic(boundary=hello.boundary)

    @property
    def hello(self) -> BoundaryHello:
        """The first message of this side, as of now."""
        return replace(self._hello, received=self._session.received)

    # ---- a step

    def begin(self, step: StepNumber, expected: frozenset[FrameKey]) -> None:
        """Start a step in which exactly the `expected` frames may arrive."""
        self._step = step
        self._expected = expected
        self._unencoded.clear()
        self._apply(self._session.begin(step))

    def send(self, key: FrameKey, x: Tensor | Frame) -> None:
        """Encode and send one sample's tensor, float32 [tokens, channels], soon.

        Args:
            key: the frame's name.
            x: the tensor, or the frame that it became in an earlier attempt at the step.
        """
        if isinstance(x, Frame):
            self._apply(self._session.send(replace(x, key=key)))
        else:
            self._unencoded[key] = x
            self._encode_jobs.put_nowait(key)

    def sent(self) -> Iterator[tuple[FrameKey, Tensor | Frame]]:
        """What `send` was given in this step, encoded if it is by now."""
        yield from self._unencoded.items()
        yield from ((frame.key, frame) for frame in self._session.sent)

    async def settled(self) -> None:
        """Wait until the other side has everything that was sent in this step."""
        while self._unencoded or not self._session.is_settled:
            self._changed.clear()
            await self._changed.wait()

    def take_traffic(self) -> Traffic:
        """What was sent since the last call."""
        taken, self._traffic = self._traffic, Traffic(boundary=self._hello.boundary)
        return taken

    # ---- work

    async def run(self) -> None:
        """Encode and decode until cancelled.

        Raises:
            ExceptionGroup: of NonFinite, if a tensor to send is not finite; of ProtocolError, if
                the neighbour's streams were broken off too often.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._encode())
            group.create_task(self._decode())
            group.create_task(self._slot.watch())

    async def _encode(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            job = await self._encode_jobs.get()
            key = job.key if isinstance(job, Frame) else job
            if key.step != self._step:
                continue
            if isinstance(job, Frame):
                encode = partial(self._coder.encode_again, job)
            else:
                encode = partial(self._coder.encode, job, self._unencoded[job])
            frame = await loop.run_in_executor(self._pool, encode)
            if key.step == self._step:
                self._unencoded.pop(key, None)
                self._apply(self._session.send(frame))

    async def _decode(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            frame = await self._decode_jobs.get()
            try:
                value = await loop.run_in_executor(self._pool, self._coder.decode, frame)
            except BadFrame as error:
                self._session.dropped(frame.key)
                self._slot.break_off(error)
                continue
            if isinstance(value, Refusal):
                logger.warning("boundary %d: %s", self._hello.boundary, value.reason)
                self._apply(self._session.refused(frame.key, value.reason))
            elif frame.key.step == self._step:
                self._apply(self._session.accepted(frame.key))
                self._deliver(frame.key, value)

    def _apply(self, effects: list[SessionEffect]) -> None:
        for effect in effects:
            match effect:
                case Transmit(message):
                    self._transmit(message)
                case Deliver(frame) if frame.key in self._expected:
                    self._decode_jobs.put_nowait(frame)
                case Deliver(frame):
                    # Not raised: it may have come before its step, and `begin` must not fail.
                    self._session.dropped(frame.key)
                    self._slot.break_off(
                        BadFrame(f"frame {frame.key} is not part of the step's plan")
                    )
                case Reencode(frame, reason):
                    logger.warning("boundary %d: key frame for %s", self._hello.boundary, reason)
                    self._encode_jobs.put_nowait(frame)
        self._changed.set()

    def _transmit(self, message: Frame | Ack | KeyFrameRequest) -> None:
        if self._outgoing is None:
            return  # the hellos of the next stream make up for it
        try:
            self._outgoing.put_nowait(message)
        except asyncio.QueueFull:
            self._slot.break_off(
                OutOfTurn("the neighbour sends, but does not read what it is answered")
            )

    # ---- streams

    async def serve(self, stream: BoundaryStream, hello: BoundaryHello) -> None:
        """Work on a stream whose hellos were exchanged, until it ends; replaces an older one.

        Raises:
            SwarmError: why the stream ended.
        """
        await self._slot.serve(stream, partial(self._begin, stream, hello))

    def _begin(self, stream: BoundaryStream, hello: BoundaryHello) -> Work:
        # What one side has in flight and the other's answers to it; more means it does not read.
        self._outgoing = asyncio.Queue(hello.window_frames + WINDOW_FRAMES)
        self._apply(self._session.connected(hello))
        return self._write(stream, self._outgoing), self._read(stream)

    def _closed(self) -> None:
        self._outgoing = None
        self.connected.clear()
        self._session.disconnected()

    async def _write(self, stream: BoundaryStream, outgoing: Outgoing) -> None:
        while True:
            message = await outgoing.get()
            if isinstance(message, Frame):
                failpoints.reached_meanwhile("mid-frame")
            begin_s = self._timeline.now_s()
            await stream.send(message)
            if isinstance(message, Frame):
                failpoints.reached("before-ack")
                counted = count_frame(self._hello.boundary, message, frame_wire_bytes(message))
                self._traffic = self._traffic + counted
                self._moved(SpanKind.SEND, message, begin_s)

    async def _read(self, stream: BoundaryStream) -> None:
        while (said := await stream.receive()) is not None:
            begin_s = self._timeline.now_s()
            if isinstance(said, Frame):
                self._coder.check(said)  # before the session holds it: that bounds its memory
            self._apply(self._session.receive(said))
            if isinstance(said, Frame):
                self._moved(SpanKind.RECEIVE, said, begin_s)

    def _moved(self, kind: SpanKind, frame: Frame, begin_s: float) -> None:
        boundary, num_bytes = self._hello.boundary, len(frame.tensor.payload)
        self._timeline.add_frame(kind, frame.key, begin_s, boundary, num_bytes)


def count_frame(boundary: BlockIndex, frame: Frame, wire_bytes: int) -> Traffic:
    """One sent frame as traffic; `wire_bytes` are all of its message."""
    plain = uncompressed_bytes(frame.tensor)
    if frame.key.direction is Direction.BACKWARD:
        return Traffic(
            boundary=boundary, backward_bytes=wire_bytes, backward_uncompressed_bytes=plain
        )
    is_delta = frame.kind is FrameKind.DELTA
    return Traffic(
        boundary=boundary,
        forward_bytes=wire_bytes,
        forward_uncompressed_bytes=plain,
        key_frames=0 if is_delta else 1,
        delta_frames=1 if is_delta else 0,
    )


async def receive_hello(stream: BoundaryStream) -> BoundaryHello:
    """The other side's first message.

    Raises:
        OutOfTurn: it is something else.
    """
    hello = await stream.receive()
    if not isinstance(hello, BoundaryHello):
        raise OutOfTurn(f"{stream.remote}: expected a hello as the first message")
    return hello


def check_hello(ours: BoundaryHello, theirs: BoundaryHello, expected_peer: PeerId) -> None:
    """Whether the other side speaks of the same boundary of the same run.

    Raises:
        RunMismatch: it works by another RunSpec.
        OutOfTurn: it is not the neighbour, or at another boundary or attempt.
    """
    if theirs.spec_digest != ours.spec_digest:
        raise RunMismatch(
            f"run {ours.run_id}: RunSpec digest {ours.spec_digest.hex()} here, "
            f"{theirs.spec_digest.hex()} at peer {theirs.peer_id}"
        )
    mine = (ours.run_id, ours.boundary, ours.attempt, expected_peer)
    got = (theirs.run_id, theirs.boundary, theirs.attempt, theirs.peer_id)
    if mine != got:
        raise OutOfTurn(f"boundary: expected run, boundary, attempt, peer {mine}, got {got}")


async def answer(boundary: Boundary, stream: BoundaryStream, theirs: BoundaryHello) -> None:
    """Downstream: serve a stream whose hello was checked, until it ends."""
    await stream.send(boundary.hello)
    await boundary.serve(stream, theirs)


def dialler(
    boundary: Boundary,
    peer_id: PeerId,
    *,
    directory: Directory,
    transport: Transport,
    clock: Clock,
) -> Redialler:
    """Upstream: what keeps a boundary connected to the peer behind it."""
    converse = partial(_converse, boundary, peer_id)
    return Redialler(peer_id, converse, directory=directory, transport=transport, clock=clock)


async def _converse(
    boundary: Boundary, peer_id: PeerId, channel: Channel, greeted: Callable[[], None]
) -> None:
    stream = channel.open(BOUNDARY)
    ours = boundary.hello
    await stream.send(ours)
    theirs = await receive_hello(stream)
    check_hello(ours, theirs, peer_id)
    logger.debug("boundary %d: connected to %s", ours.boundary, peer_id)
    greeted()
    await boundary.serve(stream, theirs)
