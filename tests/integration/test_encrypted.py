"""Whole swarms over TLS: who is who changes nothing of what is trained."""

from pathlib import Path

import pytest

from swarm_ft.ids import PeerId
from swarm_ft.protocol.messages.client import RunEvent, RunPhase, RunStatus, StepCommitted
from tests.integration.conftest import MakeJob, QuietEvents
from tests.local_swarm import LocalSwarm
from tests.members import make_swarm

LAYERS = ["0-3", "3-6"]


def losses_of(events: list[RunEvent]) -> list[float]:
    return [event.loss for event in events if isinstance(event, StepCommitted)]


async def test_members_train_as_those_do_whom_nobody_knows(
    make_job: MakeJob, quiet_events: QuietEvents, tmp_path: Path
) -> None:
    job = make_job(num_steps=4)
    plain = losses_of(await quiet_events(job, LAYERS))
    async with LocalSwarm(tmp_path, LAYERS, members=make_swarm()) as swarm:
        events = await swarm.train(job.spec, job.samples)
    assert losses_of(events) == plain


@pytest.mark.thorough
async def test_newcomers_take_over_and_the_result_is_given_to_its_client(
    make_job: MakeJob, quiet_events: QuietEvents, tmp_path: Path
) -> None:
    job = make_job(num_samples=16, batch_size=8, num_steps=16)
    plain = losses_of(await quiet_events(job, LAYERS))
    async with LocalSwarm(tmp_path, LAYERS, members=make_swarm()) as swarm:
        await swarm.all_joined()
        first, joined = set(swarm.peers), False
        run_id = (await swarm.client.submit(job.spec, job.samples)).run_id
        events = []
        async for event in swarm.client.watch(run_id, lambda _trouble: None):
            events.append(event)
            if isinstance(event, StepCommitted) and event.step == 1:
                for layers in LAYERS:
                    await swarm.add_peer(PeerId("newcomer"), layers)
            if isinstance(event, RunStatus) and event.phase is RunPhase.TRAINING:
                joined = joined or len(event.assignments) == 4
                if joined and not event.joining and first & set(swarm.peers):
                    for name in first:
                        await swarm.kill_peer(name)
        last = [event for event in events if isinstance(event, RunStatus)][-1]
        assert {stage.peer_id for stage in last.assignments} == set(swarm.peers)
        (tmp_path / "result").mkdir()
        assert len(await swarm.client.fetch_shards(last, tmp_path / "result")) == len(LAYERS)
    assert losses_of(events) == pytest.approx(plain, rel=1e-4)
