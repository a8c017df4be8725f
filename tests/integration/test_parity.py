"""An uncompressed swarm trains as one model in one plain PyTorch loop does."""

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from swarm_ft.ids import StepNumber
from swarm_ft.protocol.messages.client import RunEvent, RunPhase, RunStatus, StepCommitted
from swarm_ft.protocol.spec.training_plan import learning_rate_at, step_samples
from tests.integration.conftest import Job, MakeJob
from tests.local_swarm import LocalSwarm

RTOL = 1e-4


def losses_of(events: Iterable[RunEvent]) -> list[float]:
    return [event.loss for event in events if isinstance(event, StepCommitted)]


def plain_loop(job: Job, *, untie: bool, steps: int | None = None) -> tuple[list[float], Any]:
    """One process, one batch a step: the loop that a swarm must equal. Losses and model."""
    train = job.spec.train
    model = AutoModelForCausalLM.from_pretrained(job.spec.model.reference).eval()
    if untie:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    spared = [p for n, p in model.named_parameters() if p.ndim == 1 or "norm" in n]
    decayed = [p for p in model.parameters() if all(p is not s for s in spared)]
    groups = [
        {"params": decayed, "weight_decay": train.weight_decay},
        {"params": spared, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=train.learning_rate)
    losses = []
    for step in range(train.num_steps if steps is None else steps):
        samples = list(step_samples(train, StepNumber(step)))
        tokens, labels = job.tokens[samples], job.labels[samples]
        logits = model(input_ids=tokens).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        if train.clip_grad_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(train, StepNumber(step))
        optimizer.step()
        losses.append(loss.item())
    return losses, model


async def exported_weights(
    swarm: LocalSwarm, events: Iterable[RunEvent], directory: Path
) -> dict[str, torch.Tensor]:
    status = [event for event in events if isinstance(event, RunStatus)][-1]
    assert status.phase is RunPhase.FINISHED, status.detail
    await asyncio.to_thread(directory.mkdir)
    shards = await swarm.client.fetch_shards(status, directory)
    return {name: tensor for shard in shards for name, tensor in load_file(shard).items()}


def assert_same_weights(weights: Mapping[str, torch.Tensor], model: Any) -> None:
    expected = model.state_dict()
    for name, weight in weights.items():
        if name.endswith("c_attn.bias"):
            # Softmax ignores the bias of GPT-2's keys: its gradient is rounding alone, which
            # AdamW then divides by itself.
            query, _, value = weight.chunk(3)
            want_query, _, want_value = expected[name].chunk(3)
            weight, want = torch.cat([query, value]), torch.cat([want_query, want_value])
        else:
            want = expected[name]
        assert (weight - want).norm() <= RTOL * want.norm(), name


@pytest.mark.parametrize(("model", "sync"), [("gpt2", False), ("gpt2", True), ("llama", False)])
async def test_three_stages_equal_a_plain_loop_over_30_steps(
    make_job: MakeJob, tmp_path: Path, model: str, sync: bool
) -> None:
    job = make_job(model, num_steps=30, sync_tied_embeddings=sync)
    async with LocalSwarm(tmp_path, ["0-2", "2-5", "5-6"]) as swarm:
        events = await swarm.train(job.spec, job.samples)
        weights = await exported_weights(swarm, events, tmp_path / "shards")
    losses, reference = plain_loop(job, untie=model == "gpt2" and not sync)
    assert len(losses) == 30
    assert losses_of(events) == pytest.approx(losses, rel=RTOL)
    assert losses[-1] < 0.9 * losses[0], "the reference itself should learn"
    assert_same_weights(weights, reference)
    head = {"lm_head.weight"} if sync else set()
    assert set(weights) == {name for name, _ in reference.named_parameters()} - head


@pytest.mark.parametrize("layers", [["0-6"], ["0-3", "3-6"], ["0-1", "1-2", "2-3", "3-6"]])
@pytest.mark.parametrize("micro_batch_size", [1, 4])
async def test_stages_and_microbatches_do_not_change_the_losses(
    make_job: MakeJob, tmp_path: Path, layers: list[str], micro_batch_size: int
) -> None:
    job = make_job(num_steps=6, micro_batch_size=micro_batch_size)
    async with LocalSwarm(tmp_path, layers) as swarm:
        events = await swarm.train(job.spec, job.samples)
    losses, _ = plain_loop(job, untie=True)
    assert losses_of(events) == pytest.approx(losses, rel=RTOL)


async def test_shuffled_epochs_short_batches_and_no_clipping_equal_the_plain_loop(
    make_job: MakeJob, tmp_path: Path
) -> None:
    job = make_job(num_samples=10, num_steps=7, shuffle=True, clip_grad_norm=0.0)
    async with LocalSwarm(tmp_path, ["0-3", "3-6"]) as swarm:
        events = await swarm.train(job.spec, job.samples)
    losses, _ = plain_loop(job, untie=True)
    assert losses_of(events) == pytest.approx(losses, rel=RTOL)
    sizes = [event.num_samples for event in events if isinstance(event, StepCommitted)]
    assert sizes == [4, 4, 2, 4, 4, 2, 4]
