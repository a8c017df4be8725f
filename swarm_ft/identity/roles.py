"""What somebody is in a swarm. Knows nothing of how that is proved, and needs no cryptography."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swarm_ft.identity.keys import PublicKey

COORDINATOR_NAME = "coordinator"
"""Whoever holds a certificate of this name is the coordinator; a peer's name is its key's."""


class Role(StrEnum):
    """What somebody is in a swarm."""

    COORDINATOR = "coordinator"
    PEER = "peer"
    CLIENT = "client"
    NEWCOMER = "newcomer"
    """Has an invitation, and no certificate of the swarm yet."""
    RELAY = "relay"
    """Joins members that no other way brings together, and does nothing else."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """The other end of a link, by its certificate.

    Attributes:
        name: of its key; a newcomer's is that of its invitation.
        key: its public key.
    """

    role: Role
    name: str
    key: PublicKey

    def __str__(self) -> str:
        return f"{self.role} {self.name}"
