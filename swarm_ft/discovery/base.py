"""A directory of who is there, whoever keeps it. It knows no network."""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol


class Role(StrEnum):
    """What an announced process is."""

    COORDINATOR = "coordinator"
    PEER = "peer"


class Directory(Protocol):
    """Names and their endpoints, as records that expire unless they are refreshed."""

    async def announce(self, role: Role, name: str, endpoint: str) -> None:
        """Let others find `name` at `endpoint` (`host:port`) until withdrawn or closed.

        Announcing a name again replaces its endpoint.

        Raises:
            BadOption: the name or the endpoint is not fit for a record.
            Unavailable: the directory cannot take the record now.
        """
        ...

    async def withdraw(self, role: Role, name: str) -> None:
        """Take back what this directory announced; nothing if it did not."""
        ...

    async def find(self, role: Role) -> dict[str, str]:
        """Names and endpoints of all who are there now, this process included.

        Records come from strangers: only well-formed ones are returned.

        Raises:
            Unavailable: the directory does not answer.
        """
        ...

    async def close(self) -> None:
        """Withdraw everything and leave. The directory is of no use afterwards."""
        ...
