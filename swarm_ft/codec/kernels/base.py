"""The arithmetic that every backend does alike: what a backend is, and what its words mean.

`reference` says in plain torch what each function returns; `cpu` (Numba) and `cuda` (Triton)
return the same from the same input: to the bit where a decoder calls it, and up to float rounding
where only encoders do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

UNITS = 32
"""A scale has so many units; a code's value is a whole number of them, times scale / UNITS."""
MIN_SCALE = 2.0**-120
"""Of narrow grids, but for 0. A unit of it is still a normal float32, so units * scale is exact."""
EXACT_CODE = 2047
"""Wide codes up to this keep every bit. Larger ones are multiples of COARSE, so that units keep
16 bits, which is what makes units * scale exact in float32 for a bfloat16 scale."""
COARSE = 16
MAX_CODE = 32752
"""Of wide codes: the largest multiple of COARSE in an int16."""
SYMBOL_ZERO, LARGEST_SYMBOL = 128, 127
"""The symbol of a code of zero, and the largest code that has one by itself, see `symbols`."""
SLICES = 4
"""One more than the bits that tell how far dither moves a code."""
TRELLIS_ERRORS = 0.34, 0.145
"""What codes along a trellis err by, in scales, is nearly the sum of three that are evenly spread:
up to a quarter to either side, and up to these. Its square is 0.0663 in the mean, its fourth power
2.47 times the square of that, both as measured."""
PROBABILITY_BITS = 12
"""Frequencies of a context's symbols add up to 2^12."""
MIN_STATE = 1 << 16
"""rANS states are 32-bit numbers of at least this; 16-bit words refill them."""
SEGMENT = 1 << 16
"""Symbols that are coded together. Segments are independent: a GPU decodes them side by side."""
NARROWEST, WIDEST = 2.0**-20, 2.0**20
"""Spreads of tokens, over that of the whole, that `balance` tells apart."""
BLOCK = 32
"""Channels of a token that share a scale; a token's last block may have fewer."""
CUT = 20
"""Lower bits of a float32 that a scale does not have."""
ONE = 127 << 3
"""The pattern of 1.0."""
LEAST = 8 << 3
"""Below this pattern a block is as good as zero: its scale has no float32 for an inverse."""


@dataclass(frozen=True, slots=True)
class Scales:
    """The scale of value (t, c) is bfloat16(rows[t] * cols[c]), rounded to nearest even.

    Attributes:
        rows: float32 [tokens] or [1], each exactly a bfloat16.
        cols: float32 [channels] or [1], each exactly a bfloat16.
    """

    rows: Tensor
    cols: Tensor

    def to(self, device: torch.device) -> Scales:
        """The same on that device."""
        return Scales(self.rows.to(device), self.cols.to(device))


@dataclass(frozen=True, slots=True)
class NarrowGrid:
    """2^bits codes from 0, a byte each before they are packed.

    A positive scale has its grid half a scale beside zero: code * 32 - 16 * (2^bits - 1) units. A
    negative one has zero on its grid: code * 32 - 32 * (2^(bits - 1) - 1) units of its magnitude.

    Attributes:
        bits: 1 to 8.
        seed: of the dither, a 32-bit number; None for none.
    """

    bits: int
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class WideGrid:
    """Signed 16-bit codes with zero on the grid: code * 32 - shrink * sign(code) units.

    Codes beyond EXACT_CODE are cut to multiples of COARSE, toward minus infinity, and have neither
    shrink nor dither.

    Attributes:
        shrink: 0 to 15 units by which values lie nearer to zero than the middle of their cell,
            because most of the values that fall into a cell do.
        seed: of the dither, a 32-bit number; None for none. With dither there is no shrink.
        shifts: where the dither is half a scale on, see `Kernels.trellis_symbols`: uint8, 0 or 1,
            of as many values as there are; None for nowhere.
    """

    shrink: int = 0
    seed: int | None = None
    shifts: Tensor | None = None


Grid = NarrowGrid | WideGrid


@dataclass(frozen=True, slots=True)
class Coding:
    """How wide codes become symbols in contexts.

    Attributes:
        row_classes, col_classes: uint8 [tokens], [channels]; a value's class is the sum of both.
        slices: of the dither, see `Kernels.slice_contexts`; 0 without a dither.
        low_bits: of a code that its symbol leaves out.
    """

    row_classes: Tensor
    col_classes: Tensor
    slices: int
    low_bits: int

    def classes(self) -> Tensor:
        """Of every value, uint8 [n]."""
        return (self.row_classes[:, None] + self.col_classes[None, :]).reshape(-1)


@dataclass(frozen=True, slots=True)
class Coded:
    """What a rANS coder wrote.

    Segment s codes the symbols from s * SEGMENT on; symbol i of a segment belongs to lane
    i mod lanes. A lane's state begins, for the encoder, and ends, for the decoder, at MIN_STATE.

    Attributes:
        states: int64 [segments, lanes], what the decoder begins with.
        counts: int64 [segments], words of each segment.
        words: int32 [sum of counts], 16-bit words in the order in which the decoder reads them:
            symbol after symbol of a segment, at most one word each.
    """

    states: Tensor
    counts: Tensor
    words: Tensor


class Kernels(Protocol):
    """A backend. Tensors are on its device, and what it returns is too."""

    def pack(self, codes: Tensor, bits: int) -> Tensor:
        """Codes as bytes, in planes.

        Of each of 4, 2 and 1 that is in `bits`, from a code's upper bits down, there is a plane of
        so many bits of every code; 8 bits are one plane of bytes. A plane of w bits of N codes, N
        rounded up to a multiple of 8 with zeros, has N w / 8 bytes. Byte j holds codes j,
        j + N w / 8, j + 2 N w / 8 and so on, the first in its upper bits.

        Args:
            codes: uint8 [n], each below 2^bits.
            bits: 1 to 8.

        Returns:
            uint8 [packed_bytes(n, bits)].
        """

    def unpack(self, packed: Tensor, count: int, bits: int) -> Tensor:
        """The `count` codes that `pack` was given, uint8 [count]; any bytes are some codes."""

    def quantize(self, x: Tensor, base: Tensor | None, scales: Scales, grid: Grid) -> Tensor:
        """The nearest codes of x, or of x - base; the ends of the grid for what lies beyond.

        A scale of zero gives code 0. An encoder's function: rounding is free.

        Args:
            x: float32 [tokens, channels].
            base: of x's shape, or None.

        Returns:
            uint8 [tokens, channels] for a narrow grid, int16 for a wide one.
        """

    def dequantize(self, codes: Tensor, base: Tensor | None, scales: Scales, grid: Grid) -> Tensor:
        """Units * (scale / 32), plus base where there is one: one rounding, of the sum.

        Dither adds 2 r - 15 units, r the upper 4 bits of `mix(flat index, seed)`, see `reference`;
        where a grid has shifts, r is r ^ 8 there.

        Args:
            codes: uint8 or int16 [tokens, channels].

        Returns:
            float32 [tokens, channels].
        """

    # What dither tells of the codes: which way they lean, and how far. Codes whose dither is the
    # opposite are each other's mirror images, so those of r below 8 are turned round. How far it
    # moves a code tells how likely the code is beside zero: at low rates half of what there is to
    # know.

    def turn(self, codes: Tensor, seed: int, shifts: Tensor | None = None) -> Tensor:
        """Codes of the other sign where r, as in `dequantize`, is below 8.

        Args:
            codes: int16 of any shape; -2^15 stays.
            shifts: as of a `WideGrid`.
        """

    def slice_contexts(self, classes: Tensor, seed: int, slices: int) -> Tensor:
        """Contexts of classes and of how far dither moves, by the upper bits of min(r, 15 - r).

        Args:
            classes: uint8 [n], below 2^(9 - slices).
            slices: 1 to SLICES; a class has 2^(slices - 1) contexts.

        Returns:
            uint8 [n], class * 2^(slices - 1) + slice.
        """

    # Trellis-coded quantisation (Marcellin and Fischer 1990), with dither that is subtracted. Of
    # each value there are two grids, half a scale apart; which of them it has follows from the
    # lowest bits of the symbols before it in its lane, by Ungerboeck's code of four states (1982):
    # shift[t + 1] = shift[t - 1] ^ (symbol[t] & 1), with 0 for shift[0] and shift[-1]. An encoder
    # takes the path that errs least, a fifth less than nearest codes do on one grid.
    #
    # The other grid's dither is half a scale on: its r is r ^ 8, and the slice of its width is as
    # far from the last slice as the first grid's is from slice 0.

    def trellis_symbols(
        self,
        x: Tensor,
        base: Tensor | None,
        scales: Scales,
        seed: int,
        coding: Coding,
        lanes: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Codes of x, or of x - base, along the path that errs least, and what is coded of them.

        Args:
            scales: none of them zero.
            seed: of the dither.
            coding: with slices, and without lower bits.
            lanes: of the coder of the symbols, see `Coded`.

        Returns:
            As `quantize_symbols`; and the shifts of a `WideGrid`, uint8 [n], which are what
            `shifts_of` finds in the symbols.
        """

    def shifts_of(self, symbols: Tensor, lanes: int) -> Tensor:
        """The shifts of values with these symbols, uint8 [n], see `trellis_symbols`.

        Args:
            symbols: uint8 [n].
        """
        rows = lanes_of(symbols & 1, lanes)
        padded = torch.nn.functional.pad(rows, (0, 0, 0, rows.shape[1] % 2))
        # Every other row from the second on hangs on the sum of those that are between.
        pairs = padded.view(len(rows), -1, 2, lanes)
        sums = pairs.cumsum(1, dtype=torch.int32) & 1
        shifts = torch.zeros_like(pairs)
        shifts[:, :, 1] = sums[:, :, 0]
        shifts[:, 1:, 0] = sums[:, :-1, 1]
        of_rows = shifts.view(len(rows), -1, lanes)[:, : rows.shape[1]]
        return of_rows.reshape(-1)[: len(symbols)]

    def quantize_pack(
        self, x: Tensor, base: Tensor | None, scales: Scales, grid: NarrowGrid
    ) -> Tensor:
        """`pack` of what `quantize` returns, uint8 [packed_bytes(tokens * channels, bits)].

        One function so that a GPU can do both in one pass.
        """
        return self.pack(self.quantize(x, base, scales, grid).reshape(-1), grid.bits)

    def unpack_dequantize(
        self,
        packed: Tensor,
        shape: tuple[int, int],
        base: Tensor | None,
        scales: Scales,
        grid: NarrowGrid,
    ) -> Tensor:
        """`dequantize` of what `unpack` returns, float32 of shape [tokens, channels]."""
        codes = self.unpack(packed, shape[0] * shape[1], grid.bits)
        return self.dequantize(codes.view(shape), base, scales, grid)

    def moments(self, x: Tensor, base: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Sums of squares and peaks of x, or of x - base. An encoder's function.

        Returns:
            Sum of squares by token, float64 [tokens], and by channel, float64 [channels]; the
            largest magnitude by token, float32 [tokens], and by channel, float32 [channels];
            not finite where x is not.
        """

    def balance(
        self, x: Tensor, base: Tensor | None, inverse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Spreads of tokens whose channels are brought to one, and what is left to channels.

        An encoder's function, to be done in one pass.

        Args:
            inverse: float32 [channels], finite, by which x, or x - base, is multiplied.

        Returns:
            Root mean squares of the products by token, float32 [tokens]: as bfloat16, between
            NARROWEST and WIDEST, 1 for 0; the largest magnitude by token, float32 [tokens], not
            finite where x is not; the largest magnitude by channel once tokens are divided by
            their spread, float32 [channels].
        """
        change = x if base is None else x - base
        squares = (change * inverse).square().mean(1)
        spreads = squares.sqrt().clamp(NARROWEST, WIDEST).to(torch.bfloat16).float()
        spreads = torch.where(squares == 0, 1.0, spreads)
        by_channel = (change / spreads[:, None]).abs().amax(0)
        return spreads, change.abs().amax(1), by_channel

    def balanced_sample(
        self, x: Tensor, base: Tensor | None, inverse: Tensor, every: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What `balance` returns, and every so many tokens, from the first, over their spread.

        One function so that a CPU does it in one pass.

        Returns:
            And the tokens, of x or of x - base, float32 [tokens / every, rounded up, channels].
        """
        spreads, row_peaks, col_peaks = self.balance(x, base, inverse)
        sample = x[::every] if base is None else x[::every] - base[::every]
        return spreads, row_peaks, col_peaks, sample / spreads[::every, None]

    def grid_errors(
        self, x: Tensor, base: Tensor | None, covering: Tensor, multiples: Tensor, bits: int
    ) -> Tensor:
        """Squared errors by channel of narrow grids, for the choice of scales.

        Args:
            covering: float32 [channels], positive scales.
            multiples: float32 [m]; grid k of channel c has scale covering[c] * multiples[k], zero
                on it where that is negative.

        Returns:
            float32 [m, channels], in squared covering scales.
        """

    def symbols(self, codes: Tensor, low_bits: int) -> Tensor:
        """What is coded of codes: their upper parts, from 128 for zero; 1 and 255 also beyond.

        Args:
            codes: int16 [n].
            low_bits: 0 to 8, the bits of a code that are not in its upper part.

        Returns:
            uint8 [n].
        """
        upper = codes >> low_bits if low_bits else codes
        within = upper.clamp(-LARGEST_SYMBOL, LARGEST_SYMBOL)
        return within.add_(SYMBOL_ZERO).to(torch.uint8)

    def quantize_symbols(
        self, x: Tensor, base: Tensor | None, scales: Scales, grid: WideGrid, coding: Coding
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What `quantize` returns, turned as the dither says, and what is coded of it.

        One function so that it is done in one pass.

        Returns:
            Codes, int16 [n], and their `symbols` and contexts, uint8 [n].
        """
        codes = self.quantize(x, base, scales, grid).reshape(-1)
        contexts = coding.classes()
        if coding.slices and grid.seed is not None:
            codes = self.turn(codes, grid.seed)
            contexts = self.slice_contexts(contexts, grid.seed, coding.slices)
        return codes, self.symbols(codes, coding.low_bits), contexts

    def histogram(self, codes: Tensor, contexts: Tensor, num_contexts: int) -> Tensor:
        """How often each symbol is in each context.

        Args:
            codes: uint8 [n], symbols.
            contexts: uint8 [n], each below num_contexts.

        Returns:
            int64 [num_contexts, 256].
        """

    def encode_symbols(
        self, symbols: Tensor, contexts: Tensor, frequencies: Tensor, lanes: int
    ) -> Coded:
        """Symbols as interleaved rANS (Duda 2013, arXiv 1311.2540; Giesen 2014, 1402.3392).

        Args:
            symbols: uint8 [n].
            contexts: uint8 [n].
            frequencies: int32 [contexts, 256]; each row of a context in use adds up to 4096, and
                each symbol in use has at least 1.
            lanes: a power of two up to 32.
        """

    def decode_symbols(
        self, coded: Coded, contexts: Tensor, frequencies: Tensor, flip: int = 0
    ) -> tuple[Tensor, bool]:
        """The symbols, uint8 [n], of `contexts`, uint8 [n]; and whether the coded form was intact.

        It is intact if each segment reads exactly its words and each lane ends at MIN_STATE.
        Words beyond a segment's end read as 0.

        Args:
            flip: what a context is changed by (exclusive or) where a trellis shifts the value; each
                context so changed has frequencies. 0 where that changes none.
        """

    def hadamard(self, x: Tensor, tile: int) -> Tensor:
        """Each run of `tile` values, tile a power of two, times the Hadamard matrix of +-1.

        Butterflies in the order of strides 1, 2, 4, ...; exact for whole numbers below 2^24.

        Args:
            x: float32 [rows, n tile].
        """

    # ---- stored buffers: a scale for every channel, times one for every block of a token
    #
    # All of it is exact or correctly rounded value by value, and sums are of whole numbers, so
    # that every backend and device returns the same bits: what packs a buffer must do alike at
    # both ends. Here in plain torch, for any device.
    #
    # Scales are floats of 3 bits of mantissa, and known by the upper 11 bits of their pattern: 8 a
    # power of two, in the order of the scales, 0 for 0, so about 8 log2(scale) + 1016.

    def magnitudes(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Patterns of magnitudes, cut to 11 bits: a measure of each channel's logarithm.

        Args:
            x: float32 [tokens, channels], of at most 2^20 tokens.

        Returns:
            Sums of the patterns by channel, int64 [channels]; how many were not zero, int64
            [channels]; the largest magnitude, float32 [1], not finite where x is not.
        """
        sizes = x.abs().contiguous()
        patterns = sizes.view(torch.int32) >> CUT
        return patterns.sum(0), (patterns > 0).sum(0), sizes.amax().view(1)

    def quantize_blocks(self, x: Tensor, channels: Tensor, bits: int) -> tuple[Tensor, Tensor]:
        """Blocks' scales and codes of x with its channels divided by their scales.

        A block's scale is the least that brings its largest magnitude to 2^(bits - 1) - 1/2 or
        less. Codes are whole multiples of it, to nearest even, at most 2^(bits - 1) - 1 to either
        side of zero.

        Args:
            x: float32 [tokens, channels].
            channels: int64 [channels], patterns of channels' scales, none of them zero.
            bits: 4 or 8.

        Returns:
            Patterns of blocks' scales, int32 [tokens, blocks], and codes, uint8 [tokens, channels],
            2^(bits - 1) for zero.
        """
        levels, padding = last_code(bits), -x.shape[1] % BLOCK
        even = torch.nn.functional.pad(x * (1 / scale_of(channels)), (0, padding))
        parts = even.view(len(x), -1, BLOCK)
        covering = parts.abs().amax(2) * per_reach(bits)
        blocks = (covering.view(torch.int32) + ((1 << CUT) - 1)) >> CUT
        blocks = torch.where(blocks < LEAST, 0, blocks)
        inverse = torch.where(blocks == 0, 0.0, 1 / scale_of(blocks))
        codes = (parts * inverse[:, :, None]).round().clamp(-levels, levels) + (levels + 1)
        return blocks, codes.to(torch.uint8).view(len(x), -1)[:, : x.shape[1]]

    def dequantize_blocks(
        self, codes: Tensor, blocks: Tensor, channels: Tensor, bits: int
    ) -> Tensor:
        """Codes times the block's scale times the channel's: one or no rounding.

        Args:
            codes: uint8 [tokens, channels].
            blocks: int32 [tokens, blocks], patterns of scales.
            channels: int64 [channels], patterns of scales.

        Returns:
            float32 [tokens, channels].
        """
        of_value = scale_of(blocks).repeat_interleave(BLOCK, 1)[:, : codes.shape[1]]
        units = codes.to(torch.int32) - (last_code(bits) + 1)
        return units.float() * of_value * scale_of(channels)


def flip_of(slices: int) -> int:
    """What changes a context to that of a dither that is half a scale on."""
    return (1 << slices - 1) - 1


def lanes_of(symbols: Tensor, lanes: int) -> Tensor:
    """What belongs to symbols as [segments, rows, lanes], zeros after the last."""
    segments = len(segment_lengths(len(symbols)))
    length = min(SEGMENT, -(-len(symbols) // lanes) * lanes)
    padded = torch.nn.functional.pad(symbols, (0, segments * length - len(symbols)))
    return padded.view(segments, -1, lanes)


def packed_bytes(count: int, bits: int) -> int:
    """Bytes that `pack` makes of `count` codes."""
    return -(-count // 8) * bits


def segment_lengths(count: int) -> list[int]:
    """Symbols of each segment of `count` symbols."""
    full, rest = divmod(count, SEGMENT)
    return [SEGMENT] * full + [rest] * bool(rest)


def planes_of(bits: int) -> list[tuple[int, int]]:
    """The planes of `bits`-bit codes, upper bits first: (width, shift of its lowest bit)."""
    planes, above = [], bits
    for width in (8, 4, 2, 1):
        if bits & width:
            above -= width
            planes.append((width, above))
    return planes


def last_code(bits: int) -> int:
    """Scales from zero to the last code on either side."""
    return (1 << (bits - 1)) - 1


def per_reach(bits: int) -> float:
    """One over the scales that a block reaches to either side, as a float32."""
    return torch.tensor(1 / (last_code(bits) + 0.5)).item()


def block_count(channels: int) -> int:
    """Blocks of a token."""
    return -(-channels // BLOCK)


def scale_of(patterns: Tensor) -> Tensor:
    """The scales of these patterns, float32."""
    return (patterns.to(torch.int32) << CUT).view(torch.float32)
