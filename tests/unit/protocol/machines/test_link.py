"""Two ends of a link: channels connect for one attempt alone, in any order of events."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from swarm_ft.codec.spec import Direction
from swarm_ft.errors import OutOfTurn
from swarm_ft.ids import Attempt, BlockIndex, MicrobatchIndex, PeerId, RunId, SampleId, StepNumber
from swarm_ft.protocol.machines.link import (
    Connected,
    Deliver,
    Disconnected,
    Greet,
    LinkEffect,
    LinkMachine,
)
from swarm_ft.protocol.messages.boundary import Ack, BoundaryHello, FrameKey
from swarm_ft.protocol.messages.link import ChannelHello, ChannelKind, ChannelMessage, LinkHello
from swarm_ft.protocol.messages.reduction import Phase, PieceAck, PieceKey, ReduceHello, Scope
from swarm_ft.protocol.spec.layers import LayerRange
from tests.draws import draws

BOUNDARY, REPLICAS, STAGES = ChannelKind
SCOPES = {REPLICAS: Scope.REPLICAS, STAGES: Scope.STAGES}
RUN = RunId("run")


def hello(kind: ChannelKind, attempt: int, run: str = RUN, peer: str = "a") -> ChannelHello:
    """Return the hello of a channel in an attempt."""
    if kind is BOUNDARY:
        return BoundaryHello(
            run_id=RunId(run),
            spec_digest=b"s" * 16,
            boundary=BlockIndex(2),
            peer_id=PeerId(peer),
            attempt=Attempt(attempt),
            window_frames=8,
        )
    return ReduceHello(
        run_id=RunId(run),
        spec_digest=b"s" * 16,
        attempt=Attempt(attempt),
        peer_id=PeerId(peer),
        layers=LayerRange(0, 2),
        scope=SCOPES[kind],
    )


def message(kind: ChannelKind, attempt: int, number: int = 0) -> Ack | PieceAck:
    """Return a message of an attempt."""
    if kind is BOUNDARY:
        name = Attempt(attempt), StepNumber(0), MicrobatchIndex(0), SampleId(number)
        return Ack(FrameKey(*name, Direction.FORWARD))
    key = PieceKey(Attempt(attempt), StepNumber(0), Phase.SUM, number, SCOPES[kind])
    return PieceAck(key)


@pytest.fixture
def link() -> LinkMachine:
    link = LinkMachine()
    assert link.up() == []
    return link


# ---- rules, one by one


def test_a_channel_greets_when_it_opens_and_on_every_stream() -> None:
    link = LinkMachine()
    assert link.open(hello(BOUNDARY, 1)) == []
    assert link.up() == [Greet(BOUNDARY)]
    assert link.down() == []
    assert link.up() == [Greet(BOUNDARY)]
    assert link.open(hello(REPLICAS, 1)) == [Greet(REPLICAS)]


def test_a_hello_of_the_same_attempt_connects(link: LinkMachine) -> None:
    link.open(hello(BOUNDARY, 1))
    theirs = hello(BOUNDARY, 1, peer="b")
    assert link.receive(theirs) == [Connected(BOUNDARY, theirs)]
    assert link.receive(message(BOUNDARY, 1)) == [Deliver(BOUNDARY, message(BOUNDARY, 1))]


def test_who_hears_of_an_attempt_later_connects_as_it_begins(link: LinkMachine) -> None:
    theirs = hello(BOUNDARY, 2, peer="b")
    assert link.receive(theirs) == []
    assert link.receive(message(BOUNDARY, 2)) == []
    assert link.open(hello(BOUNDARY, 2)) == [Greet(BOUNDARY), Connected(BOUNDARY, theirs)]


@pytest.mark.parametrize(("run", "attempt"), [(RUN, 1), (RUN, 3), ("other", 2)])
def test_a_hello_of_another_attempt_or_run_connects_nothing(
    link: LinkMachine, run: str, attempt: int
) -> None:
    link.open(hello(BOUNDARY, 2))
    assert link.receive(hello(BOUNDARY, attempt, run)) == []
    assert link.receive(message(BOUNDARY, attempt)) == []


def test_the_newest_hello_counts(link: LinkMachine) -> None:
    for attempt in (3, 4, 5):
        link.receive(hello(BOUNDARY, attempt))
    assert link.open(hello(BOUNDARY, 3)) == [Greet(BOUNDARY)]
    link.close(BOUNDARY)
    assert link.open(hello(BOUNDARY, 5)) == [
        Greet(BOUNDARY),
        Connected(BOUNDARY, hello(BOUNDARY, 5)),
    ]


def test_a_neighbour_that_goes_on_to_the_next_attempt_leaves_this_one(link: LinkMachine) -> None:
    link.open(hello(BOUNDARY, 1))
    link.receive(hello(BOUNDARY, 1))
    assert link.receive(hello(BOUNDARY, 2)) == [Disconnected(BOUNDARY)]
    assert link.receive(message(BOUNDARY, 1)) == []
    assert link.close(BOUNDARY) == []
    assert [type(e) for e in link.open(hello(BOUNDARY, 2))] == [Greet, Connected]


def test_what_an_attempt_left_on_its_way_is_void_in_the_next(link: LinkMachine) -> None:
    link.open(hello(BOUNDARY, 1))
    link.receive(hello(BOUNDARY, 1))
    assert link.close(BOUNDARY) == [Disconnected(BOUNDARY)]
    assert link.open(hello(BOUNDARY, 2)) == [Greet(BOUNDARY)]
    assert link.receive(message(BOUNDARY, 1)) == []
    assert link.receive(hello(BOUNDARY, 2)) == [Connected(BOUNDARY, hello(BOUNDARY, 2))]


def test_a_stream_that_breaks_disconnects_and_is_forgotten(link: LinkMachine) -> None:
    link.open(hello(BOUNDARY, 1))
    link.receive(hello(BOUNDARY, 1))
    link.receive(hello(REPLICAS, 1))
    assert link.down() == [Disconnected(BOUNDARY)]
    link.up()
    assert link.open(hello(REPLICAS, 1)) == [Greet(REPLICAS)]


def test_channels_know_nothing_of_each_other(link: LinkMachine) -> None:
    link.open(hello(BOUNDARY, 1))
    assert link.receive(hello(REPLICAS, 1)) == []
    assert not link.is_connected(BOUNDARY)
    assert [type(e) for e in link.open(hello(REPLICAS, 1))] == [Greet, Connected]


def test_a_second_hello_is_out_of_turn(link: LinkMachine) -> None:
    link.open(hello(BOUNDARY, 1))
    link.receive(hello(BOUNDARY, 1))
    with pytest.raises(OutOfTurn, match="hello twice"):
        link.receive(hello(BOUNDARY, 1))
    with pytest.raises(OutOfTurn, match="hello twice"):
        link.receive(LinkHello(peer_id=PeerId("b"), to=PeerId("a"), run_id=RUN))


def test_a_hello_that_waits_holds_no_list(link: LinkMachine) -> None:
    """A stranger's hello may claim 65,536 frames; the machine stores none of them."""
    theirs = hello(BOUNDARY, 2)
    assert isinstance(theirs, BoundaryHello)
    claim = FrameKey(Attempt(2), StepNumber(0), MicrobatchIndex(0), SampleId(1), Direction.BACKWARD)
    link.receive(replace(theirs, received=frozenset({claim})))
    assert link.open(hello(BOUNDARY, 2)) == [Greet(BOUNDARY), Connected(BOUNDARY, theirs)]


# ---- two ends, a stream that breaks, attempts that begin here and there at different times


class Side:
    """A machine with the knowledge of its shell."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.machine = LinkMachine()
        self.attempts: dict[ChannelKind, int] = {}
        self.connected: set[ChannelKind] = set()
        self.greeted: list[tuple[ChannelKind, int]] = []

    def apply(self, effects: list[LinkEffect]) -> list[ChannelMessage]:
        """Run the effects; return the messages to send."""
        messages: list[ChannelMessage] = []
        for effect in effects:
            kind = effect.kind
            match effect:
                case Greet():
                    assert (kind, self.attempts[kind]) not in self.greeted, "one a stream"
                    self.greeted.append((kind, self.attempts[kind]))
                    messages.append(hello(kind, self.attempts[kind], peer=self.name))
                case Connected(_, theirs):
                    assert kind not in self.connected
                    assert theirs.attempt == self.attempts[kind]
                    assert (kind, theirs.attempt) in self.greeted, "it was told before"
                    self.connected.add(kind)
                case Disconnected():
                    self.connected.remove(kind)
                case Deliver(_, message):
                    assert kind in self.connected
                    assert isinstance(message, Ack | PieceAck)
                    assert message.key.attempt == self.attempts[kind], "not of another attempt"
        return messages


class TwoEnds(RuleBasedStateMachine):
    """Two ends with a stream that keeps its order each way; a break loses messages in flight."""

    sides = st.integers(0, 1)
    kinds = st.sampled_from(ChannelKind)

    def __init__(self) -> None:
        super().__init__()
        self.ends = Side("a"), Side("b")
        self.ways: tuple[deque[ChannelMessage], deque[ChannelMessage]] = deque(), deque()
        self.is_up = [False, False]
        self.newest = 0

    @initialize()
    def both_up(self) -> None:
        for side in (0, 1):
            self.come_up(side)

    def send(self, side: int, effects: list[LinkEffect]) -> None:
        messages = self.ends[side].apply(effects)
        if self.is_up[side]:
            self.ways[side].extend(messages)

    def come_up(self, side: int) -> None:
        self.ends[side].greeted.clear()
        self.is_up[side] = True
        self.send(side, self.ends[side].machine.up())

    @rule(side=sides, kind=kinds, ahead=st.integers(0, 1))
    def begin(self, side: int, kind: ChannelKind, ahead: int) -> None:
        """Begin a later attempt than this side's last: the newest, or a new one."""
        end = self.ends[side]
        attempt = self.newest + ahead
        if attempt <= end.attempts.get(kind, 0):
            return
        self.newest = attempt
        self.end(side, kind)
        end.attempts[kind] = attempt
        self.send(side, end.machine.open(hello(kind, attempt, peer=end.name)))

    @rule(side=sides, kind=kinds)
    def end(self, side: int, kind: ChannelKind) -> None:
        end = self.ends[side]
        self.send(side, end.machine.close(kind))
        assert kind not in end.connected

    @rule(side=sides, kind=kinds, number=st.integers(0, 3))
    def talk(self, side: int, kind: ChannelKind, number: int) -> None:
        end = self.ends[side]
        assert end.machine.is_connected(kind) == (kind in end.connected)
        if kind in end.connected:
            self.ways[side].append(message(kind, end.attempts[kind], number))

    @rule(side=sides)
    def arrive(self, side: int) -> None:
        if self.is_up[side] and self.ways[1 - side]:
            message = self.ways[1 - side].popleft()
            self.send(side, self.ends[side].machine.receive(message))

    @rule(side=sides)
    @precondition(lambda self: any(self.is_up))
    def break_at(self, side: int) -> None:
        """Break the stream: one side notices first, then nothing more reaches either."""
        for way in self.ways:
            way.clear()
        if self.is_up[side]:
            self.is_up[side] = False
            self.send(side, self.ends[side].machine.down())
            assert not self.ends[side].connected

    @rule()
    @precondition(lambda self: not all(self.is_up))
    def dial(self) -> None:
        for side in (0, 1):
            self.break_at(side)
        self.both_up()

    @invariant()
    def a_connection_is_of_what_is_open(self) -> None:
        for end in self.ends:
            assert end.connected <= set(end.attempts)

    def teardown(self) -> None:
        """Check that all is connected once both have begun the newest attempt over a stream."""
        if not all(self.is_up):
            self.dial()
        attempt = self.newest + 1
        for side, end in enumerate(self.ends):
            for kind in ChannelKind:
                end.attempts[kind] = attempt
                end.machine.close(kind)
                end.connected.discard(kind)
                self.send(side, end.machine.open(hello(kind, attempt, peer=end.name)))
        while any(self.ways):
            self.arrive(0)
            self.arrive(1)
        assert all(end.connected == set(ChannelKind) for end in self.ends)


TwoEndsTest = TwoEnds.TestCase
TwoEndsTest.settings = settings(
    derandomize=True, deadline=None, max_examples=draws(150), stateful_step_count=40
)
