"""Weights that all blocks read: each stage holds a copy, and all copies stay one."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file, save_file
from torch import Tensor
from transformers import AutoModelForMaskedLM, DebertaV2Config

from swarm_ft.errors import BadModel, BadOption, MalformedMessage, RunMismatch
from swarm_ft.ids import StepNumber
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import BaseDtype, TaskKind
from swarm_ft.protocol.spec.training_plan import step_samples
from swarm_ft.stage.architecture import SHARED_PART
from swarm_ft.stage.checkpoint import open_checkpoint
from tests.unit.stage.conftest import MakeTrainSpec, Pipeline, save_random_model
from tests.unit.stage.test_adapters import LORA
from tests.unit.stage.test_classifiers import (
    ENCODERS,
    pipeline_of,
    rows_for,
    save_model,
    step_gradients,
    whole_loss,
    whole_model,
)
from tests.unit.stage.test_stage_parity import relative_error

KIND = TaskKind.CLASSIFICATION
TABLE = "deberta.encoder.rel_embeddings.weight"
SHARED = ["deberta.encoder.LayerNorm.bias", "deberta.encoder.LayerNorm.weight", TABLE]


def shared_in(pipeline: Pipeline) -> list[dict[str, Tensor]]:
    """Return the shared weights of each stage."""
    part_of = pipeline.checkpoint.architecture.part_of
    return [
        {
            name: weight.detach()
            for name, weight in stage.weights.module.named_parameters()
            if part_of(name) == SHARED_PART
        }
        for stage in pipeline.stages
    ]


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_all_stages_hold_the_same_bits_and_train_as_one_does(
    make_train_spec: MakeTrainSpec, tmp_path: Path, num_stages: int
) -> None:
    source, rows = save_model("deberta-v3", tmp_path), rows_for(KIND)
    one, cut = (pipeline_of(source, make_train_spec, KIND, n) for n in (1, num_stages))
    (begun,) = shared_in(one)
    begun = {name: weight.clone() for name, weight in begun.items()}
    assert sorted(begun) == SHARED
    for step in range(cut.spec.train.num_steps):
        losses = [step_gradients(pipeline, step, rows) for pipeline in (one, cut)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-6)
        for pipeline in (one, cut):
            pipeline.commit(step)
        assert cut.grad_norms[-1] == pytest.approx(one.grad_norms[-1], rel=1e-5)
        first, *others = shared_in(cut)
        for other in others:
            assert all(torch.equal(first[name], other[name]) for name in SHARED)
    (whole,) = shared_in(one)
    for name in SHARED:
        assert not torch.equal(first[name], begun[name])
        assert relative_error(name, first[name], whole[name]) < 1e-5


def test_the_gradient_is_a_sum_over_all_stages_each_with_a_part(
    make_train_spec: MakeTrainSpec, tmp_path: Path
) -> None:
    source, rows = save_model("deberta-v3", tmp_path), rows_for(KIND)
    pipeline = pipeline_of(source, make_train_spec, KIND, 3)
    train, model = pipeline.spec.train, whole_model(pipeline, KIND)
    torch.autograd.backward(whole_loss(model, rows[list(step_samples(train, StepNumber(0)))]))
    expected = torch.cat([model.get_parameter(name).grad.flatten() for name in SHARED])
    step_gradients(pipeline, 0, rows)
    parts = [stage.shared_gradient() for stage in pipeline.stages]
    assert all(bool(part.any()) for part in parts)
    assert relative_error(TABLE, torch.stack(parts).sum(0), expected) < 1e-5
    assert len(expected) == pipeline.spec.shared_values


def test_the_norm_counts_them_once(make_train_spec: MakeTrainSpec, tmp_path: Path) -> None:
    pipeline = pipeline_of(save_model("deberta-v3", tmp_path), make_train_spec, KIND, 3)
    step_gradients(pipeline, 0, rows_for(KIND))
    total = torch.ones(pipeline.spec.shared_values)
    for stage in pipeline.stages:
        stage.set_shared_gradient(torch.zeros_like(total))
    without = [stage.squared_grad_norm() for stage in pipeline.stages]
    for stage in pipeline.stages:
        stage.set_shared_gradient(total)
    added = [stage.squared_grad_norm() for stage in pipeline.stages]
    assert added[0] == pytest.approx(without[0] + len(total))
    assert added[1:] == without[1:]
    for bad in (total[1:], total.double()):
        with pytest.raises(MalformedMessage, match="shared weights: expected a float32 gradient"):
            pipeline.stages[1].set_shared_gradient(bad)


@pytest.mark.parametrize("more", [{"train_layers": "2-"}, LORA, LORA | {"merge": True}], ids=str)
def test_where_they_are_frozen_every_stage_holds_them_and_nothing_is_summed(
    make_train_spec: MakeTrainSpec, tmp_path: Path, more: dict[str, Any]
) -> None:
    source, rows = save_model("deberta-v3", tmp_path), rows_for(KIND)
    begun = load_file(source / "model.safetensors")
    pipeline = pipeline_of(source, make_train_spec, KIND, 3, **more)
    assert pipeline.spec.sharing(pipeline.stages) == ()
    losses = []
    for step in range(pipeline.spec.train.num_steps):
        losses.append(step_gradients(pipeline, step, rows))
        assert not any(len(stage.shared_gradient()) for stage in pipeline.stages)
        pipeline.commit(step)
    assert len(set(losses)) == len(losses)
    for own in shared_in(pipeline):
        assert all(torch.equal(own[name], begun[name]) for name in SHARED)


def test_a_whole_model_whose_table_is_frozen_trains_alike(
    make_train_spec: MakeTrainSpec, tmp_path: Path
) -> None:
    source, rows = save_model("deberta-v3", tmp_path), rows_for(KIND)
    pipeline = pipeline_of(source, make_train_spec, KIND, 3, train_layers="2-")
    train, model = pipeline.spec.train, whole_model(pipeline, KIND)
    own = {name for stage in pipeline.stages for name in stage.weights.module.trainable()}
    for name, weight in model.named_parameters():
        weight.requires_grad_(name in own)
    loss = whole_loss(model, rows[list(step_samples(train, StepNumber(0)))])
    torch.autograd.backward(loss)
    assert step_gradients(pipeline, 0, rows) == pytest.approx(loss.item(), rel=1e-6)
    norms = [model.get_parameter(name).grad.double().square().sum().item() for name in own]
    expected = math.sqrt(sum(norms))
    pipeline.commit(0)
    assert pipeline.grad_norms == pytest.approx([expected], rel=1e-5)


def test_the_first_stage_alone_writes_them_down(
    make_train_spec: MakeTrainSpec, tmp_path: Path
) -> None:
    source = save_model("deberta-v3", tmp_path)
    for more in ({}, LORA | {"merge": True}):
        pipeline = pipeline_of(source, make_train_spec, KIND, 3, **more)
        exported = [set(load(b"".join(stage.export()))) & set(SHARED) for stage in pipeline.stages]
        assert exported == [set(SHARED), set(), set()]


def test_who_takes_a_stage_over_takes_its_copy_along(
    make_train_spec: MakeTrainSpec, tmp_path: Path
) -> None:
    source, rows = save_model("deberta-v3", tmp_path), rows_for(KIND)
    original, other = (pipeline_of(source, make_train_spec, KIND, 3) for _ in range(2))
    step_gradients(original, 0, rows)
    original.commit(0)
    for stage, newcomer in zip(original.stages, other.stages, strict=True):
        newcomer.load_state(stage.state())
    for pipeline in (original, other):
        step_gradients(pipeline, 1, rows)
        pipeline.commit(1)
    assert original.digests() == other.digests()


def test_a_base_in_bfloat16_leaves_them_in_float32(
    make_train_spec: MakeTrainSpec, tmp_path: Path
) -> None:
    source = save_model("deberta-v3", tmp_path)
    pipeline = pipeline_of(source, make_train_spec, KIND, 2, **LORA, base_dtype=BaseDtype.BFLOAT16)
    assert {one.dtype for own in shared_in(pipeline) for one in own.values()} == {torch.float32}
    loss = step_gradients(pipeline, 0, rows_for(KIND))
    assert math.isfinite(loss)


@pytest.mark.parametrize("more", [{}, {"train_layers": "1-"}, {"train_layers": "3-"}], ids=str)
def test_what_a_stage_in_the_middle_holds_is_what_the_spec_says(
    make_train_spec: MakeTrainSpec, tmp_path: Path, more: dict[str, Any]
) -> None:
    pipeline = pipeline_of(save_model("deberta-v3", tmp_path), make_train_spec, KIND, 4, **more)
    assert pipeline.spec.model.shared_bytes == 4 * sum(
        weight.numel() for weight in shared_in(pipeline)[0].values()
    )
    for stage in pipeline.stages[1:3]:
        assert stage.state_bytes == pipeline.spec.memory_bytes(stage.layers)


def test_every_stage_checks_them(make_train_spec: MakeTrainSpec, tmp_path: Path) -> None:
    source = save_model("deberta-v3", tmp_path)
    pipeline = pipeline_of(source, make_train_spec, KIND, 2)
    path, spec = source / "model.safetensors", pipeline.spec
    tensors = load_file(path)
    tensors[TABLE] = tensors[TABLE].clone()
    tensors[TABLE][0, 0] += 1
    save_file(tensors, path, metadata={"format": "pt"})
    other = open_checkpoint(str(source), spec.train)
    with pytest.raises(RunMismatch, match="the model differs in its block 1"):
        other.load(LayerRange(1, 2), spec.model)
    lying = replace(spec.model, shared_bytes=spec.model.shared_bytes + 4)
    with pytest.raises(RunMismatch, match="the model differs in its config"):
        other.load(LayerRange(1, 2), lying)


def test_a_model_without_them_shares_nothing(
    make_train_spec: MakeTrainSpec, tmp_path: Path
) -> None:
    config = DebertaV2Config(**ENCODERS["bert"].to_diff_dict() | {"model_type": "deberta-v2"})
    source = save_random_model(config, tmp_path, auto=AutoModelForMaskedLM)
    pipeline = pipeline_of(source, make_train_spec, KIND, 2)
    assert pipeline.checkpoint.architecture.shared == ()
    assert pipeline.spec.model.shared_bytes == pipeline.spec.shared_values == 0
    assert pipeline.spec.sharing(pipeline.stages) == ()


def test_the_first_deberta_is_not_computed_in_bfloat16_and_the_others_are(
    make_train_spec: MakeTrainSpec, tmp_path: Path
) -> None:
    train, rows = make_train_spec(task_kind=KIND, label_names="bad,fair,good"), rows_for(KIND)
    first, third = (
        open_checkpoint(str(save_model(family, tmp_path / family)), train)
        for family in ("deberta", "deberta-v3")
    )
    with pytest.raises(BadOption, match="'deberta' computes in float32 alone"):
        Pipeline(first, train, 2, torch.bfloat16)
    loss = step_gradients(Pipeline(third, train, 2, torch.bfloat16), 0, rows)
    exact = step_gradients(Pipeline(third, train, 2, torch.float32), 0, rows)
    assert exact != loss == pytest.approx(exact, rel=0.01)


def test_a_convolution_between_two_blocks_is_refused(
    make_train_spec: MakeTrainSpec, tmp_path: Path
) -> None:
    config = DebertaV2Config(**ENCODERS["deberta-v3"].to_diff_dict() | {"conv_kernel_size": 3})
    source = save_random_model(config, tmp_path, auto=AutoModelForMaskedLM)
    train = make_train_spec(task_kind=KIND, label_names="a,b")
    with pytest.raises(BadModel, match=r"'deberta-v2' .* deberta\.encoder\.conv is between two"):
        open_checkpoint(str(source), train)
