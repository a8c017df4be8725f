"""Roles of a swarm's members, without their proofs; the module needs no cryptography."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swarm_ft.identity.keys import PublicKey

COORDINATOR_NAME = "coordinator"
"""Name in the coordinator's certificate; every other member's name is derived from its key."""


class Role(StrEnum):
    """Role of a member or of a newcomer."""

    COORDINATOR = "coordinator"
    PEER = "peer"
    CLIENT = "client"
    NEWCOMER = "newcomer"
    """A process with an invitation, and without a certificate of the swarm yet."""
    RELAY = "relay"
    """A member that joins two members' streams, where no other connection works."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """The other end of a link, by its certificate.

    Attributes:
        role: Role in the certificate.
        name: Name derived from its key; a newcomer has its invitation's name.
        key: Public key of the certificate.
    """

    role: Role
    name: str
    key: PublicKey

    def __str__(self) -> str:
        return f"{self.role} {self.name}"
