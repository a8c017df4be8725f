"""Loops of an encoder's plan, for one CPU thread, on arrays.

Plans use a sample on the host, wherever the tensor is. No other backend has to agree, so floats may
round freely.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from swarm_ft.codec.kernels.base import (
    LARGEST_SYMBOL,
    MAX_CODE,
    MIN_SCALE,
    SLICES,
    SYMBOL_ZERO,
    TRELLIS_ERRORS,
    UNITS,
)
from swarm_ft.codec.kernels.cpu_grid import (
    Floats,
    compiled,
    compiled_loosely,
    drawn,
    part,
    scale_of,
)

Bytes = NDArray[np.uint8]
Counts = NDArray[np.int64]
Doubles = NDArray[np.float64]
Integers = NDArray[np.int32]
_I32 = np.int32

_ZERO, _ONE, _MIN_SCALE = np.float32(0), np.float32(1), np.float32(MIN_SCALE)
_MOST_CODE = float(MAX_CODE)
_LARGEST = float(np.finfo(np.float32).max)
_EULER = 0.5772156649015329
_FEW = 64
_HALF_A_NAT = 0.5 / math.log(2)
_TINY_SQUARE = 1e-300
_MIDDLE = 15
_REACH, _SECOND_REACH = 2 * TRELLIS_ERRORS[0], 2 * TRELLIS_ERRORS[1]


@part
def _inverse(square: float) -> float:
    return 1 / square if square > _TINY_SQUARE else 0.0


@compiled_loosely
def relative_squares(x: Floats, rounds: int, rows: Doubles, cols: Doubles) -> None:
    """Compute mean squares of tokens with normalised channels, and the other way round.

    One outlying channel would otherwise determine a token's spread. Tokens and channels are
    normalised in turn.
    """
    tokens, channels = x.shape
    inverse = np.zeros(channels)
    cols[:] = 0.0
    for t in range(tokens):
        for c in range(channels):
            cols[c] += np.float64(x[t, c]) * np.float64(x[t, c])
    for _ in range(rounds):
        for c in range(channels):
            inverse[c] = _inverse(cols[c] / tokens)
            cols[c] = 0.0
        for t in range(tokens):  # which waits in the first-level cache for its spread
            total = 0.0
            for c in range(channels):
                total += np.float64(x[t, c]) * np.float64(x[t, c]) * inverse[c]
            rows[t] = total / channels
            weight = _inverse(rows[t])
            for c in range(channels):
                cols[c] += np.float64(x[t, c]) * np.float64(x[t, c]) * weight
    for c in range(channels):
        cols[c] = cols[c] / tokens


@compiled
def inverse_spreads(x: Floats, inverse: Floats) -> None:
    """Compute the inverse spread of each channel with normalised tokens; 0 for zeros."""
    rows, cols = np.empty(x.shape[0]), np.empty(x.shape[1])
    relative_squares(x, 1, rows, cols)
    for c in range(cols.size):
        inverse[c] = min(math.sqrt(_inverse(cols[c])), _LARGEST)


@compiled
def fit(scales: Floats, errors: Floats, penalties: Floats, multiples: Floats) -> None:
    """Multiply each group's covering scale by the multiple with the least error.

    Args:
        scales: Covering scales of groups; modified in place.
        errors: Squared errors, [multiples, groups].
        penalties: Further error of each multiple.
        multiples: Candidate multiples.
    """
    least, best = errors[0] + penalties[0], np.full(scales.size, multiples[0])
    for k in range(1, multiples.size):
        for c in range(scales.size):
            error = np.float32(errors[k, c] + penalties[k])
            best[c] = multiples[k] if error < least[c] else best[c]
            least[c] = min(error, least[c])
    for c in range(scales.size):
        scales[c] = np.float32(scales[c] * best[c])


@compiled
def to_bfloat16(scales: Floats, largest: np.float32) -> None:
    """Round each scale to a bfloat16 up to `largest`; too small ones become 0."""
    for c in range(scales.size):
        size = scale_of(np.float32(min(abs(scales[c]), largest)), _ONE)
        size = size if size >= _MIN_SCALE else _ZERO
        scales[c] = -size if scales[c] < _ZERO < size else size


@lru_cache(maxsize=8)  # samples are of one size, or of a few
def trellis_errors(count: int) -> Doubles:
    """Return `count` errors in scales, distributed like those of a trellis, see `TRELLIS_ERRORS`.

    The result, float64 [count], is cached and must not be modified.
    """
    errors = np.empty(count)
    _draw_errors(errors)
    return errors


@compiled
def _draw_errors(errors: Doubles) -> None:
    for i in range(errors.size):
        first, second, third = drawn(i, 0), drawn(i, 1), drawn(i, 2)
        error = (2 * first - _MIDDLE) / UNITS / 2 + (2 * second - _MIDDLE) / UNITS * _REACH
        errors[i] = error + (2 * third - _MIDDLE) / UNITS * _SECOND_REACH


@part
def _dithered(
    scaled: Doubles, scale: float, errors: Doubles, whole: Integers, far: Integers
) -> None:
    """Compute folded codes of the values, and the distance of their dither to its nearer end."""
    for i in range(scaled.size):
        code, r = scaled[i] / scale, drawn(i, 0)
        if errors.size > 0:
            code += errors[i]
            above = code - np.floor(code + 0.5) + 0.5  # 0 to 1, and 1 by a rounding
            r = _I32(min(above * (_MIDDLE + 1), float(_MIDDLE)))
        code -= (2 * r - _MIDDLE) / UNITS
        code = -code if 2 * r < _MIDDLE else code
        whole[i] = _I32(min(max(np.rint(code), -_MOST_CODE), _MOST_CODE))
        far[i] = min(r, _I32(_MIDDLE - r))


@compiled
def tally(
    scaled: Doubles,
    every: int,
    grid: tuple[float, int],
    classes: tuple[Bytes, Bytes],
    dither: tuple[int, Doubles],
    counts: Counts,
) -> int:
    """Count the symbols by context that a wide grid makes of a sample.

    Args:
        scaled: Sampled values in scales of level 0, [n].
        every: Stride of the sample.
        grid: Scale, and number of lower bits that a symbol omits.
        classes: Classes of all tokens and of all channels.
        dither: Number of slices, 0 without dither; and the errors of a trellis, empty without one.
        counts: Zeros, [contexts, 256].

    Returns:
        The number of codes that are too large for a symbol.
    """
    (scale, low_bits), (rows, cols), (slices, errors) = grid, classes, dither
    whole, far = np.empty(scaled.size, np.int32), np.zeros(scaled.size, np.int32)
    if slices > 0:
        _dithered(scaled, scale, errors, whole, far)
    else:
        for i in range(scaled.size):
            whole[i] = _I32(min(max(np.rint(scaled[i] / scale), -_MOST_CODE), _MOST_CODE))
    width, less = max(slices - 1, 0), SLICES - slices
    t, c, escapes = 0, 0, 0
    for i in range(scaled.size):
        context = (np.int64(rows[t]) + np.int64(cols[c])) << width | far[i] >> less
        symbol = min(max(whole[i] >> low_bits, -LARGEST_SYMBOL), LARGEST_SYMBOL)
        counts[context, symbol + SYMBOL_ZERO] += 1
        escapes += abs(symbol) == LARGEST_SYMBOL
        c += every
        while c >= cols.size:
            c -= cols.size
            t += 1
    return escapes


def _hidden_bits() -> Doubles:
    """Return the bits that symbols seen n times cost beyond n log2(total / n) in the whole tensor.

    Source: Grassberger 2003, Entropy estimates from insufficient samplings (physics/0307138),
    equation 27.
    """
    digamma, hidden = -_EULER - math.log(2), [0.0]
    for n in range(1, _FEW):
        digamma += 2 / (n - 1) if n > 1 and n % 2 == 0 else 0
        hidden.append(n * (math.log(n) - digamma) / math.log(2))
    return np.array(hidden)


_HIDDEN_BITS = _hidden_bits()


@compiled
def entropy(counts: Counts) -> tuple[float, float, int, int]:
    """Return the ideal size of symbols with these counts, [contexts, 256].

    Returns:
        The bits by the sample's frequencies; their bias, because frequencies fit a sample better
        than
        the whole tensor; the number of places from each context's first to its last symbol; and the
        number of symbols seen once.
    """
    bits, hidden, places, once = 0.0, 0.0, 0, 0
    for k in range(counts.shape[0]):
        total, first, last = 0, 256, -1
        for symbol in range(counts.shape[1]):
            count = counts[k, symbol]
            if count > 0:
                bits -= count * np.log2(count)
                hidden += _HIDDEN_BITS[count] if count < _FEW else _HALF_A_NAT
                total += count
                once += count == 1
                first, last = min(first, symbol), symbol
        if total > 0:
            bits += total * np.log2(total)
            hidden -= _HALF_A_NAT
            places += last - first + 1
    return bits, hidden, places, once
