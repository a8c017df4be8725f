"""Entropy coding of symbols in contexts (interleaved rANS), and headers of entropy-coded frames.

Layout: number of contexts (one byte), symbol tables, for several segments the number of words of
each (4 bytes), all states (4 bytes each), all words (2 bytes each); little-endian. Nothing follows.
"""

from __future__ import annotations

import itertools
import math
import struct
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swarm_ft.codec.base import (
    CPU,
    bfloat16_pattern,
    bfloat16_value,
    packed_numbers,
    to_device,
    to_host,
    unpacked_numbers,
)
from swarm_ft.codec.kernels.base import (
    MIN_SCALE,
    PROBABILITY_BITS,
    SLICES,
    SYMBOL_ZERO,
    Coded,
    Kernels,
    Scales,
    packed_bytes,
    segment_lengths,
)
from swarm_ft.errors import BadFrame

# ---- symbol frequencies: counts to a few bytes, and these to the coder's integers
#
# A table has 6 bits a symbol: 0 for a symbol that does not occur, else a weight of four steps an
# octave, (4 + v % 4) << v / 4. An error of an eighth of an octave costs under 0.01 bits a symbol.

SYMBOLS = 256
_TOTAL = 1 << PROBABILITY_BITS
WEIGHT_BITS = 6
_STEPS = 4
_TOP = 13 * _STEPS
"""Weight number of the most frequent symbol; 13 octaves below it is less than 1 in 4096."""


@dataclass(frozen=True, slots=True)
class Tables:
    """Symbol weights of some contexts.

    Attributes:
        weights: uint8 [contexts, 256], each below 64; a row of zeros for an unused context.
    """

    weights: NDArray[np.uint8]

    @staticmethod
    def of_counts(counts: NDArray[np.int64]) -> Tables:
        """Return the nearest weights of a histogram [contexts, 256]."""
        largest = counts.max(1, keepdims=True).clip(min=1)
        octaves = np.log2(np.maximum(counts, 1) / largest) * _STEPS + _TOP
        weights = np.rint(octaves).clip(1, _TOP)
        return Tables(np.where(counts > 0, weights, 0).astype(np.uint8))

    def frequencies(self) -> NDArray[np.int32]:
        """Return integers that sum to 4096 in each used context, at least 1 for each symbol.

        Integer arithmetic gives the same result on every machine.
        """
        number = self.weights.astype(np.int64)
        weights = np.where(number > 0, (_STEPS + number % _STEPS) << number // _STEPS, 0)
        present = (number > 0).astype(np.int64)
        spare = _TOTAL - present.sum(1, keepdims=True)
        shares = present + weights * spare // weights.sum(1, keepdims=True).clip(min=1)
        rows = np.arange(len(shares))
        shares[rows, shares.argmax(1)] += _TOTAL - shares.sum(1)
        return np.where(present.any(1, keepdims=True), shares, 0).astype(np.int32)

    def to_bytes(self) -> bytes:
        """Encode the first and last symbol of each context, then the packed weights between."""
        ends, inside = self._ranges(), []
        for weights, (first, last) in zip(self.weights, ends, strict=True):
            inside.append(weights[first : last + 1])
        packed = packed_numbers(np.concatenate(inside), WEIGHT_BITS)
        return bytes(x for pair in ends for x in pair) + packed

    @staticmethod
    def from_bytes(data: bytes, contexts: int) -> tuple[Tables, int]:
        """Decode tables at the start of `data`; return them with their size in bytes.

        Raises:
            BadFrame: The bytes are too few, or a used context has no symbol.
        """
        ends = np.frombuffer(data[: 2 * contexts].ljust(2 * contexts, b"\0"), np.uint8)
        firsts, lasts = ends.reshape(-1, 2).T.astype(int)
        lengths = np.maximum(lasts - firsts + 1, 0)
        size = 2 * contexts + packed_bytes(int(lengths.sum()), WEIGHT_BITS)
        if len(data) < size:
            raise BadFrame(f"frame: expected {size} bytes of symbol tables, got {len(data)}")
        inside = unpacked_numbers(data[2 * contexts : size], int(lengths.sum()), WEIGHT_BITS)
        weights = np.zeros((contexts, SYMBOLS), np.uint8)
        for row, first, part in zip(
            weights, firsts, np.split(inside, lengths.cumsum()[:-1]), strict=True
        ):
            row[first : first + len(part)] = part
        if (weights > _TOP).any() or (~weights.any(1) & (lengths > 0)).any():
            raise BadFrame("frame: an invalid symbol table")
        return Tables(weights), size

    def _ranges(self) -> list[tuple[int, int]]:
        firsts, lasts = first_and_last(self.weights > 0)
        return list(zip(firsts.tolist(), lasts.tolist(), strict=True))


def first_and_last(is_used: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first and last used symbol of each row [contexts, 256]; 1 and 0 for none."""
    some = is_used.any(1)
    last = SYMBOLS - 1 - is_used[:, ::-1].argmax(1)
    return np.where(some, is_used.argmax(1), 1), np.where(some, last, 0)


# ---- the header of an entropy-coded frame: scales and contexts of its groups
#
# A group is a token or a channel. Its level halves its scale every LEVELS_AN_OCTAVE. Its class is
# the spread of its codes, so that groups with equal spread share symbol tables.

Numbers = NDArray[np.uint8]

LEVELS_AN_OCTAVE = 2
MAX_LEVEL = 63
CLASSES = 8
MAX_SCALE = 2.0**112
"""Largest scale; its product with the largest code is finite."""
_HALF_OCTAVE = 181 / 256  # a bfloat16
_MAX_LEVEL_BITS = 6
_MAX_CLASS_BITS = 3
_FACTORS = torch.tensor(
    [(_HALF_OCTAVE if n % 2 else 1.0) / (1 << n // 2) for n in range(MAX_LEVEL + 1)]
)
_FIXED = struct.Struct("<HBBHI")


def _no_numbers() -> Numbers:
    return np.zeros(0, np.uint8)


@dataclass(frozen=True, slots=True)
class WideHeader:
    """Header of an entropy-coded frame.

    Attributes:
        scale: Scale of level 0, exactly a bfloat16; 0 if all values are 0.
        shrink: Shift of reconstruction points to zero, see `WideGrid`.
        low_bits: Number of lower bits of each code that are sent uncoded, 0 to 8.
        escapes: Number of codes that are too large for a symbol.
        row_levels, col_levels: uint8 [tokens], [channels], 0 to 63; empty if all are 0.
        row_classes, col_classes: uint8 [tokens], [channels], 0 to 7; empty if all are 0.
        slices: Number of dither slices in the contexts, see `Kernels.slice_contexts`; 0 for none.
        is_trellis: Whether the codes are trellis-coded, see `Kernels.trellis_symbols`.
    """

    scale: float
    shrink: int
    low_bits: int
    escapes: int
    row_levels: Numbers = field(default_factory=_no_numbers)
    col_levels: Numbers = field(default_factory=_no_numbers)
    row_classes: Numbers = field(default_factory=_no_numbers)
    col_classes: Numbers = field(default_factory=_no_numbers)
    slices: int = 0
    is_trellis: bool = False

    def scales(self) -> Scales:
        """Return the scale of each group; rows or columns without levels share one."""
        rows, cols = _factors(self.row_levels), _factors(self.col_levels)
        return Scales(rows, (cols * self.scale).to(torch.bfloat16).float())

    def classes(self, tokens: int, channels: int, device: torch.device = CPU) -> Tensor:
        """Return the spread class of each value, uint8 [tokens * channels]."""
        rows, cols = self.group_classes(tokens, channels, device)
        return (rows[:, None] + cols[None, :]).reshape(-1)

    def group_classes(
        self, tokens: int, channels: int, device: torch.device = CPU
    ) -> tuple[Tensor, Tensor]:
        """Return `all_classes` on a device."""
        rows, cols = map(torch.from_numpy, self.all_classes(tokens, channels))
        return to_device(rows, device), to_device(cols, device)

    def all_classes(self, tokens: int, channels: int) -> tuple[Numbers, Numbers]:
        """Return the classes of all tokens and of all channels, uint8 [tokens], [channels]."""
        groups = (self.row_classes, tokens), (self.col_classes, channels)
        rows, cols = (n if len(n) else np.zeros(count, np.uint8) for n, count in groups)
        return rows, cols

    @property
    def num_contexts(self) -> int:
        """Number of contexts: one for each sum of classes and slice of the dither."""
        classes = 1 + sum(int(n.max()) for n in (self.row_classes, self.col_classes) if len(n))
        return classes << max(0, self.slices - 1)

    def to_bytes(self) -> bytes:
        """Encode ten fixed bytes, then the groups' numbers, packed in the fewest bits."""
        parts, widths = self._parts(), self._widths()
        four = sum(width << 4 * place for place, width in enumerate(widths))
        low = self.low_bits | self.slices << 4 | self.is_trellis << 7
        fixed = _FIXED.pack(bfloat16_pattern(self.scale), self.shrink, low, four, self.escapes)
        return fixed + b"".join(_pack(n, width) for n, width in zip(parts, widths, strict=True))

    @staticmethod
    def from_bytes(data: bytes, tokens: int, channels: int) -> tuple[WideHeader, int]:
        """Decode a header at the start of `data`; return it with its size in bytes.

        Raises:
            BadFrame: The bytes are too few, or a number is out of its range.
        """
        if len(data) < _FIXED.size:
            raise BadFrame(f"frame: expected {_FIXED.size} bytes of header, got {len(data)}")
        pattern, shrink, low, four, escapes = _FIXED.unpack_from(data)
        low_bits, slices, is_trellis = low & 15, low >> 4 & 7, low > 127
        scale = bfloat16_value(pattern)
        widths = [four >> 4 * place & 15 for place in range(4)]
        if shrink > 15 or low_bits > 8 or slices > SLICES or escapes > tokens * channels:
            raise BadFrame("frame: an invalid header")
        if is_trellis and (not slices or low_bits or not scale):
            raise BadFrame("frame: an invalid header")
        if max(widths[:2]) > _MAX_LEVEL_BITS or max(widths[2:]) > _MAX_CLASS_BITS:
            raise BadFrame(f"frame: levels and classes of {widths} bits")
        lengths = [tokens, channels, tokens, channels]
        sizes = [packed_bytes(n, w) for n, w in zip(lengths, widths, strict=True)]
        ends = list(itertools.accumulate(sizes, initial=_FIXED.size))
        if len(data) < ends[-1]:
            raise BadFrame(f"frame: expected {ends[-1]} bytes of levels and classes")
        found = [
            _unpack(data[start : start + size], length, width)
            for start, size, length, width in zip(ends, sizes, lengths, widths, strict=False)
        ]
        row_levels, col_levels, row_classes, col_classes = found
        groups = row_levels, col_levels, row_classes, col_classes
        numbers = scale, shrink, low_bits, escapes
        header = WideHeader(*numbers, *groups, slices=slices, is_trellis=is_trellis)
        header._check_scales()
        return header, ends[-1]

    @property
    def size_bytes(self) -> int:
        """Size of `to_bytes`."""
        parts = zip(self._parts(), self._widths(), strict=True)
        return _FIXED.size + sum(packed_bytes(len(numbers), width) for numbers, width in parts)

    def _parts(self) -> tuple[Numbers, ...]:
        return self.row_levels, self.col_levels, self.row_classes, self.col_classes

    def _widths(self) -> list[int]:
        return [int(numbers.max(initial=0)).bit_length() for numbers in self._parts()]

    def _check_scales(self) -> None:
        deepest = sum(int(n.max()) for n in (self.row_levels, self.col_levels) if len(n))
        if (
            self.scale != 0
            and not MIN_SCALE * 2.0 ** (deepest / LEVELS_AN_OCTAVE + 1) <= self.scale <= MAX_SCALE
        ):
            raise BadFrame(f"frame: a scale of {self.scale:.4g} at level 0 is out of range")


def max_header_bytes(tokens: int, channels: int) -> int:
    """Return an upper bound of a header's size for this shape."""
    width = _MAX_LEVEL_BITS + _MAX_CLASS_BITS
    return _FIXED.size + sum(width * packed_bytes(count, 1) for count in (tokens, channels))


def _factors(levels: Numbers) -> Tensor:
    """Return the scale of each level relative to level 0: float32 [groups], or [1]."""
    return _FACTORS[_or_zeros(levels).int()]


def _or_zeros(numbers: Numbers) -> Tensor:
    return torch.from_numpy(numbers) if len(numbers) else torch.zeros(1, dtype=torch.uint8)


def _pack(numbers: Numbers, bits: int) -> bytes:
    return packed_numbers(numbers, bits) if bits else b""


def _unpack(data: bytes, count: int, bits: int) -> Numbers:
    return unpacked_numbers(data, count, bits) if bits else _no_numbers()


MAX_CONTEXTS = (2 * CLASSES - 1) << SLICES - 1
_MAX_LANES = 32
_SYMBOLS_A_LANE = 2048
"""Symbols of a lane, which costs two bytes: a thousandth of a stream of 8-bit symbols."""
_LOSS_BITS = 0.004
"""Cost of rounded frequencies over the entropy, in bits a symbol, as measured."""


def write_symbols(
    symbols: Tensor, contexts: Tensor, counts: NDArray[np.int64], kernels: Kernels
) -> bytes:
    """Encode `symbols`, uint8 [n], in `contexts`, uint8 [n], with their tables.

    Args:
        symbols: Symbols to encode.
        contexts: Context of each symbol.
        counts: Histogram, int64 [contexts, 256].
        kernels: Backend of the arithmetic.
    """
    tables = Tables.of_counts(counts)
    stream = write_stream(symbols, contexts, tables.frequencies(), kernels)
    return bytes([len(counts)]) + tables.to_bytes() + stream


def write_stream(
    symbols: Tensor, contexts: Tensor, frequencies: NDArray[np.int32], kernels: Kernels
) -> bytes:
    """Encode `symbols`, uint8 [n], in `contexts`, uint8 [n], with known frequencies."""
    by = to_device(torch.from_numpy(frequencies), symbols.device)
    coded = kernels.encode_symbols(symbols, contexts, by, lanes_for(len(symbols)))
    counts, states, words = to_host(coded.counts, coded.states, coded.words)
    counted = b"" if len(counts) == 1 else counts.astype("<u4").tobytes()
    return b"".join((counted, states.astype("<u4").tobytes(), words.astype("<u2").tobytes()))


def read_symbols(data: bytes, contexts: Tensor, kernels: Kernels, flip: int = 0) -> Tensor:
    """Decode the symbols of `contexts`, uint8 [n], on the contexts' device.

    Args:
        data: Bytes of `write_symbols`.
        contexts: Context of each symbol.
        kernels: Backend of the arithmetic.
        flip: See `Kernels.decode_symbols`.

    Raises:
        BadFrame: The bytes are invalid for these contexts.
    """
    if not data or not 1 <= data[0] <= MAX_CONTEXTS:
        raise BadFrame("frame: expected as many tables as there are contexts")
    tables, size = Tables.from_bytes(data[1:], data[0])
    unused = [k for k, weights in enumerate(tables.weights) if not weights.any()]
    # One transfer for all of them synchronises with a GPU only once.
    looked_at = contexts.max(), *((contexts == k).any() for k in unused if not flip)
    largest, *are_used = torch.stack([x.int() for x in looked_at]).tolist()
    if largest | flip >= len(tables.weights):
        raise BadFrame("frame: expected as many tables as there are contexts")
    if any(are_used):
        raise BadFrame("frame: a context of values has no table")
    frequencies = tables.frequencies()
    if flip:  # The contexts depend on the symbols, so each context needs a table.
        frequencies[unused, SYMBOL_ZERO] = _TOTAL
    return read_stream(data[1 + size :], contexts, frequencies, kernels, flip)


def read_stream(
    data: bytes,
    contexts: Tensor,
    frequencies: NDArray[np.int32],
    kernels: Kernels,
    flip: int = 0,
) -> Tensor:
    """Decode the symbols of `write_stream` with known frequencies; see `read_symbols`.

    Raises:
        BadFrame: The bytes are invalid for these contexts and frequencies.
    """
    coded, device = _read_coded(data, len(contexts)), contexts.device
    parts = coded.states, coded.counts, coded.words
    coded = Coded(*(to_device(part, device) for part in parts))
    by = to_device(torch.from_numpy(frequencies), device)
    symbols, is_intact = kernels.decode_symbols(coded, contexts, by, flip)
    if not is_intact:
        raise BadFrame("frame: its entropy-coded part is damaged")
    return symbols


def stream_bytes(counts: NDArray[np.int64]) -> float:
    """Return the size of `write_symbols` for symbols with these counts, to a few bytes."""
    frequencies = Tables.of_counts(counts).frequencies()
    used = counts > 0
    coded_bits = counts[used] @ (PROBABILITY_BITS - np.log2(frequencies[used]))
    firsts, lasts = first_and_last(used)
    places = int((lasts - firsts + 1).sum())
    return _fixed_bytes(len(used), places, int(counts.sum())) + float(coded_bits) / 8


def estimated_stream_bytes(counts: NDArray[np.int64], share: float) -> float:
    """Estimate the size of `write_symbols` from the entropy, ten times as fast.

    The estimate is within half a percent.

    Args:
        counts: Histogram, int64 [contexts, 256].
        share: Share of all symbols that the histogram counts.
    """
    from swarm_ft.codec.kernels import cpu_plan  # compilers take seconds

    count = int(counts.sum())
    bits, hidden_bits, places, once = cpu_plan.entropy(counts)
    # The share of unseen symbols is estimated by that of symbols seen once (Good 1953).
    places += round(once * math.log(1 / share))
    coded_bits = bits + (1 - share) * hidden_bits + _LOSS_BITS * count
    return _fixed_bytes(len(counts), places, round(count / share)) + coded_bits / share / 8


def _fixed_bytes(contexts: int, places: int, count: int) -> float:
    """Return the bytes of tables with so many places, and of the states."""
    tables = 2 * contexts + packed_bytes(places, WEIGHT_BITS)
    lanes, segments = lanes_for(count), len(segment_lengths(count))
    # Of a state's four bytes about one carries symbols.
    return 1 + tables + segments * (3 * lanes + 4 * (segments > 1))


def max_stream_bytes(count: int) -> int:
    """Return an upper bound of the size of a stream of `count` symbols."""
    segments = len(segment_lengths(count))
    tables = 1 + MAX_CONTEXTS * (2 + 192) + 8
    return tables + segments * (4 + 4 * _MAX_LANES) + 2 * count


def lanes_for(count: int) -> int:
    """Return the number of interleaved states: more are faster, fewer are smaller."""
    return min(_MAX_LANES, 1 << max(0, count // _SYMBOLS_A_LANE).bit_length() >> 1 or 1)


def _read_coded(data: bytes, count: int) -> Coded:
    segments, lanes = len(segment_lengths(count)), lanes_for(count)
    counts_bytes = 4 * segments if segments > 1 else 0
    head = counts_bytes + 4 * segments * lanes
    if len(data) < head or (len(data) - head) % 2:
        raise BadFrame(f"frame: expected {head} bytes of states and whole words, got {len(data)}")
    words = np.frombuffer(data, "<u2", offset=head).astype(np.int32)
    states = np.frombuffer(data, "<u4", segments * lanes, offset=counts_bytes).astype(np.int64)
    counts = np.array([len(words)], np.int64)
    if counts_bytes:
        counts = np.frombuffer(data, "<u4", segments).astype(np.int64)
    if counts.sum() != len(words):
        raise BadFrame(f"frame: expected {counts.sum()} words, got {len(words)}")
    return Coded(
        torch.from_numpy(states).view(segments, lanes),
        torch.from_numpy(counts),
        torch.from_numpy(words),
    )
