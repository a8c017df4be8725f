"""Codes of 2 to 8 bits as one stream of bits, and back. Knows no tensors, scales or signs.

Each code gives its low B bits, most significant first, one code after the other in C order;
zeros fill the last byte. Eight codes make a 64-bit word. Neighbours in it are pushed together
three times, to 4, 2 and 1 lanes; its 8 B bits are then B bytes of the stream.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Codes = NDArray[np.uint8]

_GROUP = 8
"""Codes in a word: the fewest that fill whole bytes whatever B is."""
_LANES = ((0, 8, 0x00FF00FF00FF00FF), (1, 16, 0x0000FFFF0000FFFF), (2, 32, 0x00000000FFFFFFFF))
"""Of each push: its index, the bits between two neighbours, the mask of the lower ones."""


def packed_bytes(count: int, bits: int) -> int:
    """Bytes that `count` codes of `bits` bits take."""
    return -(-count * bits // 8)


def pack(codes: Codes, bits: int) -> bytes:
    """The codes as a stream of `packed_bytes(codes.size, bits)` bytes.

    Args:
        codes: uint8 of any shape, each below 2**bits.
        bits: 2 to 8.
    """
    padded = np.zeros(-(-codes.size // _GROUP) * _GROUP, np.uint8)
    padded[: codes.size] = codes.reshape(-1)
    words = padded.view(">u8").astype(np.uint64)
    for index, distance, lower in _LANES:
        gap = np.uint64(distance - (bits << index))
        words = ((words & ~np.uint64(lower)) >> gap) | (words & np.uint64(lower))
    stream = _big_endian(words)[:, _GROUP - bits :].view(_chunk(bits))
    return stream.tobytes()[: packed_bytes(codes.size, bits)]


def unpack(stream: bytes, count: int, bits: int) -> Codes:
    """The codes that `pack` was given, exactly, as a new array of shape [count].

    Args:
        stream: `packed_bytes(count, bits)` bytes; any bytes are some codes.
        count: number of codes.
        bits: 2 to 8.
    """
    groups = -(-count // _GROUP)
    spread = np.zeros((groups, _GROUP), np.uint8)
    chunks = np.frombuffer(stream.ljust(groups * bits, b"\0"), _chunk(bits))
    spread[:, _GROUP - bits :].view(_chunk(bits))[:, 0] = chunks
    words = spread.reshape(-1).view(">u8").astype(np.uint64)
    for index, distance, lower in reversed(_LANES):
        gap = np.uint64(distance - (bits << index))
        upper = (words << gap) & ~np.uint64(lower)
        words = upper | (words ^ (upper >> gap))
    return _big_endian(words).reshape(-1)[:count]


def _big_endian(words: NDArray[np.uint64]) -> Codes:
    """The words' bytes, most significant first: uint8 of shape [words, 8]."""
    return words.astype(">u8").view(np.uint8).reshape(-1, _GROUP)


def _chunk(bits: int) -> np.dtype[np.void]:
    # One opaque element instead of B bytes: numpy copies it in one go, three times as fast.
    return np.dtype((np.void, bits))
