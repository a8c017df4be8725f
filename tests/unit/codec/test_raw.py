"""The codecs `none`, `bf16` and `fp16`, and stored buffers of 16 bits."""

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarm_ft.codec import pack_buffer, unpack_buffer
from swarm_ft.codec.tensor import EncodedTensor
from swarm_ft.errors import BadFrame
from tests.codecs import parse
from tests.draws import draws

MAX_FLOAT = torch.finfo(torch.float32).max
MAX_BFLOAT16 = torch.finfo(torch.bfloat16).max
property_test = settings(derandomize=True, deadline=None, max_examples=draws(200))
floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
rows = st.lists(floats, min_size=1, max_size=12)
anywhere = st.tuples(rows, st.integers(-290, 127)).map(
    lambda case: [max(-1.0, min(1.0, v)) * 2.0 ** case[1] for v in case[0]]
)


def row(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).view(1, -1)


# ---- fp16 and stored buffers


@given(st.one_of(rows, anywhere))
@property_test
def test_error_is_half_an_ulp_of_the_value_or_2_to_the_minus_39_of_the_largest(
    values: list[float],
) -> None:
    x = row(values)
    y = unpack_buffer(pack_buffer(x), *x.shape)
    bound = torch.maximum(x.double().abs() * 2**-11, x.double().abs().max() * 2**-39)
    assert ((y.double() - x.double()).abs() <= bound).all()


@given(st.one_of(rows, anywhere))
@property_test
def test_packing_what_was_unpacked_gives_the_same_bytes(values: list[float]) -> None:
    once = pack_buffer(row(values))
    assert pack_buffer(unpack_buffer(once, 1, len(values))) == once


@pytest.mark.parametrize("values", [[65519.0], [65520.0], [2.0**15 * (1 - 2**-12)], [MAX_FLOAT]])
def test_values_that_round_up_to_a_power_of_two_are_stable_and_finite(values: list[float]) -> None:
    once = pack_buffer(row(values))
    y = unpack_buffer(once, 1, 1)
    assert y.item() == pytest.approx(values[0], rel=2**-11)
    assert pack_buffer(y) == once


@pytest.mark.parametrize("magnitude", [1e-45, 1e-38, 1e-30, 1e-8, 1e5, 1e30, MAX_FLOAT])
def test_no_magnitude_overflows_or_vanishes(magnitude: float) -> None:
    x = row([magnitude, -magnitude])
    assert torch.allclose(unpack_buffer(pack_buffer(x), 1, 2), x, rtol=2**-11, atol=0)


def test_powers_of_two_move_only_the_header() -> None:
    x = row([1.0, -0.3, 1e-3])
    body = pack_buffer(x)[2:]
    assert all(pack_buffer(x * 2.0**n)[2:] == body for n in (-100, -1, 1, 100))


def test_layout_is_exponent_then_halves() -> None:
    assert pack_buffer(row([1.0, -0.5])) == struct.pack("<hee", -14, 16384.0, -8192.0)


def test_signed_zeros_stay() -> None:
    x = row([0.0, -0.0])
    payload = pack_buffer(x)
    assert payload == struct.pack("<hee", 0, 0.0, -0.0)
    assert torch.equal(unpack_buffer(payload, 1, 2).signbit(), x.signbit())


@pytest.mark.parametrize(
    ("exponent", "half"),
    [
        (114, 16384.0),
        (-164, 16384.0),
        (0, 32768.0),
        (0, 16376.0),
        (0, float("inf")),
        (0, float("nan")),
        (1, 0.0),
    ],
)
def test_payloads_that_pack_never_writes_are_refused(exponent: int, half: float) -> None:
    with pytest.raises(BadFrame, match="expected"):
        unpack_buffer(struct.pack("<he", exponent, half), 1, 1)


def test_the_codec_writes_what_buffers_are_stored_as() -> None:
    x = row([1.0, -0.3, 1e-3])
    assert parse("fp16").encode(x).payload == pack_buffer(x)


def test_largest_and_smallest_exponents_decode() -> None:
    assert unpack_buffer(struct.pack("<he", 113, 32752.0), 1, 1).isfinite().all()
    assert unpack_buffer(struct.pack("<he", -163, 16384.0), 1, 1).item() == 2.0**-149


# ---- none and bf16


@given(st.one_of(rows, anywhere))
@property_test
def test_none_keeps_every_bit(values: list[float]) -> None:
    x, codec = row(values), parse("none")
    y = codec.decode(codec.encode(x))
    assert torch.equal(y.view(torch.int32), x.view(torch.int32))


@given(st.one_of(rows, anywhere))
@property_test
def test_bf16_errs_by_half_an_ulp(values: list[float]) -> None:
    x, codec = row(values), parse("bf16")
    y = codec.decode(codec.encode(x))
    error = (y.double() - x.double()).abs()
    smallest = torch.tensor(2.0**-134, dtype=torch.float64)  # half of the smallest bfloat16
    assert (error <= torch.maximum(x.double().abs() * 2**-8, smallest)).all()
    assert codec.encode(y).payload == codec.encode(x).payload


@pytest.mark.parametrize(
    ("value", "nearest"),
    [
        (1.0, 1.0),
        (1 + 2**-8, 1.0),  # a tie, to even
        (1 + 3 * 2**-8, 1 + 2**-6),
        (1 + 2**-8 + 2**-20, 1 + 2**-7),
        (-1 - 2**-7, -1 - 2**-7),
    ],
)
def test_bf16_rounds_to_nearest_even(value: float, nearest: float) -> None:
    codec = parse("bf16")
    assert codec.decode(codec.encode(row([value]))).item() == nearest


@pytest.mark.parametrize("sign", [1, -1])
def test_bf16_never_rounds_up_to_infinity(sign: int) -> None:
    codec = parse("bf16")
    x = row([sign * MAX_FLOAT, sign * 3.395e38])
    assert torch.equal(codec.decode(codec.encode(x)), torch.full((1, 2), sign * MAX_BFLOAT16))


def test_bf16_keeps_magnitudes_that_share_a_sample() -> None:
    codec, x = parse("bf16"), row([1e38, 1.0, 1e-30, -1e-38])
    assert torch.allclose(codec.decode(codec.encode(x)), x, rtol=2**-8, atol=0)


def test_layouts_are_little_endian_in_c_order() -> None:
    x = torch.tensor([[1.0, -2.0], [0.5, 0.0]])
    assert parse("none").encode(x).payload == struct.pack("<4f", 1.0, -2.0, 0.5, 0.0)
    assert parse("bf16").encode(x).payload == struct.pack("<4H", 0x3F80, 0xC000, 0x3F00, 0)
    assert parse("none").encode(x.T).payload == struct.pack("<4f", 1.0, 0.5, -2.0, 0.0)


@pytest.mark.parametrize(
    ("name", "payload"),
    [
        ("none", struct.pack("<f", float("inf"))),
        ("none", struct.pack("<f", float("nan"))),
        ("bf16", struct.pack("<H", 0x7F80)),
        ("bf16", struct.pack("<H", 0xFF80)),
        ("bf16", struct.pack("<H", 0x7FC0)),
    ],
)
def test_values_that_are_not_finite_are_refused(name: str, payload: bytes) -> None:
    codec = parse(name)
    with pytest.raises(BadFrame, match="finite"):
        codec.decode(EncodedTensor(codec.spec, 1, 1, payload))


def test_values_whose_sum_overflows_are_finite_all_the_same() -> None:
    x = row([MAX_BFLOAT16] * 8 + [-MAX_BFLOAT16] * 3)
    for name in ("none", "bf16"):
        assert torch.equal(parse(name).decode(parse(name).encode(x)), x)
