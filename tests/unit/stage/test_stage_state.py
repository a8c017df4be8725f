"""A stage goes on from a saved state as if nothing had happened, and from no other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from swarm_ft.errors import BadSnapshot, OutOfTurn
from swarm_ft.ids import RunId, StepNumber
from swarm_ft.protocol.messages.shard import ShardName
from swarm_ft.snapshots.shard import ShardContents, read_shard, write_shard
from swarm_ft.stage.engine import StageEngine
from tests.states import state_digest
from tests.unit.stage.conftest import MakeModel, MakePipeline, Pipeline

Lie = Callable[[dict[str, Tensor]], object]
"""What is done to a state."""


def train(pipeline: Pipeline, samples: Tensor, steps: Iterable[int]) -> list[float]:
    losses = []
    for step in steps:
        losses.append(pipeline.gradients(step, samples))
        pipeline.commit(step)
    return losses


def digests(pipeline: Pipeline) -> list[bytes]:
    return [state_digest(stage.state()) for stage in pipeline.stages]


@pytest.mark.parametrize(
    ("name", "num_stages", "changes"),
    [
        ("gpt2-tied", 2, {"dropout": True}),
        ("gpt2-tied", 2, {"sync_tied_embeddings": True}),
        ("gpt2-tied", 1, {"sync_tied_embeddings": True}),
        ("llama", 3, {}),
    ],
    ids=["gpt2-dropout", "gpt2-synchronised", "gpt2-one-tensor", "llama"],
)
def test_training_goes_on_bit_equal_from_a_saved_state(
    make_pipeline: MakePipeline,
    samples: Tensor,
    name: str,
    num_stages: int,
    changes: dict[str, Any],
) -> None:
    original = make_pipeline(name, num_stages, num_steps=6, **changes)
    train(original, samples, range(3))
    states = [stage.state() for stage in original.stages]
    losses = train(original, samples, range(3, 6))

    resumed = make_pipeline(name, num_stages, num_steps=6, **changes)
    for stage, state in zip(resumed.stages, states, strict=True):
        stage.load_state(state)
    assert train(resumed, samples, range(3, 6)) == losses
    assert digests(resumed) == digests(original)
    assert resumed.digests() == original.digests()


def test_a_stage_goes_on_from_its_shard_in_a_file(
    make_pipeline: MakePipeline, samples: Tensor, tmp_path: Path
) -> None:
    original, resumed = (make_pipeline("gpt2-tied", 2, num_steps=6) for _ in range(2))
    spec = original.spec.digest()
    train(original, samples, range(3))
    for stage, other in zip(original.stages, resumed.stages, strict=True):
        name = ShardName(run_id=RunId("run"), step=StepNumber(3), layers=stage.layers)
        path = write_shard(tmp_path, name, spec, ShardContents(state=stage.state()))
        other.load_state(read_shard(path, name, spec).state)
        path.unlink()
    assert train(resumed, samples, range(3, 6)) == train(original, samples, range(3, 6))
    assert digests(resumed) == digests(original)


def test_without_the_moments_it_would_not_be_bit_equal(
    make_pipeline: MakePipeline, samples: Tensor
) -> None:
    original, resumed = (make_pipeline("llama", 1, num_steps=6) for _ in range(2))
    train(original, samples, range(3))
    state = original.stages[0].state()
    for key in state:
        if key.startswith("adamw/"):
            state[key] = torch.zeros_like(state[key])
    resumed.stages[0].load_state(state)
    assert train(resumed, samples, range(3, 5))[1] != train(original, samples, range(3, 5))[1]


def test_a_stage_that_was_never_stepped_has_a_state_too(
    make_pipeline: MakePipeline, samples: Tensor
) -> None:
    fresh, other = make_pipeline("llama", 1), make_pipeline("llama", 1)
    train(other, samples, range(2))
    other.stages[0].load_state(fresh.stages[0].state())
    assert digests(other) == digests(fresh)
    assert train(other, samples, range(2)) == train(fresh, samples, range(2))
    assert digests(other) == digests(fresh)


def test_a_state_does_not_change_with_the_stage_and_a_stage_not_with_its_state(
    make_pipeline: MakePipeline, samples: Tensor
) -> None:
    pipeline = make_pipeline("llama", 1)
    stage = pipeline.stages[0]
    train(pipeline, samples, range(1))
    state = stage.state()
    before = state_digest(state)
    train(pipeline, samples, range(1, 2))
    assert state_digest(state) == before
    stage.load_state(state)
    for tensor in state.values():
        tensor.zero_()
    assert state_digest(stage.state()) == before


def test_an_open_step_is_dropped_with_its_gradients(
    make_pipeline: MakePipeline, samples: Tensor
) -> None:
    pipeline, quiet = make_pipeline("llama", 1), make_pipeline("llama", 1)
    state = pipeline.stages[0].state()
    pipeline.gradients(0, samples)
    pipeline.stages[0].load_state(state)
    with pytest.raises(OutOfTurn, match="no step"):
        pipeline.stages[0].apply(1.0, 1e-3)
    assert train(pipeline, samples, range(2)) == train(quiet, samples, range(2))


def changed(key: str, value: Callable[[Tensor], Tensor]) -> Lie:
    return lambda state: state.update({key: value(state[key])})


def spoiled(value: float) -> Callable[[Tensor], Tensor]:
    def spoil(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor.reshape(-1)[-1] = value
        return tensor

    return spoil


HEAD = "lm_head.weight"
LIES: dict[str, tuple[Lie, str]] = {
    "a tensor is missing": (lambda state: state.pop(HEAD), f"missing: {HEAD}"),
    "a moment is missing": (
        lambda state: state.pop(f"adamw/exp_avg/{HEAD}"),
        f"missing: adamw/exp_avg/{HEAD}",
    ),
    "a tensor too many": (lambda state: state.update({"more": torch.zeros(1)}), "unknown: more"),
    "another shape": (changed(HEAD, lambda t: t[:-1]), "expected lm_head.weight as torch.float32"),
    "the same number of values": (changed(HEAD, lambda t: t.T), "expected lm_head.weight as"),
    "another dtype": (changed(HEAD, lambda t: t.double()), "got torch.float64"),
    "a weight that is NaN": (changed(HEAD, spoiled(float("nan"))), "lm_head.weight is inf or NaN"),
    "a moment that is inf": (
        changed(f"adamw/exp_avg/{HEAD}", spoiled(float("inf"))),
        "exp_avg/lm_head.weight is inf or NaN",
    ),
    "a negative square": (changed(f"adamw/exp_avg_sq/{HEAD}", spoiled(-1e-9)), "is negative"),
    "half a step": (changed(f"adamw/step/{HEAD}", lambda _: torch.tensor(1.5)), "whole number"),
    "steps before the first": (changed(f"adamw/step/{HEAD}", lambda _: torch.tensor(-1.0)), "-1"),
    "no number of steps": (
        changed(f"adamw/step/{HEAD}", lambda _: torch.tensor(float("nan"))),
        "got nan",
    ),
    "endless steps": (changed(f"adamw/step/{HEAD}", lambda _: torch.tensor(1e30)), "whole number"),
    "nothing": (lambda state: state.clear(), "and 77 more"),
}


@pytest.mark.parametrize(("lie", "match"), LIES.values(), ids=LIES)
def test_a_state_of_another_stage_is_refused_and_changes_nothing(
    make_pipeline: MakePipeline, samples: Tensor, lie: Lie, match: str
) -> None:
    pipeline = make_pipeline("llama", 3)
    stage = pipeline.stages[-1]
    train(pipeline, samples, range(1))
    before, state = digests(pipeline), stage.state()
    state["model.norm.weight"] += 1
    lie(state)
    with pytest.raises(BadSnapshot, match=match):
        stage.load_state(state)
    assert digests(pipeline) == before


def test_a_state_needs_a_loaded_stage(make_pipeline: MakePipeline, make_model: MakeModel) -> None:
    pipeline = make_pipeline("llama", 2)
    stage = pipeline.stages[0]
    cold = StageEngine(
        pipeline.checkpoint,
        pipeline.spec,
        stage.layers,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    for use in (cold.state, lambda: cold.load_state(stage.state())):
        with pytest.raises(OutOfTurn, match="load"):
            use()
