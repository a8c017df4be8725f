"""The `aqB` codecs: two ends of a boundary over many visits of one sample."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_ft.codec import KEY_CODEC, pack_buffer, parse, unpack_buffer
from swarm_ft.errors import BadFrame, NonFinite
from swarm_ft.protocol.frame import EncodedTensor

WIDTHS = range(2, 9)
MAX_FLOAT = torch.finfo(torch.float32).max
property_test = settings(derandomize=True, deadline=None, max_examples=20)


def gaussian(tokens, channels, seed=0):
    return torch.randn(tokens, channels, generator=torch.Generator().manual_seed(seed))


class BoundaryEnd:
    """One end: a codec and the stored form of its buffer."""

    def __init__(self, bits):
        self.codec = parse(f"aq{bits}")
        self.stored = b""

    def send(self, x):
        codec, base = self._codec_and_base(x.shape)
        encoded = codec.encode(x, base)
        self.receive(encoded)
        return encoded

    def receive(self, encoded):
        codec, base = self._codec_and_base((encoded.tokens, encoded.channels))
        y = codec.decode(encoded, base)
        self.stored = pack_buffer(y)
        return y

    def _codec_and_base(self, shape):
        if not self.stored:
            return KEY_CODEC, None
        return self.codec, unpack_buffer(self.stored, *shape)


def visit(sender, receiver, x):
    y = receiver.receive(sender.send(x))
    assert sender.stored == receiver.stored
    return ((y - x).norm() / x.norm()).item()


@pytest.mark.parametrize("bits", WIDTHS)
@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 12)),
    seed=st.integers(0, 1000),
    magnitude=st.sampled_from([1e-30, 1e-4, 1.0, 1e5, 1e30]),
)
@property_test
def test_both_ends_hold_the_same_bytes_after_every_visit(bits, shape, seed, magnitude):
    sender, receiver = BoundaryEnd(bits), BoundaryEnd(bits)
    for step in range(6):
        x = (gaussian(*shape, seed) + gaussian(*shape, seed + step) * 0.5**step) * magnitude
        visit(sender, receiver, x)


@pytest.mark.parametrize(("bits", "contraction"), [(2, 0.6), (3, 0.35), (4, 0.2), (8, 0.02)])
def test_error_on_a_fixed_value_contracts_to_the_buffers_precision(bits, contraction):
    sender, receiver = BoundaryEnd(bits), BoundaryEnd(bits)
    visit(sender, receiver, gaussian(64, 16, seed=1))
    x = gaussian(64, 16)
    errors = [visit(sender, receiver, x) for _ in range(20)]
    assert errors[0] < 1.5 * contraction
    for before, after in pairwise(errors):
        assert after <= contraction * before + 2**-12
    assert errors[-1] <= 2**-12


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_error_follows_a_drift_that_shrinks(bits):
    sender, receiver = BoundaryEnd(bits), BoundaryEnd(bits)
    x, errors = gaussian(64, 16), []
    for step in range(8):
        x = x + gaussian(64, 16, seed=step + 1) * 0.2 * 0.5**step
        errors.append(visit(sender, receiver, x))
    direct = parse(f"q{bits}")
    plain = ((direct.decode(direct.encode(x)) - x).norm() / x.norm()).item()
    assert errors[-1] < plain / 10


def test_a_fixed_point_stays():
    codec, base = parse("aq4"), unpack_buffer(pack_buffer(gaussian(9, 5)), 9, 5)
    assert torch.equal(codec.decode(codec.encode(base, base), base), base)


@pytest.mark.parametrize("bits", WIDTHS)
def test_the_result_has_one_rounding_of_base_plus_code_times_scale(bits):
    base, change = gaussian(50, 7), gaussian(50, 7, seed=1) * 0.01
    codec, direct = parse(f"aq{bits}"), parse(f"q{bits}")
    payload = direct.encode(change).payload
    y = codec.decode(EncodedTensor(codec.spec, 50, 7, payload), base)
    delta = direct.decode(EncodedTensor(direct.spec, 50, 7, payload))
    assert torch.equal(y, (base.double() + delta.double()).float())


def test_error_is_relative_to_the_change_not_to_the_value():
    base = gaussian(64, 16) * 1000
    x = base + gaussian(64, 16, seed=1) * 0.01
    codec = parse("aq4")
    assert (codec.decode(codec.encode(x, base), base) - x).norm() < 0.2 * (x - base).norm()


def test_a_missing_base_is_refused_at_both_ends():
    codec, x = parse("aq4"), gaussian(3, 2)
    with pytest.raises(BadFrame, match="key frame"):
        codec.encode(x)
    with pytest.raises(BadFrame, match="key frame"):
        codec.decode(codec.encode(x, x))


@pytest.mark.parametrize("base", [torch.zeros(2, 3), torch.zeros(6), torch.zeros(3, 2).double()])
def test_a_base_of_another_shape_or_type_is_refused_at_both_ends(base):
    codec, x = parse("aq4"), gaussian(3, 2)
    with pytest.raises(BadFrame, match="base: expected"):
        codec.encode(x, base)
    with pytest.raises(BadFrame, match="base: expected"):
        codec.decode(codec.encode(x, x), base)


def test_a_change_beyond_float32_is_not_encoded():
    x = torch.full((2, 2), MAX_FLOAT)
    with pytest.raises(NonFinite):
        parse("aq4").encode(x, -x)


def test_a_delta_that_takes_the_base_out_of_range_is_refused():
    base = torch.full((1, 1), MAX_FLOAT)
    codec = parse("aq8")
    payload = parse("q8").encode(base).payload
    with pytest.raises(BadFrame, match="finite"):
        codec.decode(EncodedTensor(codec.spec, 1, 1, payload), base)
