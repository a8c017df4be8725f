"""A directory of members in one process; other processes cannot find them."""

from __future__ import annotations

from swarm_ft.discovery.directory import checked_record
from swarm_ft.identity.roles import Role


class InProcessDirectory:
    """In-process directory, shared by all members of the process; see `Directory`."""

    def __init__(self) -> None:
        self._records: dict[tuple[Role, str], str] = {}

    async def announce(self, role: Role, name: str, endpoint: str) -> None:
        """See `Directory`."""
        checked_record(name, endpoint)
        self._records[role, name] = endpoint

    async def withdraw(self, role: Role, name: str) -> None:
        """See `Directory`."""
        self._records.pop((role, name), None)

    async def find(self, role: Role) -> dict[str, str]:
        """See `Directory`."""
        return {name: endpoint for (of, name), endpoint in self._records.items() if of is role}

    async def close(self) -> None:
        """See `Directory`."""
        self._records.clear()
