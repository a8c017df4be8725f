"""Frozen weights in fewer bits: the numbers they are, the memory they take, what trains beside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file, save_file
from torch import Tensor

from swarm_ft.errors import BadOption
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import Adapter, BaseDtype, TrainOptions
from swarm_ft.stage.adapters import adapter_weights, with_adapters
from swarm_ft.stage.checkpoint import open_checkpoint
from swarm_ft.stage.weight_formats import NF4, Packing, in_float32, weight_of
from tests.unit.stage.conftest import MakeModel, MakePipeline, MakeTrainSpec, Pipeline
from tests.unit.stage.test_evaluation import evaluated

CPU = torch.device("cpu")
LORA: dict[str, Any] = {"adapter": Adapter.LORA, "lora_r": 4}
FORMS: dict[str, dict[str, Any]] = {
    "bfloat16": {"base_dtype": BaseDtype.BFLOAT16},
    "8bit": {"load_in_8bit": True},
    "4bit": {"load_in_4bit": True},
    "4bit-bfloat16": {"load_in_4bit": True, "base_dtype": BaseDtype.BFLOAT16},
}


# ---- numbers


def test_four_bits_are_the_nearest_of_sixteen_numbers_times_the_largest() -> None:
    values = torch.randn(640, generator=torch.Generator().manual_seed(3))
    values[64:128] = 0
    packing = Packing(values.shape, 4)
    codes, scales = packing.packed([values[:320], values[320:]], CPU)
    assert (codes.nbytes, scales.nbytes) == (320, 40)
    blocks, table = values.view(-1, 64), torch.tensor(NF4)
    assert torch.equal(scales, blocks.abs().amax(1))
    parts = blocks / torch.where(scales > 0, scales, 1.0)[:, None]
    nearest = table[(parts[..., None] - table).abs().argmin(-1)] * scales[:, None]
    assert torch.equal(packing.unpacked(codes, scales), nearest.view(-1))


def test_eight_bits_are_within_half_a_part_of_the_largest() -> None:
    values = torch.randn(10, 64, generator=torch.Generator().manual_seed(3))
    packing = Packing(values.shape, 8)
    codes, scales = packing.packed([values.view(-1)], CPU)
    off = (packing.unpacked(codes, scales) - values).abs()
    assert bool((off <= 0.5001 * values.abs().amax(1, keepdim=True) / 127).all())


@pytest.mark.parametrize("bits", [8, 4])
def test_what_was_unpacked_packs_to_the_same_codes(bits: int) -> None:
    values = torch.randn(128, generator=torch.Generator().manual_seed(3))
    packing = Packing(values.shape, bits)
    codes, scales = packing.packed([values], CPU)
    again, _ = packing.packed([packing.unpacked(codes, scales)], CPU)
    assert torch.equal(codes, again)


# ---- stages


def rounded(pipeline: Pipeline, source: Path, directory: Path) -> Path:
    """A checkpoint in float32 of the very weights that a pipeline computes with."""
    directory.mkdir()
    values: dict[str, Tensor] = {}
    for stage in pipeline.stages:
        values |= {name: one.made() for name, one in in_float32(stage.weights.module).items()}
    values = {name.replace(".base_layer.", "."): one for name, one in values.items()}
    own = load_file(source / "model.safetensors")
    save_file({name: values[name].clone() for name in own}, directory / "model.safetensors")
    (directory / "config.json").write_bytes((source / "config.json").read_bytes())
    return directory


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("name", ["gpt2-tied", "llama"])
@pytest.mark.sampled(3)
def test_a_run_has_the_bits_of_one_on_the_rounded_weights(
    name: str,
    form: dict[str, Any],
    make_model: MakeModel,
    make_pipeline: MakePipeline,
    make_train_spec: MakeTrainSpec,
    samples: Tensor,
    tmp_path: Path,
) -> None:
    packed = make_pipeline(name, 3, **LORA, **form)
    source = rounded(packed, make_model(name), tmp_path / "rounded")
    plain = Pipeline(open_checkpoint(str(source)), make_train_spec(**LORA), 3, torch.float32)
    assert packed.train(samples) == plain.train(samples)
    assert evaluated(packed, samples) == evaluated(plain, samples)
    for one, other in zip(packed.stages, plain.stages, strict=True):
        ours, theirs = (adapter_weights(stage.weights.module) for stage in (one, other))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
        assert one.state_bytes < other.state_bytes


def test_a_checkpoint_in_bfloat16_trains_as_it_does_in_float32(
    make_pipeline: MakePipeline, make_train_spec: MakeTrainSpec, samples: Tensor, tmp_path: Path
) -> None:
    from tests.unit.stage.conftest import CONFIGS, save_random_model

    directory = save_random_model(CONFIGS["llama"], tmp_path)
    own = load_file(directory / "model.safetensors")
    halves = {name: one.bfloat16() for name, one in own.items()}
    save_file(halves, directory / "model.safetensors")
    checkpoint, losses = open_checkpoint(str(directory)), []
    for dtype in BaseDtype:
        train = make_train_spec(**LORA, base_dtype=dtype)
        losses.append(Pipeline(checkpoint, train, 2, torch.float32).train(samples))
    assert losses[0] == losses[1]


def test_dora_reads_a_base_in_bfloat16(make_pipeline: MakePipeline, samples: Tensor) -> None:
    train: dict[str, Any] = {"adapter": Adapter.DORA, "base_dtype": BaseDtype.BFLOAT16}
    halves, losses = make_pipeline("llama", 2, **train), []
    losses = halves.train(samples)
    trained = [one for stage in halves.stages for one in stage.weights.module.trainable().values()]
    assert {one.dtype for one in trained} == {torch.float32}
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_merged_result_is_of_the_weights_that_trained(
    form: dict[str, Any], make_pipeline: MakePipeline, samples: Tensor
) -> None:
    pipeline = make_pipeline("llama", 2, **LORA, **form, merge=True)
    before = in_float32(pipeline.stages[0].weights.module)
    pipeline.train(samples)
    merged = load(b"".join(pipeline.stages[0].export()))
    name = "model.layers.0.mlp.down_proj"
    layer: Any = pipeline.stages[0].weights.module.get_submodule(name)
    expected = weight_of(layer.base_layer) + layer.get_delta_weight("default")
    assert {one.dtype for one in merged.values()} == {torch.float32}
    assert torch.equal(merged[f"{name}.weight"], expected)
    embedding = "model.embed_tokens.weight"
    assert torch.equal(merged[embedding], before[embedding].made())


DORA: dict[str, Any] = {"adapter": Adapter.DORA, "target_modules": "q_proj,down_proj"}


@pytest.mark.parametrize("form", [{}, *FORMS.values(), DORA], ids=json.dumps)
def test_a_stage_holds_what_the_plan_says_of_it(
    make_pipeline: MakePipeline, form: dict[str, Any]
) -> None:
    pipeline = make_pipeline("llama", 4, **LORA | form)
    spec = with_adapters(pipeline.checkpoint, pipeline.spec)
    assert pipeline.stages[1].state_bytes == spec.memory_bytes(LayerRange(1, 2))


@pytest.mark.parametrize(
    "options",
    [
        {"base_dtype": BaseDtype.BFLOAT16},
        {"load_in_4bit": True},
        {"load_in_8bit": True, "adapter": Adapter.DORA},
        {"load_in_8bit": True, "load_in_4bit": True, **LORA},
    ],
    ids=json.dumps,
)
def test_forms_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(BadOption, match=r"--(base-dtype|load-in-.bit): expected"):
        TrainOptions(**options)
