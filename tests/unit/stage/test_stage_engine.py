"""A stage apart from its arithmetic: order, aborts, dropout, hostile input, bfloat16."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

from swarm_ft.errors import BadOption, MalformedMessage, NonFinite, OutOfTurn
from swarm_ft.ids import MicrobatchIndex, StepNumber
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.stage.checkpoint import open_checkpoint
from swarm_ft.stage.engine import StageEngine
from tests.unit.stage.conftest import MakeModel, MakePipeline

TARGETS = 22
CHANNELS = 32
STEP = StepNumber(0)
MICROBATCH = MicrobatchIndex(0)


@pytest.fixture
def tokens(samples: Tensor) -> Tensor:
    return samples[:2]


@pytest.fixture
def pair(make_pipeline: MakePipeline) -> list[StageEngine]:
    """First and last stage of a two-stage swarm, step 0 begun."""
    pipeline = make_pipeline("gpt2-tied", 2)
    for stage in pipeline.stages:
        stage.begin_step(STEP, TARGETS)
    return pipeline.stages


def test_untied_head_is_told_once_at_the_last_stage(
    make_pipeline: MakePipeline, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="swarm_ft"):
        make_pipeline("gpt2-tied", 3)
        make_pipeline("gpt2-tied", 3, sync_tied_embeddings=True)
        make_pipeline("llama", 3)
    assert [r.message.split()[0] for r in caplog.records] == ["embeddings-untied"]


def test_aborted_attempt_leaves_no_trace(make_pipeline: MakePipeline, samples: Tensor) -> None:
    clean, faulty = make_pipeline("llama", 2), make_pipeline("llama", 2)
    first, last = faulty.stages
    faulty.gradients(0, samples)
    first.begin_step(STEP, TARGETS)
    last.begin_step(STEP, TARGETS)
    first.forward(MICROBATCH, samples[:3])
    for pipeline in (clean, faulty):
        pipeline.train(samples)
    assert faulty.digests() == clean.digests()


def test_beginning_again_drops_the_graphs_of_the_aborted_attempt(
    pair: list[StageEngine], tokens: Tensor
) -> None:
    first, _ = pair
    output = first.forward(MICROBATCH, tokens)
    first.begin_step(STEP, TARGETS)
    with pytest.raises(OutOfTurn, match="microbatch 0"):
        first.backward(MICROBATCH, torch.ones_like(output))
    assert first.squared_grad_norm() == 0.0


def test_microbatch_counts_once(pair: list[StageEngine], tokens: Tensor) -> None:
    first, last = pair
    made = last.forward_backward(MICROBATCH, first.forward(MICROBATCH, tokens), tokens)
    gradient = made.input_gradient
    assert gradient is not None
    first.backward(MICROBATCH, gradient)
    again = (
        lambda: first.forward(MICROBATCH, tokens),
        lambda: first.backward(MICROBATCH, gradient),
        lambda: last.forward_backward(MICROBATCH, gradient, tokens),
    )
    for twice in again:
        with pytest.raises(OutOfTurn, match="had its backward"):
            twice()
    for stage in pair:
        stage.weight_gradients(MICROBATCH)
    norms = [stage.squared_grad_norm() for stage in pair]
    for twice in again:
        with pytest.raises(OutOfTurn, match="counted already"):
            twice()
    for stage in pair:
        with pytest.raises(OutOfTurn, match="microbatch 0 had no backward"):
            stage.weight_gradients(MICROBATCH)
    assert [stage.squared_grad_norm() for stage in pair] == norms


def test_forward_may_be_computed_again_before_its_backward(
    pair: list[StageEngine], tokens: Tensor
) -> None:
    first, _ = pair
    once = first.forward(MICROBATCH, tokens)
    assert torch.equal(first.forward(MICROBATCH, tokens), once)
    first.backward(MICROBATCH, torch.ones_like(once))


def test_order_of_microbatches_is_free(make_pipeline: MakePipeline, samples: Tensor) -> None:
    losses = []
    for numbers in ([0, 1, 2], [2, 0, 1]):
        order = [MicrobatchIndex(number) for number in numbers]
        first, last = make_pipeline("llama", 2).stages
        first.begin_step(STEP, 66)
        last.begin_step(STEP, 66)
        outputs = {i: first.forward(i, samples[2 * i : 2 * i + 2]) for i in order}
        made = {i: last.forward_backward(i, outputs[i], samples[2 * i : 2 * i + 2]) for i in order}
        for i in reversed(order):
            gradient = made[i].input_gradient
            assert gradient is not None
            first.backward(i, gradient)
        losses.append([made[i].loss_sum for i in sorted(order)])
    assert losses[0] == losses[1]


def test_step_is_applied_once(make_pipeline: MakePipeline, samples: Tensor) -> None:
    pipeline = make_pipeline("llama", 1)
    pipeline.gradients(0, samples)
    pipeline.commit(0)
    with pytest.raises(OutOfTurn):
        pipeline.stages[0].apply(1.0, 1e-3)


def test_calls_before_load_or_before_a_step_are_refused(
    make_pipeline: MakePipeline, make_model: MakeModel, tokens: Tensor
) -> None:
    pipeline = make_pipeline("llama", 1)
    with pytest.raises(OutOfTurn, match="no step"):
        pipeline.stages[0].forward(MICROBATCH, tokens)
    cold = StageEngine(
        open_checkpoint(str(make_model("llama"))),
        pipeline.spec,
        LayerRange(0, 4),
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    with pytest.raises(OutOfTurn, match="load"):
        cold.begin_step(STEP, TARGETS)


@pytest.mark.parametrize(
    "bad",
    [
        torch.zeros(2, 12),
        torch.zeros(12, dtype=torch.int64),
        torch.zeros(2, 13, dtype=torch.int64),
        torch.zeros(2, 0, dtype=torch.int64),
        torch.zeros(0, 12, dtype=torch.int64),
        torch.full((2, 12), 97),
        torch.full((2, 12), -1),
    ],
)
def test_tokens_out_of_bounds_are_refused(pair: list[StageEngine], bad: Tensor) -> None:
    with pytest.raises(MalformedMessage, match="tokens"):
        pair[0].forward(MICROBATCH, bad)


@pytest.mark.parametrize(
    "bad",
    [
        torch.zeros(2, 12),
        torch.zeros(12, dtype=torch.int64),
        torch.zeros(2, 11, dtype=torch.int64),
        torch.zeros(1, 12, dtype=torch.int64),
        torch.full((2, 12), 97),
        torch.full((2, 12), -1),
        torch.full((2, 12), -101),
    ],
)
def test_labels_out_of_bounds_are_refused(pair: list[StageEngine], bad: Tensor) -> None:
    with pytest.raises(MalformedMessage, match="labels"):
        pair[1].forward_backward(MICROBATCH, torch.zeros(2, 12, CHANNELS), bad)


@pytest.mark.parametrize(
    "bad",
    [
        torch.zeros(2, 12, CHANNELS, dtype=torch.float16),
        torch.zeros(2, 12, CHANNELS + 1),
        torch.zeros(2, 13, CHANNELS),
        torch.zeros(2, CHANNELS),
        torch.zeros(0, 12, CHANNELS),
    ],
)
def test_activations_out_of_bounds_are_refused(pair: list[StageEngine], bad: Tensor) -> None:
    with pytest.raises(MalformedMessage, match="activation"):
        pair[1].forward(MICROBATCH, bad)


def test_gradients_of_another_shape_are_refused(pair: list[StageEngine], tokens: Tensor) -> None:
    output = pair[0].forward(MICROBATCH, tokens)
    for bad in (output[:1], output.half()):
        with pytest.raises(MalformedMessage, match="gradient"):
            pair[0].backward(MICROBATCH, bad)
    with pytest.raises(MalformedMessage, match="shared weights: expected a float32 gradient"):
        pair[0].set_shared_gradient(torch.zeros(3))


def test_tokens_and_activations_of_different_samples_are_refused(
    pair: list[StageEngine], tokens: Tensor
) -> None:
    with pytest.raises(MalformedMessage):
        pair[1].forward_backward(MICROBATCH, torch.zeros(3, 12, CHANNELS), tokens)


def test_step_without_targets_is_refused(pair: list[StageEngine]) -> None:
    with pytest.raises(MalformedMessage, match="target"):
        pair[0].begin_step(STEP, 0)


def test_numbers_that_are_not_finite_are_named(pair: list[StageEngine], tokens: Tensor) -> None:
    first, last = pair
    x = first.forward(MicrobatchIndex(1), tokens)
    with pytest.raises(NonFinite, match=r"step 0, microbatch 3: the loss"):
        last.forward_backward(MicrobatchIndex(3), torch.full_like(x, torch.nan), tokens)
    with pytest.raises(NonFinite, match=r"step 0, microbatch 4: the output"):
        last.forward(MicrobatchIndex(4), torch.full_like(x, torch.inf))
    first.backward(MicrobatchIndex(1), torch.full_like(x, torch.inf))
    first.weight_gradients(MicrobatchIndex(1))
    with pytest.raises(
        NonFinite, match=r"step 0: the gradient .* first in that of \S+ \(layer 1\)"
    ):
        first.squared_grad_norm()
    first.take_sum(torch.full((first.num_values,), 1e30))
    with pytest.raises(NonFinite, match=r"or too large: its norm is \d"):
        first.squared_grad_norm()


def test_the_first_tensor_that_is_not_finite_is_named_with_its_layer(
    pair: list[StageEngine], tokens: Tensor
) -> None:
    first, last = pair
    x = first.forward(MicrobatchIndex(1), tokens)
    own = last.weights.module.trainable()
    name = next(name for name in own if ".mlp." in name and name.endswith("weight"))
    weight = own[name].detach()
    known = weight.clone()
    weight.fill_(1e38)  # finite, but no product with it is
    with pytest.raises(NonFinite) as computed:
        last.forward_backward(MicrobatchIndex(2), x, tokens)
    assert f"first in {name.removesuffix('.weight')} (layer {last.layers.start})" in str(
        computed.value
    )
    weight.copy_(known)
    weight[0, 0] = torch.nan
    with pytest.raises(NonFinite) as found:
        last.evaluate(x, tokens)
    assert f"first in {name} (layer {last.layers.start})" in str(found.value)


def test_numbers_that_an_optimizer_cannot_compute_with_are_named(
    pair: list[StageEngine], tokens: Tensor
) -> None:
    first, last = pair
    last.forward_backward(MicrobatchIndex(0), first.forward(MicrobatchIndex(0), tokens), tokens)
    last.weight_gradients(MicrobatchIndex(0))
    with pytest.raises(
        NonFinite, match=r"step 0: adamw cannot step layers .* learning rate 1e\+38"
    ):
        last.apply(1.0, 1e38)


def test_graph_is_freed_by_its_backward(pair: list[StageEngine], tokens: Tensor) -> None:
    import gc
    import weakref

    first, last = pair
    x = first.forward(MICROBATCH, tokens)
    graph = weakref.ref(first.open_step.graphs[MICROBATCH].output)
    first.backward(MICROBATCH, torch.ones_like(x))
    gc.collect()
    assert graph() is None
    last.forward_backward(MICROBATCH, x, tokens)
    assert last.open_step.graphs == {}


def test_shared_gradient_is_zero_before_any_backward(make_pipeline: MakePipeline) -> None:
    pipeline = make_pipeline("gpt2-tied", 3, sync_tied_embeddings=True)
    first, middle, last = (stage.shared_gradient() for stage in pipeline.stages)
    assert torch.equal(first, torch.zeros(97 * CHANNELS))
    assert torch.equal(last, first)
    assert not len(middle)


@pytest.mark.parametrize("num_stages", [2, 3])
def test_synchronised_ends_stay_equal_bit_for_bit(
    make_pipeline: MakePipeline, samples: Tensor, num_stages: int
) -> None:
    pipeline = make_pipeline("gpt2-tied", num_stages, sync_tied_embeddings=True)
    pipeline.train(samples)
    first, last = pipeline.stages[0], pipeline.stages[-1]
    assert torch.equal(first.weights.module.embedding_weight, last.weights.module.head_weight)


def test_dropout_draws_the_same_in_a_replay_and_leaves_torchs_generator_alone(
    make_pipeline: MakePipeline, samples: Tensor
) -> None:
    once, again = (make_pipeline("gpt2-tied", 2, dropout=True) for _ in range(2))
    losses = once.train(samples)
    torch.manual_seed(123)
    state = torch.get_rng_state()
    again.gradients(0, samples)
    assert torch.equal(torch.get_rng_state(), state)
    # An aborted attempt and an early computation of another microbatch change nothing.
    again.stages[0].begin_step(STEP, TARGETS)
    again.stages[0].forward(MicrobatchIndex(1), samples[:2])
    assert again.train(samples) == losses
    assert again.digests() == once.digests()


def test_dropout_does_not_depend_on_the_cut(make_pipeline: MakePipeline, samples: Tensor) -> None:
    one, three = (make_pipeline("gpt2-tied", n, dropout=True).train(samples) for n in (1, 3))
    assert one == pytest.approx(three, rel=1e-6)
    assert one != pytest.approx(make_pipeline("gpt2-tied", 1).train(samples), rel=1e-3)


def test_dropout_differs_by_step_microbatch_and_seed(
    make_pipeline: MakePipeline, tokens: Tensor
) -> None:
    def output(seed: int, step: int, microbatch: int) -> Tensor:
        stage = make_pipeline("gpt2-tied", 2, dropout=True, seed=seed).stages[0]
        stage.begin_step(StepNumber(step), TARGETS)
        return stage.forward(MicrobatchIndex(microbatch), tokens)

    outputs = [output(5, 0, 0), output(6, 0, 0), output(5, 1, 0), output(5, 0, 1)]
    assert len({tuple(o.flatten().tolist()) for o in outputs}) == len(outputs)
    assert torch.equal(output(5, 0, 1), outputs[3])


def test_bfloat16_computes_near_float32_over_float32_weights(
    make_pipeline: MakePipeline, samples: Tensor
) -> None:
    exact = make_pipeline("llama", 2)
    rough = make_pipeline("llama", 2, dtype=torch.bfloat16)
    assert rough.train(samples) == pytest.approx(exact.train(samples), rel=0.02)
    assert rough.digests() != exact.digests()
    parameters = [p for s in rough.stages for p in s.weights.module.parameters()]
    assert {p.dtype for p in parameters} == {torch.float32}


def test_samples_longer_than_the_models_positions_are_refused(make_pipeline: MakePipeline) -> None:
    with pytest.raises(BadOption, match="64 positions"):
        make_pipeline("gpt2-tied", 1, seq_length=65)


def test_samples_may_be_longer_than_rotary_positions_and_sliding_windows(
    make_pipeline: MakePipeline,
) -> None:
    make_pipeline("mistral", 1, seq_length=65)
