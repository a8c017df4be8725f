"""The digest of the project, BLAKE2b of 16 bytes; and the fingerprint of buffers, ten times faster.

A digest names what others must not be able to forge: weights, specs, files. A fingerprint tells
whether two ends of a boundary hold the same bytes; an end that wants to deceive the other needs no
collision for it, since whatever it sends is used.
"""

from __future__ import annotations

import hashlib

import xxhash

from swarm_ft.errors import RunMismatch

BytesLike = bytes | bytearray | memoryview

DIGEST_BYTES = 16


def digest_of(*parts: BytesLike, key: bytes = b"") -> bytes:
    """Digest of the parts' bytes, one after the other, each framed by its length.

    Args:
        parts: what is digested.
        key: at most 64 bytes; none: anybody can compute the digest of parts that they know.
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
    """63 bits that follow from a text: what every torch generator takes."""
    return int.from_bytes(digest_of(text.encode())[:8], "little") >> 1


def fingerprint_of(*parts: BytesLike) -> bytes:
    """16 bytes of XXH3 of the parts' bytes, one after the other; other threads run meanwhile."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return state.digest()


def check_spec_digest(what: str, here: bytes, there: bytes, whose: str) -> None:
    """Whether two sides work by one RunSpec.

    Args:
        what: that the spec is of.
        here: its digest as this side computes it.
        there: as the other side does.
        whose: the other side.

    Raises:
        RunMismatch: they differ.
    """
    if here != there:
        raise RunMismatch(
            f"{what}: RunSpec digest {here.hex()} here, {there.hex()} at {whose}; both need the "
            "same version of swarm-ft"
        )


class KeyedDigest:
    """Of bytes that arrive in pieces; nobody can tell it who lacks some of them, or the key."""

    def __init__(self, *key: BytesLike) -> None:
        self._state = hashlib.blake2b(digest_size=DIGEST_BYTES, key=digest_of(*key))

    def update(self, piece: BytesLike) -> None:
        """Take the next piece."""
        self._state.update(piece)

    def digest(self) -> bytes:
        """The digest of all pieces so far."""
        return self._state.digest()


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
