"""A member without an answer from the DHT uses the coordinator's last endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from swarm_ft.discovery import fallback_directory as module
from swarm_ft.discovery.directory import find_coordinator
from swarm_ft.discovery.fallback_directory import FallbackDirectory
from swarm_ft.errors import DirectoryUnreachable, Unavailable
from swarm_ft.identity.roles import COORDINATOR_NAME, Role

FIRST, SECOND = "192.0.2.1:7000", "192.0.2.2:7000"
Silence = dict[str, str] | Exception | None


class RecordedLog:
    """A DHT with configured answers."""

    def __init__(self, found: Silence = None) -> None:
        self.found: Silence = {} if found is None else found
        self.is_lost = False
        self.announced = asyncio.Event()
        self.abandoned = asyncio.Event()

    async def announce(self, role: Role, name: str, endpoint: str) -> None:
        self.announced.set()

    async def withdraw(self, role: Role, name: str) -> None:
        self.announced.clear()

    async def find(self, role: Role) -> dict[str, str]:
        if self.found is None:
            await asyncio.Event().wait()
        if isinstance(self.found, Exception):
            raise self.found
        return dict(self.found or {}) if role is Role.COORDINATOR else {}

    async def close(self) -> None:
        pass

    async def abandon(self) -> None:
        self.abandoned.set()


@asynccontextmanager
async def entered(*dhts: RecordedLog | Exception | None) -> AsyncIterator[FallbackDirectory]:
    """Yield a directory that joins these DHTs one after the other; None does not answer."""
    coming = iter(dhts)

    async def open_dht() -> RecordedLog:
        dht = next(coming)
        if dht is None:
            await asyncio.Event().wait()
            raise AssertionError
        if isinstance(dht, Exception):
            raise dht
        return dht

    directory = FallbackDirectory(open_dht, FIRST)
    await directory.enter()
    try:
        yield directory
    finally:
        await directory.close()


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FIND_S", "LOOK_EVERY_S"):
        monkeypatch.setattr(module, name, 0.01)


async def test_where_the_coordinator_last_was_counts_when_nobody_tells() -> None:
    dht = RecordedLog()
    async with entered(dht) as directory:
        assert await find_coordinator(directory) == FIRST
        dht.found = {COORDINATOR_NAME: SECOND}
        assert await find_coordinator(directory) == SECOND
        silences: tuple[Silence, ...] = (Unavailable("no node answers"), {}, None)
        for silence in silences:
            dht.found = silence
            assert await find_coordinator(directory) == SECOND


async def test_a_dht_that_is_lost_is_entered_anew_and_told_again() -> None:
    lost, back = RecordedLog(), RecordedLog()
    async with asyncio.timeout(10), entered(lost, DirectoryUnreachable("away"), back) as directory:
        await directory.announce(Role.PEER, "p", "192.0.2.7:7001")
        assert lost.announced.is_set()
        lost.is_lost = True
        await back.announced.wait()
        assert lost.abandoned.is_set()
        await directory.withdraw(Role.PEER, "p")
        assert not back.announced.is_set()


async def test_a_member_goes_on_without_a_dht_until_there_is_one() -> None:
    late = RecordedLog({COORDINATOR_NAME: SECOND})
    async with asyncio.timeout(10), entered(DirectoryUnreachable("dark"), late) as directory:
        await directory.announce(Role.PEER, "p", "192.0.2.7:7001")
        assert await directory.find(Role.PEER) == {}
        await late.announced.wait()
        assert await find_coordinator(directory) == SECOND


async def test_nobody_waits_for_a_dht_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ENTER_S", 0.01)
    async with asyncio.timeout(10), entered(None) as directory:
        await directory.announce(Role.PEER, "p", "192.0.2.7:7001")
        assert await find_coordinator(directory) == FIRST


async def test_a_dht_that_does_not_take_what_is_announced_is_left() -> None:
    class Full(RecordedLog):
        async def announce(self, role: Role, name: str, endpoint: str) -> None:
            raise Unavailable("no room")

    full, good = Full(), RecordedLog()
    unreachable = DirectoryUnreachable("dark")
    async with asyncio.timeout(10), entered(unreachable, full, good) as directory:
        await directory.announce(Role.PEER, "p", "192.0.2.7:7001")
        await good.announced.wait()
        assert full.abandoned.is_set()
