"""Both ends of a boundary over streams that break at any moment; hypothesis picks the events.

Ends behave as the shell in `peer.boundary` does: one decoder and one encoder each, in order;
what is said while no stream is up is lost; each end notices a broken stream in its own time.
"""

from collections import Counter, deque
from functools import partial
from itertools import chain, repeat

from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_ft.protocol.machines.session import BoundarySession, Deliver, Reencode, Transmit
from swarm_ft.protocol.messages.boundary import (
    Ack,
    BoundaryHello,
    EncodedTensor,
    Frame,
    FrameKey,
    FrameKind,
    KeyFrameRequest,
)
from swarm_ft.protocol.spec.codec_spec import Axis, CodecName, CodecSpec, Direction

ATTEMPT = 3
WINDOW = 3
FRAMES_A_STEP = 5
EVENTS = 300
TENSOR = EncodedTensor(CodecSpec(CodecName.Q, 400, Axis.CHANNEL), 1, 1, b"")


class Stream:
    """One connection: two queues, and what either side said first."""

    def __init__(self, ends):
        self.is_broken = False
        self.to = {end.sends: deque() for end in ends}
        self.hello_to = {ends[0].sends: ends[1].hello(), ends[1].sends: ends[0].hello()}

    def break_off(self):
        self.is_broken = True
        for queue in self.to.values():
            queue.clear()


class End:
    """One end, with the work it was given and the record of what it saw."""

    def __init__(self, sends):
        self.sends = sends
        self.session = BoundarySession(attempt=ATTEMPT, sends=sends)
        self.step = -1
        self.stream = None
        self.unsent = deque()
        self.decode_jobs = deque()
        self.encode_jobs = deque()
        self.refuses = {}
        self.accepted = Counter()
        self.reencoded = Counter()
        self.unacknowledged = set()
        self.transmitted_kind = {}

    def key(self, sample):
        return FrameKey(ATTEMPT, self.step, sample // 2, sample, self.sends)

    def hello(self):
        return BoundaryHello(
            run_id="run",
            spec_digest=b"d" * 16,
            boundary=1,
            peer_id=self.sends.name,
            attempt=ATTEMPT,
            window_frames=WINDOW,
            received=self.session.received,
        )

    def begin(self):
        self.step += 1
        self.unsent.extend(range(FRAMES_A_STEP))
        self.unacknowledged.clear()
        self.apply(self.session.begin(self.step))

    def attach(self, stream):
        self.session.disconnected()
        self.stream = stream
        self.unacknowledged.clear()
        self.apply(self.session.connected(stream.hello_to[self.sends]))

    def detach(self):
        self.stream = None
        self.session.disconnected()

    def send(self, kind):
        sample = self.unsent.popleft()
        self.apply(self.session.send(Frame(self.key(sample), kind, TENSOR)))

    def receive(self, message):
        if isinstance(message, (Ack, KeyFrameRequest)):
            self.unacknowledged.discard(message.key)
        self.apply(self.session.receive(message))

    def decode(self):
        frame = self.decode_jobs.popleft()
        if frame.kind is FrameKind.DELTA and self.refuses.get(frame.key):
            self.apply(self.session.refused(frame.key, "no base"))
        elif frame.key.step == self.step:
            self.accepted[frame.key] += 1
            self.apply(self.session.accepted(frame.key))

    def reencode(self):
        frame = self.encode_jobs.popleft()
        if frame.key.step == self.step:
            self.apply(self.session.send(Frame(frame.key, FrameKind.KEY, TENSOR)))

    def apply(self, effects):
        for effect in effects:
            match effect:
                case Transmit(message):
                    self.transmit(message)
                case Deliver(frame):
                    self.decode_jobs.append(frame)
                case Reencode(frame):
                    self.reencoded[frame.key] += 1
                    self.encode_jobs.append(frame)

    def transmit(self, message):
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

    def has_all_of(self, other):
        return all(self.accepted[other.key(sample)] for sample in range(FRAMES_A_STEP))

    def is_done(self, other):
        return not self.unsent and self.session.is_settled and self.has_all_of(other)


class Simulation:
    """Any order of events that honest ends and bad streams can make; `choices` picks."""

    def __init__(self, choices):
        self.ends = (End(Direction.FORWARD), End(Direction.BACKWARD))
        self.stream = None
        self.choices = chain(choices, repeat(0))

    def pick(self, options):
        return options[next(self.choices) % len(options)]

    def run(self):
        for _ in range(EVENTS):
            self.pick(self.possible())()
            self.check()

    def check(self):
        for end in self.ends:
            assert len(end.unacknowledged) <= WINDOW
            assert all(count <= 1 for count in end.accepted.values())
            assert all(count <= 1 for count in end.reencoded.values())

    def possible(self):
        """What can happen now; what is listed more than once is more likely."""
        is_up = self.stream is not None and not self.stream.is_broken
        events = [self.stream.break_off] if is_up else 3 * [self.dial]
        for end, other in (self.ends, self.ends[::-1]):
            events += self.possible_at(end, other, is_up=is_up)
        return events

    def possible_at(self, end, other, *, is_up):
        events = []
        if self.may_begin(end, other):
            events.append(end.begin)
        if is_up and end.stream is not self.stream:
            events += 3 * [partial(end.attach, self.stream)]
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

    def may_begin(self, end, other):
        """The coordinator plans a step when both ends are through with the last one."""
        if end.step == -1 or other.step > end.step:
            return True
        return end.step == other.step and end.is_done(other) and other.is_done(end)

    def dial(self):
        self.stream = Stream(self.ends)

    def send(self, end, other):
        kind = self.pick([FrameKind.DELTA, FrameKind.DELTA, FrameKind.KEY, FrameKind.DIRECT])
        other.refuses[end.key(end.unsent[0])] = self.pick([True, False])
        end.send(kind)

    def deliver(self, end):
        message = end.stream.to[end.sends].popleft()
        for _ in range(self.pick([1, 1, 1, 2])):
            end.receive(message)

    def fail_to_decode(self, end):
        """What arrived is broken, so its end gives up the stream."""
        end.session.dropped(end.decode_jobs.popleft().key)
        if end.stream:
            end.stream.break_off()
            end.detach()

    def finish(self):
        """A stream stays up at last: all that both ends have to say arrives."""
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

    def go_on(self, end, other):
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
@settings(derandomize=True, deadline=None, max_examples=300)
def test_every_frame_is_accepted_once_and_within_the_window_whatever_streams_do(choices):
    simulation = Simulation(choices)
    simulation.run()
    simulation.finish()
