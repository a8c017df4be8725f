"""Error feedback: messages sum to the inputs, and errors do not grow."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarm_ft.codec.base import Codec
from swarm_ft.codec.feedback import encode_with_feedback
from swarm_ft.codec.lowrank import LowRankCodec
from swarm_ft.codec.raw import HalfCodec
from swarm_ft.codec.topk import TopKCodec, num_sent_entries
from swarm_ft.errors import BadFrame, NonFinite
from swarm_ft.protocol.spec.codec_spec import CodecSpec, Direction, parse_codec_spec
from tests.draws import draws

FAMILIES: dict[str, Callable[[CodecSpec], Codec]] = {
    "top": TopKCodec,
    "low": LowRankCodec,
    "fp1": HalfCodec,
}
NAMES = ["top10+ef", "top30+ef+z", "lowrank2+ef", "fp16+ef", "top10+efmix", "top30+efmix+z"]
MIXED = [name for name in NAMES if "efmix" in name]
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


def largest_places(values: list[float], count: int) -> list[int]:
    order = sorted(range(len(values)), key=lambda i: (-abs(values[i]), i))
    return [i for i in order[:count] if values[i]]


def mixed_by_hand(x: list[float], residual: list[float], count: int) -> list[float]:
    """Compute the message of `+efmix` value by value."""
    message = [0.0] * len(x)
    for i in largest_places(x, count - count // 2):
        message[i] += x[i]
    for i in largest_places(residual, count // 2):
        message[i] += residual[i]
    spare = count - sum(value != 0 for value in message)
    rest = [0.0 if message[i] else x[i] + residual[i] for i in range(len(x))]
    for i in largest_places(rest, spare):
        message[i] = rest[i]
    return message


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


@pytest.mark.parametrize(
    ("name", "share"), [("top10+ef", 0.1), ("top30+ef+z", 0.3), ("top10+efmix", 0.05)]
)
def test_residuals_stay_below_the_bound_of_a_contraction(name: str, share: float) -> None:
    # A message takes at least `share` of the energy of what it chooses from, so
    # |e'| <= sqrt(1 - share) * |e| + |x|, and e stays below the fixed point of that.
    inputs = [gaussian(32, 24, seed=step) for step in range(60)]
    bound = max(x.norm() for x in inputs) / (1 - (1 - share) ** 0.5)
    _, residuals = run(codec_of(name), inputs)
    norms = [residual.norm() for residual in residuals]
    assert max(norms) < bound
    assert max(norms[40:]) < 1.1 * max(norms[:40])


@pytest.mark.parametrize("name", ["top10+ef", "top10+efmix", "lowrank2+ef"])
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


@pytest.mark.parametrize("name", ["top10+ef", "lowrank2+ef", "fp16+ef"])
def test_feedback_sends_the_sum_of_gradient_and_residual(name: str) -> None:
    codec, x, residual = codec_of(name), gaussian(12, 10), gaussian(12, 10, seed=1)
    encoded, left = encode_with_feedback(codec, x, residual)
    assert encoded == codec.encode(x + residual)
    assert torch.equal(left, x + residual - codec.decode(encoded))


@pytest.mark.parametrize("name", MIXED)
@given(
    seed=st.integers(0, 1000),
    shape=st.tuples(st.integers(1, 12), st.integers(1, 10)),
    overlap=st.sampled_from([0.0, 0.5, 1.0]),
    whole=st.booleans(),
)
@settings(property_test, max_examples=draws(40))
def test_mixed_feedback_gives_half_of_its_entries_to_each(
    name: str, seed: int, shape: tuple[int, int], overlap: float, whole: bool
) -> None:
    codec, x = codec_of(name), gaussian(*shape, seed)
    residual = overlap * x + (1 - overlap) * gaussian(*shape, seed + 1)
    if whole:  # many ties and zeros, and sums that cancel
        x, residual = x.round(), -residual.round()
    encoded, left = encode_with_feedback(codec, x, residual)
    count = num_sent_entries(codec.spec, x.numel())
    by_hand = torch.tensor(
        mixed_by_hand(x.view(-1).tolist(), residual.view(-1).tolist(), count)
    ).view_as(x)
    assert encoded == codec.encode(by_hand)
    assert by_hand.count_nonzero() <= count
    assert torch.equal(left, x + residual - codec.decode(encoded))


def test_mixed_feedback_sends_small_old_errors_that_a_sum_would_not() -> None:
    x, residual = torch.zeros(10, 10), torch.zeros(10, 10)
    x[0], residual[5] = 10.0, 1.0
    mixed, _ = encode_with_feedback(codec_of("top10+efmix"), x, residual)
    plain, _ = encode_with_feedback(codec_of("top10+ef"), x, residual)
    rows = codec_of("top10+efmix").decode(mixed).count_nonzero(1).tolist()
    assert (rows[0], rows[5]) == (5, 5)
    assert codec_of("top10+ef").decode(plain).count_nonzero(1).tolist()[0] == 10


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
