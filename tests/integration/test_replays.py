"""A step that lost a peer goes on where it stood: what was computed is not computed again."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pytest

from swarm_ft.ids import MicrobatchIndex, PeerId
from swarm_ft.protocol.messages.client import RunEvent, StepCommitted
from swarm_ft.stage.engine import StageEngine
from tests.integration.conftest import Job, MakeJob, QuietEvents
from tests.local_swarm import LocalSwarm

LAYERS = ["0-2", "2-4", "4-6"]
STEP = 2
MICROBATCHES = 4
PATIENCE_S = 60.0


Pass = tuple[int, StageEngine, int, MicrobatchIndex]
"""A stage's first layer, its engine, a step, and a microbatch."""


class QuietLosses(Protocol):
    """See `quiet_losses`."""

    async def __call__(self, job: Job, layers: list[str]) -> list[float]: ...


@dataclass
class Watched:
    """Backward passes by engine and step; stops one of them until a test releases it.

    Attributes:
        passes: how often each (stage's first layer, engine, step, microbatch) was computed.
        weights: how often the weights' gradients of each were.
        reached: the pass is about to begin.
        go_on: lets it begin.
    """

    stop_at: tuple[int, int]
    passes: Counter[Pass] = field(default_factory=Counter)
    weights: Counter[Pass] = field(default_factory=Counter)
    reached: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)

    def began(self, engine: StageEngine, microbatch: MicrobatchIndex) -> None:
        stage, step = engine.layers.start, engine.open_step.number
        count = sum(
            n for (s, e, t, _), n in self.passes.items() if (s, e, t) == (stage, engine, step)
        )
        is_it = (stage, count) == self.stop_at and step == STEP
        if is_it and not self.reached.is_set():
            self.reached.set()
            assert self.go_on.wait(PATIENCE_S)
        self.passes[stage, engine, step, microbatch] += 1

    def completed(self, engine: StageEngine, microbatch: MicrobatchIndex) -> None:
        self.weights[engine.layers.start, engine, engine.open_step.number, microbatch] += 1

    def of(self, layers: str, counter: Counter[Pass] | None = None) -> dict[Pass, int]:
        """Passes of the step at a stage."""
        stage = int(layers.split("-")[0])
        counter = counter or self.passes
        return {k: n for k, n in counter.items() if k[0] == stage and k[2] == STEP}


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], Watched]:
    """`watch(4, 1)`: the second backward pass of the stage at block 4 stops in the step."""

    def make(stage: int, count: int) -> Watched:
        watched = Watched((stage, count))
        for name in ("backward", "forward_backward"):
            original = getattr(StageEngine, name)

            def backward(
                self: StageEngine,
                microbatch: MicrobatchIndex,
                *args: Any,
                _original: Any = original,
            ) -> object:
                watched.began(self, microbatch)
                return _original(self, microbatch, *args)

            monkeypatch.setattr(StageEngine, name, backward)
        weight_gradients = StageEngine.weight_gradients

        def completed(self: StageEngine, microbatch: MicrobatchIndex) -> None:
            watched.completed(self, microbatch)
            return weight_gradients(self, microbatch)

        monkeypatch.setattr(StageEngine, "weight_gradients", completed)
        return watched

    return make


def losses_of(events: Iterable[RunEvent]) -> list[float]:
    losses = {event.step: event.loss for event in events if isinstance(event, StepCommitted)}
    return [losses[step] for step in sorted(losses)]


@pytest.fixture
def quiet_losses(quiet_events: QuietEvents) -> QuietLosses:
    async def train(job: Job, layers: list[str]) -> list[float]:
        return losses_of(await quiet_events(job, layers))

    return train


async def with_a_death(directory: Path, job: Job, victim: int, watched: Watched) -> list[float]:
    """The losses, where a peer dies while another one is in the middle of the step."""
    await asyncio.to_thread(directory.mkdir)
    async with LocalSwarm(directory, LAYERS * 2) as swarm:
        training = asyncio.create_task(swarm.train(job.spec, job.samples))
        await asyncio.to_thread(watched.reached.wait, PATIENCE_S)
        await swarm.kill_peer(PeerId(f"peer-{victim}"))
        watched.go_on.set()
        return losses_of(await training)


@pytest.mark.parametrize(
    ("victim", "forward", "backward"),
    [
        (0, "aq6t", "q8t+ef21"),
        (1, "aq6t", "q8t+ef21"),
        (2, "aq6t", "q8t+ef21"),
        (1, "aq8t", "q8"),
        (0, "none", "none"),
    ],
)
@pytest.mark.thorough
async def test_survivors_compute_no_microbatch_twice(
    make_job: MakeJob,
    tmp_path: Path,
    quiet_losses: QuietLosses,
    watch: Callable[[int, int], Watched],
    victim: int,
    forward: str,
    backward: str,
) -> None:
    job = make_job(
        num_samples=16,
        batch_size=2 * MICROBATCHES,
        num_steps=5,
        forward_codec=forward,
        backward_codec=backward,
    )
    quiet = await quiet_losses(job, LAYERS * 2)
    # Replicas of stage i are peers i and i + 3. The first passes at the head of the step stop at
    # its last stage, those at its tail (a dead last stage) at the first.
    watched = watch(4 if victim != 2 else 0, 1)
    losses = await with_a_death(tmp_path / "faulty", job, victim, watched)
    rtol = 1e-4 if forward == "none" else 0.02
    assert losses == pytest.approx(quiet, rel=rtol)
    for index, layers in enumerate(LAYERS):
        passes = watched.of(layers)
        assert set(passes.values()) == {1}, layers
        assert watched.of(layers, watched.weights) == passes, "what was begun was completed"
        if index != victim:
            assert len({key[3] for key in passes}) == len(passes) == MICROBATCHES, layers
        else:
            assert len({key[3] for key in passes}) == MICROBATCHES


async def test_a_peer_that_only_lost_its_connections_keeps_what_it_did(
    make_job: MakeJob,
    tmp_path: Path,
    quiet_losses: QuietLosses,
    watch: Callable[[int, int], Watched],
) -> None:
    job = make_job(num_samples=16, batch_size=2 * MICROBATCHES, num_steps=5)
    quiet = await quiet_losses(job, LAYERS)
    watched = watch(0, 2)
    (tmp_path / "faulty").mkdir()
    async with LocalSwarm(tmp_path / "faulty", LAYERS) as swarm:
        training = asyncio.create_task(swarm.train(job.spec, job.samples))
        await asyncio.to_thread(watched.reached.wait, PATIENCE_S)
        await swarm.kill_coordinator()
        await swarm.start_coordinator()
        watched.go_on.set()
        losses = losses_of(await training)
    assert losses == quiet
    for layers in LAYERS:
        assert set(watched.of(layers).values()) == {1}
        assert watched.of(layers, watched.weights) == watched.of(layers)
