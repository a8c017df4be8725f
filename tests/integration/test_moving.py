"""Layers move away from a peer that is slow, while a real model trains over real gRPC."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from swarm_ft.ids import MicrobatchIndex, PeerId
from swarm_ft.peer.state.stage_state import EngineMaker
from swarm_ft.protocol.messages.client import RunEvent, RunPhase, RunStatus, StepCommitted
from swarm_ft.protocol.messages.events import EventKind, EventsRequest, SwarmEvent
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import RunSpec
from swarm_ft.stage.base import Lengths, LossAndGradient
from swarm_ft.stage.checkpoint import open_checkpoint
from swarm_ft.stage.engine import StageEngine
from tests.integration.conftest import MakeJob, QuietEvents
from tests.local_swarm import LocalSwarm

FAST_S, SLOW_S = 0.008, 0.04
"""That each block takes of a forward, a backward, or the gradients of weights."""


class PacedEngine(StageEngine):
    """It takes its time, whatever else this machine does."""

    block_s = FAST_S

    def forward(self, microbatch: MicrobatchIndex, x: Tensor, lengths: Lengths = None) -> Tensor:
        self._pause()
        return super().forward(microbatch, x, lengths)

    def forward_backward(
        self, microbatch: MicrobatchIndex, x: Tensor, labels: Tensor, lengths: Lengths = None
    ) -> LossAndGradient:
        self._pause(2)
        return super().forward_backward(microbatch, x, labels, lengths)

    def backward(self, microbatch: MicrobatchIndex, gradient: Tensor) -> Tensor | None:
        self._pause()
        return super().backward(microbatch, gradient)

    def weight_gradients(self, microbatch: MicrobatchIndex) -> None:
        self._pause()
        super().weight_gradients(microbatch)

    def _pause(self, parts: int = 1) -> None:
        time.sleep(parts * self.block_s * len(self.layers))


def paced(block_s: float) -> EngineMaker:
    def make(spec: RunSpec, layers: LayerRange) -> PacedEngine:
        checkpoint = open_checkpoint(spec.model.reference, spec.train)
        cpu = torch.device("cpu")
        engine = PacedEngine(checkpoint, spec, layers, device=cpu, dtype=torch.float32)
        engine.block_s = block_s
        return engine

    return make


def losses_by_step(events: Iterable[RunEvent]) -> dict[int, float]:
    return {event.step: event.loss for event in events if isinstance(event, StepCommitted)}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_ft.coordinator.plan.moving.LOOK_S", 0.0)
    monkeypatch.setattr("swarm_ft.coordinator.plan.moving.RESTART_S", 0.5)


@pytest.mark.parametrize("num_keepers", [0, 2], ids=["one place", "keepers"])
async def test_what_moved_has_the_same_losses_and_no_step_is_made_again(
    make_job: MakeJob, quiet_events: QuietEvents, tmp_path: Path, num_keepers: int
) -> None:
    job = make_job(num_samples=8, num_steps=30)
    quiet = losses_by_step(await quiet_events(job, ["0-2", "2-4", "4-6"]))
    room = [int(job.spec.held_bytes(LayerRange(0, blocks))) for blocks in (4, 2, 4)]
    happened: list[SwarmEvent] = []
    async with LocalSwarm(tmp_path, [], num_keepers=num_keepers) as swarm:
        for name, pace_s, memory_bytes in zip(
            ("left", "slow", "right"), (FAST_S, SLOW_S, FAST_S), room, strict=True
        ):
            await swarm.add_peer(
                PeerId(name), "auto", make_engine=paced(pace_s), memory_bytes=memory_bytes
            )
        events = await swarm.train(job.spec, job.samples)
        happened += [event async for event in swarm.service.happened(EventsRequest())]
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
