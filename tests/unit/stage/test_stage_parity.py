"""A chain of stages trains as one model in one plain loop does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, get_linear_schedule_with_warmup

from swarm_ft.ids import StepNumber
from swarm_ft.protocol.spec.run_spec import TrainSpec
from swarm_ft.protocol.spec.training_plan import step_samples
from swarm_ft.stage.checkpoint import open_checkpoint
from tests.unit.stage.conftest import MakeModel, MakePipeline

CASES = [
    ("gpt2-tied", True),
    ("gpt2-tied", False),
    ("gpt2-untied", False),
    ("llama", False),
    ("llama-tied", True),
    ("mistral", False),
    ("qwen2-tied", True),
    ("qwen2-tied", False),
]


def reference_model(directory: Path, untie: bool) -> Any:
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="sdpa").eval()
    if untie:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    return model


def reference_optimizer(model: Any, weight_decay: float) -> torch.optim.AdamW:
    decayed: list[Tensor] = []
    spared: list[Tensor] = []
    for name, parameter in model.named_parameters():
        plain = name.endswith("bias") or "norm" in name or "ln_" in name
        (spared if plain else decayed).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": spared, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.999), eps=1e-8)


def reference_losses(model: Any, train: TrainSpec, samples: Tensor) -> list[float]:
    """The plain loop: one batch a step, mean loss, global clipping, AdamW, linear schedule."""
    optimizer = reference_optimizer(model, train.weight_decay)
    schedule = get_linear_schedule_with_warmup(optimizer, train.warmup_steps, train.num_steps)
    losses = []
    for step in range(train.num_steps):
        tokens = samples[list(step_samples(train, StepNumber(step)))]
        logits = model(input_ids=tokens).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip_grad_norm)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def relative_error(name: str, weight: Tensor, expected: Tensor) -> float:
    if name.endswith("c_attn.bias"):
        # Softmax ignores what the bias of GPT-2's keys adds: its gradient is rounding alone, which
        # AdamW divides by itself.
        query_and_value = [0, 2]
        weight, expected = (
            torch.stack([t.chunk(3)[i] for i in query_and_value]) for t in (weight, expected)
        )
    return float((weight - expected).norm() / expected.norm())


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize(("name", "sync"), CASES)
@pytest.mark.sampled(5)
def test_chain_of_stages_equals_a_plain_loop(
    make_pipeline: MakePipeline,
    make_model: MakeModel,
    samples: Tensor,
    tmp_path: Path,
    name: str,
    sync: bool,
    num_stages: int,
) -> None:
    pipeline = make_pipeline(name, num_stages, sync_tied_embeddings=sync)
    model = reference_model(make_model(name), untie=not sync)

    losses = pipeline.train(samples)

    assert losses == pytest.approx(reference_losses(model, pipeline.spec.train, samples), rel=1e-5)
    assert losses[-1] < losses[0]
    assert max(pipeline.grad_norms) > 1.0, "clipping was never tried"
    expected = dict(model.named_parameters())
    shards = pipeline.export(tmp_path)
    exported = {
        k: v for file in set(shards.values()) for k, v in load_file(tmp_path / file).items()
    }
    assert exported.keys() == expected.keys()
    for key, weight in exported.items():
        assert relative_error(key, weight, expected[key].detach()) < 1e-5, key


@pytest.mark.parametrize(("name", "sync"), [("gpt2-tied", False), ("gpt2-tied", True)])
def test_number_of_stages_does_not_change_the_losses(
    make_pipeline: MakePipeline, samples: Tensor, name: str, sync: bool
) -> None:
    one, three = (make_pipeline(name, n, sync_tied_embeddings=sync).train(samples) for n in (1, 3))
    assert one == pytest.approx(three, rel=1e-6)


def test_size_of_microbatches_does_not_change_the_losses(
    make_pipeline: MakePipeline, samples: Tensor
) -> None:
    by_one = make_pipeline("llama", 2, micro_batch_size=1).train(samples)
    by_four = make_pipeline("llama", 2, micro_batch_size=4).train(samples)
    assert by_one == pytest.approx(by_four, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "sync"), [("gpt2-tied", True), ("gpt2-tied", False), ("llama", False)]
)
def test_exported_shards_load_as_one_hugging_face_model(
    make_pipeline: MakePipeline,
    make_model: MakeModel,
    samples: Tensor,
    tmp_path: Path,
    name: str,
    sync: bool,
) -> None:
    pipeline = make_pipeline(name, 3, num_steps=1, warmup_steps=0, sync_tied_embeddings=sync)
    pipeline.train(samples)

    weight_map = pipeline.export(tmp_path)
    index = {"metadata": {}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    open_checkpoint(str(make_model(name))).save_config(tmp_path, tie_word_embeddings=sync)

    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert loaded.dtype == torch.float32
    assert (loaded.lm_head.weight is loaded.get_input_embeddings().weight) == sync
    again = open_checkpoint(str(tmp_path)).describe()
    assert again.tied_embeddings == sync
    assert again.block_digests != pipeline.spec.model.block_digests
    own = loaded.state_dict()
    for file in set(weight_map.values()):
        for key, weight in load_file(tmp_path / file).items():
            assert torch.equal(own[key], weight), key
    assert sorted(p.name for p in tmp_path.glob("*.partial")) == []
