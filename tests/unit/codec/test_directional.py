"""Codes along a learned basis: error and bytes, odd tensors, missing bases, hostile payloads, bits.

These tests only show that the directions help; benchmarks/reports/quality.md has sizes of frames.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarm_ft.codec import directional
from swarm_ft.codec.basis import Basis, learn_basis
from swarm_ft.codec.directional import DirectionalCodec
from swarm_ft.codec.side_info import NAME_BYTES, PLAIN
from swarm_ft.codec.tensor import EncodedTensor
from swarm_ft.errors import BadFrame, NonFinite
from tests.codecs import assert_sender_has_the_value, parse
from tests.draws import draws

TOKENS, CHANNELS, DIRECTIONS = 60, 32, 6
property_test = settings(derandomize=True, deadline=None, max_examples=draws(40))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gaussian(tokens: int = TOKENS, channels: int = CHANNELS, seed: int = 0) -> Tensor:
    return torch.randn(tokens, channels, generator=generator(seed))


def low_rank(
    tokens: int = TOKENS, channels: int = CHANNELS, count: int = DIRECTIONS, seed: int = 0
) -> Tensor:
    """Return rows along a few fixed directions of falling spread."""
    directions = torch.linalg.qr(gaussian(channels, count, 77))[0]
    rows: Tensor = (gaussian(tokens, count, seed) * torch.logspace(0.5, -0.5, count)) @ directions.T
    return rows


def directional_codec(name: str) -> DirectionalCodec:
    codec = parse(name)
    assert isinstance(codec, DirectionalCodec)
    return codec


def along(name: str, rows: Tensor, x: Tensor, *, has_mean: bool = False) -> DirectionalCodec:
    """Return the codec with a basis learned from rows for values like x."""
    codec = directional_codec(name)
    basis = learn_basis([rows], codec.step_of(x), has_mean=has_mean)
    assert basis is not None
    return codec.with_side_info(basis)


def with_change(tokens: int = TOKENS, channels: int = CHANNELS) -> tuple[Tensor, Tensor]:
    """Return an activation and its base; their difference follows a few directions."""
    base = gaussian(tokens, channels, seed=5) * 2
    count = min(DIRECTIONS, channels)
    return base + low_rank(tokens, channels, count=count, seed=3), base


def change_codec(step: float = 0.1) -> tuple[DirectionalCodec, Tensor, Tensor]:
    x, base = with_change()
    return along(f"aqk{step}", low_rank(512), x), x, base


def first_codec(step: float = 0.1) -> tuple[DirectionalCodec, Tensor]:
    """Return a codec of first activations, around a mean far from zero."""
    common = 4 * gaussian(1, CHANNELS, seed=8)
    x = common + low_rank(seed=3)
    return along(f"qk{step}", common + low_rank(512), x, has_mean=True), x


def step_error(y: Tensor, x: Tensor, step: float) -> float:
    """Return the root mean square error relative to that of a uniform quantiser."""
    return float((y.double() - x.double()).square().mean().sqrt() / (step / math.sqrt(12)))


# ---- error and bytes


def test_the_error_of_many_visits_is_none_at_all() -> None:
    """Dither keeps values below a step from being dropped at every visit."""
    x, base = with_change()
    codec = along("aqk1", low_rank(512), x)
    visits = 64
    total = torch.zeros_like(x)
    for visit in range(visits):
        moved = x + 1e-3 * gaussian(seed=visit)  # so that no two have one dither
        total += codec.decode(codec.encode(moved, base), base) - moved
    along_it = total / visits @ codec.basis.analysis(torch.device("cpu"))  # type: ignore[union-attr]
    once = codec.step_of(x) / math.sqrt(12)
    assert along_it.square().mean().sqrt() < 2 * once / math.sqrt(visits)


@pytest.mark.parametrize("step", [0.02, 0.1, 0.5, 1])
def test_a_change_errs_by_no_more_than_its_step_says(step: float) -> None:
    codec, x, base = change_codec(step)
    y = codec.decode(codec.encode(x, base), base)
    assert step_error(y, x, codec.step_of(x)) < 1.1


@pytest.mark.parametrize("step", [0.02, 0.1, 0.5, 1])
def test_a_first_activation_errs_by_no_more_than_its_step_says(step: float) -> None:
    codec, x = first_codec(step)
    y = codec.decode(codec.encode(x))
    assert step_error(y, x, codec.step_of(x)) < 1.1


@pytest.mark.parametrize("name", ["qk0.1", "aqk0.1", "aqk1"])
def test_without_a_basis_the_channels_are_coded_by_themselves(name: str) -> None:
    codec, (x, base) = directional_codec(name), with_change()
    against = base if codec.spec.is_delta else None
    encoded = codec.encode(x, against)
    assert encoded.payload.startswith(PLAIN)
    assert step_error(codec.decode(encoded, against), x, codec.step_of(x)) < 1.1


@pytest.mark.parametrize("step", [0.05, 0.2, 0.5])
def test_a_basis_makes_frames_of_few_directions_smaller(step: float) -> None:
    codec, x, base = change_codec(step)
    plain = len(codec.with_side_info(None).encode(x, base).payload)
    assert len(codec.encode(x, base).payload) < 0.6 * plain


def test_a_mean_makes_first_activations_smaller() -> None:
    codec, x = first_codec()
    assert codec.basis is not None
    assert codec.basis.mean is not None
    assert len(codec.encode(x).payload) < 0.6 * len(codec.with_side_info(None).encode(x).payload)


def test_what_lies_beyond_the_directions_is_not_sent() -> None:
    codec, x, base = change_codec()
    assert codec.basis is not None
    cpu = torch.device("cpu")
    beside = gaussian(seed=6) / 1000
    changed = codec.decode(codec.encode(x + beside, base), base) - base
    kept = changed @ codec.basis.analysis(cpu) @ codec.basis.synthesis(cpu)
    assert (changed - kept).abs().max() < 1e-5 < beside.abs().max()


@pytest.mark.parametrize("step", [0.25, 1.0])
def test_the_step_is_that_of_a_middling_token(step: float) -> None:
    x = gaussian(101) * 3
    codec = directional_codec(f"aqk{step}")
    expected = codec.step_of(x)
    assert expected == pytest.approx(3 * step, rel=0.1)
    x[:10] *= 1000
    assert codec.step_of(x) == pytest.approx(expected, rel=0.1)


# ---- what is foretold


def foretold(step: float = 0.1) -> tuple[DirectionalCodec, Tensor, Tensor]:
    """Return a change that is mostly a linear map of its base, and a codec that learned the map."""
    over, beside = (torch.linalg.qr(gaussian(CHANNELS, DIRECTIONS, k))[0] for k in (41, 42))
    bases = [2 * gaussian(seed=200 + k) for k in range(12)]
    codec = directional_codec(f"aqk{step}")
    changes = [b @ over @ beside.T + 0.2 * low_rank(seed=k) for k, b in enumerate(bases)]
    x = bases[0] + changes[0]
    basis = learn_basis(changes[1:], codec.step_of(x), old_values=bases[1:])
    assert basis is not None
    assert basis.predictor is not None
    return codec.with_side_info(basis), x, bases[0]


@pytest.mark.parametrize("step", [0.05, 0.1, 0.5])
def test_what_the_base_foretells_need_not_be_sent(step: float) -> None:
    codec, x, base = foretold(step)
    assert codec.basis is not None
    encoded = codec.encode(x, base)
    assert step_error(codec.decode(encoded, base), x, codec.step_of(x)) < 1.2
    without = codec.with_side_info(replace(codec.basis, predictor=None))
    assert len(encoded.payload) < 0.85 * len(without.encode(x, base).payload)


def test_a_forecast_that_is_wrong_of_this_change_is_not_used() -> None:
    codec, x, base = foretold()
    assert codec.basis is not None
    other = base - (x - base)
    without = codec.with_side_info(replace(codec.basis, predictor=None))
    sizes = [len(one.encode(other, base).payload) for one in (codec, without)]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("height", [0.0, 1e-42, 1e-30, 1e30, 1e37])
def test_bases_of_any_size_foretell_something_finite(height: float) -> None:
    codec, _, base = foretold()
    huge = (base / base.abs().max()) * height
    x = huge + low_rank(seed=3) * max(height, 1e-30) / 100
    assert codec.decode(codec.encode(x, huge), huge).isfinite().all()


def test_a_frame_that_is_foretold_by_a_basis_without_a_forecast_is_refused() -> None:
    codec, x, base = foretold()
    assert codec.basis is not None
    plain = codec.with_side_info(replace(codec.basis, predictor=None))
    assert plain.basis is not None
    forged = plain.basis.name + codec.encode(x, base).payload[NAME_BYTES:]
    with pytest.raises(BadFrame, match="without a predictor"):
        plain.decode(EncodedTensor(codec.spec, TOKENS, CHANNELS, forged), base)


# ---- what the sender has at once


@pytest.mark.parametrize("step", [0.02, 0.5])
def test_the_sender_has_the_value_that_the_receiver_reads(step: float) -> None:
    for codec, x, base in (change_codec(step), foretold(step)):
        assert_sender_has_the_value(codec, x, base)
        assert_sender_has_the_value(codec, base, base)
        assert_sender_has_the_value(codec.with_side_info(None), x, base)
    assert_sender_has_the_value(*first_codec(step), None)


@pytest.mark.parametrize("height", [1e-30, 1e5, 1e20])
def test_so_it_has_where_codes_are_too_large_for_a_symbol(height: float) -> None:
    for codec, x, base in (change_codec(), foretold()):
        x[7] = base[7] + height * low_rank(1)[0]
        assert_sender_has_the_value(codec, x, base)


# ---- odd tensors


def test_no_change_costs_next_to_nothing_and_changes_nothing() -> None:
    codec, _, base = change_codec()
    encoded = codec.encode(base, base)
    assert len(encoded.payload) < 20
    assert torch.equal(codec.decode(encoded, base), base)


def test_silence_stays_silent() -> None:
    codec, _, _ = change_codec()
    zero = torch.zeros(TOKENS, CHANNELS)
    assert torch.equal(codec.decode(codec.encode(zero, zero), zero), zero)


def test_a_massive_token_costs_the_others_nothing() -> None:
    codec, x, base = change_codec()
    x[7] = base[7] + 300 * low_rank(1)[0]
    y = codec.decode(codec.encode(x, base), base)
    others = [t for t in range(TOKENS) if t != 7]
    assert step_error(y[others], x[others], codec.step_of(x)) < 1.1
    assert float((y[7] - x[7]).norm() / (x[7] - base[7]).norm()) < 0.03


@pytest.mark.parametrize("height", [1e3, 1e5, 1e8, 1e20])
def test_codes_that_no_symbol_has_come_back(height: float) -> None:
    codec, x, base = change_codec()
    x[7] = base[7] + height * low_rank(1)[0]
    y = codec.decode(codec.encode(x, base), base)
    assert y.isfinite().all()
    assert float((y[7] - x[7]).norm() / (x[7] - base[7]).norm()) < 0.03


@pytest.mark.parametrize("power", [-90, -30, 30, 90])
def test_powers_of_two_move_the_scale_and_leave_the_error(power: int) -> None:
    codec, x, base = change_codec()
    factor = 2.0**power
    y = codec.decode(codec.encode(x, base), base)
    other = codec.decode(codec.encode(x * factor, base * factor), base * factor)
    exact = 2.0**-power
    error, same = (other * exact - x).norm(), (y - x).norm()
    assert 0.9 * same < error < 1.1 * same


@pytest.mark.parametrize("height", [1e-44, 1e-39, 1e-30, 1e30, 1e37])
@pytest.mark.parametrize("name", ["qk0.5", "aqk0.5"])
def test_tiny_and_huge_values_stay_finite(name: str, height: float) -> None:
    rows = low_rank(512)
    codec = along(name, rows, rows)
    x = low_rank(seed=3) * height
    against = torch.zeros_like(x) if codec.spec.is_delta else None
    y = codec.decode(codec.encode(x, against), against)
    assert y.isfinite().all()
    assert (y - x).abs().max() <= 0.6 * codec.step_of(x) * math.sqrt(DIRECTIONS) + 2.0**-110


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("has_basis", [False, True])
def test_what_is_not_finite_is_not_encoded(value: float, has_basis: bool) -> None:
    codec, x, base = change_codec()
    x[3, 4] = value
    with pytest.raises(NonFinite):
        (codec if has_basis else codec.with_side_info(None)).encode(x, base)


@pytest.mark.parametrize("shape", [(1, 1), (1, 32), (60, 1), (2, 3), (7, 5), (65, 33), (300, 16)])
@pytest.mark.parametrize("name", ["qk0.1", "aqk0.1"])
def test_any_shape_comes_back(name: str, shape: tuple[int, int]) -> None:
    x, base = with_change(*shape)
    against = base if name.startswith("a") else None
    change = x - base if against is not None else x
    codec = along(name, change, x)
    encoded = codec.encode(x, against)
    y = codec.decode(encoded, against)
    assert y.shape == shape
    assert step_error(y, x, codec.step_of(x)) < 1.8  # of few values, which may be unlucky
    assert len(encoded.payload) <= codec.max_payload_bytes(*shape)


def worst(tokens: int, channels: int, seed: int) -> Tensor:
    """Return values of all magnitudes, whose codes have no predictable distribution."""
    octaves = 40 * torch.rand(tokens, channels, generator=generator(seed)) - 20
    return gaussian(tokens, channels, seed) * torch.exp2(octaves)


@pytest.mark.parametrize("shape", [(1, 1), (1, 40), (40, 1), (40, 24), (257, 12)])
@pytest.mark.parametrize("has_basis", [False, True])
@pytest.mark.parametrize("step", [0.02, 0.5])
def test_no_payload_is_larger_than_the_largest(
    shape: tuple[int, int], has_basis: bool, step: float
) -> None:
    for seed in range(5):
        x = worst(*shape, seed)
        codec = along(f"qk{step}", gaussian(64, shape[1]) * 100, gaussian(*shape))
        encoded = (codec if has_basis else codec.with_side_info(None)).encode(x)
        assert len(encoded.payload) <= codec.max_payload_bytes(*shape)
        assert codec.decode(encoded).isfinite().all()


# ---- bases that are missing or others


def test_a_frame_needs_the_basis_that_it_names() -> None:
    codec, x, base = change_codec()
    encoded = codec.encode(x, base)
    other = along("aqk0.1", gaussian(64), x)
    assert codec.basis is not None
    assert encoded.payload[:NAME_BYTES] == codec.basis.name
    for wrong in (codec.with_side_info(None), other, codec.with_side_info(of_channels(16))):
        with pytest.raises(BadFrame, match="basis"):
            wrong.decode(encoded, base)


def of_channels(channels: int) -> Basis:
    basis = learn_basis([gaussian(64, channels)], 0.1)
    assert basis is not None
    return basis


def test_a_frame_that_names_a_basis_of_other_channels_is_refused() -> None:
    codec, x, base = change_codec()
    other = of_channels(16)
    forged = other.name + codec.encode(x, base).payload[NAME_BYTES:]
    with pytest.raises(BadFrame, match="basis"):
        codec.with_side_info(other).decode(
            EncodedTensor(codec.spec, TOKENS, CHANNELS, forged), base
        )


def test_a_plain_frame_needs_none_and_does_not_mind_one() -> None:
    codec, x, base = change_codec()
    plain = codec.with_side_info(None).encode(x, base)
    assert torch.equal(codec.decode(plain, base), codec.with_side_info(None).decode(plain, base))


# ---- hostile payloads


def assert_refused_or_finite(
    codec: DirectionalCodec, payload: bytes, base: Tensor | None, shape: tuple[int, int]
) -> None:
    try:
        y = codec.decode(EncodedTensor(codec.spec, *shape, payload), base)
    except BadFrame:
        return
    assert y.shape == shape
    assert y.isfinite().all()


SMALL = 9, 8


def small_codec(*, has_mean: bool) -> tuple[DirectionalCodec, Tensor]:
    rows = low_rank(256, SMALL[1], count=3) + 2 * has_mean
    x = low_rank(*SMALL, count=3, seed=3) + 2 * has_mean
    x[4] *= 5000  # so that there are codes that no symbol has
    return along("qk0.1", rows, gaussian(*SMALL), has_mean=has_mean), x


@pytest.mark.parametrize("has_mean", [False, True])
@pytest.mark.parametrize("has_basis", [False, True])
def test_every_cut_is_refused_or_finite(has_mean: bool, has_basis: bool) -> None:
    codec, x = small_codec(has_mean=has_mean)
    payload = (codec if has_basis else codec.with_side_info(None)).encode(x).payload
    for end in range(len(payload)):
        assert_refused_or_finite(codec, payload[:end], None, SMALL)
    for end in range(NAME_BYTES + 4):
        with pytest.raises(BadFrame):
            codec.decode(EncodedTensor(codec.spec, *SMALL, payload[:end]))


@pytest.mark.parametrize("has_mean", [False, True])
@given(st.data())
@property_test
def test_every_altered_byte_is_refused_or_finite(has_mean: bool, data: st.DataObject) -> None:
    codec, x = small_codec(has_mean=has_mean)
    payload = codec.encode(x).payload
    at = data.draw(st.integers(0, len(payload) - 1))
    value = bytes([data.draw(st.integers(0, 255))])
    assert_refused_or_finite(codec, payload[:at] + value + payload[at + 1 :], None, SMALL)


@given(tail=st.binary(max_size=120), is_named=st.booleans(), is_delta=st.booleans())
@property_test
def test_any_bytes_are_refused_or_finite(tail: bytes, is_named: bool, is_delta: bool) -> None:
    codec, _ = small_codec(has_mean=False)
    assert codec.basis is not None
    if is_delta:
        codec = directional_codec("aqk0.1").with_side_info(codec.basis)
    name = codec.basis.name if codec.basis is not None and is_named else PLAIN
    base = gaussian(*SMALL) if is_delta else None
    assert_refused_or_finite(codec, name + tail, base, SMALL)


HEADER_BYTES = 8


@given(head=st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
@property_test
def test_any_header_before_an_honest_rest_is_refused_or_finite(head: bytes) -> None:
    codec, x = small_codec(has_mean=False)
    payload = codec.encode(x).payload
    forged = payload[:NAME_BYTES] + head + payload[NAME_BYTES + HEADER_BYTES :]
    assert_refused_or_finite(codec, forged, None, SMALL)


def test_a_silent_frame_with_more_behind_it_is_refused() -> None:
    codec, _ = small_codec(has_mean=False)
    silent = codec.encode(torch.zeros(SMALL)).payload
    assert torch.equal(codec.decode(EncodedTensor(codec.spec, *SMALL, silent)), torch.zeros(SMALL))
    with pytest.raises(BadFrame):
        codec.decode(EncodedTensor(codec.spec, *SMALL, silent + b"\0"))


def test_a_value_beyond_floats_is_refused() -> None:
    codec, x, base = change_codec()
    encoded = codec.encode(x, base)
    huge = torch.full_like(base, 3.4e38)
    scaled = codec.encode(x * 1e37, base * 1e37)
    assert codec.decode(encoded, base).isfinite().all()
    with pytest.raises(BadFrame, match="finite"):
        codec.decode(scaled, huge * (x - base).sign())


# ---- the same bits everywhere


def made(kind: str) -> tuple[DirectionalCodec, Tensor, Tensor | None]:
    if kind == "first":
        codec, x = first_codec()
        return codec, x, None
    return foretold() if kind == "foretold" else change_codec()


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("kind", ["first", "change", "foretold"])
def test_the_product_is_the_same_to_the_bit_in_32_and_in_64_bits(
    kind: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec, x, base = made(kind)
    encoded = codec.encode(x, base)
    expected = codec.decode(encoded, base)
    monkeypatch.setattr(directional, "_EXACT_BITS", 0)  # nothing is small: always float64
    assert torch.equal(codec.decode(encoded, base), expected)
    monkeypatch.undo()
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
    assert torch.equal(codec.decode(encoded, base), expected)


def test_small_codes_are_multiplied_in_32_bits_and_large_ones_in_64(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check that the tests above and below cover both products."""
    widths = []
    to_double = Tensor.double

    def watched(x: Tensor) -> Tensor:
        widths.append(x.shape)
        return to_double(x)

    codec, x, base = change_codec(step=0.5)
    large = x.clone()
    large[7] = base[7] + 3000 * low_rank(1)[0]
    frames = codec.encode(x, base), codec.encode(large, base)
    used = []
    for encoded in frames:
        assert codec.basis is not None
        codec.basis.synthesis(torch.device("cpu"))
        monkeypatch.setattr(Tensor, "double", watched)
        widths.clear()
        codec.decode(encoded, base)
        monkeypatch.undo()
        used.append(bool(widths))
    assert used == [False, True]


def exact_product(values: Tensor, basis: Basis) -> Tensor:
    """Multiply in integers of any size, last direction first, and round once."""
    whole = (values.double() * 2.0**20).numpy().astype(np.int64).astype(object)
    rows = (basis.synthesis(torch.device("cpu")).double() * 2.0**13).numpy().astype(np.int64)
    sums = whole[:, ::-1] @ rows[::-1].astype(object)
    return torch.from_numpy((sums / 2**33).astype(np.float64)).float()


@pytest.mark.parametrize("height", [1.0, 3000.0, 1e9])
@pytest.mark.parametrize("step", [0.02, 0.5])
def test_it_is_what_whole_numbers_make_in_another_order(
    height: float, step: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec, x, base = change_codec(step)
    x[7] = base[7] + height * low_rank(1)[0]
    encoded = codec.encode(x, base)
    expected = codec.decode(encoded, base)
    monkeypatch.setattr(directional, "_exact_product", exact_product)
    assert torch.equal(codec.decode(encoded, base), expected)
