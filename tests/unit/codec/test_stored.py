"""Stored buffers of 8 and 4 bits; `test_raw` has those of 16 bits."""

import contextlib
import struct
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarm_ft.codec import buffer_bytes, pack_buffer, unpack_buffer
from swarm_ft.codec.kernels.base import BLOCK, scale_of
from swarm_ft.codec.kernels.reference import ReferenceKernels
from swarm_ft.errors import BadFrame, NonFinite
from tests.codecs import parse
from tests.draws import draws

MAX_FLOAT = torch.finfo(torch.float32).max
property_test = settings(derandomize=True, deadline=None, max_examples=draws(100))
few_bits = pytest.mark.parametrize("bits", [8, 4])
floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
magnitudes = st.sampled_from([1e-45, 1e-38, 1e-30, 1e-8, 1.0, 1e5, 1e30, 1e38])
HEAD = 4
"""Bytes before the channels' scales."""


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Random values, normal ones with outliers, or both."""
    tokens, channels = draw(st.integers(1, 9)), draw(st.integers(1, 3 * BLOCK + 1))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    x = torch.randn(tokens, channels, generator=generator)
    x *= torch.randn(channels, generator=generator).mul(draw(st.integers(0, 6))).exp()
    x = (x.double() * draw(magnitudes)).clamp(-MAX_FLOAT, MAX_FLOAT).float()
    for _ in range(draw(st.integers(0, 4))):
        x[draw(st.integers(0, tokens - 1)), draw(st.integers(0, channels - 1))] = draw(floats)
    return x


def unpack_like(x: Tensor, payload: bytes, bits: int) -> Tensor:
    tokens, channels = x.shape
    return unpack_buffer(payload, tokens, channels, bits)


def stored(x: Tensor, bits: int) -> Tensor:
    return unpack_like(x, pack_buffer(x, bits), bits)


def channel_scales(payload: bytes, channels: int) -> Tensor:
    """Return the payload's channel scales as float64, with the sample's exponent."""
    (exponent,) = struct.unpack_from("<h", payload)
    patterns = torch.from_numpy(np.frombuffer(payload, "<u2", channels, HEAD).astype(np.int32))
    scales: Tensor = scale_of(patterns).double() * 2.0**exponent
    return scales


def block_peaks(x: Tensor) -> Tensor:
    """Return the largest magnitude of each value's block."""
    padded = torch.nn.functional.pad(x.abs(), (0, -x.shape[1] % BLOCK))
    peaks = padded.view(len(x), -1, BLOCK).amax(2)
    return peaks.repeat_interleave(BLOCK, 1)[:, : x.shape[1]]


def relative_error(y: Tensor, x: Tensor) -> float:
    return float((y.double() - x).norm() / x.double().norm())


# ---- errors


@few_bits
@given(x=tensors())
@property_test
def test_the_error_is_bounded_by_the_blocks_largest_value_in_its_channels_scales(
    bits: int, x: Tensor
) -> None:
    payload = pack_buffer(x, bits)
    y = unpack_like(x, payload, bits)
    assert y.isfinite().all()
    scales = channel_scales(payload, x.shape[1])
    even = x.double() / scales
    bound = 0.6 * 2.0 ** (1 - bits) * block_peaks(even)
    floor = even.abs().max() * 2.0**-30  # blocks that are as good as zero beside the largest
    allowed = torch.maximum(bound, floor) * scales * (1 + 1e-6) + 2.0**-150  # no float32 is smaller
    assert ((y.double() - x.double()).abs() <= allowed).all()


@pytest.mark.parametrize(("bits", "error"), [(8, 0.0065), (4, 0.105)])
def test_the_error_of_normal_values_whatever_their_channels_and_tokens_scales(
    bits: int, error: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(128, 256, generator=generator)
    assert relative_error(stored(x, bits), x) < error
    scales = torch.randn(256, generator=generator).exp(), torch.randn(128, generator=generator)
    x = x * scales[0] * scales[1].exp()[:, None]
    assert relative_error(stored(x, bits), x) < error


@few_bits
@pytest.mark.parametrize("magnitude", [1e-45, 1e-38, 1e-30, 1e-8, 1e5, 1e30, MAX_FLOAT])
def test_no_magnitude_overflows_or_vanishes(bits: int, magnitude: float) -> None:
    x = torch.tensor([[magnitude, -magnitude]])
    assert torch.allclose(stored(x, bits), x, rtol=0.08, atol=0)


@few_bits
@given(x=tensors(), power=st.integers(-60, 60))
@property_test
def test_beyond_ordinary_sizes_powers_of_two_move_only_the_header(
    bits: int, x: Tensor, power: int
) -> None:
    x = x.clamp(-1, 1)
    x[0, 0] = 1.0
    small, large = (pack_buffer(x * 2.0**n, bits) for n in (power - 60, power + 60))
    if abs(power - 60) > 40 and abs(power + 60) > 40 and (x.abs() > 2.0**-20).all():
        assert small[2:] == large[2:]


@few_bits
def test_zeros_stay_zeros(bits: int) -> None:
    assert not stored(torch.zeros(3, 70), bits).any()
    x = torch.randn(6, 100, generator=torch.Generator().manual_seed(0))
    x[:, 7], x[2], x[4, 32:64], x[5, ::3] = 0.0, 0.0, 0.0, 0.0
    y = stored(x, bits)
    assert not y[x == 0].any()
    assert relative_error(y, x) < (0.2 if bits == 4 else 0.01)


def residual_stream(tokens: int = 64, channels: int = 160) -> tuple[Tensor, list[tuple[int, int]]]:
    """Return normal values, with channels that are always large and massive activations."""
    x = torch.randn(tokens, channels, generator=torch.Generator().manual_seed(3))
    x[:, 5] = x[:, 5] * 3 + 80
    x[:, 90] *= 300
    massive = [(0, 17), (0, 130), (40, 17)]
    for number, place in enumerate(massive):
        x[place] = (-1) ** number * 1e5 * (1 + number)
    return x, massive


@pytest.mark.parametrize(("bits", "error"), [(8, 0.007), (4, 0.12)])
def test_massive_activations_survive_and_cost_no_other_token_and_no_other_block(
    bits: int, error: float
) -> None:
    x, massive = residual_stream()
    y = stored(x, bits)
    beside = torch.zeros_like(x, dtype=torch.bool)
    for t, c in massive:
        assert y[t, c].item() == pytest.approx(x[t, c].item(), rel=0.08)
        beside[t, c // BLOCK * BLOCK : (c // BLOCK + 1) * BLOCK] = True
    for c in range(x.shape[1]):
        others = ~beside[:, c]
        assert relative_error(y[others, c], x[others, c]) < 1.7 * error, c
    kept = torch.where(beside, 0.0, x)
    kept[:, [5, 90]] = 0.0
    assert relative_error(torch.where(kept == 0, 0.0, y), kept) < error


# ---- the same bytes everywhere


@few_bits
@given(x=tensors())
@property_test
def test_plain_torch_and_loops_write_and_read_the_same_bytes(bits: int, x: Tensor) -> None:
    fast = pack_buffer(x, bits)
    y = unpack_like(x, fast, bits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("swarm_ft.codec.stored.kernels_for", lambda _: ReferenceKernels())
        assert pack_buffer(x, bits) == fast
        assert torch.equal(unpack_like(x, fast, bits), y)


@few_bits
def test_memory_order_and_graphs_do_not_matter(bits: int) -> None:
    x = torch.randn(40, 24, generator=torch.Generator().manual_seed(0))
    payload = pack_buffer(x, bits)
    assert pack_buffer(x.T.contiguous().T, bits) == payload
    assert pack_buffer(x.clone().requires_grad_(), bits) == payload


def test_layout_is_head_then_scales_of_channels_and_blocks_then_codes() -> None:
    # The channels' means are 2 and 1, so rows are 1 and -1 in their scales, or 0. The least scale
    # that brings 1 to 7.5 or less is 9/64; 1 is 7.1 of it. With 8 bits it is 9/1024, 113.8.
    x = torch.tensor([[2.0, -1.0], [0.0, 0.0], [2.0, -1.0]])
    scales = struct.pack("<2H", 128 * 8, 127 * 8) + bytes([255, 0, 255])
    head = struct.pack("<hH", 0, 124 * 8 + 1)
    codes = [15, 1, 8, 8, 15, 1, 0, 0]  # those of 4 bits come in eights
    packed = bytes(upper << 4 | lower for upper, lower in zip(codes[:4], codes[4:], strict=True))
    assert pack_buffer(x, 4) == head + scales + packed
    head = struct.pack("<hH", 0, 120 * 8 + 1)
    packed = bytes([128 + 114, 128 - 114, 128, 128, 128 + 114, 128 - 114, 0, 0])
    assert pack_buffer(x, 8) == head + scales + packed


def test_sizes_follow_from_the_shape() -> None:
    assert buffer_bytes(1024, 1600, 16) == 2 + 2 * 1024 * 1600
    assert buffer_bytes(1024, 1600, 8) == 4 + 2 * 1600 + 1024 * 50 + 1024 * 1600
    assert buffer_bytes(1024, 1600, 4) == 4 + 2 * 1600 + 1024 * 50 + 1024 * 800
    for bits in (16, 8, 4):
        x = torch.randn(7, 33)
        assert len(pack_buffer(x, bits)) == buffer_bytes(7, 33, bits)


# ---- what is refused


@few_bits
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_values_that_are_not_finite_are_refused(bits: int, value: float) -> None:
    x = torch.randn(3, 50)
    x[1, 40] = value
    with pytest.raises(NonFinite, match="expected finite values"):
        pack_buffer(x, bits)


@few_bits
@pytest.mark.parametrize("x", [torch.randn(2, 3, 4), torch.randn(4).double(), torch.empty(0, 3)])
def test_other_tensors_are_refused(bits: int, x: Tensor) -> None:
    with pytest.raises(BadFrame, match="expected float32"):
        pack_buffer(x, bits)


@few_bits
@pytest.mark.parametrize("change", [lambda p: p[:-1], lambda p: p + b"\0", lambda _: b""])
def test_torn_payloads_are_refused(bits: int, change: Callable[[bytes], bytes]) -> None:
    with pytest.raises(BadFrame, match=f"{bits} bits of \\[4, 40\\] take"):
        unpack_buffer(change(pack_buffer(torch.ones(4, 40), bits)), 4, 40, bits)


def test_a_payload_of_other_bits_is_refused() -> None:
    payloads = {bits: pack_buffer(torch.ones(4, 40), bits) for bits in (16, 8, 4)}
    for written, payload in payloads.items():
        for read in {16, 8, 4} - {written}:
            with pytest.raises(BadFrame):
                unpack_buffer(payload, 4, 40, read)


@few_bits
@pytest.mark.parametrize(
    ("at", "number", "complaint"),
    [
        (0, 128, "an exponent within"),
        (0, 0x10000 - 150, "an exponent within"),
        (2, 254, "a scale from 255"),
        (2, 1337, "a scale from 255 to 1336"),
        (HEAD, 375, "scales from 376"),
        (HEAD + 2 * 39, 1337, "scales from 376 to 1336, got 1337"),
    ],
)
def test_scales_that_pack_never_writes_are_refused(
    bits: int, at: int, number: int, complaint: str
) -> None:
    payload = bytearray(pack_buffer(torch.ones(4, 40), bits))
    payload[at : at + 2] = struct.pack("<H", number)
    with pytest.raises(BadFrame, match=complaint):
        unpack_buffer(bytes(payload), 4, 40, bits)


@few_bits
@given(data=st.data())
@property_test
def test_any_bytes_are_refused_or_finite(bits: int, data: st.DataObject) -> None:
    exponent = data.draw(st.integers(-149, 127))
    scales = data.draw(st.lists(st.integers(376, 1336), min_size=33, max_size=33))
    head = struct.pack("<hH33H", exponent, data.draw(st.integers(255, 1336)), *scales)
    rest = data.draw(st.binary(min_size=4 + 66 * bits // 8 + 8, max_size=4 + 66 * bits // 8 + 8))
    size = buffer_bytes(2, 33, bits)
    assert unpack_buffer((head + rest)[:size], 2, 33, bits).isfinite().all()
    junk = data.draw(st.binary(min_size=size, max_size=size))
    with contextlib.suppress(BadFrame):
        assert unpack_buffer(junk, 2, 33, bits).isfinite().all()


# ---- AQ-SGD with coarse buffers


class Sample:
    """Sample that crosses a boundary: its decoded value and its buffer."""

    def __init__(self, codec: str, x: Tensor, bits: int) -> None:
        self.codec, self.bits = parse(codec), bits
        key = parse("fp16")
        self.payload = pack_buffer(key.decode(key.encode(x)), bits)

    def visit(self, x: Tensor) -> tuple[float, float]:
        """Return the relative errors of the decoded value and of the buffer."""
        base = unpack_like(x, self.payload, self.bits)
        y = self.codec.decode(self.codec.encode(x, base), base)
        self.payload = pack_buffer(y, self.bits)
        return relative_error(y, x), relative_error(unpack_like(x, self.payload, self.bits), x)


def activation(seed: int = 0, tokens: int = 64, channels: int = 128) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    scales = torch.randn(channels, generator=generator).exp()
    return torch.randn(tokens, channels, generator=generator) * scales


@pytest.mark.parametrize(
    ("codec", "of_change"), [("aq4", 0.12), ("aq3", 0.21), ("aq2", 0.36), ("aq2+z", 0.34)]
)
@pytest.mark.parametrize(("bits", "of_buffer"), [(16, 2**-11), (8, 0.006), (4, 0.1)])
def test_a_fixed_activation_settles_where_the_change_is_the_buffers_rounding(
    codec: str, of_change: float, bits: int, of_buffer: float
) -> None:
    x = activation()
    sample = Sample(codec, activation(seed=1), bits)
    errors = [sample.visit(x) for _ in range(14)]
    # The rounding of the buffer is all that is left to send.
    assert max(used for used, _ in errors[-4:]) < of_change * of_buffer * 1.3 + 2e-4
    assert max(kept for _, kept in errors[-4:]) < of_buffer * 1.2
    assert errors[0][0] > 3 * errors[-1][0]


@pytest.mark.parametrize("codec", ["aq4", "aq2"])
def test_while_drift_shrinks_coarse_buffers_cost_what_their_own_rounding_does(codec: str) -> None:
    x, drift = activation(), activation(seed=2)
    samples = {bits: Sample(codec, x, bits) for bits in (16, 8, 4)}
    of_change = 0.12 if codec == "aq4" else 0.36
    for visit in range(10):
        x = x + drift * 0.2 / 2**visit
        used = {bits: sample.visit(x)[0] for bits, sample in samples.items()}
        assert used[8] < used[16] + of_change * 0.006 * 1.5
        assert used[4] < used[16] + of_change * 0.1 * 1.5
    assert used[16] < 0.001 * (1 if codec == "aq4" else 30)
