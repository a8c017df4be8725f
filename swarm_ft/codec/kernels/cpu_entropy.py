"""Loops of the entropy coder and of encoders' statistics, for one CPU thread, on arrays."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from swarm_ft.codec.kernels.base import (
    MIN_STATE,
    NARROWEST,
    PROBABILITY_BITS,
    SEGMENT,
    WIDEST,
)
from swarm_ft.codec.kernels.cpu_grid import (
    Floats,
    compiled,
    compiled_fused,
    compiled_loosely,
    part,
    scale_of,
)

# ---- loops of interleaved rANS, for one thread of a CPU
#
# Lanes are independent, so the CPU works on several at once. Indices are unsigned, because Numba
# checks signed ones for negative values, and that takes longer than the arithmetic.

Bytes = NDArray[np.uint8]
Table = NDArray[np.uint32]
Words = NDArray[np.int32]
Buffer = NDArray[np.uint16]
States = NDArray[np.int64]
Frequencies = NDArray[np.int32]

_U32, _U64 = np.uint32, np.uint64
_TOTAL = 1 << PROBABILITY_BITS
_WORD_BITS = 16
_START_SHIFT = PROBABILITY_BITS + 1
_FREQUENCY_SHIFT, _OFFSET_SHIFT = 8, 8 + PROBABILITY_BITS


def symbol_table(frequencies: Frequencies) -> Table:
    """Return the encoder's table, start * 2^13 + frequency, flat [contexts * 256]."""
    starts = frequencies.cumsum(1) - frequencies
    entries: Table = (starts << _START_SHIFT | frequencies.clip(1, _TOTAL)).astype(np.uint32)
    return entries.ravel()


@compiled
def slot_table(frequencies: Frequencies, table: Table) -> None:
    """Fill the decoder's table of 4096 slots for each context.

    An entry is offset * 2^20 + (frequency - 1) * 2^8 + symbol. Writes stay within the table for any
    frequencies; slots without a symbol are not written.
    """
    for k in range(frequencies.shape[0]):
        start = 0
        for symbol in range(frequencies.shape[1]):
            frequency = min(max(frequencies[k, symbol], 0), _TOTAL - start)
            entry = _U32((frequency - 1) << _FREQUENCY_SHIFT | symbol)
            for offset in range(frequency):
                slot = _U64(k * _TOTAL + start + offset)
                table[slot] = _U32(entry | _U32(offset) << _U32(_OFFSET_SHIFT))
            start += frequency


@part
def _encode_segment(
    symbols: Bytes, contexts: Bytes, table: Table, states: Table, buffer: Buffer
) -> int:
    """Write words from the buffer's end down, and return the index of the last one."""
    at, lanes = SEGMENT, states.size
    for i in range(symbols.size - 1, -1, -1):
        lane = _U64(i & (lanes - 1))
        symbol = _U32(contexts[_U64(i)]) << _U32(8) | _U32(symbols[_U64(i)])
        entry = table[_U64(symbol)]
        frequency = _U32(entry & _U32(2 * _TOTAL - 1))
        state = states[lane]
        emits = _U32(state >> _U32(32 - PROBABILITY_BITS)) >= frequency
        buffer[_U64(at - 1)] = state  # overwritten unless `at` moves
        at -= int(emits)
        state = _U32(state >> _U32(_WORD_BITS)) if emits else state
        # quotient * 4096 + remainder + start
        quotient = _U32(state // frequency)
        start = _U32(entry >> _U32(_START_SHIFT))
        states[lane] = _U32(state + start + quotient * _U32(_U32(_TOTAL) - frequency))
    return at


@compiled
def encode(
    symbols: Bytes, contexts: Bytes, table: Table, states: States, counts: States, words: Words
) -> int:
    """Fill states, counts and words, see `Coded`, and return the number of words."""
    buffer, lane_states = np.empty(SEGMENT, np.uint16), np.empty(states.shape[1], np.uint32)
    total = 0
    for s in range(states.shape[0]):
        first = s * SEGMENT
        lane_states[:] = MIN_STATE
        at = _encode_segment(
            symbols[first : first + SEGMENT],
            contexts[first : first + SEGMENT],
            table,
            lane_states,
            buffer,
        )
        states[s] = lane_states
        counts[s] = SEGMENT - at
        words[total : total + SEGMENT - at] = buffer[at:]
        total += SEGMENT - at
    return total


@part
def _decode_row(
    contexts: Bytes,
    table: Table,
    states: States,
    words: Words,
    flips: tuple[Bytes, Bytes, int],
    out: Bytes,
) -> int:
    """Decode one symbol of each lane, and return the number of words read, at most one a symbol.

    Args:
        contexts: Contexts of the row.
        table: Table of `slot_table`.
        states: States of the lanes.
        words: Words from the next unread one on.
        flips: Masks of the contexts of this row, masks of the next row, which the symbols complete,
            and the mask that an odd symbol sets there.
        out: Symbols of the row.
    """
    at, (now, after, flip) = 0, flips
    for i in range(contexts.size):
        lane = _U64(i)
        state = states[lane]
        context = np.int64(contexts[lane] ^ now[lane])
        slot = context << PROBABILITY_BITS | (state & (_TOTAL - 1))
        entry = np.int64(table[_U64(slot)])
        out[lane] = entry & 0xFF
        after[lane] ^= np.uint8(-(entry & 1) & flip)
        frequency = (entry >> _FREQUENCY_SHIFT & (_TOTAL - 1)) + 1
        state = frequency * (state >> PROBABILITY_BITS) + (entry >> _OFFSET_SHIFT)
        reads = state < MIN_STATE
        filled = state << _WORD_BITS | np.int64(words[_U64(at)])
        states[lane] = filled if reads else state
        at += int(reads)
    return at


@part
def _decode_segment(
    contexts: Bytes, table: Table, states: States, words: Words, flip: int, out: Bytes
) -> int:
    """Decode all rows of a segment; words beyond the last are 0."""
    at, lanes = 0, states.size
    last_words = np.empty(lanes, np.int32)
    now, after = np.zeros(lanes, np.uint8), np.zeros(lanes, np.uint8)
    for first in range(0, contexts.size, lanes):
        ahead = words[at : at + lanes]
        if ahead.size < lanes:
            last_words[:] = 0
            last_words[: ahead.size] = ahead
            ahead = last_words
        row = slice(first, first + lanes)
        at += _decode_row(contexts[row], table, states, ahead, (now, after, flip), out[row])
        now, after = after, now
    return at


@compiled
def decode(
    coded: tuple[States, States, Words], contexts: Bytes, table: Table, flip: int, out: Bytes
) -> bool:
    """Fill `out`, consuming the states, and return whether the coded form was intact.

    Args:
        coded: States, counts and words.
        contexts: Contexts of all symbols.
        table: Table of `slot_table`.
        flip: See `Kernels.decode_symbols`.
        out: Symbols.
    """
    (states, counts, words), is_intact, start = coded, True, 0
    for s in range(states.shape[0]):
        segment = slice(s * SEGMENT, (s + 1) * SEGMENT)
        own = words[start : start + max(counts[s], 0)]
        reads = _decode_segment(contexts[segment], table, states[s], own, flip, out[segment])
        start += own.size
        is_intact = is_intact and reads == counts[s] and bool((states[s] == MIN_STATE).all())
    return is_intact


Doubles = NDArray[np.float64]
Sizes = NDArray[np.int32]
"""Bits of magnitudes, which sort like the values, with NaN above infinity."""
Counts = NDArray[np.int64]

_I32 = np.int32
_ZERO, _HALF, _ONE = np.float32(0), np.float32(0.5), np.float32(1)
_ROUNDER = np.float32(3 << 22)
"""Number whose addition and subtraction rounds values below 2^22 to integers in half the time of
`rint`; larger values are clipped."""
_NARROWEST, _WIDEST = np.float32(NARROWEST), np.float32(WIDEST)
_BLOCK = 512
"""Number of channels whose errors on eight grids fit into the first-level cache."""
_TABLES = 4


@part
def _size(x: np.float32) -> np.int32:
    return _I32(np.float32(x).view(np.int32) & _I32(0x7FFFFFFF))


@compiled_loosely
def moments(
    x: Floats,
    base: Floats | None,
    row_squares: Doubles,
    col_squares: Doubles,
    row_sizes: Sizes,
    col_sizes: Sizes,
) -> None:
    """Compute `Kernels.moments` in float64, where no square of a float32 over- or underflows."""
    tokens, channels = x.shape
    col_squares[:] = 0.0
    col_sizes[:] = 0
    for t in range(tokens):
        total, largest = 0.0, _I32(0)
        for c in range(channels):
            change = x[t, c]
            if base is not None:
                change = change - base[t, c]
            square = np.float64(change) * np.float64(change)
            size = _size(change)
            total += square
            col_squares[c] += square
            largest = max(largest, size)
            col_sizes[c] = max(col_sizes[c], size)
        row_squares[t] = total
        row_sizes[t] = largest


@part
def _spread(square: np.float32) -> np.float32:
    """Return the root as a bfloat16, see `Kernels.balance`."""
    spread = np.float32(min(max(np.sqrt(square), _NARROWEST), _WIDEST))
    return scale_of(spread, _ONE) if square != _ZERO else _ONE


@compiled_loosely
def balance(
    x: Floats,
    base: Floats | None,
    inverse: Floats,
    of_rows: tuple[Floats, Sizes],
    col_sizes: Sizes,
    sampled: tuple[int, Floats],
) -> None:
    """Compute `Kernels.balanced_sample`.

    A token stays in the first-level cache until its spread is known; its channels' peaks are
    computed while the next token is loaded.

    Args:
        x: float32 [tokens, channels].
        base: Buffer of x's shape, or None.
        inverse: Factors of channels.
        of_rows: Spreads and peaks of tokens.
        col_sizes: Peaks of channels.
        sampled: Stride and target of the sample.
    """
    (tokens, channels), (spreads, row_sizes), (every, sample) = x.shape, of_rows, sampled
    col_sizes[:] = 0
    changes, factor = np.zeros((2, channels), np.float32), _ONE
    for t in range(tokens):
        now, before = changes[t & 1], changes[~t & 1]
        total, largest = _ZERO, _I32(0)
        for c in range(channels):
            change = x[t, c]
            if base is not None:
                change = change - base[t, c]
            now[c] = change
            scaled = change * inverse[c]
            total += scaled * scaled
            largest = max(largest, _size(change))
            col_sizes[c] = max(col_sizes[c], _size(before[c] * factor))
        row_sizes[t] = largest
        spreads[t] = _spread(total / np.float32(channels))
        factor = _ONE / spreads[t]
        if t % every == 0:
            token = sample[t // every]
            for c in range(channels):
                token[c] = now[c] * factor
    last = changes[~tokens & 1]
    for c in range(channels):
        col_sizes[c] = max(col_sizes[c], _size(last[c] * factor))


@compiled_fused
def grid_errors(
    x: Floats, base: Floats | None, covering: Floats, multiples: Floats, bits: int, errors: Floats
) -> None:
    """Compute `Kernels.grid_errors`; grids are symmetric, so magnitudes suffice."""
    side = np.float32((1 << bits - 1) - 1)
    sizes = np.empty(_BLOCK, np.float32)
    for first in range(0, x.shape[1], _BLOCK):
        here = min(_BLOCK, x.shape[1] - first)
        block = np.zeros((multiples.size, _BLOCK), np.float32)
        inverse = _ONE / covering[first : first + here]
        for t in range(x.shape[0]):
            for c in range(here):
                change = x[t, first + c]
                if base is not None:
                    change = change - base[t, first + c]
                sizes[c] = np.float32(abs(np.float32(change * inverse[c])))
            for k in range(multiples.size):
                size = np.float32(abs(multiples[k]))
                per_size, least = _ONE / size, _ZERO if multiples[k] < _ZERO else size * _HALF
                for c in range(here):
                    beyond = np.float32(sizes[c] - least)  # the first code that is not below zero
                    code = np.float32(np.float32(beyond * per_size + _ROUNDER) - _ROUNDER)
                    code = code if code < side else side
                    error = beyond - code * size
                    block[k, c] += error * error
        errors[:, first : first + here] = block[:, :here]


@compiled
def histogram(codes: Bytes, contexts: Bytes, counts: Counts) -> None:
    """Compute `Kernels.histogram` for contexts in range.

    Several tables alternate, because equal neighbouring symbols would wait for each other's count.
    The contexts of a symbol are adjacent, so the few frequent symbols share cache lines, and lines
    a power of two apart do not evict each other.
    """
    turns = _TABLES if codes.size > counts.size else 1
    last, stride = turns - 1, _U32(counts.shape[0])
    tables = np.zeros((turns, counts.size), np.int32)
    for i in range(codes.size):
        bin_ = _U64(_U32(_U32(_U32(codes[i]) * stride) + _U32(contexts[i])))
        tables[_U64(i & last), bin_] += 1
    # Numba would also compile the error messages of `sum(0)`, a tenth of a first start's time.
    for context in range(counts.shape[0]):
        for symbol in range(counts.shape[1]):
            count = _I32(0)
            for turn in range(turns):
                count += tables[turn, symbol * counts.shape[0] + context]
            counts[context, symbol] = count
