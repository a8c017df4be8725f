"""The checksum of what lies on disk: XXH3 of 128 bits.

It finds bits that flipped and writes that were torn, at the speed of memory; it is no defence
against somebody who means to deceive. Who could write to these files could replace the peer.
"""

from __future__ import annotations

import xxhash

CHECKSUM_BYTES = 16


def checksum_of(data: bytes, seed: int = 0) -> bytes:
    """16 bytes; other threads run meanwhile where `data` is long."""
    return xxhash.xxh3_128_digest(data, seed)
