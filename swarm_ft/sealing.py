"""Sealing: bytes that only who has the key can read or make. AES-256-GCM of `cryptography`.

A sealed value is its nonce, drawn anew each time, the encrypted bytes, and a tag that notices any
change. It opens only for the place that it was sealed for, so that what lies in one place of a disk
passes for nothing in another. How long it is, and where it lies, is plain.
"""

from __future__ import annotations

import hmac
import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from swarm_ft.errors import BadOption
from swarm_ft.private_files import make_private, open_private, private_folder, replacing

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_BYTES = 32
_NONCE_BYTES, _TAG_BYTES = 12, 16
SEAL_BYTES = _NONCE_BYTES + _TAG_BYTES
"""What a sealed value is longer than its bytes."""


def derived_key(key: bytes, use: str) -> bytes:
    """A key of KEY_BYTES from which neither this one nor those of other uses can be had.

    HKDF of SHA-256 without a salt (RFC 5869), of which KEY_BYTES are one block.
    """
    extracted = hmac.digest(bytes(KEY_BYTES), key, "sha256")
    return hmac.digest(extracted, f"swarm-ft {use}".encode() + b"\1", "sha256")


class Sealer:
    """See the module's docstring. Threads may share it.

    Args:
        key: KEY_BYTES that nobody else knows.
        use: what for; keys of different uses have nothing in common.
    """

    def __init__(self, key: bytes, use: str) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"key: expected {KEY_BYTES} bytes, got {len(key)}")
        self._key = derived_key(key, use)

    @cached_property
    def _aead(self) -> AESGCM:
        # Late: many have a sealer, and machines that seal nothing need not have the package.
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        return AESGCM(self._key)

    def seal(self, data: bytes | bytearray | memoryview, place: bytes) -> bytes:
        """The bytes as they may lie anywhere."""
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + self._aead.encrypt(nonce, data, place)

    def open(self, sealed: bytes | memoryview, place: bytes) -> bytes:
        """What was sealed.

        Raises:
            ValueError: not with this key, or for another place; or it was altered.
        """
        from cryptography.exceptions import InvalidTag

        try:
            return self._aead.decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], place)
        except (InvalidTag, ValueError):
            raise ValueError(f"{len(sealed)} bytes were not sealed here with this key") from None


def new_key() -> bytes:
    """A key of its own for whoever asks."""
    return os.urandom(KEY_BYTES)


def sealing_key_at(path: Path) -> bytes:
    """The key in a file that its owner alone may read, made if it is not there.

    Raises:
        BadOption: the file cannot be read or written, or holds something else.
    """
    try:
        if not path.exists():
            if not path.parent.is_dir():
                private_folder(path.parent)
            with replacing(path) as partial, open_private(partial, "wb") as file:
                file.write(new_key())
        make_private(path)
        with path.open("rb") as file:
            key = file.read(KEY_BYTES + 1)
    except OSError as error:
        raise BadOption(f"--encrypt-at-rest {path}: {error.strerror or error}") from None
    if len(key) != KEY_BYTES:
        raise BadOption(
            f"--encrypt-at-rest {path}: expected a file of {KEY_BYTES} bytes, which a first start "
            "makes; name another one, or the copy that you kept"
        )
    return key
