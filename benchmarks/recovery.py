"""Kills a peer of 4 stages x 3 replicas again and again: how soon training goes on, who is dialled.

    python -m benchmarks.recovery --beside ../older-checkout --json FILE

A swarm in one process, over gRPC and a DHT on this machine, trains a model that takes next to no
time. A peer is killed in the middle of a step, and another comes in its place before the next one
dies. Times are from the attempt without it, which the coordinator begins as it sees the stream
break, to that attempt's plan, for which all neighbours have to be connected, and to the next
commit; the duration of a step before the death stands beside it. Calls are those that peers open to
living peers from the death to the plan. Given another checkout, swarms of both take turns, so that
whatever else this machine does meets both.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

NUM_STAGES, NUM_REPLICAS = 4, 3
NUM_SAMPLES, SEQ_LENGTH, VOCAB_SIZE = 64, 16, 64
QUIET_COMMITS = 3
"""Before each death, with everybody there."""
COUNTED = ("Link", "Boundary", "AllReduce")
"""Calls between neighbours and replicas, by their names in any version."""


def main() -> None:
    """Run the command."""
    options = _parser().parse_args()
    if options.here:
        with tempfile.TemporaryDirectory(prefix="recovery-") as folder:
            deaths = asyncio.run(measure(options.here, options.batch_size, Path(folder)))
        sys.stdout.write(json.dumps(deaths) + "\n")
        return
    trees = {"this": Path(__file__).parent.parent}
    if options.beside:
        trees["other"] = options.beside
    trials = _in_turn(trees, options)
    document = {name: summary(found) for name, found in trials.items()} | {"trials": trials}
    _show(document, list(trees))
    if options.json:
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--beside", type=Path, help="another checkout, which takes turns with this")
    parser.add_argument("--trials", type=int, default=20, help="deaths in each")
    parser.add_argument("--trials-per-swarm", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=24, help="samples a step, of 2 at a time")
    parser.add_argument("--json", type=Path, help="write the result there too")
    parser.add_argument("--here", type=int, help=argparse.SUPPRESS)
    return parser


def _in_turn(
    trees: Mapping[str, Path], options: argparse.Namespace
) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in trees}
    for _ in range(-(-options.trials // options.trials_per_swarm)):
        for name, tree in trees.items():
            found[name] += _in_process(tree.resolve(), options)
            sys.stderr.write(f"{name}: {len(found[name])} of {options.trials}\n")
    return {name: rows[: options.trials] for name, rows in found.items()}


def _in_process(tree: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    numbers = ("--here", options.trials_per_swarm, "--batch-size", options.batch_size)
    done = subprocess.run(
        [sys.executable, __file__, *map(str, numbers)],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        check=True,
    )
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def summary(trials: list[dict[str, Any]]) -> dict[str, float]:
    """Return the median of each figure."""
    return {key: statistics.median(trial[key] for trial in trials) for key in trials[0]}


def _show(document: Mapping[str, Any], names: list[str]) -> None:
    for name in names:
        figures = document[name]
        sys.stdout.write(
            f"{name:6} {1000 * figures['to_plan_s']:7.0f} ms to the plan, "
            f"{1000 * figures['to_commit_s']:7.0f} ms to the commit "
            f"(a quiet step takes {1000 * figures['step_s']:.0f}), "
            f"{figures['calls']:.0f} calls to living peers\n"
        )
    if len(names) > 1:
        this, other = (document[name] for name in names)
        for key in ("to_plan_s", "to_commit_s"):
            sys.stdout.write(f"{key}: {this[key] / other[key]:.2f} of the other's\n")


# ---- one swarm. What it imports is where it has always been, or is reached through what is.


class CountingTransport:
    """A transport that records the calls and the endpoints that were opened."""

    def __init__(self, inner: Any) -> None:  # noqa: ANN401 - a Transport of any version
        self.opened: list[tuple[str, str]] = []
        self._inner = inner
        self.serve = inner.serve

    def connect(self, endpoint: str, *name: str) -> Any:  # noqa: ANN401 - a Channel of any version
        """See `Transport`."""
        channel = self._inner.connect(endpoint, *name)
        plain = channel.open

        def opened(method: Any) -> Any:  # noqa: ANN401 - any call
            self.opened.append((endpoint, method.name))
            return plain(method)

        channel.open = opened
        return channel


async def measure(trials: int, batch_size: int, folder: Path) -> list[dict[str, float]]:
    """Measure so many deaths of a peer in one swarm, one after the other."""
    import torch

    from swarm_ft.discovery.dht import DhtDirectory, DhtOptions
    from swarm_ft.transport.grpc_transport import GrpcTransport

    torch.set_num_threads(1)
    _end_without_waiting()
    transport = CountingTransport(GrpcTransport())
    layers = [f"{i}-{i + 1}" for i in range(NUM_STAGES) for _ in range(NUM_REPLICAS)]
    node = await DhtDirectory.open(DhtOptions())
    directory = await DhtDirectory.open(DhtOptions(initial_peers=node.addresses, client_mode=True))
    vars(sys.modules[_local_swarm().__module__])["StaticDirectory"] = lambda *_: directory
    try:
        async with _local_swarm()(folder, layers, transport=transport) as swarm:
            await swarm.all_joined()
            status = await swarm.client.submit(*_job(folder / "model", batch_size))
            course = Course(swarm, status.run_id)
            try:
                return [await _death(course, transport, index, layers) for index in range(trials)]
            finally:
                await swarm.client.cancel(status.run_id)
                await course.close()
    finally:
        await node.close()


def _local_swarm() -> Any:  # noqa: ANN401 - of any version
    is_new = (Path.cwd() / "tests" / "local_swarm.py").exists()
    place = "tests.local_swarm" if is_new else "swarm_ft.testing.local_swarm"
    return importlib.import_module(place).LocalSwarm


def _end_without_waiting() -> None:
    """One that is killed must not hold up the others, whose event loop it has in this process."""
    plain = ThreadPoolExecutor.shutdown

    def shutdown(pool: ThreadPoolExecutor, wait: bool = True, **options: bool) -> None:
        plain(pool, wait=False, **options)

    ThreadPoolExecutor.shutdown = shutdown  # type: ignore[method-assign, assignment]


async def _death(
    course: Course, transport: CountingTransport, index: int, layers: list[str]
) -> dict[str, float]:
    swarm = course.swarm
    step_s = await course.quiet(len(layers))
    place = index * (NUM_REPLICAS + 1) % len(layers)
    name = course.peer_with(layers[place])
    dead, attempt = swarm.peers[name].server.endpoint, course.status.attempt
    transport.opened.clear()
    began_s = time.perf_counter()
    killing = asyncio.create_task(swarm.kill_peer(name))
    noticed_s = await course.until(lambda: course.status.attempt > attempt)
    planned_s = await course.until(lambda: course.status.phase.name == "TRAINING")
    calls = [at for at, method in transport.opened if method in COUNTED and at != dead]
    steps = course.steps
    committed_s = await course.until(lambda: course.steps > steps)
    await killing
    await swarm.add_peer(type(name)(f"newcomer-{index}"), layers[place])
    return {
        "noticed_s": noticed_s - began_s,
        "to_plan_s": planned_s - noticed_s,
        "to_commit_s": committed_s - noticed_s,
        "step_s": step_s,
        "calls": len(calls),
    }


class Course:
    """The progress of a run as its client sees it."""

    def __init__(self, swarm: Any, run_id: Any) -> None:  # noqa: ANN401 - of any version
        self.swarm = swarm
        self.status: Any = None
        self.steps = 0
        self._changed = asyncio.Condition()
        self._now_s = 0.0
        self._watching = asyncio.create_task(self._watch(run_id))

    async def _watch(self, run_id: Any) -> None:  # noqa: ANN401 - of any version
        async for event in self.swarm.client.watch(run_id, lambda _trouble: None):
            async with self._changed:
                self._now_s = time.perf_counter()
                if hasattr(event, "phase"):
                    self.status = event
                elif hasattr(event, "loss"):
                    self.steps += 1
                self._changed.notify_all()

    async def until(self, is_so: Any) -> float:  # noqa: ANN401 - a condition
        """Return the time at which the condition became true."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._watching.done() or is_so())
            if self._watching.done():
                self._watching.result()
            return self._now_s

    def peer_with(self, layers: str) -> Any:  # noqa: ANN401 - a name
        """Return the id of the peer that hosts these layers."""
        return next(a.peer_id for a in self._assignments if str(a.layers) == layers)

    @property
    def _assignments(self) -> Any:  # noqa: ANN401 - who hosts what
        status = self.status
        return status.assignments if hasattr(status, "assignments") else status.stages

    async def quiet(self, num_peers: int) -> float:
        """Wait until all peers have trained for some steps; return the seconds of a step."""
        await self.until(
            lambda: (
                self.status is not None
                and self.status.phase.name == "TRAINING"
                and len(self._assignments) == num_peers
                and not self.status.joining
            )
        )
        steps = self.steps
        began_s = await self.until(lambda: self.steps > steps)
        ended_s = await self.until(lambda: self.steps > steps + QUIET_COMMITS)
        return (ended_s - began_s) / QUIET_COMMITS

    async def close(self) -> None:
        """See no more."""
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)


def _job(model_dir: Path, batch_size: int) -> tuple[Any, list[bytes]]:
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM, GPT2Config

    from swarm_ft.stage.checkpoint import open_checkpoint
    from tests.specs import run_spec, train_spec

    torch.manual_seed(3)
    config = GPT2Config(
        vocab_size=VOCAB_SIZE, n_positions=SEQ_LENGTH, n_embd=32, n_layer=NUM_STAGES, n_head=2
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(model_dir)
    train = train_spec(
        num_samples=NUM_SAMPLES,
        seq_length=SEQ_LENGTH,
        batch_size=batch_size,
        micro_batch_size=2,
        num_steps=100_000,
        learning_rate=1e-3,
    )
    rng = np.random.default_rng(1)
    samples = rng.integers(0, VOCAB_SIZE, (NUM_SAMPLES, SEQ_LENGTH)).astype("<u4")
    model = open_checkpoint(str(model_dir)).describe()
    spec = replace(run_spec(), model=model, train=train)
    return spec, [row.tobytes() for row in samples]


if __name__ == "__main__":
    main()
