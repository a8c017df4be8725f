"""Every family of decoders trains by stages as it does whole."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from deploy.model_table import PAGE, with_tables
from swarm_ft.errors import BadModel
from swarm_ft.ids import StepNumber
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import LrSchedule, TrainSpec
from swarm_ft.protocol.spec.tasks import CausalLm
from swarm_ft.protocol.spec.training_plan import learning_rate_at, step_microbatches
from swarm_ft.stage.architecture import anatomy_of
from swarm_ft.stage.checkpoint import open_checkpoint
from tests.families import small_config
from tests.unit.stage.conftest import (
    SEQ_LENGTH,
    MakeTrainSpec,
    Pipeline,
    aligned,
    save_random_model,
)

OTHERS = (pytest.mark.slow, pytest.mark.families)
FAST = ("gpt2", "llama", "opt", "gemma3_text", "mixtral", "qwen3_next", "gpt_neox")
ALL = (
    "afmoe",
    "apertus",
    "arcee",
    "aria_text",
    "axk1",
    "axk2",
    "bailing_hybrid",
    "bamba",
    "beam",
    "biogpt",
    "bitnet",
    "bloom",
    "codegen",
    "cohere",
    "cohere2",
    "cohere2_moe",
    "ctrl",
    "cwm",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "diffllama",
    "doge",
    "dots1",
    "dots3_note_text",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone4",
    "exaone_moe",
    "falcon",
    "falcon_mamba",
    "flex_olmo",
    "flint",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "gemma4_unified_text",
    "glm",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "gpt-sw3",
    "gpt2",
    "gpt_bigcode",
    "gpt_neo",
    "gpt_neox",
    "gpt_neox_japanese",
    "gpt_oss",
    "gptj",
    "granite",
    "granite_swa",
    "granitemoe",
    "granitemoe_swa",
    "granitemoehybrid",
    "granitemoeshared",
    "helium",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "hy_v3",
    "hyperclovax",
    "inkling_text",
    "internlm3",
    "iquestcoder",
    "jais2",
    "jamba",
    "jetmoe",
    "kolibri1",
    "laguna",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "llama",
    "llama4_text",
    "mamba",
    "mamba2",
    "mellum",
    "mimo_v2_flash",
    "minicpm3",
    "minimax",
    "minimax_m2",
    "minimax_m3_vl_text",
    "ministral",
    "ministral3",
    "mistral",
    "mixtral",
    "modernbert-decoder",
    "mpt",
    "nanochat",
    "nemotron",
    "nemotron_h",
    "olmo",
    "olmo2",
    "olmo3",
    "olmo_hybrid",
    "olmoe",
    "openai-gpt",
    "opt",
    "persimmon",
    "phi",
    "phi3",
    "phimoe",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_moe",
    "qwen3_next",
    "recurrent_gemma",
    "seed_oss",
    "smollm3",
    "solar_open",
    "stablelm",
    "starcoder2",
    "trocr",
    "vaultgemma",
    "xglm",
    "xlstm",
    "youtu",
)
NUM_STAGES = 3
# Sums of the same numbers, rounded otherwise: their heads have biases, and their bases return
# what their input's shape is, so that `Whole` has the last token too behind the blocks.
CLOSE = frozenset(("codegen", "gptj"))
REFUSED = {
    "bart": "expected a decoder",
    "bert": "expected a decoder",
    "deepseek_v4": r"expected its blocks to take hidden states \[2, 5, 32\]",
    "falcon_h1": "nothing says what its buffer",
    "hrm_text": "expected one list of its 32 blocks, found none",
    "inkling2_text": "expected its blocks to take hidden states alone",
    "rwkv": "do not run without them",
    "zaya": "belongs to no module of its own",
}


@pytest.fixture(scope="module")
def train(make_train_spec: MakeTrainSpec) -> TrainSpec:
    # A norm over stages is summed in another order than one over a model.
    return make_train_spec(lr_schedule=LrSchedule.CONSTANT, warmup_steps=0, clip_grad_norm=0.0)


class Whole:
    """The model in one piece, trained in plain torch on the same microbatches."""

    def __init__(self, directory: Path, train: TrainSpec, blocks: str) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self.model = aligned(model).eval()
        head = self.model.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
        self._train = train
        self._leaves_last_out = self._leave_last_out(blocks)
        groups: list[dict[str, Any]] = [
            {"params": [p for p in self.model.parameters() if p.ndim > 1]},
            {"params": [p for p in self.model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(groups, weight_decay=train.weight_decay)

    def _leave_last_out(self, blocks: str) -> bool:
        """Have the last token, which predicts nothing, end with the last block, as stages do.

        Else gradients of the final norm are sums with one zero more, in another order. Bases that
        give their result its input's shape (GPT-2) do without; theirs happen to be the same.
        """
        last = self.model.get_submodule(blocks)[-1]

        def all_but_last(_block: object, _inputs: object, output: Any) -> Any:
            if isinstance(output, Tensor):
                return output[:, :-1]
            return type(output)([output[0][:, :-1], *output[1:]])

        hook = last.register_forward_hook(all_but_last)
        try:
            tokens = torch.ones(1, SEQ_LENGTH, dtype=torch.int64)
            logits = self.model(input_ids=tokens, use_cache=False).logits
            return bool(logits.shape[1] == SEQ_LENGTH - 1)
        except (RuntimeError, ValueError):
            hook.remove()
            return False

    def gradients(self, step: int, samples: Tensor) -> float:
        self._optimizer.zero_grad()
        batches = step_microbatches(self._train, StepNumber(step))
        num_targets = sum(len(b.samples) for b in batches) * (SEQ_LENGTH - 1)
        total = 0.0
        for batch in batches:
            tokens = samples[list(batch.samples)]
            logits = self.model(input_ids=tokens, use_cache=False).logits
            logits = logits if self._leaves_last_out else logits[:, :-1]
            loss = cross_entropy(
                logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
            )
            torch.autograd.backward(loss / num_targets)
            total += loss.item()
        return total / num_targets

    def commit(self, step: int) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate_at(self._train, StepNumber(step))
        self._optimizer.step()


def parameters(pipeline: Pipeline) -> dict[str, torch.nn.Parameter]:
    return {
        name: parameter
        for stage in pipeline.stages
        for name, parameter in stage.weights.module.named_parameters()
    }


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[] if name in FAST else OTHERS) for name in ALL],
)
def test_stages_train_as_the_whole_model_does(
    tmp_path: Path, samples: Tensor, train: TrainSpec, family: str
) -> None:
    source = save_random_model(small_config(family), tmp_path / "source", max_shard_size="20KB")
    pipeline = Pipeline(open_checkpoint(str(source)), train, NUM_STAGES, torch.float32)
    whole = Whole(source, train, pipeline.checkpoint.architecture.blocks)
    expected = dict(whole.model.named_parameters())
    assert parameters(pipeline).keys() == expected.keys()
    for step in range(train.num_steps):
        losses = pipeline.gradients(step, samples), whole.gradients(step, samples)
        if family in CLOSE:
            assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        else:
            assert losses[0] == losses[1]
        if family not in CLOSE or step == 0:
            check_gradients(pipeline, expected, rtol=1e-5 if family in CLOSE else 0.0)
        pipeline.commit(step)
        whole.commit(step)
    if family not in CLOSE:
        for name, parameter in parameters(pipeline).items():
            assert torch.equal(parameter, expected[name]), name
    check_export(pipeline, source, tmp_path / "out")


def check_gradients(
    pipeline: Pipeline, expected: dict[str, torch.nn.Parameter], rtol: float
) -> None:
    for name, parameter in parameters(pipeline).items():
        ours, theirs = parameter.grad, expected[name].grad
        if ours is None or theirs is None:
            assert ours is None or not ours.any(), name
            assert theirs is None or not theirs.any(), name
        elif rtol:
            assert (ours - theirs).norm() <= rtol * max(float(theirs.norm()), 1e-2), name
        else:
            assert torch.equal(ours, theirs), f"{name}: {(ours - theirs).abs().max()}"


def check_export(pipeline: Pipeline, source: Path, out: Path) -> None:
    """It has the names that were read, and is the model that was trained."""
    out.mkdir()
    weight_map = pipeline.export(out)
    head = pipeline.checkpoint.architecture.head_weight
    assert weight_map.keys() - {head} == stored_names(source) - {head}
    index = {"metadata": {}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    pipeline.checkpoint.save_config(out, tie_word_embeddings=False)
    loaded, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    own = dict(loaded.named_parameters())
    assert all(torch.equal(own[name], value) for name, value in parameters(pipeline).items())


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_cannot_be_cut_says_why(family: str) -> None:
    why = f"'{family}' cannot be cut into stages: .*{REFUSED[family]}"
    with pytest.raises(BadModel, match=why):
        anatomy_of(small_config(family), CausalLm())


def test_a_model_that_cannot_be_cut_is_refused_before_its_job_is_submitted(tmp_path: Path) -> None:
    source = save_random_model(small_config("bert"), tmp_path)
    with pytest.raises(BadModel, match="expected a decoder"):
        open_checkpoint(str(source))


def test_a_stage_reads_no_file_but_those_with_its_own_tensors(tmp_path: Path) -> None:
    source = save_random_model(small_config("mixtral"), tmp_path, max_shard_size="20KB")
    checkpoint = open_checkpoint(str(source))
    model = checkpoint.describe()
    layers = LayerRange(1, 2)
    whole = checkpoint.load(layers, model)
    for path in source.glob("*.safetensors"):
        if not any(name.startswith("model.layers.1.") for name in load_file(path)):
            path.unlink()
    assert len(list(source.glob("*.safetensors"))) < 6
    again = open_checkpoint(str(source)).load(layers, model)
    assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())


def test_experts_in_one_tensor_are_the_same_model(tmp_path: Path) -> None:
    apart = save_random_model(small_config("mixtral"), tmp_path / "apart")
    shutil.copytree(apart, tmp_path / "fused")
    model = AutoModelForCausalLM.from_pretrained(apart)
    save_file(model.state_dict(), tmp_path / "fused" / "model.safetensors", {"format": "pt"})
    assert stored_names(apart) != stored_names(tmp_path / "fused")
    one, other = (open_checkpoint(str(tmp_path / name)).describe() for name in ("apart", "fused"))
    assert replace(one, reference="") == replace(other, reference="")


@pytest.mark.slow
def test_the_page_of_models_is_what_its_command_writes() -> None:
    page = PAGE.read_text(encoding="utf-8")
    if f"transformers {transformers.__version__}," not in page:
        pytest.skip("written with another version of transformers")
    assert with_tables(page) == page


def stored_names(directory: Path) -> set[str]:
    return {name for path in directory.glob("*.safetensors") for name in load_file(path)}
