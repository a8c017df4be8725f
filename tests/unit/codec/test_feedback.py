"""Error feedback: messages sum to the inputs, and errors do not grow."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarm_ft.codec.base import Codec
from swarm_ft.codec.feedback import encode_with_feedback
from swarm_ft.codec.raw import HalfCodec
from swarm_ft.codec.spec import CodecSpec, Direction, parse_codec_spec
from swarm_ft.codec.topk import TopKCodec
from swarm_ft.errors import BadFrame, NonFinite
from tests.draws import draws

FAMILIES: dict[str, Callable[[CodecSpec], Codec]] = {
    "top": TopKCodec,
    "fp1": HalfCodec,
}
NAMES = ["top10+ef", "top30+ef+z", "fp16+ef"]
property_test = settings(derandomize=True, deadline=None, max_examples=draws(10))


def codec_of(name: str) -> Codec:
    return FAMILIES[name[:3]](parse_codec_spec(name, Direction.BACKWARD))


def gaussian(tokens: int, channels: int, seed: int = 0) -> Tensor:
    return torch.randn(tokens, channels, generator=torch.Generator().manual_seed(seed))


def run(codec: Codec, inputs: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return the sum of all messages in float64, and the residual after each."""
    sent, residual, residuals = torch.zeros_like(inputs[0]).double(), None, []
    for x in inputs:
        encoded, residual = encode_with_feedback(codec, x, residual)
        sent += codec.decode(encoded).double()
        residuals.append(residual)
    return sent, residuals


@pytest.mark.parametrize("name", NAMES)
@given(
    seed=st.integers(0, 1000),
    shape=st.tuples(st.integers(1, 24), st.integers(1, 16)),
    magnitude=st.sampled_from([1e-30, 1.0, 1e30]),
)
@property_test
def test_messages_and_the_last_residual_add_up_to_the_inputs(
    name: str, seed: int, shape: tuple[int, int], magnitude: float
) -> None:
    inputs = [gaussian(*shape, seed + step) * magnitude for step in range(20)]
    sent, residuals = run(codec_of(name), inputs)
    total = sum(x.double() for x in inputs)
    scale = max(x.abs().max().item() for x in inputs + residuals)
    assert (sent + residuals[-1].double() - total).abs().max() <= 20 * 2**-23 * scale


@pytest.mark.parametrize(("name", "share"), [("top10+ef", 0.1), ("top30+ef+z", 0.3)])
def test_residuals_stay_below_the_bound_of_a_contraction(name: str, share: float) -> None:
    # A message takes at least `share` of the energy of what it chooses from, so
    # |e'| <= sqrt(1 - share) * |e| + |x|, and e stays below the fixed point of that.
    inputs = [gaussian(32, 24, seed=step) for step in range(60)]
    bound = max(x.norm() for x in inputs) / (1 - (1 - share) ** 0.5)
    _, residuals = run(codec_of(name), inputs)
    norms = [residual.norm() for residual in residuals]
    assert max(norms) < bound
    assert max(norms[40:]) < 1.1 * max(norms[:40])


@pytest.mark.parametrize("name", ["top10+ef", "top30+ef+z"])
def test_the_mean_of_messages_about_a_fixed_gradient_nears_it(name: str) -> None:
    codec, x = codec_of(name), gaussian(32, 24)
    errors = []
    for count in (1, 50, 200):
        sent, _ = run(codec, [x] * count)
        errors.append(((sent / count - x).norm() / x.norm()).item())
    assert errors[1] < errors[0] / 3
    assert errors[2] < errors[1] / 3


@pytest.mark.parametrize("name", NAMES)
def test_a_first_message_is_the_codecs_own(name: str) -> None:
    codec, x = codec_of(name), gaussian(12, 10)
    encoded, residual = encode_with_feedback(codec, x, None)
    assert encoded == codec.encode(x)
    assert torch.equal(residual, x - codec.decode(encoded))
    assert encode_with_feedback(codec, x, torch.zeros_like(x))[0] == encoded


@pytest.mark.parametrize("name", ["top10+ef", "fp16+ef"])
def test_feedback_sends_the_sum_of_gradient_and_residual(name: str) -> None:
    codec, x, residual = codec_of(name), gaussian(12, 10), gaussian(12, 10, seed=1)
    encoded, left = encode_with_feedback(codec, x, residual)
    assert encoded == codec.encode(x + residual)
    assert torch.equal(left, x + residual - codec.decode(encoded))


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_finite_is_refused(name: str) -> None:
    codec, x = codec_of(name), gaussian(3, 4)
    huge = torch.full((3, 4), torch.finfo(torch.float32).max)
    for bad in (torch.inf, -torch.inf, torch.nan):
        broken = x.clone()
        broken[1, 2] = bad
        for pair in ((broken, x), (x, broken), (broken, -broken)):
            with pytest.raises(NonFinite, match="finite"):
                encode_with_feedback(codec, *pair)
    with pytest.raises(NonFinite, match="finite"):
        encode_with_feedback(codec, huge, huge)


@pytest.mark.parametrize(
    "residual", [torch.zeros(2, 3), torch.zeros(6), torch.zeros(3, 2).double()]
)
def test_a_residual_of_another_shape_or_type_is_refused(residual: Tensor) -> None:
    with pytest.raises(BadFrame, match="residual: expected"):
        encode_with_feedback(codec_of("top10+ef"), gaussian(3, 2), residual)


@pytest.mark.parametrize("name", NAMES)
def test_inputs_stay_as_they_are(name: str) -> None:
    x, residual = gaussian(6, 5).requires_grad_(), gaussian(6, 5, seed=1)
    kept_x, kept_residual = x.detach().clone(), residual.clone()
    _, left = encode_with_feedback(codec_of(name), x, residual)
    assert torch.equal(x, kept_x)
    assert torch.equal(residual, kept_residual)
    assert not left.requires_grad
