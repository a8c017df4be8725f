"""The contract of every directory; the in-memory double must agree with the DHT."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from swarm_ft.discovery.dht import DhtDirectory, DhtOptions
from swarm_ft.discovery.directory import Directory
from swarm_ft.errors import BadOption
from swarm_ft.identity.roles import Role
from tests.doubles.directory import Board, StaticDirectory

pytestmark = pytest.mark.timeout(60)

LIFETIME_S = 0.8


class ManualClock:
    def __init__(self) -> None:
        self.time_s = 100.0

    def now_s(self) -> float:
        return self.time_s


class StaticSwarm:
    """Directories on one board."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.board = Board()

    async def member(self, *, refresh_s: float = 0.1) -> Directory:
        return StaticDirectory(self.board, self.clock, lifetime_s=LIFETIME_S, refresh_s=refresh_s)

    async def let_pass(self, seconds: float) -> None:
        self.clock.time_s += seconds

    async def close(self) -> None:
        pass


class DhtSwarm:
    """Directories in one DHT, with real time, since that is what expires its records."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._addresses: tuple[str, ...] = ()

    async def member(self, *, refresh_s: float = 0.1) -> Directory:
        options = DhtOptions(
            initial_peers=self._addresses, lifetime_s=LIFETIME_S, refresh_s=refresh_s
        )
        directory = await DhtDirectory.open(options)
        self._stack.push_async_callback(directory.close)
        self._addresses = self._addresses or directory.addresses
        return directory

    async def let_pass(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def close(self) -> None:
        await self._stack.aclose()


@pytest.fixture(params=[StaticSwarm, DhtSwarm], ids=["static", "dht"])
async def swarm(request: pytest.FixtureRequest) -> AsyncIterator[StaticSwarm | DhtSwarm]:
    made = request.param()
    yield made
    await made.close()


async def test_what_one_announces_all_find_by_role(swarm: StaticSwarm | DhtSwarm) -> None:
    one, other = await swarm.member(), await swarm.member()
    await one.announce(Role.PEER, "p1", "127.0.0.1:7001")
    await other.announce(Role.PEER, "p2", "[::1]:7002")
    await other.announce(Role.COORDINATOR, "c", "host.example:7003")
    for directory in (one, other):
        assert await directory.find(Role.PEER) == {"p1": "127.0.0.1:7001", "p2": "[::1]:7002"}
        assert await directory.find(Role.COORDINATOR) == {"c": "host.example:7003"}


async def test_nobody_there_is_an_empty_answer(swarm: StaticSwarm | DhtSwarm) -> None:
    directory = await swarm.member()
    assert await directory.find(Role.COORDINATOR) == {}


async def test_announcing_again_replaces_the_endpoint(swarm: StaticSwarm | DhtSwarm) -> None:
    one, other = await swarm.member(), await swarm.member()
    for port in range(7001, 7006):
        await one.announce(Role.PEER, "p", f"127.0.0.1:{port}")
    # A node of the DHT that was slow to take the last record learns it with the next refresh.
    async with asyncio.timeout(20):
        while await other.find(Role.PEER) != {"p": "127.0.0.1:7005"}:
            await one.announce(Role.PEER, "p", "127.0.0.1:7005")


async def test_what_is_withdrawn_is_not_found(swarm: StaticSwarm | DhtSwarm) -> None:
    one, other = await swarm.member(), await swarm.member()
    await one.announce(Role.PEER, "p", "127.0.0.1:7001")
    assert await other.find(Role.PEER) == {"p": "127.0.0.1:7001"}
    await one.withdraw(Role.PEER, "p")
    assert await one.find(Role.PEER) == {}
    assert await other.find(Role.PEER) == {}
    await swarm.let_pass(0.3)
    assert await other.find(Role.PEER) == {}


async def test_what_is_withdrawn_can_be_announced_again(swarm: StaticSwarm | DhtSwarm) -> None:
    one, other = await swarm.member(), await swarm.member()
    await one.announce(Role.PEER, "p", "127.0.0.1:7001")
    await one.withdraw(Role.PEER, "p")
    await one.announce(Role.PEER, "p", "127.0.0.1:7002")
    assert await other.find(Role.PEER) == {"p": "127.0.0.1:7002"}


async def test_withdrawing_what_another_announced_changes_nothing(
    swarm: StaticSwarm | DhtSwarm,
) -> None:
    one, other = await swarm.member(), await swarm.member()
    await one.announce(Role.PEER, "p", "127.0.0.1:7001")
    await other.withdraw(Role.PEER, "p")
    assert await other.find(Role.PEER) == {"p": "127.0.0.1:7001"}


async def test_a_closed_directory_leaves_nothing_behind(swarm: StaticSwarm | DhtSwarm) -> None:
    one, other = await swarm.member(), await swarm.member()
    await other.announce(Role.PEER, "p", "127.0.0.1:7001")
    assert await one.find(Role.PEER) == {"p": "127.0.0.1:7001"}
    await other.close()
    assert await one.find(Role.PEER) == {}


async def test_a_record_outlives_its_lifetime_while_it_is_refreshed(
    swarm: StaticSwarm | DhtSwarm,
) -> None:
    one, other = await swarm.member(), await swarm.member()
    await one.announce(Role.PEER, "p", "127.0.0.1:7001")
    await swarm.let_pass(1.5 * LIFETIME_S)
    assert await other.find(Role.PEER) == {"p": "127.0.0.1:7001"}


async def test_a_record_that_nobody_refreshes_expires(swarm: StaticSwarm | DhtSwarm) -> None:
    one, other = await swarm.member(refresh_s=1000.0), await swarm.member()
    await one.announce(Role.PEER, "p", "127.0.0.1:7001")
    assert await other.find(Role.PEER) == {"p": "127.0.0.1:7001"}
    await swarm.let_pass(1.1 * LIFETIME_S)
    assert await other.find(Role.PEER) == {}


@pytest.mark.parametrize(
    ("name", "endpoint"),
    [
        ("two words", "127.0.0.1:1"),
        ("p", "unix:/tmp/x:1"),
    ],
)
async def test_what_is_no_record_is_refused(
    swarm: StaticSwarm | DhtSwarm, name: str, endpoint: str
) -> None:
    directory = await swarm.member()
    with pytest.raises(BadOption):
        await directory.announce(Role.PEER, name, endpoint)
    assert await directory.find(Role.PEER) == {}
