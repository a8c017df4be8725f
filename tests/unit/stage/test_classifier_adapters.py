"""Adapters beside a head of classes, which trains whole: as peft's model in one piece does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load, save_file
from torch import Tensor

from swarm_ft.ids import StepNumber
from swarm_ft.protocol.spec.run_spec import Adapter, BaseDtype, TaskKind
from swarm_ft.protocol.spec.sample_rows import SECOND, Words, samples_in
from swarm_ft.protocol.spec.training_plan import learning_rate_at, step_samples
from swarm_ft.stage.adapters import CONFIG_FILE, with_adapters
from tests.unit.stage.conftest import MakeTrainSpec, Pipeline, aligned
from tests.unit.stage.test_adapters import LORA, adapter_dir, trained
from tests.unit.stage.test_classifiers import (
    AUTO,
    NAMES,
    PAD,
    has_types,
    pipeline_of,
    rows_for,
    save_model,
    step_gradients,
    whole_loss,
)
from tests.unit.stage.test_stage_parity import relative_error

CASES = [
    ("gpt2", TaskKind.CLASSIFICATION, Adapter.LORA, {"score"}),
    ("llama", TaskKind.CLASSIFICATION, Adapter.DORA, {"score"}),
    ("bert", TaskKind.CLASSIFICATION, Adapter.LORA, {"classifier", "pooler"}),
    ("roberta", TaskKind.CLASSIFICATION, Adapter.LORA, {"classifier"}),
    ("deberta-v3", TaskKind.CLASSIFICATION, Adapter.LORA, {"classifier", "pooler"}),
    ("deberta-v3", TaskKind.TOKEN_CLASSIFICATION, Adapter.LORA, {"classifier"}),
    ("deberta", TaskKind.CLASSIFICATION, Adapter.LORA, {"classifier", "pooler"}),
    ("llama", TaskKind.TOKEN_CLASSIFICATION, Adapter.LORA, {"score"}),
    ("bert", TaskKind.TOKEN_CLASSIFICATION, Adapter.DORA, {"classifier"}),
]


def adapted(
    directory: Path, make_train_spec: MakeTrainSpec, kind: TaskKind, num_stages: int, **more: Any
) -> Pipeline:
    return pipeline_of(
        directory, make_train_spec, kind, num_stages, **LORA | {"clip_grad_norm": 0.0} | more
    )


def loaded(pipeline: Pipeline, kind: TaskKind, directory: Path, **how: Any) -> Any:
    """Load by peft, beside the checkpoint as it was, with a head that was drawn anew."""
    base = AUTO[kind].from_pretrained(
        pipeline.checkpoint.reference, num_labels=len(NAMES), pad_token_id=PAD
    )
    return aligned(PeftModel.from_pretrained(base, directory, **how)).eval()


def own_name(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".modules_to_save.default", "")


@pytest.mark.parametrize(("family", "kind", "adapter", "heads"), CASES)
@pytest.mark.sampled(4)
def test_stages_train_as_pefts_whole_classifier_does(
    make_train_spec: MakeTrainSpec,
    tmp_path: Path,
    family: str,
    kind: TaskKind,
    adapter: Adapter,
    heads: set[str],
) -> None:
    source = save_model(family, tmp_path / "model")
    pipeline = adapted(source, make_train_spec, kind, 3, adapter=adapter)
    with_adapters(pipeline.checkpoint, pipeline.spec)
    train, rows = pipeline.spec.train, rows_for(kind)
    begun = adapter_dir(pipeline, tmp_path / "begun")
    model = loaded(pipeline, kind, begun, is_trainable=True)
    own = {own_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    assert own.keys() == trained(pipeline).keys()
    assert {name.split(".")[-2] for name in own if ".lora_" not in name} <= heads | {
        "dense",
        "out_proj",
    }
    decayed = [weight for weight in own.values() if weight.ndim > 1]
    spared = [weight for weight in own.values() if weight.ndim <= 1]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": spared, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, weight_decay=train.weight_decay)
    for step in range(train.num_steps):
        loss = whole_loss(model, rows[list(step_samples(train, StepNumber(step)))])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        assert step_gradients(pipeline, step, rows) == pytest.approx(loss.item(), rel=1e-5)
        pipeline.commit(step)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(train, StepNumber(step))
        optimizer.step()
    for name, weight in trained(pipeline).items():
        assert relative_error(name, weight.detach(), own[name].detach()) < 1e-4, name
    result = adapter_dir(pipeline, tmp_path / "out")
    config = json.loads((result / CONFIG_FILE).read_text())
    assert config["task_type"] == {"C": "SEQ_CLS", "T": "TOKEN_CLS"}[kind.name[0]]
    assert set(config["modules_to_save"]) == heads
    again = loaded(pipeline, kind, result)
    # A head that computes fewer tokens at once rounds otherwise.
    torch.testing.assert_close(
        logits_of(again, rows), swarm_logits(pipeline, rows), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    "base", [{"load_in_4bit": True}, {"base_dtype": BaseDtype.BFLOAT16}, {"load_in_8bit": True}]
)
def test_a_head_trains_in_float32_whatever_the_base_is_held_in(
    make_train_spec: MakeTrainSpec, tmp_path: Path, base: dict[str, Any]
) -> None:
    kind = TaskKind.CLASSIFICATION
    pipeline = adapted(save_model("bert", tmp_path), make_train_spec, kind, 2, **base)
    heads = {name: one for name, one in trained(pipeline).items() if ".lora_" not in name}
    assert {name.partition(".")[0] for name in heads} == {"classifier", "bert"}
    assert {one.dtype for one in heads.values()} == {torch.float32}
    before = {name: one.detach().clone() for name, one in heads.items()}
    rows = rows_for(kind)
    losses = []
    for step in range(pipeline.spec.train.num_steps):
        losses.append(step_gradients(pipeline, step, rows))
        pipeline.commit(step)
    assert all(torch.isfinite(torch.tensor(losses)))
    assert not [name for name, one in heads.items() if torch.equal(one, before[name])]


def logits_of(model: Any, rows: Words) -> Tensor:
    """Return the logits of each sample by itself, one row for each target."""
    ids, labels, lengths = (torch.from_numpy(one) for one in samples_in(rows))
    found = []
    with torch.no_grad():
        for row in range(len(ids)):
            own = ids[row : row + 1, : lengths[row]]
            extra = {"token_type_ids": own // SECOND} if has_types(model) else {}
            logits = model(input_ids=own % SECOND, **extra).logits[0]
            is_target = labels[row, : lengths[row]] >= 0
            found.append(logits[None] if logits.ndim == 1 else logits[is_target])
    return torch.cat(found)


def swarm_logits(pipeline: Pipeline, rows: Words) -> Tensor:
    """The same by the stages."""
    ids, labels, lengths = (torch.from_numpy(one) for one in samples_in(rows))
    found = []
    with torch.no_grad():
        for row in range(len(ids)):
            x = ids[row : row + 1, : lengths[row]]
            for stage in pipeline.stages:
                x = stage.infer(x)
            module = pipeline.stages[-1].weights.module
            targets, _ = module.select(x, labels[row : row + 1, : lengths[row]])
            found.append(module.judge(targets))
    return torch.cat(found)


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_a_merged_result_is_the_whole_classifier(
    make_train_spec: MakeTrainSpec, tmp_path: Path, family: str
) -> None:
    kind, rows = TaskKind.CLASSIFICATION, rows_for(TaskKind.CLASSIFICATION)
    source = save_model(family, tmp_path / "model")
    merged, apart = (
        adapted(source, make_train_spec, kind, 2, merge=merge) for merge in (True, False)
    )
    for pipeline in (merged, apart):
        step_gradients(pipeline, 0, rows)
        pipeline.commit(0)
    out = tmp_path / "merged"
    out.mkdir()
    merged.checkpoint.config.pad_token_id = PAD
    merged.checkpoint.save_config(out, tie_word_embeddings=merged.spec.keeps_tied)
    weights: dict[str, Tensor] = {}
    for stage in merged.stages:
        weights |= load(b"".join(stage.export()))
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    model, report = AUTO[kind].from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    peft_model = loaded(apart, kind, adapter_dir(apart, tmp_path / "adapter"))
    torch.testing.assert_close(logits_of(model.eval(), rows), logits_of(peft_model, rows))


def test_a_newcomer_takes_head_and_adapters_alone(
    make_train_spec: MakeTrainSpec, tmp_path: Path
) -> None:
    kind, rows = TaskKind.CLASSIFICATION, rows_for(TaskKind.CLASSIFICATION)
    source = save_model("bert", tmp_path)
    original, other = (adapted(source, make_train_spec, kind, 2) for _ in range(2))
    step_gradients(original, 0, rows)
    original.commit(0)
    for one, newcomer in zip(original.stages, other.stages, strict=True):
        state = one.state()
        assert all(".lora_" in name or "pooler" in name or "classifier" in name for name in state)
        newcomer.load_state(state)
    assert step_gradients(original, 1, rows) == step_gradients(other, 1, rows)
    assert original.digests() == other.digests()
