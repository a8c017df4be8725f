"""An end of a boundary: its session on a channel, and its coder in the codec threads.

The session decides and the coder computes; this module moves frames between them. Streams may break
and be replaced meanwhile; frames of an older step are dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial

from torch import Tensor

from swarm_ft.base import failpoints
from swarm_ft.base.log import get_logger
from swarm_ft.codec import side_info_needed
from swarm_ft.codec.side_info import SideInfo
from swarm_ft.codec.spec import Direction
from swarm_ft.digest import check_spec_digest
from swarm_ft.errors import BadFrame, OutOfTurn
from swarm_ft.ids import BlockIndex, PeerId, SampleId, StepNumber
from swarm_ft.peer.boundary.coder import FrameCoder, Refusal
from swarm_ft.peer.boundary.side_info_transfer import SideInfoReceiver, SideInfoSender
from swarm_ft.peer.context import run_in
from swarm_ft.peer.links import LinkChannel, Send
from swarm_ft.peer.timeline import Timeline
from swarm_ft.protocol.machines.session import (
    BoundarySession,
    Deliver,
    Reencode,
    SessionEffect,
    Transmit,
)
from swarm_ft.protocol.messages.boundary import (
    BoundaryHello,
    Frame,
    FrameKey,
    FrameKind,
    FromNeighbour,
    SideInfoPart,
)
from swarm_ft.protocol.messages.reports import Traffic
from swarm_ft.protocol.messages.timeline import SpanKind
from swarm_ft.protocol.spec.run_spec import TrainSpec
from swarm_ft.protocol.wire.frames import wire_bytes

logger = get_logger(__name__)
_FindSideInfo = Callable[[], list[SideInfo]]


class Boundary:
    """An end of a boundary; see the module.

    Args:
        hello: First message of this side; every connection updates its `received`.
        channel: Channel to the other end.
        sends: Direction in which this side sends.
        coder: Encodes and decodes, with this end's buffers.
        pool: Codec threads.
        deliver: Callback for every decoded sample.
        timeline: Recorder of coded, sent and received frames.
        on_consumed: Callback for each held-out sample that the other side has consumed.
    """

    def __init__(  # noqa: PLR0913 - what an attempt shares with its parts, by name
        self,
        hello: BoundaryHello,
        channel: LinkChannel,
        *,
        sends: Direction,
        coder: FrameCoder,
        pool: Executor,
        deliver: Callable[[FrameKey, Tensor], None],
        timeline: Timeline,
        on_consumed: Callable[[FrameKey], None] = lambda _key: None,
    ) -> None:
        self._taken = on_consumed
        self._unconsumed: set[FrameKey] = set()
        self.is_connected = asyncio.Event()
        self._hello = hello
        self._channel = channel
        self._session = BoundarySession(attempt=hello.attempt, sends=sends)
        self._coder = coder
        self._pool = pool
        self._deliver = deliver
        self._timeline = timeline
        # The step's plan bounds the first queue, and the session's window the second.
        self._encode_jobs: asyncio.Queue[FrameKey | Frame | _FindSideInfo] = asyncio.Queue()
        self._decode_jobs: asyncio.Queue[Frame] = asyncio.Queue()
        self._expected: Mapping[FrameKey, int] = {}
        self._unencoded: dict[FrameKey, Tensor] = {}
        self._delivered: dict[FrameKey, Frame | None] = {}
        self._changed = asyncio.Event()
        self._to_send: set[SampleId] = set()
        self._num_unsent = 0
        self._info_sender = SideInfoSender()
        self._info_receiver = SideInfoReceiver(coder.max_side_info_bytes)
        is_above = sends is Direction.BACKWARD
        self._receives_side_info = is_above or coder.has_side_info(Direction.BACKWARD)
        self._step = StepNumber(-1)
        self._traffic = Traffic(boundary=hello.boundary)

    @property
    def hello(self) -> BoundaryHello:
        """First message of this side, as of now."""
        return replace(self._hello, received=self._session.received)

    # ---- a step

    def begin(
        self,
        step: StepNumber,
        expected: Mapping[FrameKey, int],
        train: TrainSpec,
        num_microbatches: int,
    ) -> None:
        """Start a step.

        Args:
            step: Number of the step.
            expected: Keys of the frames that may arrive in the step, with their tokens.
            train: Training options of the run, with the codecs of the step's plan.
            num_microbatches: Microbatches on which the step trains, at all replicas together.
        """
        self._step = step
        self._info_receiver.begin_step()
        self._coder.begin(train, num_microbatches)
        self._expected = expected
        self._unencoded.clear()
        self._unconsumed.clear()
        self._delivered.clear()
        self._apply(self._session.begin(step))
        self._receives_side_info |= self._coder.has_side_info(Direction.BACKWARD)
        # The samples that arrive are also the ones that are sent back, except held-out samples.
        samples = {key.sample for key in expected}
        self._to_send = {key.sample for key in expected if not self._coder.is_held_out(key)}
        self._send_side_info_soon(partial(self._coder.new_side_info, self._session.sends, samples))

    def send(self, key: FrameKey, x: Tensor | Frame) -> None:
        """Queue a sample's tensor, float32 [tokens, channels], to be encoded and sent.

        Args:
            key: Key of the frame.
            x: Tensor, or the frame that an earlier attempt at the step made of it.
        """
        if isinstance(x, Frame):
            self._apply(self._session.send(replace(x, key=key)))
        else:
            self._unencoded[key] = x
            self._encode_jobs.put_nowait(key)
        if key.sample in self._to_send:
            self._to_send.remove(key.sample)
            if not self._to_send:
                self._send_side_info_soon(partial(self._coder.next_side_info, self._session.sends))

    def _send_side_info_soon(self, find: _FindSideInfo) -> None:
        if self._coder.has_side_info(self._session.sends):
            self._num_unsent += 1
            self._encode_jobs.put_nowait(find)

    def acknowledge_consumed(self, key: FrameKey) -> None:
        """Acknowledge a held-out sample once this side has computed with it.

        The sender allows only a few samples without an acknowledgement, so it stays close to this
        side.
        """
        self._apply(self._session.accepted(key))

    def mark_delivered(self, key: FrameKey, x: Tensor) -> None:
        """Record a tensor as sent without sending it; the receiver has it from an earlier attempt.

        The receiver also has the buffer that resulted. This end lost its own copy with the
        unfinished microbatch; encoding the tensor again restores it.
        """
        self._delivered[key] = None
        self.send(key, x)

    def sent(self) -> Iterator[tuple[FrameKey, Tensor | Frame]]:
        """Yield the tensors given to `send` and `hold` in this step, as frames where encoded."""
        yield from self._unencoded.items()
        yield from ((frame.key, frame) for frame in self._session.sent)
        yield from ((key, frame) for key, frame in self._delivered.items() if frame is not None)

    @property
    def peer_id(self) -> PeerId:
        """Peer at the other end."""
        return self._channel.peer_id

    @property
    def is_acknowledged(self) -> bool:
        """Whether the other side has acknowledged everything."""
        return self._session.is_settled

    def lacks(self, keys: Iterable[FrameKey]) -> bool:
        """Whether one of these frames has not arrived yet."""
        return self._session.has_missing(keys)

    async def wait_settled(self) -> None:
        """Wait until the other side has acknowledged everything that was sent in this step.

        The side information for the next step has been sent by then.
        """
        while self._unencoded or self._num_unsent or not self._session.is_settled:
            self._changed.clear()
            await self._changed.wait()

    def take_traffic(self) -> Traffic:
        """Return the traffic since the last call."""
        taken, self._traffic = self._traffic, Traffic(boundary=self._hello.boundary)
        return taken

    # ---- work

    async def run(self) -> None:
        """Stay connected, encode and decode until cancelled.

        Raises:
            ExceptionGroup: `NonFinite` if a tensor to send is not finite; `Unavailable` if the
                neighbour cannot be reached; `ProtocolError` if it broke the protocol too often.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._encode())
            group.create_task(self._decode())
            group.create_task(self._channel.keep_connected(self))

    async def _encode(self) -> None:
        while True:
            job = await self._encode_jobs.get()
            if callable(job):
                await self._send_side_info(job)
                self._num_unsent -= 1
                self._changed.set()
                continue
            key = job.key if isinstance(job, Frame) else job
            if key.step != self._step:
                continue
            if isinstance(job, Frame):
                encode = partial(self._coder.encode_again, job)
            else:
                encode = partial(self._coder.encode, job, self._unencoded[job])
            frame = await run_in(self._pool, self._timed_encode, encode)
            if key.step == self._step:
                self._unencoded.pop(key, None)
                if self._coder.is_held_out(key):
                    self._unconsumed.add(key)
                self._encoded(frame)

    async def _send_side_info(self, find: _FindSideInfo) -> None:
        """Send side information while links are idle, so that no frame has to wait for it.

        The rest of the next step's follows the last frame of this step, since stages are idle while
        the pipeline drains. If a step is the first one that uses it, it is sent before the first
        frame: otherwise the boundaries would wait for it one after the other.
        """
        for info in await run_in(self._pool, find):
            self._send_parts(self._info_sender.whole(info))

    def _encoded(self, frame: Frame) -> None:
        if frame.key in self._delivered:
            self._delivered[frame.key] = frame
            self._changed.set()
            return
        self._apply(self._session.send(frame))
        for info in self._coder.ready_side_info(self._session.sends):
            self._info_sender.begin(info)
        self._send_parts(self._info_sender.part(len(frame.tensor.payload)))

    def _send_parts(self, parts: Iterator[SideInfoPart]) -> None:
        for part in parts:
            self._channel.send(part)

    async def _decode(self) -> None:
        while True:
            frame = await self._decode_jobs.get()
            info = self._info_receiver.get(side_info_needed(frame.tensor))
            try:
                value = await run_in(self._pool, self._timed_decode, frame, info)
            except BadFrame as error:
                self._session.discarded(frame.key)
                self._channel.break_off(error)
                continue
            if isinstance(value, Refusal):
                logger.warning("boundary %d: %s", self._hello.boundary, value.reason)
                self._apply(self._session.refused(frame.key, value.reason))
            elif frame.key.step == self._step:
                if not self._coder.is_held_out(frame.key):
                    self._apply(self._session.accepted(frame.key))
                self._deliver(frame.key, value)

    # These two run in a codec thread: the wait for one is no part of a span.

    def _timed_encode(self, encode: Callable[[], Frame]) -> Frame:
        begin_s = self._timeline.now_s()
        frame = encode()
        self._add_span(SpanKind.ENCODE, frame, begin_s)
        return frame

    def _timed_decode(self, frame: Frame, info: SideInfo | None) -> Tensor | Refusal:
        begin_s = self._timeline.now_s()
        value = self._coder.decode(frame, info)
        self._add_span(SpanKind.DECODE, frame, begin_s)
        return value

    def _apply(self, effects: list[SessionEffect]) -> None:
        for effect in effects:
            match effect:
                case Transmit(message):
                    self._send_side_info_of(message)
                    self._channel.send(message)
                case Deliver(frame) if frame.tensor.tokens == self._expected.get(frame.key):
                    self._decode_jobs.put_nowait(frame)
                case Deliver(frame):
                    # The error is not raised: the frame may be older than its step, and `begin`
                    # must not fail.
                    self._session.discarded(frame.key)
                    self._channel.break_off(self._not_planned(frame))
                case Reencode(frame, reason):
                    logger.warning("boundary %d: key frame for %s", self._hello.boundary, reason)
                    self._encode_jobs.put_nowait(frame)
        self._changed.set()
        for key in [key for key in self._unconsumed if self._session.is_acknowledged(key)]:
            self._unconsumed.discard(key)
            self._session.forget(key)
            self._taken(key)

    def _send_side_info_of(self, message: FromNeighbour) -> None:
        """Send the side information of a frame before the frame, once for each connection."""
        if not isinstance(message, Frame) or not (name := side_info_needed(message.tensor)):
            return
        if not self._info_sender.has_sent(name) and (info := self._coder.side_info_of(message)):
            self._send_parts(self._info_sender.whole(info))

    def _not_planned(self, frame: Frame) -> BadFrame:
        expected, tokens = self._expected.get(frame.key), frame.tensor.tokens
        if expected is None:
            return BadFrame(f"frame {frame.key} is not part of the step's plan")
        return BadFrame(f"frame {frame.key}: expected {expected} tokens, got {tokens}")

    # ---- what the channel calls

    def on_connected(self, hello: BoundaryHello) -> None:
        """Connect the session to the other end; see `ChannelEnd`."""
        ours = self._hello
        if hello.boundary != ours.boundary:
            raise OutOfTurn(f"expected boundary {ours.boundary}, got {hello.boundary}")
        whose = f"peer {hello.peer_id}"
        check_spec_digest(f"run {ours.run_id}", ours.spec_digest, hello.spec_digest, whose)
        logger.debug("boundary %d: connected to %s", ours.boundary, hello.peer_id)
        self.is_connected.set()
        self._info_sender.reconnected()
        self._info_receiver.reconnected()
        self._apply(self._session.connected(hello))

    def on_disconnected(self) -> None:
        """Disconnect the session; see `ChannelEnd`."""
        self.is_connected.clear()
        self._session.disconnected()

    def receive(self, message: FromNeighbour) -> None:
        """Check and handle a message of the other end; see `ChannelEnd`."""
        begin_s = self._timeline.now_s()
        if isinstance(message, SideInfoPart):
            self._receive_side_info(message)
            return
        if isinstance(message, Frame):
            # The check comes before the session stores the frame, and so bounds its memory.
            self._coder.check(message, is_early=message.key.step > self._step)
            self._info_receiver.mark_used(side_info_needed(message.tensor))
        self._apply(self._session.receive(message))
        if isinstance(message, Frame):
            self._add_span(SpanKind.RECEIVE, message, begin_s)

    def _receive_side_info(self, part: SideInfoPart) -> None:
        if not self._receives_side_info:
            raise OutOfTurn(f"boundary {self._hello.boundary}: expected no side information")
        if (data := self._info_receiver.receive(part)) is not None:
            self._info_receiver.keep(self._coder.read_side_info(data))

    async def write(self, message: FromNeighbour, send: Send) -> None:
        """Send a message and count its bytes; see `ChannelEnd`."""
        if isinstance(message, Frame):
            await self._write_frame(message, send)
        elif isinstance(message, SideInfoPart):
            await send(message)
            num_bytes = wire_bytes(message)
            is_forward = self._session.sends is Direction.FORWARD
            self._traffic += Traffic(
                boundary=self._hello.boundary,
                forward_bytes=num_bytes if is_forward else 0,
                backward_bytes=0 if is_forward else num_bytes,
                relayed_bytes=num_bytes if self._channel.is_relayed else 0,
            )
        else:
            await send(message)

    async def _write_frame(self, frame: Frame, send: Send) -> None:
        failpoints.reached_meanwhile("mid-frame")
        begin_s = self._timeline.now_s()
        await send(frame)
        failpoints.reached("before-ack")
        self._traffic += counted(
            self._hello.boundary,
            frame,
            is_relayed=self._channel.is_relayed,
            is_held_out=self._coder.is_held_out(frame.key),
        )
        self._add_span(SpanKind.SEND, frame, begin_s)

    def _add_span(self, kind: SpanKind, frame: Frame, begin_s: float) -> None:
        boundary, num_bytes = self._hello.boundary, len(frame.tensor.payload)
        self._timeline.add_frame(kind, frame.key, begin_s, boundary, num_bytes)


def counted(
    boundary: BlockIndex, frame: Frame, *, is_relayed: bool = False, is_held_out: bool = False
) -> Traffic:
    """Return the traffic of one sent frame."""
    num_bytes, plain = wire_bytes(frame), 4 * frame.tensor.tokens * frame.tensor.channels
    relayed_bytes = num_bytes if is_relayed else 0
    if is_held_out:
        return Traffic(
            boundary=boundary,
            evaluation_bytes=num_bytes,
            evaluation_uncompressed_bytes=plain,
            evaluation_relayed_bytes=relayed_bytes,
        )
    if frame.key.direction is Direction.BACKWARD:
        return Traffic(
            boundary=boundary,
            backward_bytes=num_bytes,
            backward_uncompressed_bytes=plain,
            relayed_bytes=relayed_bytes,
        )
    is_delta = frame.kind is FrameKind.DELTA
    return Traffic(
        boundary=boundary,
        forward_bytes=num_bytes,
        forward_uncompressed_bytes=plain,
        key_frames=int(not is_delta),
        delta_frames=int(is_delta),
        relayed_bytes=relayed_bytes,
    )
