"""Triton kernels of the rANS coder: a program of one warp for each segment, a thread for a lane.

Knows symbols and frequencies; knows nothing of grids. What bounds it is the chain from a state to
the lane's next, so whatever does not hang on the state is done before, or loaded a row ahead.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from swarm_ft.codec.kernels.base import MIN_STATE, PROBABILITY_BITS, SEGMENT, Coded
from swarm_ft.codec.kernels.cuda_grid import EXACT

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
    """Of each symbol, frequency and, in the upper half, start: what can be done side by side."""
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
    """Code a segment from its end; its words fill its part of the scratch from the end, too."""
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
    """Move a block of a segment's words from its part of the scratch to their place."""
    segment = tl.program_id(0)
    size, end = tl.load(counts + segment), tl.load(ends + segment)
    source = tl.minimum((segment.to(tl.int64) + 1) * _SEGMENT, count) - size
    i = tl.program_id(1) * block + tl.arange(0, block)
    word = tl.load(scratch + source + i, mask=i < size, other=0)
    tl.store(words + end - size + i, word.to(tl.int32) & 0xFFFF, mask=i < size)


@triton.jit
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
    lanes: tl.constexpr,
) -> None:
    """Decode a segment. States are a stranger's, so they have 64 bits, as in the reference.

    Args:
        tables: frequencies and starts [contexts, 256], and the symbols of slots [contexts, 4096].
    """
    first = tl.program_id(0).to(tl.int64) * _SEGMENT
    last = tl.minimum(first + _SEGMENT, count)
    end = tl.load(ends + tl.program_id(0))
    at, limit = end - tl.load(counts + tl.program_id(0)), tl.minimum(end, num_words)
    lane = tl.arange(0, lanes)
    state = tl.load(states + tl.program_id(0) * lanes + lane)
    place = first + lane
    next_context = tl.load(contexts + place, mask=place < last, other=0).to(tl.int32)
    for _ in range(tl.cdiv(last - first, lanes)):
        is_there, context, here = place < last, next_context, symbols + place
        place += lanes
        next_context = tl.load(contexts + place, mask=place < last, other=0).to(tl.int32)
        slot = state & _SLOT_MASK
        symbol = tl.load(tables[2] + (context << _PROBABILITY_BITS) + slot)
        tl.store(here, symbol, mask=is_there)
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


def encode_symbols(symbols: Tensor, contexts: Tensor, frequencies: Tensor, lanes: int) -> Coded:
    """See `Kernels.encode_symbols`; waits for the device once, to know how many words there are."""
    count, device = len(symbols), symbols.device
    segments = triton.cdiv(count, SEGMENT)
    states = torch.empty((segments, lanes), dtype=torch.int64, device=device)
    counts = torch.empty(segments, dtype=torch.int64, device=device)
    scratch = torch.empty(count, dtype=torch.int16, device=device)  # a word a symbol at most
    pairs = torch.empty(count, dtype=torch.int32, device=device)
    read = symbols.contiguous(), contexts.contiguous(), _tables(frequencies)
    _look_up[(triton.cdiv(count, _BLOCK),)](pairs, *read, count, _BLOCK, **EXACT)
    _encode[(segments,)](states, counts, scratch, pairs, count, lanes, num_warps=1, **EXACT)
    ends = counts.cumsum(0)
    words = torch.empty(int(ends[-1]), dtype=torch.int32, device=device)
    blocks = triton.cdiv(min(count, SEGMENT), _BLOCK)
    _gather[(segments, blocks)](words, scratch, ends, counts, count, _BLOCK, **EXACT)
    return Coded(states, counts, words)


def decode_symbols(coded: Coded, contexts: Tensor, frequencies: Tensor) -> tuple[Tensor, bool]:
    """See `Kernels.decode_symbols`; waits for the device once, for the verdict."""
    segments, lanes = coded.states.shape
    symbols = torch.empty(len(contexts), dtype=torch.uint8, device=contexts.device)
    is_intact = torch.empty(segments, dtype=torch.int8, device=contexts.device)
    read = coded.states.contiguous(), coded.counts.contiguous(), coded.counts.cumsum(0)
    words, tables = coded.words.contiguous(), (*_tables(frequencies), _slots(frequencies))
    rest = words, len(words), contexts.contiguous(), tables, len(contexts), lanes
    _decode[(segments,)](symbols, is_intact, *read, *rest, num_warps=1, **EXACT)
    return symbols, bool(is_intact.all())


def _tables(frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Frequencies and starts, int32 [contexts, 256]."""
    starts = frequencies.cumsum(1, dtype=torch.int32) - frequencies
    return frequencies.contiguous(), starts


def _slots(frequencies: Tensor) -> Tensor:
    """The symbol of each slot, uint8 [contexts, 4096]."""
    ends = frequencies.cumsum(1, dtype=torch.int32)
    slots = torch.arange(1 << PROBABILITY_BITS, dtype=torch.int32, device=ends.device)
    slots = slots.expand(len(ends), -1).contiguous()
    return torch.searchsorted(ends, slots, right=True).clamp_(max=255).to(torch.uint8)
