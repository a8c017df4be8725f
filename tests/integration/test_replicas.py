"""Several peers a stage train as one does, and any of them may die."""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import TypeGuard

import pytest

from swarm_ft.ids import PeerId
from swarm_ft.protocol.messages.client import RunEvent, RunPhase, RunStatus, StepCommitted
from swarm_ft.transport.grpc_transport import GrpcTransport
from tests.counting import CountingTransport
from tests.integration.conftest import Job, MakeJob, QuietEvents
from tests.local_swarm import LocalSwarm

LAYERS = ["0-3", "3-6"]
RTOL = 1e-4


def final_losses(events: Iterable[RunEvent]) -> list[float]:
    losses = {event.step: event.loss for event in events if isinstance(event, StepCommitted)}
    return [losses[step] for step in sorted(losses)]


def last_status(events: Iterable[RunEvent]) -> RunStatus:
    return [event for event in events if isinstance(event, RunStatus)][-1]


def is_training(event: RunEvent) -> TypeGuard[RunStatus]:
    return isinstance(event, RunStatus) and event.phase is RunPhase.TRAINING


async def trained(job: Job, directory: Path, layers: list[str]) -> list[RunEvent]:
    async with LocalSwarm(directory, layers) as swarm:
        return await swarm.train(job.spec, job.samples)


@pytest.mark.parametrize(
    "layers",
    [["0-3", "0-3", "3-6", "3-6"], ["0-3", "3-6", "3-6", "3-6"], ["0-2", "2-4", "2-4", "4-6"]],
)
@pytest.mark.thorough
async def test_replicas_train_as_one_peer_does(
    make_job: MakeJob, quiet_events: QuietEvents, tmp_path: Path, layers: list[str]
) -> None:
    job = make_job(num_samples=16, batch_size=8, num_steps=8)
    alone = final_losses(await quiet_events(job, LAYERS))
    events = await trained(job, tmp_path, layers)
    assert final_losses(events) == pytest.approx(alone, rel=RTOL)
    assert len(last_status(events).assignments) == len(layers)


@pytest.mark.parametrize("layers", [["0-3", "0-3", "3-6"], ["0-3", "3-6", "3-6"]])
async def test_tied_embeddings_stay_tied_over_uneven_replicas(
    make_job: MakeJob, quiet_events: QuietEvents, tmp_path: Path, layers: list[str]
) -> None:
    job = make_job(num_samples=16, batch_size=8, num_steps=4, sync_tied_embeddings=True)
    alone = final_losses(await quiet_events(job, LAYERS))
    events = await trained(job, tmp_path, layers)
    assert final_losses(events) == pytest.approx(alone, rel=RTOL)


@pytest.mark.thorough
async def test_compressed_replicas_train_nearly_as_well(
    make_job: MakeJob, quiet_events: QuietEvents, tmp_path: Path
) -> None:
    job = make_job(num_samples=16, batch_size=8, num_steps=16)
    compressed = make_job(num_samples=16, batch_size=8, num_steps=16, dp_codec="q4")
    plain = final_losses(await quiet_events(job, LAYERS * 2))
    events = await trained(compressed, tmp_path, LAYERS * 2)
    losses = final_losses(events)
    assert losses[-1] == pytest.approx(plain[-1], rel=0.01)
    assert losses != pytest.approx(plain, rel=1e-6)
    sent = [event.gradients for event in events if isinstance(event, StepCommitted)]
    assert all(0 < 7 * t.sent_bytes < t.uncompressed_bytes for t in sent)


@pytest.mark.thorough
async def test_a_replica_of_every_stage_dies_in_the_middle_of_a_step(
    make_job: MakeJob, quiet_events: QuietEvents, tmp_path: Path
) -> None:
    job = make_job(num_samples=16, batch_size=8, num_steps=8)
    quiet = final_losses(await quiet_events(job, LAYERS * 2))
    async with LocalSwarm(tmp_path, LAYERS * 2) as swarm:
        await swarm.all_joined()
        status = await swarm.client.submit(job.spec, job.samples)
        events = []
        async for event in swarm.client.watch(status.run_id, lambda _trouble: None):
            events.append(event)
            if isinstance(event, StepCommitted) and event.step == 2:
                await asyncio.gather(*(swarm.kill_peer(PeerId(f"peer-{i}")) for i in (1, 2)))
    assert last_status(events).phase is RunPhase.FINISHED
    assert final_losses(events) == pytest.approx(quiet, rel=RTOL)
    steps = [event.step for event in events if isinstance(event, StepCommitted)]
    assert steps == list(range(8))


async def test_a_death_opens_no_call_among_the_living(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job(num_samples=16, batch_size=8, num_steps=8)
    transport = CountingTransport(GrpcTransport())
    async with LocalSwarm(tmp_path, LAYERS * 3, transport=transport) as swarm:
        await swarm.all_joined()
        status = await swarm.client.submit(job.spec, job.samples)
        dead = swarm.peers[PeerId("peer-1")].server.endpoint
        async for event in swarm.client.watch(status.run_id, lambda _trouble: None):
            if isinstance(event, StepCommitted) and event.step == 2:
                assert [name for _, name in transport.opened].count("Link") == 9 + 3 + 3
                transport.opened.clear()
                await swarm.kill_peer(PeerId("peer-1"))
            if isinstance(event, StepCommitted) and event.step == 6:
                break
    opened = [at for at, name in transport.opened if name == "Link" and at != dead]
    assert not opened
    assert isinstance(event, StepCommitted)
    assert event.step == 6


async def test_a_newcomer_takes_over_from_its_replica_and_then_stands_in_for_it(
    make_job: MakeJob, quiet_events: QuietEvents, tmp_path: Path
) -> None:
    num_steps = 16
    job = make_job(num_samples=16, batch_size=8, num_steps=num_steps)
    quiet = final_losses(await quiet_events(job, LAYERS))
    async with LocalSwarm(tmp_path, LAYERS) as swarm:
        await swarm.all_joined()
        status = await swarm.client.submit(job.spec, job.samples)
        events, has_joined, has_died = [], False, False
        async for event in swarm.client.watch(status.run_id, lambda _trouble: None):
            events.append(event)
            if isinstance(event, StepCommitted) and event.step == 1:
                await swarm.add_peer(PeerId("newcomer-0"), "0-3")
                await swarm.add_peer(PeerId("newcomer-1"), "3-6")
            if is_training(event) and len(event.assignments) == 4 and event.joining:
                has_joined = True
            if is_training(event) and has_joined and not event.joining and not has_died:
                has_died = True
                await swarm.kill_peer(PeerId("peer-0"))
                await swarm.kill_peer(PeerId("peer-1"))
    assert has_died
    assert last_status(events).phase is RunPhase.FINISHED
    assert {s.peer_id for s in last_status(events).assignments} == {"newcomer-0", "newcomer-1"}
    assert final_losses(events) == pytest.approx(quiet, rel=RTOL)
    steps = [event.step for event in events if isinstance(event, StepCommitted)]
    assert steps == list(range(num_steps))
