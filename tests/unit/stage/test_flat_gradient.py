"""A stage's gradients as one vector, for replicas to sum."""

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from swarm_ft.errors import MalformedMessage, OutOfTurn
from swarm_ft.ids import StepNumber
from swarm_ft.protocol.spec.microbatch import Microbatch
from swarm_ft.protocol.spec.training_plan import step_microbatches
from swarm_ft.stage.engine import StageEngine
from tests.unit.stage.conftest import MakePipeline, Pipeline

STEP = StepNumber(0)


def sizes(stage: StageEngine) -> dict[str, int]:
    parameters = dict(stage.weights.module.named_parameters())
    return {name: parameters[name].numel() for name in sorted(parameters)}


def of(stage: StageEngine, gradient: Tensor, name: str) -> Tensor:
    """One parameter's part of a flat gradient."""
    parts = sizes(stage)
    names = list(parts)
    start = sum(parts[n] for n in names[: names.index(name)])
    return gradient[start : start + parts[name]]


@pytest.fixture
def pipeline(make_pipeline: MakePipeline, samples: Tensor) -> Pipeline:
    pipeline = make_pipeline("gpt2-tied", 2)
    pipeline.gradients(0, samples)
    return pipeline


def test_it_holds_every_parameters_gradient_in_the_order_of_the_names(pipeline: Pipeline) -> None:
    for stage in pipeline.stages:
        gradient = stage.flat_gradient()
        assert gradient.dtype == torch.float32
        assert gradient.shape == (sum(sizes(stage).values()),)
        for name, parameter in stage.weights.module.named_parameters():
            assert parameter.grad is not None
            assert torch.equal(of(stage, gradient, name), parameter.grad.reshape(-1)), name


def test_a_parameter_without_a_gradient_has_zeros(pipeline: Pipeline) -> None:
    stage = pipeline.stages[0]
    name, parameter = next(iter(stage.weights.module.named_parameters()))
    parameter.grad = None
    gradient = stage.flat_gradient()
    assert not of(stage, gradient, name).any()
    assert gradient.any()
    stage.begin_step(StepNumber(1), 10)
    assert not stage.flat_gradient().any()
    assert len(stage.flat_gradient()) == len(gradient)


def test_what_is_set_takes_the_place_of_the_gradients_and_is_copied(pipeline: Pipeline) -> None:
    stage = pipeline.stages[1]
    other = torch.arange(len(stage.flat_gradient()), dtype=torch.float32)
    stage.take_sum(other)
    other.neg_()
    assert torch.equal(stage.flat_gradient(), -other)
    assert stage.squared_grad_norm() == pytest.approx(other.double().square().sum().item())


@pytest.mark.parametrize("name", ["gpt2-tied", "llama"])
def test_replicas_that_add_up_their_halves_train_as_one(
    make_pipeline: MakePipeline, samples: Tensor, name: str
) -> None:
    """Two replicas of every stage, a microbatch each; all uncompressed."""
    one, left, right = (make_pipeline(name, 2) for _ in range(3))
    for step in range(3):
        one.gradients(step, samples)
        batches = step_microbatches(one.spec.train, StepNumber(step))
        assert len(batches) == 2
        num_targets = sum(len(b.samples) for b in batches) * (one.spec.train.seq_length - 1)
        for replica, batch in zip((left, right), batches, strict=True):
            for stage in replica.stages:
                stage.begin_step(StepNumber(step), num_targets)
            replica.microbatch(batch.index, samples[list(batch.samples)])
        for mine, theirs, whole in zip(left.stages, right.stages, one.stages, strict=True):
            total = mine.flat_gradient() + theirs.flat_gradient()
            torch.testing.assert_close(total, whole.flat_gradient(), rtol=1e-4, atol=1e-6)
            mine.take_sum(total)
            theirs.take_sum(total)
        for pipeline in (one, left, right):
            pipeline.commit(step)
        assert left.digests() == right.digests()
        assert left.grad_norms[-1] == pytest.approx(one.grad_norms[-1], rel=1e-5)


@pytest.mark.parametrize(
    "bad",
    [torch.zeros(3), torch.zeros(1, 3), torch.zeros(0)],
    ids=["short", "two dimensions", "empty"],
)
def test_a_gradient_of_another_shape_is_refused(pipeline: Pipeline, bad: Tensor) -> None:
    before = pipeline.stages[0].flat_gradient()
    with pytest.raises(MalformedMessage, match=rf"float32 gradient \[{len(before)}\], got"):
        pipeline.stages[0].take_sum(bad)
    with pytest.raises(MalformedMessage, match="float64"):
        pipeline.stages[0].take_sum(before.double())
    assert torch.equal(pipeline.stages[0].flat_gradient(), before)


def test_nothing_is_there_before_the_stage_is_loaded(pipeline: Pipeline) -> None:
    stage = pipeline.stages[0]
    engine = StageEngine(
        pipeline.checkpoint,
        pipeline.spec,
        stage.layers,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    with pytest.raises(OutOfTurn, match="load the stage first"):
        engine.flat_gradient()


def test_a_step_that_is_resumed_ends_with_the_same_bits(
    make_pipeline: MakePipeline, samples: Tensor
) -> None:
    quiet, resumed = make_pipeline("gpt2-tied", 1), make_pipeline("gpt2-tied", 1)
    spec = quiet.spec.train
    first, *others = step_microbatches(spec, STEP)
    stage = resumed.stages[0]
    quiet.gradients(0, samples)
    targets = sum(len(batch.samples) for batch in (first, *others)) * (spec.seq_length - 1)
    stage.begin_step(STEP, targets)

    def run(batches: Iterable[Microbatch]) -> None:
        for batch in batches:
            tokens = samples[list(batch.samples)]
            stage.forward_backward(batch.index, tokens, tokens)
            stage.weight_gradients(batch.index)

    run([first])
    own = stage.flat_gradient()
    stage.take_sum(torch.ones_like(own))
    with pytest.raises(OutOfTurn, match="cannot be resumed"):
        stage.resume_step(STEP, frozenset(), own)
    stage.resume_step(STEP, frozenset({first.index}), own)
    with pytest.raises(OutOfTurn, match="counted already"):
        run([first])
    run(others)
    assert torch.equal(stage.flat_gradient(), quiet.stages[0].flat_gradient())
