"""A directory in memory, on a clock that is passed in. One `Board` is one swarm: directories that
share it see each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm_ft.base.clock import Clock
from swarm_ft.discovery.directory import checked_record, readable_records
from swarm_ft.identity.roles import Role


@dataclass(frozen=True, kw_only=True, slots=True)
class Posted:
    """A record on a board.

    Attributes:
        refresh_s: how often its owner refreshes it.
        lifetime_s: how long it lasts after each refresh.
    """

    endpoint: str
    posted_s: float
    refresh_s: float
    lifetime_s: float

    def is_alive(self, now_s: float) -> bool:
        """Whether it has been refreshed in time, seen from `now_s`."""
        since_refresh_s = (now_s - self.posted_s) % self.refresh_s
        return since_refresh_s < self.lifetime_s


@dataclass(frozen=True, slots=True)
class Board:
    """The state that all directories of one swarm share."""

    records: dict[tuple[Role, str], Posted] = field(default_factory=dict)


class StaticDirectory:
    """See `Directory`."""

    def __init__(
        self, board: Board, clock: Clock, *, lifetime_s: float = 60.0, refresh_s: float = 20.0
    ) -> None:
        self._board = board
        self._clock = clock
        self._lifetime_s = lifetime_s
        self._refresh_s = refresh_s
        self._mine: set[tuple[Role, str]] = set()

    async def announce(self, role: Role, name: str, endpoint: str) -> None:
        """See `Directory`."""
        checked_record(name, endpoint)
        self._mine.add((role, name))
        self._board.records[role, name] = Posted(
            endpoint=endpoint,
            posted_s=self._clock.now_s(),
            refresh_s=self._refresh_s,
            lifetime_s=self._lifetime_s,
        )

    async def withdraw(self, role: Role, name: str) -> None:
        """See `Directory`."""
        if (role, name) in self._mine:
            self._mine.discard((role, name))
            self._board.records.pop((role, name), None)

    async def find(self, role: Role) -> dict[str, str]:
        """See `Directory`."""
        now_s = self._clock.now_s()
        return readable_records(
            (name, posted.endpoint)
            for (of, name), posted in self._board.records.items()
            if of is role and posted.is_alive(now_s)
        )

    async def close(self) -> None:
        """See `Directory`."""
        for role, name in tuple(self._mine):
            await self.withdraw(role, name)
