"""Buffers outlive their peer: who comes back sends changes, not everything anew."""

from pathlib import Path

import pytest

from swarm_ft.buffers import BufferLimits
from swarm_ft.protocol.messages.client import RunPhase, RunStatus, StepCommitted
from tests.integration.conftest import Job, MakeJob
from tests.local_swarm import LocalSwarm

LAYERS = ["0-2", "2-4", "4-6"]
NUM_SAMPLES, BATCH_SIZE = 16, 4
STEPS_PER_EPOCH = NUM_SAMPLES // BATCH_SIZE
ON_DISK = BufferLimits(memory_bytes=1 << 20, disk_bytes=1 << 24)


@pytest.fixture
def job(make_job: MakeJob) -> Job:
    return make_job(
        num_samples=NUM_SAMPLES,
        num_steps=4 * STEPS_PER_EPOCH,
        save_steps=STEPS_PER_EPOCH,
        forward_codec="aq4",
        backward_codec="q4+ef21",
    ).ragged()


@pytest.fixture(autouse=True)
def no_buffers_in_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Act as if there were too many buffers for snapshots."""
    monkeypatch.setattr("swarm_ft.peer.state.stage_state.MAX_BUFFER_BYTES", 0)


async def key_frames_after_a_restart(
    job: Job, folder: Path, limits: BufferLimits | None
) -> tuple[list[int], int]:
    """Key frames of each step of an epoch that begins after all processes ended and came back.

    Also how many boundaries there are.
    """
    async with LocalSwarm(folder, LAYERS, buffer_limits=limits) as swarm:
        await swarm.all_joined()
        status = await swarm.client.submit(job.spec, job.samples)
        watching = swarm.client.watch(status.run_id, lambda _trouble: None)
        async for event in watching:
            if isinstance(event, StepCommitted) and event.step == 2 * STEPS_PER_EPOCH - 1:
                break
        await watching.aclose()
        await swarm.snapshot_of(status.run_id, job.spec, step=2 * STEPS_PER_EPOCH)
    async with LocalSwarm(folder, LAYERS, buffer_limits=limits) as swarm:
        events = await swarm.watch(status.run_id)
    final = events[-1]
    assert isinstance(final, RunStatus)
    assert final.phase is RunPhase.FINISHED
    steps = {int(event.step): event for event in events if isinstance(event, StepCommitted)}
    later = range(3 * STEPS_PER_EPOCH - BATCH_SIZE, 3 * STEPS_PER_EPOCH)
    return [sum(t.key_frames for t in steps[s].traffic) for s in later], len(LAYERS) - 1


async def test_peers_that_come_back_send_changes(job: Job, tmp_path: Path) -> None:
    key_frames, boundaries = await key_frames_after_a_restart(job, tmp_path, ON_DISK)
    # Only some peers received the step's commit before they ended: its samples begin anew.
    assert sum(key_frames) <= BATCH_SIZE * boundaries
    assert 0 in key_frames


@pytest.mark.thorough
async def test_without_a_disk_they_send_everything_anew(job: Job, tmp_path: Path) -> None:
    key_frames, boundaries = await key_frames_after_a_restart(job, tmp_path, None)
    assert key_frames == [BATCH_SIZE * boundaries] * STEPS_PER_EPOCH
