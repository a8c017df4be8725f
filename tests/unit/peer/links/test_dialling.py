"""When a peer is called again, and when it is given up."""

import asyncio

import pytest

from swarm_ft.discovery.directory import Board, Role, StaticDirectory
from swarm_ft.errors import InternalError, NonFinite, OutOfTurn, RunMismatch, Unavailable
from swarm_ft.peer.links.dialling import UNREACHABLE_AFTER_S, Redialler
from swarm_ft.testing.clock import ManualClock
from swarm_ft.transport.memory import MemoryTransport


@pytest.fixture(autouse=True)
def no_backoff(monkeypatch):
    monkeypatch.setattr("swarm_ft.peer.links.dialling.MIN_BACKOFF_S", 0.0)


class TickingClock(ManualClock):
    """Every look at it takes a third of what a peer is given."""

    def __init__(self):
        super().__init__()
        self.looks = 0

    def now_s(self):
        now_s = super().now_s()
        self.looks += 1
        self.advance(UNREACHABLE_AFTER_S / 3)
        return now_s


class Script:
    """What becomes of each conversation: an error, or a hello and then an error."""

    def __init__(self, *acts):
        self.acts = list(acts)
        self.over = asyncio.Event()

    async def __call__(self, channel, greeted):
        if not self.acts:
            self.over.set()
            await asyncio.Event().wait()
        act = self.acts.pop(0)
        if isinstance(act, tuple):
            greeted()
            (act,) = act
        raise act


class Dialling:
    def __init__(self):
        self.directory = StaticDirectory(Board(), ManualClock())
        self.clock = TickingClock()

    def redialler(self, script):
        return Redialler(
            "b",
            script,
            directory=self.directory,
            transport=MemoryTransport(),
            clock=self.clock,
        )


@pytest.fixture
async def dialling():
    dialling = Dialling()
    await dialling.directory.announce(Role.PEER, "b", "b:1")
    return dialling


async def until_the_script_is_over(redialler, script):
    running = asyncio.create_task(redialler.run())
    over = asyncio.create_task(script.over.wait())
    await asyncio.wait((running, over), return_when=asyncio.FIRST_COMPLETED)
    is_over = over.done()
    for task in (running, over):
        task.cancel()
    results = await asyncio.gather(running, over, return_exceptions=True)
    assert is_over, results


async def test_a_peer_that_nobody_announced_is_given_up_after_its_time():
    dialling, script = Dialling(), Script()
    with pytest.raises(Unavailable, match=r"peer b cannot be reached: .*not in the DHT"):
        await dialling.redialler(script).run()
    assert dialling.clock.looks == 4, "at 0, 10, 20 and 30 seconds"


async def test_a_peer_that_only_fails_is_given_up_after_its_time(dialling):
    script = Script(*[OutOfTurn("not now")] * 9)
    with pytest.raises(Unavailable, match="peer b cannot be reached: not now"):
        await dialling.redialler(script).run()
    assert len(script.acts) == 9 - 4


async def test_a_connection_starts_the_time_anew(dialling):
    away, seen = OutOfTurn("not now"), (Unavailable("gone again"),)
    script = Script(away, away, seen, away, away, seen, away, away)
    await until_the_script_is_over(dialling.redialler(script), script)


@pytest.mark.parametrize("error", [InternalError, NonFinite, OutOfTurn, Unavailable])
async def test_what_ails_the_peer_does_not_end_this_sides_attempt(dialling, error):
    script = Script(error("its own trouble"), (error("more trouble"),))
    await until_the_script_is_over(dialling.redialler(script), script)


async def test_another_spec_at_the_peer_ends_the_attempt_at_once(dialling):
    script = Script(RunMismatch("digests aa here, bb there"), OutOfTurn("never reached"))
    with pytest.raises(Unavailable, match="peer b: digests aa here, bb there"):
        await dialling.redialler(script).run()
    assert len(script.acts) == 1


async def test_a_bug_is_not_hidden(dialling):
    with pytest.raises(ZeroDivisionError):
        await dialling.redialler(Script(ZeroDivisionError())).run()
