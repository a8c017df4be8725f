"""Interface of the backends, and the terms of their arithmetic.

`reference` specifies in plain torch what each function returns. `cpu` (Numba) and `cuda` (Triton)
return the same for the same input: bit-exact where a decoder calls the function, and up to float
rounding where only encoders do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

UNITS = 32
"""Units of a scale; the value of a code is a whole number of units, times scale / UNITS."""
MIN_SCALE = 2.0**-120
"""Smallest non-zero scale of narrow grids. Its unit is a normal float32, so units * scale is exact.
"""
EXACT_CODE = 2047
"""Largest wide code that keeps every bit. Larger ones are multiples of COARSE, so that units have
16 bits and units * scale is exact in float32 for a bfloat16 scale."""
COARSE = 16
MAX_CODE = 32752
"""Largest wide code: the largest multiple of COARSE in an int16."""
SYMBOL_ZERO, LARGEST_SYMBOL = 128, 127
"""Symbol of code zero, and the largest code with a symbol of its own, see `symbols`."""
SLICES = 4
"""Maximum number of dither slices: one more than the bits of the dither's magnitude in a context.
"""
TRELLIS_ERRORS = 0.34, 0.145
"""Model of the error of trellis-coded values, in scales: a sum of three uniform variables, up to a
quarter and up to these numbers to either side. Its mean square is 0.0663, and its mean fourth power
2.47 times the square of that, as measured."""
PROBABILITY_BITS = 12
"""Logarithm of the sum of a context's symbol frequencies, 2^12."""
MIN_STATE = 1 << 16
"""Smallest rANS state; states are 32-bit numbers that 16-bit words refill."""
SEGMENT = 1 << 16
"""Symbols of a segment. Segments are independent, so a GPU decodes them in parallel."""
NARROWEST, WIDEST = 2.0**-20, 2.0**20
"""Range of tokens' spreads, relative to that of the whole, in `balance`."""
BLOCK = 32
"""Channels of a token that share a scale; a token's last block may have fewer."""
CUT = 20
"""Lower bits of a float32 that a scale does not have."""
ONE = 127 << 3
"""Pattern of 1.0."""
LEAST = 8 << 3
"""Smallest pattern of a non-zero block; below it the inverse of the scale is not a float32."""


@dataclass(frozen=True, slots=True)
class Scales:
    """Scales of a tensor: that of value (t, c) is bfloat16(rows[t] * cols[c]), ties to even.

    Attributes:
        rows: float32 [tokens] or [1], each exactly a bfloat16.
        cols: float32 [channels] or [1], each exactly a bfloat16.
    """

    rows: Tensor
    cols: Tensor

    def to(self, device: torch.device) -> Scales:
        """Return the scales on a device."""
        return Scales(self.rows.to(device), self.cols.to(device))


@dataclass(frozen=True, slots=True)
class NarrowGrid:
    """Grid of 2^bits codes from 0, one byte each before packing.

    With a positive scale the grid lies half a scale beside zero: code * 32 - 16 * (2^bits - 1)
    units. With a negative scale zero is on the grid: code * 32 - 32 * (2^(bits - 1) - 1) units of
    its magnitude.

    Attributes:
        bits: Bits of a code, 1 to 8.
        seed: Seed of the dither, a 32-bit number; None for no dither.
    """

    bits: int
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class WideGrid:
    """Grid of signed 16-bit codes with zero on it: code * 32 - shrink * sign(code) units.

    Codes beyond EXACT_CODE are rounded down to multiples of COARSE, and have neither shrink nor
    dither.

    Attributes:
        shrink: Shift of reconstruction points toward zero, 0 to 15 units, because most values of a
            cell lie on its side near zero.
        seed: Seed of the dither, a 32-bit number; None for no dither. With dither there is no
            shrink.
        shifts: Flags of values whose dither is half a scale further, see `Kernels.trellis_symbols`:
            uint8 of all values, 0 or 1; None for none.
    """

    shrink: int = 0
    seed: int | None = None
    shifts: Tensor | None = None


Grid = NarrowGrid | WideGrid


@dataclass(frozen=True, slots=True)
class Coding:
    """Mapping of wide codes to symbols in contexts.

    Attributes:
        row_classes, col_classes: uint8 [tokens], [channels]; the class of a value is their sum.
        slices: Number of dither slices, see `Kernels.slice_contexts`; 0 without dither.
        low_bits: Lower bits of a code that its symbol omits.
    """

    row_classes: Tensor
    col_classes: Tensor
    slices: int
    low_bits: int

    def classes(self) -> Tensor:
        """Return the class of each value, uint8 [n]."""
        return (self.row_classes[:, None] + self.col_classes[None, :]).reshape(-1)


@dataclass(frozen=True, slots=True)
class Coded:
    """Output of the rANS coder.

    Segment s codes the symbols from s * SEGMENT on; symbol i of a segment belongs to lane i mod
    lanes. A lane's state is MIN_STATE before the encoder's first step and after the decoder's last
    one.

    Attributes:
        states: Initial states of the decoder, int64 [segments, lanes].
        counts: Number of words of each segment, int64 [segments].
        words: 16-bit words in the order of decoding, int32 [sum of counts]; at most one a symbol.
    """

    states: Tensor
    counts: Tensor
    words: Tensor


class Kernels(Protocol):
    """Interface of a backend. Arguments and results are on its device."""

    def pack(self, codes: Tensor, bits: int) -> Tensor:
        """Pack codes into bit planes.

        Each of 4, 2 and 1 that is in `bits` has a plane of that many bits of every code, from the
        upper bits down; 8 bits are one plane of bytes. A plane of w bits of N codes, N rounded up
        to a multiple of 8 with zeros, has N w / 8 bytes. Byte j holds codes j, j + N w / 8, j + 2 N
        w / 8 and so on, the first in its upper bits.

        Args:
            codes: uint8 [n], each below 2^bits.
            bits: 1 to 8.

        Returns:
            uint8 [packed_bytes(n, bits)].
        """

    def unpack(self, packed: Tensor, count: int, bits: int) -> Tensor:
        """Unpack `count` codes, uint8 [count]; any bytes are valid."""

    def quantize(self, x: Tensor, base: Tensor | None, scales: Scales, grid: Grid) -> Tensor:
        """Return the nearest codes of x, or of x - base, clipped to the grid.

        A scale of zero gives code 0. Only encoders use this function, so rounding is free.

        Args:
            x: float32 [tokens, channels].
            base: Buffer of x's shape, or None.
            scales: Scales of the values.
            grid: Grid of the codes.

        Returns:
            uint8 [tokens, channels] for a narrow grid, int16 for a wide one.
        """

    def dequantize(self, codes: Tensor, base: Tensor | None, scales: Scales, grid: Grid) -> Tensor:
        """Return units * (scale / 32), plus the base if there is one; only the sum is rounded.

        Dither adds 2 r - 15 units, with r the upper 4 bits of `mix(flat index, seed)`, see
        `reference`; where the grid has shifts, r ^ 8 replaces r.

        Args:
            codes: uint8 or int16 [tokens, channels].
            base: Buffer of the same shape, or None.
            scales: Scales of the values.
            grid: Grid of the codes.

        Returns:
            float32 [tokens, channels].
        """

    # The dither skews the distribution of codes, and the decoder knows it. Codes with opposite
    # dither are mirror images, so codes with r below 8 change their sign. The dither's magnitude
    # is a part of the context; at low rates it carries half of the information.

    def flip_signs(self, codes: Tensor, seed: int, shifts: Tensor | None = None) -> Tensor:
        """Flip the sign of codes whose r, see `dequantize`, is below 8.

        Args:
            codes: int16 of any shape; -2^15 stays.
            seed: Seed of the dither.
            shifts: Shifts of a `WideGrid`.
        """

    def slice_contexts(self, classes: Tensor, seed: int, slices: int) -> Tensor:
        """Return contexts of classes and dither magnitudes, by the upper bits of min(r, 15 - r).

        Args:
            classes: uint8 [n], below 2^(9 - slices).
            seed: Seed of the dither.
            slices: 1 to SLICES; a class has 2^(slices - 1) contexts.

        Returns:
            uint8 [n], class * 2^(slices - 1) + slice.
        """

    # This is trellis-coded quantisation (Marcellin and Fischer 1990) with subtractive dither. Each
    # value has two grids, half a scale apart. The lowest bits of earlier symbols of the lane choose
    # one of them by Ungerboeck's code of four states (1982): shift[t + 1] = shift[t - 1] ^
    # (symbol[t] & 1), with 0 for shift[0] and shift[-1]. The encoder takes the path with the least
    # squared error, a fifth less than that of nearest codes on one grid.
    #
    # The second grid's dither is half a scale further: its r is r ^ 8, and its slice is mirrored.

    def trellis_symbols(
        self,
        x: Tensor,
        base: Tensor | None,
        scales: Scales,
        seed: int,
        coding: Coding,
        lanes: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the trellis path with the least error for x, or x - base, and its symbols.

        Args:
            x: float32 [tokens, channels].
            base: Buffer of x's shape, or None.
            scales: Scales of the values, all non-zero.
            seed: Seed of the dither.
            coding: Mapping to symbols, with slices and without lower bits.
            lanes: Lanes of the symbol coder, see `Coded`.

        Returns:
            The results of `quantize_symbols`; and the shifts of a `WideGrid`, uint8 [n], as
            `shifts_of`
            derives them from the symbols.
        """

    def shifts_of(self, symbols: Tensor, lanes: int) -> Tensor:
        """Return the shifts of values with these symbols, uint8 [n], see `trellis_symbols`.

        Args:
            symbols: uint8 [n].
            lanes: Lanes of the symbol coder.
        """
        rows = lanes_of(symbols & 1, lanes)
        padded = torch.nn.functional.pad(rows, (0, 0, 0, rows.shape[1] % 2))
        # A shift is the parity of every second symbol before it.
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
        """Quantise and pack, uint8 [packed_bytes(tokens * channels, bits)].

        The combination lets a GPU do both in one pass.
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
        """Unpack and dequantise, float32 [tokens, channels]."""
        codes = self.unpack(packed, shape[0] * shape[1], grid.bits)
        return self.dequantize(codes.view(shape), base, scales, grid)

    def moments(self, x: Tensor, base: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return sums of squares and peaks of x, or of x - base; for encoders.

        Returns:
            Sum of squares by token, float64 [tokens], and by channel, float64 [channels]; largest
            magnitude by token, float32 [tokens], and by channel, float32 [channels]; not finite
            where x is
            not.
        """

    def balance(
        self, x: Tensor, base: Tensor | None, inverse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return spreads of tokens with normalised channels, and peaks; for encoders, in one pass.

        Args:
            x: float32 [tokens, channels].
            base: Buffer of x's shape, or None.
            inverse: float32 [channels], finite factors of x, or of x - base.

        Returns:
            Root mean square of the products by token, float32 [tokens], as bfloat16 between
            NARROWEST and
            WIDEST, 1 for 0; largest magnitude by token, float32 [tokens], not finite where x is
            not;
            largest magnitude by channel of tokens divided by their spread, float32 [channels].
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
        """Return the results of `balance`, and every `every`-th token divided by its spread.

        The combination lets a CPU do it in one pass.

        Returns:
            The three results of `balance`, and the sampled tokens of x, or of x - base, float32
            [ceil(tokens / every), channels].
        """
        spreads, row_peaks, col_peaks = self.balance(x, base, inverse)
        sample = x[::every] if base is None else x[::every] - base[::every]
        return spreads, row_peaks, col_peaks, sample / spreads[::every, None]

    def grid_errors(
        self, x: Tensor, base: Tensor | None, covering: Tensor, multiples: Tensor, bits: int
    ) -> Tensor:
        """Return the squared error of candidate narrow grids by channel, for the choice of scales.

        Args:
            x: float32 [tokens, channels].
            base: Buffer of x's shape, or None.
            covering: float32 [channels], positive scales.
            multiples: float32 [m]; grid k of channel c has the scale covering[c] * multiples[k],
                with
                zero on it where that is negative.
            bits: Bits of the grid.

        Returns:
            float32 [m, channels], in squared covering scales.
        """

    def symbols(self, codes: Tensor, low_bits: int) -> Tensor:
        """Return the symbols of codes: their upper parts plus 128; 1 and 255 are escapes.

        Args:
            codes: int16 [n].
            low_bits: Number of lower bits that are not in the upper part, 0 to 8.

        Returns:
            uint8 [n].
        """
        upper = codes >> low_bits if low_bits else codes
        within = upper.clamp(-LARGEST_SYMBOL, LARGEST_SYMBOL)
        return within.add_(SYMBOL_ZERO).to(torch.uint8)

    def quantize_symbols(
        self, x: Tensor, base: Tensor | None, scales: Scales, grid: WideGrid, coding: Coding
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return codes folded by the sign of the dither, with their symbols and contexts.

        The combination lets a backend do it in one pass.

        Returns:
            Codes, int16 [n], and their `symbols` and contexts, uint8 [n].
        """
        codes = self.quantize(x, base, scales, grid).reshape(-1)
        contexts = coding.classes()
        if coding.slices and grid.seed is not None:
            codes = self.flip_signs(codes, grid.seed)
            contexts = self.slice_contexts(contexts, grid.seed, coding.slices)
        return codes, self.symbols(codes, coding.low_bits), contexts

    def histogram(self, codes: Tensor, contexts: Tensor, num_contexts: int) -> Tensor:
        """Count each symbol in each context.

        Args:
            codes: Symbols, uint8 [n].
            contexts: uint8 [n], each below num_contexts.
            num_contexts: Number of contexts.

        Returns:
            int64 [num_contexts, 256].
        """

    def encode_symbols(
        self, symbols: Tensor, contexts: Tensor, frequencies: Tensor, lanes: int
    ) -> Coded:
        """Encode symbols with interleaved rANS (Duda, arXiv 1311.2540; Giesen, arXiv 1402.3392).

        Args:
            symbols: uint8 [n].
            contexts: uint8 [n].
            frequencies: int32 [contexts, 256]; each row of a used context sums to 4096, and each
                used
                symbol has at least 1.
            lanes: A power of two up to 32.
        """

    def decode_symbols(
        self, coded: Coded, contexts: Tensor, frequencies: Tensor, flip: int = 0
    ) -> tuple[Tensor, bool]:
        """Decode the symbols of `contexts`, uint8 [n], and report whether they were intact.

        They are intact if each segment reads exactly its words and each lane ends at MIN_STATE.
        Words beyond a segment's end read as 0.

        Args:
            coded: Coded form.
            contexts: uint8 [n].
            frequencies: As in `encode_symbols`.
            flip: Mask by which a trellis shift changes a context (exclusive or); each changed
                context
                needs frequencies. 0 for no change.
        """

    # ---- stored buffers: a scale for every channel, times one for every block of a token
    #
    # Both ends must pack a buffer to the same bytes. Every value is therefore exact or correctly
    # rounded, and sums are integer, so that all backends and devices agree. This implementation in
    # plain torch works on any device.
    #
    # Scales are floats with 3 bits of mantissa, represented by the upper 11 bits of their pattern:
    # 8 for each power of two, in the order of the scales, about 8 log2(scale) + 1016, and 0 for 0.

    def magnitudes(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sum the patterns of magnitudes, cut to 11 bits: a measure of each channel's logarithm.

        Args:
            x: float32 [tokens, channels], at most 2^20 tokens.

        Returns:
            Sums of the patterns by channel, int64 [channels]; number of non-zero ones, int64
            [channels];
            largest magnitude, float32 [1], not finite where x is not.
        """
        sizes = x.abs().contiguous()
        patterns = sizes.view(torch.int32) >> CUT
        return patterns.sum(0), (patterns > 0).sum(0), sizes.amax().view(1)

    def quantize_blocks(self, x: Tensor, channels: Tensor, bits: int) -> tuple[Tensor, Tensor]:
        """Return blocks' scales, and codes of x with its channels divided by their scales.

        A block's scale is the least that brings its largest magnitude to 2^(bits - 1) - 1/2 or
        less. Codes are whole multiples of it, rounded to nearest even, up to 2^(bits - 1) - 1 to
        either side of zero.

        Args:
            x: float32 [tokens, channels].
            channels: Patterns of channels' scales, int64 [channels], all non-zero.
            bits: 4 or 8.

        Returns:
            Patterns of blocks' scales, int32 [tokens, blocks], and codes, uint8 [tokens, channels],
            with
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
        """Return codes times the block's scale times the channel's, with at most one rounding.

        Args:
            codes: uint8 [tokens, channels].
            blocks: Patterns of blocks' scales, int32 [tokens, blocks].
            channels: Patterns of channels' scales, int64 [channels].
            bits: 4 or 8.

        Returns:
            float32 [tokens, channels].
        """
        of_value = scale_of(blocks).repeat_interleave(BLOCK, 1)[:, : codes.shape[1]]
        units = codes.to(torch.int32) - (last_code(bits) + 1)
        return units.float() * of_value * scale_of(channels)


def flip_of(slices: int) -> int:
    """Return the mask that changes a context to that of a dither half a scale further."""
    return (1 << slices - 1) - 1


def lanes_of(symbols: Tensor, lanes: int) -> Tensor:
    """Return per-symbol numbers as [segments, rows, lanes], padded with zeros."""
    segments = len(segment_lengths(len(symbols)))
    length = min(SEGMENT, -(-len(symbols) // lanes) * lanes)
    padded = torch.nn.functional.pad(symbols, (0, segments * length - len(symbols)))
    return padded.view(segments, -1, lanes)


def packed_bytes(count: int, bits: int) -> int:
    """Return the size of `count` packed codes."""
    return -(-count // 8) * bits


def segment_lengths(count: int) -> list[int]:
    """Return the number of symbols of each segment."""
    full, rest = divmod(count, SEGMENT)
    return [SEGMENT] * full + [rest] * bool(rest)


def planes_of(bits: int) -> list[tuple[int, int]]:
    """Return the planes of `bits`-bit codes, upper bits first: (width, shift of its lowest bit)."""
    planes, above = [], bits
    for width in (8, 4, 2, 1):
        if bits & width:
            above -= width
            planes.append((width, above))
    return planes


def last_code(bits: int) -> int:
    """Return the largest code of a block, in scales."""
    return (1 << (bits - 1)) - 1


def per_reach(bits: int) -> float:
    """Return the inverse of a block's reach in scales, as a float32."""
    return torch.tensor(1 / (last_code(bits) + 0.5)).item()


def block_count(channels: int) -> int:
    """Return the number of blocks of a token."""
    return -(-channels // BLOCK)


def scale_of(patterns: Tensor) -> Tensor:
    """Return the scales of patterns, float32."""
    return (patterns.to(torch.int32) << CUT).view(torch.float32)
