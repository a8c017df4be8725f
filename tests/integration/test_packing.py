"""Documents that share samples train, in a whole swarm, as documents in samples of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from swarm_ft.protocol.messages.client import Evaluated, StepCommitted
from swarm_ft.protocol.spec.sample_rows import Words, join_documents, pad_rows, words_of
from tests.integration.conftest import SEQ_LENGTH, VOCAB_SIZE, Job, MakeJob
from tests.integration.test_parity import RTOL, exported_weights, losses_of
from tests.local_swarm import LocalSwarm

NUM_PACKS, NUM_HELD_OUT, DOCUMENTS = 8, 2, 3
"""Three documents share each sample, so that a step has the same ones packed or alone."""


def packs() -> list[list[Words]]:
    """Documents of 2 tokens and more, of each of which the first quarter is a prompt."""
    random, made = np.random.default_rng(7), []
    for _ in range(NUM_PACKS + NUM_HELD_OUT):
        cuts = np.sort(random.choice(np.arange(1, SEQ_LENGTH // 2), DOCUMENTS - 1, replace=False))
        lengths = 2 * np.diff(cuts, prepend=0, append=SEQ_LENGTH // 2)
        tokens = [random.integers(1, VOCAB_SIZE, 6).repeat(4)[:length] for length in lengths]
        made.append([words_of(one, np.arange(len(one)) >= len(one) // 4) for one in tokens])
    return made


def job_of(make_job: MakeJob, rows: Sequence[Words], share: int, **changes: object) -> Job:
    """A job on these samples, of which the same documents make a step whatever `share`."""
    num_held_out = NUM_HELD_OUT * share
    job = make_job(
        "llama",
        num_samples=len(rows) - num_held_out,
        num_eval_samples=num_held_out,
        batch_size=2 * share,
        micro_batch_size=1,
        **{"eval_steps": 4, "num_steps": 8, **changes},
    )
    return replace(job, samples=[row.tobytes() for row in rows])


async def trained(
    job: Job, folder: Path
) -> tuple[list[float], list[float | None], dict[str, torch.Tensor]]:
    """Losses of steps and of evaluations, and the weights at the end."""
    await asyncio.to_thread(folder.mkdir)
    async with LocalSwarm(folder, ["0-2", "2-4", "4-6"]) as swarm:
        events = await swarm.train(job.spec, job.samples)
        weights = await exported_weights(swarm, events, folder / "shards")
    evaluated = [event.eval_loss for event in events if isinstance(event, Evaluated)]
    return losses_of(events), evaluated, dict(weights)


@pytest.mark.thorough
async def test_a_packed_run_equals_one_with_a_document_a_sample(
    make_job: MakeJob, tmp_path: Path
) -> None:
    packed = [pad_rows(join_documents(one), SEQ_LENGTH) for one in packs()]
    alone = [pad_rows(one, SEQ_LENGTH) for pack in packs() for one in pack]
    found = await trained(job_of(make_job, packed, 1), tmp_path / "packed")
    expected = await trained(job_of(make_job, alone, DOCUMENTS), tmp_path / "alone")
    assert found[0][0] == pytest.approx(expected[0][0], rel=1e-6)
    assert found[0] == pytest.approx(expected[0], rel=RTOL)
    assert len(found[1]) == len(expected[1]) > 0
    assert found[1] == pytest.approx(expected[1], rel=RTOL)
    for name, weight in found[2].items():
        assert (weight - expected[2][name]).norm() <= RTOL * expected[2][name].norm(), name


@pytest.mark.thorough
async def test_packs_find_their_buffers_in_all_epochs_but_the_first(
    make_job: MakeJob, tmp_path: Path
) -> None:
    """A pack has the same documents in each epoch, so the buffers of its tokens stay of use."""
    packed = [pad_rows(join_documents(one), SEQ_LENGTH) for one in packs()]
    job = job_of(
        make_job,
        packed,
        1,
        forward_codec="aq4",
        backward_codec="q4+ef21",
        shuffle=True,
        num_steps=12,
    )
    async with LocalSwarm(tmp_path, ["0-3", "3-6"]) as swarm:
        events = await swarm.train(job.spec, job.samples)
    steps = [event for event in events if isinstance(event, StepCommitted)]
    traffic = [one for step in steps for one in step.traffic]
    assert len(steps) == 3 * NUM_PACKS // 2
    assert sum(one.key_frames for one in traffic) == NUM_PACKS
    assert sum(one.delta_frames for one in traffic) == 2 * NUM_PACKS
