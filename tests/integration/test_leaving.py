"""A stage's last peer leaves a run that is paused, or trained: real peers and transfers."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from swarm_ft.ids import PeerId, RunId
from swarm_ft.protocol.messages.client import RunEvent, RunPhase, RunStatus, StepCommitted
from swarm_ft.protocol.messages.events import Actor, EventKind
from tests.integration.conftest import Job, MakeJob, QuietEvents
from tests.local_swarm import POLL_S, LocalSwarm

LAYERS = ["0-3", "3-6"]
LEAVER, HEIR = PeerId("peer-1"), PeerId("heir")
STEPS = 12
PATIENCE_S = 60.0


@pytest.fixture
def job(make_job: MakeJob) -> Job:
    return make_job(num_samples=8, num_steps=STEPS)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_ft.coordinator.plan.membership.GRACE_S", 0.0)


def steps_of(events: list[RunEvent]) -> list[tuple[int, float]]:
    return [(int(e.step), e.loss) for e in events if isinstance(e, StepCommitted)]


async def until(swarm: LocalSwarm, run_id: RunId, holds: Callable[[RunStatus], bool]) -> None:
    while not holds(await swarm.client.run(run_id)):  # noqa: ASYNC110 - it is asked
        await asyncio.sleep(POLL_S)


async def leaves(swarm: LocalSwarm) -> None:
    """Leave as with Ctrl-C: the peer goes once it receives permission."""
    peer = swarm.peers[LEAVER]
    peer.node.leave()
    await asyncio.wait_for(asyncio.shield(peer.task), PATIENCE_S)
    await swarm.kill_peer(LEAVER)


@pytest.mark.thorough
async def test_an_idle_peer_takes_over_from_the_last_of_a_stage_of_a_run_that_is_paused(
    job: Job, quiet_events: QuietEvents, tmp_path: Path
) -> None:
    quiet = steps_of(await quiet_events(job, LAYERS))
    async with LocalSwarm(tmp_path, LAYERS) as swarm:
        await swarm.all_joined()
        run_id = (await swarm.client.submit(job.spec, job.samples)).run_id
        watching = asyncio.create_task(swarm.watch(run_id))
        await until(swarm, run_id, lambda run: run.committed_steps > 1)
        swarm.service.pause(run_id)
        await until(swarm, run_id, lambda run: run.detail.startswith("paused after"))
        paused = (await swarm.client.run(run_id)).committed_steps
        await swarm.add_peer(HEIR, LAYERS[1])
        await swarm.all_joined()
        await leaves(swarm)
        assert (await swarm.client.run(run_id)).committed_steps == paused
        swarm.service.resume(run_id)
        events = await watching
    assert steps_of(events) == quiet, "none is made again, and none from other weights"
    requests = [one for event in events if isinstance(event, RunStatus) for one in event.steered]
    kinds = list(dict.fromkeys((one.number, one.kind, one.actor) for one in requests))
    assert kinds == [
        (1, EventKind.RUN_PAUSED, Actor.OPERATOR),
        (2, EventKind.RUN_RESUMED, Actor.OPERATOR),
    ]


async def test_the_result_that_nobody_fetched_yet_is_made_again_after_its_last_peer_left(
    job: Job, tmp_path: Path
) -> None:
    async with LocalSwarm(tmp_path, LAYERS, num_keepers=1) as swarm:
        events = await swarm.train(job.spec, job.samples)
        first = events[-1]
        assert isinstance(first, RunStatus)
        await leaves(swarm)
        await swarm.add_peer(HEIR, LAYERS[1])
        await until(swarm, first.run_id, lambda run: HEIR in {r.peer_id for r in run.results})
        await until(swarm, first.run_id, lambda run: run.phase is RunPhase.FINISHED)
        second = (await swarm.watch(first.run_id))[-1]
        assert isinstance(second, RunStatus)
        assert [r.file for r in second.results] == [r.file for r in first.results], "to the bit"
    assert [step for step, _ in steps_of(events)] == list(range(STEPS))
