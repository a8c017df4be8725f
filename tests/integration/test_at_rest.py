"""Peers' files with data of others: encrypted if configured so, and deleted with the run."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from swarm_ft.base.sealing import Sealer, new_key
from swarm_ft.buffers import BufferLimits
from swarm_ft.coordinator.journal.journal import Journal
from swarm_ft.coordinator.plan.stage_keys import peer_key, stage_keys
from swarm_ft.digest import file_stem
from swarm_ft.errors import BadSnapshot
from swarm_ft.ids import PeerId, RunId, StepNumber
from swarm_ft.protocol.messages.client import RunPhase, RunStatus, StepCommitted
from swarm_ft.protocol.messages.shard import ShardName
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.snapshots.local_files import LocalFiles
from swarm_ft.snapshots.shard import read_shard
from tests.integration.conftest import Job, MakeJob, QuietEvents
from tests.local_swarm import POLL_S, LocalSwarm

LAYERS = ["0-3", "3-6", "3-6"]
STEPS_PER_EPOCH = 4
ON_DISK = BufferLimits(memory_bytes=1 << 16, disk_bytes=1 << 24)
SAFETENSORS = b'{"__metadata__"'
"""What a plain shard says within its first bytes."""


@pytest.fixture
def job(make_job: MakeJob) -> Job:
    return make_job(
        num_samples=16,
        num_steps=4 * STEPS_PER_EPOCH,
        save_steps=STEPS_PER_EPOCH,
        forward_codec="aq4",
        backward_codec="q4+ef21",
    )


def files_of(folder: Path) -> list[Path]:
    """List a run's files: buffers, states, snapshots and tokens, but no locks."""
    found = (Path(parent) / name for parent, _, names in os.walk(folder) for name in names)
    return sorted(path for path in found if path.name != "lock")


def kept_by(folder: Path, name: str) -> list[Path]:
    return [*files_of(folder / name), *files_of(folder / f"{name}-buffers")]


def snapshot_folder(folder: Path, run_id: RunId, step: int) -> Path:
    return folder / "snapshots" / f"run-{file_stem(run_id)}" / f"step-{step:08}"


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - files tell nobody
        await asyncio.sleep(POLL_S)


@asynccontextmanager
async def under_way(swarm: LocalSwarm, job: Job) -> AsyncIterator[RunId]:
    """A run that has a snapshot, and buffers of all samples."""
    await swarm.all_joined()
    status = await swarm.client.submit(job.spec, job.samples)
    watching = swarm.client.watch(status.run_id, lambda _trouble: None)
    async for event in watching:
        if isinstance(event, StepCommitted) and event.step == STEPS_PER_EPOCH:
            break
    await watching.aclose()
    await swarm.snapshot_of(status.run_id, job.spec, step=STEPS_PER_EPOCH)
    yield status.run_id


async def finished(swarm: LocalSwarm, run_id: RunId) -> RunStatus:
    last = (await swarm.watch(run_id))[-1]
    assert isinstance(last, RunStatus)
    assert last.phase is RunPhase.FINISHED
    return last


@pytest.mark.parametrize("encrypts", [True, False], ids=["encrypted", "plain"])
@pytest.mark.thorough
async def test_only_encrypted_files_tell_nothing(job: Job, tmp_path: Path, encrypts: bool) -> None:
    key = new_key() if encrypts else None
    settings = {"buffer_limits": ON_DISK, "encrypts": encrypts, "journal_key": key}
    async with LocalSwarm(tmp_path, LAYERS, **settings) as swarm:  # type: ignore[arg-type]
        async with under_way(swarm, job) as run_id:
            tokens = b"".join(
                path.read_bytes() for path in files_of(tmp_path / "journal.db.tokens")
            )
        await finished(swarm, run_id)
        last = job.spec.train.num_steps
        await swarm.snapshot_of(run_id, job.spec, step=last)
        newest = snapshot_folder(tmp_path, run_id, last)  # earlier ones may just go
        shards = [*files_of(newest), *files_of(tmp_path / "peer-1")]
        shards = [path for path in shards if path.suffix == ".safetensors"]
        heads = [path.read_bytes()[:64] for path in shards]
        assert len(heads) > 2, "snapshots and a result"
        assert [SAFETENSORS in head for head in heads] == [not encrypts] * len(heads)
        assert any(sample in tokens for sample in job.samples) != encrypts


async def test_a_shard_of_a_snapshot_opens_with_its_stages_key_alone(
    job: Job, tmp_path: Path
) -> None:
    async with LocalSwarm(tmp_path, LAYERS, encrypts=True) as swarm:
        async with under_way(swarm, job) as run_id:
            pass
        await finished(swarm, run_id)
        last = StepNumber(job.spec.train.num_steps)
        await swarm.snapshot_of(run_id, job.spec, step=last)
    journal = Journal(str(tmp_path / "journal.db"))
    (run_key,) = (run.storage_key for run in journal.load(0.0))
    journal.close()
    stages = [LayerRange(0, 3), LayerRange(3, 6)]
    keys = {layers: stage_keys(run_key, layers, ())[layers] for layers in stages}
    peers = [peer_key(run_key, PeerId(f"peer-{number}")) for number in range(len(LAYERS))]
    for layers, key in keys.items():
        name = ShardName(run_id=run_id, step=last, layers=layers)
        path = snapshot_folder(tmp_path, run_id, last) / f"layers-{layers}.safetensors"
        reading = partial(read_shard, path, name, job.spec.digest())
        assert reading(LocalFiles(Sealer(key, "files"))).state
        for wrong in {*keys.values(), *peers, run_key} - {key}:
            with pytest.raises(BadSnapshot, match="not sealed here with this key"):
                reading(LocalFiles(Sealer(wrong, "files")))


@pytest.mark.thorough
async def test_an_encrypted_run_goes_on_after_all_were_gone_and_gives_its_result(
    job: Job, quiet_events: QuietEvents, tmp_path: Path
) -> None:
    key = new_key()
    settings = {"buffer_limits": ON_DISK, "encrypts": True, "journal_key": key}
    async with (
        LocalSwarm(tmp_path, LAYERS, **settings) as swarm,  # type: ignore[arg-type]
        under_way(swarm, job) as run_id,
    ):
        pass
    assert kept_by(tmp_path, "peer-0"), "buffers outlive their process"
    async with LocalSwarm(tmp_path, LAYERS, **settings) as swarm:  # type: ignore[arg-type]
        events = await swarm.watch(run_id)
        status = await finished(swarm, run_id)
        (tmp_path / "taken").mkdir()
        shards = await swarm.client.fetch_shards(status, tmp_path / "taken")
        assert all(SAFETENSORS in shard.read_bytes()[:64] for shard in shards)
    steps = {int(event.step): event for event in events if isinstance(event, StepCommitted)}
    quiet = await quiet_events(job, LAYERS)
    expected = {int(event.step): event.loss for event in quiet if isinstance(event, StepCommitted)}
    later = range(3 * STEPS_PER_EPOCH, 4 * STEPS_PER_EPOCH)
    assert sum(t.delta_frames for step in later for t in steps[step].traffic) > 0
    assert steps.keys() == expected.keys()
    assert all(abs(steps[step].loss / expected[step] - 1) < 0.05 for step in steps)


async def test_a_newcomer_takes_an_encrypted_state_over(job: Job, tmp_path: Path) -> None:
    settings = {"buffer_limits": ON_DISK, "encrypts": True}
    async with LocalSwarm(tmp_path, LAYERS[:2], **settings) as swarm:  # type: ignore[arg-type]
        async with under_way(swarm, job) as run_id:
            await swarm.add_peer(PeerId("late"), "3-6")
        status = await finished(swarm, run_id)
    digests = {result.file.digest for result in status.results if result.peer_id != "peer-0"}
    assert len(digests) == 1, "replicas have the same bits"


@pytest.mark.parametrize("end", ["collected", "cancelled"])
async def test_nothing_of_a_run_is_left_when_it_is_over(job: Job, tmp_path: Path, end: str) -> None:
    async with LocalSwarm(tmp_path, LAYERS, buffer_limits=ON_DISK) as swarm:
        async with under_way(swarm, job) as run_id:
            assert all(kept_by(tmp_path, name) for name in swarm.peers)
        if end == "collected":
            await finished(swarm, run_id)
            assert files_of(tmp_path / "snapshots")
            await swarm.client.acknowledge_result(run_id)
        else:
            await swarm.client.cancel(run_id)
        folders = ["snapshots", "journal.db.tokens"]
        await until(lambda: not any(kept_by(tmp_path, name) for name in swarm.peers))
        await until(lambda: not any(files_of(tmp_path / name) for name in folders))


async def test_who_was_away_when_it_ended_deletes_its_part_when_it_comes_back(
    job: Job, tmp_path: Path
) -> None:
    away = PeerId("peer-2")
    async with LocalSwarm(tmp_path, LAYERS, buffer_limits=ON_DISK) as swarm:
        async with under_way(swarm, job) as run_id:
            await swarm.kill_peer(away)
            await swarm.client.cancel(run_id)
        assert kept_by(tmp_path, away)
        await swarm.kill_coordinator()
        await swarm.start_coordinator()
        await swarm.add_peer(away, "3-6")
        await until(lambda: not kept_by(tmp_path, away))


@pytest.mark.thorough
async def test_buffers_of_a_run_that_goes_on_stay(job: Job, tmp_path: Path) -> None:
    away = PeerId("peer-2")
    async with LocalSwarm(tmp_path, LAYERS, buffer_limits=ON_DISK) as swarm:
        async with under_way(swarm, job) as run_id:
            await swarm.kill_peer(away)
            await swarm.kill_peer(PeerId("peer-0"))
        await swarm.add_peer(away, "3-6")
        await swarm.all_joined()
        assert kept_by(tmp_path, away)
        await swarm.add_peer(PeerId("peer-0"), "0-3")
        await finished(swarm, run_id)


async def test_a_snapshot_of_a_run_that_is_over_goes_at_the_coordinators_start(
    job: Job, tmp_path: Path
) -> None:
    async with LocalSwarm(tmp_path, LAYERS, buffer_limits=ON_DISK) as swarm:
        async with under_way(swarm, job) as run_id:
            await swarm.client.cancel(run_id)
        await until(lambda: not files_of(tmp_path / "snapshots"))
        await swarm.kill_coordinator()
        late = snapshot_folder(tmp_path, run_id, 8) / "layers-0-3.safetensors"
        others = tmp_path / "snapshots" / "run-of-others" / "step-00000008" / "manifest.json"
        for path in (late, others):
            path.parent.mkdir(parents=True)
            path.write_bytes(b"written late")
        await swarm.start_coordinator()
        await until(lambda: files_of(tmp_path / "snapshots") == [others])
