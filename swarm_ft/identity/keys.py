"""Keys of members, and names that nobody else can have: digests of public keys."""

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

from swarm_ft.base.private_files import atomic_write, make_private, open_private, private_folder
from swarm_ft.errors import BadOption, MalformedMessage

PrivateKey = ec.EllipticCurvePrivateKey
PublicKey = ec.EllipticCurvePublicKey

CURVE = ec.SECP256R1()
"""Elliptic curve of all keys: P-256, which every TLS library supports."""
NAME_BYTES = 20
FINGERPRINT_BYTES = 16
"""Bytes of a fingerprint: another key with it is as hard to find as the curve is to break."""
MAX_KEY_BYTES = 4096


def new_key() -> PrivateKey:
    """Return a new random key."""
    return ec.generate_private_key(CURVE)


def key_der(key: PublicKey) -> bytes:
    """Return a public key in DER."""
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def public_key(der: bytes) -> PublicKey:
    """Return the public key in DER bytes from another process.

    Raises:
        MalformedMessage: The bytes are no public key of P-256.
    """
    try:
        key = load_der_public_key(der)
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, PublicKey) or not isinstance(key.curve, type(CURVE)):
        raise MalformedMessage(f"{len(der)} bytes: expected a public key of P-256")
    return key


def name_of(key: PublicKey) -> str:
    """Return the name of a key: 32 lowercase letters and digits."""
    digest = hashlib.blake2b(key_der(key), digest_size=NAME_BYTES).digest()
    return base64.b32encode(digest).decode("ascii").lower()


def fingerprint_of(key: PublicKey) -> bytes:
    """Return the fingerprint of an authority's key, as invitations carry it."""
    return hashlib.sha256(key_der(key)).digest()[:FINGERPRINT_BYTES]


def key_pem(key: PrivateKey) -> bytes:
    """Return a private key in PEM, for its file."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def key_at(path: Path) -> PrivateKey:
    """Return the key in a file that only its owner can read; create the file if it is missing.

    Raises:
        BadOption: The file cannot be read or written, or does not hold a key.
    """
    try:
        if not path.exists():
            private_folder(path.parent)
            write_private(path, key_pem(new_key()))
        make_private(path)
        with path.open("rb") as file:
            return parse_key(file.read(MAX_KEY_BYTES + 1), path)
    except OSError as error:
        raise BadOption(f"key file {path}: {error.strerror or error}") from None


def parse_key(pem: bytes, path: Path) -> PrivateKey:
    """Return the private key in a file's PEM bytes.

    Raises:
        BadOption: The bytes are no private key, or one of another kind.
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
    """Write a file, whole, that only its owner can read.

    Raises:
        OSError: The file cannot be written.
    """
    with atomic_write(path) as partial, open_private(partial, "wb") as file:
        file.write(data)
