"""Snapshots that peers keep for each other: real peers, engines and transfers, no shared place."""

import asyncio
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from swarm_ft.base.sealing import Sealer
from swarm_ft.coordinator.journal.journal import Journal
from swarm_ft.coordinator.plan.stage_keys import stage_keys
from swarm_ft.errors import BadSnapshot
from swarm_ft.ids import PeerId, RunId
from swarm_ft.protocol.messages.client import RunEvent, RunPhase, RunStatus, StepCommitted
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.snapshots.local_files import LocalFiles
from tests.integration.conftest import Job, MakeJob, QuietEvents
from tests.local_swarm import POLL_S, LocalSwarm

SAFETENSORS = b'{"__metadata__"'
"""What a plain shard says within its first bytes."""
SAVE_STEPS = 2


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_ft.coordinator.plan.membership.GRACE_S", 0.0)


@pytest.fixture
def job(make_job: MakeJob) -> Job:
    return make_job(num_samples=8, num_steps=12, save_steps=SAVE_STEPS)


def losses_by_step(events: Iterable[RunEvent]) -> dict[int, float]:
    return {event.step: event.loss for event in events if isinstance(event, StepCommitted)}


def kept_by(folder: Path, name: str) -> list[Path]:
    found = os.walk(folder / f"{name}-kept")
    return sorted(Path(parent) / file for parent, _, files in found for file in files)


def shards_of(folder: Path, name: str) -> list[Path]:
    """The snapshots' stages alone: a file beside them names their run."""
    return [path for path in kept_by(folder, name) if path.suffix == ".shard"]


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - files tell nobody
        await asyncio.sleep(POLL_S)


async def snapshot_whole(swarm: LocalSwarm, run_id: RunId) -> None:
    """Or the run is over: its last one is whole then, and no status lists it any more."""
    while not next(  # noqa: ASYNC110 - the coordinator tells of it on request
        run.snapshots or run.phase is RunPhase.FINISHED
        for run in (await swarm.client.status()).runs
        if run.run_id == run_id
    ):
        await asyncio.sleep(POLL_S)


async def in_order(swarm: LocalSwarm, *more: str) -> None:
    """These join when the others are members: who can take all layers and is first would do so."""
    await swarm.all_joined()
    for layers in more:
        await swarm.add_peer(PeerId(f"peer-{len(swarm.peers)}"), layers)
        await swarm.all_joined()


async def interrupted(
    swarm: LocalSwarm, job: Job, lost: list[str], newcomers: list[str]
) -> tuple[list[RunEvent], RunStatus]:
    """Return a client's view of a run some of whose peers die together after a snapshot."""
    await swarm.all_joined()
    status = await swarm.client.submit(job.spec, job.samples)
    events: list[RunEvent] = []
    is_done = False
    async for event in swarm.client.watch(status.run_id, lambda _trouble: None):
        events.append(event)
        if isinstance(event, StepCommitted) and event.step == 2 * SAVE_STEPS and not is_done:
            is_done = True
            await snapshot_whole(swarm, status.run_id)
            for name in lost:
                await swarm.kill_peer(PeerId(name))
            for number, layers in enumerate(newcomers):
                await swarm.add_peer(PeerId(f"newcomer-{number}"), layers)
    final = events[-1]
    assert isinstance(final, RunStatus)
    return events, final


@pytest.mark.parametrize(
    ("layers", "lost", "newcomers", "after"),
    [
        (["0-3", "3-6"], ["peer-1"], ["3-6"], ["0-3", "3-6"]),
        (["0-3", "3-6"], ["peer-1"], ["3-4", "4-6"], ["0-3", "3-4", "4-6"]),
        (["0-3", "3-6", "0-6"], ["peer-0", "peer-1"], [], ["0-6"]),
    ],
    ids=["a stage", "a stage, cut anew", "all but who keeps"],
)
@pytest.mark.thorough
async def test_a_run_goes_on_from_what_peers_keep_of_a_stage_that_died(
    job: Job,
    quiet_events: QuietEvents,
    tmp_path: Path,
    layers: list[str],
    lost: list[str],
    newcomers: list[str],
    after: list[str],
) -> None:
    quiet = losses_by_step(await quiet_events(job, ["0-3", "3-6"]))
    async with LocalSwarm(tmp_path, layers[:2], num_keepers=2) as swarm:
        await in_order(swarm, *layers[2:])
        events, final = await interrupted(swarm, job, lost, newcomers)
    assert final.phase is RunPhase.FINISHED
    assert [str(stage.layers) for stage in final.assignments] == after
    assert losses_by_step(events) == quiet
    steps = [int(event.step) for event in events if isinstance(event, StepCommitted)]
    assert steps.count(0) == steps.count(1) == 1, "those of the snapshot were not done again"
    assert not (tmp_path / "snapshots").exists()


@pytest.mark.thorough
async def test_a_job_that_did_not_ask_for_it_is_kept_too(
    make_job: MakeJob,
    quiet_events: QuietEvents,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("swarm_ft.coordinator.plan.keepers.MIN_EVERY_S", 0.0)
    monkeypatch.setattr("swarm_ft.coordinator.plan.keepers.SHARE", 1.0)
    job = make_job(num_samples=8, num_steps=12)
    layers = ["0-3", "3-6"]
    quiet = losses_by_step(await quiet_events(job, layers))
    async with LocalSwarm(tmp_path, layers, num_keepers=2) as swarm:
        events, final = await interrupted(swarm, job, ["peer-1"], ["3-6"])
    assert final.phase is RunPhase.FINISHED
    assert losses_by_step(events) == quiet
    steps = [int(event.step) for event in events if isinstance(event, StepCommitted)]
    assert steps.count(0) == 1, "it did not go back to its beginning"


@pytest.mark.thorough
async def test_all_replicas_of_a_stage_may_die_at_once(
    job: Job, quiet_events: QuietEvents, tmp_path: Path
) -> None:
    layers = ["0-3", "3-6", "3-6"]
    quiet = losses_by_step(await quiet_events(job, layers))
    async with LocalSwarm(tmp_path, layers, num_keepers=2) as swarm:
        events, final = await interrupted(swarm, job, ["peer-1", "peer-2"], ["3-6"])
    assert final.phase is RunPhase.FINISHED
    # One replica sums a step's gradients in another order than two.
    assert losses_by_step(events) == pytest.approx(quiet, rel=1e-6)
    steps = [int(event.step) for event in events if isinstance(event, StepCommitted)]
    assert steps.count(0) == steps.count(1) == 1, "those of the snapshot were not done again"


async def test_what_is_kept_tells_who_keeps_it_nothing(job: Job, tmp_path: Path) -> None:
    async with LocalSwarm(tmp_path, ["0-3", "3-6"], num_keepers=1) as swarm:
        await swarm.all_joined()
        status = await swarm.client.submit(job.spec, job.samples)
        await swarm.watch(status.run_id)
        shards = [path for name in swarm.peers for path in shards_of(tmp_path, name)]
        assert {path.name.split("-layers-")[1][:3] for path in shards} == {"0-3", "3-6"}
        assert not any(SAFETENSORS in path.read_bytes()[:64] for path in shards)
    journal = Journal(str(tmp_path / "journal.db"))
    (run_key,) = (run.storage_key for run in journal.load(0.0))
    journal.close()
    other = LayerRange(0, 3)
    files = LocalFiles(Sealer(stage_keys(run_key, other, ())[other], "files"))
    of_another = [path for path in kept_by(tmp_path, "peer-0") if "-layers-3-6-" in path.name]
    assert of_another, "who hosts 0-3 keeps 3-6"
    for path in of_another:
        with pytest.raises(BadSnapshot, match="not sealed here with this key"):
            files.read(path)


@pytest.mark.parametrize("end", ["collected", "cancelled"])
async def test_nothing_is_kept_of_a_run_that_is_over_nor_by_who_was_away(
    job: Job, make_job: MakeJob, tmp_path: Path, end: str
) -> None:
    if end == "cancelled":  # before it is over by itself
        job = make_job(num_samples=8, num_steps=1000, save_steps=SAVE_STEPS)
    async with LocalSwarm(tmp_path, ["0-3", "3-6"], num_keepers=2) as swarm:
        await in_order(swarm, "0-6")
        status = await swarm.client.submit(job.spec, job.samples)
        await snapshot_whole(swarm, status.run_id)
        await until(lambda: all(shards_of(tmp_path, name) for name in swarm.peers))
        await swarm.kill_peer(PeerId("peer-2"))
        if end == "collected":
            await swarm.watch(status.run_id)
            await swarm.client.acknowledge_result(status.run_id)
        else:
            await swarm.client.cancel(status.run_id)
        await until(lambda: not any(kept_by(tmp_path, name) for name in swarm.peers))
        assert shards_of(tmp_path, "peer-2")
        await swarm.add_peer(PeerId("peer-2"), "0-6")
        await until(lambda: not kept_by(tmp_path, "peer-2"))


async def test_after_all_went_down_a_run_goes_on_from_what_lies_on_the_disks(
    job: Job, quiet_events: QuietEvents, tmp_path: Path
) -> None:
    layers = ["0-3", "3-6"]
    quiet = losses_by_step(await quiet_events(job, layers))
    async with LocalSwarm(tmp_path, layers, num_keepers=1) as swarm:
        await swarm.all_joined()
        status = await swarm.client.submit(job.spec, job.samples)
        await snapshot_whole(swarm, status.run_id)
    async with LocalSwarm(tmp_path, layers, num_keepers=1) as swarm:
        events = await swarm.watch(status.run_id)
    assert losses_by_step(events) == quiet
    steps = [int(event.step) for event in events if isinstance(event, StepCommitted)]
    assert steps.count(0) == 1, "it did not go back to its beginning"


async def test_the_last_peer_of_a_stage_leaves_what_it_had_with_others(
    job: Job, quiet_events: QuietEvents, tmp_path: Path
) -> None:
    layers = ["0-3", "3-6"]
    quiet = losses_by_step(await quiet_events(job, layers))
    async with LocalSwarm(tmp_path, layers, num_keepers=1) as swarm:
        await swarm.all_joined()
        status = await swarm.client.submit(job.spec, job.samples)
        events: list[RunEvent] = []
        async for event in swarm.client.watch(status.run_id, lambda _trouble: None):
            events.append(event)
            if isinstance(event, StepCommitted) and event.step == SAVE_STEPS:
                leaver = swarm.peers[PeerId("peer-1")]
                leaver.node.leave()
                await asyncio.wait_for(asyncio.shield(leaver.task), 30.0)
                await swarm.kill_peer(PeerId("peer-1"))
                await swarm.add_peer(PeerId("newcomer"), "3-6")
    assert losses_by_step(events) == quiet
    steps = [int(event.step) for event in events if isinstance(event, StepCommitted)]
    assert steps == list(range(12)), "none is made again"
