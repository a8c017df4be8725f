"""Samples of different lengths, of which prompts are only read, train as in one plain loop."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm_ft.protocol.messages.client import StepCommitted
from swarm_ft.protocol.spec.sample_rows import counts_of, rows_in
from tests.integration.conftest import SEQ_LENGTH, Job, MakeJob
from tests.integration.test_parity import (
    RTOL,
    assert_same_weights,
    exported_weights,
    losses_of,
    plain_loop,
)
from tests.local_swarm import LocalSwarm

NUM_SAMPLES = 12


@pytest.fixture
def job(make_job: MakeJob) -> Job:
    return make_job("llama", num_samples=NUM_SAMPLES, num_steps=9, shuffle=True).ragged()


@pytest.mark.thorough
async def test_three_stages_equal_a_plain_loop(job: Job, tmp_path: Path) -> None:
    async with LocalSwarm(tmp_path, ["0-2", "2-5", "5-6"]) as swarm:
        events = await swarm.train(job.spec, job.samples)
        weights = await exported_weights(swarm, events, tmp_path / "shards")
    losses, reference = plain_loop(job, untie=False)
    assert losses_of(events) == pytest.approx(losses, rel=RTOL)
    assert_same_weights(weights, reference)


@pytest.mark.thorough
async def test_the_cut_into_stages_changes_no_bit_of_a_loss(job: Job, tmp_path: Path) -> None:
    losses = []
    for layers in (["0-6"], ["0-1", "1-4", "4-6"]):
        folder = tmp_path / str(len(layers))
        folder.mkdir()
        async with LocalSwarm(folder, layers) as swarm:
            losses.append(losses_of(await swarm.train(job.spec, job.samples)))
    # Clipping is by a norm that is summed over stages: the first loss has seen none yet.
    assert losses[0][0] == losses[1][0]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


async def test_nothing_is_sent_of_what_pads_a_sample(make_job: MakeJob, tmp_path: Path) -> None:
    """Each begins with a key frame, and goes on with changes of a buffer of its own length."""
    job = make_job(
        num_samples=NUM_SAMPLES, num_steps=9, forward_codec="aq4", backward_codec="q4+ef21"
    ).ragged()
    async with LocalSwarm(tmp_path, ["0-2", "2-4", "4-6"]) as swarm:
        events = await swarm.train(job.spec, job.samples)
    steps = [event for event in events if isinstance(event, StepCommitted)]
    lengths = counts_of(rows_in(job.samples, SEQ_LENGTH)).lengths
    epoch_bytes = 4 * job.spec.model.hidden_size * sum(lengths)
    for boundary in (2, 4):
        own = [one for step in steps for one in step.traffic if one.boundary == boundary]
        assert sum(one.forward_uncompressed_bytes for one in own) == 3 * epoch_bytes
        assert sum(one.backward_uncompressed_bytes for one in own) == 3 * epoch_bytes
        assert sum(one.key_frames for one in own) == NUM_SAMPLES
        assert sum(one.delta_frames for one in own) == 2 * NUM_SAMPLES


@pytest.mark.thorough
async def test_replicas_share_samples_of_any_length(job: Job, tmp_path: Path) -> None:
    async with LocalSwarm(tmp_path, ["0-3", "0-3", "3-6", "3-6"]) as swarm:
        events = await swarm.train(job.spec, job.samples)
    losses, _ = plain_loop(job, untie=False)
    assert losses_of(events) == pytest.approx(losses, rel=RTOL)
