"""Trained stages continue texts where they are, as transformers does with the fetched result."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from swarm_ft.client.export import assemble
from swarm_ft.client.generate import Wanted, check_generates, generate
from swarm_ft.protocol.messages.client import RunStatus
from swarm_ft.stage.checkpoint import open_checkpoint
from tests.integration.conftest import Job, MakeJob
from tests.local_swarm import LocalSwarm

PROMPT, NEW_TOKENS = (5, 17, 17, 40), 20


async def finished(swarm: LocalSwarm, job: Job) -> RunStatus:
    status = (await swarm.train(job.spec, job.samples))[-1]
    assert isinstance(status, RunStatus)
    check_generates(status)
    return status


async def checkpoint_of(swarm: LocalSwarm, status: RunStatus, folder: Path) -> Path:
    """What a client would export; the peers keep what they have."""
    shards = folder / "shards"
    await asyncio.to_thread(shards.mkdir)
    fetched = await swarm.client.fetch_shards(status, shards)
    model = open_checkpoint(status.spec.model.reference)
    tied = status.spec.keeps_tied
    await asyncio.to_thread(
        assemble,
        folder / "out",
        fetched,
        lambda to: model.save_config(to, tie_word_embeddings=tied),
    )
    return folder / "out"


def of_transformers(model_dir: Path) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    text = model.generate(
        torch.tensor([PROMPT]),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    found: list[int] = text[0, len(PROMPT) :].tolist()
    return found


@pytest.mark.parametrize("model", ["gpt2", "llama"])
async def test_a_trained_swarm_generates_what_its_checkpoint_does(
    make_job: MakeJob, tmp_path: Path, model: str
) -> None:
    job = make_job(model)
    async with LocalSwarm(tmp_path, ["0-2", "2-5", "5-6"]) as swarm:
        status = await finished(swarm, job)
        told: list[int] = []
        wanted = Wanted(prompt=PROMPT, max_new_tokens=NEW_TOKENS)
        found = await generate(swarm.client, status, wanted, told.append, pytest.fail)
        checkpoint = await checkpoint_of(swarm, status, tmp_path)
    assert found == told == await asyncio.to_thread(of_transformers, checkpoint)
