"""Keys, and names that nobody else can have: a name is a digest of the public key."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_der_public_key,
    load_pem_private_key,
)

from swarm_ft.errors import BadOption, MalformedMessage
from swarm_ft.private_files import make_private, open_private, private_folder, replacing

PrivateKey = ec.EllipticCurvePrivateKey
PublicKey = ec.EllipticCurvePublicKey

CURVE = ec.SECP256R1()
"""P-256: what every TLS takes."""
NAME_BYTES = 20
FINGERPRINT_BYTES = 16
"""128 bits: as hard to find another key for as the curve is to break."""
MAX_KEY_BYTES = 4096


def new_key() -> PrivateKey:
    """A key of its own for whoever asks."""
    return ec.generate_private_key(CURVE)


def key_der(key: PublicKey) -> bytes:
    """A public key as others see it."""
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def public_key(der: bytes) -> PublicKey:
    """The key that somebody told.

    Raises:
        MalformedMessage: it is none.
    """
    try:
        key = load_der_public_key(der)
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, PublicKey) or not isinstance(key.curve, type(CURVE)):
        raise MalformedMessage(f"{len(der)} bytes: expected a public key of P-256")
    return key


def name_of(key: PublicKey) -> str:
    """32 small letters and digits that stand for the key."""
    digest = hashlib.blake2b(key_der(key), digest_size=NAME_BYTES).digest()
    return base64.b32encode(digest).decode("ascii").lower()


def fingerprint_of(key: PublicKey) -> bytes:
    """What people pass on of an authority's key, in an invitation."""
    return hashlib.sha256(key_der(key)).digest()[:FINGERPRINT_BYTES]


def key_pem(key: PrivateKey) -> bytes:
    """A private key as in its file."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def key_at(path: Path) -> PrivateKey:
    """The key in a file that its owner alone may read, made if it is not there.

    Raises:
        BadOption: the file cannot be read or written, or holds something else.
    """
    try:
        if not path.exists():
            private_folder(path.parent)
            write_private(path, key_pem(new_key()))
        make_private(path)
        with path.open("rb") as file:
            return parsed_key(file.read(MAX_KEY_BYTES + 1), path)
    except OSError as error:
        raise BadOption(f"key file {path}: {error.strerror or error}") from None


def parsed_key(pem: bytes, path: Path) -> PrivateKey:
    """The key that was read from a file.

    Raises:
        BadOption: it is none, or of another kind.
    """
    try:
        key = load_pem_private_key(pem, None) if len(pem) <= MAX_KEY_BYTES else None
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, PrivateKey) or key.curve.name != CURVE.name:
        raise BadOption(
            f"key file {path}: expected a P-256 private key in PEM; remove the file for a new one"
        )
    return key


def write_private(path: Path, data: bytes) -> None:
    """Put a file there, whole, that its owner alone may read.

    Raises:
        OSError: it cannot be written.
    """
    with replacing(path) as partial, open_private(partial, "wb") as file:
        file.write(data)
