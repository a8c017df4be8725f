"""Who was invited, who was let in, and who is known no more, in a database beside the keys.

The coordinator and its owner's commands (`swarm-ft invite`, `swarm-ft keys`) have it open at the
same time: who may write to the folder is the owner, and needs to ask nobody.
"""

from __future__ import annotations

import secrets
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from swarm_ft.errors import BadInvite, JournalError, NotAllowed, NotFound
from swarm_ft.identity.certificates import Caller, Certificate, Role, from_der, to_der
from swarm_ft.identity.invites import (
    NUMBER_BYTES,
    SECRET_BYTES,
    Invite,
    invitation_certificate,
    invitation_key,
)
from swarm_ft.identity.keys import name_of
from swarm_ft.private_files import make_private, open_private

FILE = "members.db"
MAX_INVITATIONS = 256
"""The newest ones: each handshake of a newcomer may have to look at all of them."""
BUSY_TIMEOUT_S = 5.0

_SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS invitations (
    name TEXT PRIMARY KEY, role TEXT NOT NULL, uses_left INTEGER NOT NULL,
    expires_unix_s INTEGER NOT NULL, certificate BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS members (
    name TEXT PRIMARY KEY, role TEXT NOT NULL, invitation TEXT NOT NULL,
    joined_unix_s INTEGER NOT NULL, seen_unix_s INTEGER NOT NULL,
    is_revoked INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberRecord:
    """A key that was let in.

    Attributes:
        invitation: the name of the one it came with.
        joined_unix_s: when it first came.
        seen_unix_s: when it last got a certificate.
    """

    name: str
    role: Role
    invitation: str
    joined_unix_s: int
    seen_unix_s: int
    is_revoked: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class InvitationRecord:
    """An invitation, as far as it is told to anybody after it was made."""

    name: str
    role: Role
    uses_left: int
    expires_unix_s: int


class Registry:
    """See the module's docstring.

    Args:
        folder: where the authority's keys are.

    Raises:
        JournalError: the database cannot be read or written; so do all methods.
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
            self._db.executescript(_SCHEMA)
            make_private(self._path)

    def close(self) -> None:
        """Let go of the file."""
        self._db.close()

    # ---- invitations

    def invite(
        self,
        fingerprint: bytes,
        addresses: tuple[str, ...],
        role: Role,
        uses: int,
        expires: datetime,
    ) -> Invite:
        """A new invitation; its secret is kept nowhere else."""
        invite = Invite(
            fingerprint=fingerprint,
            number=secrets.token_bytes(NUMBER_BYTES),
            secret=secrets.token_bytes(SECRET_BYTES),
            addresses=addresses,
        )
        key = invitation_key(invite.secret)
        certificate = to_der(invitation_certificate(key, invite.name, datetime.now(UTC)))
        row = (invite.name, role.value, uses, int(expires.timestamp()), certificate)
        with self._errors():
            self._db.execute("INSERT INTO invitations VALUES (?, ?, ?, ?, ?)", row)
        return invite

    def invitations(self) -> list[InvitationRecord]:
        """All that were made, the oldest first."""
        with self._errors():
            rows = self._db.execute(
                "SELECT name, role, uses_left, expires_unix_s FROM invitations ORDER BY rowid"
            ).fetchall()
        return [
            InvitationRecord(name=name, role=Role(role), uses_left=uses, expires_unix_s=expires)
            for name, role, uses, expires in rows
        ]

    def certificates(self) -> tuple[Certificate, ...]:
        """By which newcomers are known, used up ones too: these are told so, and by name."""
        with self._errors():
            rows = self._db.execute(
                "SELECT certificate FROM invitations ORDER BY rowid DESC LIMIT ?",
                (MAX_INVITATIONS,),
            ).fetchall()
        return tuple(from_der(row[0]) for row in rows)

    # ---- members

    def admit(self, caller: Caller, now: datetime) -> Caller:
        """Who the caller of an enrolment is from now on.

        Raises:
            BadInvite: its invitation is used up, has expired or was revoked.
            NotAllowed: its key was revoked, or never let in.
        """
        name, now_s = name_of(caller.key), int(now.timestamp())
        with self._errors(), self._transaction():
            known = self._member(name)
            if known is not None and known.is_revoked:
                raise NotAllowed(f"{known.role} {name}: its key was revoked")
            if known is not None:
                role = known.role
            elif caller.role is Role.NEWCOMER:
                role = self._let_in(name, caller.name, now_s)
            else:
                raise NotAllowed(f"{caller} is no member; join with an invitation")
            self._db.execute("UPDATE members SET seen_unix_s=? WHERE name=?", (now_s, name))
        return Caller(role=role, name=name, key=caller.key)

    def members(self) -> list[MemberRecord]:
        """All that were ever let in, those that came first at the beginning."""
        with self._errors():
            rows = self._db.execute(f"{_MEMBERS} ORDER BY joined_unix_s, name").fetchall()
        return [_member(row) for row in rows]

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
            open_ones = "SELECT count(*) FROM invitations WHERE uses_left > 0"
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
        row = self._db.execute(
            "SELECT role, uses_left, expires_unix_s FROM invitations WHERE name=?", (invitation,)
        ).fetchone()
        role, uses_left, expires_s = row or ("", 0, 0)
        if not uses_left:
            raise BadInvite(f"{invitation} is used up or revoked; ask for another one")
        if now_s >= expires_s:
            raise BadInvite(f"{invitation} has expired; ask for another one")
        self._db.execute("UPDATE invitations SET uses_left=uses_left-1 WHERE name=?", (invitation,))
        self._db.execute(
            "INSERT INTO members VALUES (?, ?, ?, ?, ?, 0)", (name, role, invitation, now_s, now_s)
        )
        return Role(role)

    def _member(self, name: str) -> MemberRecord | None:
        row = self._db.execute(f"{_MEMBERS} WHERE name=?", (name,)).fetchone()
        return _member(row) if row else None

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            with self._one_at_a_time:
                yield
        except (sqlite3.Error, OSError) as error:
            raise JournalError(f"members {self._path}: {error}") from error


_MEMBERS = "SELECT name, role, invitation, joined_unix_s, seen_unix_s, is_revoked FROM members"


def _member(row: tuple[str, str, str, int, int, int]) -> MemberRecord:
    name, role, invitation, joined_s, seen_s, is_revoked = row
    return MemberRecord(
        name=name,
        role=Role(role),
        invitation=invitation,
        joined_unix_s=joined_s,
        seen_unix_s=seen_s,
        is_revoked=bool(is_revoked),
    )
