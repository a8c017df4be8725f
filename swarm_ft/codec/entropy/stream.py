"""Symbols in contexts as bytes: the tables, then each segment's states and words.

Layout: the number of contexts (a byte), the tables, for more than one segment each segment's
number of words (4 bytes), then all states (4 bytes each) and all words (2 bytes each),
little-endian. Nothing follows.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swarm_ft.codec.entropy.tables import WEIGHT_BITS, Tables, first_and_last
from swarm_ft.codec.kernels import Coded, Kernels, packed_bytes, segment_lengths
from swarm_ft.codec.kernels.base import PROBABILITY_BITS
from swarm_ft.errors import BadFrame

MAX_CONTEXTS = 16
_MAX_LANES = 32
_SYMBOLS_A_LANE = 2048
"""A lane costs two bytes beyond what it codes: a thousandth of a stream of 8-bit symbols."""
_LOSS_BITS = 0.004
"""A symbol: what rounded frequencies cost over the entropy, as measured."""


def write_symbols(
    symbols: Tensor, contexts: Tensor, counts: NDArray[np.int64], kernels: Kernels
) -> bytes:
    """`symbols`, uint8 [n], in `contexts`, uint8 [n].

    Args:
        counts: int64 [contexts, 256], their histogram.
    """
    tables = Tables.of_counts(counts)
    frequencies = torch.from_numpy(tables.frequencies()).to(symbols.device)
    coded = kernels.encode_symbols(symbols, contexts, frequencies, lanes_for(len(symbols)))
    counted = b"" if len(coded.counts) == 1 else _to_bytes(coded.counts, "<u4")
    body = counted + _to_bytes(coded.states, "<u4") + _to_bytes(coded.words, "<u2")
    return bytes([len(counts)]) + tables.to_bytes() + body


def read_symbols(data: bytes, contexts: Tensor, kernels: Kernels) -> Tensor:
    """The symbols of `contexts` that `data` holds, uint8 [n], on the contexts' device.

    Raises:
        BadFrame: it was not written by `write_symbols` for these contexts.
    """
    if not data or not 1 <= data[0] <= MAX_CONTEXTS or int(contexts.max()) >= data[0]:
        raise BadFrame("frame: expected as many tables as there are contexts")
    tables, size = Tables.from_bytes(data[1:], data[0])
    unused = [k for k in range(data[0]) if not tables.weights[k].any()]
    if any(bool((contexts == k).any()) for k in unused):
        raise BadFrame("frame: a context of values has no table")
    coded = _read_coded(data[1 + size :], len(contexts))
    coded = Coded(*(part.to(contexts.device) for part in (coded.states, coded.counts, coded.words)))
    frequencies = torch.from_numpy(tables.frequencies()).to(contexts.device)
    symbols, is_intact = kernels.decode_symbols(coded, contexts, frequencies)
    if not is_intact:
        raise BadFrame("frame: its entropy-coded part is damaged")
    return symbols


def stream_bytes(counts: NDArray[np.int64]) -> float:
    """What `write_symbols` takes for symbols with these counts, to a few bytes."""
    frequencies = Tables.of_counts(counts).frequencies()
    used = counts > 0
    coded_bits = counts[used] @ (PROBABILITY_BITS - np.log2(frequencies[used]))
    return _fixed_bytes(used, int(counts.sum())) + float(coded_bits) / 8


def estimated_stream_bytes(counts: NDArray[np.int64], share: float) -> float:
    """The same from the entropy alone, in a third of the time, to half a percent.

    Args:
        counts: int64 [contexts, 256].
        share: the counts are of so much of the symbols.
    """
    totals = counts.sum(1)
    count = int(totals.sum())
    coded_bits = _sum_of_logs(totals) - _sum_of_logs(counts) + _LOSS_BITS * count
    return _fixed_bytes(counts > 0, round(count / share)) + coded_bits / share / 8


def _fixed_bytes(is_used: NDArray[np.bool_], count: int) -> float:
    firsts, lasts = first_and_last(is_used)
    tables = 2 * len(is_used) + packed_bytes(int((lasts - firsts + 1).sum()), WEIGHT_BITS)
    lanes, segments = lanes_for(count), len(segment_lengths(count))
    # Of a state's four bytes about one carries symbols.
    return 1 + tables + segments * (3 * lanes + 4 * (segments > 1))


def _sum_of_logs(counts: NDArray[np.int64]) -> float:
    used = counts[counts > 0].astype(np.float64)
    return float((used * np.log2(used)).sum())


def max_stream_bytes(count: int) -> int:
    """No stream of `count` symbols is larger."""
    segments = len(segment_lengths(count))
    tables = 1 + MAX_CONTEXTS * (2 + 192) + 8
    return tables + segments * (4 + 4 * _MAX_LANES) + 2 * count


def lanes_for(count: int) -> int:
    """Interleaved states for that many symbols: more are faster, fewer are smaller."""
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


def _to_bytes(numbers: Tensor, dtype: str) -> bytes:
    return numbers.cpu().numpy().astype(dtype).tobytes()
