"""Below all that trains, a sample is computed and sent once."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swarm_ft.buffers import BufferLimits
from swarm_ft.ids import PeerId
from swarm_ft.protocol.messages.client import (
    Evaluated,
    RunEvent,
    RunPhase,
    RunStatus,
    StepCommitted,
)
from swarm_ft.protocol.spec.run_spec import Adapter, EvalStrategy
from tests.integration.conftest import Job, MakeJob, QuietEvents
from tests.integration.test_replicas import final_losses, last_status
from tests.local_swarm import LocalSwarm

UPPER: dict[str, Any] = {
    "adapter": Adapter.LORA,
    "lora_r": 4,
    "lora_alpha": 16,
    "train_layers": "3-",
    "clip_grad_norm": 0.0,
}
STAGES = ["0-1", "1-3", "3-4", "4-6"]
BELOW = (1, 3)
NUM_SAMPLES, BATCH_SIZE, EPOCHS = 16, 4, 3
STEPS_PER_EPOCH = NUM_SAMPLES // BATCH_SIZE
NOTHING = BufferLimits(memory_bytes=0, disk_bytes=0)
"""With which all is computed at every visit."""


@pytest.fixture
def job(make_job: MakeJob) -> Job:
    return make_job(
        num_samples=NUM_SAMPLES,
        num_steps=EPOCHS * STEPS_PER_EPOCH,
        num_eval_samples=5,
        eval_strategy=EvalStrategy.EPOCH,
        **UPPER,
    ).ragged()


async def events_of(
    job: Job, folder: Path, layers: list[str], limits: BufferLimits | None = None
) -> list[RunEvent]:
    await asyncio.to_thread(folder.mkdir)
    async with LocalSwarm(folder, layers, buffer_limits=limits) as swarm:
        await swarm.all_joined()
        return await swarm.train(job.spec, job.samples)


def losses_of(events: list[RunEvent]) -> list[float | None]:
    judged = [event.eval_loss for event in events if isinstance(event, Evaluated)]
    return [*final_losses(events), *judged]


def bytes_below(events: list[RunEvent], boundaries: Collection[int] = BELOW) -> list[int]:
    """Sent below all that trains, in each step and then in each evaluation."""
    steps = [event.traffic for event in events if isinstance(event, StepCommitted)]
    judged = [event.traffic for event in events if isinstance(event, Evaluated)]
    return [
        sum(
            one.forward_bytes + one.evaluation_bytes
            for one in traffic
            if one.boundary in boundaries
        )
        for traffic in (*steps, *judged)
    ]


@pytest.mark.thorough
async def test_after_the_first_visit_nothing_is_sent_below_what_trains(
    job: Job, quiet_events: QuietEvents, tmp_path: Path
) -> None:
    events = await quiet_events(job, STAGES)
    assert last_status(events).phase is RunPhase.FINISHED
    first, later = STEPS_PER_EPOCH, (EPOCHS - 1) * STEPS_PER_EPOCH
    sent = bytes_below(events)
    assert all(sent[:first])
    assert sent[first : first + later] == [0] * later
    evaluations = sent[first + later :]
    assert evaluations[0] > 0
    assert evaluations[1:] == [0] * EPOCHS
    again = await events_of(job, tmp_path / "again", STAGES, NOTHING)
    assert all(bytes_below(again))
    assert losses_of(again) == losses_of(events)


async def test_replicas_keep_what_they_were_sent_and_are_sent_the_same_samples(
    job: Job, quiet_events: QuietEvents, tmp_path: Path
) -> None:
    quiet = await quiet_events(job, STAGES)
    events = await events_of(job, tmp_path / "replicas", ["0-3", "0-3", "3-6", "3-6"])
    sent = bytes_below(events, {3})
    first, later = sent[:STEPS_PER_EPOCH], sent[STEPS_PER_EPOCH : -EPOCHS - 1]
    evaluated = sent[-EPOCHS - 1 :]
    # Shares follow speeds: a sample that another replica has to take is sent to it, too.
    assert sum(later) < 0.5 * (EPOCHS - 1) * sum(first)
    assert sum(evaluated[1:]) < 0.5 * EPOCHS * evaluated[0]
    assert losses_of(events) == pytest.approx(losses_of(quiet), rel=1e-4)


@pytest.mark.parametrize("dies", [0, 1, 2])
@pytest.mark.thorough
async def test_what_is_lost_with_a_peer_is_computed_again(
    job: Job, quiet_events: QuietEvents, tmp_path: Path, dies: int
) -> None:
    layers, name = ["0-1", "1-3", "3-6"], PeerId(f"peer-{dies}")
    train = replace(job.spec.train, save_steps=1)
    job = replace(job, spec=replace(job.spec, train=train))
    quiet = await quiet_events(job, layers)
    folder = tmp_path / "deaths"
    await asyncio.to_thread(folder.mkdir)
    events: list[RunEvent] = []
    async with LocalSwarm(folder, layers) as swarm:
        await swarm.all_joined()
        status = await swarm.client.submit(job.spec, job.samples)
        async for event in swarm.client.watch(status.run_id, lambda _trouble: None):
            events.append(event)
            is_later = isinstance(event, StepCommitted) and event.step > STEPS_PER_EPOCH
            if is_later and name in swarm.peers:
                await swarm.kill_peer(name)
                await swarm.add_peer(PeerId("newcomer"), layers[dies])
    assert last_status(events).phase is RunPhase.FINISHED
    assert losses_of(events)[-EPOCHS:] == pytest.approx(losses_of(quiet)[-EPOCHS:], rel=1e-6)
    sent = bytes_below(events)[-EPOCHS - 1 :]
    assert (sum(sent[1:]) > 0) == (dies == 2)


@pytest.mark.thorough
async def test_what_went_to_make_room_fails_nobody(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job(num_samples=8, batch_size=8, num_steps=12, **UPPER).ragged()  # an epoch a step
    events = await events_of(job, tmp_path / "kept", STAGES)
    again = await events_of(job, tmp_path / "again", STAGES, NOTHING)
    assert last_status(again).phase is RunPhase.FINISHED
    assert not any("suspended" in e.detail for e in again if isinstance(e, RunStatus))
    assert losses_of(again) == losses_of(events)


@pytest.mark.thorough
async def test_who_has_nothing_to_do_any_more_takes_over_layers_above(
    make_job: MakeJob, tmp_path: Path
) -> None:
    changes = UPPER | {"train_layers": "5-", "num_steps": 10 * STEPS_PER_EPOCH}
    job = make_job(num_samples=NUM_SAMPLES, batch_size=BATCH_SIZE, **changes)
    quiet = await events_of(job, tmp_path / "quiet", ["0-5", "5-6"])
    events = await events_of(job, tmp_path / "moves", ["0-5", "5-6", "auto"])
    details = [event.detail for event in events if isinstance(event, RunStatus)]
    moves = (
        "peer peer-2 moves from layers 0-5 to layers 5-6: all outputs of these layers are stored"
    )
    assert moves in details
    assert any(words.startswith("peer peer-2 (layers 5-6) has caught up") for words in details)
    hosts = {one.peer_id: str(one.layers) for one in last_status(events).assignments}
    assert hosts == {"peer-0": "0-5", "peer-1": "5-6", "peer-2": "5-6"}
    assert losses_of(events) == pytest.approx(losses_of(quiet), rel=1e-4)
