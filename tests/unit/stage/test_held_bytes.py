"""A microbatch's bytes are counted by the memory that its tensors lie in."""

import pytest
import torch
from torch import Tensor, nn

from swarm_ft.ids import MicrobatchIndex, StepNumber
from swarm_ft.stage.activation_memory import MicrobatchMemory, Storages
from swarm_ft.stage.engine import StageEngine
from tests.unit.stage.conftest import MakePipeline

FLOAT = 4
MICROBATCH = MicrobatchIndex(0)


@pytest.fixture
def stage(make_pipeline: MakePipeline) -> StageEngine:
    """The middle stage of three, a step begun."""
    stage = make_pipeline("gpt2-tied", 3).stages[1]
    stage.begin_step(StepNumber(0), 22)
    return stage


def hidden(num_samples: int, num_tokens: int = 12) -> Tensor:
    return torch.ones(num_samples, num_tokens, 32)


def test_views_of_the_same_memory_count_once() -> None:
    x, other = torch.zeros(6, 4), torch.zeros(3)
    storages = Storages.of([x, x[1:], x.t(), other, x.detach()])
    assert storages.num_bytes == 24 * FLOAT + 3 * FLOAT
    assert Storages(but=[x]).num_bytes == 0


def test_what_a_forward_saves_counts_but_for_weights() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    x = torch.ones(2, 3, 4, requires_grad=True)
    memory = MicrobatchMemory()
    with memory.measuring(x, but=module) as storages:
        storages.add(module(x))
    # The layer saves its input, the ReLU its output, which is the output that is held.
    assert memory.most == (2 * 3 * 4 + 2 * 3 * 8) * FLOAT


def test_what_was_saved_for_nothing_does_not_count() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
    x = torch.ones(2, 3, 4, requires_grad=True)
    memory = MicrobatchMemory()
    with memory.measuring(x, but=module) as storages:
        length = module(torch.ones(100, 4)).norm().detach()
        y = module(x) * length
        storages.add(y)
    # The input, what the last function saves of its own output, the product, and its factor.
    assert memory.most == (2 * 3 * 4 + 2 * 2 * 3 * 8 + 1) * FLOAT


def test_what_is_saved_is_what_autograd_computes_with() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    x = torch.linspace(-1, 1, 24).reshape(2, 3, 4)
    gradients = []
    for memory in (MicrobatchMemory(), None):
        own = x.clone().requires_grad_()
        if memory is None:
            y = module(own)
        else:
            with memory.measuring(own, but=module):
                y = module(own)
        gradients.append(torch.autograd.grad(y.square().sum(), [own, *module.parameters()]))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_only_larger_microbatches_are_measured_again() -> None:
    module = nn.Linear(4, 8)
    memory = MicrobatchMemory()
    seen = []
    for samples in (2, 1, 2, 3):
        x = torch.ones(samples, 5, 4, requires_grad=True)
        with memory.measuring(x, but=module) as storages:
            module(x)
            seen.append(storages.num_bytes)
    assert seen == [2 * 5 * 4 * FLOAT, 0, 0, 3 * 5 * 4 * FLOAT]
    assert memory.most == 3 * 5 * 4 * FLOAT


def test_a_stage_knows_what_a_microbatch_holds_once_it_had_one(stage: StageEngine) -> None:
    assert stage.microbatch_bytes == 0
    y = stage.forward(MICROBATCH, hidden(1))
    after_forward = stage.microbatch_bytes
    assert after_forward > 2 * 2 * y.nbytes, "as of a whole microbatch, of two samples"
    stage.backward(MICROBATCH, torch.ones_like(y))
    left = Storages.of(t for p in stage.open_step.products[MICROBATCH] for t in p.tensors).num_bytes
    assert stage.microbatch_bytes == max(after_forward, 2 * left)
    stage.weight_gradients(MICROBATCH)
    stage.forward(MicrobatchIndex(1), hidden(2))
    assert stage.microbatch_bytes == pytest.approx(max(after_forward, 2 * left), rel=0.05)


def test_a_stages_state_is_its_weights_gradients_and_moments(stage: StageEngine) -> None:
    parameters = list(stage.weights.module.parameters())
    assert stage.state_bytes == 4 * FLOAT * sum(p.numel() for p in parameters)
