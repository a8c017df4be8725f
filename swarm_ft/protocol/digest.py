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
