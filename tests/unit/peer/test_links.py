"""One stream between two peers, attempt after attempt: who dials, when, and what is given up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from swarm_ft.codec.spec import Direction
from swarm_ft.errors import (
    InternalError,
    NonFinite,
    OutOfTurn,
    ProtocolError,
    RunMismatch,
    SwarmError,
    Unavailable,
    VersionMismatch,
)
from swarm_ft.ids import Attempt, BlockIndex, MicrobatchIndex, PeerId, RunId, SampleId, StepNumber
from swarm_ft.peer.links import (
    MAX_BROKEN_STREAMS,
    UNREACHABLE_AFTER_S,
    Backoff,
    Links,
    LinkStream,
    PeerLink,
    Send,
    receive_hello,
)
from swarm_ft.protocol.messages.boundary import (
    Ack,
    BoundaryHello,
    Frame,
    FrameKey,
    FrameKind,
    FromNeighbour,
    KeyFrameRequest,
)
from swarm_ft.protocol.messages.capacity import LinkSpeed
from swarm_ft.protocol.messages.control import MAX_MEASURED_LINKS
from swarm_ft.protocol.messages.link import LinkHello, LinkMessage, LinkPing, LinkPong
from swarm_ft.transport.base import Transport
from swarm_ft.transport.methods import LINK
from tests.codecs import parse
from tests.counting import CountingTransport
from tests.doubles.clock import ManualClock
from tests.doubles.memory_transport import MemoryTransport
from tests.unit.peer.hands import Caller, Hand

RUN = RunId("run")
A, B = PeerId("a"), PeerId("b")


def ack(attempt: int, number: int = 0) -> Ack:
    """Some message of an attempt."""
    name = Attempt(attempt), StepNumber(0), MicrobatchIndex(0), SampleId(number)
    return Ack(FrameKey(*name, Direction.FORWARD))


class End:
    """The end of a channel, with its received messages in `received`."""

    def __init__(
        self, peer: str, attempt: int, digest: bytes = b"s" * 16, run_id: RunId = RUN
    ) -> None:
        self.attempt = attempt
        self.received: asyncio.Queue[FromNeighbour] = asyncio.Queue()
        self.is_connected = asyncio.Event()
        self.is_away = asyncio.Event()
        self.is_away.set()
        self._hello = BoundaryHello(
            run_id=run_id,
            spec_digest=digest,
            boundary=BlockIndex(2),
            peer_id=PeerId(peer),
            attempt=Attempt(attempt),
            window_frames=8,
        )

    @property
    def hello(self) -> BoundaryHello:
        return self._hello

    def on_connected(self, hello: BoundaryHello) -> None:
        assert not self.is_connected.is_set()
        if hello.spec_digest != self._hello.spec_digest:
            raise RunMismatch("digests aa here, bb there")
        self.is_connected.set()
        self.is_away.clear()

    def on_disconnected(self) -> None:
        self.is_connected.clear()
        self.is_away.set()

    def receive(self, message: FromNeighbour) -> None:
        assert self.is_connected.is_set()
        if isinstance(message, KeyFrameRequest):
            raise OutOfTurn(message.reason)
        self.received.put_nowait(message)

    async def write(self, message: FromNeighbour, send: Send) -> None:
        await send(message)


class Peer:
    """A peer's links, served."""

    def __init__(self, name: PeerId, transport: Transport, clock: ManualClock) -> None:
        self.name = name
        self.links = Links(name, transport=transport, clock=clock, rng=Random(0))
        self.endpoint = ""

    @asynccontextmanager
    async def attempt(self, other: Peer, number: int, **end: Any) -> AsyncIterator[Attending]:
        """An attempt with that peer, begun here."""
        attending = Attending(self, other, End(self.name, number, **end))
        try:
            yield attending
        finally:
            await attending.stop()


class Attending:
    """One side's part in an attempt."""

    def __init__(self, peer: Peer, other: Peer, end: End) -> None:
        self.end = end
        self.channel = peer.links.channel(other.name, other.endpoint)
        self.running = asyncio.create_task(self.channel.keep_connected(end))

    async def stop(self) -> None:
        """The attempt is over here."""
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)

    async def connected(self) -> None:
        """Wait until the other side is connected; fail with the attempt."""
        await self.before(self.end.is_connected.wait())

    async def before(self, wait: Awaitable[object]) -> None:
        """Wait for an awaitable; fail if the attempt does."""
        waiting = asyncio.ensure_future(wait)
        await asyncio.wait((waiting, self.running), return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            waiting.cancel()
            self.running.result()


@pytest.fixture(autouse=True)
def no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_ft.peer.links.MIN_BACKOFF_S", 0.0)


class TickingClock(ManualClock):
    """Every look at it takes a third of what a peer is given."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0

    def now_s(self) -> float:
        now_s = super().now_s()
        self.looks += 1
        self.advance(UNREACHABLE_AFTER_S / 3)
        return now_s


class Pair:
    """Two peers that reach each other; `a` dials."""

    def __init__(self, transport: Transport) -> None:
        self.transport = CountingTransport(transport)
        self.clock = TickingClock()
        self.a, self.b = (Peer(name, self.transport, self.clock) for name in (A, B))

    @asynccontextmanager
    async def served(self) -> AsyncIterator[Pair]:
        servers = []
        for peer in (self.a, self.b):
            servers.append(await self.transport.serve("127.0.0.1", 0, {LINK: peer.links.answer}))
            peer.endpoint = servers[-1].endpoint
        try:
            yield self
        finally:
            for peer in (self.a, self.b):
                await peer.links.close()
            for server in servers:
                await server.stop()

    @asynccontextmanager
    async def attempt(self, number: int) -> AsyncIterator[tuple[Attending, Attending]]:
        """Both in it, and connected."""
        async with self.a.attempt(self.b, number) as a, self.b.attempt(self.a, number) as b:
            await a.connected()
            await b.connected()
            yield a, b


@pytest.fixture
async def pair(transport: Transport) -> AsyncIterator[Pair]:
    async with Pair(transport).served() as pair:
        yield pair


# ---- attempts over a stream that stands


async def test_a_new_attempt_takes_a_message_and_no_call(pair: Pair) -> None:
    for number in range(1, 6):
        async with pair.attempt(number) as (a, b):
            a.channel.send(ack(number))
            assert await b.end.received.get() == ack(number)
            b.channel.send(ack(number, 7))
            assert await a.end.received.get() == ack(number, 7)
    assert len(pair.transport.opened) == 1


@pytest.mark.parametrize("first", ["a", "b"])
async def test_who_hears_of_an_attempt_first_waits_for_the_other(pair: Pair, first: str) -> None:
    one, other = (pair.a, pair.b) if first == "a" else (pair.b, pair.a)
    async with pair.attempt(1) as (a, b):
        ours, theirs = (a, b) if first == "a" else (b, a)
        await ours.stop()
        async with one.attempt(other, 2) as early:
            await theirs.end.is_away.wait()
            theirs.channel.send(ack(1))
            assert not early.end.is_connected.is_set()
            await theirs.stop()
            async with other.attempt(one, 2) as late:
                await early.connected()
                await late.connected()
                late.channel.send(ack(2))
                assert await early.end.received.get() == ack(2)
                assert early.end.received.empty()
    assert len(pair.transport.opened) == 1


async def test_what_an_attempt_left_to_be_sent_is_not_sent_in_the_next(pair: Pair) -> None:
    async with pair.attempt(1) as (a, b):
        await a.stop()
        async with pair.a.attempt(pair.b, 2) as next_a:
            a.channel.send(ack(1))
            await b.stop()
            async with pair.b.attempt(pair.a, 2) as next_b:
                await next_a.connected()
                await next_b.connected()
                next_a.channel.send(ack(2))
                assert await next_b.end.received.get() == ack(2)


async def test_what_was_said_before_the_other_went_away_is_not_sent_when_it_is_back(
    pair: Pair, caller: Caller
) -> None:
    """One that comes and goes over one stream does not make this side's memory grow."""
    async with pair.b.attempt(pair.a, 1) as b:
        hand, _ = await caller.greet(End("a", 1).hello)
        await b.connected()
        for number in range(100):
            b.channel.send(ack(1, number))
        await hand.send(End("a", 2).hello)
        await b.end.is_away.wait()
        await hand.send(End("a", 1).hello)
        await b.connected()
        b.channel.send(ack(1, 100))
        received = [await hand.receive()]
        while received[-1] != ack(1, 100):
            received.append(await hand.receive())
        assert len(received) < 100


async def test_a_stream_that_breaks_comes_back_under_the_attempt(pair: Pair) -> None:
    async with pair.attempt(1) as (a, b):
        for number in range(2 * MAX_BROKEN_STREAMS):
            b.channel.break_off(Unavailable("a test"))
            await a.end.is_away.wait()
            await a.connected()
            await b.connected()
            a.channel.send(ack(1, number))
            assert await b.end.received.get() == ack(1, number)
    assert len(pair.transport.opened) == 1 + 2 * MAX_BROKEN_STREAMS


async def test_a_peer_that_moved_is_called_where_it_is_now(pair: Pair) -> None:
    async with pair.attempt(1):
        pass
    server = await pair.transport.serve("127.0.0.1", 0, {LINK: pair.b.links.answer})
    pair.b.endpoint = server.endpoint
    async with pair.attempt(2) as (a, _):
        while len(pair.transport.opened) < 2:  # noqa: ASYNC110 - they may meet on the old stream first
            await asyncio.sleep(0)
        await a.connected()
    await server.stop()


async def test_two_runs_have_a_stream_each_and_know_nothing_of_each_other(pair: Pair) -> None:
    other = RunId("other")
    async with (
        pair.attempt(1) as (a, b),
        pair.a.attempt(pair.b, 1, run_id=other) as other_a,
        pair.b.attempt(pair.a, 1, run_id=other) as other_b,
    ):
        await other_a.connected()
        await other_b.connected()
        assert len(pair.transport.opened) == 2
        a.channel.send(ack(1, 1))
        other_a.channel.send(ack(1, 2))
        assert await b.end.received.get() == ack(1, 1)
        assert await other_b.end.received.get() == ack(1, 2)
        other_b.channel.break_off(Unavailable("a test"))
        await other_a.end.is_away.wait()
        assert a.end.is_connected.is_set()
        await other_a.connected()
    assert len(pair.transport.opened) == 3


@pytest.mark.usefixtures("impatient")
async def test_who_is_named_in_one_run_is_a_stranger_in_another(pair: Pair) -> None:
    pair.b.links.set_assigned_peers(RunId("other"), (A, B))
    caller = Caller(pair.transport, "a", "b")
    caller.endpoint = pair.b.endpoint
    with pytest.raises(Unavailable, match="no assignment"):
        await (await caller.link()).fails()
    await caller.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A moment's grace is none."""
    monkeypatch.setattr("swarm_ft.peer.links.UNNAMED_S", 0.0)


@pytest.mark.usefixtures("impatient")
async def test_a_stream_of_a_peer_that_no_assignment_names_is_given_up(pair: Pair) -> None:
    caller = Caller(pair.transport, "a", "b")
    caller.endpoint = pair.b.endpoint
    hand = await caller.link()
    with pytest.raises(Unavailable, match="no assignment of peer b names peer a"):
        await hand.fails()
    await caller.close()


@pytest.mark.usefixtures("impatient")
async def test_who_is_named_may_wait_until_it_is_named_no_more(pair: Pair) -> None:
    for peer in (pair.a, pair.b):
        peer.links.set_assigned_peers(RUN, (A, B))
    async with pair.attempt(1):
        pass
    async with pair.attempt(2):  # over the stream that stood meanwhile
        assert len(pair.transport.opened) == 1
    pair.b.links.set_assigned_peers(RUN, (B,))
    caller = Caller(pair.transport, "a", "b")
    caller.endpoint = pair.b.endpoint
    with pytest.raises(Unavailable, match="no assignment"):
        await (await caller.link()).fails()
    await caller.close()


# ---- strangers


@pytest.fixture
async def caller(pair: Pair) -> AsyncIterator[Caller]:
    """Return a caller of b by hand in the name of a."""
    caller = Caller(pair.transport, "a", "b")
    caller.endpoint = pair.b.endpoint
    yield caller
    await caller.close()


@pytest.mark.parametrize(
    ("hello", "match"),
    [
        (
            LinkHello(peer_id=A, to=PeerId("c"), run_id=RUN),
            "expected a hello to peer b, got one to c",
        ),
        (LinkHello(peer_id=B, to=B, run_id=RUN), "peer b dials peer b, not the reverse"),
        (LinkHello(peer_id=PeerId("z"), to=B, run_id=RUN), "peer b dials peer z, not the reverse"),
        (ack(1), "expected a hello as the first message"),
    ],
    ids=["another", "itself", "who is called", "no hello"],
)
async def test_who_is_not_to_call_is_refused(
    caller: Caller, hello: LinkHello | Ack, match: str
) -> None:
    with pytest.raises(OutOfTurn, match=match):
        await Hand(caller.open()).fails(hello)


async def test_strangers_take_only_so_much_room(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm_ft.peer.links.MAX_IDLE_LINKS", 3)
    callers = [Caller(pair.transport, f"a{i}", "b") for i in range(4)]
    for one in callers:
        one.endpoint = pair.b.endpoint
    hands = [await one.link() for one in callers[:3]]
    with pytest.raises(Unavailable, match="3 unknown callers"):
        await callers[3].link()
    pair.b.links.set_assigned_peers(RUN, (PeerId("a3"),))
    await callers[3].link()
    pair.b.links.set_assigned_peers(RUN, ())
    async with pair.attempt(1):
        await hands[0].stream.cancel()
        while True:  # until b has noticed
            try:
                await callers[3].link()
                break
            except Unavailable:
                await asyncio.sleep(0)
    for one in callers:
        await one.close()


async def test_of_several_new_streams_the_newest_stays(caller: Caller) -> None:
    hands = [await caller.link()]
    hands += await asyncio.gather(*(caller.link() for _ in range(3)))
    ends = [asyncio.create_task(hand.fails()) for hand in hands]
    pending = set(ends)
    while len(pending) > 1:
        _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
    for end in set(ends) - pending:
        with pytest.raises(Unavailable, match="a newer stream replaced it"):
            await end
    pending.pop().cancel()


async def test_a_hello_in_anothers_name_costs_the_stream(pair: Pair, caller: Caller) -> None:
    async with pair.b.attempt(pair.a, 1) as b:
        hand = await caller.link()
        with pytest.raises(OutOfTurn, match="expected a hello of a, got one of x"):
            await hand.fails(replace(b.end.hello, peer_id=PeerId("x")))
        assert not b.end.is_connected.is_set()


async def test_a_peer_that_leaves_answers_nobody(pair: Pair, caller: Caller) -> None:
    hand = await caller.link()
    await pair.b.links.close()
    with pytest.raises(Unavailable, match="leaves"):
        await hand.fails()
    with pytest.raises(Unavailable, match="leaves"):
        await caller.link()


class GreetedOnly:
    """A stream of `a` at `b`, which leaves while it answers the hello."""

    remote, caller = "a", None

    def __init__(self, links: Links) -> None:
        self._links = links

    async def receive(self) -> LinkHello | None:
        return LinkHello(peer_id=A, to=B, run_id=RUN)

    async def send(self, _message: LinkMessage) -> None:
        await self._links.close()

    async def finish(self) -> None: ...

    async def cancel(self) -> None: ...


async def test_a_stream_that_comes_while_the_peer_leaves_is_not_kept(pair: Pair) -> None:
    links = pair.b.links
    with pytest.raises(Unavailable, match="leaves"):
        await asyncio.wait_for(links.answer(GreetedOnly(links)), 5.0)


# ---- streams that are broken off


async def break_a_stream(caller: Caller, hello: BoundaryHello) -> None:
    """Break the protocol in the name of a."""
    hand, _ = await caller.greet(hello)
    with pytest.raises(OutOfTurn):
        await hand.fails(KeyFrameRequest(ack(1).key, "nonsense"))


async def test_a_peer_that_breaks_stream_after_stream_fails_the_attempt(
    pair: Pair, caller: Caller
) -> None:
    hello = End("a", 1).hello
    async with pair.b.attempt(pair.a, 1) as b:
        for _ in range(MAX_BROKEN_STREAMS):
            assert not b.running.done()
            await break_a_stream(caller, hello)
        text = "peer a: 3 streams failed, the last with out-of-turn: nonsense"
        with pytest.raises(ProtocolError, match=text):
            await b.running


async def test_broken_streams_count_for_one_attempt_alone(pair: Pair, caller: Caller) -> None:
    for number in range(1, 4):
        async with pair.b.attempt(pair.a, number) as b:
            for _ in range(MAX_BROKEN_STREAMS - 1):
                await break_a_stream(caller, End("a", number).hello)
            await caller.greet(End("a", number).hello)  # and stays, so that the link does
            await b.connected()


# ---- marks, by which a link measures itself


async def receive_pong(hand: Hand) -> LinkPong:
    """Return the next pong; skip other messages before it."""
    while not isinstance(message := await hand.receive(), LinkPong):
        assert message is not None
    return message


async def test_a_round_trip_is_measured_while_two_work_together(pair: Pair) -> None:
    async with pair.attempt(1) as (a, b):
        number = 0
        while not (pair.a.links.speeds.get(B) and pair.b.links.speeds.get(A)):
            number += 1
            for one, other in ((a, b), (b, a)):
                one.channel.send(ack(1, number))
                await other.end.received.get()
        assert pair.a.links.speeds[B].least_round_trip_s > 0.0
        assert pair.b.links.speeds[A].bytes_per_s == 0.0, "it was never full"


async def test_what_was_measured_is_told_of_the_slowest_links(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds = [LinkSpeed(), LinkSpeed(round_trip_s=0.1)]
    speeds += [
        LinkSpeed(bytes_per_s=float(number)) for number in range(9 * MAX_MEASURED_LINKS, 0, -1)
    ]
    left = iter(speeds)
    monkeypatch.setattr(PeerLink, "speed", property(lambda _: next(left)))
    for number in range(len(speeds)):
        pair.a.links.link_to(PeerId(f"b{number}"), RUN)
    rates = [speed.bytes_per_s for speed in pair.a.links.speeds.values()]
    assert rates == [float(number) for number in range(1, MAX_MEASURED_LINKS + 1)]


async def test_pings_are_answered_and_pongs_that_nobody_asked_for_change_nothing(
    pair: Pair, caller: Caller
) -> None:
    async with pair.b.attempt(pair.a, 1) as b:
        hand, _ = await caller.greet(End("a", 1).hello)
        await b.connected()
        await hand.send(LinkPong(4_000_000_000, 1), LinkPing(7))
        assert (await receive_pong(hand)).serial == 7
        await hand.send(LinkPong(4_000_000_000, 1), LinkPing(0))
        assert (await receive_pong(hand)).serial == 0
        await hand.send(ack(1))
        assert await b.end.received.get() == ack(1)


class StuckEnd(End):
    """It never gets a message written."""

    async def write(self, message: FromNeighbour, send: Send) -> None:
        await asyncio.Event().wait()


async def test_who_pings_again_before_the_answer_costs_itself_the_stream(
    pair: Pair, caller: Caller
) -> None:
    """One pong at most waits, whatever is not read."""
    attending = Attending(pair.b, pair.a, StuckEnd("b", 1))
    hand, _ = await caller.greet(End("a", 1).hello)
    await attending.connected()
    attending.channel.send(ack(1))
    with pytest.raises(OutOfTurn, match="pinged again before the reply"):
        await hand.fails(*(LinkPing(number) for number in range(3)))
    await attending.stop()


# ---- what else may be sent


class HeldEnd(End):
    """Its messages are written when it is let."""

    def __init__(self, peer: str, attempt: int) -> None:
        super().__init__(peer, attempt)
        self.is_writing, self.may_write = asyncio.Event(), asyncio.Event()

    async def write(self, message: FromNeighbour, send: Send) -> None:
        self.is_writing.set()
        await self.may_write.wait()
        await send(message)


def frame() -> Frame:
    return Frame(ack(1).key, FrameKind.DIRECT, parse("none").encode(torch.zeros(1, 1)))


@pytest.mark.parametrize("end", ["written", "broken", "given up"])
async def test_links_are_quiet_while_no_frame_waits_or_is_written(pair: Pair, end: str) -> None:
    await pair.a.links.wait_quiet()
    blocked = HeldEnd("a", 1)
    attending = Attending(pair.a, pair.b, blocked)
    async with pair.b.attempt(pair.a, 1) as b:
        await attending.connected()
        await pair.a.links.wait_quiet()
        attending.channel.send(frame())
        quiet = asyncio.create_task(pair.a.links.wait_quiet())
        await blocked.is_writing.wait()
        assert not quiet.done()
        if end == "written":
            blocked.may_write.set()
            assert isinstance(await b.end.received.get(), Frame)
        elif end == "broken":
            attending.channel.break_off(Unavailable("for a test"))
        else:
            await attending.stop()
        await quiet
    await attending.stop()


# ---- who dials, and when it gives up


class Script:
    """A script that answers in the place of b before b itself does."""

    def __init__(self, b: Peer, *acts: Callable[[LinkStream], Awaitable[None]]) -> None:
        self.acts = list(acts)
        self.num_calls = 0
        self._b = b

    async def __call__(self, stream: LinkStream) -> None:
        self.num_calls += 1
        if self.acts:
            await self.acts.pop(0)(stream)
        else:
            await self._b.links.answer(stream)


def failing(error: SwarmError) -> Callable[[LinkStream], Awaitable[None]]:
    """An answer that is an error at once."""

    async def behave(_stream: LinkStream) -> None:
        raise error

    return behave


def greeting(
    *messages: BoundaryHello, then: SwarmError, name: PeerId = B
) -> Callable[[LinkStream], Awaitable[None]]:
    """Make an act that links, sends these messages, and then fails."""

    async def behave(stream: LinkStream) -> None:
        hello = await receive_hello(stream)
        await stream.send(LinkHello(peer_id=name, to=hello.peer_id, run_id=hello.run_id))
        await stream.receive()
        for message in messages:
            await stream.send(message)
        raise then

    return behave


@asynccontextmanager
async def scripted(
    *acts: Callable[[LinkStream], Awaitable[None]],
) -> AsyncIterator[tuple[Pair, Script]]:
    pair = Pair(MemoryTransport())
    script = Script(pair.b, *acts)
    server = await pair.transport.serve("127.0.0.1", 0, {LINK: script})
    pair.b.endpoint = server.endpoint
    try:
        yield pair, script
    finally:
        for peer in (pair.a, pair.b):
            await peer.links.close()
        await server.stop()


@pytest.mark.parametrize("endpoint", ["", "127.0.0.1:9"], ids=["not told", "nobody there"])
async def test_a_peer_that_stays_away_is_given_up_after_its_time(endpoint: str) -> None:
    pair = Pair(MemoryTransport())
    pair.b.endpoint = endpoint
    async with pair.a.attempt(pair.b, 1) as a:
        with pytest.raises(Unavailable, match="peer b cannot be reached: "):
            await a.running
    assert pair.clock.looks == 4, "at 0, 10, 20 and 30 seconds"


async def test_who_is_called_waits_for_the_caller() -> None:
    pair = Pair(MemoryTransport())
    async with pair.b.attempt(pair.a, 1) as b:
        await asyncio.sleep(0)
        assert not b.running.done()
    assert len(pair.transport.opened) == 0


async def test_a_connection_starts_the_time_anew() -> None:
    away = [failing(OutOfTurn("not yet"))] * 2
    seen = greeting(then=Unavailable("gone again"))
    async with scripted(*away, seen, *away, seen, *away) as (pair, script), pair.attempt(1):
        assert script.num_calls == 9


@pytest.mark.parametrize("error", [InternalError, NonFinite, OutOfTurn, ProtocolError, Unavailable])
async def test_what_ails_the_other_does_not_end_this_sides_attempt(
    error: type[SwarmError],
) -> None:
    acts = failing(error("its own trouble")), greeting(then=error("more trouble"))
    async with scripted(*acts) as (pair, script), pair.attempt(1):
        assert script.num_calls == 3


async def test_another_peer_at_the_endpoint_is_no_stand_in() -> None:
    other = greeting(then=Unavailable("bye"), name=PeerId("c"))
    async with scripted(*[other] * 9) as (pair, _), pair.a.attempt(pair.b, 1) as a:
        with pytest.raises(Unavailable, match=r"cannot be reached: expected it at .*, got peer c"):
            await a.running


async def test_another_spec_at_the_other_ends_the_attempt_at_once() -> None:
    theirs = End("b", 1, digest=b"x" * 16).hello
    acts = [greeting(theirs, then=Unavailable("bye"))]
    async with scripted(*acts) as (pair, script), pair.a.attempt(pair.b, 1) as a:
        with pytest.raises(Unavailable, match="peer b: digests aa here, bb there"):
            await a.running
        assert script.num_calls == 1


async def test_another_spec_told_by_the_other_ends_the_attempt_at_once() -> None:
    acts = [greeting(then=RunMismatch("digests bb here, aa there"))]
    async with scripted(*acts) as (pair, _), pair.a.attempt(pair.b, 1) as a:
        with pytest.raises(Unavailable, match="peer b: digests bb here, aa there"):
            await a.running


async def test_another_version_at_the_other_ends_the_attempt_at_once() -> None:
    acts = [failing(VersionMismatch("update peer a"))] * 9
    async with scripted(*acts) as (pair, script), pair.a.attempt(pair.b, 1) as a:
        with pytest.raises(Unavailable, match="peer b: update peer a"):
            await a.running
    assert script.num_calls == 1


async def test_an_error_that_the_other_sends_does_not_pass_for_ones_own() -> None:
    """A stranger's `non-finite` must not end the run."""
    blame = greeting(then=NonFinite("your loss is infinite"))
    async with scripted(*[blame] * 3) as (pair, _), pair.a.attempt(pair.b, 1) as a:
        with pytest.raises(ProtocolError, match="with non-finite: your loss is infinite") as caught:
            await a.running
    assert type(caught.value) is ProtocolError


async def test_a_bug_at_this_side_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scripted() as (pair, _), pair.attempt(1) as (a, b):

        def bug(_message: FromNeighbour) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(a.end, "receive", bug)
        b.channel.send(ack(1))
        with pytest.raises(ZeroDivisionError):
            await a.running


# ---- waiting


def test_waits_grow_to_their_bound_and_begin_anew() -> None:
    backoff = Backoff(Random(0), min_s=1.0, max_s=5.0)
    for at_most_s in (1.0, 2.0, 4.0, 5.0, 5.0):
        assert at_most_s / 2 <= backoff.draw_s() <= at_most_s
    backoff.reset()
    assert backoff.draw_s() <= 1.0


def test_no_two_peers_wait_in_step() -> None:
    waits = {Backoff(Random(seed), min_s=1.0, max_s=5.0).draw_s() for seed in range(50)}
    assert len(waits) == 50
    assert max(waits) - min(waits) > 0.4
