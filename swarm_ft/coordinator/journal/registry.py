"""Registry of invitations and members, in a database beside the keys.

The coordinator and its operator's commands (`swarm-ft invite`, `swarm-ft keys`) open it at the same
time: a user who may write to the folder is the operator, and needs no other permission.
"""

from __future__ import annotations

import json
import secrets
import sqlite3
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from swarm_ft.base.log import get_logger
from swarm_ft.base.private_files import make_private, open_private
from swarm_ft.coordinator.journal.disk_errors import error_text
from swarm_ft.coordinator.journal.schema_version import check_version, copy_beside, version_of
from swarm_ft.errors import BadInvite, BadOption, JournalError, NotAllowed, NotFound
from swarm_ft.identity.certificates import Certificate, from_der, to_der
from swarm_ft.identity.invites import (
    NUMBER_BYTES,
    SECRET_BYTES,
    Invite,
    invitation_certificate,
    invitation_key,
    parse_invite,
)
from swarm_ft.identity.keys import name_of
from swarm_ft.identity.roles import Caller, Role
from swarm_ft.protocol.spec.grant import PROBATION, Grant
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.member_name import ChosenName
from swarm_ft.protocol.spec.priority import Claim

logger = get_logger(__name__)

FILE = "members.db"
VERSION, OLDEST = 2, 0
"""Version of the tables, and the oldest one that can be migrated: those of 1, without a number."""
MAX_INVITATIONS = 256
"""Newest invitations that handshakes accept: a newcomer's may have to look at all of them."""
BUSY_TIMEOUT_S = 5.0

_SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS invitations (
    name TEXT PRIMARY KEY, role TEXT NOT NULL, granted TEXT NOT NULL, uses_left INTEGER,
    expires_unix_s INTEGER, certificate BLOB NOT NULL, note TEXT NOT NULL DEFAULT ''
);
CREATE TABLE IF NOT EXISTS members (
    name TEXT PRIMARY KEY, role TEXT NOT NULL, granted TEXT NOT NULL, invitation TEXT NOT NULL,
    joined_unix_s INTEGER NOT NULL, seen_unix_s INTEGER NOT NULL,
    is_revoked INTEGER NOT NULL DEFAULT 0, chosen_name TEXT NOT NULL DEFAULT ''
) WITHOUT ROWID;
"""
_TO_VERSION_2 = """
ALTER TABLE invitations ADD COLUMN note TEXT NOT NULL DEFAULT '';
ALTER TABLE members ADD COLUMN chosen_name TEXT NOT NULL DEFAULT '';
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberRecord:
    """A key that was admitted.

    Attributes:
        grant: Stages that it may host, if it is a peer's.
        invitation: Name of the invitation that it came with.
        joined_unix_s: Unix seconds of its first enrolment.
        seen_unix_s: Unix seconds of its last message to the coordinator.
        chosen_name: The name for people that the member or its invitation chose; empty: none.
    """

    name: str
    role: Role
    grant: Grant
    invitation: str
    joined_unix_s: int
    seen_unix_s: int
    is_revoked: bool
    chosen_name: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class InvitationRecord:
    """An invitation without its secret.

    Attributes:
        grant: Stages that a peer with it may host.
        uses_left: Number of further members; None: unlimited.
        expires_unix_s: Unix seconds of its expiry; None: never.
        note: The name for people that its members have unless they choose one; empty: none.
    """

    name: str
    role: Role
    grant: Grant
    uses_left: int | None
    expires_unix_s: int | None
    note: str = ""


def recorded_names(folder: Path) -> tuple[Mapping[str, str], frozenset[str]]:
    """Return what `Registry.chosen_names` does, and change nothing: not even an earlier version.

    Args:
        folder: The folder of the authority's keys. Without a registry of today's version there are
            no names.
    """
    try:
        with closing(
            sqlite3.connect(f"{(folder / FILE).absolute().as_uri()}?mode=ro", uri=True)
        ) as db:
            return _chosen_names(db)
    except sqlite3.Error:
        return {}, frozenset()


def _chosen_names(db: sqlite3.Connection) -> tuple[Mapping[str, str], frozenset[str]]:
    rows = db.execute("SELECT name, chosen_name, is_revoked FROM members").fetchall()
    chosen = {member_id: name for member_id, name, _ in rows}
    return chosen, frozenset(member_id for member_id, _, is_revoked in rows if is_revoked)


class Registry:
    """Invitations and members of one swarm.

    Args:
        folder: Folder of the authority's keys.

    Raises:
        JournalError: The database cannot be read or written, as from all methods; or a later
            version wrote it.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._one_at_a_time = threading.Lock()
        with self._errors():
            with open_private(self._path, "ab"):
                pass  # create it before SQLite does, which would make it readable for all
            self._db = sqlite3.connect(
                self._path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            self._db.execute("PRAGMA synchronous=FULL")
            self._migrate()
            make_private(self._path)

    def _migrate(self) -> None:
        """Create the tables, or migrate those of an earlier version."""
        version = version_of(self._db)
        check_version(f"members {self._path}", version, OLDEST, VERSION)
        if version == VERSION:
            return
        if version is not None:
            copy_beside(self._db, self._path, version)
        # One transaction: another process that opens it now sees all of it, or nothing.
        steps = _SCHEMA if version is None else _TO_VERSION_2
        self._db.executescript(f"BEGIN; {steps} PRAGMA user_version={VERSION}; COMMIT;")

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    # ---- invitations

    def invite(  # noqa: PLR0913 - what an invitation grants
        self,
        fingerprint: bytes,
        addresses: tuple[str, ...],
        role: Role,
        uses: int,
        expires: datetime,
        grant: Grant = Grant(),  # noqa: B008 - a value
        note: str = "",
    ) -> Invite:
        """Create an invitation; its secret is stored nowhere else.

        Raises:
            BadOption: No member may have the note as its name.
        """
        refused = ChosenName().refusal(note)
        if refused is not None:
            raise BadOption(f"--note: {refused}")
        invite = _new_invite(fingerprint, addresses)
        limits = uses, int(expires.timestamp())
        with self._errors():
            self._db.execute(
                f"INSERT {_INVITATION}", (*_invitation_row(invite, role, grant), *limits, note)
            )
        return invite

    def open_to_all(self, fingerprint: bytes, addresses: tuple[str, ...]) -> Invite:
        """Return the invitation that makes anybody a replica on probation.

        It stays the same until it is revoked, except for its addresses. It is no secret, so it is
        stored.
        """
        with self._errors(), self._transaction():
            stored = self._open_invitation()
            if stored is not None and stored.fingerprint == fingerprint:
                invite = replace(stored, addresses=addresses)
            else:
                invite = _new_invite(fingerprint, addresses)
            row = _invitation_row(invite, Role.PEER, PROBATION)
            self._db.execute(f"INSERT OR REPLACE {_INVITATION}", (*row, None, None, ""))
            self._db.execute("INSERT OR REPLACE INTO facts VALUES ('open', ?)", (str(invite),))
        return invite

    def close_to_all(self) -> None:
        """Revoke the public invitation; members that came with it stay."""
        with self._errors():
            self._db.execute("UPDATE invitations SET uses_left=0 WHERE uses_left IS NULL")

    def open_invitation(self) -> Invite | None:
        """Return the invitation of `open_to_all`; None if the swarm is not open."""
        with self._errors():
            return self._open_invitation()

    def _open_invitation(self) -> Invite | None:
        row = self._db.execute("SELECT value FROM facts WHERE name='open'").fetchone()
        invite = parse_invite(row[0]) if row else None
        query = "SELECT name FROM invitations WHERE name=? AND uses_left IS NULL"
        is_open = invite and self._db.execute(query, (invite.name,)).fetchone()
        return invite if is_open else None

    def invitations(self) -> list[InvitationRecord]:
        """Return all invitations, the oldest first."""
        with self._errors():
            rows = self._db.execute(
                "SELECT name, role, granted, uses_left, expires_unix_s, note FROM invitations"
                " ORDER BY rowid"
            ).fetchall()
        return [
            InvitationRecord(
                name=name,
                role=Role(role),
                grant=_grant_from(granted),
                uses_left=uses,
                expires_unix_s=expires,
                note=note,
            )
            for name, role, granted, uses, expires, note in rows
        ]

    def certificates(self) -> tuple[Certificate, ...]:
        """Return certificates of invitations, also of used ones, to name them in errors."""
        with self._errors():
            rows = self._db.execute(
                "SELECT certificate FROM invitations"
                " ORDER BY uses_left IS NULL DESC, rowid DESC LIMIT ?",
                (MAX_INVITATIONS,),
            ).fetchall()
        return tuple(from_der(row[0]) for row in rows)

    # ---- members

    def admit(self, caller: Caller, now: datetime, chosen_name: str = "") -> Caller:
        """Return the identity of an enrolment's caller from now on.

        A member that comes with another invitation of its role gets the grant of that one, except
        for the public invitation.

        Args:
            caller: The caller, as TLS knows it.
            now: The time.
            chosen_name: The name for people that it chose. Empty leaves the one that it has.

        Raises:
            BadInvite: Its invitation is used up, has expired or was revoked.
            NotAllowed: Its key was revoked, or never admitted.
        """
        name, now_s = name_of(caller.key), int(now.timestamp())
        with self._errors():
            known = self._member(name)
            if known is not None and known.is_revoked:
                raise NotAllowed(f"{known.role} {name}: its key was revoked")
            if known is None and caller.role is not Role.NEWCOMER:
                raise NotAllowed(f"{caller} is not a member; join with an invitation")
            if known is None:
                with self._transaction():
                    role = self._let_in(name, caller.name, now_s)
            else:
                role = known.role
                if caller.role is Role.NEWCOMER and caller.name != known.invitation:
                    with self._transaction():
                        self._grant_anew(known, caller.name, now_s)
                self._note_seen((name,), now_s)
            if chosen_name and (known is None or known.chosen_name != chosen_name):
                row = chosen_name, name
                self._db.execute("UPDATE members SET chosen_name=? WHERE name=?", row)
        return Caller(role=role, name=name, key=caller.key)

    def note_seen(self, names: Collection[str], now: datetime) -> None:
        """Store now as the last contact with these members; ignore unknown names."""
        with self._errors():
            self._note_seen(names, int(now.timestamp()))

    def _note_seen(self, names: Collection[str], now_s: int) -> None:
        """Store when members were last seen; a full disk keeps no member out."""
        rows = [(now_s, name) for name in names]
        try:
            with self._transaction():
                self._db.executemany("UPDATE members SET seen_unix_s=? WHERE name=?", rows)
        except sqlite3.OperationalError as error:
            logger.warning("members %s: %s", self._path, error_text(error))

    def check(self, caller: Caller, now: datetime) -> None:
        """Check that `admit` would admit the caller now, without using the invitation.

        Raises:
            BadInvite: Its invitation is used up, has expired or was revoked.
            NotAllowed: Its key was revoked.
        """
        name = name_of(caller.key)
        with self._errors():
            known = self._member(name)
            if known is not None and known.is_revoked:
                raise NotAllowed(f"{known.role} {name}: its key was revoked")
            if known is None or caller.name != known.invitation:
                self._still_good(caller.name, int(now.timestamp()))

    def grant_of(self, name: str) -> Grant:
        """Return the grant of a peer.

        Raises:
            NotAllowed: There is no such member, or its key was revoked.
        """
        return self._present(name, "peer").grant

    def claim_of(self, name: str) -> Claim:
        """Return a client's claim on peers, which it shares with all keys of its invitation.

        Raises:
            NotAllowed: There is no such member, or its key was revoked.
        """
        known = self._present(name, "client")
        return Claim(known.invitation, known.grant.weight)

    def _present(self, name: str, role: str) -> MemberRecord:
        with self._errors():
            known = self._member(name)
        if known is None or known.is_revoked:
            why = "its key was revoked" if known else "it is not a member"
            raise NotAllowed(f"{role} {name}: {why}")
        return known

    def members(self) -> list[MemberRecord]:
        """Return all members that were ever admitted, in the order of their enrolment."""
        with self._errors():
            rows = self._db.execute(f"{_MEMBERS} ORDER BY joined_unix_s, name").fetchall()
        return [_member(row) for row in rows]

    def chosen_names(self) -> tuple[Mapping[str, str], frozenset[str]]:
        """Return the chosen name of each member by its id, empty for none; and revoked ids."""
        with self._errors():
            return _chosen_names(self._db)

    def chosen_name_of(self, name: str) -> str:
        """Return the name for people that a member has chosen; empty for none.

        Raises:
            NotAllowed: there is no such member, or its key was revoked.
        """
        return self._present(name, "member").chosen_name

    def revoke(self, name: str) -> None:
        """Revoke a member's key, or an invitation.

        Raises:
            NotFound: There is no such member or invitation.
        """
        with self._errors(), self._transaction():
            members = self._db.execute("UPDATE members SET is_revoked=1 WHERE name=?", (name,))
            uses = "UPDATE invitations SET uses_left=0 WHERE name=?"
            if members.rowcount + self._db.execute(uses, (name,)).rowcount == 0:
                raise NotFound(f"{name}: no member and no invitation has this name")

    def revoked(self) -> frozenset[str]:
        """Return the names of members whose keys were revoked."""
        with self._errors():
            rows = self._db.execute("SELECT name FROM members WHERE is_revoked").fetchall()
        return frozenset(row[0] for row in rows)

    def void_all(self) -> tuple[int, int]:
        """Remove all members and invitations, for a new authority; revoked keys stay revoked.

        Returns:
            Numbers of members and of invitations that became invalid.
        """
        with self._errors(), self._transaction():
            members = self._db.execute("DELETE FROM members WHERE NOT is_revoked").rowcount
            open_ones = "SELECT count(*) FROM invitations WHERE uses_left IS NULL OR uses_left > 0"
            invitations = self._db.execute(open_ones).fetchone()[0]
            self._db.execute("DELETE FROM invitations")
        return members, invitations

    def note_rotation(self) -> None:
        """Record that the folder has other keys, so that `version` changes."""
        with self._errors():
            now = datetime.now(UTC).isoformat()
            self._db.execute("INSERT OR REPLACE INTO facts VALUES ('rotated', ?)", (now,))

    def version(self) -> tuple[int, int]:
        """Return a value that changes with every change, by any process."""
        with self._errors():
            others = self._db.execute("PRAGMA data_version").fetchone()[0]
        return others, self._db.total_changes

    # ---- the coordinator's address, for invitations

    def set_address(self, address: str) -> None:
        """Store the coordinator's address for future invitations."""
        with self._errors():
            self._db.execute("INSERT OR REPLACE INTO facts VALUES ('address', ?)", (address,))

    def address(self) -> str | None:
        """Return the coordinator's last address; None before its first start."""
        with self._errors():
            row = self._db.execute("SELECT value FROM facts WHERE name='address'").fetchone()
        return row[0] if row else None

    # ---- inside

    def _let_in(self, name: str, invitation: str, now_s: int) -> Role:
        role, granted = self._use(invitation, now_s)
        self._db.execute(
            "INSERT INTO members (name, role, granted, invitation, joined_unix_s, seen_unix_s,"
            " chosen_name) SELECT ?, ?, ?, ?, ?, ?, note FROM invitations WHERE name=?",
            (name, role, granted, invitation, now_s, now_s, invitation),
        )
        return Role(role)

    def _grant_anew(self, known: MemberRecord, invitation: str, now_s: int) -> None:
        query = "SELECT 1 FROM invitations WHERE name=? AND role=? AND uses_left IS NOT NULL"
        if self._db.execute(query, (invitation, known.role.value)).fetchone():
            _, granted = self._use(invitation, now_s)
            row = granted, invitation, known.name
            self._db.execute("UPDATE members SET granted=?, invitation=? WHERE name=?", row)
            self._db.execute(
                "UPDATE members SET chosen_name=(SELECT note FROM invitations WHERE name=?)"
                " WHERE name=? AND chosen_name=''",
                (invitation, known.name),
            )

    def _use(self, invitation: str, now_s: int) -> tuple[str, str]:
        """Count an invitation down, and return the role and the grant that it gives."""
        role, granted = self._still_good(invitation, now_s)
        self._db.execute("UPDATE invitations SET uses_left=uses_left-1 WHERE name=?", (invitation,))
        return role, granted

    def _still_good(self, invitation: str, now_s: int) -> tuple[str, str]:
        """Return the role and the grant that an invitation gives."""
        row = self._db.execute(
            "SELECT role, granted, uses_left, expires_unix_s FROM invitations WHERE name=?",
            (invitation,),
        ).fetchone()
        role, granted, uses_left, expires_s = row or ("", "", 0, 0)
        if uses_left == 0:
            raise BadInvite(f"{invitation} is used up or revoked; ask for another one")
        if expires_s is not None and now_s >= expires_s:
            raise BadInvite(f"{invitation} has expired; ask for another one")
        return role, granted

    def _member(self, name: str) -> MemberRecord | None:
        row = self._db.execute(f"{_MEMBERS} WHERE name=?", (name,)).fetchone()
        return _member(row) if row else None

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            if self._db.in_transaction:  # a full disk has ended it already
                self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            with self._one_at_a_time:
                yield
        except (sqlite3.Error, OSError) as error:
            raise JournalError(f"members {self._path}: {error_text(error)}") from error


_INVITATION = (
    "INTO invitations"
    " (name, role, granted, certificate, uses_left, expires_unix_s, note)"
    " VALUES (?, ?, ?, ?, ?, ?, ?)"
)
_MEMBERS = (
    "SELECT name, role, granted, invitation, joined_unix_s, seen_unix_s, is_revoked, chosen_name"
    " FROM members"
)


def _new_invite(fingerprint: bytes, addresses: tuple[str, ...]) -> Invite:
    return Invite(
        fingerprint=fingerprint,
        number=secrets.token_bytes(NUMBER_BYTES),
        secret=secrets.token_bytes(SECRET_BYTES),
        addresses=addresses,
    )


def _invitation_row(invite: Invite, role: Role, grant: Grant) -> tuple[str, str, str, bytes]:
    """Return the columns that never change: name, role, grant, certificate."""
    key = invitation_key(invite.secret)
    certificate = to_der(invitation_certificate(key, invite.name, datetime.now(UTC)))
    return invite.name, role.value, json.dumps(asdict(grant)), certificate


def _grant_from(text: str) -> Grant:
    granted = json.loads(text)
    layers = granted["layers"]
    return Grant(**granted | {"layers": layers and LayerRange(**layers)})


def _member(row: tuple[str, str, str, str, int, int, int, str]) -> MemberRecord:
    name, role, granted, invitation, joined_s, seen_s, is_revoked, chosen_name = row
    return MemberRecord(
        name=name,
        role=Role(role),
        grant=_grant_from(granted),
        invitation=invitation,
        joined_unix_s=joined_s,
        seen_unix_s=seen_s,
        is_revoked=bool(is_revoked),
        chosen_name=chosen_name,
    )
