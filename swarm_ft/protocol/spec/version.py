"""The version of what goes over the wire, and what is said where two sides differ in it.

Every conversation begins with a message that carries the sender's version, in field 15. It is read
before anything else of the message, since nothing else need mean the same in another version.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm_ft.build import UPDATE, described_version
from swarm_ft.errors import VersionMismatch

PROTOCOL_VERSION = 11
"""Rises whenever a message changes, or a RunSpec, which is one; released or not. A test compares:
`tests/unit/protocol/wire/test_golden_bytes.py`."""


@dataclass(frozen=True, slots=True)
class Spoken:
    """Metadata of the field that holds a version: who speaks to whom, for the refusal's words."""

    sender: str
    receiver: str

    def check(self, version: int, name: str = "") -> None:
        """Refuse another version than ours.

        Args:
            version: the sender's; 0 if it said none, as it was before there were any.
            name: the sender's, if it has one.

        Raises:
            VersionMismatch: with what to do about it.
        """
        if version == PROTOCOL_VERSION:
            return
        sender = f"{self.sender} {name}" if name else f"the {self.sender}"
        theirs = str(version) if version else "an older one"
        older = sender if version < PROTOCOL_VERSION else f"the {self.receiver}"
        raise VersionMismatch(
            f"the {self.receiver} (swarm-ft {described_version()}) speaks protocol version "
            f"{PROTOCOL_VERSION}, {sender} speaks {theirs}: update {older} ({UPDATE})"
        )
