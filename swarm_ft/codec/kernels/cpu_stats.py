"""Loops that measure what is to be encoded, for one thread of a CPU. Knows arrays, no tensors."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from swarm_ft.codec.kernels.base import NARROWEST, UNITS, WIDEST
from swarm_ft.codec.kernels.cpu_grid import Floats, step_of
from swarm_ft.codec.kernels.cpu_jit import compiled, compiled_loosely, part

Doubles = NDArray[np.float64]
Sizes = NDArray[np.int32]
"""Bits of magnitudes: in the order of the values, and NaN above infinity."""
Bytes = NDArray[np.uint8]
Counts = NDArray[np.int64]

_I32 = np.int32
_ZERO, _ONE = np.float32(0), np.float32(1)
_NARROWEST, _WIDEST = np.float32(NARROWEST), np.float32(WIDEST)
_BLOCK = 512
"""Channels whose errors, on eight grids, are in the first-level cache."""
_TABLES = 4


@part
def _size(x: np.float32) -> np.int32:
    return _I32(np.float32(x).view(np.int32) & _I32(0x7FFFFFFF))


@compiled_loosely
def moments(
    x: Floats,
    base: Floats | None,
    row_squares: Doubles,
    col_squares: Doubles,
    row_sizes: Sizes,
    col_sizes: Sizes,
) -> None:
    """See `Kernels.moments`; in float64, where no square of a float32 over- or underflows."""
    tokens, channels = x.shape
    col_squares[:] = 0.0
    col_sizes[:] = 0
    for t in range(tokens):
        total, largest = 0.0, _I32(0)
        for c in range(channels):
            change = x[t, c]
            if base is not None:
                change = change - base[t, c]
            square = np.float64(change) * np.float64(change)
            size = _size(change)
            total += square
            col_squares[c] += square
            largest = max(largest, size)
            col_sizes[c] = max(col_sizes[c], size)
        row_squares[t] = total
        row_sizes[t] = largest


@part
def _spread(square: np.float32) -> np.float32:
    """Its root as a bfloat16, see `Kernels.balance`."""
    spread = np.float32(min(max(np.sqrt(square), _NARROWEST), _WIDEST))
    return step_of(spread, _ONE) if square != _ZERO else _ONE


@compiled_loosely
def balance(
    x: Floats,
    base: Floats | None,
    inverse: Floats,
    spreads: Floats,
    row_sizes: Sizes,
    col_sizes: Sizes,
) -> None:
    """See `Kernels.balance`.

    A token waits in the first-level cache for its spread; its channels' sizes are taken while the
    next one comes from memory.
    """
    tokens, channels = x.shape
    col_sizes[:] = 0
    changes, factor = np.zeros((2, channels), np.float32), _ONE
    for t in range(tokens):
        now, before = changes[t & 1], changes[~t & 1]
        total, largest = _ZERO, _I32(0)
        for c in range(channels):
            change = x[t, c]
            if base is not None:
                change = change - base[t, c]
            now[c] = change
            scaled = change * inverse[c]
            total += scaled * scaled
            largest = max(largest, _size(change))
            col_sizes[c] = max(col_sizes[c], _size(before[c] * factor))
        row_sizes[t] = largest
        spreads[t] = _spread(total / np.float32(channels))
        factor = _ONE / spreads[t]
    last = changes[~tokens & 1]
    for c in range(channels):
        col_sizes[c] = max(col_sizes[c], _size(last[c] * factor))


@compiled_loosely
def grid_errors(
    x: Floats, base: Floats | None, covering: Floats, multiples: Floats, bits: int, errors: Floats
) -> None:
    """See `Kernels.grid_errors`."""
    half = np.float32(UNITS // 2 * ((1 << bits) - 1) / UNITS)
    side = np.float32((1 << bits - 1) - 1)
    changes = np.empty(_BLOCK, np.float32)
    for first in range(0, x.shape[1], _BLOCK):
        here = min(_BLOCK, x.shape[1] - first)
        block = np.zeros((multiples.size, _BLOCK), np.float32)
        inverse = _ONE / covering[first : first + here]
        for t in range(x.shape[0]):
            for c in range(here):
                change = x[t, first + c]
                if base is not None:
                    change = change - base[t, first + c]
                changes[c] = change * inverse[c]
            for k in range(multiples.size):
                size = np.float32(abs(multiples[k]))
                reach = side if multiples[k] < _ZERO else half
                per_size, shift = _ONE / size, reach - np.floor(reach)
                for c in range(here):
                    code = np.rint(changes[c] * per_size + shift) - shift
                    code = code if code > -reach else -reach
                    code = code if code < reach else reach
                    error = code * size - changes[c]
                    block[k, c] += error * error
        errors[:, first : first + here] = block[:, :here]


@compiled
def histogram(codes: Bytes, contexts: Bytes, counts: Counts) -> None:
    """See `Kernels.histogram`, flat; contexts are in range.

    Tables take turns: the next symbol is often the same one, and would wait for its count.
    """
    tables = np.zeros((_TABLES, counts.size), np.int32)
    for i in range(codes.size):
        bin_ = np.uint64(np.uint32(contexts[i]) << np.uint32(8) | np.uint32(codes[i]))
        tables[np.uint64(i % _TABLES), bin_] += 1
    counts[:] = tables.sum(0)
