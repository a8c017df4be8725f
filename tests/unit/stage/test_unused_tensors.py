"""Stored tensors that a model does not use are refused by name, or reported as transformers does.

Sources: huggingface/transformers#47145, unslothai/unsloth#6978, NVIDIA/TensorRT-Model-Connect#1115
and leejet/stable-diffusion.cpp#1898 (scales beside weights, and no quantization_config).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, BertConfig

from swarm_ft.errors import BadModel
from swarm_ft.protocol.spec.run_spec import TaskKind, TrainOptions
from swarm_ft.stage.checkpoint import open_checkpoint
from tests.families import small_config
from tests.unit.stage.conftest import MakeModel, save_random_model

LAYER = "model.layers.1.self_attn.q_proj"


@pytest.fixture
def directory(make_model: MakeModel, tmp_path: Path) -> Path:
    return shutil.copytree(make_model("llama"), tmp_path / "model")


def add(directory: Path, *names: str, value: torch.Tensor | None = None) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    more = {name: torch.ones(3) if value is None else value.clone() for name in names}
    save_file(tensors | more, path, metadata={"format": "pt"})


def change_config(directory: Path, **fields: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def unexpected(directory: Path, auto: Any = AutoModelForCausalLM) -> set[str]:
    _, report = auto.from_pretrained(directory, output_loading_info=True)
    return set(report["unexpected_keys"])


@pytest.mark.parametrize(
    "name",
    [
        f"{LAYER}.weight_scale",  # compressed-tensors, ModelOpt
        f"{LAYER}.weight_scale_inv",  # DeepSeek-V3
        f"{LAYER}.weight_scale_2",  # NVFP4
        f"{LAYER}.input_scale",
        f"{LAYER}.weight_zero_point",
        f"{LAYER}.scales",  # AWQ, GPTQ
        f"{LAYER}.qzeros",
        f"{LAYER}.qweight",
        f"{LAYER}.g_idx",
        f"{LAYER}.weight_packed",
        f"{LAYER}.weight.absmax",  # bitsandbytes
        f"{LAYER}.weight.quant_state.bitsandbytes__nf4",
        f"{LAYER}.SCB",
        f"{LAYER}.k_scale",
        "model.layers.0.mlp.experts.gate_up_proj_blocks",  # MXFP4
        "lm_head.weight_scale",
        "model.embed_tokens.weight_zeros",
    ],
)
def test_what_quantised_weights_are_read_by_is_refused_by_name(directory: Path, name: str) -> None:
    add(directory, name)
    with pytest.raises(BadModel, match=f"its safetensors have {name}, by which quantised"):
        open_checkpoint(str(directory))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_weights_in_float8_are_refused(directory: Path, dtype: torch.dtype) -> None:
    stored = load_file(directory / "model.safetensors")[f"{LAYER}.weight"]
    add(directory, f"{LAYER}.weight", value=stored.to(dtype))
    with pytest.raises(BadModel, match=rf"{LAYER}.weight is {dtype}.*quantised checkpoints"):
        open_checkpoint(str(directory)).describe()


@pytest.mark.parametrize("field", ["quantization_config", "compression_config"])
def test_a_config_that_says_so_is_refused(directory: Path, field: str) -> None:
    change_config(directory, **{field: {"quant_method": "compressed-tensors"}})
    with pytest.raises(BadModel, match=f"quantised checkpoints cannot be trained.*{field}"):
        open_checkpoint(str(directory))


def test_a_config_that_says_nothing_by_the_field_is_taken(directory: Path) -> None:
    change_config(directory, quantization_config=None)
    open_checkpoint(str(directory))


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("hf_quant_config.json", '{"quantization": {"quant_algo": "FP8"}}'),
        ("hf_quant_config.json", "{"),
        ("quantize_config.json", '{"bits": 4, "group_size": 128}'),
        ("quant_config.json", '{"w_bit": 4, "version": "GEMM"}'),
    ],
)
def test_a_file_that_says_so_is_refused(directory: Path, file: str, text: str) -> None:
    (directory / file).write_text(text)
    with pytest.raises(BadModel, match=f"quantised checkpoints cannot be trained; it has {file}"):
        open_checkpoint(str(directory))


def test_modelopts_file_of_a_cache_alone_is_no_quantisation_of_weights(directory: Path) -> None:
    text = '{"quantization": {"quant_algo": null, "kv_cache_quant_algo": "FP8"}}'
    (directory / "hf_quant_config.json").write_text(text)
    assert open_checkpoint(str(directory)).unused.lines() == []


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("model.layers.0.self_attn.q_norm.weight", "a llama of its config.json does not use"),
        ("layers.0.post_feedforward_layernorm.weight", "weights and config.json belong to two"),
        (f"{LAYER}.lora_A.weight", "of an adapter beside the weights; merge it first"),
        (f"{LAYER}.lora_magnitude_vector", "of an adapter beside the weights"),
    ],
)
def test_weights_within_a_block_that_it_does_not_use_are_refused(
    directory: Path, name: str, why: str
) -> None:
    add(directory, name)
    with pytest.raises(BadModel, match=f"its safetensors have {name}, .*{why}"):
        open_checkpoint(str(directory))


def test_what_transformers_lists_is_reported(directory: Path) -> None:
    beyond = [f"model.layers.{index}.mlp.up_proj.weight" for index in (4, 5)]
    heads = ["score.weight", "v_head.summary.bias", "v_head.summary.weight", "mtp.0.norm.weight"]
    add(directory, *beyond, *heads)
    found = open_checkpoint(str(directory)).unused
    assert set(found.others) == unexpected(directory) == {*beyond, *heads}
    assert found.lines() == [
        "tensors of the checkpoint that the model does not use: model.layers.*.mlp.up_proj.weight, "
        "mtp.*.norm.weight, score.weight, v_head.summary.bias and 1 more"
    ]


def test_biases_that_the_config_switches_off_are_reported(directory: Path) -> None:
    biases = [f"model.layers.{index}.self_attn.q_proj.bias" for index in range(4)]
    add(directory, *biases, value=torch.ones(32))
    found = open_checkpoint(str(directory)).unused
    assert set(found.biases) == unexpected(directory) == set(biases)
    assert found.lines() == [
        "biases that the model's config.json switches off are not used: "
        "model.layers.*.self_attn.q_proj.bias"
    ]


CONSTANTS = {
    "llama": ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"],
    "gpt2": ["transformer.h.1.attn.bias", "transformer.h.1.attn.masked_bias", "h.0.attn.bias"],
    "gptj": ["transformer.h.0.attn.bias", "transformer.h.0.attn.masked_bias"],
    "gpt_neo": [
        "transformer.h.0.attn.attention.bias",
        "transformer.h.0.attn.attention.masked_bias",
    ],
    "gpt_neox": ["gpt_neox.layers.0.attention.bias", "gpt_neox.layers.0.attention.masked_bias"],
}


@pytest.mark.parametrize("family", CONSTANTS)
def test_constants_of_older_versions_are_no_news(tmp_path: Path, family: str) -> None:
    """Checkpoints of 2019 to 2023 on the hub have them."""
    source = save_random_model(small_config(family), tmp_path)
    add(source, *CONSTANTS[family])
    assert open_checkpoint(str(source)).unused.lines() == []


def test_tensors_for_what_comes_next_are_passed_over_as_transformers_does(tmp_path: Path) -> None:
    source = save_random_model(small_config("qwen3_next"), tmp_path)
    add(source, "mtp.layers.0.self_attn.q_proj.weight", "mtp.fc.weight")
    assert unexpected(source) == set()
    assert open_checkpoint(str(source)).unused.lines() == []


def test_a_copy_of_tied_embeddings_is_the_head(tmp_path: Path) -> None:
    config = small_config("llama")
    config.tie_word_embeddings = True
    source = save_random_model(config, tmp_path)
    stored = load_file(source / "model.safetensors")
    add(source, "lm_head.weight", value=stored["model.embed_tokens.weight"].clone())
    checkpoint = open_checkpoint(str(source))
    assert checkpoint.unused.lines() == []
    assert checkpoint.describe().tied_embeddings


def test_a_classifier_reports_the_head_that_it_does_not_use(tmp_path: Path) -> None:
    source = save_random_model(small_config("llama"), tmp_path)
    train = TrainOptions(task_kind=TaskKind.CLASSIFICATION, label_names="a,b")
    found = open_checkpoint(str(source), train).unused
    assert set(found.others) == unexpected(source, AutoModelForSequenceClassification)
    assert found.others == ("lm_head.weight",)


def test_an_encoders_other_heads_are_reported(tmp_path: Path) -> None:
    """bert-base-uncased has position_ids and cls.* beside the encoder."""
    config = BertConfig(
        vocab_size=97,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
    )
    source = save_random_model(config, tmp_path, auto=AutoModelForSequenceClassification)
    heads = ["cls.predictions.bias", "cls.seq_relationship.weight"]
    add(source, "bert.embeddings.position_ids", *heads)
    train = TrainOptions(task_kind=TaskKind.TOKEN_CLASSIFICATION, label_names="a,b")
    found = open_checkpoint(str(source), train).unused
    assert found.others == ("bert.pooler.dense.bias", "bert.pooler.dense.weight", *heads)
