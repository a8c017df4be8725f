"""A peer holds as many microbatches as its memory allows, and trains the same weights."""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm_ft.ids import MicrobatchIndex
from swarm_ft.protocol.messages.client import StepCommitted
from swarm_ft.stage.engine import StageEngine
from tests.integration.conftest import Job, MakeJob
from tests.local_swarm import LocalSwarm

LAYERS = ["0-2", "2-4", "4-6"]
MICROBATCHES = 12
MOST_IN_1F1B = [5, 3, 1]


@pytest.fixture
def watch_held(monkeypatch: pytest.MonkeyPatch) -> Callable[[], defaultdict[tuple[int, int], int]]:
    """`watch_held()`: by stage's first layer and step, the most microbatches held at once."""

    def make() -> defaultdict[tuple[int, int], int]:
        microbatches: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
        most: defaultdict[tuple[int, int], int] = defaultdict(int)

        def watched(name: str, original: Any, hold: bool) -> None:
            def call(self: StageEngine, microbatch: MicrobatchIndex, *args: Any) -> object:
                key = self.layers.start, self.open_step.number
                result = original(self, microbatch, *args)
                (microbatches[key].add if hold else microbatches[key].discard)(microbatch)
                most[key] = max(most[key], len(microbatches[key]))
                return result

            monkeypatch.setattr(StageEngine, name, call)

        for name in ("forward", "forward_backward", "weight_gradients"):
            watched(name, getattr(StageEngine, name), hold=name != "weight_gradients")
        return most

    return make


@pytest.fixture
def run_out(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[int]]:
    """`run_out(n)`: the first stage's GPU has no memory for more than n microbatches.

    Returns a list that grows by a number each time that a stage needs more.
    """

    def make(most: int) -> list[int]:
        sizes: list[int] = []
        original = StageEngine.forward

        def forward(self: StageEngine, microbatch: MicrobatchIndex, *args: Any) -> Any:
            num_graphs = len(self.open_step.graphs)
            if self.layers.start == 0 and num_graphs >= most:
                sizes.append(num_graphs)
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return original(self, microbatch, *args)

        monkeypatch.setattr(StageEngine, "forward", forward)
        return sizes

    return make


async def train(directory: Path, job: Job, *, memory_bytes: int) -> list[float]:
    await asyncio.to_thread(directory.mkdir)
    async with LocalSwarm(directory, LAYERS, memory_bytes=memory_bytes) as swarm:
        events = await swarm.train(job.spec, job.samples)
    return [event.loss for event in events if isinstance(event, StepCommitted)]


async def test_memory_decides_how_many_are_in_flight_and_changes_no_bit(
    make_job: MakeJob, tmp_path: Path, watch_held: Callable[[], defaultdict[tuple[int, int], int]]
) -> None:
    job = make_job(
        num_samples=MICROBATCHES, batch_size=MICROBATCHES, micro_batch_size=1, num_steps=3
    )
    most = watch_held()
    roomy = await train(tmp_path / "roomy", job, memory_bytes=1 << 30)
    firsts = [int(layers.split("-")[0]) for layers in LAYERS]
    assert all(most[first, 0] <= n for first, n in zip(firsts, MOST_IN_1F1B, strict=True))
    # Nobody waits for the first stage's backwards: it computes all forwards first.
    assert [most[firsts[0], step] for step in (1, 2)] == [MICROBATCHES] * 2
    most.clear()
    tight = await train(tmp_path / "tight", job, memory_bytes=1)
    for first, number in zip(firsts, MOST_IN_1F1B, strict=True):
        assert all(most[first, step] <= number for step in range(3))
    assert most[firsts[0], 1] == MOST_IN_1F1B[0]
    assert tight == roomy


@pytest.mark.thorough
async def test_a_peer_that_runs_out_of_memory_holds_fewer_and_goes_on(
    make_job: MakeJob, tmp_path: Path, run_out: Callable[[int], list[int]]
) -> None:
    job = make_job(
        num_samples=MICROBATCHES, batch_size=MICROBATCHES, micro_batch_size=1, num_steps=3
    )
    roomy = await train(tmp_path / "roomy", job, memory_bytes=1 << 30)
    sizes = run_out(MOST_IN_1F1B[0])
    assert await train(tmp_path / "small", job, memory_bytes=1 << 30) == roomy
    assert len(sizes) == 1
