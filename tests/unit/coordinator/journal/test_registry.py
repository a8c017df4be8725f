"""Invitations and members in a database that a coordinator and its operator's commands share."""

import sqlite3
import stat
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from swarm_ft.coordinator.journal.registry import (
    FILE,
    MAX_INVITATIONS,
    VERSION,
    Registry,
    recorded_names,
)
from swarm_ft.errors import BadInvite, BadOption, JournalError, NotAllowed, NotFound
from swarm_ft.identity.certificates import caller_of
from swarm_ft.identity.invites import Invite, invitation_certificate
from swarm_ft.identity.keys import PublicKey, name_of, new_key
from swarm_ft.identity.roles import Caller, Role
from swarm_ft.protocol.spec.grant import PROBATION, Grant
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.priority import Claim
from tests.earlier_files import ALL, Earlier

NOW = datetime.now(UTC)
ADDRESSES = ("203.0.113.7:7000",)
AUTHORITY = invitation_certificate(new_key(), "some authority", NOW)


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    with closing(Registry(tmp_path)) as registry:
        yield registry


def invited(
    registry: Registry,
    role: Role = Role.PEER,
    uses: int = 1,
    days: float = 1,
    grant: Grant | None = None,
    note: str = "",
) -> Invite:
    until = NOW + timedelta(days=days)
    return registry.invite(bytes(16), ADDRESSES, role, uses, until, grant or Grant(), note)


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


@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.parametrize("change", ["nothing", "used", "used by it", "invitation", "key", "later"])
def test_a_check_says_what_an_admission_would_and_uses_nothing_up(
    registry: Registry, uses: int, change: str
) -> None:
    invite, key = invited(registry, uses=uses, days=1), new_key().public_key()
    caller, now = newcomer(invite, key), NOW
    match change:
        case "used":
            registry.admit(newcomer(invite), NOW)
        case "used by it":
            registry.admit(caller, NOW)
        case "invitation":
            registry.revoke(invite.name)
        case "key":
            registry.admit(caller, NOW)
            registry.revoke(name_of(key))
        case "later":
            now = NOW + timedelta(days=2)
    before = registry.invitations(), registry.members()
    checked = trouble(lambda: registry.check(caller, now))
    assert (registry.invitations(), registry.members()) == before
    assert checked == trouble(lambda: registry.admit(caller, now))


def trouble(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except (BadInvite, NotAllowed) as error:
        return str(error)
    return ""


def test_nobody_is_a_member_by_its_own_word(registry: Registry) -> None:
    key = new_key().public_key()
    with pytest.raises(NotAllowed, match="not a member"):
        registry.admit(member(key), NOW)
    unknown = Caller(role=Role.NEWCOMER, name="invite-0", key=key)
    with pytest.raises(BadInvite):
        registry.admit(unknown, NOW)


@pytest.mark.parametrize(
    "grant",
    [
        Grant(),
        Grant(replica_only=True),
        Grant(sees_tokens=False, layers=LayerRange(2, 7)),
        PROBATION,
    ],
)
def test_what_an_invitation_grants_its_members_have(registry: Registry, grant: Grant) -> None:
    invite, key = invited(registry, grant=grant), new_key().public_key()
    assert registry.admit(newcomer(invite, key), NOW) == member(key)
    (record,), (invitation,) = registry.members(), registry.invitations()
    assert record.grant == invitation.grant == registry.grant_of(name_of(key)) == grant


def test_keys_of_one_invitation_share_its_claim(registry: Registry) -> None:
    heavy, other = (
        invited(registry, Role.CLIENT, uses=2, grant=Grant(weight=weight)) for weight in (3, 1)
    )
    keys = [new_key().public_key() for _ in range(3)]
    for invite, key in zip((heavy, heavy, other), keys, strict=True):
        registry.admit(newcomer(invite, key), NOW)
    claims = [registry.claim_of(name_of(key)) for key in keys]
    assert claims == [Claim(heavy.name, 3), Claim(heavy.name, 3), Claim(other.name, 1)]
    registry.revoke(name_of(keys[0]))
    with pytest.raises(NotAllowed, match="revoked"):
        registry.claim_of(name_of(keys[0]))


def test_an_invitation_of_before_there_were_weights_has_the_usual_one(tmp_path: Path) -> None:
    with closing(Registry(tmp_path)) as registry:
        invite, key = invited(registry, Role.CLIENT), new_key().public_key()
        registry.admit(newcomer(invite, key), NOW)
    old = '{"replica_only": false, "sees_tokens": true, "layers": null}'
    with closing(sqlite3.connect(tmp_path / FILE)) as database:
        database.execute("UPDATE members SET granted=?", (old,))
        database.commit()
    with closing(Registry(tmp_path)) as registry:
        assert registry.claim_of(name_of(key)) == Claim(invite.name, 1)


def test_another_invitation_ends_a_probation(registry: Registry) -> None:
    public, key = registry.open_to_all(bytes(16), ADDRESSES), new_key().public_key()
    registry.admit(newcomer(public, key), NOW)
    better = invited(registry, grant=Grant(sees_tokens=False))
    for _ in range(2):
        assert registry.admit(newcomer(better, key), NOW) == member(key)
        assert registry.grant_of(name_of(key)) == Grant(sees_tokens=False)
    registry.admit(newcomer(public, key), NOW)
    assert registry.grant_of(name_of(key)) == Grant(sees_tokens=False)
    (record,) = registry.members()
    assert record.invitation == better.name
    assert registry.invitations()[1].uses_left == 0


def test_a_members_other_invitation_counts_if_it_would_let_it_in(registry: Registry) -> None:
    invite, key = invited(registry), new_key().public_key()
    registry.admit(newcomer(invite, key), NOW)
    clients, late = invited(registry, Role.CLIENT), invited(registry, days=-1)
    assert registry.admit(newcomer(clients, key), NOW) == member(key)
    with pytest.raises(BadInvite, match="expired"):
        registry.admit(newcomer(late, key), NOW)
    assert [one.uses_left for one in registry.invitations()] == [0, 1, 1]


def test_who_is_no_member_any_more_is_granted_nothing(registry: Registry) -> None:
    key = new_key().public_key()
    with pytest.raises(NotAllowed, match="not a member"):
        registry.grant_of(name_of(key))
    registry.admit(newcomer(invited(registry), key), NOW)
    registry.revoke(name_of(key))
    with pytest.raises(NotAllowed, match="revoked"):
        registry.grant_of(name_of(key))


def test_an_invitation_for_all_makes_any_number_replicas_on_probation(registry: Registry) -> None:
    public, later = registry.open_to_all(bytes(16), ADDRESSES), NOW + timedelta(days=3000)
    for when in (NOW, NOW, later):
        key = new_key().public_key()
        assert registry.admit(newcomer(public, key), when) == member(key)
        assert registry.grant_of(name_of(key)) == PROBATION
    (record,) = registry.invitations()
    assert (record.uses_left, record.expires_unix_s) == (None, None)


def test_the_invitation_for_all_stays_the_same_wherever_the_coordinator_is(tmp_path: Path) -> None:
    with closing(Registry(tmp_path)) as registry:
        first = registry.open_to_all(bytes(16), ADDRESSES)
    with closing(Registry(tmp_path)) as registry:
        assert registry.open_invitation() == first
        moved = registry.open_to_all(bytes(16), ("other.example:7000",))
        assert moved == replace(first, addresses=("other.example:7000",))
        assert registry.open_invitation() == moved
        registry.admit(newcomer(first), NOW)
        assert len(registry.invitations()) == 1


def revoke_all(registry: Registry) -> None:
    for invitation in registry.invitations():
        registry.revoke(invitation.name)


@pytest.mark.parametrize("ends", [Registry.close_to_all, revoke_all])
def test_an_invitation_for_all_that_is_taken_back_lets_nobody_in(
    registry: Registry, ends: Callable[[Registry], None]
) -> None:
    public, key = registry.open_to_all(bytes(16), ADDRESSES), new_key().public_key()
    registry.admit(newcomer(public, key), NOW)
    ends(registry)
    assert registry.open_invitation() is None
    with pytest.raises(BadInvite, match="used up or revoked"):
        registry.admit(newcomer(public), NOW)
    registry.admit(newcomer(public, key), NOW)
    assert registry.open_to_all(bytes(16), ADDRESSES) != public


def test_another_swarms_invitation_for_all_is_not_shown(registry: Registry) -> None:
    known = registry.open_to_all(bytes(16), ADDRESSES)
    assert registry.open_to_all(b"x" * 16, ADDRESSES).number != known.number


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
    public = registry.open_to_all(bytes(16), ADDRESSES)
    for _ in range(MAX_INVITATIONS):
        newest = invited(registry)
    assert knows(registry, public), "and the one for all"
    assert knows(registry, newest)


def knows(registry: Registry, invite: Invite) -> bool:
    shown = invite.newcomer_certificate(new_key().public_key(), NOW)
    return caller_of(shown, AUTHORITY, registry.certificates()).name == invite.name


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


# ---- names


def test_a_member_has_the_name_it_chose_before_its_invitations(registry: Registry) -> None:
    key = new_key().public_key()
    annas = invited(registry, note="Anna", uses=2)
    registry.admit(newcomer(annas, key), NOW)
    assert registry.chosen_name_of(name_of(key)) == "Anna"
    assert registry.invitations()[0].note == "Anna"
    registry.admit(member(key), NOW, "ada-3090")
    registry.admit(member(key), NOW)  # as it does to renew its certificate
    registry.admit(newcomer(invited(registry, note="Bob"), key), NOW)
    assert registry.members()[0].chosen_name == "ada-3090"
    other = new_key().public_key()
    registry.admit(newcomer(annas, other), NOW, "eve")
    assert registry.chosen_name_of(name_of(other)) == "eve"
    registry.revoke(name_of(other))
    chosen = {name_of(key): "ada-3090", name_of(other): "eve"}
    assert registry.chosen_names() == (chosen, frozenset({name_of(other)}))


def test_a_member_without_a_name_gets_that_of_its_next_invitation(registry: Registry) -> None:
    key = new_key().public_key()
    registry.admit(newcomer(invited(registry), key), NOW)
    assert registry.chosen_name_of(name_of(key)) == ""
    registry.admit(newcomer(invited(registry, note="Anna"), key), NOW)
    assert registry.chosen_name_of(name_of(key)) == "Anna"


def test_an_invitation_takes_no_note_that_can_be_no_name(registry: Registry) -> None:
    with pytest.raises(BadOption, match="--note: expected a name"):
        invited(registry, note="Anna's laptop")
    assert registry.invitations() == []


# ---- versions


@pytest.mark.parametrize("earlier", ALL, ids=lambda one: one.name)
def test_the_registry_of_an_earlier_commit_lets_its_members_in(
    tmp_path: Path, earlier: Earlier
) -> None:
    earlier.unpack(tmp_path)
    folder = tmp_path / "swarm"
    with closing(Registry(folder)) as registry:
        (known,) = registry.members()
        (invitation,) = registry.invitations()
        assert registry.grant_of(known.name) == Grant()
        assert (known.invitation, invitation.uses_left) == (invitation.name, 2)
        assert registry.address() == "192.0.2.1:7000"
    assert version_in(folder / FILE) == VERSION
    if earlier.registry == VERSION:
        assert not list(folder.glob(f"{FILE}.v*"))
        return
    copy = folder / f"{FILE}.v{earlier.registry}"
    assert version_in(copy) == earlier.registry
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    copy.unlink()
    with closing(Registry(folder)) as registry:
        assert registry.members() == [known]
        assert registry.chosen_names() == ({known.name: ""}, frozenset())
        key = new_key().public_key()
        registry.admit(newcomer(invited(registry, note="Anna"), key), NOW)
        assert registry.chosen_name_of(name_of(key)) == "Anna"
    assert not copy.exists()  # it is migrated once


@pytest.mark.parametrize("earlier", ALL, ids=lambda one: one.name)
def test_whoever_reads_names_alone_migrates_nothing(tmp_path: Path, earlier: Earlier) -> None:
    earlier.unpack(tmp_path)
    before = (tmp_path / "swarm" / FILE).read_bytes()
    chosen, revoked = recorded_names(tmp_path / "swarm")
    has_names = earlier.registry == VERSION
    assert (list(chosen.values()), revoked) == ([""] if has_names else [], frozenset())
    assert (tmp_path / "swarm" / FILE).read_bytes() == before
    assert recorded_names(tmp_path / "nowhere") == ({}, frozenset())
    assert not (tmp_path / "nowhere").exists()


def test_names_are_read_beside_the_coordinator(registry: Registry, tmp_path: Path) -> None:
    key = new_key().public_key()
    registry.admit(newcomer(invited(registry), key), NOW, "ada-3090")
    assert recorded_names(tmp_path) == registry.chosen_names()
    assert recorded_names(tmp_path)[0] == {name_of(key): "ada-3090"}


def test_a_registry_of_a_later_version_is_refused_in_one_line(tmp_path: Path) -> None:
    Registry(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / FILE)) as later:
        later.execute(f"PRAGMA user_version={VERSION + 1}")
    words = f"found {VERSION + 1}, which a later swarm-ft wrote; update this swarm-ft"
    with pytest.raises(JournalError, match=words) as refused:
        Registry(tmp_path)
    assert "\n" not in refused.value.message


def version_in(path: Path) -> int:
    with closing(sqlite3.connect(path)) as file:
        return int(file.execute("PRAGMA user_version").fetchone()[0])
