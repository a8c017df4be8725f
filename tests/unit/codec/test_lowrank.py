"""The codec `lowrankR`: error, exact decoding, and forged payloads."""

import struct
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarm_ft.codec.base import Codec
from swarm_ft.codec.lowrank import LowRankCodec
from swarm_ft.errors import BadFrame, NonFinite
from swarm_ft.protocol.messages.boundary import EncodedTensor
from swarm_ft.protocol.spec.codec_spec import Direction, parse_codec_spec
from tests.draws import draws

MAX_FLOAT = torch.finfo(torch.float32).max
property_test = settings(derandomize=True, deadline=None, max_examples=draws(30))


def codec_of(rank: int, suffix: str = "") -> LowRankCodec:
    return LowRankCodec(parse_codec_spec(f"lowrank{rank}{suffix}", Direction.BACKWARD))


def gaussian(tokens: int, channels: int, seed: int = 0) -> Tensor:
    return torch.randn(tokens, channels, generator=torch.Generator().manual_seed(seed))


def of_rank(rank: int, tokens: int, channels: int, seed: int = 0) -> Tensor:
    return gaussian(tokens, rank, seed) @ gaussian(rank, channels, seed + 1)


def decaying(tokens: int, channels: int, ratio: float, seed: int = 0) -> Tensor:
    """Return a matrix with singular values 1, ratio, ratio^2, ..."""
    count = min(tokens, channels)
    left = torch.linalg.qr(gaussian(tokens, count, seed)).Q
    right = torch.linalg.qr(gaussian(channels, count, seed + 1)).Q
    product: Tensor = left * ratio ** torch.arange(count) @ right.T
    return product


def there_and_back(codec: Codec, x: Tensor) -> Tensor:
    encoded = codec.encode(x)
    assert len(encoded.payload) == codec.max_payload_bytes(*x.shape)
    return codec.decode(encoded)


def relative(y: Tensor, x: Tensor) -> float:
    return float((y - x).norm() / x.norm())


def bfloat16(pattern: int) -> float:
    return float(struct.unpack("<f", b"\0\0" + struct.pack("<H", pattern))[0])


@st.composite
def samples(draw: st.DrawFn) -> Tensor:
    x = gaussian(draw(st.integers(1, 40)), draw(st.integers(1, 90)), draw(st.integers(0, 1000)))
    kind = draw(st.sampled_from(["gaussian", "zeros", "constant", "outlier", "mixed", "one row"]))
    if kind == "zeros":
        x.zero_()
    elif kind == "constant":
        x.fill_(-1.0)
    elif kind == "outlier":
        x[0, 0] = 1000.0
    elif kind == "mixed":
        x *= 10.0 ** -(torch.arange(x.shape[1]) % 12)
    elif kind == "one row":
        x[1:] = 0
    return x * draw(st.sampled_from([1e-44, 1e-38, 1e-30, 1e-8, 1.0, 1e30, 1e35]))


@pytest.mark.parametrize("rank", [1, 3, 8, 32, 256])
@given(x=samples())
@property_test
def test_finite_in_is_finite_out_and_nearer_than_nothing(rank: int, x: Tensor) -> None:
    y = there_and_back(codec_of(rank), x)
    assert (y.shape, y.dtype) == (x.shape, torch.float32)
    assert y.isfinite().all()
    peak = x.abs().max().item()
    if 1e-30 <= peak < 2.0**110:
        assert (y / peak - x / peak).norm() <= 1.01 * (x / peak).norm()
    if peak == 0:
        assert not y.any()


@pytest.mark.parametrize("magnitude", [1e-30, 1e-8, 1.0, 1e5, 1e30])
@pytest.mark.parametrize("shape", [(1, 1), (1, 40), (40, 1), (5, 7), (3, 8), (64, 130)])
def test_a_sample_of_no_more_than_the_rank_comes_back_at_eight_bits(
    shape: tuple[int, int], magnitude: float
) -> None:
    x = of_rank(min(2, *shape), *shape) * magnitude
    y = there_and_back(codec_of(8), x)
    assert (y / magnitude - x / magnitude).abs().max() < 0.02 * x.abs().max() / magnitude


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("ratio", "rank"), [(0.7, 4), (0.85, 8), (0.95, 16), (0.99, 32)])
def test_it_comes_within_three_percent_of_the_best_there_is(
    ratio: float, rank: int, seed: int
) -> None:
    x = decaying(120, 100, ratio, seed)
    channels = x.square().sum(0).topk(1).indices
    others = x.clone()
    others[:, channels] = 0
    best = torch.linalg.svdvals(others)[rank:].norm() / x.norm()
    assert relative(there_and_back(codec_of(rank), x), x) < 1.03 * best


def test_more_ranks_come_nearer() -> None:
    x = decaying(100, 80, 0.9)
    errors = [relative(there_and_back(codec_of(rank), x), x) for rank in (1, 2, 4, 8, 16, 32)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0] / 10


def test_the_strongest_channels_come_back_at_eight_bits_and_leave_the_others_alone() -> None:
    x = of_rank(2, 50, 130) + 0.01 * gaussian(50, 130, seed=9)
    strong = x.clone()
    strong[:, [17, 101]] = 1e4 * gaussian(50, 2, seed=5)
    y = there_and_back(codec_of(2), strong)
    assert (y - strong).abs().max(0).values[[17, 101]].max() < 0.51 * strong.abs().max() / 127
    others = [channel for channel in range(130) if channel not in (17, 101)]
    assert relative(y[:, others], x[:, others]) < 0.02


@pytest.mark.parametrize("power", [-90, -30, -1, 1, 30, 90])
def test_powers_of_two_go_straight_through(power: int) -> None:
    codec, x = codec_of(4), gaussian(20, 30)
    assert torch.equal(there_and_back(codec, x * 2.0**power), there_and_back(codec, x) * 2.0**power)


def test_zeros_stay_zeros() -> None:
    x = torch.zeros(9, 20)
    assert torch.equal(there_and_back(codec_of(4), x), x)


@pytest.mark.parametrize("peak", [2.0**125, MAX_FLOAT])
@pytest.mark.parametrize("rank", [1, 8, 256])
def test_even_the_largest_values_come_back_finite(rank: int, peak: float) -> None:
    for x in (torch.full((40, 30), peak), gaussian(40, 30).sign() * peak):
        assert there_and_back(codec_of(rank), x).isfinite().all()


def test_size_follows_from_shape_and_rank() -> None:
    # Outliers: 3 channels of 128 tokens; the rest: 8 products of 128 + 189 codes.
    assert codec_of(8).max_payload_bytes(128, 192) == 3 * (2 + 2 + 128) + 8 * (2 + 128 + 189)
    assert codec_of(8).max_payload_bytes(1, 1) == 2 + 1 + 1
    assert codec_of(8).max_payload_bytes(5, 7) == 5 * (2 + 5 + 7)
    assert codec_of(8).max_payload_bytes(5, 8) == (2 + 2 + 5) + 5 * (2 + 5 + 7)


def payload_of(
    channels: Sequence[int], outlier_scales: list[float], scales: list[float], *codes: list[int]
) -> bytes:
    scales = [
        struct.unpack("<HH", struct.pack("<f", scale))[1] for scale in outlier_scales + scales
    ]
    return struct.pack(f"<{len(channels)}H", *channels) + struct.pack(
        f"<{len(scales)}H{sum(map(len, codes))}b",
        *scales,
        *(code for part in codes for code in part),
    )


def test_layout() -> None:
    codec, left, right = codec_of(2), [[1, 2, 3], [0, -1, 127]], [*range(1, 8)]
    payload = payload_of([4], [0.5], [1.0, 0.25], [-127, 0, 127], left[0], left[1], right, [8] * 7)
    y = codec.decode(EncodedTensor(codec.spec, 3, 8, payload))
    for token in range(3):
        expected = [left[0][token] * right[c] + left[1][token] * 8 * 0.25 for c in range(7)]
        expected.insert(4, [-63.5, 0.0, 63.5][token])
        assert y[token].tolist() == expected


@given(seed=st.integers(0, 1 << 30), spread=st.sampled_from([0, 4, 30]))
@property_test
def test_decode_is_exact_products_added_in_order(seed: int, spread: int) -> None:
    random, codec = np.random.default_rng(seed), codec_of(5)
    scales = (
        random.integers(128, 256, 5) * 2.0 ** random.integers(-spread, spread + 1, 5)
    ).tolist()
    left, right = random.integers(-127, 128, (5, 5)), random.integers(-127, 128, (5, 6))
    payload = payload_of([], [], scales, left.reshape(-1).tolist(), right.reshape(-1).tolist())
    y = codec.decode(EncodedTensor(codec.spec, 5, 6, payload))
    for token, channel in np.ndindex(5, 6):
        total = np.float32(0)
        for r in range(5):
            product = Fraction(int(left[r, token] * right[r, channel])) * Fraction(scales[r])
            rounded = np.float32(float(product))
            assert Fraction(float(rounded)) == product
            total += rounded
        assert y[token, channel].item() == total


def test_tokens_beyond_one_block_decode_as_those_within() -> None:
    codec, x = codec_of(3), of_rank(2, 700, 12)
    y = there_and_back(codec, x)
    assert relative(y[600:], x[600:]) < 0.02
    assert relative(y[:256], x[:256]) < 0.02


@pytest.mark.parametrize(
    "pattern",
    [0x0000, 0x8000, 0x007F, 0x0001, 0xBF80, 0x7F80, 0xFF80, 0x7FC0, 0x7F00],
    ids=lambda pattern: f"{bfloat16(pattern):g}-{pattern:04x}",
)
def test_scales_that_are_none_are_refused(pattern: int) -> None:
    codec = codec_of(2)
    good = codec.encode(gaussian(6, 20))
    for place in (2, 4, 6):  # after one channel: its scale, then those of two products
        payload = good.payload[:place] + struct.pack("<H", pattern) + good.payload[place + 2 :]
        with pytest.raises(BadFrame, match="expected scales"):
            codec.decode(replace(good, payload=payload))


@pytest.mark.parametrize("rank", [1, 2, 3, 5, 256])
def test_the_largest_scales_and_codes_decode_to_finite_values(rank: int) -> None:
    codec, over = codec_of(rank), 1 + 2**-7
    limit = 2.0 ** (113 - (rank - 1).bit_length())
    codes = [-127] * 1200, [127] * (rank * 300), [127] * (rank * 296)

    def decoded(outlier_scale: float, scale: float) -> Tensor:
        payload = payload_of(range(4), [outlier_scale] * 4, [scale] * rank, *codes)
        return codec.decode(EncodedTensor(codec.spec, 300, 300, payload))

    assert decoded(2.0**120, limit).isfinite().all()
    for scales in ((2.0**120, limit * over), (2.0**120 * over, limit)):
        with pytest.raises(BadFrame, match="expected scales"):
            decoded(*scales)


@pytest.mark.parametrize("channels", [(3, 3), (4, 3), (0, 130), (130, 131), (65535, 0)])
def test_outlier_channels_that_do_not_rise_or_exist_are_refused(channels: tuple[int, int]) -> None:
    codec = codec_of(2)
    good = codec.encode(gaussian(6, 130))
    payload = struct.pack("<HH", *channels) + good.payload[4:]
    with pytest.raises(BadFrame, match="rising channels below 130"):
        codec.decode(replace(good, payload=payload))


def test_a_code_off_the_grid_is_refused() -> None:
    codec = codec_of(2)
    good = codec.encode(gaussian(6, 20))
    for place in range(8, len(good.payload), 5):
        payload = good.payload[:place] + b"\x80" + good.payload[place + 1 :]
        with pytest.raises(BadFrame, match="-128"):
            codec.decode(replace(good, payload=payload))


@given(noise=st.binary(min_size=400, max_size=400), kept=st.integers(0, 120))
@property_test
def test_random_bytes_are_refused_or_decode_to_finite_values(noise: bytes, kept: int) -> None:
    codec = codec_of(3)
    good = codec.encode(gaussian(10, 20))
    payload = (good.payload[:kept] + noise)[: len(good.payload)]
    try:
        y = codec.decode(replace(good, payload=payload))
    except BadFrame:
        return
    assert y.isfinite().all()


def test_headers_that_lie_are_refused() -> None:
    codec = codec_of(4)
    good = codec.encode(gaussian(9, 20))
    for lie in (
        replace(good, codec=codec_of(5).spec),
        replace(good, tokens=10),
        replace(good, tokens=1 << 17, channels=1 << 16),
        replace(good, tokens=0),
        replace(good, tokens=-9, channels=-20),
        replace(good, payload=good.payload + b"\0"),
        replace(good, payload=good.payload[:-1]),
        replace(good, payload=b""),
    ):
        with pytest.raises(BadFrame, match=r"expected|takes"):
            codec.decode(lie)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_values_that_are_not_finite_are_not_encoded(bad: float) -> None:
    x = gaussian(7, 9)
    x[4, 1] = bad
    with pytest.raises(NonFinite, match="finite"):
        codec_of(4).encode(x)


def test_a_base_is_refused() -> None:
    codec, x = codec_of(4), gaussian(4, 9)
    with pytest.raises(BadFrame, match="no base"):
        codec.encode(x, x)
    with pytest.raises(BadFrame, match="no base"):
        codec.decode(codec.encode(x), x)


def test_every_flag_of_the_spec_travels() -> None:
    codec = codec_of(4, "+ef+z")
    encoded = codec.encode(gaussian(9, 20))
    assert str(encoded.codec) == "lowrank4+ef+z"
    with pytest.raises(BadFrame, match="expected codec"):
        codec_of(4).decode(encoded)


def test_strides_and_autograd_of_the_input_do_not_matter() -> None:
    codec, x = codec_of(4), gaussian(20, 30)
    kept = x.clone()
    y = codec.decode(codec.encode(x.T.contiguous().T.requires_grad_()))
    assert not y.requires_grad
    assert relative(y, codec.decode(codec.encode(x))) < 0.01
    assert torch.equal(x, kept)
