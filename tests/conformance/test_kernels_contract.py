"""The contract of `Kernels` for every backend; the fast ones must agree with the reference.

Where a decoder calls a kernel, or both ends must agree, "held" is to the bit.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarm_ft.codec.kernels.base import (
    EXACT_CODE,
    MAX_CODE,
    NARROWEST,
    SEGMENT,
    SLICES,
    UNITS,
    WIDEST,
    Coding,
    NarrowGrid,
    Scales,
    WideGrid,
    packed_bytes,
    segment_lengths,
)
from swarm_ft.codec.kernels.reference import grid_limits, mix, scale_table
from tests.conformance.conftest import Backend
from tests.draws import draws

# Triton's interpreter computes with numpy, which warns of what is meant to become infinite.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

FEW = settings(max_examples=draws(25), deadline=None, derandomize=True)

BITS = st.integers(1, 8)
SEEDS = st.integers(0, 2**32 - 1)
SHAPES = st.tuples(st.integers(1, 9), st.sampled_from([1, 2, 3, 7, 16, 33, 130]))
DITHERS = st.none() | SEEDS
AXES = st.sampled_from(["rows", "cols", "both", "frame"])


def bits_of(x: Tensor) -> Tensor:
    return x.view(torch.int32)  # distinguishes 0 and -0


def drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def some_scales(
    axis: str, shape: tuple[int, int], exponent: int, generator: torch.Generator
) -> Scales:
    """Draw scales of either sign, some of them zero, around 2^exponent."""

    def vector(n: int, scale: int) -> Tensor:
        spread = torch.randn(n, generator=generator)
        is_nonzero = torch.rand(n, generator=generator) > 0.15
        return (spread * is_nonzero * 2.0**scale).bfloat16().float()

    tokens, channels = shape
    one = torch.ones(1)
    if axis == "both":
        return Scales(vector(tokens, exponent // 2), vector(channels, exponent // 2))
    if axis == "frame":
        return Scales(one, vector(1, exponent))
    if axis == "rows":
        return Scales(vector(tokens, exponent), one)
    return Scales(one, vector(channels, exponent))


def some_values(
    scales: Scales, shape: tuple[int, int], generator: torch.Generator, reach: float
) -> Tensor:
    """Around the scales' own size, so that codes are of all kinds; some of them zero."""
    size = scale_table(scales).abs().max().item() or 1.0
    values = torch.randn(shape, generator=generator) * reach
    return values * (torch.rand(shape, generator=generator) > 0.1) * size


# --- codes and bytes


@FEW
@given(st.integers(1, 300), BITS, SEEDS)
def test_unpack_reads_what_pack_wrote(backend: Backend, count: int, bits: int, seed: int) -> None:
    codes = torch.randint(0, 1 << bits, (count,), generator=drawn(seed)).to(torch.uint8)
    packed = backend("pack", codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (packed_bytes(count, bits),)
    assert torch.equal(backend("unpack", packed, count, bits), codes)


def test_planes_hold_upper_bits_first(backend: Backend) -> None:
    codes = torch.tensor([7, 1, 2, 3, 4, 5, 6, 0, 4], dtype=torch.uint8)
    # Two upper bits of codes 0, 4, 8 and 12, then of 1, 5, ...; then the lowest bits.
    planes = [0b11_10_10_00, 0b00_10_00_00, 0b01_11_00_00, 0b01_00_00_00, 0b10000000, 0b10000000]
    packed = backend("pack", codes, 3)
    assert packed[:4].tolist() == planes[:4]
    bits = [int(code) & 1 for code in codes] + [0] * 7
    lowest = [sum(bits[j + 2 * k] << (7 - k) for k in range(8)) for j in range(2)]
    assert packed[4:].tolist() == lowest


@FEW
@given(st.integers(1, 300), BITS, SEEDS)
def test_any_bytes_are_the_same_codes(
    fast: Backend, reference: Backend, count: int, bits: int, seed: int
) -> None:
    size = (packed_bytes(count, bits),)
    packed = torch.randint(0, 256, size, generator=drawn(seed)).to(torch.uint8)
    codes = reference("unpack", packed, count, bits)
    assert torch.equal(fast("unpack", packed, count, bits), codes)
    assert torch.equal(fast("pack", codes, bits), reference("pack", codes, bits))


# --- values and codes


@FEW
@given(SHAPES, AXES, st.integers(-110, 100), BITS, DITHERS, st.booleans(), SEEDS)
def test_narrow_codes_are_the_same_values(
    fast: Backend,
    reference: Backend,
    shape: tuple[int, int],
    axis: str,
    exponent: int,
    bits: int,
    dither: int | None,
    has_base: bool,
    seed: int,
) -> None:
    generator = drawn(seed)
    scales = some_scales(axis, shape, exponent, generator)
    base = some_values(scales, shape, generator, 5.0) if has_base else None
    codes = torch.randint(0, 1 << bits, shape, generator=generator).to(torch.uint8)
    args = (codes, base, scales, NarrowGrid(bits, dither))
    values = fast("dequantize", *args)
    assert torch.equal(bits_of(values), bits_of(reference("dequantize", *args)))


@FEW
@given(SHAPES, AXES, st.integers(-110, 100), st.integers(0, 15), DITHERS, st.booleans(), SEEDS)
def test_wide_codes_are_the_same_values(
    fast: Backend,
    reference: Backend,
    shape: tuple[int, int],
    axis: str,
    exponent: int,
    shrink: int,
    dither: int | None,
    has_base: bool,
    seed: int,
) -> None:
    generator = drawn(seed)
    scales = some_scales(axis, shape, exponent, generator)
    base = some_values(scales, shape, generator, 5.0) if has_base else None
    edges = torch.tensor(
        [0, 1, -1, EXACT_CODE, -EXACT_CODE, 2048, -2048, 2049, -2049, MAX_CODE, -MAX_CODE, -32768]
    )
    picks = torch.randint(0, len(edges), shape, generator=generator)
    small = torch.randint(-40, 41, shape, generator=generator)
    codes = torch.where(torch.rand(shape, generator=generator) < 0.5, edges[picks], small)
    args = (codes.to(torch.int16), base, scales, WideGrid(0 if dither else shrink, dither))
    values = fast("dequantize", *args)
    assert torch.equal(bits_of(values), bits_of(reference("dequantize", *args)))


@FEW
@given(
    st.tuples(st.sampled_from([1, 5, 8, 16]), st.sampled_from([1, 7, 33])),
    AXES,
    BITS,
    DITHERS,
    st.booleans(),
    SEEDS,
)
def test_both_at_once_is_one_after_the_other(
    backend: Backend,
    shape: tuple[int, int],
    axis: str,
    bits: int,
    dither: int | None,
    has_base: bool,
    seed: int,
) -> None:
    generator, grid = drawn(seed), NarrowGrid(bits, dither)
    scales = some_scales(axis, shape, 0, generator)
    x = some_values(scales, shape, generator, 3)
    base = torch.randn(shape, generator=generator) if has_base else None
    codes = backend("quantize", x, base, scales, grid)
    packed = backend("quantize_pack", x, base, scales, grid)
    assert torch.equal(packed, backend("pack", codes.reshape(-1), bits))
    values = backend("unpack_dequantize", packed, shape, base, scales, grid)
    assert torch.equal(bits_of(values), bits_of(backend("dequantize", codes, base, scales, grid)))


def positions(
    x: Tensor, base: Tensor | None, scales: Scales, shape: tuple[int, int], seed: int | None
) -> Tensor:
    """Return positions in scales without dither, exact enough to distinguish cells."""
    change = (x if base is None else x - base).double()
    dither: Tensor | float = 0.0
    if seed is not None:
        index = torch.arange(shape[0] * shape[1]).view(shape)
        dither = ((mix(index, seed) >> 28) * 2 - 15) / UNITS
    return change / scale_table(scales).abs().double() - dither


@FEW
@given(SHAPES, AXES, st.integers(-110, 100), BITS, DITHERS, st.booleans(), SEEDS)
def test_narrow_codes_are_the_nearest(
    backend: Backend,
    shape: tuple[int, int],
    axis: str,
    exponent: int,
    bits: int,
    dither: int | None,
    has_base: bool,
    seed: int,
) -> None:
    generator = drawn(seed)
    scales = some_scales(axis, shape, exponent, generator)
    x = some_values(scales, shape, generator, 2.0**bits)
    base = some_values(scales, shape, generator, 1.0) if has_base else None
    codes = backend("quantize", x, base, scales, NarrowGrid(bits, dither))
    table = scale_table(scales)
    lowest, highest = grid_limits(bits, table < 0)
    top = (highest - lowest).double() / UNITS
    at = positions(x, base, scales, shape, dither) - lowest / UNITS
    error = (at.maximum(torch.zeros(())).minimum(top) - codes).abs()
    assert codes.dtype == torch.uint8
    assert (codes[(table == 0).expand(shape)] == 0).all()
    assert ((error <= 0.5 + 1e-5) | (table == 0)).all()
    assert ((codes <= top) | (table == 0)).all()


@FEW
@given(SHAPES, AXES, st.integers(-110, 100), DITHERS, st.booleans(), SEEDS)
def test_wide_codes_are_the_nearest(
    backend: Backend,
    shape: tuple[int, int],
    axis: str,
    exponent: int,
    dither: int | None,
    has_base: bool,
    seed: int,
) -> None:
    generator = drawn(seed)
    scales = some_scales(axis, shape, exponent, generator)
    reach = 10.0 ** float(torch.rand((), generator=generator) * 5)
    x = some_values(scales, shape, generator, reach)
    base = some_values(scales, shape, generator, 1.0) if has_base else None
    codes = backend("quantize", x, base, scales, WideGrid(seed=dither))
    table = scale_table(scales)
    at = positions(x, base, scales, shape, dither).clamp(-MAX_CODE, MAX_CODE)
    is_coarse = codes.abs() > EXACT_CODE
    # A coarse code stands for the value without dither, which is below half a scale.
    allowed = torch.where(is_coarse, 8.5, 0.5) + 1e-5 + at.abs() * 1e-6
    assert codes.dtype == torch.int16
    assert (((at - codes).abs() <= allowed) | (table == 0)).all()
    assert (codes[is_coarse] % 16 == 0).all()
    assert (codes[(table == 0).expand(shape)] == 0).all()


@pytest.mark.parametrize("grid", [NarrowGrid(3), NarrowGrid(8, 5), WideGrid(), WideGrid(seed=5)])
def test_what_lies_beyond_the_grid_gets_its_ends(
    backend: Backend, grid: NarrowGrid | WideGrid
) -> None:
    scales = Scales(torch.ones(1), torch.tensor([2.0**-120, -(2.0**-120), 1.0]))
    x = torch.tensor([[3e38, 3e38, 3e38], [-3e38, -3e38, -3e38]])
    codes = backend("quantize", x, None, scales, grid)
    if isinstance(grid, WideGrid):
        assert codes.tolist() == [[MAX_CODE] * 3, [-MAX_CODE] * 3]
    else:
        last = (1 << grid.bits) - 1
        assert codes.tolist() == [[last, last - 1, last], [0, 0, 0]]


def test_quantize_takes_values_in_any_order_of_memory(backend: Backend) -> None:
    x = torch.randn(6, 10, generator=drawn(1))
    scales, grid = Scales(torch.ones(1), torch.full((6,), 0.25)), NarrowGrid(4)
    codes = backend("quantize", x.T, x.T * 0.5, scales, grid)
    in_order = backend("quantize", x.T.contiguous(), x.T.contiguous() * 0.5, scales, grid)
    assert torch.equal(codes, in_order)
    values = backend("dequantize", codes.T, x, Scales(torch.full((6,), 0.25), torch.ones(1)), grid)
    assert values.shape == x.shape
    assert (values - (x + x * 0.5)).abs().max() <= 0.125 + 1e-6


@FEW
@given(SHAPES, SEEDS)
def test_codes_whose_dither_leans_down_are_turned(
    backend: Backend, shape: tuple[int, int], seed: int
) -> None:
    codes = torch.randint(-MAX_CODE, MAX_CODE, shape, generator=drawn(seed)).to(torch.int16)
    turned = backend("flip_signs", codes, seed)
    down = (mix(torch.arange(codes.numel()), seed) >> 28).view(shape) < 8
    assert turned.dtype == torch.int16
    assert torch.equal(turned, torch.where(down, -codes, codes))
    assert torch.equal(backend("flip_signs", turned, seed), codes)


@FEW
@given(st.integers(1, 700), st.integers(1, SLICES), SEEDS)
def test_contexts_tell_how_far_dither_moves(
    backend: Backend, count: int, slices: int, seed: int
) -> None:
    classes = torch.randint(0, 15, (count,), generator=drawn(seed)).to(torch.uint8)
    contexts = backend("slice_contexts", classes, seed, slices)
    far = (2 * (mix(torch.arange(count), seed) >> 28) - 15).abs() // 2  # 0 to 7
    of_class = 1 << slices - 1
    assert contexts.dtype == torch.uint8
    assert torch.equal(contexts // of_class, classes)
    assert torch.equal(contexts.long() % of_class, (7 - far) * of_class // 8)


# --- symbols


@FEW
@given(SHAPES, st.integers(0, 8), SEEDS)
def test_symbols_are_the_upper_parts_of_codes(
    backend: Backend, shape: tuple[int, int], low_bits: int, seed: int
) -> None:
    count = shape[0] * shape[1]
    codes = torch.randint(-MAX_CODE, MAX_CODE, (count,), generator=drawn(seed)).to(torch.int16)
    codes[::2] >>= 7
    symbols = backend("symbols", codes, low_bits)
    assert symbols.dtype == torch.uint8
    assert symbols.tolist() == [128 + max(-127, min(c >> low_bits, 127)) for c in codes.tolist()]


@FEW
@given(SHAPES, AXES, st.booleans(), st.integers(0, SLICES), st.integers(0, 8), SEEDS)
def test_symbols_and_contexts_of_values_are_those_of_the_turned_codes(
    backend: Backend,
    shape: tuple[int, int],
    axis: str,
    has_base: bool,
    slices: int,
    low_bits: int,
    seed: int,
) -> None:
    generator, grid = drawn(seed), WideGrid(seed=seed if slices else None)
    scales = some_scales(axis, shape, 0, generator)
    x = some_values(scales, shape, generator, reach=300.0)
    base = torch.randn(shape, generator=generator) if has_base else None
    rows, cols = (torch.randint(0, 8, (n,), generator=generator).to(torch.uint8) for n in shape)
    coding = Coding(rows, cols, slices, low_bits)
    codes, symbols, contexts = backend("quantize_symbols", x, base, scales, grid, coding)
    expected, classes = backend("quantize", x, base, scales, grid), (rows[:, None] + cols).view(-1)
    if slices:
        expected = backend("flip_signs", expected, seed)
        classes = backend("slice_contexts", classes, seed, slices)
    assert (codes - expected.view(-1)).abs().max() <= 1  # between two codes either will do
    assert (codes == expected.view(-1)).float().mean() > 0.95
    assert torch.equal(symbols, backend("symbols", codes, low_bits))
    assert torch.equal(contexts, classes)


TRELLISES = st.tuples(SHAPES, st.sampled_from([1, 2, 8]), st.integers(1, SLICES))


def along_trellis(
    backend: Backend, shape: tuple[int, int], lanes: int, slices: int, seed: int
) -> tuple[Tensor, Scales, tuple[Tensor, ...]]:
    """Values, some of them too large for a symbol, their scales, and what the kernel makes."""
    generator = drawn(seed)
    axes = torch.randn(shape[0], generator=generator), torch.randn(shape[1], generator=generator)
    scales = Scales(*(torch.exp2(axis).bfloat16().float() for axis in axes))
    spread = 10.0 ** float(3 * torch.rand((), generator=generator) - 1)
    x = scale_table(scales) * torch.randn(shape, generator=generator) * spread
    base = scale_table(scales) * torch.randn(shape, generator=generator)
    rows, cols = (torch.randint(0, 8, (n,), generator=generator).to(torch.uint8) for n in shape)
    coding = Coding(rows, cols, slices, 0)
    return x, scales, backend("trellis_symbols", x + base, base, scales, seed, coding, lanes)


@FEW
@given(TRELLISES, SEEDS)
def test_codes_along_a_trellis_are_what_their_symbols_say(
    backend: Backend, layout: tuple[tuple[int, int], int, int], seed: int
) -> None:
    shape, lanes, _ = layout
    x, scales, (codes, symbols, _, shifts) = along_trellis(backend, *layout, seed)
    assert torch.equal(symbols, backend("symbols", codes, 0))
    assert torch.equal(shifts, backend("shifts_of", symbols, lanes))
    lowest, expected = (symbols & 1).tolist(), [0] * lanes
    for i in range(lanes, codes.numel()):
        expected.append(lowest[i - lanes] ^ (expected[i - 2 * lanes] if i >= 2 * lanes else 0))
    assert shifts.tolist() == expected[: codes.numel()]
    turned = backend("flip_signs", codes, seed, shifts).view(shape)
    y = backend("dequantize", turned, None, scales, WideGrid(seed=seed, shifts=shifts))
    off = ((y - x) / scale_table(scales)).abs()
    size = x.abs() / scale_table(scales)
    allowed = torch.where(turned.abs() > EXACT_CODE, 8.5, 1.0) + 1e-3 + size * 1e-5
    assert (off <= allowed).all()


@FEW
@given(st.integers(1, 9), st.floats(0.1, 30), SEEDS)
def test_the_path_errs_least_of_all_there_are(
    backend: Backend, count: int, spread: float, seed: int
) -> None:
    x = spread * torch.randn(1, count, generator=drawn(seed))
    one, coding = (
        Scales(torch.ones(1), torch.ones(1)),
        Coding(_zeros(len(x)), _zeros(x.shape[1]), 4, 0),
    )
    codes, _, _, shifts = backend("trellis_symbols", x, None, one, seed, coding, 1)
    turned = backend("flip_signs", codes, seed, shifts).view(x.shape)
    y = backend("dequantize", turned, None, one, WideGrid(seed=seed, shifts=shifts))
    errors = [
        _error_of(x[0], seed, [way >> k & 1 for k in range(count)]) for way in range(1 << count)
    ]
    assert (y - x).square().sum().item() == pytest.approx(min(errors), rel=1e-4, abs=1e-5)


def _zeros(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.uint8)


def _error_of(x: Tensor, seed: int, lowest: list[int]) -> float:
    """Return the error of the nearest codes with these lowest bits, for one lane."""
    total, shift, before = 0.0, 0, 0
    for value, r, odd in zip(
        x.tolist(), (mix(torch.arange(len(x)), seed) >> 28).tolist(), lowest, strict=True
    ):
        dither = (2 * (r ^ 8 * shift) - 15) / 32
        off = (value - dither - odd) / 2
        total += 4 * (off - round(off)) ** 2
        shift, before = before ^ odd, shift
    return total


@pytest.mark.parametrize("spread", [0.2, 0.4, 1.0, 5.0])
def test_a_trellis_errs_a_fifth_less_than_nearest_codes_and_nearly_without_bias(
    fast: Backend, spread: float
) -> None:
    x = spread * torch.randn(20, 160, generator=drawn(3))
    if fast.name == "numba":
        x = spread * torch.randn(1000, 1600, generator=drawn(3))
    one, coding = (
        Scales(torch.ones(1), torch.ones(1)),
        Coding(_zeros(len(x)), _zeros(x.shape[1]), 4, 0),
    )
    codes, _, _, shifts = fast("trellis_symbols", x, None, one, 5, coding, 32)
    turned = fast("flip_signs", codes, 5, shifts).view(x.shape)
    error = fast("dequantize", turned, None, one, WideGrid(seed=5, shifts=shifts)) - x
    many = len(x) > 20
    assert error.square().mean() == pytest.approx(0.0663, rel=0.01 if many else 0.1)
    assert abs(error.mean()) < (0.001 if many else 0.02)
    if many:
        assert (error * x).mean() / spread**2 == pytest.approx(
            0, abs=0.012 if spread < 0.3 else 0.002
        )


# --- what encoders measure


@FEW
@given(SHAPES, st.sampled_from([1e-40, 1e-30, 1.0, 1e30]), st.booleans(), SEEDS)
def test_moments_hold_for_all_magnitudes(
    backend: Backend, shape: tuple[int, int], size: float, has_base: bool, seed: int
) -> None:
    generator = drawn(seed)
    x = torch.randn(shape, generator=generator) * size
    base = torch.randn(shape, generator=generator) * size if has_base else None
    change = (x if base is None else x - base).double()
    by_token, by_channel, token_peaks, channel_peaks = backend("moments", x, base)
    torch.testing.assert_close(by_token, (change**2).sum(1), rtol=1e-6, atol=0)
    torch.testing.assert_close(by_channel, (change**2).sum(0), rtol=1e-6, atol=0)
    assert torch.equal(token_peaks, change.abs().amax(1).float())
    assert torch.equal(channel_peaks, change.abs().amax(0).float())


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("has_base", [False, True])
def test_moments_show_what_is_not_finite(backend: Backend, value: float, has_base: bool) -> None:
    x = torch.ones(5, 40)
    x[3, 37] = value
    base = torch.zeros(5, 40) if has_base else None
    for by_token, by_channel in zip(*[iter(backend("moments", x, base))] * 2, strict=True):
        assert torch.isfinite(by_token).tolist() == [True, True, True, False, True]
        assert torch.isfinite(by_channel).tolist() == [True] * 37 + [False] + [True] * 2


@FEW
@given(SHAPES, st.sampled_from([1e-40, 1e-30, 1.0, 1e30]), st.booleans(), SEEDS)
def test_balance_tells_tokens_spreads_and_what_is_left(
    backend: Backend, shape: tuple[int, int], size: float, has_base: bool, seed: int
) -> None:
    generator = drawn(seed)
    tokens, channels = shape
    widths = torch.exp2(4 * torch.randn(channels, generator=generator))
    heights = torch.exp2(4 * torch.randn(tokens, 1, generator=generator))
    x = torch.randn(shape, generator=generator) * widths * heights * size
    base = torch.randn(shape, generator=generator) * size if has_base else None
    change = (x if base is None else x - base).double()
    inverse = (1 / (widths.double() * size)).clamp(max=3e38).float()
    inverse[torch.rand(channels, generator=generator) < 0.3] = 0  # silent ones
    spreads, token_peaks, channel_peaks = backend("balance", x, base, inverse)
    expected = (change * inverse.double()).square().mean(1).sqrt()
    expected = torch.where(expected == 0, 1.0, expected.clamp(NARROWEST, WIDEST))
    assert torch.equal(spreads, spreads.bfloat16().float())
    torch.testing.assert_close(spreads.double(), expected, rtol=2**-8, atol=0)
    assert torch.equal(token_peaks, change.abs().amax(1).float())
    left = (change / spreads.double()[:, None]).abs().amax(0).float()
    torch.testing.assert_close(channel_peaks, left, rtol=1e-6, atol=1e-44)


@FEW
@given(SHAPES, st.integers(1, 12), st.booleans(), SEEDS)
def test_a_balanced_sample_is_of_tokens_over_their_spreads(
    backend: Backend, shape: tuple[int, int], every: int, has_base: bool, seed: int
) -> None:
    generator = drawn(seed)
    heights = torch.exp2(3 * torch.randn(shape[0], 1, generator=generator))
    x = torch.randn(shape, generator=generator) * heights
    base = torch.randn(shape, generator=generator) if has_base else None
    inverse = torch.rand(shape[1], generator=generator)
    *measured, sample = backend("balanced_sample", x, base, inverse, every)
    for part, alone in zip(measured, backend("balance", x, base, inverse), strict=True):
        assert torch.equal(part, alone)
    expected = (x if base is None else x - base)[::every] / measured[0][::every, None]
    torch.testing.assert_close(sample, expected, rtol=1e-6, atol=0)


def test_balance_keeps_spreads_within_range_and_silent_tokens_at_one(backend: Backend) -> None:
    x = torch.tensor([[1e-9] * 3, [0.0] * 3, [1e9] * 3, [3e38] * 3, [4.0] * 3])
    spreads, peaks, _ = backend("balance", x, None, torch.ones(3))
    assert spreads.tolist() == [NARROWEST, 1.0, WIDEST, WIDEST, 4.0]
    assert torch.equal(peaks, x[:, 0])


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("counts", [0.0, 1.0])
def test_balance_shows_what_is_not_finite(backend: Backend, value: float, counts: float) -> None:
    x = torch.ones(5, 40)
    x[3, 37] = value
    _, peaks, _ = backend("balance", x, torch.zeros(5, 40), torch.full((40,), counts))
    assert torch.isfinite(peaks).tolist() == [True, True, True, False, True]


@FEW
@given(SHAPES, BITS, st.sampled_from([1e-30, 1.0, 1e30]), st.booleans(), SEEDS)
def test_grid_errors_are_those_of_the_grids(
    backend: Backend, shape: tuple[int, int], bits: int, size: float, has_base: bool, seed: int
) -> None:
    generator = drawn(seed)
    x = torch.randn(shape, generator=generator) * size
    base = torch.randn(shape, generator=generator) * size if has_base else None
    change = (x if base is None else x - base).double()
    covering = ((torch.rand(shape[1], generator=generator) + 0.5) * size).bfloat16().float()
    multiples = torch.tensor([1.0, 0.5, -1.0, -0.625])
    errors = backend("grid_errors", x, base, covering, multiples, bits)
    for multiple, of_grid in zip(multiples, errors, strict=True):
        scale = covering.double() * multiple.abs()
        lowest, highest = grid_limits(bits, multiple < 0)
        codes = ((change / scale - lowest / UNITS).round()).clamp(0, int(highest - lowest) // UNITS)
        distances = (codes + lowest / UNITS) * scale - change
        expected = (distances / covering).square().sum(0).float()
        torch.testing.assert_close(of_grid, expected, rtol=1e-3, atol=1e-5)


def test_grid_errors_of_one_long_channel(backend: Backend) -> None:
    x = torch.randn(3001, 1, generator=drawn(2))
    base = torch.randn(3001, 1, generator=drawn(3))
    multiples = torch.tensor([1.0, -0.5])
    covering = torch.tensor([0.5])
    errors = backend("grid_errors", x, base, covering, multiples, 2)
    many = backend("grid_errors", x[:1500], base[:1500], covering, multiples, 2)
    many = many + backend("grid_errors", x[1500:], base[1500:], covering, multiples, 2)
    assert errors.shape == (2, 1)
    torch.testing.assert_close(errors, many, rtol=1e-3, atol=0)


@FEW
@given(st.integers(1, 2000), st.integers(1, 16), SEEDS)
def test_histogram_counts(backend: Backend, count: int, num_contexts: int, seed: int) -> None:
    generator = drawn(seed)
    codes = torch.randint(0, 256, (count,), generator=generator).to(torch.uint8)
    contexts = torch.randint(0, num_contexts, (count,), generator=generator).to(torch.uint8)
    counts = backend("histogram", codes, contexts, num_contexts)
    expected = torch.zeros(num_contexts, 256, dtype=torch.int64)
    for context, code in zip(contexts.tolist(), codes.tolist(), strict=True):
        expected[context, code] += 1
    assert torch.equal(counts, expected)


# --- sizes


def test_segments_and_bytes_add_up() -> None:
    assert segment_lengths(2 * SEGMENT + 5) == [SEGMENT, SEGMENT, 5]
    assert [packed_bytes(9, bits) for bits in (1, 3, 8)] == [2, 6, 16]
