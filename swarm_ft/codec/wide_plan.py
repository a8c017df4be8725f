"""The encoder's choices for an entropy-coded frame: scales for a rate, and contexts.

Only encoders come here, so floats may round as they like.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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
from swarm_ft.codec.kernels.base import MAX_CODE, MIN_SCALE, SLICES, UNITS, Kernels
from swarm_ft.codec.kernels.reference import drawn
from swarm_ft.protocol.spec.codec_spec import Axis

Floats = NDArray[np.float64]

SYMBOL_ZERO = 128
FIRST_SYMBOL, LAST_SYMBOL = 1, 255
"""They stand for codes that are sent apart, being too large."""
_SAMPLE_VALUES = 16_384
_SPREAD_VALUES = 256
_TINY_SQUARE = 1e-300
_SEARCHES = 8
_MOST_AN_OCTAVE, _FEWEST_AN_OCTAVE = 2.0, 0.75
"""Classes: finer ones tell apart what differs little, coarser ones reach further."""
_SPARE_OCTAVES = 14.0
_SPREAD_OF_SYMBOLS = 8
MAX_OCTAVES = 3.0
_CLOSE_OCTAVES = 0.01
OCTAVE_BITS = 0.9
"""About what a value costs more when its scale halves; less than 1 at low rates."""
_TINY = 1e-75  # squares of the smallest floats are larger, or zero


@dataclass(frozen=True, slots=True)
class Spreads:
    """Root mean squares of the groups of a tensor.

    Attributes:
        rows, cols: float64 [tokens], [channels].
        relative_rows: of tokens once channels are brought to one spread; see
            `_relative_row_squares`. With `cols` it tells what spread to expect of a value.
    """

    rows: Floats
    cols: Floats
    relative_rows: Floats

    @staticmethod
    def of(x: Tensor, base: Tensor | None, row_squares: Tensor, col_squares: Tensor) -> Spreads:
        """Spreads from the groups' sums of squares, of x or of x - base."""
        relative = _relative_row_squares(x, base)
        roots = [
            np.sqrt(squares.cpu().double().numpy() / max(1, count))
            for squares, count in (
                (row_squares, len(col_squares)),
                (col_squares, len(row_squares)),
                (relative, 1),
            )
        ]
        return Spreads(*roots)


def _relative_row_squares(x: Tensor, base: Tensor | None) -> Tensor:
    """Each token's mean square once channels are brought to one spread, float64 [tokens].

    Otherwise one channel that sticks out would be all that a token's spread tells of. Tokens and
    channels are brought to one spread in turn, twice, so that neither hides the other; over some
    of the channels, which tell as much as all do.
    """
    every = max(1, x.shape[1] // _SPREAD_VALUES)
    some = x[:, ::every] if base is None else x[:, ::every] - base[:, ::every]
    squares = some.double().square_()
    rows = torch.ones_like(squares[:, 0])
    for _ in range(2):
        cols = _inverse(rows) @ squares / len(squares)
        rows = squares @ _inverse(cols) / squares.shape[1]
    return rows


def _inverse(squares: Tensor) -> Tensor:
    return torch.where(squares > _TINY_SQUARE, 1 / squares.clamp(min=_TINY_SQUARE), 0.0)


def balanced(x: Tensor, base: Tensor | None, spreads: Spreads, kernels: Kernels) -> Spreads:
    """The spreads with those of channels once tokens are brought to one spread."""
    rows = torch.from_numpy(np.maximum(spreads.relative_rows, _TINY)).to(x.device)
    scaled = ((x if base is None else x - base) / rows[:, None]).float()
    col_squares = kernels.moments(scaled, None)[1].cpu().numpy()
    return replace(spreads, cols=np.sqrt(col_squares / len(x)))


def levels_for(spreads: Spreads, axis: Axis) -> WideHeader:
    """A header whose scales follow the spreads along the axis; its scale is the largest spread."""
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


def reach_of(header: WideHeader, row_peaks: Tensor, col_peaks: Tensor) -> float:
    """The largest value there is, in scales of level 0 where its own scale is finer."""
    rows, cols = (peaks.cpu().double().numpy() for peaks in (row_peaks, col_peaks))
    by_row = rows * 2.0 ** _octaves(header.row_levels)
    by_col = cols * 2.0 ** _octaves(header.col_levels)
    return float(max(by_row.max(), by_col.max()))


def with_scale(header: WideHeader, scale: float, reach: float) -> WideHeader:
    """The header with that scale, as a bfloat16 within the range that codes and floats allow."""
    deepest = sum(int(n.max()) for n in (header.row_levels, header.col_levels) if len(n))
    lowest = MIN_SCALE * 2.0 ** (deepest / LEVELS_AN_OCTAVE + 1.5)
    bounded = min(max(scale, lowest, reach / MAX_CODE), MAX_SCALE / 2)
    return replace(header, scale=torch.tensor(bounded).to(torch.bfloat16).item())


class Sample:
    """A few tokens of a frame, to try scales and contexts on.

    Args:
        x, base: what is to be coded is x, or x - base.
        header: its levels count, its scale does not.
        dithers: whether codes are dithered. The draw is one of its own: the frame's is not known
            before its scale is.
    """

    def __init__(
        self,
        x: Tensor,
        base: Tensor | None,
        header: WideHeader,
        kernels: Kernels,
        *,
        dithers: bool = False,
    ) -> None:
        tokens, self.count = len(x), x.numel()
        self.every = min(max(1, self.count // _SAMPLE_VALUES), tokens)
        self.share = len(range(0, tokens, self.every)) / tokens
        self._kernels = kernels
        scales = replace(header, scale=1.0).scales()
        rows = scales.rows[:: self.every] if len(scales.rows) > 1 else scales.rows
        table = (rows[:, None] * scales.cols[None, :]).to(x.device)
        change = x[:: self.every] if base is None else x[:: self.every] - base[:: self.every]
        # In float64, as a scale may be far smaller than the largest value.
        self._scaled = change.double() / table
        self._weights = table.double().square()
        self._spread = self._scaled.square().mean().sqrt().item()
        self._dither = (drawn(change, 0).double() * 2 - 15) / UNITS if dithers else None

    def code_spread(self, header: WideHeader) -> float:
        """Root mean square of the codes at the header's scale."""
        return self._spread / header.scale

    def frame_bytes(self, header: WideHeader) -> float:
        """About what the whole frame takes with that header."""
        some = header.row_classes[:: self.every]
        sampled = replace(header, row_classes=some)
        contexts = sampled.classes(*self._scaled.shape).to(self._scaled.device)
        codes = self._scaled / header.scale
        if self._dither is not None:
            codes = (codes - self._dither).mul_(self._dither.sign())
            contexts = self._kernels.slice_contexts(contexts, 0, header.slices)
        codes = codes.round_().clamp_(-MAX_CODE, MAX_CODE)
        symbols, _ = to_symbols(codes.to(torch.int16), header.low_bits)
        counts = self._kernels.histogram(symbols.reshape(-1), contexts, header.num_contexts)
        numbers = counts.cpu().numpy()
        coded = estimated_stream_bytes(numbers, self.share)
        return coded + _apart_bytes(numbers, header.low_bits) / self.share + header.size_bytes

    def shrink(self, header: WideHeader) -> int:
        """How many units nearer to zero the values of a cell are than its middle, on average."""
        exact = self._scaled.abs() / header.scale
        codes = exact.round()
        weights = self._weights * (codes > 0) * (codes < 64)
        total = weights.expand_as(codes).sum().item()
        if not 0 < total < math.inf:
            return 0
        offset = ((codes - exact) * weights).sum().item() / total
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


def with_low_bits(header: WideHeader, sample: Sample) -> WideHeader:
    """The header with as many lower bits sent as they are as makes the sample smallest.

    None at low rates; at high ones the lower bits are noise, and symbol tables that know them cost
    more than they save.
    """
    spread = min(max(sample.code_spread(header), 1.0), float(MAX_CODE))
    most = max(0, math.ceil(math.log2(spread / _SPREAD_OF_SYMBOLS)))
    options = [replace(header, low_bits=low_bits) for low_bits in range(min(most, 8) + 1)]
    return min(options, key=sample.frame_bytes) if most else options[0]


def with_contexts(header: WideHeader, spreads: Spreads, sample: Sample) -> WideHeader:
    """The header with the classes that make the sample smallest, if any do.

    A token's spread is that of all its channels alike, or that of its widest ones; which of them
    tells more depends on the model.
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
    """The header with as many slices of the dither as make the sample smallest."""
    options = [replace(header, slices=slices) for slices in range(1, SLICES + 1)]
    return min(options, key=sample.frame_bytes)


def scale_for_rate(header: WideHeader, sample: Sample, budget_bytes: float) -> WideHeader:
    """The header with the scale at which the sample says that the frame takes `budget_bytes`."""
    for _ in range(_SEARCHES):
        header = with_low_bits(header, sample)
        size = sample.frame_bytes(header)
        octaves = (size - budget_bytes) * 8 / sample.count / OCTAVE_BITS
        scale = header.scale * 2.0 ** min(max(octaves, -MAX_OCTAVES), MAX_OCTAVES)
        header = replace(header, scale=scale)
        if abs(octaves) < _CLOSE_OCTAVES:
            break
    return header


def _root_mean_square(spreads: Floats) -> float:
    # Scaled first: squares of the smallest spreads are no numbers.
    largest = max(float(spreads.max()), _TINY)
    return largest * math.sqrt(np.mean((spreads / largest) ** 2))


def _levels(spreads: Floats, scale: float) -> Numbers:
    """How far below the largest each spread is; a silent group is as low as the lowest other.

    No deeper than what is left of floats' range below `scale` and the rate's own share of it.
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
    """Between which values nearly all groups are."""
    ordered = np.sort(octaves)
    aside = len(ordered) // 50
    return float(ordered[aside]), float(ordered[-1 - aside])


def _classes(octaves: Floats, an_octave: float) -> Numbers:
    """Classes that tell wide groups apart; all that are narrower than the lowest are in it."""
    low, high = _bulk(octaves)
    lowest = max(high - (CLASSES - 1) / an_octave, low)
    return _numbers(np.rint((octaves - lowest) * an_octave), CLASSES - 1)


def _numbers(values: Floats, most: float) -> Numbers:
    return np.clip(values, 0, most).astype(np.uint8)
