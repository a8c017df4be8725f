"""Both ends of a boundary over streams that break at any moment; hypothesis picks the events.

Ends behave like the shell in `peer.boundary`: one decoder and one encoder each, in order. Messages
without a stream are lost. Each end notices a broken stream in its own time.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, repeat
from typing import TypeVar

from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_ft.codec.spec import Axis, CodecName, CodecSpec, Direction
from swarm_ft.codec.tensor import EncodedTensor
from swarm_ft.ids import Attempt, BlockIndex, MicrobatchIndex, PeerId, RunId, SampleId, StepNumber
from swarm_ft.protocol.machines.session import BoundarySession, Deliver, Effects, Reencode, Transmit
from swarm_ft.protocol.messages.boundary import (
    Ack,
    BoundaryHello,
    Frame,
    FrameKey,
    FrameKind,
    KeyFrameRequest,
    SessionMessage,
)
from tests.draws import draws

T = TypeVar("T")

ATTEMPT = Attempt(3)
WINDOW = 3
FRAMES_A_STEP = 5
EVENTS = 300
TENSOR = EncodedTensor(CodecSpec(CodecName.Q, 400, Axis.CHANNEL), 1, 1, b"")


class Stream:
    """A connection: two queues, and each side's first message."""

    def __init__(self, ends: tuple[End, End]) -> None:
        self.is_broken = False
        self.to: dict[Direction, deque[SessionMessage]] = {end.sends: deque() for end in ends}
        self.hello_to = {ends[0].sends: ends[1].hello(), ends[1].sends: ends[0].hello()}

    def break_off(self) -> None:
        self.is_broken = True
        for queue in self.to.values():
            queue.clear()


class End:
    """An end with its open tasks and a record of its events."""

    def __init__(self, sends: Direction) -> None:
        self.sends = sends
        self.session = BoundarySession(attempt=ATTEMPT, sends=sends)
        self.step = StepNumber(-1)
        self.stream: Stream | None = None
        self.unsent: deque[int] = deque()
        self.decode_jobs: deque[Frame] = deque()
        self.encode_jobs: deque[Frame] = deque()
        self.refuses: dict[FrameKey, bool] = {}
        self.accepted: Counter[FrameKey] = Counter()
        self.reencoded: Counter[FrameKey] = Counter()
        self.unacknowledged: set[FrameKey] = set()
        self.transmitted_kind: dict[FrameKey, FrameKind] = {}

    def key(self, sample: int) -> FrameKey:
        return FrameKey(
            ATTEMPT, self.step, MicrobatchIndex(sample // 2), SampleId(sample), self.sends
        )

    def hello(self) -> BoundaryHello:
        return BoundaryHello(
            run_id=RunId("run"),
            spec_digest=b"d" * 16,
            boundary=BlockIndex(1),
            peer_id=PeerId(self.sends.name),
            attempt=ATTEMPT,
            window_frames=WINDOW,
            received=self.session.received,
        )

    def begin(self) -> None:
        self.step = StepNumber(self.step + 1)
        self.unsent.extend(range(FRAMES_A_STEP))
        self.unacknowledged.clear()
        self.apply(self.session.begin(self.step))

    def attach(self, stream: Stream) -> None:
        self.session.disconnected()
        self.stream = stream
        self.unacknowledged.clear()
        self.apply(self.session.connected(stream.hello_to[self.sends]))

    def detach(self) -> None:
        self.stream = None
        self.session.disconnected()

    def send(self, kind: FrameKind) -> None:
        sample = self.unsent.popleft()
        self.apply(self.session.send(Frame(self.key(sample), kind, TENSOR)))

    def receive(self, message: SessionMessage) -> None:
        if isinstance(message, (Ack, KeyFrameRequest)):
            self.unacknowledged.discard(message.key)
        self.apply(self.session.receive(message))

    def decode(self) -> None:
        frame = self.decode_jobs.popleft()
        if frame.kind is FrameKind.DELTA and self.refuses.get(frame.key):
            self.apply(self.session.refused(frame.key, "no base"))
        elif frame.key.step == self.step:
            self.accepted[frame.key] += 1
            self.apply(self.session.accepted(frame.key))

    def reencode(self) -> None:
        frame = self.encode_jobs.popleft()
        if frame.key.step == self.step:
            self.apply(self.session.send(Frame(frame.key, FrameKind.KEY, TENSOR)))

    def apply(self, effects: Effects) -> None:
        for effect in effects:
            match effect:
                case Transmit(message):
                    self.transmit(message)
                case Deliver(frame):
                    self.decode_jobs.append(frame)
                case Reencode(frame):
                    self.reencoded[frame.key] += 1
                    self.encode_jobs.append(frame)

    def transmit(self, message: SessionMessage) -> None:
        if self.stream is None:
            return
        if isinstance(message, Frame):
            assert message.key not in self.unacknowledged, "sent twice on one stream"
            self.unacknowledged.add(message.key)
            was = self.transmitted_kind.setdefault(message.key, message.kind)
            assert (was, message.kind) != (FrameKind.KEY, FrameKind.DELTA), "a refused delta again"
            self.transmitted_kind[message.key] = message.kind
        if not self.stream.is_broken:
            other = Direction.BACKWARD if self.sends is Direction.FORWARD else Direction.FORWARD
            self.stream.to[other].append(message)

    def has_all_of(self, other: End) -> bool:
        return all(self.accepted[other.key(sample)] for sample in range(FRAMES_A_STEP))

    def is_done(self, other: End) -> bool:
        return not self.unsent and self.session.is_settled and self.has_all_of(other)


class Simulation:
    """Any order of events that honest ends and bad streams can cause; `choices` picks."""

    def __init__(self, choices: bytes) -> None:
        self.ends = (End(Direction.FORWARD), End(Direction.BACKWARD))
        self.stream: Stream | None = None
        self.choices = chain(choices, repeat(0))

    def pick(self, options: Sequence[T]) -> T:
        return options[next(self.choices) % len(options)]

    def run(self) -> None:
        for _ in range(EVENTS):
            self.pick(self.possible())()
            self.check()

    def check(self) -> None:
        for end in self.ends:
            assert len(end.unacknowledged) <= WINDOW
            assert all(count <= 1 for count in end.accepted.values())
            assert all(count <= 1 for count in end.reencoded.values())

    def possible(self) -> list[Callable[[], None]]:
        """Return the possible events; an event that is listed twice is more likely."""
        up = self.stream if self.stream is not None and not self.stream.is_broken else None
        events = [up.break_off] if up is not None else 3 * [self.dial]
        for end, other in (self.ends, self.ends[::-1]):
            events += self.possible_at(end, other, up)
        return events

    def possible_at(self, end: End, other: End, up: Stream | None) -> list[Callable[[], None]]:
        events: list[Callable[[], None]] = []
        if self.may_begin(end, other):
            events.append(end.begin)
        if up is not None and end.stream is not up:
            events += 3 * [partial(end.attach, up)]
        if end.stream and end.stream.is_broken:
            events.append(end.detach)
        if end.unsent:
            events += 3 * [partial(self.send, end, other)]
        if end.stream and end.stream.to[end.sends]:
            events += 6 * [partial(self.deliver, end)]
        if end.decode_jobs:
            events += 4 * [end.decode] + [partial(self.fail_to_decode, end)]
        if end.encode_jobs:
            events += 3 * [end.reencode]
        return events

    def may_begin(self, end: End, other: End) -> bool:
        """Return whether the coordinator may plan a step: both ends have finished the last one."""
        if end.step == -1 or other.step > end.step:
            return True
        return end.step == other.step and end.is_done(other) and other.is_done(end)

    def dial(self) -> None:
        self.stream = Stream(self.ends)

    def send(self, end: End, other: End) -> None:
        kind = self.pick([FrameKind.DELTA, FrameKind.DELTA, FrameKind.KEY, FrameKind.DIRECT])
        other.refuses[end.key(end.unsent[0])] = self.pick([True, False])
        end.send(kind)

    def deliver(self, end: End) -> None:
        assert end.stream is not None
        message = end.stream.to[end.sends].popleft()
        for _ in range(self.pick([1, 1, 1, 2])):
            end.receive(message)

    def fail_to_decode(self, end: End) -> None:
        """Fail to decode a broken frame, so that its end drops the stream."""
        end.session.discarded(end.decode_jobs.popleft().key)
        if end.stream:
            end.stream.break_off()
            end.detach()

    def finish(self) -> None:
        """Finish with a stream that stays up, over which all messages arrive."""
        for end, other in (self.ends, self.ends[::-1]):
            if end.step < other.step:
                end.begin()
        if self.stream is None or self.stream.is_broken:
            self.dial()
        for _ in range(20 * FRAMES_A_STEP):
            for end, other in (self.ends, self.ends[::-1]):
                self.go_on(end, other)
            self.check()
        for end, other in (self.ends, self.ends[::-1]):
            assert end.step == -1 or end.is_done(other)
            assert not end.unacknowledged

    def go_on(self, end: End, other: End) -> None:
        assert self.stream is not None
        if end.stream is not self.stream:
            end.attach(self.stream)
        if end.unsent:
            self.send(end, other)
        if self.stream.to[end.sends]:
            self.deliver(end)
        if end.decode_jobs:
            end.decode()
        if end.encode_jobs:
            end.reencode()


@given(st.binary(min_size=400, max_size=400))
@settings(derandomize=True, deadline=None, max_examples=draws(300))
def test_every_frame_is_accepted_once_and_within_the_window_whatever_streams_do(
    choices: bytes,
) -> None:
    simulation = Simulation(choices)
    simulation.run()
    simulation.finish()
