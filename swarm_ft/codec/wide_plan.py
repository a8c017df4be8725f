"""Rate control of entropy-coded frames: the encoder's choice of scales and contexts.

Plans on the host from sums and a sample that are fetched at once from the tensor's device, because
each small step costs a GPU as much as a pass over the whole tensor. Only encoders use this module,
so floats may round freely.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swarm_ft.codec.base import checked_peak, nearest_bfloat16, to_device, to_host
from swarm_ft.codec.entropy import (
    CLASSES,
    LEVELS_AN_OCTAVE,
    MAX_LEVEL,
    MAX_SCALE,
    Numbers,
    WideHeader,
    estimated_stream_bytes,
    stream_bytes,
)
from swarm_ft.codec.kernels.base import (
    LARGEST_SYMBOL,
    MAX_CODE,
    MIN_SCALE,
    SLICES,
    SYMBOL_ZERO,
    UNITS,
    Kernels,
)
from swarm_ft.codec.spec import Axis

Floats = NDArray[np.float64]
Values = NDArray[np.float32]

FIRST_SYMBOL, LAST_SYMBOL = SYMBOL_ZERO - LARGEST_SYMBOL, SYMBOL_ZERO + LARGEST_SYMBOL
"""Escape symbols, for codes that are too large and are sent separately."""
_SAMPLE_VALUES = 32_768
_SPREAD_VALUES = 256
_ROUNDS = 2
_SEARCHES = 8
_MOST_AN_OCTAVE, _FEWEST_AN_OCTAVE = 2.0, 0.75
"""Range of spread classes per octave: finer classes separate similar groups, coarser ones cover
more."""
_SPARE_OCTAVES = 14.0
_SPREAD_OF_SYMBOLS = 8
MAX_OCTAVES = 3.0
_CLOSE_OCTAVES = 0.01
_RARE_CODE = 64
_SYMBOLS = 256
OCTAVE_BITS = 0.9
"""Approximate bits that a value costs more when its scale halves; less than 1 at low rates."""
_TINY = 1e-75  # squares of the smallest floats are larger, or zero


@dataclass(frozen=True, slots=True)
class Spreads:
    """Root mean squares of the groups of a tensor.

    Attributes:
        rows, cols: float64 [tokens], [channels].
        relative_rows: Spreads of tokens with balanced channels, from a sample of the channels. With
            `cols` it predicts the spread of a value.
    """

    rows: Floats
    cols: Floats
    relative_rows: Floats

    @staticmethod
    def of(row_squares: Floats, col_squares: Floats, some_channels: Values) -> Spreads:
        """Return the spreads from sums of squares, and from all tokens' values of some channels."""
        from swarm_ft.codec.kernels import cpu_plan  # compilers take seconds

        relative, of_some = (np.empty(n) for n in some_channels.shape)
        cpu_plan.relative_squares(some_channels, _ROUNDS, relative, of_some)
        rows, cols = row_squares / len(col_squares), col_squares / len(row_squares)
        return Spreads(np.sqrt(rows), np.sqrt(cols), np.sqrt(relative))


@dataclass(frozen=True, slots=True)
class TensorStatistics:
    """Statistics of a tensor on the host, for planning.

    Attributes:
        spreads: Spreads of the coded tensor: x, or its change.
        row_peaks, col_peaks: Largest magnitudes, float32 [tokens], [channels].
        some: Sample of the values, float32 [n], with a constant stride.
        every: Stride of the sample.
        quality: Spreads that define the quality: those of x itself if the quality is constant.
    """

    spreads: Spreads
    row_peaks: Values
    col_peaks: Values
    some: Values
    every: int
    quality: Spreads

    @property
    def peak(self) -> float:
        """Largest magnitude."""
        return float(self.row_peaks.max())

    @staticmethod
    def of(
        x: Tensor, base: Tensor | None, kernels: Kernels, *, quality_of_x: bool
    ) -> TensorStatistics:
        """Return the statistics of x, or of x - base, with one GPU synchronisation.

        Raises:
            NonFinite: The tensor has an infinity or NaN.
        """
        every = _stride(x.numel(), x.shape[1])
        flat = x.view(-1), None if base is None else base.view(-1)
        looks = [
            *kernels.moments(x, base),
            _some_channels(x, base),
            _change(*flat, (slice(None, None, every),)),
        ]
        if apart := quality_of_x and base is not None:
            looks += [*kernels.moments(x, None)[:2], _some_channels(x, None)]
        rows, cols, row_peaks, col_peaks, some_channels, some, *of_x = to_host(*looks)
        checked_peak(float(row_peaks.max()))
        spreads = Spreads.of(rows, cols, some_channels)
        quality = Spreads.of(*of_x) if apart else spreads
        return TensorStatistics(spreads, row_peaks, col_peaks, some, every, quality)


def _stride(count: int, channels: int) -> int:
    """Return the stride of a sample that contains all channels equally often."""
    every = max(1, count // _SAMPLE_VALUES)
    while math.gcd(every, channels) > 1:
        every += 1
    return every


def _some_channels(x: Tensor, base: Tensor | None) -> Tensor:
    every = max(1, x.shape[1] // _SPREAD_VALUES)
    return _change(x, base, (slice(None), slice(None, None, every)))


def _change(x: Tensor, base: Tensor | None, part: tuple[slice, ...]) -> Tensor:
    return x[part].contiguous() if base is None else (x[part] - base[part]).contiguous()


def with_balanced_channels(
    x: Tensor, base: Tensor | None, spreads: Spreads, kernels: Kernels
) -> Spreads:
    """Return the spreads with those of channels computed from balanced tokens."""
    rows = torch.from_numpy(np.maximum(spreads.relative_rows, _TINY))
    scaled = ((x if base is None else x - base) / to_device(rows, x.device)[:, None]).float()
    (col_squares,) = to_host(kernels.moments(scaled, None)[1])
    return replace(spreads, cols=np.sqrt(col_squares / len(x)))


def levels_for(spreads: Spreads, axis: Axis) -> WideHeader:
    """Return a header whose levels follow the spreads along the axis; its scale is the largest."""
    none = np.zeros(0, np.uint8)
    if axis is Axis.FRAME:
        return WideHeader(_root_mean_square(spreads.rows), 0, 0, 0, none, none)
    if axis is Axis.TOKEN:
        scale = spreads.rows.max()
        return WideHeader(scale, 0, 0, 0, _levels(spreads.rows, scale), none)
    scale = spreads.cols.max()
    if axis is Axis.CHANNEL:
        return WideHeader(scale, 0, 0, 0, none, _levels(spreads.cols, scale))
    scale *= spreads.relative_rows.max()
    rows, cols = (_levels(group, scale) // 2 for group in (spreads.relative_rows, spreads.cols))
    return WideHeader(scale, 0, 0, 0, 2 * rows, 2 * cols)


def reach_of(header: WideHeader, seen: TensorStatistics) -> float:
    """Return the largest value in scales of level 0, scaled by its group's level."""
    by_row = seen.row_peaks.astype(np.float64) * 2.0 ** _octaves(header.row_levels)
    by_col = seen.col_peaks.astype(np.float64) * 2.0 ** _octaves(header.col_levels)
    return float(max(by_row.max(), by_col.max()))


def with_scale(header: WideHeader, scale: float, reach: float) -> WideHeader:
    """Return the header with a scale, as a bfloat16 within the range of codes and floats."""
    deepest = sum(int(n.max()) for n in (header.row_levels, header.col_levels) if len(n))
    lowest = MIN_SCALE * 2.0 ** (deepest / LEVELS_AN_OCTAVE + 1.5)
    bounded = min(max(scale, lowest, reach / MAX_CODE), MAX_SCALE / 2)
    return replace(header, scale=nearest_bfloat16(bounded))


class Sample:
    """Sample of a frame's values, to estimate sizes with candidate scales and contexts.

    Dithered codes use a dither of their own here, because that of the frame depends on its scale.

    Args:
        seen: Statistics of the tensor.
        header: Header with the levels; its scale is ignored.
    """

    def __init__(self, seen: TensorStatistics, header: WideHeader) -> None:
        self._shape = tokens, channels = len(seen.row_peaks), len(seen.col_peaks)
        self.count = tokens * channels
        self.share = len(seen.some) / self.count
        self._every = seen.every
        t, c = np.divmod(np.arange(0, self.count, seen.every), channels)
        scales = replace(header, scale=1.0).scales()
        rows, cols = scales.rows.numpy(), scales.cols.numpy()
        table = rows[t if len(rows) > 1 else 0] * cols[c if len(cols) > 1 else 0]
        # A scale may be far smaller than the largest value, hence float64.
        self._scaled = seen.some.astype(np.float64) / table
        self._weights = np.square(table, dtype=np.float64)
        self._spread = math.sqrt(np.square(self._scaled).mean())

    def code_spread(self, header: WideHeader) -> float:
        """Return the root mean square of the codes at the header's scale."""
        return self._spread / header.scale

    def frame_bytes(self, header: WideHeader) -> float:
        """Estimate the size of the whole frame with a header."""
        from swarm_ft.codec.kernels import cpu_plan

        classes = header.all_classes(*self._shape)
        counts = np.zeros((header.num_contexts, _SYMBOLS), np.int64)
        grid = float(header.scale), header.low_bits
        errors = cpu_plan.trellis_errors(len(self._scaled) if header.is_trellis else 0)
        dither = header.slices, errors
        escapes = cpu_plan.tally(self._scaled, self._every, grid, classes, dither, counts)
        coded = estimated_stream_bytes(counts, self.share)
        apart = _apart_bytes(escapes, len(self._scaled), header.low_bits)
        return coded + apart / self.share + header.size_bytes

    def shrink(self, header: WideHeader) -> int:
        """Return the mean shift from a cell's middle to its values, in units toward zero."""
        exact = np.abs(self._scaled) / header.scale
        codes = np.rint(exact)
        weights = self._weights * ((codes > 0) & (codes < _RARE_CODE))
        total = float(weights.sum())
        if not 0 < total < math.inf:
            return 0
        offset = float(((codes - exact) * weights).sum()) / total
        return min(max(round(offset * UNITS), 0), 15)


def codes_bytes(counts: NDArray[np.int64], low_bits: int) -> float:
    """Return the size of codes with these counts of symbols, to a few bytes."""
    escapes = int(counts[:, (FIRST_SYMBOL, LAST_SYMBOL)].sum())
    return stream_bytes(counts) + _apart_bytes(escapes, int(counts.sum()), low_bits)


def _apart_bytes(escapes: int, count: int, low_bits: int) -> float:
    """Return the bytes of escaped codes and of all codes' lower bits."""
    return 2 * escapes + count * low_bits / 8


def with_low_bits(header: WideHeader, sample: Sample) -> WideHeader:
    """Return the header with the number of uncoded lower bits that makes the sample smallest.

    It is 0 at low rates. At high rates the lower bits are noise, and symbol tables that include
    them cost more than they save. Dithered codes without uncoded bits are trellis-coded.
    """
    spread = min(max(sample.code_spread(header), 1.0), float(MAX_CODE))
    most = max(0, math.ceil(math.log2(spread / _SPREAD_OF_SYMBOLS)))
    options = [
        replace(header, low_bits=low_bits, is_trellis=header.slices > 0 and low_bits == 0)
        for low_bits in range(min(most, 8) + 1)
    ]
    return min(options, key=sample.frame_bytes) if most else options[0]


def with_contexts(header: WideHeader, spreads: Spreads, sample: Sample) -> WideHeader:
    """Return the header with the classes that make the sample smallest, or none.

    The spread of a token is either that of all its balanced channels or that of its widest ones;
    the better choice depends on the model.
    """
    groups = [
        np.log2(np.maximum(spread, _TINY)) + _octaves(levels)
        for spread, levels in (
            (spreads.cols, header.col_levels),
            (spreads.relative_rows, header.row_levels),
            (spreads.rows, header.row_levels),
        )
    ]
    widest = max(high - low for low, high in map(_bulk, groups))
    an_octave = max((CLASSES - 1) / max(widest, _TINY), _FEWEST_AN_OCTAVE)
    cols, relative, plain = (_classes(group, min(an_octave, _MOST_AN_OCTAVE)) for group in groups)
    by_channel = replace(header, col_classes=cols)
    by_both = [replace(by_channel, row_classes=rows) for rows in (relative, plain)]
    return min(header, by_channel, *by_both, key=sample.frame_bytes)


def with_slices(header: WideHeader, sample: Sample) -> WideHeader:
    """Return the header with the number of dither slices that makes the sample smallest."""
    options = [replace(header, slices=slices) for slices in range(1, SLICES + 1)]
    return min(options, key=sample.frame_bytes)


def scale_for_rate(header: WideHeader, sample: Sample, budget_bytes: float) -> WideHeader:
    """Return the header with the scale at which the estimated frame takes `budget_bytes`."""
    slope, moved, before = OCTAVE_BITS * sample.count / 8, 0.0, 0.0
    for _ in range(_SEARCHES):
        header = with_low_bits(header, sample)
        size = sample.frame_bytes(header)
        if abs(moved) > _CLOSE_OCTAVES:
            slope = min(max((before - size) / moved, slope / 4), slope * 2)
        moved = min(max((size - budget_bytes) / slope, -MAX_OCTAVES), MAX_OCTAVES)
        header, before = replace(header, scale=header.scale * 2.0**moved), size
        if abs(moved) < _CLOSE_OCTAVES:
            break
    return header


def _root_mean_square(spreads: Floats) -> float:
    # The spreads are scaled first, because squares of the smallest ones underflow.
    largest = max(float(spreads.max()), _TINY)
    return largest * math.sqrt(np.mean((spreads / largest) ** 2))


def _levels(spreads: Floats, scale: float) -> Numbers:
    """Return the level of each spread below the largest; a silent group gets the lowest other one.

    The range of floats below `scale` and the rate's own share of it bound the levels.
    """
    spare = math.log2(max(scale, MIN_SCALE) / MIN_SCALE) - _SPARE_OCTAVES
    deepest = min(max(spare * LEVELS_AN_OCTAVE, 0), MAX_LEVEL)
    largest = max(float(spreads.max()), _TINY)
    lowest = spreads.min(where=spreads > _TINY, initial=largest)
    below = np.log2(largest / np.maximum(spreads, lowest))
    return _numbers(np.rint(below * LEVELS_AN_OCTAVE), deepest)


def _octaves(levels: Numbers) -> Floats | float:
    return levels / LEVELS_AN_OCTAVE if len(levels) else 0.0


def _bulk(octaves: Floats) -> tuple[float, float]:
    """Return the range that holds nearly all groups."""
    ordered = np.sort(octaves)
    aside = len(ordered) // 50
    return float(ordered[aside]), float(ordered[-1 - aside])


def _classes(octaves: Floats, an_octave: float) -> Numbers:
    """Return spread classes; groups below the lowest class belong to it."""
    low, high = _bulk(octaves)
    lowest = max(high - (CLASSES - 1) / an_octave, low)
    return _numbers(np.rint((octaves - lowest) * an_octave), CLASSES - 1)


def _numbers(values: Floats, most: float) -> Numbers:
    return np.clip(values, 0, most).astype(np.uint8)
