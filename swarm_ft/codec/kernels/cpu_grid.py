"""Loops between values and codes, for one thread of a CPU. Knows arrays; knows no tensors.

They run along channels, where LLVM makes vectors of them, over arrays that `_prepare_*` makes of a
row's steps: once where rows share their steps, else row by row, within the first-level cache.
`base` and `seed` may be None: Numba compiles a loop apart for that. Each operand and intermediate
of 32 bits is said to be one, as Numba widens to 64 what it may.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from swarm_ft.codec.kernels.base import COARSE, EXACT_CODE, MAX_CODE, UNITS
from swarm_ft.codec.kernels.cpu_jit import compiled, compiled_loosely, part

Floats = NDArray[np.float32]
Codes = NDArray[Any]
StepVectors = tuple[Floats, Floats]
"""`Steps` with all its columns: rows [tokens] or [1], and cols [channels]."""

_ZERO, _HALF, _ONE = np.float32(0), np.float32(0.5), np.float32(1)
_UNITS, _PER_UNITS = np.float32(UNITS), np.float32(1 / UNITS)
_COARSE, _PER_COARSE = np.float32(COARSE), np.float32(1 / COARSE)
_EXACT_CODE, _MAX_CODE = np.float32(EXACT_CODE), np.float32(MAX_CODE)
_LARGEST = np.float32(np.finfo(np.float32).max)
_U32 = np.uint32
_I32 = np.int32


@part
def step_of(row: np.float32, col: np.float32) -> np.float32:
    """bfloat16(row * col) of a finite product, rounded to nearest even."""
    bits = np.float32(row * col).view(np.uint32)
    is_odd = _U32(_U32(bits >> _U32(16)) & _U32(1))
    rounded = _U32(bits + _U32(is_odd + _U32(0x7FFF)))
    return np.float32(_U32(rounded & _U32(0xFFFF0000)).view(np.float32))


@part
def _dither(index: int, seed: int) -> np.float32:
    """Units to add to value `index`, see `reference.mix`."""
    h = _U32(_U32(_U32(index) * _U32(0x9E3779B1)) ^ _U32(seed))
    h = _U32(_U32(h ^ _U32(h >> _U32(16))) * _U32(0x85EBCA6B))
    h = _U32(_U32(h ^ _U32(h >> _U32(13))) * _U32(0xC2B2AE35))
    r = _I32(_U32(_U32(h ^ _U32(h >> _U32(16))) >> _U32(28)))
    return np.float32(_I32(_I32(r * _I32(2)) - _I32(15)))


@part
def _inverse(step: np.float32) -> np.float32:
    """1 / |step|, finite also for a step of zero."""
    size = np.float32(abs(step))
    return np.float32(min(_ONE / size, _LARGEST)) if size > _ZERO else _ZERO


@part
def _prepare_quantize(
    row: np.float32, cols: Floats, bits: int, inverse: Floats, offset: Floats, top: Floats
) -> None:
    """Of min(max(0, x inverse + offset), top), the whole part is the code: offset has the 0.5."""
    last = np.float32((1 << bits) - 1)
    for c in range(cols.size):
        step = step_of(row, cols[c])
        largest = last - _ONE if step < _ZERO else last
        inverse[c] = _inverse(step)
        offset[c] = largest * _HALF + _HALF
        top[c] = largest + _HALF if step != _ZERO else _ZERO


@compiled_loosely
def quantize_narrow(
    x: Floats, base: Floats | None, steps: StepVectors, bits: int, seed: int | None, codes: Codes
) -> None:
    """See `Kernels.quantize`; what is NaN gets code 0."""
    tokens, channels = x.shape
    inverse, offset = np.empty(channels, np.float32), np.empty(channels, np.float32)
    top = np.empty(channels, np.float32)
    for t in range(tokens):
        if t < steps[0].size:
            _prepare_quantize(steps[0][t], steps[1], bits, inverse, offset, top)
        for c in range(channels):
            change = x[t, c]
            if base is not None:
                change = change - base[t, c]
            code = change * inverse[c] + offset[c]
            if seed is not None:
                code = code - _dither(t * channels + c, seed) * _PER_UNITS
            code = code if code > _ZERO else _ZERO
            codes[t, c] = np.uint8(_I32(code if code < top[c] else top[c]))


@part
def _prepare_dequantize(
    row: np.float32, cols: Floats, bits: int, unit: Floats, lowest: Floats
) -> None:
    half = np.float32(UNITS // 2 * ((1 << bits) - 1))
    side = np.float32(UNITS * ((1 << bits - 1) - 1))
    for c in range(cols.size):
        step = step_of(row, cols[c])
        unit[c] = np.float32(abs(step)) * _PER_UNITS
        lowest[c] = -side if step < _ZERO else -half


@compiled
def dequantize_narrow(
    codes: Codes, base: Floats | None, steps: StepVectors, bits: int, seed: int | None, x: Floats
) -> None:
    """See `Kernels.dequantize`; units are whole numbers below 2^14, exact in any order."""
    tokens, channels = codes.shape
    unit, lowest = np.empty(channels, np.float32), np.empty(channels, np.float32)
    for t in range(tokens):
        if t < steps[0].size:
            _prepare_dequantize(steps[0][t], steps[1], bits, unit, lowest)
        for c in range(channels):
            units = np.float32(_I32(codes[t, c])) * _UNITS + lowest[c]
            if seed is not None:
                units = units + _dither(t * channels + c, seed)
            value = units * unit[c]
            if base is not None:
                value = base[t, c] + value
            x[t, c] = value


@compiled_loosely
def quantize_wide(
    x: Floats, base: Floats | None, steps: StepVectors, seed: int | None, codes: Codes
) -> None:
    """See `Kernels.quantize`."""
    tokens, channels = x.shape
    inverse = np.empty(channels, np.float32)
    for t in range(tokens):
        if t < steps[0].size:
            for c in range(channels):
                inverse[c] = _inverse(step_of(steps[0][t], steps[1][c]))
        for c in range(channels):
            change = x[t, c]
            if base is not None:
                change = change - base[t, c]
            code = change * inverse[c]
            code = code if code > -_MAX_CODE else -_MAX_CODE
            code = code if code < _MAX_CODE else _MAX_CODE
            nearest = code
            if seed is not None:
                nearest = code - _dither(t * channels + c, seed) * _PER_UNITS
            nearest = np.rint(nearest)
            coarse = np.rint(code * _PER_COARSE) * _COARSE
            codes[t, c] = np.int16(_I32(coarse if abs(nearest) > _EXACT_CODE else nearest))


@compiled
def dequantize_wide(
    codes: Codes, base: Floats | None, steps: StepVectors, shrink: int, seed: int | None, x: Floats
) -> None:
    """See `Kernels.dequantize`; units are whole numbers of at most 2^20, exact in any order."""
    tokens, channels = codes.shape
    unit, less = np.empty(channels, np.float32), np.float32(shrink)
    for t in range(tokens):
        if t < steps[0].size:
            for c in range(channels):
                unit[c] = np.float32(abs(step_of(steps[0][t], steps[1][c]))) * _PER_UNITS
        for c in range(channels):
            code = _I32(codes[t, c])
            toward_zero = less if code > _I32(0) else (-less if code < _I32(0) else _ZERO)
            units = np.float32(code) * _UNITS - toward_zero
            if seed is not None:
                units = units + _dither(t * channels + c, seed)
            coarse = np.float32(_I32(code & _I32(-COARSE))) * _UNITS
            units = coarse if abs(code) > _I32(EXACT_CODE) else units
            value = units * unit[c]
            if base is not None:
                value = base[t, c] + value
            x[t, c] = value
