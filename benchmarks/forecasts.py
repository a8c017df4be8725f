"""A check of forecasts: jobs are drawn, forecast, and trained over a lab's links.

    sudo python -m benchmarks.forecasts --seed 1 --scenarios 20 --json FILE
    sudo python -m benchmarks.forecasts --seed 1 --scenarios 4 --first 8 --json FILE
    python -m benchmarks.forecasts --table FILE

A seed draws swarms (peers, links) and four jobs for each, one after another: sizes, codecs, a
program beside that keeps a core busy, another run on the same peers. The first job of a swarm finds
a swarm that has measured no run. All is real: processes, links, the model's arithmetic, `plan`'s
forecast before the job is submitted, and the samples a second that its client reports. All hosts
are this machine, so peers share its cores. Steps are as many as take about `--run-s` by the
forecast. The file grows by a row a scenario, so a measurement may be made in parts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.lab import Host, Lab, LabSwarm, Link
from benchmarks.slow_network.way import add_way, way_of
from swarm_ft.api.connections import connect
from swarm_ft.api.training import read_job, submit_job, watch_to_end
from swarm_ft.cli.running import run_async
from swarm_ft.client.data.progress import Listener
from swarm_ft.client.demo_input import write_demo_input
from swarm_ft.client.forecast import placed_forecast, with_mean_length
from swarm_ft.client.options import JobOptions
from swarm_ft.client.swarm import SwarmClient
from swarm_ft.client.train import WatchedRun
from swarm_ft.protocol.messages.client import RunPhase, StepCommitted
from swarm_ft.protocol.spec.options import build, by_names

JOBS_A_SWARM = 4
MODULE = "benchmarks.forecasts"
NARROW = 2.0
"""A range is narrow that is at most so many times as wide."""
LEAST_STEPS, MOST_STEPS = 6, 400
BESIDE_STEPS = 8
"""Of the other run, before the job is forecast."""
SETTLE_S = 10.0
"""From one job to the next, with the next one's program beside: peers average over seconds."""


@dataclass(frozen=True, kw_only=True)
class SwarmDrawn:
    """A swarm: its peers, and the link of each."""

    number: int
    peers: int
    up_mbps: float | None
    delay_ms: float


@dataclass(frozen=True, kw_only=True)
class JobDrawn:
    """A job, and what is done beside it."""

    number: int
    hidden_size: int
    layers: int
    seq_length: int
    batch_size: int
    micro_batch_size: int
    fw: str
    adapter: str
    busy_cores: int
    beside: bool


def drawn(seed: int) -> Iterator[tuple[SwarmDrawn, list[JobDrawn]]]:
    """Yield swarms and their jobs, without end."""
    rng, number = random.Random(seed), 0
    while True:
        up_mbps, delay_ms = rng.choice([(None, 0.0), (100.0, 5.0), (20.0, 20.0), (5.0, 20.0)])
        swarm = SwarmDrawn(
            number=number // JOBS_A_SWARM,
            peers=rng.choice([1, 2, 2, 3, 4]),
            up_mbps=up_mbps,
            delay_ms=delay_ms,
        )
        jobs = [_job(rng, number + place) for place in range(JOBS_A_SWARM)]
        number += JOBS_A_SWARM
        yield swarm, jobs


def _job(rng: random.Random, number: int) -> JobDrawn:
    micro_batch_size = rng.choice([1, 2, 4])
    return JobDrawn(
        number=number,
        hidden_size=rng.choice([64, 128, 256, 384]),
        layers=rng.choice([4, 6, 8, 12]),
        seq_length=rng.choice([32, 64, 128]),
        batch_size=micro_batch_size * rng.choice([2, 4, 8]),
        micro_batch_size=micro_batch_size,
        fw=rng.choice(["none", "fp16", "aq4", "aq3+z"]),
        adapter=rng.choice(["none", "none", "lora"]),
        busy_cores=rng.choice([0, 0, 1]),
        beside=rng.random() < 0.35,
    )


def main() -> None:
    """Measure, or print the table of what was measured; or be a client of a swarm."""
    options = _parser().parse_args()
    if options.work:
        run_async(lambda: _serve_jobs(options))
        return
    if options.table:
        rows = [json.loads(line) for line in options.table.read_text("utf-8").splitlines()]
        sys.stdout.write(table(rows))
        return
    last = options.first + options.scenarios
    swarms = drawn(options.seed)
    for swarm, jobs in swarms:
        if jobs[0].number >= last:
            return
        wanted = [job for job in jobs if options.first <= job.number < last]
        if wanted:
            for row in measured(swarm, wanted, options.run_s):
                with options.json.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                sys.stdout.write(f"{_line(row)}\n")
                sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="scenario to begin with")
    parser.add_argument("--scenarios", type=int, default=20, help="how many")
    parser.add_argument("--run-s", type=float, default=25.0, help="of a job, by its forecast")
    parser.add_argument("--json", type=Path, default=Path("forecasts.jsonl"), metavar="FILE")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print what is in it")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    add_way(parser)
    return parser


# ---- the swarm, and what is done beside


def measured(swarm: SwarmDrawn, jobs: Sequence[JobDrawn], run_s: float) -> Iterator[dict[str, Any]]:
    """Train the jobs in a swarm of their own; a row of each."""
    with tempfile.TemporaryDirectory(prefix="forecasts-") as name, Lab() as lab:
        folder = Path(name)
        link = Link(swarm.up_mbps, swarm.up_mbps, delay_ms=swarm.delay_ms)
        hub = lab.host(Link(delay_ms=swarm.delay_ms))
        for job in jobs:
            _write_model(folder, job)
        with LabSwarm(folder / "swarm", hub) as members:
            for number in range(swarm.peers):
                members.peer(f"peer-{number}", lab.host(link), "auto")
            arguments = ("--work", str(folder), "--run-s", str(run_s), *members.client_way)
            command = hub.command(sys.executable, "-m", MODULE, *arguments)
            with _piped(command, folder / "client.log") as client:
                for job in jobs:
                    yield _measured_job(client, swarm, job, hub)


def _measured_job(
    client: subprocess.Popen[str], swarm: SwarmDrawn, job: JobDrawn, hub: Host
) -> dict[str, Any]:
    if client.stdin is None or client.stdout is None:
        raise RuntimeError("a client without pipes can tell nothing")
    with _busy(hub, job.busy_cores):
        time.sleep(SETTLE_S)
        began_s, load = time.monotonic(), os.getloadavg()[0]
        client.stdin.write(json.dumps(asdict(job)) + "\n")
        client.stdin.flush()
        line = client.stdout.readline()
    if not line:
        raise RuntimeError(f"scenario {job.number}: the client ended; {client.wait()}")
    return {
        "swarm": asdict(swarm),
        "job": asdict(job),
        "load_before": load,
        "load_after": os.getloadavg()[0],
        "took_s": time.monotonic() - began_s,
        **json.loads(line),
    }


@contextmanager
def _piped(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[str]]:
    with log.open("ab") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True
        )
    try:
        yield process
    except BaseException:
        sys.stderr.write(log.read_text(encoding="utf-8", errors="replace")[-4000:])
        raise
    finally:
        process.kill()
        process.communicate()


@contextmanager
def _busy(host: Host, cores: int) -> Iterator[None]:
    """Keep so many cores busy."""
    command = host.command(sys.executable, "-c", "while True: pass")
    processes = [subprocess.Popen(command) for _ in range(cores)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _write_model(folder: Path, job: JobDrawn) -> None:
    write_demo_input(
        folder / f"sample-{job.number}",
        seed=job.number,
        num_layers=job.layers,
        hidden_size=job.hidden_size,
    )


# ---- the client, on a host of the swarm


async def _serve_jobs(options: argparse.Namespace) -> None:
    """Train a job for each line that comes, and answer with what was forecast and reached."""
    async with connect(way_of(options)) as swarm:
        while line := await asyncio.to_thread(sys.stdin.readline):
            job = JobDrawn(**json.loads(line))
            found = await _trained(swarm, job, options.work, options.run_s)
            sys.stdout.write(json.dumps(found) + "\n")
            sys.stdout.flush()


async def _trained(swarm: SwarmClient, job: JobDrawn, folder: Path, run_s: float) -> dict[str, Any]:
    other = await _begun_beside(swarm, job, folder) if job.beside else None
    job_read = await read_job(_options(job, folder, LEAST_STEPS), _quiet())
    spec = await asyncio.to_thread(with_mean_length, job_read.spec, job_read.samples)
    placed = placed_forecast(spec, await swarm.place(spec))
    step_s = max(1e-3, placed.seconds / LEAST_STEPS)
    steps = min(MOST_STEPS, max(LEAST_STEPS, round(run_s / step_s)))
    options = _options(job, folder, steps)
    run = await submit_job(
        swarm, await read_job(options, _quiet()), options, console=Console(quiet=True)
    )
    report = await watch_to_end(run, options.outputs)
    others = 0
    if other is not None:
        status = await swarm.run(other.run_id)
        others = status.phase < RunPhase.FINISHED
        await swarm.cancel(other.run_id)
    found = run.forecast
    if found is None:
        raise RuntimeError(f"scenario {job.number}: nobody could forecast it")
    return {
        "steps": steps,
        "stages": len(found.stages),
        "low": found.samples_range[0],
        "likely": found.samples_per_s,
        "high": found.samples_range[1],
        "reached": report.samples_per_second,
        "learned": found.num_learned,
        "bound_by": found.bound_by,
        "beside_to_the_end": bool(others),
        "up_bytes": [stage.up_bytes for stage in found.stages],
    }


async def _begun_beside(swarm: SwarmClient, job: JobDrawn, folder: Path) -> WatchedRun:
    """Submit a run that outlasts the job, and wait until it has made some steps."""
    options = _options(replace(job, batch_size=8 * job.micro_batch_size), folder, 4000)
    job_read = await read_job(options, _quiet())
    run = await submit_job(swarm, job_read, options, console=Console(quiet=True), forecasts=False)
    async for event in swarm.watch(run.run_id, lambda _words: None):
        if isinstance(event, StepCommitted) and event.step >= BESIDE_STEPS:
            break
    return run


def _options(job: JobDrawn, folder: Path, steps: int) -> JobOptions:
    place = folder / f"sample-{job.number}"
    named = by_names(
        JobOptions,
        {
            "model": str(place / "model"),
            "dataset": [str(place / "train.txt")],
            "max_samples": 64,
            "seq_length": job.seq_length,
            "batch_size": job.batch_size,
            "micro_batch_size": job.micro_batch_size,
            "steps": steps,
            "fw": job.fw,
            "bw": "q8",
            "key": "fp16",
            "adapter": job.adapter,
            "save_strategy": "no",
            "eval_strategy": "no",
            "out": str(place / f"out-{time.monotonic_ns()}"),
        },
    )
    return build(JobOptions, named)


_quiet = partial(Listener, on_line=lambda _words: None)


# ---- what came of it


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of all rows, and how many of them are as they should be."""
    lines = [HEAD, *(_line(row) for row in sorted(rows, key=lambda one: one["job"]["number"]))]
    num_right = sum(_holds(row) for row in rows)
    narrow = sum(row["high"] / row["low"] <= NARROW for row in rows)
    lines += ["", f"in range: {num_right} of {len(rows)}; at most {NARROW:g} times wide: {narrow}"]
    return "\n".join(lines) + "\n"


HEAD = (
    "| # | peers, stages | uplinks | model, batch | codec | beside | load | learned from "
    "| forecast, samples/s | reached | in range | width |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|"
)


def _holds(row: dict[str, Any]) -> bool:
    return bool(row["low"] <= row["reached"] <= row["high"])


def _line(row: dict[str, Any]) -> str:
    swarm, job = row["swarm"], row["job"]
    link = f"{swarm['up_mbps']:g} Mbps, {swarm['delay_ms']:g} ms" if swarm["up_mbps"] else "-"
    shared = [
        *(["a run"] if job["beside"] else []),
        *(["a busy core"] if job["busy_cores"] else []),
    ]
    adapter = ", LoRA" if job["adapter"] == "lora" else ""
    cells = (
        str(job["number"] + 1),
        f"{swarm['peers']}, {row['stages']}",
        link,
        f"{job['layers']} x {job['hidden_size']}, {job['seq_length']} tokens, "
        f"{job['batch_size']} by {job['micro_batch_size']}{adapter}",
        job["fw"],
        ", ".join(shared) or "-",
        f"{row['load_before']:.1f} to {row['load_after']:.1f}",
        str(row["learned"]),
        f"{row['low']:.3g} to {row['high']:.3g}",
        f"{row['reached']:.3g}",
        "yes" if _holds(row) else "NO",
        f"{row['high'] / row['low']:.2f}",
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
