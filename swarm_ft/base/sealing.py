"""Sealing: authenticated encryption of values on disk with AES-256-GCM of `cryptography`.

A sealed value consists of a random nonce, the encrypted bytes, and a tag that detects any change.
It opens only for the place that it was sealed for, so that nobody can swap values on a disk. The
length and the place of a value stay visible.
"""

from __future__ import annotations

import hmac
import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from swarm_ft.base.private_files import atomic_write, make_private, open_private, private_folder
from swarm_ft.errors import BadOption

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_BYTES = 32
_NONCE_BYTES, _TAG_BYTES = 12, 16
SEAL_BYTES = _NONCE_BYTES + _TAG_BYTES
"""Bytes that a sealed value is longer than its plaintext."""


def derive_key(key: bytes, use: str) -> bytes:
    """Return a key of KEY_BYTES that reveals neither `key` nor the keys of other uses.

    It is HKDF with SHA-256 and no salt (RFC 5869); KEY_BYTES are one block.
    """
    extracted = hmac.digest(bytes(KEY_BYTES), key, "sha256")
    return hmac.digest(extracted, f"swarm-ft {use}".encode() + b"\1", "sha256")


class Sealer:
    """Encryptor of values for one use; threads may share it. See the module's docstring.

    Args:
        key: Secret key of KEY_BYTES.
        use: Name of the use; keys of different uses are independent.
    """

    def __init__(self, key: bytes, use: str) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"key: expected {KEY_BYTES} bytes, got {len(key)}")
        self._key = derive_key(key, use)

    @cached_property
    def _aead(self) -> AESGCM:
        # Imported late: many objects hold a sealer, and a machine that seals nothing may lack the
        # package.
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        return AESGCM(self._key)

    def seal(self, data: bytes | bytearray | memoryview, place: bytes) -> bytes:
        """Return the sealed bytes of `data`, which open only for the same `place`."""
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + self._aead.encrypt(nonce, data, place)

    def open(self, sealed: bytes | memoryview, place: bytes) -> bytes:
        """Return the bytes that `seal` received for this place.

        Raises:
            ValueError: The key or the place is another one, or the bytes were altered.
        """
        from cryptography.exceptions import InvalidTag

        try:
            return self._aead.decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], place)
        except (InvalidTag, ValueError):
            raise ValueError(f"{len(sealed)} bytes were not sealed here with this key") from None


def new_key() -> bytes:
    """Return a new random key."""
    return os.urandom(KEY_BYTES)


def sealing_key_at(path: Path) -> bytes:
    """Return the key in a file that only its owner can read; create the file if it is missing.

    Raises:
        BadOption: The file cannot be read or written, or does not hold a key.
    """
    try:
        if not path.exists():
            if not path.parent.is_dir():
                private_folder(path.parent)
            with atomic_write(path) as partial, open_private(partial, "wb") as file:
                file.write(new_key())
        make_private(path)
        with path.open("rb") as file:
            key = file.read(KEY_BYTES + 1)
    except OSError as error:
        raise BadOption(f"--encrypt-at-rest {path}: {error.strerror or error}") from None
    if len(key) != KEY_BYTES:
        raise BadOption(
            f"--encrypt-at-rest {path}: expected a file of {KEY_BYTES} bytes, which the first "
            "start creates; name another file, or restore your copy of it"
        )
    return key
