"""Prediction from the last gradient: gains, rates, both ends, hostile bytes."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarm_ft.codec.base import Codec
from swarm_ft.codec.feedback import PredictiveCodec
from swarm_ft.codec.kernels.base import packed_bytes
from swarm_ft.codec.spec import Direction
from swarm_ft.codec.tensor import EncodedTensor
from swarm_ft.errors import BadFrame, NonFinite
from tests.codecs import parse
from tests.draws import draws

MAX_FLOAT = torch.finfo(torch.float32).max
FRAME_BYTES = 80
"""Of a frame beside its tensor."""
NAMES = ["q1+z+last", "q3t+z+last", "q2t+last", "qc0.5+d+last", "top20+last", "fp16+last"]
every_name = pytest.mark.parametrize("name", NAMES)
property_test = settings(derandomize=True, deadline=None, max_examples=draws(15))


def gaussian(tokens: int, channels: int, seed: int = 0) -> Tensor:
    return torch.randn(tokens, channels, generator=torch.Generator().manual_seed(seed))


def shared(name: str) -> PredictiveCodec:
    codec = parse(name, Direction.BACKWARD)
    assert isinstance(codec, PredictiveCodec)
    return codec


def error(codec: Codec, x: Tensor, base: Tensor) -> float:
    """Return the squared error relative to x's square."""
    y = codec.decode(codec.encode(x, base), base)
    return float((y - x).square().sum() / x.square().sum())


def shares_of(encoded: EncodedTensor) -> list[int]:
    """Return the gains in a frame of up to 8 tokens, in planes of 2 bits and of 1."""
    upper, lowest = int.from_bytes(encoded.payload[:2], "big"), encoded.payload[2]
    # Byte j of the first plane holds codes j, j + 2, j + 4, j + 6.
    pairs = [(upper >> 8 * (1 - t % 2) >> 2 * (3 - t // 2)) & 3 for t in range(8)]
    return [2 * pair + (lowest >> (7 - t) & 1) for t, pair in enumerate(pairs)][: encoded.tokens]


@every_name
@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 12)),
    seed=st.integers(0, 1000),
    magnitude=st.sampled_from([1e-30, 1e-4, 1.0, 1e5, 1e30]),
)
@property_test
def test_both_ends_hold_the_same_values_after_every_visit(
    name: str, shape: tuple[int, int], seed: int, magnitude: float
) -> None:
    sender, receiver = shared(name), shared(name)
    ours = theirs = gaussian(*shape, seed) * magnitude
    for step in range(4):
        x = (gaussian(*shape, seed) + gaussian(*shape, seed + step) * 0.5**step) * magnitude
        encoded = sender.encode(x, ours)
        assert len(encoded.payload) <= sender.max_payload_bytes(*shape)
        came = EncodedTensor.from_bytes(encoded.to_bytes())
        value, read = sender.encode_and_decode(x, ours)[1], receiver.decode(came, theirs)
        assert torch.equal(value, read)
        ours, theirs = (
            sender.next_base(encoded, value, ours),
            receiver.next_base(came, read, theirs),
        )
        assert torch.equal(ours, theirs)
        assert ours.isfinite().all()


def test_every_token_has_the_share_that_leaves_least() -> None:
    base = gaussian(8, 64)
    parts = torch.tensor([0.0, 0.26, 0.5, 0.7, 1.0, 1.3, 1.75, 9.0])
    x = base * parts[:, None]
    x[0] = -base[0]
    assert shares_of(shared("q4t+last").encode(x, base)) == [0, 1, 2, 3, 4, 5, 7, 7]


@pytest.mark.parametrize("name", ["q1+z+last", "q2t+last"])
def test_tokens_that_shrank_or_grew_cost_no_more_than_those_that_stayed(name: str) -> None:
    base = gaussian(128, 128)
    parts = torch.tensor([0.25, 0.5, 1.0, 1.5]).repeat(32)[:, None]
    x = base * parts + gaussian(128, 128, seed=1) * parts / 5
    plain = parse(name.replace("+last", "+ef21"), Direction.BACKWARD)
    assert error(shared(name), x, base) < 0.04
    assert error(shared(name), x, base) < error(plain, x, base) / 2


def test_noise_of_the_last_gradient_is_not_taken_over() -> None:
    # Of a base with as much noise as signal half tells most: the rest is then 1/2, not 1.
    gradient = gaussian(128, 128)
    base = gradient + gaussian(128, 128, seed=1)
    assert error(shared("q1+z+last"), gradient, base) < 0.65 * error(
        parse("q1+z+ef21", Direction.BACKWARD), gradient, base
    )


def test_what_was_sent_at_one_bit_gets_better_from_visit_to_visit() -> None:
    codec, x = shared("q1+z+last"), gaussian(128, 128)
    held, errors = torch.zeros(128, 128), []
    for _ in range(6):
        encoded = codec.encode(x, held)
        assert (len(encoded.to_bytes()) + FRAME_BYTES) * 8 <= 1.01 * x.numel()
        value = codec.decode(encoded, held)
        held = codec.next_base(encoded, value, held)
        errors.append(float((value - x).square().sum() / x.square().sum()))
    assert all(after < 0.75 * before for before, after in pairwise(errors[:4]))
    assert errors[-1] < 0.1


@pytest.mark.parametrize(("name", "most"), [("q0.5", 0.35), ("q0.7", 0.5), ("q1", 0.7), ("q2", 1)])
def test_noise_of_dither_is_used_and_not_kept(name: str, most: float) -> None:
    codec, x, base = shared(f"{name}+z+last"), gaussian(128, 128), torch.zeros(128, 128)
    encoded, value = codec.encode_and_decode(x, base)
    kept = codec.next_base(encoded, value, base)
    assert (value - x).mul(x).sum().abs() < 0.03 * x.square().sum(), "in the mean all of it is used"
    assert (kept - x).square().sum() < most * (value - x).square().sum()
    nearest = float((value * x).sum() / value.square().sum())
    assert float((kept * value).sum() / value.square().sum()) == pytest.approx(nearest, abs=0.1)


@pytest.mark.parametrize("name", ["q2t+last", "q2t+z+last", "qc0.5+d+last", "top20+last"])
def test_of_other_codecs_all_is_kept(name: str) -> None:
    codec, x, base = shared(name), gaussian(16, 24), gaussian(16, 24, seed=1)
    encoded, value = codec.encode_and_decode(x, base)
    assert torch.equal(codec.next_base(encoded, value, base), value)


def test_what_is_kept_of_the_largest_values_is_finite() -> None:
    codec, base = shared("q1+z+last"), gaussian(8, 8).clamp(-1, 1) * (MAX_FLOAT / 4)
    encoded, value = codec.encode_and_decode(-base, base)
    assert codec.next_base(encoded, value, base).isfinite().all()


@pytest.mark.parametrize("channels", [32, 128, 512])
def test_shares_are_part_of_the_rate(channels: int) -> None:
    x, base = gaussian(256, channels), gaussian(256, channels, seed=1)
    encoded = shared("q2+z+last").encode(x, base)
    assert 0.97 * 2 <= (len(encoded.to_bytes()) + FRAME_BYTES) * 8 / x.numel() <= 1.01 * 2


@every_name
def test_a_base_of_zeros_is_as_good_as_none(name: str) -> None:
    x = gaussian(16, 24)
    codec = shared(name)
    encoded = codec.encode(x, torch.zeros(16, 24))
    rest = encoded.payload[packed_bytes(16, 3) :]
    assert rest == codec.inner.encode(x).payload
    assert not any(encoded.payload[: packed_bytes(16, 3)])


@pytest.mark.parametrize("size", [1e-38, 1e30, MAX_FLOAT / 4])
def test_bases_of_all_magnitudes_have_shares(size: float) -> None:
    base = gaussian(8, 16).clamp(-1, 1) * size
    x = base / 2
    y = shared("q8t+last").decode(shared("q8t+last").encode(x, base), base)
    assert torch.allclose(y / size, x / size, atol=0.02)


def test_gradients_that_are_not_finite_are_not_encoded() -> None:
    x, bad = gaussian(4, 4), torch.full((4, 4), torch.inf)
    for pair in ((x, bad), (bad, x)):
        with pytest.raises(NonFinite):
            shared("q2t+last").encode(*pair)


# ---- hostile payloads


def test_a_share_that_takes_the_base_out_of_range_is_refused() -> None:
    codec, base = shared("q2t+last"), torch.full((8, 8), MAX_FLOAT)
    honest = codec.encode(base / 2, base)
    assert codec.decode(honest, base).isfinite().all()
    forged = EncodedTensor(codec.spec, 8, 8, b"\xff" * 3 + honest.payload[3:])
    with pytest.raises(BadFrame, match="finite"):
        codec.decode(forged, base)


@every_name
def test_every_cut_is_refused(name: str) -> None:
    codec, x = shared(name), gaussian(9, 5)
    encoded = codec.encode(x, x)
    for end in range(len(encoded.payload)):
        with pytest.raises(BadFrame):
            codec.decode(EncodedTensor(codec.spec, 9, 5, encoded.payload[:end]), x)
