"""Codecs that only the study has: rotated tiles, which share their outliers, and mixed feedback."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.quality.boundary import AnyCodec
from benchmarks.quality.former import encode_mixed, hadamard, parse_former
from swarm_ft.codec.feedback import encode_with_feedback
from swarm_ft.codec.spec import Direction
from swarm_ft.codec.topk import num_sent_entries
from tests.codecs import parse
from tests.draws import draws

WIDTHS = range(1, 9)
MAX_FLOAT = torch.finfo(torch.float32).max
property_test = settings(derandomize=True, deadline=None, max_examples=draws(15))
every_width = pytest.mark.parametrize("bits", WIDTHS)


def gaussian(tokens: int, channels: int, seed: int = 0) -> Tensor:
    return torch.randn(tokens, channels, generator=torch.Generator().manual_seed(seed))


def codec_of(name: str) -> AnyCodec:
    return parse_former(name) or parse(name)


def roundtrip(x: Tensor, name: str) -> Tensor:
    codec = codec_of(name)
    return codec.decode(codec.encode(x))


def relative_error(y: Tensor, x: Tensor) -> float:
    return float((y.double() - x.double()).norm() / x.double().norm())


# Of Gaussian values, by a scale for each 64 of them.
ERRORS = {1: 0.61, 2: 0.345, 3: 0.19, 4: 0.099, 5: 0.049, 6: 0.024, 7: 0.0124, 8: 0.0062}


@pytest.mark.parametrize(("bits", "error"), ERRORS.items())
def test_gaussian_values_come_back_within_the_error_of_their_bits(bits: int, error: float) -> None:
    x = gaussian(256, 192)
    assert 0.9 * error < relative_error(roundtrip(x, f"hq{bits}"), x) < error


@every_width
@given(shape=st.tuples(st.integers(1, 20), st.integers(1, 150)), seed=st.integers(0, 1000))
@property_test
def test_any_number_of_channels_comes_back(bits: int, shape: tuple[int, int], seed: int) -> None:
    x = gaussian(*shape, seed)
    # A scale covers its tile at worst; filled up with zeros, a tile of n channels has up to 2 n.
    limit = 1.05 * 2.0**0.5 * max(0.8 * 2.0 ** -(bits - 1), ERRORS[bits])
    assert relative_error(roundtrip(x, f"hq{bits}"), x) < max(limit, 0.9 if bits == 1 else 0)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_an_outlier_in_one_channel_is_spread_over_its_tile(bits: int) -> None:
    x = gaussian(256, 256)
    x[:, 5] *= 100
    others = [c for c in range(256) if c != 5]
    errors = {
        name: relative_error(roundtrip(x, name)[:, others], x[:, others])
        for name in (f"hq{bits}", f"q{bits}t")
    }
    assert errors[f"hq{bits}"] < errors[f"q{bits}t"]
    apart = list(range(64, 256))
    assert relative_error(roundtrip(x, f"hq{bits}")[:, apart], x[:, apart]) < ERRORS[bits]


@every_width
def test_a_single_spike_comes_back_exactly_but_for_its_scales_rounding(bits: int) -> None:
    x = torch.zeros(4, 128)  # rotated, it is one magnitude everywhere
    x[1, 70] = 3.0
    y = roundtrip(x, f"hq{bits}")
    assert y[1, 70].item() == pytest.approx(3.0, rel=2**-8)
    y[1, 70] = 0
    assert y.abs().max() < 3e-6


@every_width
def test_tokens_and_tiles_are_apart(bits: int) -> None:
    x = gaussian(8, 192)
    changed = x.clone()
    changed[3, 70] = 1e6
    same = roundtrip(changed, f"hq{bits}") == roundtrip(x, f"hq{bits}")
    assert same[[0, 1, 2, 4, 5, 6, 7]].all()
    assert same[3, :64].all()
    assert same[3, 128:].all()
    assert not same[3, 64:128].all()


@every_width
@pytest.mark.parametrize("magnitude", [1e-30, 1e-10, 1e10, 1e30, 1e36])
def test_the_error_is_the_same_at_any_magnitude(bits: int, magnitude: float) -> None:
    x = gaussian(64, 64)
    ours = relative_error(roundtrip(x * magnitude, f"hq{bits}"), x * magnitude)
    assert ours == pytest.approx(relative_error(roundtrip(x, f"hq{bits}"), x), rel=0.02)


@every_width
@pytest.mark.parametrize("value", [1e30, -1e30, 1e36, -1e36])
def test_tiles_of_huge_values_do_not_overflow(bits: int, value: float) -> None:
    x = torch.full((3, 130), value)  # rotated, a tile is 64 times that in one place
    y = roundtrip(x, f"hq{bits}")
    assert y.isfinite().all()
    assert bits == 1 or relative_error(y, x) < 0.6
    alternating = x * (1 - 2 * (torch.arange(130) % 2))
    assert roundtrip(alternating, f"hq{bits}").isfinite().all()


@every_width
def test_zeros_stay(bits: int) -> None:
    assert not roundtrip(torch.zeros(3, 100), f"hq{bits}").any()


@pytest.mark.parametrize("bits", [1.5, 2, 3, 4])
def test_a_rate_is_kept_and_pays(bits: float) -> None:
    x = gaussian(256, 256) * 2.0 ** torch.randint(0, 4, (256, 1), generator=torch.manual_seed(0))
    codec = codec_of(f"hq{bits}+z")
    encoded = codec.encode(x)
    assert len(encoded.to_bytes()) * 8 / x.numel() <= 1.01 * bits
    if bits == int(bits):
        y = codec.decode(encoded)
        assert relative_error(y, x) < relative_error(roundtrip(x, f"hq{int(bits)}"), x)


def test_tiles_are_multiplied_by_the_matrix() -> None:
    x = torch.randint(-9, 10, (3, 64), generator=torch.manual_seed(0)).float()
    matrix = torch.ones(1, 1)
    for _ in range(5):
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    assert torch.equal(hadamard(x, 32), (x.view(-1, 32) @ matrix).view(x.shape))


@pytest.mark.parametrize("name", ["q4", "hq", "hq9", "hq4+ef", "top10"])
def test_other_names_are_none_of_them(name: str) -> None:
    assert parse_former(name) is None


# ---- mixed feedback


def largest_places(values: list[float], count: int) -> list[int]:
    order = sorted(range(len(values)), key=lambda i: (-abs(values[i]), i))
    return [i for i in order[:count] if values[i]]


def mixed_by_hand(x: list[float], residual: list[float], count: int) -> list[float]:
    """Compute the message of mixed feedback value by value."""
    message = [0.0] * len(x)
    for i in largest_places(x, count - count // 2):
        message[i] += x[i]
    for i in largest_places(residual, count // 2):
        message[i] += residual[i]
    spare = count - sum(value != 0 for value in message)
    rest = [0.0 if message[i] else x[i] + residual[i] for i in range(len(x))]
    for i in largest_places(rest, spare):
        message[i] = rest[i]
    return message


@pytest.mark.parametrize("name", ["top10", "top30+z"])
@given(
    seed=st.integers(0, 1000),
    shape=st.tuples(st.integers(1, 12), st.integers(1, 10)),
    overlap=st.sampled_from([0.0, 0.5, 1.0]),
    whole=st.booleans(),
)
@settings(property_test, max_examples=40)
def test_mixed_feedback_gives_half_of_its_entries_to_each(
    name: str, seed: int, shape: tuple[int, int], overlap: float, whole: bool
) -> None:
    codec, x = parse(name, Direction.BACKWARD), gaussian(*shape, seed)
    residual = overlap * x + (1 - overlap) * gaussian(*shape, seed + 1)
    if whole:  # many ties and zeros, and sums that cancel
        x, residual = x.round(), -residual.round()
    encoded, left = encode_mixed(codec, x, residual)
    count = num_sent_entries(codec.spec, x.numel())
    by_hand = torch.tensor(
        mixed_by_hand(x.view(-1).tolist(), residual.view(-1).tolist(), count)
    ).view_as(x)
    assert encoded == codec.encode(by_hand)
    assert by_hand.count_nonzero() <= count
    assert torch.equal(left, x + residual - codec.decode(encoded))


def test_mixed_feedback_sends_small_old_errors_that_a_sum_would_not() -> None:
    x, residual = torch.zeros(10, 10), torch.zeros(10, 10)
    x[0], residual[5] = 10.0, 1.0
    codec = parse("top10", Direction.BACKWARD)
    mixed, _ = encode_mixed(codec, x, residual)
    plain, _ = encode_with_feedback(codec, x, residual)
    rows = codec.decode(mixed).count_nonzero(1).tolist()
    assert (rows[0], rows[5]) == (5, 5)
    assert codec.decode(plain).count_nonzero(1).tolist()[0] == 10
