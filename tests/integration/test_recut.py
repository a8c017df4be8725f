"""A run goes on from a snapshot on stages that are cut otherwise, bit for bit."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from swarm_ft.ids import PeerId
from swarm_ft.protocol.messages.client import RunEvent, RunPhase, RunStatus, StepCommitted
from swarm_ft.protocol.spec.run_spec import Adapter, Optim
from tests.integration.conftest import Job, MakeJob, QuietEvents
from tests.local_swarm import LocalSwarm

CUT = ["0-2", "2-4", "4-6"]


def losses_by_step(events: Iterable[RunEvent]) -> dict[int, float]:
    return {event.step: event.loss for event in events if isinstance(event, StepCommitted)}


def stages(status: RunStatus) -> list[str]:
    return [str(stage.layers) for stage in status.assignments]


async def recut(
    job: Job,
    folder: Path,
    before: list[str],
    lost: list[str],
    newcomers: list[str],
    *,
    encrypts: bool = False,
) -> tuple[list[RunEvent], RunStatus]:
    """Return a client's view of a run some of whose peers die for ever and are replaced."""
    async with LocalSwarm(folder, before, encrypts=encrypts) as swarm:
        await swarm.all_joined()
        status = await swarm.client.submit(job.spec, job.samples)
        events: list[RunEvent] = []
        is_done = False
        async for event in swarm.client.watch(status.run_id, lambda _trouble: None):
            events.append(event)
            if isinstance(event, StepCommitted) and event.step >= 4 and not is_done:
                is_done = True
                await swarm.snapshot_of(status.run_id, job.spec, step=2)
                for name in lost:
                    await swarm.kill_peer(PeerId(name))
                for number, layers in enumerate(newcomers):
                    await swarm.add_peer(PeerId(f"newcomer-{number}"), layers)
    final = events[-1]
    assert isinstance(final, RunStatus)
    return events, final


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_ft.coordinator.plan.membership.GRACE_S", 0.0)


@pytest.mark.parametrize(
    ("before", "lost", "newcomers", "after"),
    [
        (CUT, ["peer-0", "peer-1", "peer-2"], ["0-6"], ["0-6"]),
        (CUT, ["peer-1"], ["2-3", "3-4"], ["0-2", "2-3", "3-4", "4-6"]),
        (CUT, ["peer-0", "peer-1"], ["0-1", "1-4"], ["0-1", "1-4", "4-6"]),
        (["0-6"], ["peer-0"], ["0-3", "3-6"], ["0-3", "3-6"]),
    ],
    ids=["a lone peer", "a stage in two", "another cut", "a lone peer's in two"],
)
async def test_what_never_stopped_has_the_same_losses(
    make_job: MakeJob,
    quiet_events: QuietEvents,
    tmp_path: Path,
    before: list[str],
    lost: list[str],
    newcomers: list[str],
    after: list[str],
) -> None:
    job = make_job(num_samples=8, num_steps=9, save_steps=2)
    quiet = losses_by_step(await quiet_events(job, before))
    events, final = await recut(job, tmp_path, before, lost, newcomers)
    assert final.phase is RunPhase.FINISHED
    assert stages(final) == after
    assert losses_by_step(events) == quiet
    steps = [int(event.step) for event in events if isinstance(event, StepCommitted)]
    assert steps.count(0) == steps.count(1) == 1, "those of the snapshot were not done again"


@pytest.mark.thorough
async def test_a_newcomer_reads_all_encrypted_stages_whose_layers_it_takes(
    make_job: MakeJob, quiet_events: QuietEvents, tmp_path: Path
) -> None:
    job = make_job(num_samples=8, num_steps=9, save_steps=2)
    quiet = losses_by_step(await quiet_events(job, CUT))
    lost = ["peer-0", "peer-1"]
    events, final = await recut(job, tmp_path, CUT, lost, ["0-1", "1-4"], encrypts=True)
    assert final.phase is RunPhase.FINISHED
    assert stages(final) == ["0-1", "1-4", "4-6"]
    assert losses_by_step(events) == quiet


@pytest.mark.parametrize(
    "options",
    [
        {"adapter": Adapter.LORA, "train_layers": "3-", "frozen_codec": "none"},
        {"optim": Optim.ADAFACTOR},
        {"forward_codec": "aq4", "backward_codec": "q4t+ef", "buffer_bits": 4},
    ],
    ids=["adapters", "adafactor", "compressed"],
)
@pytest.mark.thorough
async def test_whatever_a_stage_keeps_finds_its_layers(
    make_job: MakeJob, quiet_events: QuietEvents, tmp_path: Path, options: dict[str, Any]
) -> None:
    job = make_job(num_samples=8, num_steps=9, save_steps=2, **options)
    quiet = losses_by_step(await quiet_events(job, CUT))
    events, final = await recut(job, tmp_path, CUT, ["peer-0"], ["0-1", "1-2"])
    assert final.phase is RunPhase.FINISHED
    assert stages(final) == ["0-1", "1-2", "2-4", "4-6"]
    losses = losses_by_step(events)
    if "forward_codec" in options:  # the new boundary is compressed too
        assert losses == pytest.approx(quiet, rel=0.05)
    else:
        assert losses == quiet


@pytest.mark.thorough
async def test_a_run_moves_to_fewer_stages_for_one_that_waits(
    make_job: MakeJob, quiet_events: QuietEvents, tmp_path: Path
) -> None:
    job = make_job(num_samples=8, num_steps=24, save_steps=20)
    quiet = losses_by_step(await quiet_events(job, ["0-2", "2-4", "4-6"]))
    short = make_job(num_samples=8, num_steps=4, seed=2)
    quiet_short = losses_by_step(await quiet_events(short, ["0-6"]))
    async with LocalSwarm(tmp_path, ["auto", "auto", "auto"]) as swarm:
        await swarm.all_joined()
        first = await swarm.client.submit(job.spec, job.samples)
        before: list[str] = []
        async for event in swarm.client.watch(first.run_id, lambda _trouble: None):
            if isinstance(event, RunStatus):
                before = stages(event)
            elif isinstance(event, StepCommitted) and event.step >= 2:
                break
        second = await swarm.client.submit(short.spec, short.samples)
        others, events = await swarm.watch(second.run_id), await swarm.watch(first.run_id)
    assert losses_by_step(others) == quiet_short
    final = others[-1]
    assert isinstance(final, RunStatus)
    assert final.phase is RunPhase.FINISHED
    statuses = [event for event in events if isinstance(event, RunStatus)]
    assert statuses[-1].phase is RunPhase.FINISHED
    assert losses_by_step(events) == quiet
    assert before == ["0-2", "2-4", "4-6"]
    cuts = [stages(status) for status in statuses if status.phase is RunPhase.TRAINING]
    assert len(cuts[-1]) < 3
