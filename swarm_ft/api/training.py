"""A job from its options to its result, in an existing swarm."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from swarm_ft.api.connections import SwarmAddress, connect
from swarm_ft.client.data.progress import Listener
from swarm_ft.client.job import check_outputs, prepare_job
from swarm_ft.client.options import JobOptions, Outputs
from swarm_ft.client.report import RunProgress, RunReport
from swarm_ft.client.swarm import SwarmClient
from swarm_ft.client.train import WatchedRun, read_in_thread, submit
from swarm_ft.errors import BadOption
from swarm_ft.protocol.messages.client import RunEvent
from swarm_ft.protocol.spec.options import build, by_names

if TYPE_CHECKING:
    from swarm_ft.client.job import Job

OnEvent = Callable[[RunEvent], object]


def job_options(given: dict[str, Any]) -> JobOptions:
    """Build a job's options from values or their words, by name.

    Raises:
        BadInput: An option is unknown, missing or out of its bounds.
    """
    values = by_names(JobOptions, given)
    for name in ("model", "dataset"):
        if values.get(name) is None:
            raise BadOption(f"{name}: expected a value, got none; it is required")
    return build(JobOptions, values)


async def read_job(options: JobOptions, listener: Listener) -> Job:
    """Read and check a job's model and data, without any connection to a swarm.

    Raises:
        BadInput: An option, the model or the data is not usable.
    """
    return await read_in_thread(partial(prepare_job, options), listener)


async def submit_job(
    swarm: SwarmClient,
    job: Job,
    options: JobOptions,
    *,
    console: Console | None = None,
    notices: Iterable[str] = (),
    forecasts: bool = True,
) -> WatchedRun:
    """Submit a job.

    Args:
        swarm: Connection to the swarm.
        job: The job, as `read` returned it.
        options: The job's options.
        console: Console for the progress; None: standard error.
        notices: Lines to show first.
        forecasts: Whether to show a forecast.

    Raises:
        SwarmError: The coordinator refuses the job.
    """
    progress = RunProgress(job.spec.train, console)
    for line in notices:
        progress.message(line)
    return await submit(swarm, job, options, progress, forecasts=forecasts)


async def watch_to_end(
    run: WatchedRun, outputs: Outputs, on_event: OnEvent | None = None
) -> RunReport:
    """Watch a run to its end, fetch its result, and report on it.

    Args:
        run: The run.
        outputs: Places of the result and of reports.
        on_event: Callback for every event of the run: a step, an evaluation, a status.

    Raises:
        SwarmError: The run has no result; the error is the cause.
    """
    with run.progress.notifying(on_event) if on_event else nullcontext():
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
        swarm: Connection to the swarm.
        options: Options of the job.
        shows: Whether to show the progress on standard error.
        on_event: Callback for every event of the run: a step, an evaluation, a status.
        is_local: Whether this process runs the swarm. Then there is no forecast, since its peers
            share a machine, and no advice to detach, since the run ends with the process.

    Raises:
        SwarmError: The run has no result; the error is the cause.
    """
    console = console_for(shows=shows)
    job = await read_job(options, listener_on(console))
    run = await submit_job(swarm, job, options, console=console, forecasts=not is_local)
    if not is_local:
        run.progress.message(
            f"watching {run.run_id}; Ctrl-C detaches, and the run goes on: "
            f"swarm_ft.attach({str(run.run_id)!r}, ...) returns to it"
        )
    return await watch_to_end(run, options.outputs, on_event)


def console_for(*, shows: bool) -> Console:
    """Return a console on standard error, or one that prints nothing."""
    return Console(stderr=True, highlight=False) if shows else Console(quiet=True)


def listener_on(console: Console) -> Listener:
    """Return a listener that prints the messages of reading data."""
    return Listener(on_line=partial(console.print, markup=False, soft_wrap=True))


async def run_job_in(
    way: SwarmAddress,
    options: JobOptions,
    *,
    key_file: Path | None = None,
    shows: bool = True,
    on_event: OnEvent | None = None,
) -> RunReport:
    """Connect to the swarm of `way` with this key or this user's own, and call `run_job`.

    Raises:
        SwarmError: The run has no result; the error is the cause.
    """
    check_outputs(options.outputs)
    async with connect(way, key_file) as swarm:
        return await run_job(swarm, options, shows=shows, on_event=on_event)
