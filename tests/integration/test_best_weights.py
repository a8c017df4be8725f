"""A run that stops early, and gives its best weights: as a loop in one process would."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swarm_ft.errors import BadOption
from swarm_ft.ids import PeerId
from swarm_ft.protocol.messages.client import RunEvent, RunPhase, RunStatus, StepCommitted
from swarm_ft.protocol.spec.run_spec import LrSchedule
from swarm_ft.snapshots.store import SnapshotStore
from tests.integration.conftest import Job, MakeJob
from tests.integration.test_evaluation import evaluations_of, held_out_loss
from tests.integration.test_parity import exported_weights, plain_loop
from tests.local_swarm import LocalSwarm

HELD_OUT, PATIENCE, BEST = 5, 2, 7
OPTIONS: dict[str, Any] = {
    "num_samples": 6,
    "num_steps": 16,
    "learning_rate": 3e-3,
    "lr_schedule": LrSchedule.CONSTANT,
    "warmup_steps": 0,
    "num_eval_samples": HELD_OUT,
    "eval_steps": 1,
    "save_steps": 1,
    "save_total_limit": 1,
    "early_stopping_patience": PATIENCE,
    "load_best_model_at_end": True,
}


@pytest.fixture
def job(make_job: MakeJob) -> Job:
    return make_job(**OPTIONS)


def last_of(events: list[RunEvent]) -> RunStatus:
    return [event for event in events if isinstance(event, RunStatus)][-1]


LoopLoss = Callable[[Job, int], float]


@pytest.fixture(scope="module")
def loop_loss() -> LoopLoss:
    """`loop_loss(job, 3)`: the held-out loss after 3 steps in one process, which are made once."""
    found: dict[tuple[bytes, int], float] = {}

    def loss(job: Job, steps: int) -> float:
        key = job.spec.digest(), steps
        if key not in found:
            _, model = plain_loop(job, untie=True, steps=steps)
            found[key] = held_out_loss(model, job)
        return found[key]

    return loss


def assert_ended_with_the_best(events: list[RunEvent], job: Job, loop_loss: LoopLoss) -> None:
    status = last_of(events)
    assert status.phase is RunPhase.FINISHED
    losses = {one.step: one.eval_loss for one in evaluations_of(events)}
    of_loop = {int(step): loop_loss(job, step) for step in losses}
    assert losses == pytest.approx(of_loop, rel=1e-4)
    trained = status.committed_steps
    best = min(range(1, trained + 1), key=of_loop.__getitem__)
    assert (status.steps_in_result, trained) == (best, BEST + PATIENCE) == (BEST, trained)
    committed = {event.step for event in events if isinstance(event, StepCommitted)}
    assert sorted(committed) == list(range(trained))


async def assert_has_the_best(
    swarm: LocalSwarm, events: list[RunEvent], job: Job, folder: Path
) -> None:
    """The result has the reported loss of the best weights."""
    weights = await exported_weights(swarm, events, folder)
    best = last_of(events).steps_in_result
    _, model = plain_loop(job, untie=True, steps=0)
    model.load_state_dict(weights)
    losses = {one.step: one.eval_loss for one in evaluations_of(events)}
    assert held_out_loss(model, job) == pytest.approx(losses[best], rel=1e-6)


@pytest.mark.parametrize("layers", [["0-6"], ["0-2", "2-4", "4-6"], ["0-3", "3-6", "3-6"]])
@pytest.mark.thorough
async def test_a_swarm_stops_and_gives_the_weights_that_were_the_best(
    job: Job, loop_loss: LoopLoss, tmp_path: Path, layers: list[str]
) -> None:
    async with LocalSwarm(tmp_path, layers) as swarm:
        events = await swarm.train(job.spec, job.samples)
        assert_ended_with_the_best(events, job, loop_loss)
        await assert_has_the_best(swarm, events, job, tmp_path / "shards")
        repeated = await swarm.watch()
        assert evaluations_of(repeated) == evaluations_of(events)
        assert last_of(repeated) == last_of(events)
        status = last_of(events)
        store = SnapshotStore(str(tmp_path / "snapshots"))
        steps = [one.step for one in store.list_snapshots(status.run_id, job.spec.digest())]
        assert steps == [status.steps_in_result, status.committed_steps]


@pytest.mark.parametrize("moment", [1, 8, 10])
async def test_a_coordinator_that_is_killed_stops_at_the_same_step(
    job: Job, loop_loss: LoopLoss, tmp_path: Path, moment: int
) -> None:
    async with LocalSwarm(tmp_path, ["0-3", "3-6"]) as swarm:
        await swarm.all_joined()
        submitted = await swarm.client.submit(job.spec, job.samples)
        watching = swarm.client.watch(submitted.run_id, lambda _trouble: None)
        num_evaluated = 0
        async for event in watching:
            num_evaluated += bool(evaluations_of([event]))
            if num_evaluated == moment:
                break
        await watching.aclose()
        await swarm.kill_coordinator()
        await swarm.start_coordinator()
        events = await swarm.watch(submitted.run_id)
        assert_ended_with_the_best(events, job, loop_loss)
        await assert_has_the_best(swarm, events, job, tmp_path / "shards")


async def test_a_best_result_whose_holder_is_gone_is_made_again(
    job: Job, loop_loss: LoopLoss, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm_ft.coordinator.plan.membership.GRACE_S", 0.0)
    async with LocalSwarm(tmp_path, ["0-3", "3-6"]) as swarm:
        before = last_of(await swarm.train(job.spec, job.samples))
        await swarm.kill_peer(PeerId("peer-1"))
        await swarm.add_peer(PeerId("newcomer"), "3-6")
        events: list[RunEvent] = []
        async for event in swarm.client.watch(before.run_id, lambda _trouble: None):
            events.append(event)
        while not [one for one in last_of(events).results if one.peer_id == "newcomer"]:
            events = await swarm.watch(before.run_id)
        assert_ended_with_the_best(events, job, loop_loss)
        await assert_has_the_best(swarm, events, job, tmp_path / "shards")


async def test_a_coordinator_without_snapshots_takes_no_job_that_needs_them(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.local_swarm.SnapshotStore", lambda _url: None)
    async with LocalSwarm(tmp_path, []) as swarm:
        with pytest.raises(BadOption, match="start it and the peers with --snapshots URL"):
            await swarm.client.submit(job.spec, job.samples)
