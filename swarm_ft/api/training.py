"""A job from its options to its result, in a swarm that others run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from swarm_ft.api.joining import WayIn, connected
from swarm_ft.client.data.progress import Listener
from swarm_ft.client.job import check_outputs, prepare_job
from swarm_ft.client.options import JobOptions, Outputs
from swarm_ft.client.report import RunProgress, RunReport
from swarm_ft.client.swarm import SwarmClient
from swarm_ft.client.train import WatchedRun, reading, submit
from swarm_ft.errors import BadOption
from swarm_ft.protocol.messages.client import RunEvent
from swarm_ft.protocol.spec.options import build, by_names

if TYPE_CHECKING:
    from swarm_ft.client.job import Job

OnEvent = Callable[[RunEvent], object]


def job_options(given: dict[str, Any]) -> JobOptions:
    """Build a job's options from values by name; words stand for values that have words.

    Raises:
        BadInput: one is unknown, missing or out of its bounds.
    """
    values = by_names(JobOptions, given)
    for needed in ("model", "dataset"):
        if values.get(needed) is None:
            raise BadOption(f"{needed}: it is required, and was not given")
    return build(JobOptions, values)


async def read(options: JobOptions, listener: Listener) -> Job:
    """Read and check the job that the options ask for; no connection is opened.

    Raises:
        BadInput: the first thing that is wrong with the options, the model or the data.
    """
    return await reading(partial(prepare_job, options), listener)


async def begun(
    swarm: SwarmClient,
    job: Job,
    options: JobOptions,
    *,
    console: Console | None = None,
    told: Iterable[str] = (),
    forecasts: bool = True,
) -> WatchedRun:
    """Submit a job that was read.

    Args:
        swarm: that is to train it.
        job: what.
        options: what else was said.
        console: where progress is shown; standard error, if None.
        told: lines to show first.
        forecasts: whether to say what it will take.

    Raises:
        SwarmError: the coordinator does not take it.
    """
    progress = RunProgress(job.spec.train, console)
    for line in told:
        progress.message(line)
    return await submit(swarm, job, options, progress, forecasts=forecasts)


async def finished(run: WatchedRun, outputs: Outputs, on_event: OnEvent | None = None) -> RunReport:
    """Watch a run to its end, fetch its result, and report on it.

    Args:
        run: that was submitted or found.
        outputs: where its result and its report go.
        on_event: called with every event of the run: a step, an evaluation, a status.

    Raises:
        SwarmError: why there is no result.
    """
    with run.progress.telling(on_event) if on_event else nullcontext():
        await run.fetch(outputs)
    report = run.report(outputs)
    if outputs.json_file is not None:
        report.write(outputs.json_file)
    return report


async def run_job(
    swarm: SwarmClient,
    options: JobOptions,
    *,
    shows: bool = True,
    on_event: OnEvent | None = None,
    is_local: bool = False,
) -> RunReport:
    """Read a job, submit it, watch it to its end, and fetch its result.

    Args:
        swarm: a connection to the swarm.
        options: the job's.
        shows: whether progress is shown on standard error.
        on_event: called with every event of the run: a step, an evaluation, a status.
        is_local: whether this process is the swarm: its peers share a machine, which a forecast
            does not know, and no run goes on without it.

    Raises:
        SwarmError: why there is no result.
    """
    console = console_for(shows=shows)
    job = await read(options, listener_on(console))
    run = await begun(swarm, job, options, console=console, forecasts=not is_local)
    if not is_local:
        run.progress.message(
            f"watching {run.run_id}; Ctrl-C detaches, and the run goes on: "
            f"swarm_ft.attach({str(run.run_id)!r}, ...) returns to it"
        )
    return await finished(run, options.outputs, on_event)


def console_for(*, shows: bool) -> Console:
    """Make a console on standard error, or one that shows nothing."""
    return Console(stderr=True, highlight=False) if shows else Console(quiet=True)


def listener_on(console: Console) -> Listener:
    """Make a listener that prints what reading reports."""
    return Listener(tell=partial(console.print, markup=False, soft_wrap=True))


async def run_job_in(
    way: WayIn,
    options: JobOptions,
    *,
    key_file: Path | None = None,
    shows: bool = True,
    on_event: OnEvent | None = None,
) -> RunReport:
    """Do what `run_job` does in the swarm of `way`, with this key or this user's own.

    Raises:
        SwarmError: why there is no result.
    """
    check_outputs(options.outputs)
    async with connected(way, key_file) as swarm:
        return await run_job(swarm, options, shows=shows, on_event=on_event)
