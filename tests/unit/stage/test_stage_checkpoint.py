"""A stage reads its part of a checkpoint, refuses bad ones, and detects a changed weight."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, CLIPConfig, GPT2LMHeadModel

from swarm_ft.errors import BadLayers, BadModel, ModelDiffers, NonFiniteWeights, RunMismatch
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import ModelSpec
from swarm_ft.stage import tensor_files
from swarm_ft.stage.checkpoint import Checkpoint, open_checkpoint
from swarm_ft.stage.module import StageModule
from tests.unit.stage.conftest import MakeModel

NUM_BLOCKS = 4
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


CopyOf = Callable[[str], Path]


@pytest.fixture
def copy_of(make_model: MakeModel, tmp_path: Path) -> CopyOf:
    """`copy_of("llama")`: a directory of the test's own."""

    def copy(name: str) -> Path:
        return shutil.copytree(make_model(name), tmp_path / "copy")

    return copy


def change_tensor(directory: Path, name: str, change: Callable[[Tensor], Tensor]) -> None:
    weights = load_file(directory / WEIGHTS)
    weights[name] = change(weights[name])
    save_file(weights, directory / WEIGHTS, metadata={"format": "pt"})


def change_config(directory: Path, **fields: Any) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps(config))


def blocks_in(names: Iterable[str], prefix: str) -> set[int]:
    return {int(n.removeprefix(prefix).split(".")[0]) for n in names if n.startswith(prefix)}


@pytest.mark.parametrize("name", ["gpt2-tied", "llama", "mistral", "qwen2-tied"])
def test_stage_in_the_middle_holds_its_own_blocks_and_nothing_else(
    make_model: MakeModel, name: str
) -> None:
    checkpoint = open_checkpoint(str(make_model(name)))
    tensors = checkpoint.load(LayerRange(1, 3), checkpoint.describe())

    prefix = f"{checkpoint.architecture.blocks}."
    assert all(key.startswith(prefix) for key in tensors)
    assert blocks_in(tensors, prefix) == {1, 2}
    whole = AutoModelForCausalLM.from_pretrained(make_model(name)).state_dict()
    assert tensors.keys() == {k for k in whole if k.startswith((f"{prefix}1.", f"{prefix}2."))}
    assert all(torch.equal(tensors[k], whole[k]) for k in tensors)

    module = StageModule(checkpoint.config, LayerRange(1, 3))
    assert {p.device.type for p in module.parameters()} == {"meta"}
    module.materialise(tensors, torch.device("cpu"))
    assert sum(p.numel() for p in module.parameters()) == sum(t.numel() for t in tensors.values())
    assert {b.device.type for b in module.buffers()} <= {"cpu"}


def test_ends_of_the_model_get_embeddings_and_head(make_model: MakeModel) -> None:
    checkpoint = open_checkpoint(str(make_model("llama")))
    model = checkpoint.describe()
    first = checkpoint.load(LayerRange(0, 1), model)
    last = checkpoint.load(LayerRange(3, 4), model)
    assert "model.embed_tokens.weight" in first
    assert not first.keys() & {"model.norm.weight", "lm_head.weight"}
    assert last.keys() >= {"model.norm.weight", "lm_head.weight"}
    assert "model.embed_tokens.weight" not in last


def test_head_of_a_tied_checkpoint_is_a_copy_of_its_embeddings(make_model: MakeModel) -> None:
    checkpoint = open_checkpoint(str(make_model("gpt2-tied")))
    model = checkpoint.describe()
    assert model.tied_embeddings
    tensors = checkpoint.load(model.layers, model)
    head, embedding = tensors["lm_head.weight"], tensors["transformer.wte.weight"]
    assert torch.equal(head, embedding)
    assert head.data_ptr() != embedding.data_ptr()


def test_description_says_what_peers_must_agree_on(make_model: MakeModel) -> None:
    model = open_checkpoint(str(make_model("llama"))).describe()
    assert (model.architecture, model.num_blocks) == ("llama", NUM_BLOCKS)
    assert (model.hidden_size, model.vocab_size) == (32, 97)
    assert not model.tied_embeddings
    assert len({*model.block_digests, model.embed_digest, model.head_digest}) == NUM_BLOCKS + 2
    with safe_open(make_model("llama") / WEIGHTS, "pt") as handle:
        names = [k for k in handle.keys() if k.startswith("model.layers.0.")]  # noqa: SIM118
        assert model.block_bytes == sum(4 * handle.get_tensor(k).numel() for k in names)


@pytest.mark.parametrize("name", ["gpt2-tied", "llama"])
def test_other_shards_are_the_same_model(make_model: MakeModel, tmp_path: Path, name: str) -> None:
    AutoModelForCausalLM.from_pretrained(make_model(name)).save_pretrained(
        tmp_path, max_shard_size="30KB"
    )
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    sharded, single = open_checkpoint(str(tmp_path)), open_checkpoint(str(make_model(name)))
    assert replace(sharded.describe(), reference="") == replace(single.describe(), reference="")
    ours = sharded.load(LayerRange(1, 2), single.describe())
    theirs = single.load(LayerRange(1, 2), single.describe())
    assert all(torch.equal(ours[k], theirs[k]) for k in theirs)


@pytest.mark.parametrize("name", ["gpt2-tied", "llama-tied"])
def test_names_without_the_base_models_prefix_are_the_same_model(
    make_model: MakeModel, tmp_path: Path, name: str
) -> None:
    whole = AutoModelForCausalLM.from_pretrained(make_model(name))
    whole.base_model.save_pretrained(tmp_path)
    model = open_checkpoint(str(tmp_path)).describe()
    expected = open_checkpoint(str(make_model(name))).describe()
    assert replace(model, reference="") == replace(expected, reference="")


def test_old_buffers_in_a_file_are_passed_over(copy_of: CopyOf) -> None:
    directory = copy_of("gpt2-tied")
    expected = open_checkpoint(str(directory)).describe()
    weights = load_file(directory / WEIGHTS)
    weights["h.0.attn.bias"] = torch.ones(4, 4, dtype=torch.uint8)
    save_file(weights, directory / WEIGHTS, metadata={"format": "pt"})
    assert open_checkpoint(str(directory)).describe() == expected


def test_half_precision_files_become_float32_weights(make_model: MakeModel, tmp_path: Path) -> None:
    whole = AutoModelForCausalLM.from_pretrained(make_model("llama"), dtype=torch.bfloat16)
    whole.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    tensors = checkpoint.load(LayerRange(0, 1), checkpoint.describe())
    assert {t.dtype for t in tensors.values()} == {torch.float32}
    embedding = whole.get_input_embeddings().weight
    assert torch.equal(tensors["model.embed_tokens.weight"], embedding.float())


def test_stored_head_that_differs_is_not_tied_whatever_the_config_says(copy_of: CopyOf) -> None:
    directory = copy_of("llama")
    change_config(directory, tie_word_embeddings=True)
    assert not open_checkpoint(str(directory)).describe().tied_embeddings


def test_stored_head_that_equals_the_embeddings_is_tied(copy_of: CopyOf) -> None:
    directory = copy_of("gpt2-tied")
    weights = load_file(directory / WEIGHTS)
    weights["lm_head.weight"] = weights["transformer.wte.weight"].clone()
    save_file(weights, directory / WEIGHTS, metadata={"format": "pt"})
    assert open_checkpoint(str(directory)).describe().tied_embeddings


@pytest.mark.parametrize(
    ("tensor", "layers", "part"),
    [
        ("model.layers.2.mlp.up_proj.weight", LayerRange(2, 3), "block 2"),
        ("model.embed_tokens.weight", LayerRange(0, 1), "embeddings"),
        ("model.norm.weight", LayerRange(3, 4), "head"),
        ("lm_head.weight", LayerRange(3, 4), "head"),
    ],
)
def test_changed_weight_is_refused_by_the_stage_that_holds_it(
    copy_of: CopyOf, tensor: str, layers: LayerRange, part: str
) -> None:
    directory = copy_of("llama")
    model = open_checkpoint(str(directory)).describe()
    change_tensor(directory, tensor, lambda t: t + 1e-3)
    changed = open_checkpoint(str(directory))
    with pytest.raises(ModelDiffers, match=f"the model differs in its {part}") as caught:
        changed.load(layers, model)
    assert str(directory) not in caught.value.message
    assert "digest" not in caught.value.message
    assert str(directory) in caught.value.private
    changed.load(LayerRange(1, 2), model)


def test_changed_embeddings_of_a_tied_model_are_refused_at_both_ends(copy_of: CopyOf) -> None:
    directory = copy_of("gpt2-tied")
    model = open_checkpoint(str(directory)).describe()
    change_tensor(directory, "transformer.wte.weight", lambda t: t * 2)
    for layers in (LayerRange(0, 1), LayerRange(3, 4)):
        with pytest.raises(RunMismatch):
            open_checkpoint(str(directory)).load(layers, model)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("gpt2-tied", {"n_head": 4}),
        ("gpt2-tied", {"layer_norm_epsilon": 1e-3}),
        ("llama", {"rope_parameters": {"rope_theta": 9.0, "rope_type": "default"}}),
    ],
)
def test_config_that_computes_otherwise_on_equal_weights_is_refused(
    copy_of: CopyOf, name: str, fields: dict[str, Any]
) -> None:
    directory = copy_of(name)
    model = open_checkpoint(str(directory)).describe()
    change_config(directory, **fields)
    with pytest.raises(RunMismatch):
        open_checkpoint(str(directory)).load(LayerRange(1, 2), model)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_value_that_is_not_finite_is_refused_by_file_and_tensor(
    copy_of: CopyOf, value: float, dtype: torch.dtype
) -> None:
    directory = copy_of("llama")
    name = "model.layers.2.mlp.down_proj.weight"
    change_tensor(directory, name, lambda t: with_value(t.to(dtype), value))
    with pytest.raises(NonFiniteWeights) as caught:
        open_checkpoint(str(directory)).describe()
    assert f"tensor {name} in model.safetensors" in caught.value.message


def test_a_stage_finds_a_value_that_is_not_finite_when_it_loads(copy_of: CopyOf) -> None:
    directory = copy_of("llama")
    name = "model.layers.2.mlp.down_proj.weight"
    change_tensor(directory, name, lambda t: with_value(t, math.nan))
    poisoned = open_checkpoint(str(directory))
    model = described_as_it_is(poisoned)
    with pytest.raises(NonFiniteWeights, match=f"block 2: tensor {name} has values") as caught:
        poisoned.load(LayerRange(1, 3), model)
    assert str(directory) not in caught.value.message
    poisoned.load(LayerRange(0, 2), model)


def test_values_that_are_not_finite_in_weights_of_another_model_are_not_reported(
    copy_of: CopyOf,
) -> None:
    """A client that lacks the weights would learn something of them."""
    directory = copy_of("llama")
    model = open_checkpoint(str(directory)).describe()
    change_tensor(directory, "model.layers.2.mlp.down_proj.weight", lambda t: t * math.nan)
    with pytest.raises(ModelDiffers, match="block 2"):
        open_checkpoint(str(directory)).load(LayerRange(2, 3), model)


def test_huge_finite_values_are_no_reason_to_refuse(copy_of: CopyOf) -> None:
    """Their sum is infinite."""
    directory = copy_of("llama")
    change_tensor(
        directory, "model.layers.2.mlp.down_proj.weight", lambda t: torch.full_like(t, 3e38)
    )
    checkpoint = open_checkpoint(str(directory))
    checkpoint.load(LayerRange(2, 3), checkpoint.describe())


def test_values_beyond_float32_are_refused(copy_of: CopyOf) -> None:
    directory = copy_of("llama")
    name = "model.layers.2.mlp.down_proj.weight"
    change_tensor(directory, name, lambda t: with_value(t.double(), 1e300))
    with pytest.raises(NonFiniteWeights, match=name):
        open_checkpoint(str(directory)).describe()


def with_value(tensor: torch.Tensor, value: float) -> torch.Tensor:
    changed = tensor.clone()
    changed.view(-1)[-1] = value
    return changed


def described_as_it_is(checkpoint: Checkpoint) -> ModelSpec:
    """Describe a model like a client that does not check its weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_files, "_all_finite", lambda piece: True)
        return checkpoint.describe()


def test_another_models_run_is_refused(make_model: MakeModel) -> None:
    run = open_checkpoint(str(make_model("gpt2-tied"))).describe()
    with pytest.raises(ModelDiffers, match=r"^the model differs in its config$"):
        open_checkpoint(str(make_model("llama"))).load(LayerRange(0, 1), run)


def test_digests_of_one_run_match_nothing_in_another(copy_of: CopyOf) -> None:
    checkpoint = open_checkpoint(str(copy_of("llama")))
    first = checkpoint.describe(b"1" * 16, "ada")
    others = [checkpoint.describe(b"2" * 16, "ada"), checkpoint.describe(b"1" * 16, "bob")]
    for other in others:
        assert not set(digests_of(first)) & set(digests_of(other))
        checkpoint.load(LayerRange(1, 2), other)
        stolen = replace(first, nonce=other.nonce, owner=other.owner)
        with pytest.raises(ModelDiffers):
            checkpoint.load(LayerRange(1, 2), stolen)


def test_a_model_is_described_for_another_run_without_its_weights(copy_of: CopyOf) -> None:
    directory = copy_of("gpt2-tied")
    checkpoint, again = (open_checkpoint(str(directory)) for _ in range(2))
    checkpoint.describe(b"1" * 16)
    expected = again.describe(b"2" * 16, "ada")
    (directory / WEIGHTS).unlink()
    assert checkpoint.describe(b"2" * 16, "ada") == expected


def digests_of(model: ModelSpec) -> tuple[bytes, ...]:
    return (model.embed_digest, *model.block_digests, model.head_digest)


def test_layers_outside_the_model_are_refused(make_model: MakeModel) -> None:
    checkpoint = open_checkpoint(str(make_model("llama")))
    with pytest.raises(BadLayers, match="0-4"):
        checkpoint.load(LayerRange(3, 5), checkpoint.describe())


def test_missing_directory_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(BadModel, match="no such directory") as caught:
        open_checkpoint(str(tmp_path / "nothing"))
    assert "\n" not in caught.value.message


def test_name_that_is_neither_directory_nor_hub_id_is_refused() -> None:
    with pytest.raises(BadModel):
        open_checkpoint("two words/and/more")


def test_directory_without_config_is_refused(copy_of: CopyOf) -> None:
    directory = copy_of("llama")
    (directory / "config.json").unlink()
    with pytest.raises(BadModel, match=r"config\.json"):
        open_checkpoint(str(directory))


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"model_type": 3}'])
def test_unreadable_config_is_refused(copy_of: CopyOf, text: str) -> None:
    directory = copy_of("llama")
    (directory / "config.json").write_text(text)
    with pytest.raises(BadModel):
        open_checkpoint(str(directory))


@pytest.mark.parametrize(
    "fields", [{"n_layer": "six"}, {"n_head": 5}, {"n_embd": -1}, {"quantization_config": {}}]
)
def test_config_that_describes_no_model_is_refused_in_one_line(
    copy_of: CopyOf, fields: dict[str, Any]
) -> None:
    directory = copy_of("gpt2-tied")
    change_config(directory, **fields)
    with pytest.raises(BadModel) as caught:
        open_checkpoint(str(directory))
    assert "\n" not in caught.value.message


def test_unknown_architecture_is_refused_with_known_ones(tmp_path: Path) -> None:
    CLIPConfig().save_pretrained(tmp_path)
    with pytest.raises(BadModel, match=r"'clip'.*gpt2, llama"):
        open_checkpoint(str(tmp_path))


def test_directory_without_safetensors_is_refused(copy_of: CopyOf) -> None:
    directory = copy_of("llama")
    (directory / WEIGHTS).rename(directory / "pytorch_model.bin")
    with pytest.raises(BadModel, match=r"model\.safetensors"):
        open_checkpoint(str(directory))


def test_damaged_safetensors_are_refused(copy_of: CopyOf) -> None:
    directory = copy_of("llama")
    (directory / WEIGHTS).write_bytes(b"not safetensors")
    with pytest.raises(BadModel, match="cannot read"):
        open_checkpoint(str(directory))


@pytest.mark.parametrize(
    "index", ["{", "{}", '{"weight_map": 1}', '{"weight_map": {"a": "../../etc/passwd"}}']
)
def test_index_that_cannot_be_followed_is_refused(copy_of: CopyOf, index: str) -> None:
    directory = copy_of("llama")
    (directory / WEIGHTS).unlink()
    (directory / INDEX).write_text(index)
    with pytest.raises(BadModel, match="index"):
        open_checkpoint(str(directory))


def test_missing_tensor_is_refused_by_name(copy_of: CopyOf) -> None:
    directory = copy_of("llama")
    weights = load_file(directory / WEIGHTS)
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, directory / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(BadModel, match=r"layers\.2\.mlp\.up_proj"):
        open_checkpoint(str(directory))


@pytest.mark.parametrize("change", [lambda t: t[:-1].clone(), lambda t: t.to(torch.int8)])
def test_tensor_of_another_shape_or_of_integers_is_refused(
    copy_of: CopyOf, change: Callable[[Tensor], Tensor]
) -> None:
    directory = copy_of("llama")
    change_tensor(directory, "model.layers.1.mlp.up_proj.weight", change)
    with pytest.raises(BadModel, match=r"layers\.1\.mlp\.up_proj"):
        open_checkpoint(str(directory)).describe()


def test_missing_tokenizer_is_refused(make_model: MakeModel) -> None:
    with pytest.raises(BadModel, match="tokenizer"):
        open_checkpoint(str(make_model("llama"))).tokenizer()


def test_exported_config_is_a_float32_causal_model(make_model: MakeModel, tmp_path: Path) -> None:
    base = tmp_path / "base"
    whole = GPT2LMHeadModel.from_pretrained(make_model("gpt2-tied"), dtype=torch.bfloat16)
    whole.transformer.save_pretrained(base)
    checkpoint = open_checkpoint(str(base))
    checkpoint.save_config(tmp_path, tie_word_embeddings=False)

    exported = AutoConfig.from_pretrained(tmp_path)
    assert exported.architectures == ["GPT2LMHeadModel"]
    assert exported.dtype == torch.float32
    assert not exported.tie_word_embeddings
    assert checkpoint.config.tie_word_embeddings


def test_generation_config_goes_into_the_export(make_model: MakeModel, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(make_model("llama")))
    checkpoint.save_config(tmp_path, tie_word_embeddings=False)
    ours, theirs = (d / "generation_config.json" for d in (tmp_path, make_model("llama")))
    assert ours.read_text() == theirs.read_text()
