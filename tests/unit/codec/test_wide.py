"""The entropy-coded quantisers: rate and error, constant quality, odd tensors, hostile headers."""

import itertools
import math
import struct
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarm_ft.codec.entropy import WideHeader
from swarm_ft.codec.kernels.base import SLICES
from swarm_ft.codec.kernels.cpu import NumbaKernels
from swarm_ft.codec.kernels.reference import scale_table
from swarm_ft.codec.tensor import EncodedTensor
from swarm_ft.codec.wide import WideCodec
from swarm_ft.errors import BadFrame
from tests.codecs import parse
from tests.draws import draws

FRAME_BYTES = 80
"""Of a frame beside its tensor: key, digests, message and gRPC headers."""
AXES = ["f", "c", "t", "tc"]
SMALLEST = 2.0**-110
"""Far below it there are no scales; dither may put such values in place of zeros."""
every_axis = pytest.mark.parametrize("axis", AXES)
property_test = settings(derandomize=True, deadline=None, max_examples=draws(10))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gaussian(tokens: int = 1024, channels: int = 512, seed: int = 0) -> Tensor:
    return torch.randn(tokens, channels, generator=generator(seed))


def laplacian(tokens: int = 1024, channels: int = 512) -> Tensor:
    u = torch.rand(tokens, channels, generator=generator(1)) - 0.5
    return -u.sign() * torch.log1p(-2 * u.abs().clamp(max=0.4999999))


def student(tokens: int = 1024, channels: int = 512) -> Tensor:
    parts = [gaussian(tokens, channels, seed) ** 2 for seed in (2, 3, 4)]
    squares = sum(parts, torch.zeros(()))
    return gaussian(tokens, channels, 5) / (squares / 3).sqrt()


DISTRIBUTIONS = {"Gaussian": gaussian, "Laplacian": laplacian, "Student-t(3)": student}
every_distribution = pytest.mark.parametrize("kind", DISTRIBUTIONS)


def relative_error(y: Tensor, x: Tensor) -> float:
    return float((y.double() - x.double()).norm() / x.double().norm())


def bits_a_value(encoded: EncodedTensor) -> float:
    """Return the bits a value on the wire, headers included."""
    values = encoded.tokens * encoded.channels
    return (len(encoded.to_bytes()) + FRAME_BYTES) * 8 / values


def coded(x: Tensor, name: str, base: Tensor | None = None) -> tuple[Tensor, EncodedTensor]:
    codec = parse(name)
    encoded = codec.encode(x, base)
    return codec.decode(encoded, base), encoded


# ---- rate and error


@every_distribution
@pytest.mark.parametrize("bits", [1, 1.5, 2, 3, 4, 6, 8])
def test_a_frame_costs_its_bits_on_the_wire_and_no_less(kind: str, bits: float) -> None:
    encoded = parse(f"q{bits}f+z").encode(DISTRIBUTIONS[kind]())
    assert 0.97 * bits <= bits_a_value(encoded) <= 1.01 * bits


@pytest.mark.parametrize("mode", ["c", "t", "tc", "c+d", "t+d"])
@pytest.mark.parametrize("bits", [1, 2, 4])
def test_the_rate_holds_for_every_axis_and_with_dither(mode: str, bits: int) -> None:
    encoded = parse(f"q{bits}{mode}+z").encode(laplacian())
    assert 0.97 * bits <= bits_a_value(encoded) <= 1.01 * bits


@pytest.mark.parametrize("bits", [1.5, 3])
def test_the_rate_is_that_of_the_change(bits: float) -> None:
    base = gaussian(seed=1) * 100
    encoded = parse(f"aq{bits}f+z").encode(base + laplacian(), base)
    assert 0.97 * bits <= bits_a_value(encoded) <= 1.01 * bits


class CountingKernels(NumbaKernels):
    """Kernels that count how often a frame was quantised."""

    tries = 0

    def histogram(self, codes: Tensor, contexts: Tensor, num_contexts: int) -> Tensor:
        self.tries += 1
        return super().histogram(codes, contexts, num_contexts)


def test_most_frames_fit_at_the_first_try() -> None:
    kernels, frames = CountingKernels(), 0
    for x in (make() for make in DISTRIBUTIONS.values()):
        widths = torch.exp2(gaussian(1, 512, 8))
        for name in ("q1t+d+z", "q3t+d+z", "q1.5f+z", "q3f+z"):
            for of_tokens in (torch.ones(1024, 1), torch.exp2(gaussian(1024, 1, 9) / 2)):
                WideCodec(parse(name).spec, kernels).encode(x * widths * of_tokens)
                frames += 1
    assert kernels.tries < 1.5 * frames


# Relative error of a uniform quantiser whose codes' entropy is the rate, headers counted.
TABLE = {
    "Gaussian": {2: 0.312, 3: 0.151, 4: 0.075},
    "Laplacian": {2: 0.283, 3: 0.141, 4: 0.069},
    "Student-t(3)": {2: 0.263, 3: 0.127, 4: 0.063},
}


@every_distribution
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_error_is_that_of_an_ideally_coded_uniform_quantiser(kind: str, bits: int) -> None:
    x = DISTRIBUTIONS[kind]()
    y, _ = coded(x, f"q{bits}f+z")
    assert relative_error(y, x) <= 1.05 * TABLE[kind][bits]


def gaussian_cell(scale: float) -> tuple[float, float]:
    """Return entropy in bits and squared error of unit Gaussian values rounded to a scale."""
    codes = torch.arange(-4000, 4000, dtype=torch.float64)
    edges = (torch.arange(-4000, 4001, dtype=torch.float64) - 0.5) * scale
    shares = torch.special.ndtr(edges).diff()
    sums = -(torch.exp(-edges.square() / 2) / math.sqrt(2 * math.pi)).diff()  # of x, by cell
    used = shares > 1e-300
    entropy = -(shares[used] * shares[used].log2()).sum()
    error = 1 - 2 * (codes * scale * sums)[used].sum() + (shares * (codes * scale) ** 2)[used].sum()
    return entropy.item(), error.item()


def ideal_error(widths: list[float], bits: float) -> float:
    """Return the relative error of Gaussian channels under one scale and ideal codes."""
    low, high = 1e-6, 1e4
    for _ in range(60):
        scale = math.sqrt(low * high)
        cells = [gaussian_cell(scale / width) for width in widths]
        rate = sum(entropy for entropy, _ in cells) / len(cells)
        low, high = (scale, high) if rate > bits else (low, scale)
    lost = sum(error * width**2 for (_, error), width in zip(cells, widths, strict=True))
    return math.sqrt(lost / sum(width**2 for width in widths))


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_table_is_what_theory_says(bits: int) -> None:
    assert ideal_error([1.0], bits) == pytest.approx(TABLE["Gaussian"][bits], rel=0.01)


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_channels_of_many_widths_share_the_bits_as_they_should(bits: int) -> None:
    widths = [2.0**-octave for octave in range(9)]
    x = gaussian(1024, 513) * torch.tensor(widths).repeat(57)
    y, encoded = coded(x, f"q{bits}f+z")
    assert bits_a_value(encoded) <= 1.01 * bits
    assert relative_error(y, x) <= 1.1 * ideal_error(widths, bits)


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_tokens_of_many_widths_share_the_bits_as_they_should(bits: int) -> None:
    widths = [2.0**-octave for octave in range(9)]
    x = gaussian(1026, 512) * torch.tensor(widths).repeat(114)[:, None]
    y, encoded = coded(x, f"q{bits}f+z")
    assert bits_a_value(encoded) <= 1.01 * bits
    assert relative_error(y, x) <= 1.1 * ideal_error(widths, bits)


@pytest.mark.parametrize("axis", ["c", "t"])
def test_scales_by_group_give_each_group_the_same_quality(axis: str) -> None:
    widths = 2.0 ** -torch.arange(9.0).repeat(15)[:128]
    shape = (1, -1) if axis == "c" else (-1, 1)
    x = gaussian(128 if axis == "t" else 512, 128 if axis == "c" else 512) * widths.view(shape)
    y, encoded = coded(x, f"q3{axis}+z")
    assert bits_a_value(encoded) <= 3.03
    over = 0 if axis == "c" else 1
    errors = (y - x).norm(dim=over) / x.norm(dim=over)
    assert errors.max() < 1.5 * errors.min()
    assert errors.max() < 0.2


# ---- constant quality


@every_axis
@pytest.mark.parametrize("dither", ["", "+d"])
def test_error_stays_as_the_change_shrinks_and_the_bits_fall(axis: str, dither: str) -> None:
    x, change = gaussian(512, 256), gaussian(512, 256, seed=1)
    errors, rates = [], []
    for shrinkage in (1, 2, 4, 8):
        y, encoded = coded(x, f"aqc0.1{axis}{dither}", x - change / shrinkage)
        errors.append(relative_error(y, x))
        rates.append(bits_a_value(encoded))
    assert max(errors) < 1.15 * min(errors)
    assert errors[0] == pytest.approx(0.1 / math.sqrt(12), rel=0.2)
    assert all(0.7 < before - after < 1.2 for before, after in pairwise(rates))


@pytest.mark.parametrize("scale", [0.02, 0.25, 1, 2])
def test_the_scale_is_the_scale_times_the_spread(scale: float) -> None:
    x = student(512, 256)
    for name, base in ((f"qc{scale}f", None), (f"aqc{scale}f", x - gaussian(512, 256) * 3)):
        y, _ = coded(x, name, base)
        spread = x.double().square().mean().sqrt()
        error = (y - x).double().square().mean().sqrt() / spread
        assert error <= 1.03 * scale / math.sqrt(12)
        assert scale > 1 or error >= 0.85 * scale / math.sqrt(12)


def test_a_change_that_is_far_below_the_scale_costs_next_to_nothing() -> None:
    x = gaussian()
    y, encoded = coded(x, "aqc0.5f", x + gaussian(seed=1) / 100)
    assert bits_a_value(encoded) < 0.02
    assert relative_error(y, x) < 0.011


def test_every_channel_has_a_quality_of_its_own() -> None:
    x = gaussian(512, 128) * 10.0 ** torch.arange(-3, 5).repeat(16)
    y, _ = coded(x, "qc0.5c")
    errors = (y - x).norm(dim=0) / x.norm(dim=0)
    assert errors.max() < 0.5 / math.sqrt(12) * 1.3
    assert errors.min() > 0.5 / math.sqrt(12) * 0.75


# ---- odd tensors


@pytest.mark.parametrize("axis", ["f", "c", "tc"])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_channel_of_huge_values_costs_the_others_little(axis: str, bits: int) -> None:
    x = gaussian()
    x[:, 7] *= 1000
    y, encoded = coded(x, f"q{bits}{axis}+z")
    others = [c for c in range(512) if c != 7]
    assert bits_a_value(encoded) <= 1.01 * bits
    assert relative_error(y[:, others], x[:, others]) < 1.12 * TABLE["Gaussian"][bits]
    assert relative_error(y[:, 7], x[:, 7]) < 1.12 * TABLE["Gaussian"][bits]


@pytest.mark.parametrize("axis", ["f", "t", "tc"])
def test_a_token_of_huge_values_costs_the_others_little(axis: str) -> None:
    x = gaussian()
    x[5] *= 1000
    y, encoded = coded(x, f"q3{axis}+z")
    others = [t for t in range(1024) if t != 5]
    assert bits_a_value(encoded) <= 3.03
    assert relative_error(y[others], x[others]) < 1.12 * TABLE["Gaussian"][3]
    assert relative_error(y[5], x[5]) < 1.12 * TABLE["Gaussian"][3]


@pytest.mark.parametrize("height", [100.0, 300.0, 5000.0, -20_000.0])
@pytest.mark.parametrize("bits", [2, 4])
def test_one_huge_value_comes_back_apart_from_the_others(bits: int, height: float) -> None:
    x = gaussian(512, 256)
    x[3, 4] = height
    y, _ = coded(x, f"q{bits}f+z")
    assert y[3, 4].item() == pytest.approx(height, rel=0.02)
    y[3, 4] = x[3, 4] = 0
    scale = abs(height) / 32_752
    assert relative_error(y, x) < max(1.05 * TABLE["Gaussian"][bits], scale)


@pytest.mark.parametrize("ratio", [1e5, 1e8, 1e30])
@every_axis
def test_a_value_beyond_all_codes_fits_and_nothing_overflows(ratio: float, axis: str) -> None:
    x = gaussian(64, 32)
    x[3, 4] = ratio
    y, _ = coded(x, f"q4{axis}+z")
    assert y[3, 4].item() == pytest.approx(ratio, rel=0.15)


TINY = [(1, 1), (1, 7), (5, 1), (3, 5), (6, 8), (16, 16)]


@pytest.mark.parametrize("shape", TINY)
@pytest.mark.parametrize("name", ["q2f+z", "q4c+z", "q8t+z", "q4tc+d+z"])
def test_frames_that_are_too_small_for_their_own_headers_still_carry_their_values(
    shape: tuple[int, int], name: str
) -> None:
    x = gaussian(*shape)
    y, encoded = coded(x, name)
    assert relative_error(y, x) < 0.7
    assert len(encoded.payload) < 150 + x.numel() * parse(name).spec.number / 8


@pytest.mark.parametrize("shape", TINY)
@pytest.mark.parametrize("name", ["qc0.25f", "qc0.25tc", "qc0.5c+d"])
def test_tiny_frames_have_the_quality_that_was_asked_for(shape: tuple[int, int], name: str) -> None:
    x = gaussian(*shape)
    y, _ = coded(x, name)
    assert relative_error(y, x) <= parse(name).spec.number * 0.6


@every_axis
@pytest.mark.parametrize("name", ["q2{}+z", "q4{}+d+z", "qc0.5{}", "qc0.5{}+d"])
@pytest.mark.parametrize("value", [0.0, 1.0, -1e-30, 1e30])
def test_constants_come_back(name: str, axis: str, value: float) -> None:
    x = torch.full((33, 17), value)
    y, encoded = coded(x, name.format(axis))
    allowed = 0.5 if name == "qc0.5{}+d" else 0.3 if "qc" in name else 0.1
    assert ((y - x).abs() <= abs(value) * allowed + SMALLEST).all()
    assert bits_a_value(encoded) < 5


@every_axis
@given(
    seed=st.integers(0, 1000),
    shape=st.tuples(st.integers(20, 60), st.integers(20, 60)),
    power=st.integers(-60, 60),
)
@settings(property_test, max_examples=5)
def test_powers_of_two_move_the_scales_and_leave_the_codes(
    axis: str, seed: int, shape: tuple[int, int], power: int
) -> None:
    x = gaussian(*shape, seed) ** 3
    for name in (f"q3{axis}+z", f"qc0.5{axis}"):
        one, other = coded(x, name)[0], coded(x * 2.0**power, name)[0]
        assert torch.equal(other, one * 2.0**power)


def gain(x: Tensor, name: str) -> float:
    """Return the gain of y for x: <x, y> / <x, x>."""
    y, _ = coded(x, name)
    return ((x.double() * y.double()).sum() / x.double().square().sum()).item()


@pytest.mark.parametrize("name", ["q2{}+z", "q8{}+z", "qc0.5{}", "q3{}+d+z"])
@every_axis
def test_the_gain_is_the_same_down_to_the_smallest_magnitudes(name: str, axis: str) -> None:
    x = gaussian(256, 128)
    x /= x.abs().max()
    expected = gain(x, name.format(axis))
    for exponent in (4, 6, 8, 16, 30):
        assert gain(x * 10.0**-exponent, name.format(axis)) == pytest.approx(expected, abs=0.03)


@every_axis
def test_at_eight_bits_all_of_it_comes_back(axis: str) -> None:
    x = gaussian(256, 128)
    for exponent in (0, 5, 7, 20, 30):
        assert gain(x * 10.0**-exponent, f"q8{axis}+z") == pytest.approx(1.0, abs=1e-3)


@every_axis
@pytest.mark.parametrize("name", ["q4{}+z", "qc0.25{}"])
def test_a_silent_channel_takes_nothing_from_small_values(name: str, axis: str) -> None:
    x = gaussian(64, 48)
    x[:, 5] = 0
    x[9] = 0
    expected = relative_error(coded(x, name.format(axis))[0], x)
    for exponent in (10, 20, 30):
        small = x * 10.0**-exponent
        y, _ = coded(small, name.format(axis))
        assert relative_error(y, small) == pytest.approx(expected, rel=0.05)
        assert not y[:, 5].any()


# ---- deltas and dither


@pytest.mark.parametrize("name", ["aq2f+z", "aq1.5c+z", "aq3t+d+z", "aq4tc+z"])
def test_error_on_a_fixed_value_contracts(name: str) -> None:
    codec, x, held = parse(name), gaussian(128, 64), gaussian(128, 64, seed=1)
    errors = []
    for _ in range(8):
        held = codec.decode(codec.encode(x, held), held)
        errors.append(relative_error(held, x))
    assert all(after < 0.7 * before for before, after in pairwise(errors))


@pytest.mark.parametrize("name", ["aq2f+z", "aqc0.5c", "aq3t+d+z", "aqc1tc+d"])
def test_without_a_change_a_fixed_point_stays_close(name: str) -> None:
    x = gaussian(40, 24)
    y, _ = coded(x, name, x)
    limit = 0.0 if name == "aq2f+z" else 0.0 if name == "aqc0.5c" else 1.0
    assert (y - x).abs().max() <= limit


@pytest.mark.parametrize("name", ["q3f+d+z", "qc0.5f+d", "q2f+d+z"])
def test_dither_makes_the_mean_of_many_errors_vanish(name: str) -> None:
    x = laplacian(512, 256)
    places = [0.05, 0.13, 0.29, 0.44, 0.71]
    for column, place in enumerate(places):
        x[:, column::16] = place
    y, encoded = coded(x, name)
    plain, _ = coded(x, name.replace("+d", ""))
    error, bias = ([(z - x)[:, c::16].mean().item() for c in range(5)] for z in (y, plain))
    scale = WideHeader.from_bytes(encoded.payload, *x.shape)[0].scale
    assert max(abs(e) for e in error) < 0.05 * scale
    assert max(abs(b) for b in bias) > 0.1 * scale
    inside = (y - x)[:, 5:16]
    assert inside.square().mean() == pytest.approx(0.0663 * scale**2, rel=0.03)


def test_the_same_bytes_have_the_same_dither_and_others_another() -> None:
    codec, x = parse("q6f+d+z"), gaussian(64, 64)
    encoded = codec.encode(x)
    error = codec.decode(encoded) - x
    again = codec.decode(EncodedTensor.from_bytes(encoded.to_bytes())) - x
    assert torch.equal(error, again)
    other = coded(x * 3.0, "q6f+d+z")[0] / 3.0 - x
    both = torch.stack([error.flatten(), other.flatten()])
    assert abs(torch.corrcoef(both)[0, 1]) < 0.1


def test_codes_lie_nearer_to_zero_than_the_middle_of_their_cells() -> None:
    # Most values of a cell do, so it costs nothing and errs less.
    x = laplacian(512, 256)
    y, _ = coded(x, "q2f+z")
    used = y != 0
    assert abs(((y - x)[used] * x[used].sign()).mean()) < 0.02 * x.abs().mean()


def dithered_cells(scale: float) -> float:
    """Return the entropy of unit Gaussian values with known dither, in bits."""
    edges = (torch.arange(-400, 401, dtype=torch.float64) - 0.5) * scale
    total = 0.0
    for drawn in range(16):
        shares = torch.special.ndtr(edges + (2 * drawn - 15) / 32 * scale).diff()
        used = shares[shares > 1e-300]
        total -= (used * used.log2()).sum().item()
    return total / 16


def dithered_error(bits: float) -> float:
    """Return the relative error of a dithered quantiser whose coder knows the dither."""
    low, high = 1e-3, 1e2
    for _ in range(60):
        scale = math.sqrt(low * high)
        low, high = (scale, high) if dithered_cells(scale) > bits else (low, scale)
    return scale / math.sqrt(12)


@pytest.mark.parametrize("axis", ["f", "t"])
@pytest.mark.parametrize("bits", [1, 1.5, 2, 4])
def test_the_coder_knows_the_dither(bits: float, axis: str) -> None:
    x = gaussian()
    y, encoded = coded(x, f"q{bits}{axis}+d+z")
    assert bits_a_value(encoded) <= 1.01 * bits
    # Its square is a quarter less at 1 bit than that of codes on one grid, a fifth at 4.
    assert relative_error(y, x) <= (0.87, 0.92)[bits > 1] * dithered_error(bits)
    assert ((y - x) * x).sum() / x.square().sum() == pytest.approx(0, abs=0.01)


def test_without_the_dither_the_coder_would_need_a_fifth_more() -> None:
    # What the codes' entropy is over all dithers, at the error that one bit now has.
    scale = dithered_error(1) * math.sqrt(12)
    edges = (torch.arange(-400, 401, dtype=torch.float64) - 0.5) * scale
    moved = [torch.special.ndtr(edges + (2 * r - 15) / 32 * scale).diff() for r in range(16)]
    shares = torch.stack(moved).mean(0).clamp(min=1e-300)
    assert -(shares * shares.log2()).sum().item() > 1.2


@every_axis
@pytest.mark.parametrize("name", ["q1{}+d+z", "q3{}+d+z", "q6{}+d+z", "qc0.5{}+d", "qc0.03{}+d"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 50), (64, 48), (200, 130)])
def test_dithered_codes_come_back_whatever_the_slices(
    name: str, axis: str, shape: tuple[int, int]
) -> None:
    x = gaussian(*shape) ** 3
    x[-1, -1] = -3e3
    x[0, 0] = 3e4
    y, encoded = coded(x, name.format(axis))
    header, _ = WideHeader.from_bytes(encoded.payload, *shape)
    assert 1 <= header.slices <= SLICES
    assert header.is_trellis == (header.low_bits == 0)
    scales = scale_table(header.scales())
    reach = 1.0 if header.is_trellis else 0.5
    nearest = torch.where(x.abs() > 2046 * scales, 8.5, reach) * scales
    assert ((y - x).abs() <= nearest + x.abs() * 3e-3).all()


# ---- hostile payloads

FIXED = struct.Struct("<HBBHI")
"""bfloat16 scale, shrink, low bits, four widths of numbers, escapes."""


def bfloat16(value: float) -> int:
    return int(torch.tensor(value).bfloat16().view(torch.int16).item()) & 0xFFFF


def with_fields(payload: bytes, **changes: int) -> bytes:
    names = ("scale", "shrink", "low_bits", "widths", "escapes")
    fields = dict(zip(names, FIXED.unpack_from(payload), strict=True)) | changes
    return FIXED.pack(*fields.values()) + payload[FIXED.size :]


HOSTILE_FIELDS = {
    "scale -1": {"scale": bfloat16(-1.0)},
    "scale NaN": {"scale": bfloat16(math.nan)},
    "scale inf": {"scale": bfloat16(math.inf)},
    "scale too large": {"scale": bfloat16(2.0**113)},
    "scale too small": {"scale": bfloat16(2.0**-121)},
    "shrink 16": {"shrink": 16},
    "shrink 255": {"shrink": 255},
    "9 low bits": {"low_bits": 9},
    "255 low bits": {"low_bits": 255},
    "slices of 5 bits": {"low_bits": 0x50},
    "a trellis without dither": {"low_bits": 0x80},
    "a trellis of upper parts": {"low_bits": 0xA1},
    "a trellis without a scale": {"low_bits": 0xA0, "scale": 0},
    "8 low bits that are not there": {"low_bits": 8},
    "levels of 7 bits by token": {"widths": 0x0007},
    "levels of 15 bits by channel": {"widths": 0x00F0},
    "classes of 4 bits by token": {"widths": 0x0400},
    "classes of 15 bits by channel": {"widths": 0xF000},
    "levels that are not there": {"widths": 0x0066},
    "classes that are not there": {"widths": 0x3300},
    "an escape that is not there": {"escapes": 1},
    "escapes without end": {"escapes": 2**32 - 1},
    "more escapes than values": {"escapes": 31 * 17 + 1},
}


@pytest.mark.parametrize("fields", HOSTILE_FIELDS.values(), ids=HOSTILE_FIELDS)
@pytest.mark.parametrize("name", ["q3f+z", "qc0.5tc", "q2t+d+z"])
def test_a_header_out_of_range_is_refused(name: str, fields: dict[str, int]) -> None:
    codec = parse(name)
    honest = codec.encode(gaussian(31, 17)).payload
    assert with_fields(honest) == honest
    with pytest.raises(BadFrame):
        codec.decode(EncodedTensor(codec.spec, 31, 17, with_fields(honest, **fields)))


@pytest.mark.parametrize("slices", [1, 4])
def test_slices_without_dither_are_refused(slices: int) -> None:
    codec = parse("q3f+z")
    forged = with_fields(codec.encode(gaussian(31, 17)).payload, low_bits=slices << 4)
    with pytest.raises(BadFrame, match="dither"):
        codec.decode(EncodedTensor(codec.spec, 31, 17, forged))


def test_other_slices_than_the_tables_are_for_are_refused_or_finite() -> None:
    codec = parse("q3t+d+z")
    honest = codec.encode(gaussian(64, 48)).payload
    for slices, trellis in itertools.product(range(5), (0, 0x80)):
        forged = with_fields(honest, low_bits=slices << 4 | trellis)
        if forged == honest:
            continue
        try:
            y = codec.decode(EncodedTensor(codec.spec, 64, 48, forged))
        except BadFrame:
            continue
        assert y.isfinite().all()


def test_deep_levels_need_a_scale_that_leaves_them_above_the_smallest() -> None:
    x = gaussian(16, 16) * 2.0 ** torch.arange(0, -16, -1)
    codec = parse("qc0.5c")
    honest = codec.encode(x).payload
    low = with_fields(honest, scale=bfloat16(2.0**-118))
    with pytest.raises(BadFrame, match="out of range"):
        codec.decode(EncodedTensor(codec.spec, 16, 16, low))


def test_escapes_that_need_none_are_refused() -> None:
    codec, x = parse("q4f+z"), gaussian(64, 64)
    x[3, 4] = 5000.0
    encoded = codec.encode(x)
    _, _, low_bits, widths, escapes = FIXED.unpack_from(encoded.payload)
    assert escapes == 1
    planes = 64 * 64 // 8 * low_bits
    code = int.from_bytes(coded_escape(encoded.payload, widths, planes), "little", signed=True)
    assert code > 127
    for forged in (0, 126, -126):
        payload = replace_escape(encoded.payload, widths, planes, forged)
        with pytest.raises(BadFrame, match="codes"):
            codec.decode(EncodedTensor(codec.spec, 64, 64, payload))


def escape_at(widths: int, planes: int) -> int:
    numbers = sum(64 // 8 * (widths >> 4 * place & 15) for place in range(4))
    return FIXED.size + numbers + planes


def coded_escape(payload: bytes, widths: int, planes: int) -> bytes:
    at = escape_at(widths, planes)
    return payload[at : at + 2]


def replace_escape(payload: bytes, widths: int, planes: int, code: int) -> bytes:
    at = escape_at(widths, planes)
    return payload[:at] + code.to_bytes(2, "little", signed=True) + payload[at + 2 :]


def test_every_cut_of_a_frame_is_refused() -> None:
    codec, x = parse("q4tc+z"), gaussian(20, 12)
    x[3, 4] = 500.0
    encoded = codec.encode(x)
    for end in range(len(encoded.payload)):
        cut = EncodedTensor(codec.spec, 20, 12, encoded.payload[:end])
        with pytest.raises(BadFrame):
            codec.decode(cut)
