"""Each optimizer steps as torch's own does, and a stage goes on from what it keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from swarm_ft.errors import BadSnapshot
from swarm_ft.protocol.spec.bounds import MAX_FACTOR, MAX_SCALAR
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import Adapter, Optim
from swarm_ft.stage.device import sum_in_order
from swarm_ft.stage.eight_bits import BLOCK, decode, encode, num_scales
from swarm_ft.stage.optimizers import kind_of
from tests.states import state_digest
from tests.unit.stage.conftest import MakePipeline, Pipeline

OTHERS = [Optim.ADAMW_8BIT, Optim.ADAFACTOR, Optim.SGD]
TORCHS: dict[Optim, Any] = {
    Optim.ADAMW: torch.optim.AdamW,
    Optim.ADAFACTOR: torch.optim.Adafactor,
    Optim.SGD: torch.optim.SGD,
}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64, 100])
def test_a_sum_has_one_order_whatever_lies_beside_it(count: int) -> None:
    values = drawn(5, count)
    both = sum_in_order(values, 1)
    assert torch.allclose(both, values.sum(1, keepdim=True), atol=1e-5)
    assert torch.equal(both[2:3], sum_in_order(values[2:3], 1))
    assert torch.equal(both, sum_in_order(values.t(), 0).t())


@pytest.mark.parametrize("optim", TORCHS)
def test_steps_are_torchs(optim: Optim) -> None:
    shapes = [(6, 10), (9,), (3, 4, 5)]
    ours = [nn.Parameter(drawn(*shape)) for shape in shapes]
    theirs = [nn.Parameter(one.detach().clone()) for one in ours]
    own = kind_of(optim).create(ours, weight_decay=0.1)
    groups = [
        {"params": [one for one in theirs if one.ndim > 1], "weight_decay": 0.1},
        {"params": [one for one in theirs if one.ndim == 1], "weight_decay": 0.0},
    ]
    torchs = TORCHS[optim](groups, lr=0.01)
    for group in own.param_groups:
        group["lr"] = 0.01
    for step in range(5):
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            one.grad = drawn(*one.shape, seed=10 * step + index)
            other.grad = one.grad.clone()
        own.step()
        torchs.step()
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)


def stepped(optim: Optim, start: Tensor, gradients: list[Tensor], lr: float = 0.01) -> Tensor:
    weight = nn.Parameter(start.clone())
    own = kind_of(optim).create([weight], weight_decay=0.1)
    own.param_groups[0]["lr"] = lr
    for gradient in gradients:
        weight.grad = gradient.clone()
        own.step()
    return weight.detach()


def test_in_8_bits_adamw_goes_nearly_the_same_way() -> None:
    # Gradients that lie side by side, and differ a hundredfold: of plain squares in 8 bits many
    # would be 0, and the steps without bounds.
    start, scale = drawn(2, 300_001), drawn(2, 300_001, seed=1).exp()
    gradients = [scale * (drawn(2, 300_001, seed=seed) + 0.5) for seed in range(10, 20)]
    exact, in_8_bits = (
        stepped(optim, start, gradients) for optim in (Optim.ADAMW, Optim.ADAMW_8BIT)
    )
    moved, error = (exact - start).norm(), (in_8_bits - exact).norm()
    assert 0 < error < 0.05 * moved


def test_replicas_with_other_numbers_of_threads_step_alike_in_8_bits() -> None:
    start, gradients = drawn(700, 1000), [drawn(700, 1000, seed=seed) for seed in range(2)]
    before = torch.get_num_threads()
    ends = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        ends.append(stepped(Optim.ADAMW_8BIT, start, gradients))
    torch.set_num_threads(before)
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])


def test_in_8_bits_vectors_step_as_torchs() -> None:
    start, gradients = drawn(5000), [drawn(5000, seed=seed) for seed in range(1, 6)]
    exact, vector = (stepped(optim, start, gradients) for optim in (Optim.ADAMW, Optim.ADAMW_8BIT))
    assert torch.allclose(vector, exact, rtol=1e-6, atol=1e-7)


FLOATS = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)


@given(st.lists(FLOATS, min_size=1, max_size=600), st.booleans())
def test_values_in_8_bits_have_the_nearest_code(listed: list[float], signed: bool) -> None:
    values = torch.tensor(listed) if signed else torch.tensor(listed).abs()
    codes, scales = encode(values, signed=signed)
    assert (len(codes), len(scales)) == (len(values), num_scales(len(values)))
    decoded = decode(codes, scales, signed=signed)
    all_codes = torch.arange(256, dtype=torch.uint8)
    for block, near, scale in zip(
        torch.split(values.double(), BLOCK),
        torch.split(decoded.double(), BLOCK),
        scales,
        strict=True,
    ):
        choices = decode(all_codes, scale[None], signed=signed).double()
        least = (choices[None] - block[:, None]).abs().amin(1)
        is_nearest = (near - block).abs() <= least + 1e-6 * block.abs()
        # But what has no sign is never rounded down to 0, which optimizers divide by.
        assert (is_nearest | (torch.tensor(not signed) & (near == choices[1]))).all()
        assert signed or ((near == 0) == (block == 0)).all()


def test_what_is_0_or_the_largest_stays_so_in_8_bits() -> None:
    values = torch.tensor([0.0, 3.0, 0.0] + [0.0] * 300)
    for signed in (True, False):
        codes, scales = encode(values, signed=signed)
        assert torch.equal(decode(codes, scales, signed=signed), values)


@pytest.mark.parametrize("optim", OTHERS)
@pytest.mark.parametrize("adapter", [Adapter.NONE, Adapter.LORA])
@pytest.mark.sampled(4)
def test_a_stage_goes_on_from_what_is_kept(
    optim: Optim, adapter: Adapter, make_pipeline: MakePipeline, samples: Tensor
) -> None:
    changes: dict[str, Any] = {"optim": optim, "adapter": adapter, "num_steps": 4}
    original, resumed = (make_pipeline("llama", 2, **changes) for _ in range(2))
    begin = original.digests()
    for step in range(2):
        loss_of(original, step, samples)
    assert all(one != other for one, other in zip(begin, original.digests(), strict=True))
    for stage, other in zip(original.stages, resumed.stages, strict=True):
        other.load_state(stage.state())
    later = [loss_of(original, step, samples) for step in (2, 3)]
    assert [loss_of(resumed, step, samples) for step in (2, 3)] == later
    for stage, other in zip(original.stages, resumed.stages, strict=True):
        assert state_digest(stage.state()) == state_digest(other.state())


def loss_of(pipeline: Pipeline, step: int, samples: Tensor) -> float:
    loss = pipeline.gradients(step, samples)
    pipeline.commit(step)
    return loss


@pytest.mark.parametrize("optim", Optim)
def test_a_stage_counts_what_its_optimizer_keeps(
    optim: Optim, make_pipeline: MakePipeline, samples: Tensor
) -> None:
    pipeline = make_pipeline("llama", 4, optim=optim)
    loss_of(pipeline, 0, samples)
    middle = pipeline.stages[1]
    state = {name: one for name, one in middle.state().items() if one.ndim}
    gradients = sum(one.nbytes for one in middle.weights.module.trainable().values())
    assert middle.state_bytes == gradients + sum(one.nbytes for one in state.values())
    planned = pipeline.spec.memory_bytes(LayerRange(1, 2))
    assert middle.state_bytes == pytest.approx(planned, rel=0.1)


def test_the_state_of_another_optimizer_is_refused(make_pipeline: MakePipeline) -> None:
    adamw, adafactor = (
        make_pipeline("llama", 2, optim=optim).stages[0] for optim in (Optim.ADAMW, Optim.ADAFACTOR)
    )
    with pytest.raises(BadSnapshot, match="missing: adafactor/"):
        adafactor.load_state(adamw.state())
    negative = adafactor.state()
    name = next(name for name in negative if "row_var" in name)
    negative[name] -= 1
    with pytest.raises(BadSnapshot, match="negative"):
        adafactor.load_state(negative)


@pytest.mark.parametrize("optim", Optim)
@pytest.mark.parametrize("learning_rate", [0.0, 1e-45, MAX_SCALAR])
@pytest.mark.parametrize("weight_decay", [0.0, MAX_FACTOR])
@pytest.mark.parametrize("scale", [0.0, 1e-45, 1e30])
def test_no_number_that_a_job_may_have_makes_an_optimizer_raise(
    optim: Optim, learning_rate: float, weight_decay: float, scale: float
) -> None:
    weights = [nn.Parameter(drawn(6, 10)), nn.Parameter(drawn(9)), nn.Parameter(drawn(80, 70))]
    own = kind_of(optim).create(weights, weight_decay=weight_decay)
    for group in own.param_groups:
        group["lr"] = learning_rate
    for _ in range(3):
        for one in weights:
            one.grad = drawn(*one.shape) * scale
        own.step()
