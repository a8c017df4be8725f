"""Layers move away from a peer that is slow, while a real model trains over real gRPC."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pytest

from swarm_ft.ids import PeerId
from swarm_ft.protocol.messages.client import RunEvent, RunPhase, RunStatus, StepCommitted
from swarm_ft.protocol.messages.events import EventKind, EventsRequest, SwarmEvent
from swarm_ft.protocol.spec.layers import LayerRange
from tests.integration.conftest import MakeJob, QuietEvents
from tests.local_swarm import LocalSwarm
from tests.paced_engine import paced

FAST_S, SLOW_S = 0.008, 0.04
"""That each block takes of a forward, a backward, or the gradients of weights."""


def losses_by_step(events: Iterable[RunEvent]) -> dict[int, float]:
    return {event.step: event.loss for event in events if isinstance(event, StepCommitted)}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_ft.coordinator.plan.moving.LOOK_S", 0.0)
    monkeypatch.setattr("swarm_ft.coordinator.plan.moving.RESTART_S", 0.5)


@pytest.mark.parametrize("num_keepers", [0, 2], ids=["one place", "keepers"])
@pytest.mark.thorough
async def test_what_moved_has_the_same_losses_and_no_step_is_made_again(
    make_job: MakeJob, quiet_events: QuietEvents, tmp_path: Path, num_keepers: int
) -> None:
    job = make_job(num_samples=8, num_steps=30)
    quiet = losses_by_step(await quiet_events(job, ["0-2", "2-4", "4-6"]))
    room = [int(job.spec.memory_bytes(LayerRange(0, blocks))) for blocks in (3, 2, 3)]
    happened: list[SwarmEvent] = []
    async with LocalSwarm(tmp_path, [], num_keepers=num_keepers) as swarm:
        for name, pace_s, memory_bytes in zip(
            ("left", "slow", "right"), (FAST_S, SLOW_S, FAST_S), room, strict=True
        ):
            await swarm.add_peer(
                PeerId(name),
                "auto",
                make_engine=paced(partial(float, pace_s)),
                memory_bytes=memory_bytes,
            )
        events = await swarm.train(job.spec, job.samples)
        happened += [event async for event in swarm.service.events(EventsRequest())]
    final = events[-1]
    assert isinstance(final, RunStatus)
    assert final.phase is RunPhase.FINISHED
    (moved,) = (event for event in happened if event.kind is EventKind.RUN_MOVED)
    assert "moved from slow to " in moved.words
    assert "a step is expected to take " in moved.words
    assert sorted(str(one.layers) for one in final.assignments) == ["0-3", "3-6"]
    assert {one.peer_id for one in final.assignments} == {"left", "right"}
    assert losses_by_step(events) == quiet
    steps = [int(event.step) for event in events if isinstance(event, StepCommitted)]
    assert steps == list(range(30))
