"""Version of the protocol, and the error for two sides that differ in it.

Every stream begins with a message that carries the sender's version, in field 15. The receiver
reads it before anything else of the message, since all other fields may differ in another version.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm_ft.build import UPDATE, described_version
from swarm_ft.errors import VersionMismatch

PROTOCOL_VERSION = 12
"""Version of the protocol; it rises at each change of a message or of a RunSpec, released or not.

A test checks that: `tests/unit/protocol/wire/test_golden_bytes.py`.
"""


@dataclass(frozen=True, slots=True)
class VersionField:
    """Metadata of a version's field: names of sender and receiver, for the error's text."""

    sender: str
    receiver: str

    def check(self, version: int, name: str = "") -> None:
        """Refuse another version than ours.

        Args:
            version: Version of the sender; 0 if it sent none, like the oldest versions.
            name: Name of the sender, if it has one.

        Raises:
            VersionMismatch: The versions differ; the message names the side to update.
        """
        if version == PROTOCOL_VERSION:
            return
        sender = f"{self.sender} {name}" if name else f"the {self.sender}"
        theirs = str(version) if version else "an older one"
        older = sender if version < PROTOCOL_VERSION else f"the {self.receiver}"
        raise VersionMismatch(
            f"the {self.receiver} (swarm-ft {described_version()}) has protocol version "
            f"{PROTOCOL_VERSION}, {sender} has {theirs}: update {older} ({UPDATE})"
        )
