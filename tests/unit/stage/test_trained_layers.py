"""Blocks that do not train are constants: no gradient, no moment, no backward below the lowest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from swarm_ft.errors import BadOption, OutOfTurn
from swarm_ft.ids import MicrobatchIndex, StepNumber
from swarm_ft.protocol.spec.run_spec import COPIES_PER_WEIGHT, LrSchedule, TrainSpec
from swarm_ft.protocol.spec.training_plan import learning_rate_at, step_microbatches
from tests.unit.stage.conftest import NUM_BLOCKS, SEQ_LENGTH, MakePipeline, Pipeline

PLAIN: dict[str, Any] = {
    "lr_schedule": LrSchedule.CONSTANT,
    "warmup_steps": 0,
    "clip_grad_norm": 0.0,
}


def trained_whole(pipeline: Pipeline, names: set[str], samples: Tensor) -> tuple[list[float], Any]:
    """Losses and model of plain torch, in which only `names` train."""
    train: TrainSpec = pipeline.spec.train
    model = AutoModelForCausalLM.from_pretrained(pipeline.checkpoint.reference).eval()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in names)
    own = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in own if p.ndim > 1]},
        {"params": [p for p in own if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=train.weight_decay)
    losses = []
    for step in map(StepNumber, range(train.num_steps)):
        batches, loss_sum = step_microbatches(train, step), 0.0
        num_targets = sum(len(b.samples) for b in batches) * (SEQ_LENGTH - 1)
        optimizer.zero_grad()
        for batch in batches:
            tokens = samples[list(batch.samples)]
            logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
            loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
            torch.autograd.backward(loss / num_targets)
            loss_sum += loss.item()
        losses.append(loss_sum / num_targets)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(train, step)
        optimizer.step()
    return losses, model


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("train_layers", ["2-", "0-2", "1-3", "3-4"])
@pytest.mark.sampled(5)
def test_stages_train_as_the_whole_model_with_its_other_blocks_frozen(
    make_pipeline: MakePipeline, samples: Tensor, train_layers: str, num_stages: int
) -> None:
    pipeline = make_pipeline("gpt2-tied", num_stages, train_layers=train_layers, **PLAIN)
    names = {name for stage in pipeline.stages for name in stage.weights.module.trainable()}
    losses, model = trained_whole(pipeline, names, samples)
    assert pipeline.train(samples) == losses
    own = dict(model.named_parameters())
    for stage in pipeline.stages:
        for name, parameter in stage.weights.module.named_parameters():
            assert torch.equal(parameter, own[name]), name


def test_embeddings_train_with_the_first_block_and_the_head_with_the_last(
    make_pipeline: MakePipeline,
) -> None:
    def trained(layers: str) -> set[str]:
        (stage,) = make_pipeline("gpt2-tied", 1, train_layers=layers).stages
        return {name.removeprefix("transformer.")[:4] for name in stage.weights.module.trainable()}

    ends = {"wte.", "wpe."}, {"ln_f", "lm_h"}
    blocks = [f"h.{index}." for index in range(NUM_BLOCKS)]
    assert trained("") == {*blocks, *ends[0], *ends[1]}
    assert trained("2-") == {*blocks[2:], *ends[1]}
    assert trained("0-2") == {*blocks[:2], *ends[0]}
    assert trained("1-2") == {blocks[1]}


def test_a_stage_holds_gives_and_takes_only_what_trains(
    make_pipeline: MakePipeline, samples: Tensor
) -> None:
    pipeline = make_pipeline("llama", 2, train_layers="1-3")
    pipeline.train(samples)
    for stage in pipeline.stages:
        own = stage.weights.module.trainable()
        weights = [name for name in stage.state() if not name.startswith("adamw/")]
        assert weights == list(own)
        num_values = sum(parameter.numel() for parameter in own.values())
        assert (
            stage.num_values
            == num_values
            < sum(parameter.numel() for parameter in stage.weights.module.parameters())
        )
        total = sum(parameter.nbytes for parameter in stage.weights.module.parameters())
        assert stage.state_bytes == total + 4 * (COPIES_PER_WEIGHT - 1) * num_values
        frozen = set(dict(stage.weights.module.named_parameters())) - set(own)
        assert all(stage.weights.module.get_parameter(name).grad is None for name in frozen)


def test_who_takes_a_stage_over_reads_what_is_frozen_for_itself(
    make_pipeline: MakePipeline, samples: Tensor
) -> None:
    original, other = (make_pipeline("llama", 2, train_layers="1-3", num_steps=4) for _ in range(2))
    for step in range(2):
        original.gradients(step, samples)
        original.commit(step)
    for one, newcomer in zip(original.stages, other.stages, strict=True):
        newcomer.load_state(one.state())
    for step in range(2, 4):
        assert original.gradients(step, samples) == other.gradients(step, samples)
        for pipeline in (original, other):
            pipeline.commit(step)
    assert original.digests() == other.digests()


def test_below_the_lowest_that_trains_nothing_is_kept_of_a_microbatch(
    make_pipeline: MakePipeline, samples: Tensor
) -> None:
    pipeline = make_pipeline("gpt2-tied", 4, train_layers="2-")
    assert [stage.has_backward for stage in pipeline.stages] == [False, False, True, True]
    assert [stage.sends_gradients for stage in pipeline.stages] == [False, False, False, True]
    stage, microbatch = pipeline.stages[0], MicrobatchIndex(0)
    stage.begin_step(StepNumber(0), 22)
    output = stage.forward(microbatch, samples[:2])
    with pytest.raises(OutOfTurn):
        stage.backward(microbatch, torch.zeros_like(output))
    stage.weight_gradients(microbatch)
    stage.resume_step(StepNumber(0), frozenset({microbatch}), None)
    assert stage.squared_grad_norm() == 0.0


def test_a_stage_without_anything_that_trains_has_something_to_sum(
    make_pipeline: MakePipeline, samples: Tensor
) -> None:
    stage = make_pipeline("gpt2-tied", 4, train_layers="2-").stages[0]
    stage.begin_step(StepNumber(0), 22)
    assert torch.equal(stage.flat_gradient(), torch.zeros(1))
    stage.take_sum(torch.zeros(1))
    stage.apply(1.0, 1e-3)
    assert stage.state() == {}
    stage.load_state({})


@pytest.mark.parametrize(("train_layers", "is_tied"), [("1-3", True), ("1-", False)])
def test_a_model_stays_tied_while_neither_end_trains(
    make_pipeline: MakePipeline,
    samples: Tensor,
    tmp_path: Path,
    train_layers: str,
    is_tied: bool,
) -> None:
    pipeline = make_pipeline("gpt2-tied", 2, train_layers=train_layers)
    pipeline.train(samples)
    weight_map = pipeline.export(tmp_path)
    assert pipeline.spec.keeps_tied == is_tied
    assert ("lm_head.weight" in weight_map) != is_tied
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    pipeline.checkpoint.save_config(tmp_path, tie_word_embeddings=is_tied)
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    own = dict(model.named_parameters())
    for stage in pipeline.stages:
        for name, parameter in stage.weights.module.trainable().items():
            assert torch.equal(parameter, own[name])


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"train_layers": "4-"}, "--train-layers: .*the model has blocks 0-4"),
        ({"train_layers": "2-9"}, "--train-layers: .*the model has blocks 0-4"),
        ({"train_layers": "3-2"}, "--train-layers"),
        ({"train_layers": "upper"}, "--train-layers: .*expected START-"),
        ({"train_layers": "1-", "sync_tied_embeddings": True}, "--tied-embeddings sync"),
    ],
)
def test_what_cannot_train_so_is_refused(
    make_pipeline: MakePipeline, changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(BadOption, match=why):
        make_pipeline("gpt2-tied", 1, **changes)
