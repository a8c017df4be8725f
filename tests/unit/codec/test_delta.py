"""The delta codec around any other: two ends over many visits, and refusals."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarm_ft.codec.base import Codec
from swarm_ft.codec.feedback import DeltaCodec
from swarm_ft.codec.raw import Float32Codec, HalfCodec
from swarm_ft.codec.spec import CodecSpec, Direction, parse_codec_spec
from swarm_ft.codec.tensor import EncodedTensor
from swarm_ft.codec.topk import TopKCodec
from swarm_ft.errors import BadFrame, NonFinite
from tests.draws import draws

MAX_FLOAT = torch.finfo(torch.float32).max
FAMILIES: dict[str, Callable[[CodecSpec], Codec]] = {
    "top": TopKCodec,
    "fp1": HalfCodec,
    "non": Float32Codec,
}
DELTAS = {
    "aqtop10": "top10",
    "aqtop30+z": "top30",
    "top10+ef21": "top10",
    "fp16+ef21": "fp16",
}
property_test = settings(derandomize=True, deadline=None, max_examples=draws(20))
every_delta = pytest.mark.parametrize("name", DELTAS)


def gaussian(tokens: int, channels: int, seed: int = 0) -> Tensor:
    return torch.randn(tokens, channels, generator=torch.Generator().manual_seed(seed))


def direct(name: str) -> Codec:
    return FAMILIES[name[:3]](parse_codec_spec(name, Direction.BACKWARD))


def delta(name: str) -> DeltaCodec:
    direction = Direction.FORWARD if name.startswith("aq") else Direction.BACKWARD
    return DeltaCodec(parse_codec_spec(name, direction), direct(DELTAS[name]))


def relative(y: Tensor, x: Tensor) -> float:
    return float((y - x).norm() / x.norm())


@every_delta
@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 12)),
    seed=st.integers(0, 1000),
    magnitude=st.sampled_from([1e-30, 1e-4, 1.0, 1e5, 1e30]),
)
@property_test
def test_both_ends_hold_the_same_values_after_every_visit(
    name: str, shape: tuple[int, int], seed: int, magnitude: float
) -> None:
    sender, receiver = delta(name), delta(name)
    ours = theirs = gaussian(*shape, seed) * magnitude
    for step in range(4):
        x = (gaussian(*shape, seed) + gaussian(*shape, seed + step) * 0.5**step) * magnitude
        encoded = sender.encode(x, ours)
        assert encoded.codec == sender.spec
        assert len(encoded.payload) <= sender.max_payload_bytes(*shape)
        ours = sender.decode(encoded, ours)
        theirs = receiver.decode(EncodedTensor.from_bytes(encoded.to_bytes()), theirs)
        assert torch.equal(ours, theirs)


@every_delta
def test_the_payload_is_that_of_the_change(name: str) -> None:
    codec, x, base = delta(name), gaussian(30, 16), gaussian(30, 16, seed=1)
    assert codec.encode(x, base).payload == codec.inner.encode(x - base).payload
    assert codec.max_payload_bytes(30, 16) == codec.inner.max_payload_bytes(30, 16)


@every_delta
def test_the_result_has_one_rounding_of_base_plus_change(name: str) -> None:
    codec, base, change = delta(name), gaussian(50, 7), gaussian(50, 7, seed=1) * 0.01
    payload = codec.inner.encode(change).payload
    y = codec.decode(EncodedTensor(codec.spec, 50, 7, payload), base)
    decoded = codec.inner.decode(EncodedTensor(codec.inner.spec, 50, 7, payload))
    assert torch.equal(y, (base.double() + decoded.double()).float())


@pytest.mark.parametrize(("name", "visits"), [("aqtop10", 40), ("aqtop30+z", 12)])
def test_error_on_a_fixed_value_contracts_to_nearly_nothing(name: str, visits: int) -> None:
    codec, x, held = delta(name), gaussian(64, 16), gaussian(64, 16, seed=1)
    errors = []
    for _ in range(visits):
        held = codec.decode(codec.encode(x, held), held)
        errors.append(relative(held, x))
    assert all(after < before or after < 1e-6 for before, after in pairwise(errors))
    assert errors[-1] < 1e-3


def test_error_is_relative_to_the_change_not_to_the_value() -> None:
    base, codec = gaussian(64, 16) * 1000, delta("fp16+ef21")
    x = base + gaussian(64, 16, seed=1) * 0.01
    assert (codec.decode(codec.encode(x, base), base) - x).norm() < (x - base).norm()


@every_delta
def test_a_fixed_point_stays(name: str) -> None:
    codec, base = delta(name), gaussian(9, 5)
    assert torch.equal(codec.decode(codec.encode(base, base), base), base)


@every_delta
def test_a_missing_base_is_refused_at_both_ends(name: str) -> None:
    codec, x = delta(name), gaussian(3, 2)
    with pytest.raises(BadFrame, match="send a key frame"):
        codec.encode(x)
    with pytest.raises(BadFrame, match="send a key frame"):
        codec.decode(codec.encode(x, x))


@pytest.mark.parametrize("base", [torch.zeros(2, 3), torch.zeros(6), torch.zeros(3, 2).double()])
def test_a_base_of_another_shape_or_type_is_refused_at_both_ends(base: Tensor) -> None:
    codec, x = delta("aqtop10"), gaussian(3, 2)
    with pytest.raises(BadFrame, match="base: expected"):
        codec.encode(x, base)
    with pytest.raises(BadFrame, match="base: expected"):
        codec.decode(codec.encode(x, x), base)


@every_delta
def test_frames_of_the_codec_inside_are_not_frames_of_the_delta(name: str) -> None:
    codec, x = delta(name), gaussian(8, 8)
    with pytest.raises(BadFrame, match="expected codec"):
        codec.decode(codec.inner.encode(x), x)


@every_delta
def test_payloads_that_the_codec_inside_refuses_are_refused(name: str) -> None:
    codec, x = delta(name), gaussian(8, 8)
    good = codec.encode(x, x * 2).payload
    for payload in (b"", good[:-1], good + b"\0"):
        with pytest.raises(BadFrame, match="takes"):
            codec.decode(EncodedTensor(codec.spec, 8, 8, payload), x)


@every_delta
def test_a_change_that_is_not_finite_is_not_encoded(name: str) -> None:
    huge, nan = torch.full((2, 2), MAX_FLOAT), torch.full((2, 2), torch.nan)
    for x, base in ((huge, -huge), (nan, huge), (huge, nan)):
        with pytest.raises(NonFinite):
            delta(name).encode(x, base)


def test_a_change_that_takes_the_base_out_of_range_is_refused() -> None:
    codec, base = delta("fp16+ef21"), torch.full((1, 1), MAX_FLOAT)
    forged = EncodedTensor(codec.spec, 1, 1, codec.inner.encode(base).payload)
    with pytest.raises(BadFrame, match="finite"):
        codec.decode(forged, base)


def test_neither_end_changes_what_it_was_given() -> None:
    codec, x, base = delta("aqtop30+z"), gaussian(6, 4), gaussian(6, 4, seed=1)
    kept_x, kept_base = x.clone(), base.clone()
    codec.decode(codec.encode(x, base), base)
    assert torch.equal(x, kept_x)
    assert torch.equal(base, kept_base)
