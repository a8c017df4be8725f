"""Signed records: a member's endpoint and its expiry, signed with the member's key. Pure.

A name is a digest of a key, so a record proves itself: it carries the key and a signature. Any node
of a DHT can detect a forged one without knowing the swarm. The authority's key signs the
coordinator's record, and all members know its name.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from swarm_ft.identity.keys import CURVE, PrivateKey, name_of
from swarm_ft.identity.roles import Role

MAX_CHARS = 255
"""Characters of a text with one byte of length in MessagePack, and so of a record in the DHT."""
_NAME = re.compile(r"[a-z2-7]{32}")


def is_key_name(name: str) -> bool:
    """Whether a name has the form of a key's name; its records need a signature."""
    return _NAME.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class Signer:
    """Signer of records with a key."""

    key: PrivateKey

    @property
    def name(self) -> str:
        """Name under which the records are stored."""
        return name_of(self.key.public_key())

    def signed(self, role: Role, endpoint: str, expires_unix_s: int) -> str:
        """Return the text of a signed record; an empty endpoint withdraws an earlier record."""
        message = _message(role, self.name, endpoint, expires_unix_s)
        point = self.key.public_key().public_bytes(Encoding.X962, PublicFormat.CompressedPoint)
        signature = self.key.sign(message, ec.ECDSA(SHA256()))
        return f"{endpoint} {expires_unix_s} {_text(point)} {_text(signature)}"


def signed_endpoint(role: Role, name: str, text: str, expires_unix_s: int) -> str | None:
    """Return the endpoint of a record; empty if it is withdrawn, None if the record is invalid.

    Args:
        role: Role under which the record was found.
        name: Name under which the record was found.
        text: Text of the record.
        expires_unix_s: Unix seconds at which the directory forgets it; the signature covers them.
    """
    parts = text.split(" ")
    if len(text) > MAX_CHARS or len(parts) != 4 or parts[1] != str(expires_unix_s):
        return None
    endpoint, _, point, signature = parts
    try:
        key = ec.EllipticCurvePublicKey.from_encoded_point(CURVE, _bytes(point))
        if name_of(key) != name:
            return None
        message = _message(role, name, endpoint, expires_unix_s)
        key.verify(_bytes(signature), message, ec.ECDSA(SHA256()))
    except (ValueError, InvalidSignature):
        return None
    return endpoint


def _message(role: Role, name: str, endpoint: str, expires_unix_s: int) -> bytes:
    return f"swarm-ft record {role} {name} {endpoint} {expires_unix_s}".encode()


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode("ascii").rstrip("=")


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True)
    except binascii.Error:
        raise ValueError("not base64") from None
