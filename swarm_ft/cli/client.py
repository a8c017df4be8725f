"""`swarm-ft client`: submit a job, come back to it, end it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from swarm_ft.api.joining import WayIn, connected
from swarm_ft.cli.generate import generate
from swarm_ft.cli.groups import CommandGroup
from swarm_ft.cli.help_groups import GroupedCommand
from swarm_ft.cli.job_file import takes_job
from swarm_ft.cli.joining import way_in
from swarm_ft.cli.options import (
    examples,
    log_option,
    run_option,
    stack,
    takes,
)
from swarm_ft.cli.preview import preview
from swarm_ft.cli.running import load, on_stop_signal, reading_bar, run_async, show_start
from swarm_ft.client.options import JobOptions, Outputs

if TYPE_CHECKING:
    from swarm_ft.client.report import RunReport
    from swarm_ft.client.swarm import SwarmClient
    from swarm_ft.client.train import WatchedRun

swarm_options = stack(way_in(), log_option)


@click.group(cls=CommandGroup)
def client() -> None:
    """Submit a job to a swarm, watch it, try and fetch its result."""


client.add_command(preview)


@client.command(
    cls=GroupedCommand,
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
    help="Leave when the job is submitted; `client attach` fetches what comes of it.",
)
@swarm_options
def train(options: JobOptions, detaches: bool, way: WayIn) -> None:
    """Fine-tune a model; Ctrl-C detaches, and the run goes on.

    JOB.yaml holds options by their names, or by axolotl's (base_model, datasets, sequence_len,
    ...); options given here override it.
    """
    from swarm_ft.client.data.stored import check_data
    from swarm_ft.stage.names import check_model_place

    check_model_place(options.model)
    for path in filter(None, (*options.datasets, options.evaluation.eval_dataset)):
        check_data(path)
    show_start("reading the model and the data; the libraries for them take some seconds")
    load("swarm_ft.api.training", "swarm_ft.discovery.dht")

    async def begin(swarm: SwarmClient) -> WatchedRun:
        with reading_bar() as listener:  # its words come before what is imported now
            from swarm_ft.api.training import begun, read

            job = await read(options, listener)
        told = who_sees(is_encrypted=way.invite is not None)
        return await begun(swarm, job, options, told=told)

    run_async(lambda: _see_through(begin, options.outputs, way, detaches=detaches))


def who_sees(*, is_encrypted: bool) -> tuple[str, ...]:
    """What becomes of a job's data, in words."""
    others = "nobody else, for links are encrypted" if is_encrypted else "whoever sees the network"
    return (
        "who sees your text: the coordinator, which keeps it until the run is over, and whoever "
        "hosts the first or the last stage",
        "peers see activations, from which whoever has the model can recover text, and their "
        f"layers' weights; {others}",
    )


@client.command(
    epilog=examples(
        "swarm-ft client attach --run run-1a2b3c4d --invite @invitation.txt",
    )
)
@run_option
@click.option("--model", metavar="DIR|HUB_ID", help="The model, if not where the run says.")
@takes("outputs", Outputs)
@swarm_options
def attach(
    run_name: str | None,
    model: str | None,
    outputs: Outputs,
    way: WayIn,
) -> None:
    """Come back to a run: watch it to its end and fetch the result."""
    show_start("looking for the run; libraries take some seconds")
    load("swarm_ft.client.train", "swarm_ft.discovery.dht")

    async def begin(swarm: SwarmClient) -> WatchedRun:
        from swarm_ft.client.train import attach_to

        return await attach_to(swarm, run_name, model)

    run_async(lambda: _see_through(begin, outputs, way))


client.add_command(generate)


@client.command(
    epilog=examples("swarm-ft client cancel --run run-1a2b3c4d --invite @invitation.txt")
)
@run_option
@swarm_options
def cancel(run_name: str | None, way: WayIn) -> None:
    """End a run; what it trained is lost."""
    show_start("looking for the run")

    async def work() -> None:
        from swarm_ft.ids import RunId

        async with connected(way) as swarm:
            status = await swarm.cancel(RunId(run_name) if run_name else None)
        click.echo(f"{status.run_id} {status.ending}")

    run_async(work)


# ---- parts


async def _see_through(
    begin: Callable[[SwarmClient], Awaitable[WatchedRun]],
    outputs: Outputs,
    way: WayIn,
    *,
    detaches: bool = False,
) -> None:
    """Begin, or find, a run and watch it until it is reported on, or a stop signal detaches."""
    from swarm_ft.client.job import check_outputs

    check_outputs(outputs)
    async with connected(way) as swarm:
        run = await begin(swarm)
        report = None if detaches else await _report_of(run, outputs)
    if report is not None:
        conclude(report, outputs.json_file)
        return
    click.echo("detached; the run goes on. Come back by")
    click.echo(f"  swarm-ft client attach --run {run.run_id} {way}")


async def _report_of(run: WatchedRun, outputs: Outputs) -> RunReport | None:
    """The report; or None, once a stop signal detached this client from the run."""
    command = asyncio.current_task()
    fetching = asyncio.ensure_future(run.fetch(outputs))
    on_stop_signal(fetching.cancel)
    run.progress.message(f"watching {run.run_id}; Ctrl-C detaches, and the run goes on")
    await asyncio.wait([fetching])
    if fetching.cancelled():
        return None
    if command is not None:  # the run is over, and nothing is left to detach from
        on_stop_signal(command.cancel)
    fetching.result()
    return run.report(outputs)


def conclude(report: RunReport, json_file: Path | None) -> None:
    """Show the report and write it down."""
    from rich.console import Console

    report.print_summary(Console(highlight=False))
    if json_file is not None:
        report.write(json_file)
