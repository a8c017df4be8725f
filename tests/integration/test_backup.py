"""A coordinator's files are copied while a run trains, and a coordinator goes on from the copy."""

import shutil
from pathlib import Path

import pytest

from swarm_ft.coordinator.journal.backup import back_up
from swarm_ft.protocol.messages.client import RunPhase, StepCommitted
from tests.integration.conftest import MakeJob
from tests.local_swarm import LocalSwarm

LAYERS = ["0-3", "3-6"]
NUM_STEPS, COPIED_AFTER = 12, 4


@pytest.mark.parametrize("later_steps", [0, 3])
async def test_a_run_goes_on_from_a_copy_that_was_made_while_it_trained(
    make_job: MakeJob, tmp_path: Path, later_steps: int
) -> None:
    """Also from one whose snapshots were replaced by later ones meanwhile."""
    job = make_job(num_steps=NUM_STEPS, save_steps=1)
    copy = tmp_path / "copy"
    async with LocalSwarm(tmp_path, LAYERS) as swarm:
        await swarm.all_joined()
        run = await swarm.client.submit(job.spec, job.samples)
        async for event in swarm.client.watch(run.run_id, lambda _trouble: None):
            if isinstance(event, StepCommitted):
                if event.step >= COPIED_AFTER and not copy.exists():
                    made = back_up(swarm.journal, tmp_path / "no-keys", copy)
                if event.step == COPIED_AFTER + later_steps:
                    break
        assert (made.journal, made.num_runs, made.num_members) == (copy / "journal.db", 1, None)
        await swarm.kill_coordinator()
        put_back(copy, tmp_path)
        await swarm.start_coordinator()
        events = await swarm.watch(run.run_id)
        (found,) = (await swarm.client.status()).runs
    assert found.phase is RunPhase.FINISHED
    assert [event.step for event in events if isinstance(event, StepCommitted)][-1] == NUM_STEPS - 1


def put_back(copy: Path, folder: Path) -> None:
    for path in folder.glob("journal.db*"):
        (shutil.rmtree if path.is_dir() else Path.unlink)(path)
    shutil.copytree(copy, folder, dirs_exist_ok=True)
