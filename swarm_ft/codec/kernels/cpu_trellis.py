"""Viterbi's algorithm for `Kernels.trellis_symbols`, for one CPU thread, on arrays.

Lanes are adjacent in memory, so the CPU processes a row of them at once.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from swarm_ft.codec.kernels.base import LARGEST_SYMBOL, SEGMENT, UNITS
from swarm_ft.codec.kernels.cpu_grid import (
    MOST_CODE,
    Bytes,
    Codes,
    Floats,
    ScaleVectors,
    compiled,
    compiled_loosely,
    draw,
    drawn,
    invert_scales,
    part,
    shifted,
    to_contexts,
    to_symbols,
    units_of,
    wide_code,
)

_ZERO, _HALF, _ONE, _TWO = (np.float32(x) for x in (0, 0.5, 1, 2))
_PER_UNITS = np.float32(1 / UNITS)
_I32, _U8 = np.int32, np.uint8
_NEVER = np.float32(1e4)
_MOST_EVEN = np.float32(LARGEST_SYMBOL - 1)
Written = tuple[Codes, Bytes, Bytes]
"""Codes, symbols and contexts; contexts exclude the shift until it is known."""


@part
def _off_even(way: np.float32) -> np.float32:
    return np.float32(abs(np.float32(way - _TWO * np.rint(np.float32(way * _HALF)))))


@part
def _forward_row(ratio: Floats, dithers: Floats, costs: Floats, befores: Bytes) -> None:
    """Update the costs of each lane's four states by a row, and record the way.

    Args:
        ratio: Values in scales.
        dithers: Dither of the values in scales.
        costs: [4, lanes]; the bits of a state are its next shift and, lower, its last one.
        befores: Shift before the last one, one bit for each state.
    """
    for lane in range(ratio.size):
        here = ratio[lane]
        near = _off_even(np.float32(here - dithers[lane]))
        other = dithers[lane] + (_HALF if dithers[lane] < _ZERO else -_HALF)
        far = _off_even(np.float32(here - other))
        large = _NEVER if abs(here) > _MOST_EVEN else _ZERO
        near_even, near_odd = near * near + large, (_ONE - near) * (_ONE - near)
        far_even, far_odd = far * far + large, (_ONE - far) * (_ONE - far)
        of00, of01, of10, of11 = costs[0, lane], costs[1, lane], costs[2, lane], costs[3, lane]
        # The first bit is the shift of this value, the second that of the one before.
        a00, b00 = of00 + near_even, of01 + near_odd
        a01, b01 = of10 + far_even, of11 + far_odd
        a10, b10 = of00 + near_odd, of01 + near_even
        a11, b11 = of10 + far_odd, of11 + far_even
        least = min(a00, b00)
        costs[0, lane], costs[1, lane] = _ZERO, min(a01, b01) - least
        costs[2, lane], costs[3, lane] = min(a10, b10) - least, min(a11, b11) - least
        low = _I32(_I32(b00 < a00) | _I32(_I32(b01 < a01) << _I32(1)))
        high = _I32(_I32(b10 < a10) | _I32(_I32(b11 < a11) << _I32(1)))
        befores[lane] = np.uint8(_I32(low | _I32(high << _I32(2))))


@part
def _ratios(x: Floats, base: Floats | None, per_scale: Floats, ratio: Floats) -> None:
    """Compute a token's values, or their changes, in scales, clipped to the largest code."""
    for c in range(x.size):
        change = x[c]
        if base is not None:
            change = change - base[c]
        over = change * per_scale[c]
        over = over if over > -MOST_CODE else -MOST_CODE
        ratio[c] = over if over < MOST_CODE else MOST_CODE


@part
def _best_end(costs: Floats, lane: int) -> int:
    best = 0
    for state in range(1, 4):
        if costs[state, lane] < costs[best, lane]:
            best = state
    return best


@part
def _backward_row(befores: Bytes, states: NDArray[np.int32], shifts: Bytes, lowest: Bytes) -> None:
    """Trace a row of the best path backward."""
    for lane in range(befores.size):
        state = states[lane]
        before = _I32(_I32(_I32(befores[lane]) >> state) & _I32(1))
        shift = _I32(state & _I32(1))
        shifts[lane] = np.uint8(shift)
        lowest[lane] = np.uint8(_I32(_I32(state >> _I32(1)) ^ before))
        states[lane] = _I32(_I32(shift << _I32(1)) | before)


@part
def _write_along(
    ratio: Floats, first: int, coder: tuple[int, int], path: tuple[Bytes, Bytes], out: Written
) -> None:
    """Write the nearest codes with given shifts and lowest bits, folded, with symbols and contexts.

    Args:
        ratio: Values in scales.
        first: Index of the first value.
        coder: Seed of the dither, and the mask that a shift applies to a context.
        path: Shifts and lowest bits.
        out: Codes, symbols and contexts.
    """
    (seed, flip), (shifts, lowest) = coder, path
    codes, symbols, contexts = out
    for i in range(ratio.size):
        r = shifted(drawn(first + i, seed), shifts[i])
        units, odd = units_of(r), np.float32(_I32(lowest[i]))
        way = np.float32(ratio[i] - units * _PER_UNITS)
        code = np.float32(_TWO * np.rint(np.float32((way - odd) * _HALF)) + odd)
        wide = wide_code(ratio[i], units)
        is_wide = abs(ratio[i]) > _MOST_EVEN and abs(code) > _MOST_EVEN + _ONE
        code = wide if is_wide else code
        codes[i] = np.int16(_I32(-code if r < _I32(8) else code))
        contexts[i] = np.uint8(_I32(_I32(contexts[i]) ^ _I32(_I32(shifts[i]) * _I32(flip))))
    to_symbols(codes, 0, symbols)


@part
def _write_segment(
    ratio: Floats, first: int, coder: tuple[int, int, int], shifts: Bytes, out: Written
) -> None:
    """Find the best path through a segment and write it."""
    seed, flip, lanes = coder
    costs, dithers = np.full((4, lanes), _NEVER, np.float32), np.empty(lanes, np.float32)
    costs[0] = _ZERO
    befores = np.empty(ratio.size, np.uint8)
    for at in range(0, ratio.size, lanes):
        row = slice(at, min(at + lanes, ratio.size))
        for lane in range(row.stop - at):
            dithers[lane] = units_of(drawn(first + at + lane, seed)) * _PER_UNITS
        _forward_row(ratio[row], dithers, costs, befores[row])
    states = np.empty(lanes, np.int32)
    for lane in range(lanes):
        states[lane] = _best_end(costs, lane)
    lowest, last = np.empty_like(befores), (ratio.size - 1) // lanes * lanes
    for at in range(last, -1, -lanes):
        row = slice(at, min(at + lanes, ratio.size))
        _backward_row(befores[row], states, shifts[row], lowest[row])
    _write_along(ratio, first, (seed, flip), (shifts, lowest), out)


@compiled_loosely
def trellis_symbols(
    x: Floats,
    base: Floats | None,
    scales: ScaleVectors,
    coder: tuple[int, int, int],
    coding: tuple[Codes, Codes, int],
    out: tuple[Codes, Bytes, Bytes, Bytes],
) -> None:
    """Compute `Kernels.trellis_symbols`.

    Args:
        x: float32 [tokens, channels].
        base: Buffer of x's shape, or None.
        scales: Scales of the values.
        coder: Seed of the dither, the mask that a shift applies to a context, and lanes.
        coding: Classes of tokens and of channels, and slices.
        out: Codes, symbols, contexts and shifts, flat.
    """
    (codes, symbols, contexts, shifts), (rows, cols, slices) = out, coding
    tokens, channels = x.shape
    per_scale, ratio = np.empty(channels, np.float32), np.empty(codes.size, np.float32)
    drawn_of = np.empty(channels, np.int32)
    for t in range(tokens):
        invert_scales(scales, t, per_scale)
        own = slice(t * channels, (t + 1) * channels)
        _ratios(x[t], None if base is None else base[t], per_scale, ratio[own])
        draw(t * channels, coder[0], drawn_of)
        to_contexts(rows[t], cols, drawn_of, slices, contexts[own])
    for first in range(0, ratio.size, SEGMENT):
        own = slice(first, min(first + SEGMENT, ratio.size))
        of = codes[own], symbols[own], contexts[own]
        _write_segment(ratio[own], first, coder, shifts[own], of)


@compiled
def shifts_of(symbols: Bytes, lanes: int, shifts: Bytes) -> None:
    """Compute `Kernels.shifts_of`."""
    for first in range(0, symbols.size, SEGMENT):
        own, coded = shifts[first : first + SEGMENT], symbols[first : first + SEGMENT]
        own[: 2 * lanes] = 0
        for i in range(lanes, own.size):
            own[i] = coded[i - lanes] & _U8(1)
        for at in range(2 * lanes, own.size, lanes):
            row, before = own[at : at + lanes], own[at - 2 * lanes : at - lanes]
            for lane in range(row.size):
                row[lane] ^= before[lane]
