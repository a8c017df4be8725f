"""A result is written in pieces, and never in memory as a whole."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load
from torch import Tensor
from transformers import AutoModelForCausalLM

from swarm_ft.protocol.spec.run_spec import Adapter, Dtype
from swarm_ft.stage.checkpoint import open_checkpoint
from swarm_ft.stage.conversion import cast_for_storage, to_published
from swarm_ft.stage.tensor_files import PIECE_BYTES, file_pieces
from tests.families import small_config
from tests.unit.stage.conftest import CONFIGS, MakePipeline, MakeTrainSpec, Pipeline

TENSORS = {
    "empty": torch.zeros(0, 3),
    "one": torch.tensor(True),
    "larger than a piece": torch.arange(PIECE_BYTES // 4 + 5, dtype=torch.int32),
    "not in order": torch.randn(6, 4).T,
    "part": torch.randn(8, 4).bfloat16()[2:5],
}


def outlines(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: one.to("meta") for name, one in tensors.items()}


def test_pieces_are_a_file_of_the_tensors(tmp_path: Path) -> None:
    pieces = list(file_pieces(outlines(TENSORS), TENSORS.values()))
    assert max(map(len, pieces[1:])) == PIECE_BYTES
    path = tmp_path / "shard.safetensors"
    path.write_bytes(b"".join(pieces))
    with safe_open(path, "pt") as handle:
        assert handle.metadata() == {"format": "pt"}
        assert set(handle.keys()) == TENSORS.keys()
        for name, expected in TENSORS.items():
            assert handle.get_tensor(name).dtype == expected.dtype
            assert torch.equal(handle.get_tensor(name), expected)


@pytest.mark.parametrize("other", [torch.zeros(3), torch.zeros(2, dtype=torch.float64)])
def test_a_tensor_that_is_not_as_foretold_ends_the_file(other: Tensor) -> None:
    with pytest.raises(SafetensorError, match=r"a: .* was not foretold"):
        list(file_pieces({"a": torch.zeros(2)}, [other]))


def test_a_type_that_the_format_lacks_is_refused_first() -> None:
    with pytest.raises(SafetensorError, match=r"a: safetensors files have no torch\.complex64"):
        next(file_pieces({"a": torch.zeros(2, dtype=torch.complex64)}, []))


def test_what_is_made_of_one_block_is_gone_before_the_next_one(
    make_pipeline: MakePipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    form: dict[str, Any] = {
        "load_in_8bit": True,
        "adapter": Adapter.LORA,
        "lora_r": 2,
        "merge": True,
    }
    [stage] = make_pipeline("llama", 1, **form).stages
    made: list[weakref.ref[Tensor]] = []

    def counted(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        # The part before leaves its last tensor to who writes it.
        assert sum(one() is not None for one in made) <= 1
        if not any(one.is_meta for one in tensors.values()):
            projections = {name: one for name, one in tensors.items() if "_proj" in name}
            made.extend(map(weakref.ref, projections.values()))
        return to_published(model, tensors)

    monkeypatch.setattr("swarm_ft.stage.weights.to_published", counted)
    exported = load(b"".join(stage.export()))
    assert len(made) == sum("_proj" in name for name in exported) > 7


@pytest.mark.parametrize(
    ("dtype", "stored", "expected"),
    [
        (Dtype.AUTO, torch.float32, torch.float32),
        (Dtype.AUTO, torch.bfloat16, torch.bfloat16),
        (Dtype.AUTO, torch.float16, torch.float16),
        (Dtype.FLOAT32, torch.bfloat16, torch.float32),
        (Dtype.FLOAT16, torch.float32, torch.float16),
    ],
)
def test_a_result_is_stored_as_its_model_was_unless_told_otherwise(
    dtype: Dtype,
    stored: torch.dtype,
    expected: torch.dtype,
    make_train_spec: MakeTrainSpec,
    samples: Tensor,
    tmp_path: Path,
) -> None:
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"], dtype=stored)
    model.save_pretrained(tmp_path / "source")
    checkpoint = open_checkpoint(str(tmp_path / "source"))
    train = make_train_spec(dtype=dtype)
    pipeline = Pipeline(checkpoint, train, 2, torch.float32)
    pipeline.train(samples)
    out = tmp_path / "out"
    out.mkdir()
    index = {"metadata": {}, "weight_map": pipeline.export(out)}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint.save_config(
        out, tie_word_embeddings=pipeline.spec.keeps_tied, dtype=pipeline.spec.result_dtype
    )
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    trained = {
        name: one
        for stage in pipeline.stages
        for name, one in stage.weights.module.named_parameters()
    }
    own = dict(loaded.named_parameters())
    assert own.keys() == trained.keys()
    for name, weight in trained.items():
        assert weight.dtype == torch.float32
        assert own[name].dtype == expected
        assert torch.equal(own[name], weight.to(expected)), name


def test_what_transformers_keeps_in_float32_stays_so() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(small_config("deepseek_v3"))
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    one = torch.randn(4)
    assert cast_for_storage(model, bias, one, torch.bfloat16).dtype == torch.float32
    assert cast_for_storage(model, f"{bias}_not", one, torch.bfloat16).dtype == torch.bfloat16
    assert cast_for_storage(model, "count", torch.arange(3), torch.bfloat16).dtype == torch.int64


def test_adapters_are_float32_whatever_is_asked(make_pipeline: MakePipeline) -> None:
    lora: dict[str, Any] = {"adapter": Adapter.LORA, "lora_r": 2, "dtype": Dtype.BFLOAT16}
    [stage] = make_pipeline("llama", 1, **lora).stages
    assert {one.dtype for one in load(b"".join(stage.export())).values()} == {torch.float32}
