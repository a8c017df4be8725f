"""How the ends of a boundary find each other, and when they give up."""

import asyncio
from dataclasses import replace

import pytest

from swarm_ft.discovery.directory import Board, Role, StaticDirectory, find_peer
from swarm_ft.errors import (
    InternalError,
    NonFinite,
    OutOfTurn,
    ProtocolError,
    RunMismatch,
    Unavailable,
    VersionMismatch,
)
from swarm_ft.ids import PeerId, RunId
from swarm_ft.peer.boundary.end import answer, check_hello, dialler, receive_hello
from swarm_ft.peer.links.dialling import UNREACHABLE_AFTER_S
from swarm_ft.protocol.messages.boundary import Ack, BoundaryHello, FrameKey
from swarm_ft.protocol.spec.codec_spec import Direction
from swarm_ft.testing.clock import ManualClock
from swarm_ft.transport.memory import MemoryTransport
from swarm_ft.transport.methods import BOUNDARY

HELLO = BoundaryHello(
    run_id=RunId("run"),
    spec_digest=b"s" * 16,
    boundary=2,
    peer_id=PeerId("up"),
    attempt=4,
    window_frames=8,
)
THEIRS = replace(HELLO, peer_id=PeerId("down"), window_frames=99)


@pytest.fixture(autouse=True)
def no_backoff(monkeypatch):
    monkeypatch.setattr("swarm_ft.peer.links.dialling.MIN_BACKOFF_S", 0.0)


# ---- hellos


def test_a_fitting_hello_passes():
    check_hello(HELLO, THEIRS, PeerId("down"))


def test_another_spec_is_a_mismatch_that_shows_both_digests():
    other = replace(THEIRS, spec_digest=b"t" * 16)
    with pytest.raises(RunMismatch) as caught:
        check_hello(HELLO, other, PeerId("down"))
    for told in (HELLO.spec_digest.hex(), other.spec_digest.hex(), "down", "run"):
        assert told in caught.value.message


@pytest.mark.parametrize(
    "change",
    [{"run_id": "other"}, {"boundary": 3}, {"attempt": 3}, {"attempt": 5}, {"peer_id": "else"}],
    ids=str,
)
def test_another_run_boundary_attempt_or_peer_is_out_of_turn(change):
    with pytest.raises(OutOfTurn, match="expected run, boundary, attempt, peer"):
        check_hello(HELLO, replace(THEIRS, **change), PeerId("down"))


async def first_message(transport, *messages):
    """What `receive_hello` makes of a client's messages."""
    heard = asyncio.get_running_loop().create_future()

    async def handle(stream):
        (outcome,) = await asyncio.gather(receive_hello(stream), return_exceptions=True)
        heard.set_result(outcome)

    server = await transport.serve("127.0.0.1", 0, {BOUNDARY: handle})
    channel = transport.connect(server.endpoint)
    stream = channel.open(BOUNDARY)
    for message in messages:
        await stream.send(message)
    await stream.finish()
    outcome = await heard
    await channel.close()
    await server.stop()
    return outcome


async def test_the_first_message_has_to_be_a_hello(transport):
    assert await first_message(transport, HELLO) == HELLO
    ack = Ack(FrameKey(4, 0, 0, 0, Direction.BACKWARD))
    for messages in ([], [ack], [ack, HELLO]):
        outcome = await first_message(transport, *messages)
        assert isinstance(outcome, OutOfTurn)


async def test_a_peer_that_nobody_announced_is_unavailable():
    directory = StaticDirectory(Board(), ManualClock())
    with pytest.raises(Unavailable, match="peer down is not in the DHT"):
        await find_peer(directory, PeerId("down"))
    await directory.announce(Role.PEER, "down", "127.0.0.1:1")
    assert await find_peer(directory, PeerId("down")) == "127.0.0.1:1"


# ---- dialling


class TickingClock(ManualClock):
    """Every look at it takes a third of what a neighbour is given."""

    def __init__(self):
        super().__init__()
        self.looks = 0
        self.looked = asyncio.Event()

    def now_s(self):
        now_s = super().now_s()
        self.looks += 1
        self.looked.set()
        self.advance(UNREACHABLE_AFTER_S / 3)
        return now_s


class Downstream:
    """Where the dialler connects: first what the script says, then an end that works."""

    def __init__(self, down, up):
        self.down, self.up = down, up
        self.calls = 0
        self.called = asyncio.Condition()
        self.script = []

    async def reached(self, calls):
        async with self.called:
            await self.called.wait_for(lambda: self.calls >= calls)

    async def __call__(self, stream):
        async with self.called:
            self.calls += 1
            self.called.notify_all()
        hello = await receive_hello(stream)
        if self.script:
            await self.script.pop(0)(stream)
        else:
            check_hello(self.down.boundary.hello, hello, self.up.boundary.hello.peer_id)
            await answer(self.down.boundary, stream, hello)

    async def greet(self, stream, **changes):
        await stream.send(replace(self.down.boundary.hello, **changes))


class Dialling:
    """Both ends at work, and the dialler between them once `start` was called."""

    def __init__(self, up, down):
        self.transport = MemoryTransport()
        self.directory = StaticDirectory(Board(), ManualClock())
        self.clock = TickingClock()
        self.up = up
        self.downstream = Downstream(down, up)
        self.up_run, self.down_run = (asyncio.create_task(e.boundary.run()) for e in (up, down))
        self.dialer_run = None

    async def announce(self):
        await self.directory.announce(Role.PEER, "down", "down:1")

    def start(self):
        dialer = dialler(
            self.up.boundary,
            PeerId("down"),
            directory=self.directory,
            transport=self.transport,
            clock=self.clock,
        )
        self.dialer_run = asyncio.create_task(dialer.run())

    async def connected(self, *, calls):
        """Until the stream of the last of so many calls is up; fails if the dialler gives up."""

        async def wait():
            await self.downstream.reached(calls)
            await self.up.boundary.connected.wait()

        waiting = asyncio.create_task(wait())
        await asyncio.wait((waiting, self.dialer_run), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self.dialer_run.done():
            self.dialer_run.result()
        assert self.downstream.calls == calls

    async def end(self):
        tasks = [t for t in (self.dialer_run, self.up_run, self.down_run) if t is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
async def dialling(make_spec, make_ends):
    dialling = Dialling(*make_ends(make_spec()))
    server = await dialling.transport.serve("down", 1, {BOUNDARY: dialling.downstream})
    yield dialling
    await dialling.end()
    await server.stop()


def failing(error):
    async def behave(_):
        raise error

    return behave


async def test_a_neighbour_that_stays_away_is_given_up_after_its_time(dialling):
    dialling.start()
    with pytest.raises(Unavailable, match=r"peer down cannot be reached: .*not in the DHT"):
        await dialling.dialer_run
    assert dialling.clock.looks == 4, "at 0, 10, 20 and 30 seconds"


async def test_a_neighbour_that_turns_up_late_is_connected(dialling):
    dialling.start()
    await dialling.clock.looked.wait()
    await dialling.announce()
    await dialling.connected(calls=1)


async def test_a_connection_starts_the_time_anew(dialling):
    async def greet_and_leave(stream):
        await dialling.downstream.greet(stream)
        raise Unavailable("gone again")

    away = [failing(OutOfTurn("not yet"))] * 2
    dialling.downstream.script = [*away, greet_and_leave, *away]
    await dialling.announce()
    dialling.start()
    await dialling.connected(calls=6)
    assert dialling.clock.looks == 5


@pytest.mark.parametrize("error", [RunMismatch, VersionMismatch])
async def test_another_spec_or_version_at_the_neighbour_ends_the_attempt_at_once(dialling, error):
    dialling.downstream.script = [failing(error("digests aa here, bb there"))]
    await dialling.announce()
    dialling.start()
    with pytest.raises(Unavailable, match="aa here, bb there"):
        await dialling.dialer_run


@pytest.mark.parametrize("error", [InternalError, NonFinite, ProtocolError, OutOfTurn])
async def test_what_ails_the_neighbour_does_not_end_this_sides_attempt(dialling, error):
    dialling.downstream.script = [failing(error("its own trouble"))] * 2
    await dialling.announce()
    dialling.start()
    await dialling.connected(calls=3)


async def test_a_neighbour_of_another_attempt_is_called_again_later(dialling):
    async def greet_of_an_old_attempt(stream):
        await dialling.downstream.greet(stream, attempt=0)
        await stream.receive()

    dialling.downstream.script = [greet_of_an_old_attempt]
    await dialling.announce()
    dialling.start()
    await dialling.connected(calls=2)


async def test_an_error_that_the_neighbour_sends_does_not_pass_for_ones_own(dialling):
    """A stranger's `non-finite` must not end the run."""

    async def greet_and_blame(stream):
        await dialling.downstream.greet(stream)
        raise NonFinite("your loss is infinite")

    dialling.downstream.script = [greet_and_blame] * 3
    await dialling.announce()
    dialling.start()
    with pytest.raises(ExceptionGroup) as caught:
        await dialling.up_run
    (error,) = caught.value.exceptions
    assert type(error) is ProtocolError
    assert "at last by non-finite: your loss is infinite" in error.message
