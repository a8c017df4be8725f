"""A swarm trains adapters, or some of the blocks, and leaves what is frozen where it lies."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from swarm_ft.client.export import assemble
from swarm_ft.ids import PeerId
from swarm_ft.protocol.messages.client import Evaluated, RunEvent, RunPhase, StepCommitted
from swarm_ft.protocol.spec.run_spec import Adapter
from swarm_ft.stage.adapters import WEIGHTS_FILE, save_adapter_config
from swarm_ft.stage.checkpoint import open_checkpoint
from tests.integration.conftest import Job, MakeJob, QuietEvents
from tests.integration.test_replicas import final_losses, last_status
from tests.integration.test_take_over import CAUGHT_UP, NEWCOMER, STEPS, Story
from tests.local_swarm import LocalSwarm
from tests.whole_model import whole_loss

LORA: dict[str, Any] = {"adapter": Adapter.LORA, "lora_r": 4, "lora_alpha": 16}
UPPER: dict[str, Any] = {"train_layers": "3-", "frozen_codec": "none", "clip_grad_norm": 0.0}


async def adapter_of(job: Job, directory: Path, layers: list[str]) -> tuple[list[RunEvent], Path]:
    """A run's events and its result."""
    out = directory / "out"
    async with LocalSwarm(directory, layers) as swarm:
        events = await swarm.train(job.spec, job.samples)
        (directory / "shards").mkdir()
        shards = await swarm.client.fetch_shards(last_status(events), directory / "shards")
        checkpoint = open_checkpoint(job.spec.model.reference)
        write = partial(save_adapter_config, checkpoint=checkpoint, spec=job.spec)
        await asyncio.to_thread(assemble, out, shards, write, as_one=WEIGHTS_FILE)
    return events, out


@pytest.mark.parametrize("model", ["gpt2", "llama"])
@pytest.mark.thorough
async def test_the_result_of_a_run_does_not_depend_on_where_the_model_is_cut(
    make_job: MakeJob, tmp_path: Path, model: str
) -> None:
    job = make_job(model, num_steps=12, clip_grad_norm=0.0, num_eval_samples=5, **LORA)
    results, held_out = [], job.tokens[job.spec.train.num_samples :]
    for number, layers in enumerate((["0-6"], ["0-2", "2-5", "5-6"])):
        (tmp_path / str(number)).mkdir()
        events, out = await adapter_of(job, tmp_path / str(number), layers)
        files = {path.name for path in out.iterdir()}
        assert files == {"adapter_config.json", WEIGHTS_FILE, "swarm_ft_export.json"}
        evaluations = [event for event in events if isinstance(event, Evaluated)]
        expected = [whole_loss(of, held_out) for of in (job.spec.model.reference, out)]
        assert [one.eval_loss for one in evaluations] == pytest.approx(expected, rel=1e-6)
        results.append((final_losses(events), whole_loss(out, job.tokens)))
    assert results[0] == results[1]
    losses, after = results[0]
    assert losses[-1] < losses[0]
    assert after < whole_loss(job.spec.model.reference, job.tokens)


@pytest.mark.thorough
async def test_below_the_blocks_that_train_no_gradients_are_sent(
    make_job: MakeJob, quiet_events: QuietEvents
) -> None:
    for changes in ({}, LORA):
        job = make_job(num_steps=5, **UPPER, **changes)
        alone = await quiet_events(job, ["0-6"])
        cut = await quiet_events(job, ["0-1", "1-2", "2-4", "4-6"])
        assert final_losses(cut) == final_losses(alone)
        for event in cut:
            if isinstance(event, StepCommitted):
                sent = {one.boundary: one.backward_bytes > 0 for one in event.traffic}
                assert sent == {1: False, 2: False, 4: True}
                assert all(one.forward_bytes > 0 for one in event.traffic)


@pytest.mark.parametrize(
    ("changes", "layers", "dies"),
    [
        (LORA, ["0-3", "3-6"], None),
        (LORA, ["0-3", "0-3", "3-6"], "peer-0"),
        (LORA, ["0-3", "3-6", "3-6"], "peer-1"),
        (UPPER, ["0-3", "0-3", "3-6"], "peer-0"),
        (LORA | UPPER | {"forward_codec": "aq8"}, ["0-3", "3-6", "3-6"], "peer-1"),
    ],
)
@pytest.mark.thorough
async def test_a_newcomer_takes_over_what_trains_alone(
    make_job: MakeJob,
    tmp_path: Path,
    quiet_events: QuietEvents,
    changes: dict[str, Any],
    layers: list[str],
    dies: str | None,
) -> None:
    job = make_job(num_samples=16, batch_size=4, num_steps=STEPS, **changes)
    story = Story(job, tmp_path / "joined", layers, PeerId(dies) if dies else None)
    weights = await story.play()
    assert story.status().phase is RunPhase.FINISHED
    assert story.steps() == list(range(STEPS))
    assert any(detail.startswith(CAUGHT_UP) for detail in story.details())
    assert NEWCOMER in weights
    assert len(set(weights.values())) == 1
    taken = sum(event.state_bytes for event in story.events if isinstance(event, StepCommitted))
    weights_alone = 3 * job.spec.model.block_bytes
    assert 0 < taken < weights_alone
    if "forward_codec" not in changes:
        quiet = final_losses(await quiet_events(job, ["0-3", "3-6"]))
        assert story.losses() == pytest.approx(quiet, rel=1e-4)


async def test_a_replica_below_the_blocks_that_train_may_die(
    make_job: MakeJob, tmp_path: Path, quiet_events: QuietEvents
) -> None:
    job = make_job(num_samples=16, batch_size=8, num_steps=8, **UPPER)
    async with LocalSwarm(tmp_path, ["0-3", "0-3", "3-6"]) as swarm:
        await swarm.all_joined()
        status = await swarm.client.submit(job.spec, job.samples)
        events: list[RunEvent] = []
        async for event in swarm.client.watch(status.run_id, lambda _trouble: None):
            events.append(event)
            if isinstance(event, StepCommitted) and event.step == 3:
                await swarm.kill_peer(PeerId("peer-1"))
    assert last_status(events).phase is RunPhase.FINISHED
    quiet = final_losses(await quiet_events(job, ["0-3", "3-6"]))
    assert final_losses(events) == pytest.approx(quiet, rel=1e-4)
