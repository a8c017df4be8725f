"""A run whose members go away and come back ends as a quiet one does."""

import asyncio
from collections.abc import Iterable
from pathlib import Path

import pytest

from swarm_ft.ids import PeerId
from swarm_ft.protocol.messages.client import RunEvent, RunPhase, RunStatus, StepCommitted
from swarm_ft.transport.grpc_transport import GrpcTransport
from swarm_ft.transport.methods import JOIN, LINK
from tests.doubles.faults import FaultyTransport
from tests.integration.conftest import Job, MakeJob, QuietEvents
from tests.local_swarm import LocalSwarm

LAYERS = ["0-2", "2-4", "4-6"]


def final_losses(events: Iterable[RunEvent]) -> list[float]:
    losses: dict[int, float] = {}
    for event in events:
        if isinstance(event, StepCommitted):
            losses[event.step] = event.loss
    return [losses[step] for step in sorted(losses)]


@pytest.fixture
def aq_job(make_job: MakeJob) -> Job:
    """Make a job with samples of different lengths, whose prompts are only read."""
    return make_job(num_samples=8, num_steps=6, forward_codec="aq4", backward_codec="q8").ragged()


@pytest.fixture
async def quiet_losses(aq_job: Job, quiet_events: QuietEvents) -> list[float]:
    return final_losses(await quiet_events(aq_job, LAYERS))


@pytest.mark.thorough
async def test_broken_boundary_streams_change_nothing(
    aq_job: Job, quiet_losses: list[float], tmp_path: Path
) -> None:
    transport = FaultyTransport(
        GrpcTransport(),
        cut_sends={LINK: [2, 9, 20, 41, 66]},
        cut_receives={LINK: [5, 30, 33, 70]},
    )
    async with LocalSwarm(tmp_path, LAYERS, transport=transport) as swarm:
        events = await swarm.train(aq_job.spec, aq_job.samples)
    assert transport.num_cuts == 9
    assert final_losses(events) == quiet_losses


async def test_broken_control_streams_change_nothing(
    aq_job: Job, quiet_losses: list[float], tmp_path: Path
) -> None:
    transport = FaultyTransport(
        GrpcTransport(), cut_sends={JOIN: [8, 13]}, cut_receives={JOIN: [11, 25]}
    )
    async with LocalSwarm(tmp_path, LAYERS, transport=transport) as swarm:
        events = await swarm.train(aq_job.spec, aq_job.samples)
    assert transport.num_cuts == 4
    assert final_losses(events) == quiet_losses


async def test_a_broken_tied_exchange_is_made_again(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job(num_samples=8, num_steps=3, sync_tied_embeddings=True)
    (tmp_path / "quiet").mkdir()
    async with LocalSwarm(tmp_path / "quiet", LAYERS) as swarm:
        quiet = final_losses(await swarm.train(job.spec, job.samples))
    transport = FaultyTransport(
        GrpcTransport(), cut_sends={LINK: [9, 21, 40]}, cut_receives={LINK: [12, 33, 45]}
    )
    (tmp_path / "faulty").mkdir()
    async with LocalSwarm(tmp_path / "faulty", LAYERS, transport=transport) as swarm:
        events = await swarm.train(job.spec, job.samples)
    assert transport.num_cuts == 6
    assert final_losses(events) == quiet


@pytest.mark.parametrize("after_step", [0, 2, 5])
async def test_a_coordinator_that_is_killed_goes_on_from_its_journal(
    aq_job: Job, quiet_losses: list[float], tmp_path: Path, after_step: int
) -> None:
    async with LocalSwarm(tmp_path, LAYERS) as swarm:
        status = await swarm.client.submit(aq_job.spec, aq_job.samples)
        watching = swarm.client.watch(status.run_id, lambda _trouble: None)
        async for event in watching:
            if isinstance(event, StepCommitted) and event.step == after_step:
                break
        await watching.aclose()
        await swarm.kill_coordinator()
        await swarm.start_coordinator()
        events = await swarm.watch(status.run_id)
    assert final_losses(events) == quiet_losses
    final = [event for event in events if isinstance(event, RunStatus)][-1]
    assert final.phase is RunPhase.FINISHED


async def test_a_stage_whose_peer_is_lost_starts_again_with_a_newcomer(
    aq_job: Job, quiet_losses: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm_ft.coordinator.plan.membership.GRACE_S", 0.0)
    async with LocalSwarm(tmp_path, LAYERS) as swarm:
        status = await swarm.client.submit(aq_job.spec, aq_job.samples)
        waited = asyncio.Event()

        async def watch() -> list[RunEvent]:
            events: list[RunEvent] = []
            async for event in swarm.client.watch(status.run_id, lambda _trouble: None):
                events.append(event)
                if isinstance(event, StepCommitted) and event.step == 3 and not waited.is_set():
                    await swarm.kill_peer(PeerId("peer-1"))
                if isinstance(event, RunStatus) and event.detail == "waiting for layers 2-4":
                    waited.set()
                    await swarm.add_peer(PeerId("newcomer"), "2-4")
            return events

        events = await watch()
    assert waited.is_set()
    assert final_losses(events) == quiet_losses
    final = [event for event in events if isinstance(event, RunStatus)][-1]
    assert [stage.peer_id for stage in final.assignments] == ["peer-0", "newcomer", "peer-2"]


async def test_peers_that_leave_the_choice_are_given_all_layers(
    make_job: MakeJob, tmp_path: Path
) -> None:
    job = make_job(num_samples=4, num_steps=2)
    async with LocalSwarm(tmp_path, ["auto", "auto", "4-6"]) as swarm:
        events = await swarm.train(job.spec, job.samples)
    final = [event for event in events if isinstance(event, RunStatus)][-1]
    assert [str(stage.layers) for stage in final.assignments] == ["0-2", "2-4", "4-6"]


async def test_two_runs_are_trained_one_after_the_other(
    make_job: MakeJob, aq_job: Job, tmp_path: Path
) -> None:
    async with LocalSwarm(tmp_path, LAYERS) as swarm:
        first = await swarm.client.submit(aq_job.spec, aq_job.samples)
        second_job = make_job(num_samples=4, num_steps=2)
        second = await swarm.client.submit(second_job.spec, second_job.samples)
        assert second.phase < RunPhase.LOADING
        assert len(final_losses(await swarm.watch(first.run_id))) == 6
        await swarm.client.acknowledge_result(first.run_id)  # until then its peers keep the result
        assert len(final_losses(await swarm.watch(second.run_id))) == 2
        runs = (await swarm.client.status()).runs
        assert [run.phase for run in runs] == [RunPhase.COLLECTED, RunPhase.FINISHED]


async def test_a_cancelled_run_lets_its_peers_go(
    make_job: MakeJob, aq_job: Job, tmp_path: Path
) -> None:
    endless = make_job(num_samples=8, num_steps=100_000)
    async with LocalSwarm(tmp_path, LAYERS) as swarm:
        status = await swarm.client.submit(endless.spec, endless.samples)
        async for event in swarm.client.watch(status.run_id, lambda _trouble: None):
            if isinstance(event, StepCommitted):
                break
        cancelled = await swarm.client.cancel(status.run_id)
        assert cancelled.phase is RunPhase.CANCELLED
        assert len(final_losses(await swarm.train(aq_job.spec, aq_job.samples))) == 6
