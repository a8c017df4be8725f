"""Weights' gradients that are computed later have the bits of those that autograd computes."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from swarm_ft.errors import OutOfTurn
from swarm_ft.ids import MicrobatchIndex, StepNumber
from swarm_ft.protocol.spec.microbatch import Microbatch
from swarm_ft.protocol.spec.training_plan import step_microbatches
from swarm_ft.stage import weight_products
from swarm_ft.stage.activation_memory import LiveBytes
from swarm_ft.stage.engine import StageEngine
from swarm_ft.stage.module import StageModule
from swarm_ft.stage.weight_products import DeferredLinears, WeightProduct
from tests.unit.stage.conftest import CONFIGS, SEQ_LENGTH, MakePipeline, Pipeline

STEPS = 2
BATCHES = 3
STEP = StepNumber(0)
MICROBATCH = MicrobatchIndex(0)


@pytest.fixture(autouse=True)
def seed() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        yield


# ---- whole stages


def run_step(pipeline: Pipeline, step: int, samples: Tensor, *, depth: int) -> list[float]:
    """A step in which as many microbatches as `depth` wait for their weights; its losses."""
    batches = step_microbatches(pipeline.spec.train, StepNumber(step))
    assert len(batches) == BATCHES
    num_targets = sum(len(b.samples) for b in batches) * (SEQ_LENGTH - 1)
    *upstream, last = pipeline.stages
    losses = []
    for stage in pipeline.stages:
        stage.begin_step(StepNumber(step), num_targets)
    for batch in batches:
        tokens = x = samples[list(batch.samples)]
        for stage in upstream:
            x = stage.forward(batch.index, x)
        made = last.forward_backward(batch.index, x, tokens)
        losses.append(made.loss_sum)
        gradient = made.input_gradient
        for stage in reversed(upstream):
            assert gradient is not None
            gradient = stage.backward(batch.index, gradient)
        if batch.index >= depth:
            complete(pipeline, batches[batch.index - depth])
    for batch in batches[max(0, BATCHES - depth) :]:
        complete(pipeline, batch)
    return losses


def complete(pipeline: Pipeline, batch: Microbatch) -> None:
    for stage in pipeline.stages:
        stage.weight_gradients(batch.index)


def trained(
    pipeline: Pipeline, samples: Tensor, *, depth: int = 0
) -> tuple[list[object], list[bytes]]:
    """Losses, gradients and weights over a few steps."""
    seen: list[object] = []
    for step in range(STEPS):
        seen.append(run_step(pipeline, step, samples, depth=depth))
        seen += [stage.flat_gradient().numpy().tobytes() for stage in pipeline.stages]
        pipeline.commit(step)
    return seen, pipeline.digests()


CASES: list[tuple[str, int, dict[str, bool]]] = [
    (name, stages, {}) for name in CONFIGS for stages in (1, 3)
] + [
    ("gpt2-tied", 1, {"sync_tied_embeddings": True}),
    ("gpt2-tied", 2, {"sync_tied_embeddings": True}),
    ("qwen2-tied", 1, {"sync_tied_embeddings": True}),
    ("gpt2-tied", 2, {"dropout": True}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "num_stages", "changes"), CASES)
def test_training_has_the_bits_of_plain_autograd(
    make_pipeline: MakePipeline,
    samples: Tensor,
    name: str,
    num_stages: int,
    changes: dict[str, bool],
    dtype: torch.dtype,
) -> None:
    sizes = {"batch_size": 6, "micro_batch_size": 2, "num_steps": STEPS}
    plain, split = (
        make_pipeline(name, num_stages, dtype=dtype, **sizes, **changes) for _ in range(2)
    )
    for stage in plain.stages:
        stage.weights.linears.restore()
    assert trained(split, samples, depth=2) == trained(plain, samples)


def test_names_of_weights_and_the_classes_are_as_they_were(make_pipeline: MakePipeline) -> None:
    pipeline = make_pipeline("gpt2-tied", 3)
    stage = pipeline.stages[1]
    untouched = StageModule(pipeline.checkpoint.config, stage.layers)
    module = stage.weights.module
    assert list(module.state_dict()) == list(untouched.state_dict())
    deferred = [layer for layer in module.modules() if "forward" in vars(layer)]
    assert {type(layer) for layer in deferred} == {Conv1D}
    assert not any("forward" in vars(layer) for layer in untouched.modules())
    stage.weights.linears.restore()
    assert not any("forward" in vars(layer) for layer in module.modules())


def test_a_weight_with_two_roles_is_left_to_autograd(make_pipeline: MakePipeline) -> None:
    roles = [
        make_pipeline("llama-tied", 1, sync_tied_embeddings=sync).stages[0]
        for sync in (True, False)
    ]
    heads = [stage.weights.module.get_submodule("lm_head") for stage in roles]
    assert ["forward" in vars(head) for head in heads] == [False, True]


# ---- order, and what is held


@pytest.fixture
def pair(make_pipeline: MakePipeline, samples: Tensor) -> list[StageEngine]:
    """First and last stage of a two-stage swarm, with one microbatch's backward."""
    stages = make_pipeline("gpt2-tied", 2).stages
    for stage in stages:
        stage.begin_step(STEP, 22)
    first, last = stages
    made = last.forward_backward(MICROBATCH, first.forward(MICROBATCH, samples[:2]), samples[:2])
    assert made.input_gradient is not None
    first.backward(MICROBATCH, made.input_gradient)
    return stages


def test_gradients_are_not_given_away_before_they_are_complete(pair: list[StageEngine]) -> None:
    for stage in pair:
        for early in (
            stage.squared_grad_norm,
            stage.flat_gradient,
            stage.shared_gradient,
            lambda stage=stage: stage.apply(1.0, 1e-3),
        ):
            with pytest.raises(OutOfTurn, match=r"microbatches \[0\] are still to be computed"):
                early()
        stage.weight_gradients(MICROBATCH)
        assert stage.squared_grad_norm() > 0.0


def test_a_step_is_not_resumed_with_half_a_microbatch(pair: list[StageEngine]) -> None:
    stage = pair[0]
    with pytest.raises(OutOfTurn, match=r"half of \[0\]"):
        stage.resume_step(STEP, frozenset(), None)
    stage.weight_gradients(MICROBATCH)
    stage.resume_step(STEP, frozenset({MICROBATCH}), None)


def test_a_step_is_not_resumed_after_weights_that_failed(
    pair: list[StageEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: WeightProduct) -> None:
        raise MemoryError

    monkeypatch.setattr(WeightProduct, "accumulate", fail)
    with pytest.raises(MemoryError):
        pair[0].weight_gradients(MICROBATCH)
    with pytest.raises(OutOfTurn, match="cannot be resumed"):
        pair[0].resume_step(STEP, frozenset(), None)  # who computes them does not know it as done
    with pytest.raises(OutOfTurn, match="had no backward"):
        pair[0].weight_gradients(MICROBATCH)


def test_weights_of_what_had_no_backward_are_out_of_turn(
    pair: list[StageEngine], samples: Tensor
) -> None:
    pair[0].forward(MicrobatchIndex(1), samples[:2])
    with pytest.raises(OutOfTurn, match="microbatch 1 had no backward"):
        pair[0].weight_gradients(MicrobatchIndex(1))


def test_beginning_again_drops_what_was_left(pair: list[StageEngine], samples: Tensor) -> None:
    for stage in pair:
        stage.begin_step(STEP, 22)
        assert stage.squared_grad_norm() == 0.0
        with pytest.raises(OutOfTurn):
            stage.weight_gradients(MICROBATCH)


def test_what_a_microbatch_left_is_freed_with_its_weights(pair: list[StageEngine]) -> None:
    left = [weakref.ref(t) for p in pair[0].open_step.products[MICROBATCH] for t in p.tensors]
    assert left
    gc.collect()
    assert all(ref() is not None for ref in left)
    pair[0].weight_gradients(MICROBATCH)
    gc.collect()
    assert all(ref() is None for ref in left)


def test_microbatches_share_one_copy_of_the_weights_in_autocast(
    make_pipeline: MakePipeline, samples: Tensor
) -> None:
    stage = make_pipeline("gpt2-tied", 1, dtype=torch.bfloat16).stages[0]
    plain_bytes = stage.state_bytes
    stage.begin_step(STEP, 22)
    assert stage.state_bytes == plain_bytes
    sizes = []
    for index in map(MicrobatchIndex, range(2)):
        stage.forward_backward(index, samples[:2], samples[:2])
        sizes.append(stage.state_bytes - plain_bytes)
    linears = [m for m in stage.weights.module.modules() if isinstance(m, nn.Linear | Conv1D)]
    assert sizes == [2 * sum(p.numel() for m in linears for p in m.parameters())] * 2
    for index in map(MicrobatchIndex, range(2)):
        stage.weight_gradients(index)
    stage.apply(1.0, 1e-3)
    assert stage.state_bytes == plain_bytes, "weights have changed"


def test_a_stage_that_is_let_go_of_gives_its_memory_back_at_once(
    make_pipeline: MakePipeline, samples: Tensor
) -> None:
    pipeline = make_pipeline("gpt2-tied", 2)
    pipeline.train(samples)
    weights = [
        weakref.ref(parameter)
        for stage in pipeline.stages
        for parameter in stage.weights.module.parameters()
    ]
    gc.collect()
    gc.disable()
    try:
        pipeline.stages.clear()
        assert all(weight() is None for weight in weights)
    finally:
        gc.enable()


# ---- single layers


def both_ways(layer: nn.Module, x: Tensor, gradient: Tensor) -> list[list[Tensor | None]]:
    """Output, input gradient and the weights' gradients: autograd's, and in two parts."""
    results = []
    for is_split in (False, True):
        own, x_own = copy.deepcopy(layer), x.detach().requires_grad_(x.requires_grad)
        linears = DeferredLinears(own) if is_split else None
        of_input: list[Tensor] = []
        if x.requires_grad:
            # As it comes: what is kept lies as the input does.
            x_own.register_hook(of_input.append)  # type: ignore[no-untyped-call]
        y = own(x_own)
        y.backward(gradient)
        if linears is not None:
            assert all(p.grad is None for p in own.parameters())
            for product in linears.take():
                product.accumulate()
        results.append([y, *of_input, *(p.grad for p in own.parameters())])
    return results


LAYERS = {
    "linear": partial(nn.Linear, 24, 40),
    "without bias": partial(nn.Linear, 24, 40, bias=False),
    "Conv1D": partial(Conv1D, 40, 24),
}


def assert_same(one: list[Tensor | None], other: list[Tensor | None]) -> None:
    for a, b in zip(one, other, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert torch.equal(a, b)
            assert a.stride() == b.stride()


@pytest.mark.parametrize("make_layer", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("rows", [(3, 17), (51,), (2, 3, 17), (1, 1)], ids=str)
@pytest.mark.parametrize("needs_gradient", [True, False])
def test_a_layer_has_the_bits_of_its_class(
    make_layer: Callable[[], nn.Module],
    rows: tuple[int, int] | tuple[int] | tuple[int, int, int],
    needs_gradient: bool,
) -> None:
    x = torch.randn(*rows, 24, requires_grad=needs_gradient)
    assert_same(*both_ways(make_layer(), x, torch.randn(*rows, 40)))


@pytest.mark.parametrize("make_layer", LAYERS.values(), ids=LAYERS)
def test_gradients_with_gaps_between_rows_are_summed_alike(
    make_layer: Callable[[], nn.Module],
) -> None:
    x = torch.randn(4, 9, 24, requires_grad=True)
    gradient = torch.randn(4, 40, 9).transpose(1, 2)
    assert_same(*both_ways(make_layer(), x, gradient))


@pytest.mark.parametrize("make_layer", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("shape", [(1, 9, 24), (1, 1, 24), (9, 24)], ids=str)
def test_an_inputs_gradient_lies_as_autograds(
    make_layer: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    """The backward of the layer in front, such as a GELU, may round by it."""
    *samples, tokens, channels = shape
    x = torch.randn(*samples, channels, tokens).transpose(-1, -2).requires_grad_()
    assert_same(*both_ways(make_layer(), x, torch.randn(*samples, tokens, 40)))


def gradient_of(weight: nn.Parameter) -> Tensor:
    assert weight.grad is not None
    return weight.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make_layer", LAYERS.values(), ids=LAYERS)
def test_a_large_weights_product_is_added_in_place(
    make_layer: Callable[[], nn.Module], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x_ni, gradient_no = make_layer(), torch.randn(17, 24), torch.randn(17, 40)
    product = WeightProduct(layer, x_ni.to(dtype), gradient_no.to(dtype))
    for _ in range(2):
        product.accumulate()
    weight = layer.get_parameter("weight")
    expected = gradient_of(weight)
    layer.zero_grad()
    block_bytes = 4 * weight[0].nbytes
    monkeypatch.setattr(weight_products, "LARGE_BYTES", block_bytes)
    monkeypatch.setattr(weight_products, "BLOCK_BYTES", block_bytes)
    product.accumulate()
    live = LiveBytes()
    with live:
        present = [*product.tensors, *(one.grad for one in layer.parameters())]
        seen = [one.detach() for one in present if one is not None]
        before = live.now
        live.begin()
        product.accumulate()
    assert seen
    assert live.most - before < weight.nbytes / 2
    torch.testing.assert_close(gradient_of(weight), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("make_layer", LAYERS.values(), ids=LAYERS)
def test_a_large_weight_in_bfloat16_is_cast_in_blocks(
    make_layer: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x, gradient = make_layer().bfloat16(), torch.randn(3, 17, 24), torch.randn(3, 17, 40)
    layer.requires_grad_(False)
    linears, found, peaks = DeferredLinears(layer), [], []
    for large_bytes in (1 << 20, 100):
        monkeypatch.setattr(weight_products, "LARGE_BYTES", large_bytes)
        monkeypatch.setattr(weight_products, "BLOCK_BYTES", 400)
        x_own, live = x.clone().requires_grad_(), LiveBytes()
        with live:
            present = [one.detach() for one in (x_own, gradient, *layer.parameters())]
            before = live.now
            y = layer(x_own)
            y.backward(gradient)
        assert x_own.grad is not None
        peaks.append(live.most - before)
        found.append((y.detach(), x_own.grad))
    del present
    assert not linears.take()
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert peaks[1] < peaks[0] - 24 * 40 * 4 / 2


def test_a_part_of_each_sample_is_summed_alike() -> None:
    x = torch.randn(4, 9, 24)[:, :-1].requires_grad_()
    assert not x.is_contiguous()
    assert_same(*both_ways(LAYERS["without bias"](), x, torch.randn(4, 8, 40)))
