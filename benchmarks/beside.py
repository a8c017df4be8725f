"""Two runs on the same machines: one after the other, by two processes of each, and beside.

    python -m benchmarks.beside --json FILE

A swarm in one process, over gRPC on this machine. A stage takes a stated time instead of computing,
and one device of each machine does one task at a time, so what this machine does besides matters
little. Two processes of a machine know nothing of each other: each takes the device when it is
free. Seconds are from the first commit of either run to the last of either; steps a second are
those of both while both train, or of each alone. The ways take turns, and so meet the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from threading import Lock
from typing import NamedTuple

import numpy as np
from torch import Tensor

from benchmarks.slow_network.emulated_engine import EmulatedEngine
from benchmarks.slow_network.work import Work
from swarm_ft.ids import MicrobatchIndex, PeerId, RunId
from swarm_ft.protocol.messages.client import StepCommitted
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import RunSpec
from tests.local_swarm import LocalSwarm
from tests.specs import model_spec, train_spec

WAYS = ("one after the other", "two processes", "beside")
VOCAB_SIZE = 64


def main() -> None:
    """Run the command."""
    options = _parser().parse_args()
    work = Work(
        stages=options.stages,
        tokens=8,
        channels=16,
        batch_size=options.microbatches,
        micro_batch_size=1,
        forward_s=options.task_s,
        input_backward_s=options.task_s,
        weight_backward_s=options.task_s,
        stage_values=64,
        held_bytes=1024,
    )
    found: dict[str, list[Speed]] = {way: [] for way in options.ways}
    for _ in range(options.rounds):
        for way in options.ways:
            with tempfile.TemporaryDirectory(prefix="beside-") as folder:
                found[way].append(asyncio.run(measure(way, work, options.steps, Path(folder))))
    for way, speeds in found.items():
        seconds, steps_per_s = map(median, zip(*speeds, strict=True))
        sys.stdout.write(f"{way:20} {seconds:6.1f} s  {steps_per_s:.3f} steps a second\n")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


class Speed(NamedTuple):
    """The speed of two runs that train beside each other; see the module's docstring."""

    seconds: float
    steps_per_s: float


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=4, help="of a step")
    parser.add_argument(
        "--task-s", type=float, default=0.1, help="of a forward, or half a backward"
    )
    parser.add_argument("--steps", type=int, default=6, help="of each run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser


async def measure(way: str, work: Work, steps: int, folder: Path) -> Speed:
    """Train both."""
    async with LocalSwarm(folder, [], max_beside=int(way == "beside")) as swarm:
        devices = [Lock() for _ in range(work.stages)]
        sizes = (1, work.stages + 1) if way == "two processes" else (1,)
        for size in sizes:
            # What one process offers is of no use to the run that the other is for.
            for index, device in enumerate(devices):
                layers = f"{size * index}-{size * (index + 1)}"
                name = PeerId(f"{size}-peer-{index}")
                await swarm.add_peer(name, layers, make_engine=partial(DeviceEngine, device, work))
        await swarm.all_joined()
        runs = []
        for number in range(2):
            spec = _spec(work, steps, num_blocks=work.stages * sizes[number % len(sizes)])
            runs.append((await swarm.client.submit(spec, _samples(work, steps))).run_id)
        watched = await asyncio.gather(*(_commits(swarm, run_id) for run_id in runs))
    commits = [seconds for of_run in watched for seconds in of_run]
    begin_s, end_s = max(of_run[0] for of_run in watched), min(of_run[-1] for of_run in watched)
    if begin_s < end_s:
        steps_per_s = sum(begin_s < at <= end_s for at in commits) / (end_s - begin_s)
    else:
        alone_s = [of_run[-1] - of_run[0] for of_run in watched]
        steps_per_s = (len(commits) - len(watched)) / sum(alone_s)
    return Speed(max(commits) - min(commits), steps_per_s)


async def _commits(swarm: LocalSwarm, run_id: RunId) -> list[float]:
    """Return the time at which each step of a run was committed, then acknowledge its result."""
    found: list[float] = []
    async for event in swarm.client.watch(run_id, lambda _trouble: None):
        if isinstance(event, StepCommitted):
            found.append(time.monotonic())
    await swarm.client.acknowledge_result(run_id)
    return found


def _spec(work: Work, steps: int, num_blocks: int) -> RunSpec:
    model = model_spec(
        num_blocks=num_blocks, hidden_size=work.channels, vocab_size=VOCAB_SIZE, block_bytes=64
    )
    train = train_spec(
        num_samples=work.batch_size * steps,
        seq_length=work.tokens,
        batch_size=work.batch_size,
        micro_batch_size=work.micro_batch_size,
        num_steps=steps,
    )
    return RunSpec(model=model, train=train)


def _samples(work: Work, steps: int) -> Sequence[bytes]:
    rng = np.random.default_rng(0)
    rows = rng.integers(0, VOCAB_SIZE, (work.batch_size * steps, work.tokens)).astype("<u4")
    return [row.tobytes() for row in rows]


class DeviceEngine(EmulatedEngine):
    """A stage on a machine's device, which does one task at a time, of any process."""

    def __init__(self, device: Lock, work: Work, spec: RunSpec, layers: LayerRange) -> None:
        super().__init__(work, spec, layers)
        self._device = device

    def _after(self, wait_s: float, microbatch: int, num_samples: int) -> Tensor:
        with self._device:
            return super()._after(wait_s, microbatch, num_samples)

    def weight_gradients(self, microbatch: MicrobatchIndex) -> None:
        """See `Engine`."""
        with self._device:
            super().weight_gradients(microbatch)


if __name__ == "__main__":
    main()
