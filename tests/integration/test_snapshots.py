"""A run goes on from its newest snapshot, bit for bit, when weights are lost."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from swarm_ft.ids import PeerId
from swarm_ft.protocol.messages.client import RunEvent, RunPhase, RunStatus, StepCommitted
from swarm_ft.protocol.spec.run_spec import Adapter
from tests.integration.conftest import Job, MakeJob, QuietEvents
from tests.local_swarm import LocalSwarm

LAYERS = ["0-2", "2-4", "4-6"]


def losses_by_step(events: Iterable[RunEvent]) -> dict[int, float]:
    return {event.step: event.loss for event in events if isinstance(event, StepCommitted)}


def committed(events: Iterable[RunEvent]) -> list[int]:
    return [event.step for event in events if isinstance(event, StepCommitted)]


@pytest.fixture(
    params=[{}, {"adapter": Adapter.LORA, "train_layers": "3-"}], ids=["all", "adapters"]
)
def job(make_job: MakeJob, request: pytest.FixtureRequest) -> Job:
    return make_job(
        num_samples=8,
        num_steps=9,
        save_steps=2,
        forward_codec="aq4",
        backward_codec="q4t+ef",
        buffer_bits=4,
        **request.param,
    ).ragged()


@pytest.fixture
async def quiet(job: Job, quiet_events: QuietEvents) -> dict[int, float]:
    return losses_by_step(await quiet_events(job, LAYERS))


@pytest.mark.thorough
async def test_a_lost_stage_goes_back_to_the_newest_snapshot(
    job: Job, quiet: dict[int, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm_ft.coordinator.plan.membership.GRACE_S", 0.0)
    async with LocalSwarm(tmp_path, LAYERS) as swarm:
        await swarm.all_joined()
        status = await swarm.client.submit(job.spec, job.samples)
        events, killed = [], False
        async for event in swarm.client.watch(status.run_id, lambda _trouble: None):
            events.append(event)
            if isinstance(event, StepCommitted) and event.step >= 4 and not killed:
                killed = True
                await swarm.snapshot_of(status.run_id, job.spec, step=2)
                await swarm.kill_peer(PeerId("peer-1"))
            if isinstance(event, RunStatus) and event.detail == "waiting for layers 2-4":
                await swarm.add_peer(PeerId("newcomer"), "2-4")
    assert killed
    final = events[-1]
    assert isinstance(final, RunStatus)
    assert final.phase is RunPhase.FINISHED
    assert losses_by_step(events) == quiet
    steps = committed(events)
    assert len(steps) > 9, "some were voided and done again"
    assert steps.count(0) == steps.count(1) == 1, "those of the snapshot were not"


async def test_a_run_whose_processes_all_died_goes_on_from_its_snapshot(
    job: Job, quiet: dict[int, float], tmp_path: Path
) -> None:
    async with LocalSwarm(tmp_path, LAYERS) as swarm:
        await swarm.all_joined()
        status = await swarm.client.submit(job.spec, job.samples)
        watching = swarm.client.watch(status.run_id, lambda _trouble: None)
        async for event in watching:
            if isinstance(event, StepCommitted) and event.step == 5:
                break
        await watching.aclose()
        await swarm.snapshot_of(status.run_id, job.spec, step=4)
    async with LocalSwarm(tmp_path, LAYERS) as swarm:
        events = await swarm.watch(status.run_id)
    final = events[-1]
    assert isinstance(final, RunStatus)
    assert final.phase is RunPhase.FINISHED
    assert losses_by_step(events) == quiet
