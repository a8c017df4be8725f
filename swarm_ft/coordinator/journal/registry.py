"""Who was invited, who was let in, and who is known no more, in a database beside the keys.

The coordinator and its owner's commands (`swarm-ft invite`, `swarm-ft keys`) have it open at the
same time: who may write to the folder is the owner, and needs to ask nobody.
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

from swarm_ft.coordinator.journal.disk_words import in_words
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
from swarm_ft.log import get_logger
from swarm_ft.private_files import make_private, open_private
from swarm_ft.protocol.spec.grant import PROBATION, Grant
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.member_name import ChosenName
from swarm_ft.protocol.spec.priority import Claim

logger = get_logger(__name__)

FILE = "members.db"
VERSION, OLDEST = 2, 0
"""Version of the tables, and the oldest that can be migrated: those of 1, without a version."""
MAX_INVITATIONS = 256
"""The newest ones: each handshake of a newcomer may have to look at all of them."""
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
    """A key that was let in.

    Attributes:
        grant: what it may host, if it is a peer's.
        invitation: the name of the one it came with.
        joined_unix_s: when it first came.
        seen_unix_s: when the coordinator last heard it.
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
    """An invitation, as far as it is told to anybody after it was made.

    Attributes:
        grant: what a peer may host that comes with it.
        uses_left: None: of any number.
        expires_unix_s: None: never.
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
    """See the module's docstring.

    Args:
        folder: where the authority's keys are.

    Raises:
        JournalError: the database cannot be read or written, as from all methods; or a later
            version wrote it.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._one_at_a_time = threading.Lock()
        with self._errors():
            with open_private(self._path, "ab"):
                pass  # before SQLite makes it, readable for all
            self._db = sqlite3.connect(
                self._path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            self._db.execute("PRAGMA synchronous=FULL")
            self._migrate()
            make_private(self._path)

    def _migrate(self) -> None:
        """Make the tables, or bring those of an earlier version to today's; nothing else writes."""
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
        """Let go of the file."""
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
        """A new invitation; its secret is kept nowhere else.

        Raises:
            BadOption: no member may have the note as its name.
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
        """The invitation that makes anybody a replica on probation: the same until it is revoked.

        It is no secret, so it is kept; only where it leads may change.
        """
        with self._errors(), self._transaction():
            kept = self._open_invitation()
            if kept is not None and kept.fingerprint == fingerprint:
                invite = replace(kept, addresses=addresses)
            else:
                invite = _new_invite(fingerprint, addresses)
            row = _invitation_row(invite, Role.PEER, PROBATION)
            self._db.execute(f"INSERT OR REPLACE {_INVITATION}", (*row, None, None, ""))
            self._db.execute("INSERT OR REPLACE INTO facts VALUES ('open', ?)", (str(invite),))
        return invite

    def close_to_all(self) -> None:
        """Who has no invitation of its own is let in no more; who was let in stays."""
        with self._errors():
            self._db.execute("UPDATE invitations SET uses_left=0 WHERE uses_left IS NULL")

    def open_invitation(self) -> Invite | None:
        """That of `open_to_all`; None if not all are let in."""
        with self._errors():
            return self._open_invitation()

    def _open_invitation(self) -> Invite | None:
        row = self._db.execute("SELECT value FROM facts WHERE name='open'").fetchone()
        invite = parse_invite(row[0]) if row else None
        query = "SELECT name FROM invitations WHERE name=? AND uses_left IS NULL"
        is_open = invite and self._db.execute(query, (invite.name,)).fetchone()
        return invite if is_open else None

    def invitations(self) -> list[InvitationRecord]:
        """All that were made, the oldest first."""
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
        """By which newcomers are known, used up ones too: these are told so, and by name."""
        with self._errors():
            rows = self._db.execute(
                "SELECT certificate FROM invitations"
                " ORDER BY uses_left IS NULL DESC, rowid DESC LIMIT ?",
                (MAX_INVITATIONS,),
            ).fetchall()
        return tuple(from_der(row[0]) for row in rows)

    # ---- members

    def admit(self, caller: Caller, now: datetime, chosen_name: str = "") -> Caller:
        """Who the caller of an enrolment is from now on.

        A member that comes with another invitation of its role is granted what that one grants;
        the one for all changes nothing for who is a member already.

        Args:
            caller: The caller, as TLS knows it.
            now: The time.
            chosen_name: The name for people that it chose. Empty leaves the one that it has.

        Raises:
            BadInvite: its invitation is used up, has expired or was revoked.
            NotAllowed: its key was revoked, or never let in.
        """
        name, now_s = name_of(caller.key), int(now.timestamp())
        with self._errors():
            known = self._member(name)
            if known is not None and known.is_revoked:
                raise NotAllowed(f"{known.role} {name}: its key was revoked")
            if known is None and caller.role is not Role.NEWCOMER:
                raise NotAllowed(f"{caller} is no member; join with an invitation")
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
        """Store that the coordinator heard these members now; unknown names are ignored."""
        with self._errors():
            self._note_seen(names, int(now.timestamp()))

    def _note_seen(self, names: Collection[str], now_s: int) -> None:
        """Store when members were last heard; a disk that refuses keeps no member out."""
        rows = [(now_s, name) for name in names]
        try:
            with self._transaction():
                self._db.executemany("UPDATE members SET seen_unix_s=? WHERE name=?", rows)
        except sqlite3.OperationalError as error:
            logger.warning("members %s: %s", self._path, in_words(error))

    def check(self, caller: Caller, now: datetime) -> None:
        """Whether `admit` would let the caller in, now; nothing is used up.

        Raises:
            BadInvite: its invitation is used up, has expired or was revoked.
            NotAllowed: its key was revoked.
        """
        name = name_of(caller.key)
        with self._errors():
            known = self._member(name)
            if known is not None and known.is_revoked:
                raise NotAllowed(f"{known.role} {name}: its key was revoked")
            if known is None or caller.name != known.invitation:
                self._still_good(caller.name, int(now.timestamp()))

    def grant_of(self, name: str) -> Grant:
        """What a member may host.

        Raises:
            NotAllowed: there is no such member, or its key was revoked.
        """
        return self._present(name, "peer").grant

    def claim_of(self, name: str) -> Claim:
        """Return a client's claim to peers, which it shares with all keys of its invitation.

        Raises:
            NotAllowed: there is no such member, or its key was revoked.
        """
        known = self._present(name, "client")
        return Claim(known.invitation, known.grant.weight)

    def _present(self, name: str, role: str) -> MemberRecord:
        with self._errors():
            known = self._member(name)
        if known is None or known.is_revoked:
            why = "its key was revoked" if known else "it is no member"
            raise NotAllowed(f"{role} {name}: {why}")
        return known

    def members(self) -> list[MemberRecord]:
        """All that were ever let in, those that came first at the beginning."""
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
        """A member's key, or an invitation, is of no use from now on.

        Raises:
            NotFound: there is no such member or invitation.
        """
        with self._errors(), self._transaction():
            members = self._db.execute("UPDATE members SET is_revoked=1 WHERE name=?", (name,))
            uses = "UPDATE invitations SET uses_left=0 WHERE name=?"
            if members.rowcount + self._db.execute(uses, (name,)).rowcount == 0:
                raise NotFound(f"{name}: no member and no invitation has this name")

    def revoked(self) -> frozenset[str]:
        """Names of members whose keys were revoked."""
        with self._errors():
            rows = self._db.execute("SELECT name FROM members WHERE is_revoked").fetchall()
        return frozenset(row[0] for row in rows)

    def void_all(self) -> tuple[int, int]:
        """A new authority knows nobody, but those whose keys were revoked stay so.

        Returns:
            How many members, and how many invitations, are of no use from now on.
        """
        with self._errors(), self._transaction():
            members = self._db.execute("DELETE FROM members WHERE NOT is_revoked").rowcount
            open_ones = "SELECT count(*) FROM invitations WHERE uses_left IS NULL OR uses_left > 0"
            invitations = self._db.execute(open_ones).fetchone()[0]
            self._db.execute("DELETE FROM invitations")
        return members, invitations

    def tell_rotated(self) -> None:
        """There are other keys in the folder: whoever looks at `version` is to look at them."""
        with self._errors():
            now = datetime.now(UTC).isoformat()
            self._db.execute("INSERT OR REPLACE INTO facts VALUES ('rotated', ?)", (now,))

    def version(self) -> tuple[int, int]:
        """Another one after every change, by whomever."""
        with self._errors():
            others = self._db.execute("PRAGMA data_version").fetchone()[0]
        return others, self._db.total_changes

    # ---- what invitations have to say of the coordinator

    def set_address(self, address: str) -> None:
        """The coordinator listens there."""
        with self._errors():
            self._db.execute("INSERT OR REPLACE INTO facts VALUES ('address', ?)", (address,))

    def address(self) -> str | None:
        """Where the coordinator last listened; None before its first start."""
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
        """Count an invitation down; the role and the grant that it gives."""
        role, granted = self._still_good(invitation, now_s)
        self._db.execute("UPDATE invitations SET uses_left=uses_left-1 WHERE name=?", (invitation,))
        return role, granted

    def _still_good(self, invitation: str, now_s: int) -> tuple[str, str]:
        """The role and the grant that an invitation gives."""
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
            if self._db.in_transaction:  # a full disk ends it
                self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            with self._one_at_a_time:
                yield
        except (sqlite3.Error, OSError) as error:
            raise JournalError(f"members {self._path}: {in_words(error)}") from error


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
    """What does not change: name, role, what is granted, certificate."""
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
