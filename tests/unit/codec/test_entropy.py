"""The entropy stage: symbol tables, streams over contexts, and lossless payloads."""

import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from swarm_ft.codec.base import Codec, Payload, bfloat16_pattern, bfloat16_value, nearest_bfloat16
from swarm_ft.codec.entropy import (
    MAX_CONTEXTS,
    Tables,
    lanes_for,
    max_stream_bytes,
    read_symbols,
    stream_bytes,
    write_symbols,
)
from swarm_ft.codec.kernels import kernels_for
from swarm_ft.codec.kernels.base import segment_lengths
from swarm_ft.codec.spec import Direction, parse_codec_spec
from swarm_ft.codec.tensor import EncodedTensor
from swarm_ft.codec.wide import LosslessCodec
from swarm_ft.errors import BadFrame
from tests.codecs import parse
from tests.draws import draws

Counts = NDArray[np.int64]
KERNELS = kernels_for("cpu")
TOTAL = 4096
property_test = settings(derandomize=True, deadline=None, max_examples=draws(40))


# ---- numbers of a header


@given(x=st.floats(width=32, allow_nan=False, allow_infinity=False))
@property_test
def test_numbers_are_rounded_to_bfloat16_as_torch_does(x: float) -> None:
    expected = torch.tensor(x).bfloat16()
    assert bfloat16_pattern(x) == int(expected.view(torch.int16)) & 0xFFFF
    assert nearest_bfloat16(x) == expected.item()


def test_every_pattern_is_the_number_that_torch_has_for_it() -> None:
    expected = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    found = torch.tensor([bfloat16_value(pattern) for pattern in range(1 << 16)])
    assert torch.equal(found.nan_to_num(7.0), expected.float().nan_to_num(7.0))
    assert torch.equal(found.isnan(), expected.isnan())


# ---- tables


def tables_of(rows: Counts | list[list[int]]) -> Tables:
    return Tables.of_counts(np.array(rows, np.int64))


@st.composite
def counts(draw: st.DrawFn) -> Counts:
    """Counts of any size in any places, with some unused contexts."""
    contexts = draw(st.integers(1, MAX_CONTEXTS))
    rows = np.zeros((contexts, 256), np.int64)
    for row in rows:
        for symbol in draw(st.lists(st.integers(0, 255), max_size=20)):
            row[symbol] = draw(st.integers(1, 10) | st.integers(1, 2**40))
    return rows


@given(rows=counts())
@property_test
def test_frequencies_of_a_used_context_add_up_and_none_is_lost(rows: Counts) -> None:
    frequencies = tables_of(rows).frequencies()
    assert ((frequencies > 0) == (rows > 0)).all()
    assert (frequencies.sum(1) == np.where(rows.any(1), TOTAL, 0)).all()


@given(rows=counts())
@property_test
def test_tables_lead_to_bytes_and_back(rows: Counts) -> None:
    tables = tables_of(rows)
    raw = tables.to_bytes()
    read, size = Tables.from_bytes(raw + b"rest", len(rows))
    assert size == len(raw)
    assert (read.weights == tables.weights).all()
    assert (read.frequencies() == tables.frequencies()).all()


def test_one_symbol_has_all_frequency() -> None:
    row = [0] * 256
    row[77] = 5
    assert tables_of([row]).frequencies()[0, 77] == TOTAL


def test_all_symbols_share_it() -> None:
    assert (tables_of([[9] * 256]).frequencies() == TOTAL // 256).all()


def test_the_rarest_of_256_symbols_still_has_a_frequency() -> None:
    frequencies = tables_of([[1] * 255 + [2**40]]).frequencies()[0]
    assert frequencies.min() == 1
    assert frequencies.sum() == TOTAL


def test_frequencies_are_near_the_shares() -> None:
    rows = np.array([[2**k for k in range(10)] + [0] * 246], np.int64)
    frequencies = tables_of(rows).frequencies()[0, :10]
    shares = rows[0, :10] / rows[0].sum() * TOTAL
    assert (np.abs(np.log2(frequencies / shares)) < 0.5)[3:].all()


@given(raw=st.binary(max_size=300), contexts=st.integers(1, MAX_CONTEXTS))
@property_test
def test_random_bytes_are_tables_that_add_up_or_refused(raw: bytes, contexts: int) -> None:
    try:
        tables, size = Tables.from_bytes(raw, contexts)
    except BadFrame:
        return
    assert size <= len(raw)
    frequencies = tables.frequencies()
    assert (frequencies >= 0).all()
    assert (frequencies.sum(1) == np.where(tables.weights.any(1), TOTAL, 0)).all()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x00",
        b"\x00\x07" + bytes(5),  # eight symbols have six bytes
        b"\x00\x07" + bytes(6),  # a range without a symbol in it
        b"\x00\x00" + bytes(6)[:5],
        b"\x05\x05" + b"\xff" * 6,  # a weight beyond the largest
    ],
)
def test_what_no_encoder_writes_is_refused(raw: bytes) -> None:
    with pytest.raises(BadFrame):
        Tables.from_bytes(raw, 1)


# ---- streams


def stream_of(
    symbols: Tensor, contexts: Tensor, num_contexts: int | None = None
) -> tuple[bytes, Counts]:
    num_contexts = num_contexts or int(contexts.max()) + 1
    found = KERNELS.histogram(symbols, contexts, num_contexts).numpy()
    return write_symbols(symbols, contexts, found, KERNELS), found


def some_symbols(
    count: int, num_contexts: int, seed: int = 0, spread: float = 3.0
) -> tuple[Tensor, Tensor]:
    """Return symbols around 128 whose spread doubles from context to context."""
    generator = torch.Generator().manual_seed(seed)
    contexts = torch.randint(0, num_contexts, (count,), generator=generator).to(torch.uint8)
    widths = spread * 2.0 ** (contexts.float() - 2)
    values = torch.randn(count, generator=generator) * widths + 128
    return values.round().clamp(0, 255).to(torch.uint8), contexts


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 2047, 2048, 4097, 65_535, 65_536, 65_537])
@pytest.mark.parametrize("num_contexts", [1, 3, 16])
def test_streams_lead_back_to_their_symbols(count: int, num_contexts: int) -> None:
    symbols, contexts = some_symbols(count, num_contexts)
    stream, _ = stream_of(symbols, contexts, num_contexts)
    assert torch.equal(read_symbols(stream, contexts, KERNELS), symbols)
    assert len(stream) <= max_stream_bytes(count)


@given(data=st.lists(st.tuples(st.integers(0, 255), st.integers(0, 15)), min_size=1, max_size=200))
@property_test
def test_any_symbols_in_any_contexts_come_back(data: list[tuple[int, int]]) -> None:
    symbols, contexts = (torch.tensor(part, dtype=torch.uint8) for part in zip(*data, strict=True))
    stream, _ = stream_of(symbols, contexts)
    assert torch.equal(read_symbols(stream, contexts, KERNELS), symbols)
    assert len(stream) <= max_stream_bytes(len(symbols))


def test_several_segments_come_back() -> None:
    symbols, contexts = some_symbols(70_000, 4)
    assert segment_lengths(70_000) == [65_536, 4464]
    stream, _ = stream_of(symbols, contexts)
    assert torch.equal(read_symbols(stream, contexts, KERNELS), symbols)


def entropy_bytes(found: Counts) -> float:
    """Return the entropy of symbols with these counts by context, in bytes."""
    totals = found.sum(1, keepdims=True)
    shares = found / np.maximum(totals, 1)
    bits = -np.log2(np.where(found > 0, shares, 1.0))
    return float((found * bits).sum() / 8)


def fixed_bytes(found: Counts) -> int:
    """Return the bytes of a stream around its coded symbols."""
    count = int(found.sum())
    segments = len(segment_lengths(count))
    tables = len(Tables.of_counts(found).to_bytes())
    return 1 + tables + segments * (4 * lanes_for(count) + 4)


SOURCES = {
    "narrow": lambda: some_symbols(100_000, 1, spread=1.0),
    "medium": lambda: some_symbols(100_000, 1, spread=16.0),
    "wide": lambda: some_symbols(100_000, 1, spread=120.0),
    "contexts": lambda: some_symbols(100_000, 8, spread=2.0),
    "uniform": lambda: some_symbols(100_000, 1, spread=1e6),
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_a_stream_costs_the_entropy_and_two_percent(
    source: Callable[[], tuple[Tensor, Tensor]],
) -> None:
    symbols, contexts = source()
    stream, found = stream_of(symbols, contexts)
    assert len(stream) <= 1.02 * entropy_bytes(found) + fixed_bytes(found)
    assert fixed_bytes(found) < 0.02 * 100_000
    assert stream_bytes(found) == pytest.approx(len(stream), rel=0.005, abs=100)


def test_rare_exceptions_cost_little_more_than_they_must() -> None:
    symbols = torch.full((100_000,), 128, dtype=torch.uint8)
    symbols[::200] = 129
    contexts = torch.zeros_like(symbols)
    stream, found = stream_of(symbols, contexts)
    assert len(stream) - fixed_bytes(found) <= 1.05 * entropy_bytes(found) + 16


def test_one_symbol_costs_nothing() -> None:
    symbols = torch.full((60_000,), 128, dtype=torch.uint8)
    contexts = torch.zeros_like(symbols)
    stream, found = stream_of(symbols, contexts)
    assert len(stream) <= fixed_bytes(found)
    assert torch.equal(read_symbols(stream, contexts, KERNELS), symbols)


def test_contexts_that_differ_are_worth_their_tables() -> None:
    symbols, contexts = some_symbols(50_000, 4, spread=1.0)
    apart, _ = stream_of(symbols, contexts)
    together, _ = stream_of(symbols, torch.zeros_like(contexts))
    assert len(apart) < 0.93 * len(together)


def test_more_symbols_have_more_lanes_and_never_too_many() -> None:
    lanes = [lanes_for(count) for count in (1, 2047, 2048, 8192, 65_536, 10**6, 10**9)]
    assert lanes == sorted(lanes)
    assert lanes[0] == 1
    assert max(lanes) == 32
    assert all(n & (n - 1) == 0 for n in lanes)


# ---- hostile streams


def assert_refused_or_symbols(data: bytes, contexts: Tensor) -> bool:
    """Return whether a stream is decoded; only BadFrame may be raised."""
    try:
        symbols = read_symbols(data, contexts, KERNELS)
    except BadFrame:
        return False
    assert symbols.dtype == torch.uint8
    assert symbols.shape == contexts.shape
    return True


@given(raw=st.binary(max_size=400), count=st.integers(1, 200), num_contexts=st.integers(1, 16))
@property_test
def test_random_bytes_are_refused_or_some_symbols(
    raw: bytes, count: int, num_contexts: int
) -> None:
    contexts = (torch.arange(count) % num_contexts).to(torch.uint8)
    assert_refused_or_symbols(raw, contexts)
    assert_refused_or_symbols(bytes([num_contexts]) + raw, contexts)


@given(data=st.data(), count=st.integers(1, 500))
@property_test
def test_streams_with_bits_flipped_are_refused_or_some_symbols(
    data: st.DataObject, count: int
) -> None:
    symbols, contexts = some_symbols(count, 3)
    stream = bytearray(stream_of(symbols, contexts, 3)[0])
    for _ in range(data.draw(st.integers(1, 3))):
        stream[data.draw(st.integers(0, len(stream) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert_refused_or_symbols(bytes(stream), contexts)


def test_a_changed_word_is_noticed() -> None:
    symbols, contexts = some_symbols(3000, 1)
    stream, _ = stream_of(symbols, contexts)
    noticed = 0
    for place in range(len(stream) - 1000, len(stream), 10):
        damaged = bytearray(stream)
        damaged[place] ^= 0x10
        noticed += not assert_refused_or_symbols(bytes(damaged), contexts)
    assert noticed == 100


@pytest.mark.parametrize("count", [100, 70_000])
def test_streams_that_are_cut_or_lengthened_are_refused(count: int) -> None:
    symbols, contexts = some_symbols(count, 2)
    stream, _ = stream_of(symbols, contexts, 2)
    ends = sorted(
        {*range(min(60, len(stream))), len(stream) // 2, len(stream) - 2, len(stream) - 1}
    )
    for data in (*(stream[:end] for end in ends), stream + b"\0", stream + b"\0\0"):
        with pytest.raises(BadFrame):
            read_symbols(data, contexts, KERNELS)


def test_as_many_tables_as_contexts_are_needed() -> None:
    symbols, contexts = some_symbols(300, 2)
    stream, _ = stream_of(symbols, contexts, 2)
    for first in (0, 1, 17, 255):
        with pytest.raises(BadFrame):
            read_symbols(bytes([first]) + stream[1:], contexts, KERNELS)
    with pytest.raises(BadFrame, match="tables"):
        read_symbols(stream, contexts + 1, KERNELS)


def test_a_context_without_a_table_is_refused() -> None:
    symbols, contexts = some_symbols(300, 1)
    stream, _ = stream_of(symbols, contexts, 2)  # the second is unused
    contexts[7] = 1
    with pytest.raises(BadFrame, match="no table"):
        read_symbols(stream, contexts, KERNELS)


@pytest.mark.parametrize("lie", [(0, 0), (2**32 - 1, 1), (2**31, 2**31), (10**9, 0)])
def test_segments_that_lie_about_their_words_are_refused(lie: tuple[int, int]) -> None:
    symbols, contexts = some_symbols(70_000, 1)
    stream, found = stream_of(symbols, contexts)
    start = 1 + len(Tables.of_counts(found).to_bytes())
    honest = struct.unpack_from("<II", stream, start)
    for numbers in (lie, (honest[0] + 1, honest[1] - 1), (honest[1], honest[0])):
        forged = stream[:start] + struct.pack("<II", *numbers) + stream[start + 8 :]
        with pytest.raises(BadFrame):
            read_symbols(forged, contexts, KERNELS)


# ---- the lossless wrapper


@dataclass(frozen=True)
class Recorder(Codec):
    """Codec with a fixed payload that records what it decodes."""

    payload: bytes
    seen: list[bytes]

    def max_payload_bytes(self, tokens: int, channels: int) -> int:
        return len(self.payload)

    def _write(self, x: Tensor, base: Tensor | None) -> Payload:
        return self._unread(self.payload, x)

    def _read(self, encoded: EncodedTensor, base: Tensor | None, device: torch.device) -> Tensor:
        self.seen.append(encoded.payload)
        return torch.zeros(encoded.tokens, encoded.channels)


def recorder(payload: bytes) -> Recorder:
    return Recorder(parse_codec_spec("fp16", Direction.FORWARD), payload, [])


def wrapped(inner: Codec, name: str = "fp16+z") -> LosslessCodec:
    return LosslessCodec(parse_codec_spec(name, Direction.FORWARD), inner)


X = torch.zeros(2, 3)


@given(payload=st.binary(min_size=1, max_size=300), repeats=st.integers(1, 20))
@pytest.mark.parametrize("name", ["none+z", "fp16+z", "bf16+z"])
@property_test
def test_payloads_come_back_byte_for_byte(name: str, payload: bytes, repeats: int) -> None:
    inner = recorder(payload * repeats)
    codec = wrapped(inner, name)
    encoded = codec.encode(X)
    assert encoded.codec == codec.spec
    assert len(encoded.payload) <= codec.max_payload_bytes(2, 3) == 1 + len(inner.payload)
    codec.decode(EncodedTensor.from_bytes(encoded.to_bytes()))
    assert inner.seen == [inner.payload]


def test_what_does_not_shrink_is_sent_as_it_is() -> None:
    inner = recorder(np.random.default_rng(0).bytes(5000))
    encoded = wrapped(inner).encode(X)
    assert encoded.payload == b"\0" + inner.payload


def test_what_repeats_shrinks() -> None:
    inner = recorder(b"\x3c\x00" * 3000)
    codec = wrapped(inner)
    encoded = codec.encode(X)
    assert len(encoded.payload) < 60
    codec.decode(encoded)
    assert inner.seen == [inner.payload]


@pytest.mark.parametrize(("name", "ratio"), [("none", 0.93), ("bf16", 0.75), ("fp16", 0.93)])
def test_exponents_of_real_values_repeat(name: str, ratio: float) -> None:
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(0))
    plain, lossless = parse(name), parse(f"{name}+z")
    encoded = lossless.encode(x)
    assert len(encoded.payload) < ratio * len(plain.encode(x).payload)
    y = lossless.decode(encoded)
    assert torch.equal(y.view(torch.int32), plain.decode(plain.encode(x)).view(torch.int32))


def test_sparse_values_of_top_k_lie_together() -> None:
    x = torch.zeros(256, 64)
    x[:, :8] = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    plain, lossless = parse("top10").encode(x), parse("top10+z").encode(x)
    assert len(lossless.payload) < 0.95 * len(plain.payload)


HEADER = struct.Struct("<BI")


@pytest.mark.parametrize(
    ("stride", "size"), [(5, 4000), (255, 4000), (2, 0), (2, 6001), (2, 2**32 - 1)]
)
def test_a_size_or_stride_out_of_range_is_refused(stride: int, size: int) -> None:
    inner = recorder(b"\x3c\x00" * 3000)
    codec = wrapped(inner)
    encoded = codec.encode(X)
    assert HEADER.unpack_from(encoded.payload) == (2, 6000)
    forged = HEADER.pack(stride, size) + encoded.payload[HEADER.size :]
    with pytest.raises(BadFrame, match="payload"):
        codec.decode(EncodedTensor(codec.spec, 2, 3, forged))
    assert inner.seen == []


def test_every_cut_is_refused() -> None:
    inner = recorder(bytes(range(40)) * 30)
    codec = wrapped(inner)
    payload = codec.encode(X).payload
    assert payload[0] == 2
    for end in range(len(payload)):
        with pytest.raises(BadFrame):
            codec.decode(EncodedTensor(codec.spec, 2, 3, payload[:end]))
    assert inner.seen == []


def test_a_payload_beyond_the_largest_is_not_even_looked_at() -> None:
    inner = recorder(bytes(100))
    codec = wrapped(inner)
    with pytest.raises(BadFrame, match="at most 101 bytes"):
        codec.decode(EncodedTensor(codec.spec, 2, 3, bytes(102)))
