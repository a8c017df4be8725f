"""Loops between values and codes, for one CPU thread, on arrays.

They run along channels, which LLVM vectorises, and token by token, so that intermediate results
stay in the first-level cache. A value's scale is recomputed where it is used, because memory is
slower. `base` and `seed` may be None: Numba compiles a separate loop for that. Every 32-bit operand
is cast explicitly, because Numba widens to 64 bits where it can.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

from swarm_ft.codec.kernels.base import (
    BLOCK,
    COARSE,
    CUT,
    EXACT_CODE,
    LARGEST_SYMBOL,
    LEAST,
    MAX_CODE,
    SLICES,
    SYMBOL_ZERO,
    UNITS,
)

# ---- compilation of the loops
#
# Loops release the GIL, so that a peer's event loop continues. Machine code is cached in
# `__pycache__` or, if that is not writable, in the user's cache. If neither is writable, each
# process compiles the loops that it calls.

Loop = TypeVar("Loop", bound=Callable[..., Any])

_ANY_ORDER = {"reassoc", "contract", "nsz"}
"""LLVM's flags of fast arithmetic that preserve NaN and infinity."""


def compiled(loop: Loop) -> Loop:
    """Compile a loop with exactly the roundings that it spells out."""
    return _compile(loop, fastmath=False)


def compiled_loosely(loop: Loop) -> Loop:
    """Compile a loop whose sums may be reordered; for encoders."""
    return _compile(loop, fastmath=_ANY_ORDER)


def compiled_fused(loop: Loop) -> Loop:
    """Compile a loop whose products and sums may be fused; for encoders."""
    return _compile(loop, fastmath={"contract"})


def part(helper: Loop) -> Loop:
    """Compile a helper into the loops that call it."""
    return cast(Loop, numba.njit(nogil=True)(helper))


def _compile(loop: Loop, fastmath: bool | set[str]) -> Loop:
    try:
        return cast(Loop, numba.njit(nogil=True, fastmath=fastmath, cache=True)(loop))
    except RuntimeError:  # Numba found no writable cache directory
        return cast(Loop, numba.njit(nogil=True, fastmath=fastmath)(loop))


Floats = NDArray[np.float32]
Codes = NDArray[Any]
Bytes = NDArray[np.uint8]
ScaleVectors = tuple[Floats, Floats]
"""Rows [tokens] or [1] and cols [channels] of `Scales`, with all columns."""

_ZERO, _HALF, _ONE = np.float32(0), np.float32(0.5), np.float32(1)
_UNITS, _PER_UNITS = np.float32(UNITS), np.float32(1 / UNITS)
_COARSE, _PER_COARSE = np.float32(COARSE), np.float32(1 / COARSE)
_EXACT_CODE, MOST_CODE = np.float32(EXACT_CODE), np.float32(MAX_CODE)
_LARGEST = np.float32(np.finfo(np.float32).max)
_U8, _U32 = np.uint8, np.uint32
_I32 = np.int32
_I16 = np.int16


@part
def scale_of(row: np.float32, col: np.float32) -> np.float32:
    """Return bfloat16(row * col) of a finite product, rounded to nearest even."""
    bits = np.float32(row * col).view(np.uint32)
    is_odd = _U32(_U32(bits >> _U32(16)) & _U32(1))
    rounded = _U32(bits + _U32(is_odd + _U32(0x7FFF)))
    return np.float32(_U32(rounded & _U32(0xFFFF0000)).view(np.float32))


@part
def drawn(index: int, seed: int) -> np.int32:
    """Return the r of `Kernels.dequantize`."""
    h = _U32(_U32(_U32(index) * _U32(0x9E3779B1)) ^ _U32(seed))
    h = _U32(_U32(h ^ _U32(h >> _U32(16))) * _U32(0x85EBCA6B))
    h = _U32(_U32(h ^ _U32(h >> _U32(13))) * _U32(0xC2B2AE35))
    return _I32(_U32(_U32(h ^ _U32(h >> _U32(16))) >> _U32(28)))


@part
def shifted(r: np.int32, shift: np.uint8) -> np.int32:
    """Return r, or the r of half a scale further if it is shifted."""
    return _I32(r ^ _I32(_I32(shift) << _I32(3)))


@part
def units_of(r: np.int32) -> np.float32:
    """Return the units of a dither r."""
    return np.float32(_I32(_I32(r * _I32(2)) - _I32(15)))


@part
def _dither(index: int, seed: int) -> np.float32:
    """Return the units of the dither of value `index`."""
    return units_of(drawn(index, seed))


@compiled
def turn(codes: NDArray[np.int16], seed: int, shifts: Bytes, out: NDArray[np.int16]) -> None:
    """Compute `Kernels.turn` on flat arrays; shifts may be empty."""
    for i in range(codes.size):
        r = drawn(i, seed)
        if shifts.size > 0:
            r = shifted(r, shifts[i])
        out[i] = np.int16(-codes[i]) if r < 8 else codes[i]


@compiled
def slice_contexts(
    classes: NDArray[np.uint8], seed: int, slices: int, out: NDArray[np.uint8]
) -> None:
    """Compute `Kernels.slice_contexts`."""
    width, less = _I32(slices - 1), _I32(SLICES - slices)
    for i in range(classes.size):
        r = drawn(i, seed)
        far = _I32(min(r, _I32(_I32(15) - r)) >> less)
        out[i] = _I32(_I32(_I32(classes[i]) << width) + far)


@compiled
def to_symbols(codes: NDArray[np.int16], low_bits: int, out: NDArray[np.uint8]) -> None:
    """Compute `Kernels.symbols`."""
    less, last, middle = _I16(low_bits), _I16(LARGEST_SYMBOL), _I16(SYMBOL_ZERO)
    for i in range(codes.size):
        upper = _I16(codes[i] >> less)
        upper = upper if upper > -last else _I16(-last)
        upper = upper if upper < last else last
        out[i] = np.uint8(_I16(upper + middle))


@part
def inverse_of(scale: np.float32) -> np.float32:
    """Return 1 / |scale|, and 0 for a scale of zero."""
    size = np.float32(abs(scale))
    return np.float32(min(_ONE / size, _LARGEST)) if size > _ZERO else _ZERO


@part
def _narrow_codes(
    x: Floats,
    base: Floats | None,
    scales: ScaleVectors,
    grid: tuple[int, int],
    seed: int | None,
    codes: Bytes,
) -> None:
    """Compute the codes of one token's values; NaN gets code 0.

    Args:
        x: float32 [tokens, channels].
        base: Buffer of x's shape, or None.
        scales: Scales of the values.
        grid: Number of bits, and index of the token.
        seed: Seed of the dither, or None.
        codes: Codes of the token.
    """
    (rows, cols), (bits, t) = scales, grid
    row, last = rows[t if rows.size > 1 else 0], np.float32((1 << bits) - 1)
    for c in range(codes.size):
        scale = scale_of(row, cols[c])
        largest = last - _ONE if scale < _ZERO else last
        top = largest + _HALF if scale != _ZERO else _ZERO
        change = x[t, c]
        if base is not None:
            change = change - base[t, c]
        code = change * inverse_of(scale) + (largest * _HALF + _HALF)
        if seed is not None:
            code = code - _dither(t * codes.size + c, seed) * _PER_UNITS
        code = code if code > _ZERO else _ZERO
        codes[c] = np.uint8(_I32(code if code < top else top))


@compiled_loosely
def quantize_narrow(
    x: Floats, base: Floats | None, scales: ScaleVectors, bits: int, seed: int | None, codes: Bytes
) -> None:
    """Compute `Kernels.quantize` for a narrow grid."""
    for t in range(x.shape[0]):
        _narrow_codes(x, base, scales, (bits, t), seed, codes[t])


@compiled_loosely
def quantize_pack(
    x: Floats, base: Floats | None, scales: ScaleVectors, bits: int, seed: int | None, packed: Bytes
) -> None:
    """Compute `Kernels.quantize_pack`; a token's codes stay in the first-level cache."""
    codes = np.empty(x.shape[1], np.uint8)
    packed[:] = 0
    for t in range(x.shape[0]):
        _narrow_codes(x, base, scales, (bits, t), seed, codes)
        _append(codes, t * codes.size, bits, packed)
    _fill_up(x.size, bits, packed)


@part
def _prepare_dequantize(
    row: np.float32, cols: Floats, bits: int, unit: Floats, lowest: Floats
) -> None:
    half = np.float32(UNITS // 2 * ((1 << bits) - 1))
    side = np.float32(UNITS * ((1 << bits - 1) - 1))
    for c in range(cols.size):
        scale = scale_of(row, cols[c])
        unit[c] = np.float32(abs(scale)) * _PER_UNITS
        lowest[c] = -side if scale < _ZERO else -half


@compiled
def dequantize_narrow(
    codes: Codes, base: Floats | None, scales: ScaleVectors, bits: int, seed: int | None, x: Floats
) -> None:
    """Compute `Kernels.dequantize`; units are integers below 2^14, exact in any order."""
    tokens, channels = codes.shape
    unit, lowest = np.empty(channels, np.float32), np.empty(channels, np.float32)
    for t in range(tokens):
        if t < scales[0].size:
            _prepare_dequantize(scales[0][t], scales[1], bits, unit, lowest)
        for c in range(channels):
            units = np.float32(_I32(codes[t, c])) * _UNITS + lowest[c]
            if seed is not None:
                units = units + _dither(t * channels + c, seed)
            value = units * unit[c]
            if base is not None:
                value = base[t, c] + value
            x[t, c] = value


@part
def invert_scales(scales: ScaleVectors, t: int, inverse: Floats) -> None:
    """Compute the inverse scales of token t; only for the first token if all share a row."""
    if t < scales[0].size:
        for c in range(inverse.size):
            inverse[c] = inverse_of(scale_of(scales[0][t], scales[1][c]))


@part
def wide_code(ratio: np.float32, units: np.float32) -> np.float32:
    """Return the code of a value in scales, with dither in units."""
    code = ratio if ratio > -MOST_CODE else -MOST_CODE
    code = code if code < MOST_CODE else MOST_CODE
    nearest = np.rint(np.float32(code - units * _PER_UNITS))
    coarse = np.rint(np.float32(code * _PER_COARSE)) * _COARSE
    return np.float32(coarse if abs(nearest) > _EXACT_CODE else nearest)


@compiled_loosely
def quantize_wide(
    x: Floats, base: Floats | None, scales: ScaleVectors, seed: int | None, codes: Codes
) -> None:
    """Compute `Kernels.quantize` for a wide grid."""
    tokens, channels = x.shape
    inverse = np.empty(channels, np.float32)
    for t in range(tokens):
        invert_scales(scales, t, inverse)
        for c in range(channels):
            change = x[t, c]
            if base is not None:
                change = change - base[t, c]
            units = _ZERO if seed is None else _dither(t * channels + c, seed)
            codes[t, c] = np.int16(_I32(wide_code(change * inverse[c], units)))


@part
def draw(first: int, seed: int, out: NDArray[np.int32]) -> None:
    """Fill `out` with the r of consecutive values from `first` on."""
    for c in range(out.size):
        out[c] = drawn(first + c, seed)


@part
def _draw_shifted(first: int, dither: tuple[int, Bytes], out: NDArray[np.int32]) -> None:
    """Fill `out` with the r of consecutive values, shifted where there are shifts."""
    seed, shifts = dither
    draw(first, seed, out)
    if shifts.size > 0:
        own = shifts[first : first + out.size]
        for c in range(out.size):
            out[c] = shifted(out[c], own[c])


@part
def to_contexts(
    row: np.uint8, cols: Codes, drawn_of: NDArray[np.int32], slices: int, out: Codes
) -> None:
    """Compute the contexts of a token's values from classes and dither."""
    width, less = _I32(max(slices - 1, 0)), _I32(SLICES - slices)
    for c in range(cols.size):
        far = (
            _I32(min(drawn_of[c], _I32(_I32(15) - drawn_of[c])) >> less) if slices > 0 else _I32(0)
        )
        out[c] = np.uint8(_I32(_I32(_I32(_I32(row) + _I32(cols[c])) << width) + far))


@compiled_loosely
def quantize_symbols(
    x: Floats,
    base: Floats | None,
    scales: ScaleVectors,
    seed: int | None,
    coding: tuple[Codes, Codes, int, int],
    out: tuple[Codes, Codes, Codes],
) -> None:
    """Compute `Kernels.quantize_symbols`; a token's dither is drawn once.

    Args:
        x: float32 [tokens, channels].
        base: Buffer of x's shape, or None.
        scales: Scales of the values.
        seed: Seed of the dither, or None.
        coding: Classes of tokens and of channels, slices, and lower bits.
        out: Codes, symbols and contexts, [tokens, channels].
    """
    rows, cols, slices, low_bits = coding
    codes, symbols, contexts = out
    tokens, channels = x.shape
    inverse, drawn_of = np.empty(channels, np.float32), np.zeros(channels, np.int32)
    for t in range(tokens):
        invert_scales(scales, t, inverse)
        if seed is not None:
            draw(t * channels, seed, drawn_of)
        for c in range(channels):
            change = x[t, c]
            if base is not None:
                change = change - base[t, c]
            units = _ZERO if seed is None else units_of(drawn_of[c])
            code = wide_code(change * inverse[c], units)
            if seed is not None:
                code = -code if drawn_of[c] < _I32(8) else code
            codes[t, c] = np.int16(_I32(code))
        to_symbols(codes[t], low_bits, symbols[t])
        to_contexts(rows[t], cols, drawn_of, slices, contexts[t])


@compiled
def dequantize_wide(
    codes: Codes,
    base: Floats | None,
    scales: ScaleVectors,
    shrink: int,
    dither: tuple[int, Bytes] | None,
    x: Floats,
) -> None:
    """Compute `Kernels.dequantize`; units are integers up to 2^20, exact in any order.

    Args:
        codes: int16 [tokens, channels].
        base: Buffer of the same shape, or None.
        scales: Scales of the values.
        shrink: Shift toward zero in units.
        dither: Seed, and flat shifts, possibly empty; None without dither.
        x: float32 [tokens, channels].
    """
    tokens, channels = codes.shape
    unit, less = np.empty(channels, np.float32), np.float32(shrink)
    drawn_of = np.zeros(channels, np.int32)
    for t in range(tokens):
        if t < scales[0].size:
            for c in range(channels):
                unit[c] = np.float32(abs(scale_of(scales[0][t], scales[1][c]))) * _PER_UNITS
        if dither is not None:
            _draw_shifted(t * channels, dither, drawn_of)
        for c in range(channels):
            code = _I32(codes[t, c])
            toward_zero = less if code > _I32(0) else (-less if code < _I32(0) else _ZERO)
            units = np.float32(code) * _UNITS - toward_zero
            if dither is not None:
                units = units + units_of(drawn_of[c])
            coarse = np.float32(_I32(code & _I32(-COARSE))) * _UNITS
            units = coarse if abs(code) > _I32(EXACT_CODE) else units
            value = units * unit[c]
            if base is not None:
                value = base[t, c] + value
            x[t, c] = value


# ---- packing of codes into bit planes

_BLOCK = 4096
"""Bytes of a plane that stay in the first-level cache while their codes arrive part by part."""


@part
def _append_to(plane: Bytes, width: int, codes: Bytes, first: int) -> None:
    """Move the lowest bits of codes into a plane.

    The codes of a byte arrive in the order of its bits. `width` is a constant in every call,
    because byte vectors are shifted ten times as fast by a constant.
    """
    mask, done = _U8((1 << width) - 1), 0
    while done < codes.size:
        at = (first + done) % plane.size
        some = codes[done : done + plane.size - at]
        block = plane[at : at + some.size]
        for j in range(some.size):
            block[j] = _U8(_U8(block[j] << _U8(width)) | _U8(some[j] & mask))
            if width < 4:  # which is the last plane
                some[j] = _U8(some[j] >> _U8(width))
        done += some.size


@part
def _append(codes: Bytes, first: int, bits: int, packed: Bytes) -> None:
    """Append codes of values from `first` on to the planes, consuming the codes."""
    eighth = packed.size // bits
    if bits & 1:
        _append_to(packed[(bits - 1) * eighth :], 1, codes, first)
    if bits & 2:
        _append_to(packed[(bits & 4) * eighth : (bits & 6) * eighth], 2, codes, first)
    if bits & 4:
        _append_to(packed[: 4 * eighth], 4, codes, first)
    if bits == 8:
        packed[first : first + codes.size] = codes


@part
def _fill_up(count: int, bits: int, packed: Bytes) -> None:
    """Append zeros behind the last code, up to a multiple of 8."""
    _append(np.zeros(-count % 8, np.uint8), count, bits, packed)


@compiled
def pack(codes: Bytes, bits: int, packed: Bytes) -> None:
    """Compute `Kernels.pack`."""
    packed[:] = 0
    for first in range(0, codes.size, _BLOCK):
        _append(codes[first : first + _BLOCK].copy(), first, bits, packed)
    _fill_up(codes.size, bits, packed)


@compiled
def unpack_plane(plane: Bytes, width: int, shift: int, codes: Bytes) -> None:
    """Add the bits of a plane to codes that have zeros in their place."""
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


# ---- stored buffers: multiples of a channel's scale times a block's
#
# Every value is exact or correctly rounded, see `Kernels.magnitudes`.

Patterns = NDArray[np.int32]

_MAGNITUDE = np.int32(0x7FFFFFFF)
_ROUND_UP = np.int32((1 << CUT) - 1)


@compiled
def magnitudes(x: Patterns, sums: Patterns, counts: Patterns, largest: Patterns) -> None:
    """Compute `Kernels.magnitudes` on patterns."""
    peak = _I32(0)
    for t in range(x.shape[0]):
        for c in range(x.shape[1]):
            size = _I32(x[t, c] & _MAGNITUDE)
            pattern = _I32(size >> _I32(CUT))
            peak = max(peak, size)
            sums[c] = _I32(sums[c] + pattern)
            counts[c] = _I32(counts[c] + _I32(pattern > _I32(0)))
    largest[0] = peak


@part
def _pattern_of(peak: np.float32, inverse_reach: np.float32) -> np.int32:
    covering = np.float32(peak * inverse_reach).view(np.int32)
    pattern = _I32(_I32(covering + _ROUND_UP) >> _I32(CUT))
    return pattern if pattern >= _I32(LEAST) else _I32(0)


@part
def _inverse_of_pattern(pattern: np.int32) -> np.float32:
    if pattern == _I32(0):
        return _ZERO
    return _ONE / np.float32(_I32(pattern << _I32(CUT)).view(np.float32))


@compiled
def quantize_blocks(
    x: Floats, inverse: Floats, inverse_reach: np.float32, last: int, blocks: Patterns, codes: Bytes
) -> None:
    """Compute `Kernels.quantize_blocks`; a token stays in the first-level cache."""
    tokens, channels = x.shape
    token = np.empty(channels, np.float32)
    top, middle = np.float32(last), _I32(last + 1)
    for t in range(tokens):
        for c in range(channels):
            token[c] = x[t, c] * inverse[c]
        for b in range(blocks.shape[1]):
            block = token[b * BLOCK : (b + 1) * BLOCK]
            peak = _ZERO
            for k in range(block.size):
                peak = max(peak, np.float32(abs(block[k])))
            pattern = _pattern_of(peak, inverse_reach)
            blocks[t, b] = pattern
            per_scale = _inverse_of_pattern(pattern)
            part_of = codes[t, b * BLOCK : (b + 1) * BLOCK]
            for k in range(block.size):
                code = np.rint(np.float32(block[k] * per_scale))
                code = min(max(code, -top), top)
                part_of[k] = np.uint8(_I32(code) + middle)


@compiled
def dequantize_blocks(codes: Bytes, blocks: Floats, scales: Floats, middle: int, x: Floats) -> None:
    """Compute `Kernels.dequantize_blocks`."""
    for t in range(codes.shape[0]):
        for b in range(blocks.shape[1]):
            block = blocks[t, b]
            part_of = codes[t, b * BLOCK : (b + 1) * BLOCK]
            values = x[t, b * BLOCK : (b + 1) * BLOCK]
            of_channel = scales[b * BLOCK : (b + 1) * BLOCK]
            for k in range(part_of.size):
                units = np.float32(_I32(_I32(part_of[k]) - _I32(middle)))
                values[k] = np.float32(units * block) * of_channel[k]
