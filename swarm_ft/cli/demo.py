"""The commands `swarm-ft demo`, a whole swarm on this machine, and `swarm-ft sample`."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from swarm_ft.api.connections import connect
from swarm_ft.api.local_job import (
    SAMPLE,
    check_stages,
    layers_by_peer,
    local_job_options,
    wait_for_peers,
    with_sample,
)
from swarm_ft.api.peer_home import BufferOptions
from swarm_ft.api.swarm_keys import keys_folder
from swarm_ft.cli.client import conclude
from swarm_ft.cli.help_groups import GroupedCommand
from swarm_ft.cli.options import declared_options, examples, json_flag, log_option, takes
from swarm_ft.cli.running import (
    load,
    on_stop_signal,
    reading_bar,
    run_async,
    show_start,
    spinner,
)
from swarm_ft.client.options import JobOptions
from swarm_ft.errors import BadInput

if TYPE_CHECKING:
    from swarm_ft.api.processes import ProcessSwarm
    from swarm_ft.client.data.progress import Listener
    from swarm_ft.client.job import Job
    from swarm_ft.client.report import RunReport
    from swarm_ft.client.swarm import SwarmClient

# ---- `swarm-ft sample`: the input of the demo, as files


@click.command(
    short_help="Write the demo's model and data to a directory.",
    epilog=examples("swarm-ft sample ./sample"),
)
@click.argument("directory")
@click.option(
    "--seed",
    default=42,
    show_default=True,
    type=click.IntRange(0),
    help="Seed of the model's weights.",
)
@json_flag
def sample(directory: str, seed: int, as_json: bool) -> None:
    """Write a small GPT-2 model with random weights, and Python's own source text, to DIRECTORY."""
    from swarm_ft.client.demo_input import write_demo_input

    made = write_demo_input(Path(directory), seed=seed)
    shown = {
        "model": str(made.model_dir),
        "dataset": str(made.train_file),
        "eval_dataset": str(made.eval_file),
    }
    if as_json:
        click.echo(json.dumps(shown))
    else:
        click.echo(
            f"--model {shown['model']} --dataset {shown['dataset']} "
            f"--eval-dataset {shown['eval_dataset']}"
        )


@click.command(
    cls=GroupedCommand,
    short_help="Train a model in a whole swarm on this machine.",
    epilog=examples(
        "swarm-ft demo",
        "swarm-ft demo --stages 4 --fw aq3 --bw q6 --epochs 5",
        "swarm-ft demo --stages 2 --replicas 2 --dp q4",
        "swarm-ft demo --model ./gpt2 --dataset train.txt --eval-dataset test.txt --steps 100",
    ),
)
@click.option(
    "--stages",
    default=3,
    show_default=True,
    type=click.IntRange(1),
    help="Number of stages of the pipeline.",
)
@click.option(
    "--replicas",
    default=1,
    show_default=True,
    type=click.IntRange(1),
    help="Number of peers per stage. With two or more, any peer may crash.",
)
@declared_options(JobOptions, instead=SAMPLE)
@takes("buffers", BufferOptions)
@log_option
def demo(
    stages: int,
    replicas: int,
    buffers: BufferOptions,
    **values: Any,
) -> None:
    """Start a coordinator and peers on this machine, and fine-tune a model with them.

    The demo creates the swarm's keys, and all links are encrypted. It needs no GPU and no network.
    The logs of the processes stay beside the result.
    """
    show_start("reading the model and the data; libraries take some seconds to load")
    load("swarm_ft.client.job")
    with reading_bar() as listener:
        job, options = _prepare(stages, values, listener)
    work_dir = _work_dir(options.outputs.out)
    buffers = replace(buffers, directory=buffers.directory or work_dir / "buffers")

    async def work() -> None:
        command = asyncio.current_task()
        if command is not None:
            on_stop_signal(command.cancel)
        await _train_here(
            layers_by_peer(job.spec.model.layers, stages, replicas), buffers, job, options
        )

    run_async(work)


def _work_dir(out: Path) -> Path:
    named = out if out.name.strip(".") else out.resolve()
    return named.with_name(named.name + "-demo")


# ---- before the first process starts


def _prepare(stages: int, values: dict[str, Any], listener: Listener) -> tuple[Job, JobOptions]:
    """Write missing inputs and check the job; leave no files behind if a check fails."""
    from swarm_ft.client.job import check_outputs, prepare_job

    requested = local_job_options(values)
    check_outputs(requested.outputs)
    work_dir = _work_dir(requested.outputs.out)
    made = _first_missing(work_dir)
    try:
        options = with_sample(requested, work_dir / "input")
        check_stages(options, stages)
        job = prepare_job(options, listener)
    except (BadInput, KeyboardInterrupt):
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
        raise
    return job, options


def _first_missing(path: Path) -> Path | None:
    """Return the outermost directory that creating `path` would create; None if `path` exists."""
    whole = path.absolute()
    return next((p for p in (*reversed(whole.parents), whole) if not p.exists()), None)


# ---- the swarm


async def _train_here(
    peers: Mapping[str, str], buffers: BufferOptions, job: Job, options: JobOptions
) -> None:
    """Start the swarm, train, print the report, and always stop the swarm."""
    work_dir = _work_dir(options.outputs.out)
    from swarm_ft.api.processes import (
        CLIENT_KEY,
        JOURNAL,
        ProcessSwarm,
        delete_leftovers,
        start_swarm,
    )

    swarm, keys = ProcessSwarm(work_dir / "logs"), keys_folder(str(work_dir / JOURNAL))
    if not options.resume:
        delete_leftovers(work_dir, buffers)
    click.echo(
        f"starting a coordinator and {len(peers)} peers; logs: {work_dir / 'logs'}", err=True
    )
    try:
        with spinner("starting the processes"):
            way = await start_swarm(swarm, peers, buffers, work_dir, model=options.model)
        click.echo(f"web page of the swarm, until the demo ends: {swarm.page}", err=True)
        async with connect(way, keys / CLIENT_KEY) as client:
            with spinner("waiting for the peers to join the coordinator"):
                await wait_for_peers(client, len(peers))
            report = await _train(swarm, client, job, options)
        conclude(report, options.outputs.json_file)
    except asyncio.CancelledError:
        click.echo("stopping the swarm; the logs stay", err=True)
        raise
    finally:
        on_stop_signal(swarm.kill)  # A second signal does not wait for the processes.
        await swarm.stop()


async def _train(
    swarm: ProcessSwarm, client: SwarmClient, job: Job, options: JobOptions
) -> RunReport:
    """Submit the job and watch it to its end, unless a process of the swarm ends first."""
    from swarm_ft.client.report import RunProgress
    from swarm_ft.client.train import submit
    from swarm_ft.transport.base import until_one_ends

    progress = RunProgress(job.spec.train)
    reports: list[RunReport] = []

    async def run_to_end() -> None:
        # Peers on one machine are slower together than each was in its own measurement.
        run = await submit(client, job, options, progress, forecasts=False)
        await run.fetch(options.outputs)
        reports.append(run.report(options.outputs))

    await until_one_ends(run_to_end(), swarm.wait_for_failure(progress.message))
    return reports[0]
