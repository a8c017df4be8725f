"""A run that diverges fails by itself, with its reason, and costs nobody else anything."""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from swarm_ft.client.swarm import SwarmClient
from swarm_ft.identity.roles import Role
from swarm_ft.protocol.messages.client import RunEvent, RunPhase, RunStatus, StepCommitted
from swarm_ft.protocol.spec.run_spec import LrSchedule
from swarm_ft.transport.grpc_options import GrpcOptions
from swarm_ft.transport.grpc_transport import GrpcTransport
from tests.integration.conftest import Job, MakeJob, QuietEvents
from tests.local_swarm import LocalSwarm
from tests.members import make_swarm

LAYERS = ["0-3", "3-6"]
ENDS_WITHIN_S = 60.0


def losses(events: Iterable[RunEvent]) -> list[float]:
    found = {event.step: event.loss for event in events if isinstance(event, StepCommitted)}
    return [found[step] for step in sorted(found)]


def last_status(events: Iterable[RunEvent]) -> RunStatus:
    return [event for event in events if isinstance(event, RunStatus)][-1]


@pytest.fixture
def good(make_job: MakeJob) -> Job:
    return make_job(num_samples=8, num_steps=24)


@pytest.fixture
def bad(make_job: MakeJob) -> Job:
    """Its weights are larger than a product of two can be, once the first step is applied."""
    fields: dict[str, Any] = {
        "learning_rate": 1e25,
        "clip_grad_norm": 0.0,
        "lr_schedule": LrSchedule.CONSTANT,
    }
    return make_job(num_samples=8, num_steps=24, **fields)


@pytest.mark.thorough
async def test_a_run_that_diverges_ends_and_leaves_its_peers_to_another_owners_run(
    good: Job, bad: Job, quiet_events: QuietEvents, tmp_path: Path
) -> None:
    quiet = losses(await quiet_events(good, LAYERS))
    members = make_swarm()
    async with LocalSwarm(tmp_path, LAYERS, members=members, max_beside=1) as swarm:
        await swarm.all_joined()
        owners = [
            SwarmClient(
                swarm.directory, GrpcTransport(GrpcOptions(credentials=members.member(Role.CLIENT)))
            )
            for _ in range(2)
        ]
        runs = [
            await owner.submit(job.spec, job.samples)
            for owner, job in zip(owners, (bad, good), strict=True)
        ]
        began_s = asyncio.get_running_loop().time()
        watching = [
            asyncio.create_task(events_of(owner, run))
            for owner, run in zip(owners, runs, strict=True)
        ]
        failed = last_status(await watching[0])
        took_s = asyncio.get_running_loop().time() - began_s
        events = await watching[1]
        listed = (await swarm.client.status()).members
    assert failed.phase is RunPhase.FAILED
    assert took_s < ENDS_WITHIN_S
    assert f"step {failed.committed_steps}" in failed.detail
    assert "layers 0-3" in failed.detail or "layers 3-6" in failed.detail
    assert "first in transformer." in failed.detail
    assert "Lower --lr" in failed.detail
    assert last_status(events).phase is RunPhase.FINISHED
    assert losses(events) == quiet
    assert not any("suspended" in member.idle for member in listed)


async def events_of(client: SwarmClient, run: RunStatus) -> list[RunEvent]:
    return [event async for event in client.watch(run.run_id, lambda _trouble: None)]
