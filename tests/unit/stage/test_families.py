"""Every family of decoders trains by stages as it does whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from swarm_ft.ids import StepNumber
from swarm_ft.protocol.spec.run_spec import LrSchedule, TrainSpec
from swarm_ft.protocol.spec.training_plan import learning_rate_at, step_microbatches
from swarm_ft.stage.checkpoint import open_checkpoint
from tests.families import small_config
from tests.unit.stage.conftest import SEQ_LENGTH, MakeTrainSpec, Pipeline, save_random_model

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
    "kimi_linear",
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
    "whisper",
    "xglm",
    "xlstm",
    "youtu",
)
NUM_STAGES = 3


@pytest.fixture(scope="module")
def train(make_train_spec: MakeTrainSpec) -> TrainSpec:
    # A norm over stages is summed in another order than one over a model.
    return make_train_spec(lr_schedule=LrSchedule.CONSTANT, warmup_steps=0, clip_grad_norm=0.0)


class Whole:
    """The model in one piece, trained in plain torch on the same microbatches."""

    def __init__(self, directory: Path, train: TrainSpec, blocks: str) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self.model.eval()
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
            return bool(self.model(input_ids=tokens).logits.shape[1] == SEQ_LENGTH - 1)
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
    [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in ALL],
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
        assert pipeline.gradients(step, samples) == whole.gradients(step, samples)
        for name, parameter in parameters(pipeline).items():
            assert_same(parameter.grad, expected[name].grad, f"step {step}: gradient of {name}")
        pipeline.commit(step)
        whole.commit(step)
    for name, parameter in parameters(pipeline).items():
        assert_same(parameter.detach(), expected[name].detach(), name)
    check_export(pipeline, source, tmp_path / "out", whole)


def assert_same(ours: Tensor | None, expected: Tensor | None, what: str) -> None:
    if ours is None or expected is None:
        assert ours is None or not ours.any(), what
        assert expected is None or not expected.any(), what
    else:
        assert torch.equal(ours, expected), f"{what}: {(ours - expected).abs().max()}"


def check_export(pipeline: Pipeline, source: Path, out: Path, whole: Whole) -> None:
    """It has the names that were read, and is the model that was trained."""
    import json

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
    own = loaded.state_dict()
    assert all(torch.equal(own[name], value) for name, value in whole.model.state_dict().items())


def stored_names(directory: Path) -> set[str]:
    return {name for path in directory.glob("*.safetensors") for name in load_file(path)}
