"""Loops that rearrange: codes into planes of bits and back, and tiles by Hadamard's matrix.

For one thread of a CPU. Knows arrays; knows no tensors.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from swarm_ft.codec.kernels.cpu_grid import Floats
from swarm_ft.codec.kernels.cpu_jit import compiled, part

Bytes = NDArray[np.uint8]

_U8 = np.uint8
_BLOCK = 4096
"""Bytes of a plane that stay in the first-level cache while their codes come one part at a time."""
_TILES = 16
"""Tiles side by side: a vector's worth."""


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
def _butterflies(tiles: Floats) -> None:
    """All strides, in place, of float32 [tile, _TILES]: a tile is a column."""
    stride = 1
    while stride < tiles.shape[0]:
        for first in range(0, tiles.shape[0], 2 * stride):
            for i in range(first, first + stride):
                for lane in range(_TILES):
                    upper, lower = tiles[i, lane], tiles[i + stride, lane]
                    tiles[i, lane] = upper + lower
                    tiles[i + stride, lane] = upper - lower
        stride *= 2


@compiled
def hadamard(x: Floats, y: Floats) -> None:
    """See `Kernels.hadamard`; float32 [tiles, tile] into y, _TILES of them at a time."""
    tiles = np.zeros((x.shape[1], _TILES), np.float32)
    for first in range(0, x.shape[0], _TILES):
        here = min(_TILES, x.shape[0] - first)
        for lane in range(here):
            for i in range(x.shape[1]):
                tiles[i, lane] = x[first + lane, i]
        _butterflies(tiles)
        for lane in range(here):
            for i in range(x.shape[1]):
                y[first + lane, i] = tiles[i, lane]
