"""Adapters of a model that is cut are those of peft's whole model, to the last bit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from swarm_ft.errors import BadOption
from swarm_ft.ids import StepNumber
from swarm_ft.protocol.spec.run_spec import Adapter, LrSchedule, RunSpec
from swarm_ft.protocol.spec.training_plan import learning_rate_at, step_microbatches
from swarm_ft.stage.adapters import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    save_adapter_config,
    targets_of,
    with_adapters,
)
from swarm_ft.stage.checkpoint import open_checkpoint
from tests.families import small_config
from tests.unit.stage.conftest import (
    SEQ_LENGTH,
    MakeModel,
    MakePipeline,
    MakeTrainSpec,
    Pipeline,
    aligned,
    save_random_model,
)
from tests.unit.stage.test_families import ALL, OTHERS

FAMILIES = ("gpt2", "llama", "qwen3", "qwen3_moe")
# By peft, at all their linear layers; others of their layers can be named.
REFUSED = {
    **dict.fromkeys(
        ("falcon_mamba", "mamba", "mamba2", "nemotron_h"), "'out_proj' is incompatible"
    ),
    "laguna": "reads .*shared_expert.* as something else",
}
OTHER_TARGETS = {"mamba": "in_proj,x_proj", "laguna": "q_proj,o_proj"}
LORA: dict[str, Any] = {"adapter": Adapter.LORA, "lora_r": 4, "lora_alpha": 8}
NUM_STAGES = 3


def adapter_dir(pipeline: Pipeline, directory: Path) -> Path:
    """The stages' adapters as peft has them."""
    directory.mkdir()
    tensors = {k: t for stage in pipeline.stages for k, t in load(b"".join(stage.export())).items()}
    save_file(tensors, directory / WEIGHTS_FILE, {"format": "pt"})
    save_adapter_config(directory, pipeline.checkpoint, pipeline.spec)
    return directory


def loaded(pipeline: Pipeline, directory: Path, **how: Any) -> Any:
    """The base with an adapter, by peft."""
    base = AutoModelForCausalLM.from_pretrained(pipeline.checkpoint.reference, dtype=torch.float32)
    return aligned(PeftModel.from_pretrained(base, directory, **how)).eval()


class Whole:
    """peft's model in one piece, trained in plain torch on the same microbatches."""

    def __init__(self, pipeline: Pipeline, directory: Path) -> None:
        self.model = loaded(pipeline, adapter_dir(pipeline, directory), is_trainable=True)
        self._train = train = pipeline.spec.train
        own = [p for p in self.model.parameters() if p.requires_grad]
        groups: list[dict[str, Any]] = [
            {"params": [p for p in own if p.ndim > 1]},
            {"params": [p for p in own if p.ndim <= 1], "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(groups, weight_decay=train.weight_decay)

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        prefix = "base_model.model."
        own = self.model.named_parameters()
        return {name.removeprefix(prefix): p for name, p in own if p.requires_grad}

    def gradients(self, step: int, samples: Tensor) -> float:
        self._optimizer.zero_grad()
        batches = step_microbatches(self._train, StepNumber(step))
        num_targets = sum(len(b.samples) for b in batches) * (SEQ_LENGTH - 1)
        total = 0.0
        for batch in batches:
            tokens = samples[list(batch.samples)]
            logits = self.model(input_ids=tokens, use_cache=False).logits[:, :-1]
            targets = tokens[:, 1:].flatten()
            loss = cross_entropy(logits.float().flatten(0, 1), targets, reduction="sum")
            torch.autograd.backward(loss / num_targets)
            total += loss.item()
        return total / num_targets

    def commit(self, step: int) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate_at(self._train, StepNumber(step))
        self._optimizer.step()


ROUNDED = {"gpt_oss": 1e-5}
"""Types whose experts some processors' kernels sum in another order in stages than whole; of the
largest value."""


def is_same(ours: Tensor, theirs: Tensor, family: str) -> bool:
    """Bit for bit, but for those of `ROUNDED`."""
    error = (ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30)
    return torch.equal(ours, theirs) or bool(error <= ROUNDED.get(family, 0.0))


def trained(pipeline: Pipeline) -> dict[str, torch.nn.Parameter]:
    return {
        name: parameter
        for stage in pipeline.stages
        for name, parameter in stage.weights.module.trainable().items()
    }


@pytest.mark.parametrize(
    ("family", "adapter"),
    [(family, adapter) for family in FAMILIES for adapter in (Adapter.LORA, Adapter.DORA)]
    + [
        pytest.param(name, Adapter.LORA, marks=OTHERS)
        for name in ALL
        if name not in FAMILIES and name not in REFUSED
    ],
)
@pytest.mark.sampled(3)
def test_stages_train_as_pefts_whole_model_does(
    tmp_path: Path, samples: Tensor, make_train_spec: MakeTrainSpec, family: str, adapter: Adapter
) -> None:
    source = save_random_model(small_config(family), tmp_path / "source")
    train = make_train_spec(
        **LORA | {"adapter": adapter},
        lr_schedule=LrSchedule.CONSTANT,
        warmup_steps=0,
        clip_grad_norm=0.0,
    )
    pipeline = Pipeline(open_checkpoint(str(source)), train, NUM_STAGES, torch.float32)
    whole = Whole(pipeline, tmp_path / "begun")
    assert trained(pipeline).keys() == whole.parameters().keys()
    for step in range(train.num_steps):
        losses = pipeline.gradients(step, samples), whole.gradients(step, samples)
        assert losses[0] == pytest.approx(losses[1], rel=ROUNDED.get(family, 0.0), abs=0.0)
        expected = whole.parameters()
        for name, parameter in trained(pipeline).items():
            ours, theirs = parameter.grad, expected[name].grad
            if ours is None or theirs is None:
                assert ours is None or not ours.any(), name
                assert theirs is None or not theirs.any(), name
            else:
                assert is_same(ours, theirs, family), name
        pipeline.commit(step)
        whole.commit(step)
    expected = whole.parameters()
    for name, value in trained(pipeline).items():
        assert is_same(value, expected[name], family), name
    with_adapters(pipeline.checkpoint, pipeline.spec)
    # As trainable: torch multiplies otherwise where neither factor wants a gradient.
    again = loaded(pipeline, adapter_dir(pipeline, tmp_path / "out"), is_trainable=True)
    with torch.no_grad():
        models = (whole.model, again)
        logits = [model(input_ids=samples, use_cache=False).logits for model in models]
    assert is_same(logits[0], logits[1], family)


@pytest.mark.parametrize("family", ["mamba", "laguna"])
def test_adapters_that_peft_does_not_read_are_refused(
    tmp_path: Path, make_train_spec: MakeTrainSpec, family: str
) -> None:
    source = save_random_model(small_config(family), tmp_path / "source")
    checkpoint = open_checkpoint(str(source))
    spec = RunSpec(model=checkpoint.describe(), train=make_train_spec(**LORA))
    with pytest.raises(BadOption, match=REFUSED[family]):
        with_adapters(checkpoint, spec)
    named = replace(spec, train=replace(spec.train, target_modules=OTHER_TARGETS[family]))
    with_adapters(checkpoint, named)


@pytest.mark.parametrize("family", ["deepseek_v3", "falcon"])
def test_which_layers_of_a_family_have_adapters(
    tmp_path: Path, make_train_spec: MakeTrainSpec, family: str
) -> None:
    checkpoint = open_checkpoint(str(save_random_model(small_config(family), tmp_path)))
    spec = RunSpec(model=checkpoint.describe(), train=make_train_spec(**LORA))
    names = targets_of(checkpoint.skeleton, checkpoint.architecture, spec)
    ends = {name.rpartition(".")[2] for name in names}
    assert (
        ends
        == {
            "deepseek_v3": {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"},
            "falcon": {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"},
        }[family]
    )


# ---- whatever the cut, the machine, the moment


@pytest.mark.parametrize("adapter", [Adapter.LORA, Adapter.DORA])
def test_adapters_begin_alike_wherever_the_model_is_cut(
    make_pipeline: MakePipeline, adapter: Adapter
) -> None:
    def begun(num_stages: int, **changes: Any) -> dict[str, Tensor]:
        torch.manual_seed(num_stages)
        stages = make_pipeline("gpt2-tied", num_stages, **LORA | {"adapter": adapter} | changes)
        return {name: p.detach() for name, p in trained(stages).items()}

    whole, other = begun(1), begun(1, seed=6)
    for num_stages in (2, 4):
        parts = begun(num_stages)
        assert parts.keys() == whole.keys()
        assert all(torch.equal(parts[name], tensor) for name, tensor in whole.items())
    for name, tensor in whole.items():
        assert torch.equal(tensor, other[name]) == (".lora_A." not in name), name
    drawn = torch.cat([t.flatten() for name, t in whole.items() if ".c_attn.lora_A." in name])
    assert float(drawn.abs().max()) <= 32**-0.5
    assert float(drawn.std()) == pytest.approx((32 * 3) ** -0.5, rel=0.1)


def test_dora_begins_with_the_lengths_of_the_weights(make_pipeline: MakePipeline) -> None:
    (stage,) = make_pipeline("gpt2-tied", 1, **LORA | {"adapter": Adapter.DORA}).stages
    module = stage.weights.module
    for name, lengths in module.trainable().items():
        if ".lora_magnitude_vector." in name:
            layer = name.partition(".lora_magnitude_vector.")[0]
            weight_io = module.get_parameter(f"{layer}.base_layer.weight")
            torch.testing.assert_close(lengths, weight_io.norm(dim=0))


def test_a_stage_holds_gives_and_takes_adapters_alone(
    make_pipeline: MakePipeline, samples: Tensor
) -> None:
    original, other = (make_pipeline("llama", 2, num_steps=4, **LORA) for _ in range(2))
    for step in range(2):
        original.gradients(step, samples)
        original.commit(step)
    for one, newcomer in zip(original.stages, other.stages, strict=True):
        state = one.state()
        assert all(".lora_" in name for name in state)
        assert sum(tensor.nbytes for tensor in state.values()) < one.state_bytes / 2
        newcomer.load_state(state)
    for step in range(2, 4):
        assert original.gradients(step, samples) == other.gradients(step, samples)
        for pipeline in (original, other):
            pipeline.commit(step)
    assert original.digests() == other.digests()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "changes", [{}, {"dropout": True, "lora_dropout": 0.3}, {"adapter": Adapter.DORA}]
)
@pytest.mark.sampled(4)
def test_gradients_that_are_computed_later_have_the_bits_of_autograd(
    make_pipeline: MakePipeline, samples: Tensor, changes: dict[str, Any], dtype: torch.dtype
) -> None:
    split, plain = (make_pipeline("gpt2-tied", 2, dtype=dtype, **LORA | changes) for _ in range(2))
    for stage in plain.stages:
        stage.weights.linears.restore()
    assert split.train(samples) == plain.train(samples)
    assert split.digests() == plain.digests()


def test_dropout_of_adapters_is_the_runs(make_pipeline: MakePipeline, samples: Tensor) -> None:
    def losses(num_stages: int, **changes: Any) -> list[float]:
        return make_pipeline("llama", num_stages, **LORA, **changes).train(samples)

    assert losses(2, lora_dropout=0.5) == losses(2, lora_dropout=0.0)
    drawn = losses(2, lora_dropout=0.5, dropout=True)
    assert drawn != losses(2, lora_dropout=0.0, dropout=True)
    assert drawn == losses(3, lora_dropout=0.5, dropout=True)


# ---- the result


@pytest.mark.parametrize(
    ("changes", "own_changes"),
    [
        ({}, {"layers_to_transform": None}),
        ({"target_modules": "q_proj,v_proj"}, {"target_modules": ["q_proj", "v_proj"]}),
        ({"train_layers": "2-"}, {"layers_to_transform": [2, 3]}),
        ({"adapter": Adapter.DORA, "train_layers": "1-3"}, {"use_dora": True}),
        ({"dropout": True, "lora_dropout": 0.25}, {"lora_dropout": 0.25}),
        ({"lora_dropout": 0.25}, {"lora_dropout": 0.0}),
    ],
)
def test_the_result_is_an_adapter_that_peft_loads(
    make_pipeline: MakePipeline,
    samples: Tensor,
    tmp_path: Path,
    changes: dict[str, Any],
    own_changes: dict[str, Any],
) -> None:
    pipeline = make_pipeline("llama", 2, **LORA | changes)
    with_adapters(pipeline.checkpoint, pipeline.spec)
    pipeline.train(samples)
    directory = adapter_dir(pipeline, tmp_path / "out")
    config = json.loads((directory / CONFIG_FILE).read_text())
    config["target_modules"].sort()
    expected = {
        "r": 4,
        "lora_alpha": 8,
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        **own_changes,
    }
    assert {name: config[name] for name in expected} == expected
    model = loaded(pipeline, directory, is_trainable=True)
    theirs = {n.removeprefix("base_model.model."): p for n, p in model.named_parameters()}
    ours = trained(pipeline)
    assert {name for name, p in theirs.items() if p.requires_grad} == ours.keys()
    assert all(torch.equal(theirs[name], value) for name, value in ours.items())


def test_blocks_that_names_alone_do_not_tell_are_told_whole(
    make_pipeline: MakePipeline, samples: Tensor, tmp_path: Path
) -> None:
    pipeline = make_pipeline("gpt2-tied", 1, **LORA, target_modules="attn.c_proj,c_fc")
    directory = adapter_dir(pipeline, tmp_path / "out")
    targets = json.loads((directory / CONFIG_FILE).read_text())["target_modules"]
    assert {"transformer.h.0.attn.c_proj", "transformer.h.3.mlp.c_fc"} < set(targets)
    assert len(targets) == 8
    loaded(pipeline, directory)


@pytest.mark.parametrize("adapter", [Adapter.LORA, Adapter.DORA])
@pytest.mark.parametrize("name", ["gpt2-tied", "llama"])
@pytest.mark.sampled(3)
def test_a_merged_result_is_the_whole_model(
    make_pipeline: MakePipeline, samples: Tensor, tmp_path: Path, name: str, adapter: Adapter
) -> None:
    chosen = LORA | {"adapter": adapter}
    merged, apart = (make_pipeline(name, 2, **chosen, merge=merge) for merge in (True, False))
    assert merged.train(samples) == apart.train(samples)
    out = tmp_path / "merged"
    out.mkdir()
    index = {"metadata": {}, "weight_map": merged.export(out)}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    merged.checkpoint.save_config(out, tie_word_embeddings=merged.spec.keeps_tied)
    model, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert merged.spec.keeps_tied == (name == "gpt2-tied")
    peft_model = loaded(apart, adapter_dir(apart, tmp_path / "adapter"))
    with torch.no_grad():
        torch.testing.assert_close(
            model(input_ids=samples).logits, peft_model(input_ids=samples).logits
        )
    before = merged.digests()
    assert b"".join(merged.stages[0].export())
    assert merged.digests() == before, "what trains goes on"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"target_modules": "q_proj,w_proj"}, "--target-modules w_proj: .*k_proj"),
        ({"target_modules": "lm_head"}, "--target-modules lm_head"),
        ({"target_modules": "proj"}, "--target-modules proj"),
        ({"target_modules": ""}, "--target-modules: expected all-linear"),
        ({"sync_tied_embeddings": True}, "--tied-embeddings sync"),
        ({"adapter": Adapter.NONE, "merge": True}, "--merge"),
    ],
)
def test_adapters_that_the_model_cannot_have_are_refused(
    make_model: MakeModel, make_train_spec: MakeTrainSpec, changes: dict[str, Any], why: str
) -> None:
    checkpoint = open_checkpoint(str(make_model("llama")))
    with pytest.raises(BadOption, match=why):
        with_adapters(
            checkpoint,
            RunSpec(model=checkpoint.describe(), train=make_train_spec(**LORA | changes)),
        )
