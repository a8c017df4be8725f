"""The commands `swarm-ft client`, which submit, watch and cancel jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from swarm_ft.api.connections import SwarmAddress, connect
from swarm_ft.cli.generate import generate
from swarm_ft.cli.groups import CommandGroup
from swarm_ft.cli.help_groups import GroupedCommand
from swarm_ft.cli.job_file import takes_job
from swarm_ft.cli.options import (
    examples,
    log_option,
    run_option,
    stack,
    takes,
)
from swarm_ft.cli.preview import preview
from swarm_ft.cli.running import load, on_stop_signal, reading_bar, run_async, show_start
from swarm_ft.cli.swarm_options import way_in
from swarm_ft.client.options import JobOptions, Outputs

if TYPE_CHECKING:
    from swarm_ft.client.report import RunReport
    from swarm_ft.client.swarm import SwarmClient
    from swarm_ft.client.train import WatchedRun

swarm_options = stack(way_in(), log_option)


@click.group(cls=CommandGroup)
def client() -> None:
    """Train a model in a swarm, and fetch the result."""


client.add_command(preview)


@client.command(
    cls=GroupedCommand,
    short_help="Fine-tune a model in a swarm.",
    epilog=examples(
        "swarm-ft client train --model gpt2 --dataset notes.txt --invite @invitation.txt",
        "swarm-ft client train --model ./qwen2 --dataset chats.jsonl --invite @invitation.txt",
        "swarm-ft client train --model ./llama --dataset texts/ --eval-dataset held-out.txt \\",
        "    --epochs 3 --fw aq3 --bw q6 --out ./tuned --invite @invitation.txt",
        "swarm-ft client train job.yaml --lr 1e-4 --print-config > other.yaml",
    ),
)
@takes_job("options")
@click.option(
    "--detach",
    "detaches",
    is_flag=True,
    help="Exit once the job is submitted; `client attach` returns to it.",
)
@swarm_options
def train(options: JobOptions, detaches: bool, way: SwarmAddress) -> None:
    """Fine-tune a model in a swarm; Ctrl-C detaches, and the run goes on.

    JOB.yaml sets options by their names here or in axolotl (base_model, datasets, sequence_len,
    ...). Options of the command line override it.
    """
    from swarm_ft.client.data.stored import check_data
    from swarm_ft.stage.names import check_model_place

    check_model_place(options.model)
    for path in filter(None, (*options.datasets, options.evaluation.eval_dataset)):
        check_data(path)
    show_start("reading the model and the data; libraries take some seconds to load")
    load("swarm_ft.api.training", "swarm_ft.discovery.dht")

    async def begin(swarm: SwarmClient) -> WatchedRun:
        with reading_bar() as listener:  # Show the bar before the imports, which take seconds.
            from swarm_ft.api.training import read_job, submit_job

            job = await read_job(options, listener)
        notices = who_sees(is_encrypted=way.invite is not None)
        return await submit_job(swarm, job, options, notices=notices)

    run_async(lambda: _run_to_end(begin, options.outputs, way, detaches=detaches))


def who_sees(*, is_encrypted: bool) -> tuple[str, ...]:
    """Describe who can read a job's data."""
    links = (
        "Links are encrypted."
        if is_encrypted
        else "Links are not encrypted: the network can read them."
    )
    return (
        "Who sees your text: the coordinator, which stores it until the run is over, and the peers "
        "with the first and the last stage.",
        "Peers see activations (with the model, text can be recovered from them) and their layers' "
        f"weights. {links}",
    )


@client.command(
    epilog=examples(
        "swarm-ft client attach --run run-1a2b3c4d --invite @invitation.txt",
    )
)
@run_option
@click.option(
    "--model",
    metavar="DIR|HUB_ID",
    help="The run's model, if it lies at another place on this machine.",
)
@takes("outputs", Outputs)
@swarm_options
def attach(
    run_name: str | None,
    model: str | None,
    outputs: Outputs,
    way: SwarmAddress,
) -> None:
    """Return to a run: watch it to its end, and fetch the result."""
    show_start("looking for the run; libraries take some seconds to load")
    load("swarm_ft.client.train", "swarm_ft.discovery.dht")

    async def begin(swarm: SwarmClient) -> WatchedRun:
        from swarm_ft.client.train import attach_to

        return await attach_to(swarm, run_name, model)

    run_async(lambda: _run_to_end(begin, outputs, way))


client.add_command(generate)


@client.command(
    epilog=examples("swarm-ft client cancel --run run-1a2b3c4d --invite @invitation.txt")
)
@run_option
@swarm_options
def cancel(run_name: str | None, way: SwarmAddress) -> None:
    """Cancel a run; its training so far is lost."""
    show_start("looking for the run")

    async def work() -> None:
        from swarm_ft.ids import RunId

        async with connect(way) as swarm:
            status = await swarm.cancel(RunId(run_name) if run_name else None)
        click.echo(f"{status.run_id} {status.ending}")

    run_async(work)


# ---- parts


async def _run_to_end(
    begin: Callable[[SwarmClient], Awaitable[WatchedRun]],
    outputs: Outputs,
    way: SwarmAddress,
    *,
    detaches: bool = False,
) -> None:
    """Begin or find a run, and watch it until its report or until a stop signal detaches."""
    from swarm_ft.client.job import check_outputs

    check_outputs(outputs)
    async with connect(way) as swarm:
        run = await begin(swarm)
        report = None if detaches else await _report_of(run, outputs)
    if report is not None:
        conclude(report, outputs.json_file)
        return
    click.echo("detached; the run goes on. To return to it:")
    click.echo(f"  swarm-ft client attach --run {run.run_id} {way}")


async def _report_of(run: WatchedRun, outputs: Outputs) -> RunReport | None:
    """Return the run's report, or None if a stop signal detached this client."""
    command = asyncio.current_task()
    fetching = asyncio.ensure_future(run.fetch(outputs))
    on_stop_signal(fetching.cancel)
    run.progress.message(f"watching {run.run_id}; Ctrl-C detaches, and the run goes on")
    await asyncio.wait([fetching])
    if fetching.cancelled():
        return None
    if command is not None:  # The run is over, so a signal now stops the command.
        on_stop_signal(command.cancel)
    fetching.result()
    return run.report(outputs)


def conclude(report: RunReport, json_file: Path | None) -> None:
    """Print the report, and write it to a file if one is named."""
    from rich.console import Console

    report.print_summary(Console(highlight=False))
    if json_file is not None:
        report.write(json_file)
