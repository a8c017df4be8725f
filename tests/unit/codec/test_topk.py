"""The codec `topK`: chosen entries, cost of positions, and forged positions."""

import struct
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarm_ft.codec.raw import HalfCodec
from swarm_ft.codec.spec import CodecName, CodecSpec, Direction, parse_codec_spec
from swarm_ft.codec.tensor import EncodedTensor
from swarm_ft.codec.topk import TopKCodec, largest, num_sent_entries
from swarm_ft.errors import BadFrame, NonFinite
from tests.draws import draws

property_test = settings(derandomize=True, deadline=None, max_examples=draws(60))
halves = HalfCodec(CodecSpec(CodecName.FP16, 1600))
PERCENTS = ["0.01", "0.5", "1", "3.25", "10", "18", "25", "30", "50", "75", "99.99", "100"]


def codec_of(text: str, direction: Direction = Direction.FORWARD) -> TopKCodec:
    return TopKCodec(parse_codec_spec(text, direction))


def gaussian(tokens: int, channels: int, seed: int = 0) -> Tensor:
    return torch.randn(tokens, channels, generator=torch.Generator().manual_seed(seed))


def expected_positions(x: Tensor, count: int) -> list[int]:
    order = sorted(range(x.numel()), key=lambda i: (-abs(x.view(-1)[i].item()), i))
    return sorted(order[:count])


def bits_of(payload: bytes) -> str:
    return "".join(f"{byte:08b}" for byte in payload)


def positions_bit_by_bit(payload: bytes, count: int, size: int) -> list[int]:
    """Decode positions in either form, by the module's docstring."""
    low_bits = (size // count).bit_length() - 1
    high_length = count + ((size - 1) >> low_bits)
    low_bytes, high_bytes = -(-count * low_bits // 8), -(-high_length // 8)
    if -(-size // 8) <= low_bytes + high_bytes:
        return [i for i, bit in enumerate(bits_of(payload)) if bit == "1"]
    low, marks = bits_of(payload[:low_bytes]), bits_of(payload[low_bytes:])
    highs = [place - i for i, place in enumerate(i for i, bit in enumerate(marks) if bit == "1")]
    lows = [int("0" + low[i * low_bits : (i + 1) * low_bits], 2) for i in range(count)]
    return [high << low_bits | low for high, low in zip(highs, lows, strict=True)]


@st.composite
def samples(draw: st.DrawFn) -> Tensor:
    x = gaussian(draw(st.integers(1, 40)), draw(st.integers(1, 20)), draw(st.integers(0, 1000)))
    kind = draw(st.sampled_from(["gaussian", "zeros", "constant", "outlier", "levels"]))
    if kind == "zeros":
        x.zero_()
    elif kind == "constant":
        x.fill_(-1.0)
    elif kind == "outlier":
        x[-1, -1] = -1000.0
    elif kind == "levels":
        x = x.round()
    return x * draw(st.sampled_from([1e-44, 1e-38, 1e-30, 1.0, 1e30]))


@pytest.mark.parametrize("percent", PERCENTS)
@given(x=samples())
@settings(property_test, max_examples=draws(15))
def test_the_largest_come_back_as_halves_and_all_else_as_zeros(percent: str, x: Tensor) -> None:
    codec = codec_of(f"top{percent}")
    encoded = codec.encode(x)
    assert len(encoded.payload) == codec.max_payload_bytes(*x.shape)
    count = max(1, round(x.numel() * float(percent) / 100 + 1e-9))
    positions = expected_positions(x, count)
    y = torch.zeros(x.numel())
    y[positions] = halves.decode(halves.encode(x.view(-1)[positions].view(1, -1)))[0]
    assert torch.equal(codec.decode(encoded), y.view_as(x))


@pytest.mark.parametrize("percent", PERCENTS)
@given(shape=st.tuples(st.integers(1, 60), st.integers(1, 40)), seed=st.integers(0, 99))
@settings(property_test, max_examples=draws(10))
def test_positions_are_written_as_documented(
    percent: str, shape: tuple[int, int], seed: int
) -> None:
    codec, x = codec_of(f"top{percent}"), gaussian(*shape, seed)
    count = num_sent_entries(codec.spec, x.numel())
    places = codec.encode(x).payload[2 + 2 * count :]
    assert positions_bit_by_bit(places, count, x.numel()) == largest(x, count).tolist()


def test_layout_of_elias_fano() -> None:
    x = torch.zeros(1, 100)
    x[0, [3, 40, 99]] = torch.tensor([1.0, -0.5, 0.25])
    payload = codec_of("top3").encode(x).payload
    values = struct.pack("<heee", -14, 16384.0, -8192.0, 4096.0)
    # n / k = 33.3, so 5 low bits: 00011 01000 00011; high parts 0, 1, 3: bits 0, 2 and 5 of 6.
    assert payload == values + bytes([0b00011010, 0b00000110, 0b10100100])


def test_layout_of_the_bitmap() -> None:
    x = torch.tensor([[0.0, 2.0, -0.5], [0.0, 0.0, 1.0], [0.1, 0.0, 0.0]])
    payload = codec_of("top30").encode(x).payload
    values = struct.pack("<heee", -13, 16384.0, -4096.0, 8192.0)
    assert payload == values + bytes([0b01100100, 0])


def test_of_equal_magnitudes_the_first_are_kept() -> None:
    x = torch.tensor([[1.0, -2.0, 2.0, -2.0, 2.0, 3.0, -1.0, 1.0, 0.0, 0.0]])
    assert largest(x, 3).tolist() == [1, 2, 5]
    y = codec_of("top30").decode(codec_of("top30").encode(x))
    assert y.tolist() == [[0.0, -2.0, 2.0, 0.0, 0.0, 3.0, 0.0, 0.0, 0.0, 0.0]]


def test_how_many_are_kept() -> None:
    spec = codec_of("top2.5").spec
    assert [num_sent_entries(spec, n) for n in (1, 59, 60, 100, 1000)] == [1, 1, 2, 3, 25]
    assert num_sent_entries(codec_of("top100").spec, 7) == 7
    assert num_sent_entries(codec_of("top0.01").spec, 1 << 33) == 858993


@pytest.mark.parametrize(("percent", "most"), [("1", 1.1), ("10", 1.13), ("30", 1.14)])
def test_positions_cost_little_more_than_their_entropy(percent: str, most: float) -> None:
    share = float(percent) / 100
    entropy = -share * np.log2(share) - (1 - share) * np.log2(1 - share)
    size, codec = 1024 * 1600, codec_of(f"top{percent}")
    places = codec.max_payload_bytes(1024, 1600) - 2 - 2 * num_sent_entries(codec.spec, size)
    assert 8 * places <= most * entropy * size


def test_kept_entries_that_round_to_zero_are_fine() -> None:
    x = torch.zeros(10, 10)
    x[0, 0], x[5, 5] = 1e30, -1e-30
    codec = codec_of("top2")
    y = codec.decode(codec.encode(x))
    assert y[0, 0] == pytest.approx(1e30, rel=1e-3)
    assert y[5, 5] == 0


def test_all_percent_are_the_halves_of_everything() -> None:
    x = gaussian(13, 7)
    assert torch.equal(
        codec_of("top100").decode(codec_of("top100").encode(x)), halves.decode(halves.encode(x))
    )


def test_every_flag_of_the_spec_travels() -> None:
    codec = codec_of("top10+ef+z", Direction.BACKWARD)
    encoded = codec.encode(gaussian(4, 5))
    assert encoded.codec == codec.spec
    assert str(encoded.codec) == "top10+ef+z"
    with pytest.raises(BadFrame, match="expected codec top10"):
        codec_of("top10").decode(encoded)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("percent", PERCENTS)
def test_values_that_are_not_finite_are_not_encoded(percent: str, bad: float) -> None:
    x = gaussian(7, 3)
    x[4, 1] = bad
    with pytest.raises(NonFinite, match="finite"):
        codec_of(f"top{percent}").encode(x)


def test_a_base_is_refused() -> None:
    codec, x = codec_of("top10"), gaussian(4, 5)
    with pytest.raises(BadFrame, match="no base"):
        codec.encode(x, x)
    with pytest.raises(BadFrame, match="no base"):
        codec.decode(codec.encode(x), x)


@pytest.mark.parametrize("percent", PERCENTS)
@given(seed=st.integers(0, 99), where=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
@settings(property_test, max_examples=draws(25))
def test_a_changed_byte_is_refused_or_is_another_samples_own_form(
    percent: str, seed: int, where: float, flip: int
) -> None:
    codec, x = codec_of(f"top{percent}"), gaussian(29, 11, seed)
    forged = bytearray(codec.encode(x).payload)
    forged[2 + int(where * (len(forged) - 2))] ^= flip
    try:
        y = codec.decode(EncodedTensor(codec.spec, 29, 11, bytes(forged)))
    except BadFrame:
        return
    assert y.isfinite().all()
    if y.count_nonzero() == num_sent_entries(codec.spec, y.numel()):
        assert codec.encode(y).payload == forged


@given(noise=st.binary(min_size=6, max_size=6))
@settings(property_test, max_examples=draws(200))
def test_any_positions_are_refused_or_read_in_their_one_form(noise: bytes) -> None:
    codec = codec_of("top6")  # three of 50: 4 low bits each, then 6 bits of high parts
    values = struct.pack("<heee", 0, 16384.0, 8192.0, 4096.0)
    payload = values + bytes([noise[0], noise[1] & 0xF0, noise[2] & 0xFC])
    assert len(payload) == codec.max_payload_bytes(5, 10)
    try:
        y = codec.decode(EncodedTensor(codec.spec, 5, 10, payload))
    except BadFrame:
        return
    assert codec.encode(y).payload == payload


HEAD = struct.pack("<heee", 0, 16384.0, 8192.0, 4096.0)


@pytest.mark.parametrize(
    ("percent", "places", "reason"),
    [
        ("3", [0b00011010, 0b00000110, 0b10100100], None),
        ("3", [0b00011010, 0b00000110, 0b10100000], "3 positions, got 2"),
        ("3", [0b00011010, 0b00000110, 0b11110000], "3 positions, got 4"),
        ("3", [0b00011010, 0b00000111, 0b10100100], "zeros after"),
        ("3", [0b00011010, 0b00000110, 0b10100001], "zeros after"),
        ("3", [0b00011000, 0b11000110, 0b11000100], "rising"),
        ("3", [0b00011000, 0b10000110, 0b11000100], "rising"),
        ("3", [0b00011010, 0b00001000, 0b10100100], "below 100"),
    ],
)
def test_forged_elias_fano(percent: str, places: list[int], reason: str | None) -> None:
    codec = codec_of(f"top{percent}")
    encoded = EncodedTensor(codec.spec, 10, 10, HEAD + bytes(places))
    if reason is None:
        assert codec.decode(encoded).nonzero().tolist() == [[0, 3], [4, 0], [9, 9]]
        return
    with pytest.raises(BadFrame, match=reason):
        codec.decode(encoded)


@pytest.mark.parametrize(
    ("places", "reason"),
    [([0b01100000, 0], "got 2"), ([0b01101100, 0], "got 4"), ([0b01100100, 1], "zeros after")],
)
def test_forged_bitmaps(places: list[int], reason: str) -> None:
    codec = codec_of("top30")
    with pytest.raises(BadFrame, match=reason):
        codec.decode(EncodedTensor(codec.spec, 3, 3, HEAD + bytes(places)))


def test_forged_values_are_refused() -> None:
    codec = codec_of("top30")
    for values in (("<heee", 0, 1.0, 0.0, 0.0), ("<heee", 0, np.inf, 0.0, 0.0)):
        payload = struct.pack(*values) + bytes([0b01100100, 0])
        with pytest.raises(BadFrame, match="largest half"):
            codec.decode(EncodedTensor(codec.spec, 3, 3, payload))


@pytest.mark.parametrize("percent", PERCENTS)
def test_headers_that_lie_are_refused(percent: str) -> None:
    codec = codec_of(f"top{percent}")
    good = codec.encode(gaussian(37, 19))
    for lie in (
        replace(good, tokens=37_000),
        replace(good, tokens=1 << 17, channels=1 << 16),
        replace(good, tokens=0),
        replace(good, tokens=-37, channels=-19),
        replace(good, payload=good.payload + b"\0"),
        replace(good, payload=good.payload[:-1]),
        replace(good, payload=b""),
    ):
        with pytest.raises(BadFrame, match=r"expected|takes"):
            codec.decode(lie)


def test_strides_and_autograd_of_the_input_do_not_matter() -> None:
    codec, x = codec_of("top30"), gaussian(6, 4)
    kept = x.clone()
    assert codec.encode(x.T.contiguous().T.requires_grad_()) == codec.encode(x)
    assert torch.equal(x, kept)
