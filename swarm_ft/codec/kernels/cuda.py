"""The Triton backend: for GPUs, or for any tensors in Triton's interpreter (TRITON_INTERPRET=1).

Kernels of grids are in `cuda_grid`; this module has reductions and the entropy coder: moments,
errors, histograms, rotations, symbols. Programs sum in a fixed order, so that an encoder's bytes do
not change from run to run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from swarm_ft.codec.kernels.base import MIN_STATE, PROBABILITY_BITS, SEGMENT, Coded
from swarm_ft.codec.kernels.cuda_grid import (
    EXACT,
    device_of,
    load_change,
    lowest_of,
    nearest,
    tile_of,
    tile_place,
    tiles,
)
from swarm_ft.codec.kernels.cuda_trellis import TritonTrellis

# ---- Triton kernels of the rANS coder: a program of one warp for each segment, a thread for a lane
#
# The dependency of a lane's states on each other limits the speed. Everything that does not depend
# on the state is therefore computed before, or loaded a row ahead.

_MIN_STATE = tl.constexpr(MIN_STATE)
_PROBABILITY_BITS = tl.constexpr(PROBABILITY_BITS)
_SLOT_MASK = tl.constexpr((1 << PROBABILITY_BITS) - 1)
_SEGMENT = tl.constexpr(SEGMENT)
_BLOCK = 1024


@triton.jit
def _look_up(
    pairs: tl.tensor,
    symbols: tl.tensor,
    contexts: tl.tensor,
    tables: tl.tuple,
    count: tl.tensor,
    block: tl.constexpr,
) -> None:
    """Look up each symbol's frequency and, in the upper half, its start, in parallel."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    symbol = tl.load(symbols + at, mask=at < count, other=0).to(tl.int32)
    entry = tl.load(contexts + at, mask=at < count, other=0).to(tl.int32) * 256 + symbol
    frequency, start = tl.load(tables[0] + entry), tl.load(tables[1] + entry)
    tl.store(pairs + at, start << 16 | tl.maximum(frequency, 1), mask=at < count)


@triton.jit
def _encode(
    states: tl.tensor,
    counts: tl.tensor,
    scratch: tl.tensor,
    pairs: tl.tensor,
    count: tl.tensor,
    lanes: tl.constexpr,
) -> None:
    """Encode a segment from its end; its words fill its part of the scratch from the end."""
    first = tl.program_id(0).to(tl.int64) * _SEGMENT
    end = tl.minimum(first + _SEGMENT, count)
    at, state = end, tl.full([lanes], _MIN_STATE, tl.uint32)
    lane = tl.arange(0, lanes)
    place = first + tl.cdiv(end - first, lanes) * lanes - lanes + lane
    next_pair = tl.load(pairs + place, mask=place < end, other=1)
    for _ in range(tl.cdiv(end - first, lanes)):
        is_there, pair = place < end, next_pair.to(tl.uint32)
        place -= lanes
        next_pair = tl.load(pairs + place, mask=place >= first, other=1)
        f = pair & 0xFFFF
        emits = is_there & ((state >> (32 - _PROBABILITY_BITS)) >= f)
        ones = emits.to(tl.int32)
        at -= tl.sum(ones, axis=0)
        word = state.to(tl.int16)  # the lower half
        tl.store(scratch + at + tl.cumsum(ones, axis=0) - ones, word, mask=emits)
        state = tl.where(emits, state >> 16, state)
        coded = ((state // f) << _PROBABILITY_BITS) + state % f + (pair >> 16)
        state = tl.where(is_there, coded, state)
    tl.store(states + tl.program_id(0) * lanes + lane, state.to(tl.int64))
    tl.store(counts + tl.program_id(0), end - at)


@triton.jit
def _gather(
    words: tl.tensor,
    scratch: tl.tensor,
    ends: tl.tensor,
    counts: tl.tensor,
    count: tl.tensor,
    block: tl.constexpr,
) -> None:
    """Move a block of a segment's words from the scratch to their place."""
    segment = tl.program_id(0)
    size, end = tl.load(counts + segment), tl.load(ends + segment)
    source = tl.minimum((segment.to(tl.int64) + 1) * _SEGMENT, count) - size
    i = tl.program_id(1) * block + tl.arange(0, block)
    word = tl.load(scratch + source + i, mask=i < size, other=0)
    tl.store(words + end - size + i, word.to(tl.int32) & 0xFFFF, mask=i < size)


@triton.jit(do_not_specialize=["flip"])
def _decode(
    symbols: tl.tensor,
    is_intact: tl.tensor,
    states: tl.tensor,
    counts: tl.tensor,
    ends: tl.tensor,
    words: tl.tensor,
    num_words: tl.tensor,
    contexts: tl.tensor,
    tables: tl.tuple,
    count: tl.tensor,
    flip: tl.tensor,
    lanes: tl.constexpr,
) -> None:
    """Decode a segment. States may be hostile, so they have 64 bits, as in the reference.

    Args:
        symbols: Decoded symbols.
        is_intact: Flag of each segment.
        states: Initial states.
        counts: Words of each segment.
        ends: End of each segment's words.
        words: All words.
        num_words: Number of words.
        contexts: Contexts of all symbols.
        tables: Frequencies and starts [contexts, 256], and the symbols of slots [contexts, 4096].
        count: Number of symbols.
        flip: See `Kernels.decode_symbols`.
        lanes: Number of lanes.
    """
    first = tl.program_id(0).to(tl.int64) * _SEGMENT
    last = tl.minimum(first + _SEGMENT, count)
    end = tl.load(ends + tl.program_id(0))
    at, limit = end - tl.load(counts + tl.program_id(0)), tl.minimum(end, num_words)
    lane = tl.arange(0, lanes)
    state = tl.load(states + tl.program_id(0) * lanes + lane)
    place = first + lane
    next_context = tl.load(contexts + place, mask=place < last, other=0).to(tl.int32)
    flips, next_flips = tl.zeros([lanes], tl.int32), tl.zeros([lanes], tl.int32)
    for _ in range(tl.cdiv(last - first, lanes)):
        is_there, context, here = place < last, next_context ^ flips, symbols + place
        place += lanes
        next_context = tl.load(contexts + place, mask=place < last, other=0).to(tl.int32)
        slot = state & _SLOT_MASK
        symbol = tl.load(tables[2] + (context << _PROBABILITY_BITS) + slot)
        tl.store(here, symbol, mask=is_there)
        flips, next_flips = next_flips ^ ((symbol.to(tl.int32) & 1) * flip), flips
        entry = context * 256 + symbol
        f = tl.load(tables[0] + entry).to(tl.int64)
        decoded = f * (state >> _PROBABILITY_BITS) + slot - tl.load(tables[1] + entry)
        state = tl.where(is_there, decoded, state)
        reads = is_there & (state < _MIN_STATE)
        ones = reads.to(tl.int32)
        source = at + tl.cumsum(ones, axis=0) - ones
        is_word = reads & (source >= 0) & (source < limit)
        word = tl.load(words + source, mask=is_word, other=0).to(tl.int64)
        state = tl.where(reads, (state << 16) | word, state)
        at += tl.sum(ones, axis=0)
    strays = tl.sum((state != _MIN_STATE).to(tl.int32), axis=0)
    tl.store(is_intact + tl.program_id(0), ((at == end) & (strays == 0)).to(tl.int8))


def _tables(frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Return frequencies and starts, int32 [contexts, 256]."""
    starts = frequencies.cumsum(1, dtype=torch.int32) - frequencies
    return frequencies.contiguous(), starts


def _slots(frequencies: Tensor) -> Tensor:
    """Return the symbol of each slot, uint8 [contexts, 4096]."""
    ends = frequencies.cumsum(1, dtype=torch.int32)
    slots = torch.arange(1 << PROBABILITY_BITS, dtype=torch.int32, device=ends.device)
    slots = slots.expand(len(ends), -1).contiguous()
    return torch.searchsorted(ends, slots, right=True).clamp_(max=255).to(torch.uint8)


_MOMENTS_TILE = 4096
_ERRORS_TILE = 2048
_CHUNK = 4096
_CHUNKS = 4
_CONTEXTS_AT_ONCE = 16
"""Number of contexts whose counts fit into a program's registers."""


@triton.jit
def _peaks(bits: tl.tensor, axis: tl.constexpr) -> tl.tensor:
    """Return the largest magnitudes from their bits, which sort like the numbers."""
    return tl.max(bits, axis=axis).to(tl.float32, bitcast=True)


@triton.jit
def _moments(
    x: tl.tensor,
    base: tl.tensor,
    by_token: tl.tuple,
    by_channel: tl.tuple,
    tokens: tl.tensor,
    channels: tl.tensor,
    height: tl.constexpr,
    width: tl.constexpr,
) -> None:
    """Store one tile's sums and peaks, to [tiles across, tokens] and [tiles downward, channels]."""
    t, c = tile_place(height, width)
    change = load_change(x, base, t * channels + c, (t < tokens) & (c < channels))
    sizes = change.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    wide = change.to(tl.float64)
    squares = wide * wide
    row = tl.program_id(0).to(tl.int64) * height + tl.arange(0, height)
    place = tl.program_id(1) * tl.cast(tokens, tl.int64) + row
    tl.store(by_token[0] + place, tl.sum(squares, axis=1), mask=row < tokens)
    tl.store(by_token[1] + place, _peaks(sizes, 1), mask=row < tokens)
    col = tl.program_id(1) * width + tl.arange(0, width)
    place = tl.program_id(0).to(tl.int64) * channels + col
    tl.store(by_channel[0] + place, tl.sum(squares, axis=0), mask=col < channels)
    tl.store(by_channel[1] + place, _peaks(sizes, 0), mask=col < channels)


@triton.jit
def _grid_errors(
    errors: tl.tensor,
    x: tl.tensor,
    base: tl.tensor,
    covering: tl.tensor,
    multiples: tl.tensor,
    num_multiples: tl.tensor,
    tokens: tl.tensor,
    channels: tl.tensor,
    bits: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
) -> None:
    """Store one tile's sums for all multiples, to errors [tiles downward, multiples, channels]."""
    t, c = tile_place(height, width)
    is_there = (t < tokens) & (c < channels)
    change = load_change(x, base, t * channels + c, is_there)
    change = tl.div_rn(change, tl.load(covering + c, mask=c < channels, other=1.0))
    col = tl.program_id(1) * width + tl.arange(0, width)
    for k in range(num_multiples):
        multiple = tl.load(multiples + k)
        size = tl.abs(multiple)
        low = lowest_of(multiple, bits).to(tl.float32) * (1.0 / 32)
        above = tl.minimum(change * (1.0 / size) - low, -2 * low)
        codes = nearest(tl.maximum(above, 0.0)).to(tl.float32)
        error = tl.where(is_there, (codes + low) * size - change, 0.0)
        place = (tl.program_id(0).to(tl.int64) * num_multiples + k) * channels + col
        tl.store(errors + place, tl.sum(error * error, axis=0), mask=col < channels)


@triton.jit
def _histogram(
    counts: tl.tensor,
    codes: tl.tensor,
    contexts: tl.tensor,
    count: tl.tensor,
    num_contexts: tl.tensor,
    bins: tl.constexpr,
    chunk: tl.constexpr,
    chunks: tl.constexpr,
) -> None:
    """Count some chunks for as many contexts as `bins` has room for."""
    first = tl.program_id(1) * bins
    begin = tl.program_id(0).to(tl.int64) * chunk * chunks
    seen = tl.zeros([bins], tl.int32)
    for k in range(chunks):
        at = begin + k * chunk + tl.arange(0, chunk)
        code = tl.load(codes + at, mask=at < count, other=0).to(tl.int32)
        place = tl.load(contexts + at, mask=at < count, other=0).to(tl.int32) * 256 + code - first
        seen += tl.histogram(place, bins, mask=(at < count) & (place >= 0) & (place < bins))
    place = first + tl.arange(0, bins)
    is_some = (seen > 0) & (place < num_contexts * 256)
    tl.atomic_add(counts + place, seen.to(tl.int64), mask=is_some, sem="relaxed")


class TritonKernels(TritonTrellis):
    """Backend for CUDA tensors."""

    def moments(self, x: Tensor, base: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        tokens, channels = x.shape
        tile = tile_of(x.shape, _MOMENTS_TILE)
        grid = downward, across = tiles(x.shape, tile)
        shapes = (across, tokens), (downward, channels)
        sums = [torch.empty(shape, dtype=torch.float64, device=x.device) for shape in shapes]
        peaks = [torch.empty(shape, device=x.device) for shape in shapes]
        by_group = zip(sums, peaks, strict=True)
        base = None if base is None else base.contiguous()
        with device_of(x):
            _moments[grid](x.contiguous(), base, *by_group, tokens, channels, **tile, **EXACT)
        return sums[0].sum(0), sums[1].sum(0), peaks[0].amax(0), peaks[1].amax(0)

    def grid_errors(
        self, x: Tensor, base: Tensor | None, covering: Tensor, multiples: Tensor, bits: int
    ) -> Tensor:
        tile = tile_of(x.shape, _ERRORS_TILE)
        grid = tiles(x.shape, tile)
        errors = torch.empty((grid[0], len(multiples), x.shape[1]), device=x.device)
        x, base = x.contiguous(), None if base is None else base.contiguous()
        table = covering.contiguous(), multiples.contiguous(), len(multiples)
        with device_of(x):
            _grid_errors[grid](errors, x, base, *table, *x.shape, bits, **tile, **EXACT)
        return errors.sum(0)

    def histogram(self, codes: Tensor, contexts: Tensor, num_contexts: int) -> Tensor:
        counts = torch.zeros((num_contexts, 256), dtype=torch.int64, device=codes.device)
        at_once = min(triton.next_power_of_2(num_contexts), _CONTEXTS_AT_ONCE)
        grid = triton.cdiv(len(codes), _CHUNK * _CHUNKS), triton.cdiv(num_contexts, at_once)
        read = codes.contiguous(), contexts.contiguous(), len(codes), num_contexts
        with device_of(codes):
            _histogram[grid](counts, *read, at_once * 256, _CHUNK, _CHUNKS, **EXACT)
        return counts

    def encode_symbols(
        self, symbols: Tensor, contexts: Tensor, frequencies: Tensor, lanes: int
    ) -> Coded:
        count, device = len(symbols), symbols.device
        segments = triton.cdiv(count, SEGMENT)
        states = torch.empty((segments, lanes), dtype=torch.int64, device=device)
        counts = torch.empty(segments, dtype=torch.int64, device=device)
        scratch = torch.empty(count, dtype=torch.int16, device=device)  # a word a symbol at most
        pairs = torch.empty(count, dtype=torch.int32, device=device)
        read = symbols.contiguous(), contexts.contiguous(), _tables(frequencies)
        blocks = triton.cdiv(min(count, SEGMENT), _BLOCK)
        with device_of(symbols):
            _look_up[(triton.cdiv(count, _BLOCK),)](pairs, *read, count, _BLOCK, **EXACT)
            _encode[(segments,)](states, counts, scratch, pairs, count, lanes, num_warps=1, **EXACT)
            ends = counts.cumsum(0)
            words = torch.empty(int(ends[-1]), dtype=torch.int32, device=device)
            _gather[(segments, blocks)](words, scratch, ends, counts, count, _BLOCK, **EXACT)
        return Coded(states, counts, words)

    def decode_symbols(
        self, coded: Coded, contexts: Tensor, frequencies: Tensor, flip: int = 0
    ) -> tuple[Tensor, bool]:
        segments, lanes = coded.states.shape
        symbols = torch.empty(len(contexts), dtype=torch.uint8, device=contexts.device)
        is_intact = torch.empty(segments, dtype=torch.int8, device=contexts.device)
        read = coded.states.contiguous(), coded.counts.contiguous(), coded.counts.cumsum(0)
        words, tables = coded.words.contiguous(), (*_tables(frequencies), _slots(frequencies))
        rest = words, len(words), contexts.contiguous(), tables, len(contexts), flip, lanes
        with device_of(contexts):
            _decode[(segments,)](symbols, is_intact, *read, *rest, num_warps=1, **EXACT)
        return symbols, bool(is_intact.all())
