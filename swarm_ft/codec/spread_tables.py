"""Symbol tables derived from a spread: the distribution of dithered codes with that spread.

With subtractive dither u a code q stands for values between q + u - 1/2 and q + u + 1/2. Its
frequency depends on u, which both ends know; ignoring u would waste bits on narrow directions. The
model is Student's t with eight degrees of freedom: slightly heavier tails than normal, as
directions of activations have, and a distribution function that needs only a root. The tables are
therefore the same on every machine (IEEE 754 arithmetic in a fixed order).
"""

from __future__ import annotations

import functools
import math

import numpy as np
from numpy.typing import NDArray

from swarm_ft.codec.entropy import SYMBOLS
from swarm_ft.codec.kernels.base import PROBABILITY_BITS, SYMBOL_ZERO, TRELLIS_ERRORS

SLICES = 8
"""Number of magnitudes of the dither, which has 16 values symmetric around zero."""
UNDITHERED = SLICES
"""Slice of codes without dither."""
SPREADS = 48
_QUARTERS = (1.0, 1.189207115002721, 1.4142135623730951, 1.681792830507429)
_LEAST_OCTAVE = -3
_ERRORS = tuple(
    first * TRELLIS_ERRORS[0] + second * TRELLIS_ERRORS[1]
    for first in ((2 * k - 7) / 8 for k in range(8))
    for second in ((2 * k - 3) / 4 for k in range(4))
)
"""Errors that the trellis adds, besides up to a quarter of a scale to either side."""
_WEIGHT_BITS = 24
_TOTAL = 1 << PROBABILITY_BITS

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def spread_of(number: int) -> float:
    """Return a spread in steps: quarters of an octave, from an eighth of a step on."""
    return math.ldexp(_QUARTERS[number % 4], _LEAST_OCTAVE + number // 4)


def frequencies(spreads: Ints, slices: Ints, largest: Ints) -> NDArray[np.int32]:
    """Return integers that sum to 4096 in each context, at least 1 for each occurring symbol.

    Args:
        spreads: int64 [contexts]; numbers of `spread_of`.
        slices: int64 [contexts]; slices of the dither.
        largest: int64 [contexts]; largest occurring code, 0 to 127.

    Returns:
        int32 [contexts, 256] by symbol (code + 128).
    """
    weights = _weights()[spreads, slices]
    present = np.abs(np.arange(SYMBOLS) - SYMBOL_ZERO) <= largest[:, None]
    weights = np.where(present, weights, 0)
    spare = _TOTAL - present.sum(1, keepdims=True)
    shares = present + weights * spare // weights.sum(1, keepdims=True).clip(min=1)
    shares[:, SYMBOL_ZERO] += _TOTAL - shares.sum(1)
    found: NDArray[np.int32] = shares.astype(np.int32)
    return found


def nearest_spreads(counts: Ints) -> Ints:
    """Return the maximum-likelihood spread of each class.

    Args:
        counts: int64 [classes, slices, 256]; a class may lack some slices.
    """
    bits = _bits()[:, : counts.shape[1]]
    cost = np.tensordot(counts.astype(np.float64), bits, axes=((1, 2), (1, 2)))
    found: Ints = cost.argmin(1)
    return found


@functools.cache
def _weights() -> Ints:
    """Return int64 [spreads, slices + 1, 256]: probabilities times 2^24, rounded down."""
    codes = np.arange(SYMBOLS, dtype=np.float64) - SYMBOL_ZERO
    shifts = np.array([(2 * piece + 1) / 32 for piece in range(SLICES)])
    middles = codes[None, :] + shifts[:, None]
    all_weights = []
    for number in range(SPREADS):
        spread = spread_of(number)
        dithered = sum(_share(middles + error, 0.25, spread) for error in _ERRORS) / len(_ERRORS)
        shares = np.concatenate((dithered, _share(codes[None, :], 0.5, spread)))
        all_weights.append(np.floor(np.maximum(shares, 0.0) * float(1 << _WEIGHT_BITS)))
    return np.stack(all_weights).astype(np.int64)


@functools.cache
def _bits() -> Floats:
    """Return the approximate bits of each symbol; for encoders."""
    weights = np.maximum(_weights(), 1 << _WEIGHT_BITS - PROBABILITY_BITS).astype(np.float64)
    total: Floats = np.log2(weights.sum(-1, keepdims=True)) - np.log2(weights)
    return total


def _share(middles: Floats, reach: float, spread: float) -> Floats:
    """Return the probability of values within `reach` of the middles."""
    found: Floats = _below((middles + reach) / spread) - _below((middles - reach) / spread)
    return found


def _below(z: Floats) -> Floats:
    """Return the distribution function of Student's t with 8 degrees of freedom and spread 1."""
    t = z * math.sqrt(4 / 3)
    squares = t * t
    cosine = 8.0 / (8.0 + squares)
    sine = t / np.sqrt(8.0 + squares)
    return 0.5 + 0.5 * sine * (1.0 + cosine * (0.5 + cosine * (0.375 + cosine * 0.3125)))
