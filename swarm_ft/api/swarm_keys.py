"""The keys beside a coordinator's journal, and invitations for a whole swarm at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swarm_ft.coordinator.journal.registry import Registry
    from swarm_ft.identity.authority import Authority
    from swarm_ft.identity.invites import Invite
    from swarm_ft.identity.roles import Role

JOURNAL = "swarm-ft-coordinator.db"
"""Default path of a coordinator's journal."""

FIRST_LIFETIME = timedelta(days=1)
"""Lifetime of invitations for members that start together with their coordinator."""


def keys_folder(journal: str) -> Path:
    """Return the folder of the keys of the swarm with this journal."""
    return Path(f"{journal}.keys")


@contextmanager
def open_keys(journal: str) -> Iterator[tuple[Authority, Registry]]:
    """Open a swarm's authority and its registry of members.

    Raises:
        BadOption: The swarm has no keys.
        JournalError: The registry cannot be read.
    """
    from swarm_ft.coordinator.journal.registry import Registry
    from swarm_ft.identity.authority import Authority

    folder = keys_folder(journal)
    authority = Authority.open(folder)
    with closing(Registry(folder)) as registry:
        yield authority, registry


def first_invitations(journal: str, uses: Mapping[Role, int]) -> dict[Role, Invite]:
    """Create an invitation per role, before the coordinator of the swarm starts.

    The function creates the swarm's keys if there are none. The invitations have no address of the
    coordinator yet, see `leading_to`.

    Args:
        journal: Path of the coordinator's journal.
        uses: Number of members that may join, by role.
    """
    from swarm_ft.coordinator.journal.registry import Registry
    from swarm_ft.identity.authority import Authority

    folder = keys_folder(journal)
    authority = Authority.open(folder) if folder.exists() else Authority.make(folder)
    until = datetime.now(UTC) + FIRST_LIFETIME
    with closing(Registry(folder)) as registry:
        return {
            role: registry.invite(authority.fingerprint, (), role, number, until)
            for role, number in uses.items()
        }


def with_address(endpoint: str, invite: Invite) -> Invite:
    """Return the same invitation with the coordinator's address."""
    return replace(invite, addresses=(endpoint,))
