"""Digests of the project: BLAKE2b of 16 bytes, and a ten times faster fingerprint of buffers.

A digest names things that others must not be able to forge: weights, specs, files. A fingerprint
shows whether two ends of a boundary hold the same bytes. A deceiving end needs no collision for
that, since the other end uses whatever it sends.
"""

from __future__ import annotations

import hashlib

import xxhash

from swarm_ft.errors import RunMismatch

BytesLike = bytes | bytearray | memoryview

DIGEST_BYTES = 16


def digest_of(*parts: BytesLike, key: bytes = b"") -> bytes:
    """Return the digest of the parts' bytes in order, each framed by its length.

    Args:
        parts: Parts to digest.
        key: Key of at most 64 bytes; empty: anybody who knows the parts can compute the digest.
    """
    state = hashlib.blake2b(digest_size=DIGEST_BYTES, key=key)
    for part in parts:
        view = memoryview(part).cast("B")
        state.update(len(view).to_bytes(8, "little"))
        state.update(view)
    return state.digest()


def file_stem(*names: str) -> str:
    """Return 32 hexadecimal digits to name a file by, in place of names that others chose.

    File systems limit a name's bytes, compare some letters as equal and give some names a meaning.
    """
    return digest_of(*(name.encode() for name in names)).hex()


def seed_of(text: str) -> int:
    """Return 63 bits derived from a text, which every torch generator accepts."""
    return int.from_bytes(digest_of(text.encode())[:8], "little") >> 1


def fingerprint_of(*parts: BytesLike) -> bytes:
    """Return 16 bytes of XXH3 of the parts' bytes in order; other threads run meanwhile."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return state.digest()


def check_spec_digest(what: str, here: bytes, there: bytes, whose: str) -> None:
    """Check that two sides have the same RunSpec.

    Args:
        what: Name of the thing with the spec.
        here: Digest by this side.
        there: Digest by the other side.
        whose: Name of the other side.

    Raises:
        RunMismatch: The digests differ.
    """
    if here != there:
        raise RunMismatch(
            f"{what}: RunSpec digest {here.hex()} here, {there.hex()} at {whose}; both need the "
            "same version of swarm-ft"
        )


class KeyedDigest:
    """Digest of bytes in pieces that nobody can compute without all of them and the key."""

    def __init__(self, *key: BytesLike) -> None:
        self._state = hashlib.blake2b(digest_size=DIGEST_BYTES, key=digest_of(*key))

    def update(self, piece: BytesLike) -> None:
        """Add the next piece."""
        self._state.update(piece)

    def digest(self) -> bytes:
        """Return the digest of all pieces so far."""
        return self._state.digest()


class RunningDigest:
    """Digest like `digest_of` of one long part in pieces, whose length is known beforehand."""

    def __init__(self, total_bytes: int) -> None:
        self._state = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self._state.update(total_bytes.to_bytes(8, "little"))

    def update(self, piece: BytesLike) -> None:
        """Add the next piece."""
        self._state.update(piece)

    def digest(self) -> bytes:
        """Return the digest of all pieces so far."""
        return self._state.digest()
