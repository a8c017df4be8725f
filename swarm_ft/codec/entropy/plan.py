"""The encoder's choices for an entropy-coded frame: steps for a rate, and contexts.

Only encoders come here, so floats may round as they like.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swarm_ft.codec.entropy.header import (
    CLASSES,
    LEVELS_AN_OCTAVE,
    MAX_LEVEL,
    MAX_STEP,
    Numbers,
    WideHeader,
)
from swarm_ft.codec.entropy.stream import estimated_stream_bytes, stream_bytes
from swarm_ft.codec.kernels import MAX_CODE, UNITS, Kernels
from swarm_ft.codec.steps import MIN_STEP
from swarm_ft.protocol.codec_spec import Axis

Floats = NDArray[np.float64]

SYMBOL_ZERO = 128
FIRST_SYMBOL, LAST_SYMBOL = 1, 255
"""They stand for codes that are sent apart, being too large."""
_SAMPLE_VALUES = 16_384
_SEARCHES = 8
_CLASSES_AN_OCTAVE = 2
_MAX_OCTAVES = 3.0
_CLOSE_OCTAVES = 0.01
OCTAVE_BITS = 0.9
"""About what a value costs more when its step halves; less than 1 at low rates."""
_TINY = 1e-75  # squares of the smallest floats are larger, or zero


@dataclass(frozen=True, slots=True)
class Spreads:
    """Root mean squares of the groups of a tensor, and what they are of.

    Attributes:
        rows, cols: float64 [tokens], [channels].
        whole: of all values.
    """

    rows: Floats
    cols: Floats
    whole: float

    @staticmethod
    def of_squares(row_squares: Tensor, col_squares: Tensor) -> Spreads:
        """Spreads from the groups' sums of squares."""
        rows, cols = row_squares.cpu().double().numpy(), col_squares.cpu().double().numpy()
        whole = math.sqrt(rows.sum() / (len(rows) * len(cols)))
        return Spreads(np.sqrt(rows / len(cols)), np.sqrt(cols / len(rows)), whole)


def levels_for(spreads: Spreads, axis: Axis) -> WideHeader:
    """A header whose steps follow the spreads along the axis; its step is the largest spread."""
    row_levels = col_levels = np.zeros(0, np.uint8)
    step = spreads.whole
    if axis in (Axis.TOKEN, Axis.BOTH):
        row_levels = _levels(spreads.rows)
        step *= spreads.rows.max() / max(spreads.whole, _TINY)
    if axis in (Axis.CHANNEL, Axis.BOTH):
        col_levels = _levels(spreads.cols)
        step *= spreads.cols.max() / max(spreads.whole, _TINY)
    return WideHeader(max(step, MIN_STEP), 0, 0, 0, row_levels, col_levels)


def with_step(header: WideHeader, step: float, peak: float) -> WideHeader:
    """The header with that step, as a bfloat16 within the range that codes and floats allow."""
    deepest = sum(int(n.max()) for n in (header.row_levels, header.col_levels) if len(n))
    lowest = MIN_STEP * 2.0 ** (deepest / LEVELS_AN_OCTAVE + 1.5)
    bounded = min(max(step, lowest, peak / MAX_CODE), MAX_STEP / 2)
    return replace(header, step=torch.tensor(bounded).to(torch.bfloat16).item())


class Sample:
    """A few tokens of a frame, to try steps and contexts on.

    Args:
        change: float32 [tokens, channels], what is to be coded, of all tokens.
    """

    def __init__(self, change: Tensor, header: WideHeader, kernels: Kernels) -> None:
        tokens = len(change)
        self.count = change.numel()
        self.every = max(1, change.numel() // _SAMPLE_VALUES)
        self.every = min(self.every, tokens)
        self.share = len(range(0, tokens, self.every)) / tokens
        self._kernels = kernels
        steps = replace(header, step=1.0).steps()
        rows = steps.rows[:: self.every] if len(steps.rows) > 1 else steps.rows
        table = (rows[:, None] * steps.cols[None, :]).to(change.device)
        self._scaled = change[:: self.every] / table
        self._weights = table.square()
        self._spread = self._scaled.double().square().mean().sqrt().item()

    def code_spread(self, header: WideHeader) -> float:
        """Root mean square of the codes at the header's step."""
        return self._spread / header.step

    def frame_bytes(self, header: WideHeader, low_bits: int = 0) -> float:
        """About what the whole frame takes with that header's step and classes."""
        some = header.row_classes[:: self.every]
        sampled = replace(header, row_classes=some)
        contexts = sampled.contexts(*self._scaled.shape).to(self._scaled.device)
        codes = (self._scaled / header.step).round_().clamp_(-MAX_CODE, MAX_CODE)
        symbols, _ = to_symbols(codes.to(torch.int16), low_bits)
        counts = self._kernels.histogram(symbols.reshape(-1), contexts, header.num_contexts)
        numbers = counts.cpu().numpy()
        coded = estimated_stream_bytes(numbers, self.share)
        return coded + _apart_bytes(numbers, low_bits) / self.share + header.size_bytes

    def shrink(self, header: WideHeader) -> int:
        """How many units nearer to zero the values of a cell are than its middle, on average."""
        exact = self._scaled.abs() / header.step
        codes = exact.round()
        weights = self._weights * (codes > 0) * (codes < 64)
        total = weights.expand_as(codes).sum().item()
        if not total:
            return 0
        offset = ((codes - exact).double() * weights).sum().item() / total
        return min(max(round(offset * UNITS), 0), 15)


def to_symbols(codes: Tensor, low_bits: int) -> tuple[Tensor, Tensor]:
    """Symbols, uint8, of the codes' upper parts; and these parts, int16, of codes' shape."""
    upper = codes >> low_bits if low_bits else codes
    return (upper.clamp(-127, 127) + SYMBOL_ZERO).to(torch.uint8), upper


def codes_bytes(counts: NDArray[np.int64], low_bits: int) -> float:
    """What codes with these counts of symbols take, to a few bytes."""
    return stream_bytes(counts) + _apart_bytes(counts, low_bits)


def _apart_bytes(counts: NDArray[np.int64], low_bits: int) -> float:
    """Of codes that are too large for a symbol, and of all codes' lower bits."""
    escapes = int(counts[:, (FIRST_SYMBOL, LAST_SYMBOL)].sum())
    return 2 * escapes + int(counts.sum()) * low_bits / 8


def low_bits_for(spread: float) -> int:
    """How many lower bits of codes of that spread to send as they are: next to none is lost."""
    return min(max(0, math.floor(math.log2(max(spread, 1.0) / 8))), 8)


def with_contexts(header: WideHeader, spreads: Spreads, sample: Sample) -> WideHeader:
    """The header with the classes that make the sample smallest, if any do."""
    rows = np.log2(np.maximum(spreads.rows, _TINY)) + _octaves(header.row_levels)
    cols = np.log2(np.maximum(spreads.cols, _TINY)) + _octaves(header.col_levels)
    by_channel = replace(header, col_classes=_classes(cols))
    by_both = replace(by_channel, row_classes=_classes(rows))
    return min(header, by_channel, by_both, key=sample.frame_bytes)


def step_for_rate(header: WideHeader, sample: Sample, budget_bytes: float) -> float:
    """The step at which the frame takes about `budget_bytes`; `sample` says what it takes."""
    step = header.step
    for _ in range(_SEARCHES):
        tried = replace(header, step=step)
        size = sample.frame_bytes(tried, low_bits_for(sample.code_spread(tried)))
        octaves = (size - budget_bytes) * 8 / sample.count / OCTAVE_BITS
        step *= 2.0 ** min(max(octaves, -_MAX_OCTAVES), _MAX_OCTAVES)
        if abs(octaves) < _CLOSE_OCTAVES:
            break
    return step


def _levels(spreads: Floats) -> Numbers:
    below = (
        np.log2(spreads.max() / np.maximum(spreads, _TINY)) if spreads.max() > 0 else 0 * spreads
    )
    return _numbers(np.rint(below * LEVELS_AN_OCTAVE), MAX_LEVEL)


def _octaves(levels: Numbers) -> Floats | float:
    return levels / LEVELS_AN_OCTAVE if len(levels) else 0.0


def _classes(octaves: Floats) -> Numbers:
    """Classes that tell wide groups apart; all that are narrower than the lowest are in it."""
    ordered = np.sort(octaves)
    low, high = ordered[len(ordered) // 50], ordered[-1 - len(ordered) // 50]
    lowest = max(high - (CLASSES - 1) / _CLASSES_AN_OCTAVE, low)
    classes = np.rint((octaves - lowest) * _CLASSES_AN_OCTAVE)
    return _numbers(classes, CLASSES - 1)


def _numbers(values: Floats, most: int) -> Numbers:
    return np.clip(values, 0, most).astype(np.uint8)
