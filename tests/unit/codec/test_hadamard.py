"""The codec `hqB`: rotated tiles, which share their outliers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarm_ft.codec.narrow import TILE
from swarm_ft.errors import BadFrame
from swarm_ft.protocol.messages.boundary import EncodedTensor
from tests.codecs import parse
from tests.draws import draws

WIDTHS = range(1, 9)
MAX_FLOAT = torch.finfo(torch.float32).max
property_test = settings(derandomize=True, deadline=None, max_examples=draws(15))
every_width = pytest.mark.parametrize("bits", WIDTHS)


def gaussian(tokens: int, channels: int, seed: int = 0) -> Tensor:
    return torch.randn(tokens, channels, generator=torch.Generator().manual_seed(seed))


def roundtrip(x: Tensor, name: str) -> Tensor:
    codec = parse(name)
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


@every_width
@pytest.mark.parametrize("channels", [1, 2, 3, 63, 64, 65, 128, 200])
def test_a_payload_is_a_scale_and_the_codes_of_every_tile(bits: int, channels: int) -> None:
    tile = min(TILE, 1 << (channels - 1).bit_length())
    tiles = 7 * -(-channels // tile)
    size = 2 * tiles + -(-tiles * tile // 8) * bits
    codec = parse(f"hq{bits}")
    assert codec.max_payload_bytes(7, channels) == size
    assert len(codec.encode(gaussian(7, channels)).payload) == size


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
    codec = parse(f"hq{bits}+z")
    encoded = codec.encode(x)
    assert len(encoded.to_bytes()) * 8 / x.numel() <= 1.01 * bits
    if bits == int(bits):
        y = codec.decode(encoded)
        assert relative_error(y, x) < relative_error(roundtrip(x, f"hq{int(bits)}"), x)


def test_scales_that_make_a_tile_overflow_are_refused() -> None:
    codec = parse("hq8")
    scale = torch.tensor(2.0**120).bfloat16().view(torch.int16).numpy().tobytes()
    payload = scale + b"\xff" * 64
    with pytest.raises(BadFrame, match="finite"):
        codec.decode(EncodedTensor(codec.spec, 1, 64, payload))
