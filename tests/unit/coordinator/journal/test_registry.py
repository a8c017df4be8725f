"""Invitations and members in their database, shared by a coordinator and its owner's commands."""

import stat
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from swarm_ft.coordinator.journal.registry import FILE, MAX_INVITATIONS, Registry
from swarm_ft.errors import BadInvite, JournalError, NotAllowed, NotFound
from swarm_ft.identity.certificates import Caller, Role, caller_of
from swarm_ft.identity.invites import Invite, invitation_certificate
from swarm_ft.identity.keys import PublicKey, name_of, new_key

NOW = datetime.now(UTC)
AUTHORITY = invitation_certificate(new_key(), "some authority", NOW)


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    with closing(Registry(tmp_path)) as registry:
        yield registry


def invited(registry: Registry, role: Role = Role.PEER, uses: int = 1, days: float = 1) -> Invite:
    return registry.invite(bytes(16), ("203.0.113.7:7000",), role, uses, NOW + timedelta(days=days))


def newcomer(invite: Invite, key: PublicKey | None = None) -> Caller:
    key = key or new_key().public_key()
    return Caller(role=Role.NEWCOMER, name=invite.name, key=key)


def member(key: PublicKey, role: Role = Role.PEER) -> Caller:
    return Caller(role=role, name=name_of(key), key=key)


@pytest.mark.parametrize("role", [Role.PEER, Role.CLIENT])
def test_who_was_invited_becomes_a_member(registry: Registry, role: Role) -> None:
    invite, key = invited(registry, role), new_key().public_key()
    assert registry.admit(newcomer(invite, key), NOW) == member(key, role)
    (record,) = registry.members()
    assert (record.name, record.role, record.invitation) == (name_of(key), role, invite.name)
    assert not record.is_revoked


def test_an_invitation_is_for_so_many_and_the_same_key_counts_once(registry: Registry) -> None:
    invite, first = invited(registry, uses=2), newcomer(invited(registry))
    keys = [new_key().public_key() for _ in range(3)]
    for key in (keys[0], keys[0], keys[1], keys[0]):
        registry.admit(newcomer(invite, key), NOW)
    with pytest.raises(BadInvite, match="used up"):
        registry.admit(newcomer(invite, keys[2]), NOW)
    registry.admit(first, NOW)
    assert [record.uses_left for record in registry.invitations()] == [0, 0]


def test_an_invitation_expires_and_members_stay(registry: Registry) -> None:
    invite, key = invited(registry, uses=5, days=1), new_key().public_key()
    registry.admit(newcomer(invite, key), NOW)
    later = NOW + timedelta(days=2)
    with pytest.raises(BadInvite, match="expired"):
        registry.admit(newcomer(invite), later)
    registry.admit(newcomer(invite, key), later)
    assert registry.admit(member(key), later) == member(key)


def test_a_member_that_is_revoked_is_let_in_no_more(registry: Registry) -> None:
    invite, key = invited(registry, uses=5), new_key().public_key()
    registry.admit(newcomer(invite, key), NOW)
    registry.revoke(name_of(key))
    assert registry.revoked() == {name_of(key)}
    for caller in (member(key), newcomer(invite, key), newcomer(invited(registry), key)):
        with pytest.raises(NotAllowed, match="revoked"):
            registry.admit(caller, NOW)


def test_an_invitation_that_is_revoked_lets_nobody_in(registry: Registry) -> None:
    invite = invited(registry, uses=5)
    registry.revoke(invite.name)
    with pytest.raises(BadInvite, match="revoked"):
        registry.admit(newcomer(invite), NOW)
    with pytest.raises(NotFound):
        registry.revoke("nobody")


def test_nobody_is_a_member_by_its_own_word(registry: Registry) -> None:
    key = new_key().public_key()
    with pytest.raises(NotAllowed, match="no member"):
        registry.admit(member(key), NOW)
    unknown = Caller(role=Role.NEWCOMER, name="invite-0", key=key)
    with pytest.raises(BadInvite):
        registry.admit(unknown, NOW)


def test_what_one_process_changes_another_sees(tmp_path: Path) -> None:
    with closing(Registry(tmp_path)) as coordinator, closing(Registry(tmp_path)) as owner:
        before = coordinator.version()
        assert coordinator.version() == before
        invite = invited(owner)
        assert coordinator.version() != before
        shown = invite.newcomer_certificate(new_key().public_key(), NOW)
        caller = caller_of(shown, AUTHORITY, coordinator.certificates())
        coordinator.admit(caller, NOW)
        assert len(owner.members()) == 1


def test_no_more_than_the_newest_invitations_are_known(registry: Registry) -> None:
    for _ in range(MAX_INVITATIONS + 3):
        newest = invited(registry)
    assert len(registry.certificates()) == MAX_INVITATIONS
    shown = newest.newcomer_certificate(new_key().public_key(), NOW)
    assert caller_of(shown, AUTHORITY, registry.certificates()).name == newest.name


def test_the_coordinators_address_is_kept(registry: Registry) -> None:
    assert registry.address() is None
    for address in ("one.example:7000", "other.example:7000"):
        registry.set_address(address)
        assert registry.address() == address


def test_the_file_is_its_owners_alone_and_holds_no_secret(tmp_path: Path) -> None:
    with closing(Registry(tmp_path)) as registry:
        invite = invited(registry)
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600
    assert invite.secret not in (tmp_path / FILE).read_bytes()


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"nothing of the kind" * 1000)
    with pytest.raises(JournalError, match="members"):
        Registry(tmp_path)
