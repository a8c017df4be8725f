"""Loops that rearrange: codes into planes of bits and back, and tiles by Hadamard's matrix.

For one thread of a CPU. Knows arrays; knows no tensors.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from swarm_ft.codec.kernels.cpu_grid import Floats
from swarm_ft.codec.kernels.cpu_jit import compiled, part

Bytes = NDArray[np.uint8]

_U8, _U64 = np.uint8, np.uint64
_BLOCK = 4096
"""Bytes of a plane that stay in the first-level cache while their codes come one part at a time."""


@compiled
def pack_plane(codes: Bytes, width: int, shift: int, plane: Bytes) -> None:
    """Write `width` bits of each code, from `shift` up, to a plane that holds them all."""
    mask = _U8((1 << width) - 1)
    for first in range(0, plane.size, _BLOCK):
        block = plane[first : first + _BLOCK]
        block[:] = 0
        for k in range(8 // width):
            start = k * plane.size + first
            part_of = codes[start : start + block.size]  # shorter, or empty, at the end
            left = _U8(8 - width * (k + 1))
            for j in range(part_of.size):
                bits = _U8(_U8(part_of[j] >> _U8(shift)) & mask)
                block[j] = _U8(block[j] | _U8(bits << left))


@compiled
def unpack_plane(plane: Bytes, width: int, shift: int, codes: Bytes) -> None:
    """Add a plane's bits to codes that have zeros in their place."""
    mask = _U8((1 << width) - 1)
    for first in range(0, plane.size, _BLOCK):
        block = plane[first : first + _BLOCK]
        for k in range(8 // width):
            start = k * plane.size + first
            part_of = codes[start : start + block.size]
            right = _U8(8 - width * (k + 1))
            for j in range(part_of.size):
                bits = _U8(_U8(block[j] >> right) & mask)
                part_of[j] = _U8(part_of[j] | _U8(bits << _U8(shift)))


@part
def _butterflies(source: Floats, target: Floats) -> None:
    """Neighbours to their sum, in the first half, and their difference, in the second.

    That moves an index's lowest bit to the top, so the next pass meets the next stride, and after
    all of them each value is in its place: every pass is the same long loop.
    """
    half = source.size // 2
    sums, differences = target[:half], target[half:]
    for i in range(half):
        first, second = source[_U64(2 * i)], source[_U64(2 * i + 1)]
        sums[i] = first + second
        differences[i] = first - second


@compiled
def hadamard(x: Floats, y: Floats) -> None:
    """See `Kernels.hadamard`; float32 [tiles, tile] into y."""
    tile, passes = x.shape[1], 0
    while 1 << passes < tile:
        passes += 1
    buffers = np.empty((2, tile), np.float32)
    for t in range(x.shape[0]):
        source = x[t]
        for k in range(passes):
            target = y[t] if k == passes - 1 else buffers[k & 1]
            _butterflies(source, target)
            source = target
        if passes == 0:
            y[t] = source
