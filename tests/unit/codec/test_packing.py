"""Bits to bytes and back, for every width."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_ft.codec.packing import pack, packed_bytes, unpack

WIDTHS = range(2, 9)
property_test = settings(derandomize=True, deadline=None, max_examples=100)


def bit_by_bit(codes: list[int], bits: int) -> bytes:
    """The same stream, made the slow and plain way."""
    text = "".join(f"{code:0{bits}b}" for code in codes)
    text += "0" * (-len(text) % 8)
    return bytes(int(text[i : i + 8], 2) for i in range(0, len(text), 8))


@st.composite
def code_lists(draw):
    bits = draw(st.sampled_from(WIDTHS))
    return draw(st.lists(st.integers(0, 2**bits - 1), min_size=1, max_size=70)), bits


@given(code_lists())
@property_test
def test_stream_is_most_significant_bit_first_with_a_zero_tail(case):
    codes, bits = case
    assert pack(np.array(codes, np.uint8), bits) == bit_by_bit(codes, bits)


@given(code_lists())
@property_test
def test_unpack_inverts_pack(case):
    codes, bits = case
    stream = pack(np.array(codes, np.uint8), bits)
    assert len(stream) == packed_bytes(len(codes), bits)
    assert unpack(stream, len(codes), bits).tolist() == codes


@given(st.binary(min_size=1, max_size=80), st.sampled_from(WIDTHS))
@property_test
def test_any_bytes_unpack_to_codes_that_pack_to_the_same_bytes(stream, bits):
    stream += bytes(-len(stream) % bits)
    assert pack(unpack(stream, len(stream) * 8 // bits, bits), bits) == stream


def test_published_example_of_three_bits():
    codes = np.arange(13, dtype=np.uint8) % 8
    assert pack(codes, 3).hex() == "0539770538"


def test_codes_are_taken_in_c_order_whatever_their_strides():
    codes = np.arange(6, dtype=np.uint8).reshape(2, 3)
    assert pack(codes.T, 4) == pack(np.array([0, 3, 1, 4, 2, 5], np.uint8), 4)


@pytest.mark.parametrize("bits", WIDTHS)
def test_unpacked_codes_are_a_writable_copy(bits):
    codes = unpack(bytes(packed_bytes(9, bits)), 9, bits)
    codes[:] = 1
    assert codes.sum() == 9
