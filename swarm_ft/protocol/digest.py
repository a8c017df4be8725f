"""The one digest of the project: BLAKE2b of 16 bytes."""

from __future__ import annotations

import hashlib

BytesLike = bytes | bytearray | memoryview

DIGEST_BYTES = 16


def digest_of(*parts: BytesLike) -> bytes:
    """Digest of the parts' bytes, one after the other, each framed by its length."""
    state = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        view = memoryview(part).cast("B")
        state.update(len(view).to_bytes(8, "little"))
        state.update(view)
    return state.digest()


class RunningDigest:
    """`digest_of` one long part that arrives in pieces; its length is known beforehand."""

    def __init__(self, total_bytes: int) -> None:
        self._state = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self._state.update(total_bytes.to_bytes(8, "little"))

    def update(self, piece: BytesLike) -> None:
        """Take the next piece."""
        self._state.update(piece)

    def digest(self) -> bytes:
        """The digest of all pieces so far."""
        return self._state.digest()
