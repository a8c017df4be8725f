"""Two owners' runs train at the same time on the same two peers, and neither shows it."""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from swarm_ft.client.swarm import SwarmClient
from swarm_ft.identity.roles import Role
from swarm_ft.ids import PeerId, RunId
from swarm_ft.protocol.messages.client import RunEvent, RunPhase, RunStatus, StepCommitted
from swarm_ft.protocol.messages.events import Rollback
from swarm_ft.transport.grpc_options import GrpcOptions
from swarm_ft.transport.grpc_transport import GrpcTransport
from tests.integration.conftest import Job, MakeJob, QuietEvents
from tests.local_swarm import LocalSwarm
from tests.members import make_swarm

LAYERS = ["0-3", "3-6"]


def final_losses(events: Iterable[RunEvent]) -> list[float]:
    losses = {event.step: event.loss for event in events if isinstance(event, StepCommitted)}
    return [losses[step] for step in sorted(losses)]


@pytest.fixture
def jobs(make_job: MakeJob) -> tuple[Job, Job]:
    """One with buffers, on samples of different lengths; one of another order and rate."""
    fields: dict[str, Any] = {
        "num_samples": 8,
        "num_steps": 8,
        "forward_codec": "aq4",
        "backward_codec": "q8",
    }
    one = make_job(**fields).ragged()
    return one, make_job(**fields, seed=11, learning_rate=1e-3)


class Both:
    """Two clients, each of whom watches its run to its end.

    Attributes:
        seen: which run committed, step after step of either.
        may_go_on: once both have committed steps.
    """

    def __init__(self) -> None:
        self.seen: list[RunId] = []
        self.both_train = asyncio.Event()

    async def watch(self, client: SwarmClient, run_id: RunId) -> list[RunEvent]:
        events: list[RunEvent] = []
        async for event in client.watch(run_id, lambda _trouble: None):
            events.append(event)
            if isinstance(event, StepCommitted):
                self.seen.append(run_id)
                if len(set(self.seen)) == 2:
                    self.both_train.set()
        return events


@pytest.mark.thorough
async def test_two_owners_runs_train_at_the_same_time_on_the_same_peers(
    jobs: tuple[Job, Job], quiet_events: QuietEvents, tmp_path: Path
) -> None:
    quiet = [final_losses(await quiet_events(job, LAYERS)) for job in jobs]
    members, both = make_swarm(), Both()
    async with LocalSwarm(tmp_path, LAYERS, members=members, max_beside=1) as swarm:
        await swarm.all_joined()
        clients = [
            SwarmClient(
                swarm.directory, GrpcTransport(GrpcOptions(credentials=members.member(Role.CLIENT)))
            )
            for _ in jobs
        ]
        runs = [
            await client.submit(job.spec, job.samples)
            for client, job in zip(clients, jobs, strict=True)
        ]
        events = await asyncio.gather(
            *(both.watch(c, run.run_id) for c, run in zip(clients, runs, strict=True))
        )
    assert [final_losses(of_run) for of_run in events] == quiet
    first, second = (run.run_id for run in runs)
    assert both.seen.index(second) < len(both.seen) - both.seen[::-1].index(first)
    for of_run in events:
        final = [event for event in of_run if isinstance(event, RunStatus)][-1]
        assert final.phase is RunPhase.FINISHED
        assert {stage.peer_id for stage in final.assignments} == swarm_names(of_run)


def swarm_names(events: list[RunEvent]) -> set[PeerId]:
    """All that ever had a part in a run."""
    statuses = (event for event in events if isinstance(event, RunStatus))
    return {stage.peer_id for status in statuses for stage in status.assignments}


async def test_a_peer_that_dies_is_replaced_in_both_runs(
    jobs: tuple[Job, Job],
    quiet_events: QuietEvents,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("swarm_ft.coordinator.plan.membership.GRACE_S", 0.0)
    quiet = [final_losses(await quiet_events(job, LAYERS)) for job in jobs]
    both = Both()
    async with LocalSwarm(tmp_path, LAYERS, max_beside=1) as swarm:
        await swarm.all_joined()
        runs = [await swarm.client.submit(job.spec, job.samples) for job in jobs]
        watching = [asyncio.create_task(both.watch(swarm.client, run.run_id)) for run in runs]
        await both.both_train.wait()
        await swarm.kill_peer(PeerId("peer-1"))
        await swarm.add_peer(PeerId("newcomer"), "3-6")
        events = await asyncio.gather(*watching)
    assert [final_losses(of_run) for of_run in events] == quiet
    for of_run in events:
        assert any(isinstance(event, Rollback) for event in of_run)
        final = [event for event in of_run if isinstance(event, RunStatus)][-1]
        assert [stage.peer_id for stage in final.assignments] == ["peer-0", "newcomer"]
