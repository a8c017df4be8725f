"""A member that nobody tells where the coordinator is looks for it where it last was."""

from __future__ import annotations

import asyncio

import pytest

from swarm_ft.discovery import directory as module
from swarm_ft.discovery.directory import RememberingDirectory, find_coordinator
from swarm_ft.errors import Unavailable
from swarm_ft.identity.certificates import COORDINATOR_NAME, Role


class Told:
    """A directory that says what it is told to."""

    def __init__(self) -> None:
        self.found: dict[str, str] | Exception | None = {}

    async def announce(self, role: Role, name: str, endpoint: str) -> None:
        pass

    async def withdraw(self, role: Role, name: str) -> None:
        pass

    async def find(self, role: Role) -> dict[str, str]:
        if self.found is None:
            await asyncio.Event().wait()
        if isinstance(self.found, Exception):
            raise self.found
        return dict(self.found or {}) if role is Role.COORDINATOR else {}

    async def close(self) -> None:
        pass


async def test_where_the_coordinator_last_was_counts_when_nobody_tells(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "FIND_S", 0.01)
    told = Told()
    directory = RememberingDirectory(told, "192.0.2.1:7000")
    assert await find_coordinator(directory) == "192.0.2.1:7000"
    told.found = {COORDINATOR_NAME: "192.0.2.2:7000"}
    assert await find_coordinator(directory) == "192.0.2.2:7000"
    silences: list[dict[str, str] | Exception | None] = [None, {}, Unavailable("no node answers")]
    for silence in silences:
        told.found = silence
        assert await find_coordinator(directory) == "192.0.2.2:7000"
