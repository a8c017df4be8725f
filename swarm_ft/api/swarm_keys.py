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
"""Of a coordinator that is not told otherwise."""

FIRST_LIFETIME = timedelta(days=1)
"""Of invitations for those who are started together."""


def keys_folder(journal: str) -> Path:
    """Where the keys of the swarm with this journal lie."""
    return Path(f"{journal}.keys")


@contextmanager
def opened(journal: str) -> Iterator[tuple[Authority, Registry]]:
    """A swarm's authority and its registry.

    Raises:
        BadOption: the swarm has no keys.
        JournalError: the registry cannot be read.
    """
    from swarm_ft.coordinator.journal.registry import Registry
    from swarm_ft.identity.authority import Authority

    folder = keys_folder(journal)
    authority = Authority.open(folder)
    with closing(Registry(folder)) as registry:
        yield authority, registry


def first_invitations(journal: str, uses: Mapping[Role, int]) -> dict[Role, Invite]:
    """By role, for so many each: for whoever starts a whole swarm at once.

    The swarm's keys are made if there are none. A coordinator that starts after this knows all of
    these from the beginning; where it will be they do not say yet, see `leading_to`.
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


def leading_to(endpoint: str, invite: Invite) -> Invite:
    """The same invitation, with the coordinator's address."""
    return replace(invite, addresses=(endpoint,))
