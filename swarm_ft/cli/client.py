"""`swarm-ft client`: submit a job, come back to it, end it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from swarm_ft.cli.declared import takes
from swarm_ft.cli.options import (
    dht_prefix_option,
    examples,
    log_option,
    needed_initial_peers_option,
    stack,
)
from swarm_ft.cli.running import on_stop_signal, run_async, spinner
from swarm_ft.client.options import EvalOptions, JobOptions, Outputs

if TYPE_CHECKING:
    from swarm_ft.client.progress import RunProgress
    from swarm_ft.client.report import RunReport
    from swarm_ft.client.swarm import SwarmClient
    from swarm_ft.client.train import Baseline
    from swarm_ft.ids import RunId
    from swarm_ft.protocol.messages.client import RunEvent
    from swarm_ft.stage.checkpoint import Checkpoint

swarm_options = stack(needed_initial_peers_option, dht_prefix_option, log_option)
run_option = click.option("--run", "run_name", metavar="ID", help="The run.  [default: the newest]")


class _InOrder(click.Group):
    """Lists its commands as they were defined: in the order in which they are needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=_InOrder)
def client() -> None:
    """Submit a job to a swarm, watch it, fetch its result."""


@client.command(
    epilog=examples(
        "swarm-ft client train --model gpt2 --dataset notes.txt --initial-peers /ip4/...",
        "swarm-ft client train --model ./llama --dataset texts/ --eval-dataset held-out.txt \\",
        "    --epochs 3 --fw aq3 --bw q6 --out ./tuned --initial-peers @swarm.txt",
    )
)
@takes("options", JobOptions)
@swarm_options
def train(options: JobOptions, initial_peers: tuple[str, ...], dht_prefix: str) -> None:
    """Fine-tune a model; Ctrl-C detaches, and the run goes on."""

    async def work() -> None:
        from swarm_ft.client.job import check_outputs, prepare_job
        from swarm_ft.client.progress import RunProgress
        from swarm_ft.client.train import begin, measure_baseline, note_untied

        check_outputs(options.outputs)
        async with connected(initial_peers, dht_prefix) as swarm:
            with spinner("reading the model and the text"):
                job = await asyncio.to_thread(prepare_job, options)
            progress = RunProgress(job.spec.train)
            note_untied(job.spec, progress)
            baseline = await measure_baseline(options.model, job.eval_data, progress)
            run_id = await begin(swarm, job, resume=options.resume, progress=progress)
            watch = _Watch(swarm, run_id, job.checkpoint, baseline, progress)
            report = await watch.to_report(options.outputs)
        if report is None:
            _tell_way_back(run_id, initial_peers)
        else:
            conclude(report, options.outputs.json_file)

    run_async(work)


@client.command(
    epilog=examples(
        "swarm-ft client attach --run run-1a2b3c4d --eval-dataset held-out.txt \\",
        "    --initial-peers /ip4/...",
    )
)
@run_option
@click.option("--model", metavar="DIR|HUB_ID", help="The model, if not where the run says.")
@takes("evaluation", EvalOptions)
@takes("outputs", Outputs)
@swarm_options
def attach(
    run_name: str | None,
    model: str | None,
    evaluation: EvalOptions,
    outputs: Outputs,
    initial_peers: tuple[str, ...],
    dht_prefix: str,
) -> None:
    """Come back to a run: watch it to its end and fetch the result."""

    async def work() -> None:
        from swarm_ft.client.job import check_outputs
        from swarm_ft.client.progress import RunProgress
        from swarm_ft.client.train import attach_to

        check_outputs(outputs)
        async with connected(initial_peers, dht_prefix) as swarm:
            found = await attach_to(swarm, run_name, model, evaluation)
            progress = RunProgress(found.status.spec.train)
            baseline = await found.baseline(progress)
            watch = _Watch(swarm, found.status.run_id, found.checkpoint, baseline, progress)
            report = await watch.to_report(outputs)
        if report is None:
            _tell_way_back(found.status.run_id, initial_peers)
        else:
            conclude(report, outputs.json_file)

    run_async(work)


@client.command(
    epilog=examples("swarm-ft client cancel --run run-1a2b3c4d --initial-peers /ip4/...")
)
@run_option
@swarm_options
def cancel(run_name: str | None, initial_peers: tuple[str, ...], dht_prefix: str) -> None:
    """End a run; what it trained is lost."""

    async def work() -> None:
        from swarm_ft.ids import RunId

        async with connected(initial_peers, dht_prefix) as swarm:
            status = await swarm.cancel(RunId(run_name) if run_name else None)
        click.echo(f"{status.run_id}: {status.phase.name.lower()}, {status.detail}")

    run_async(work)


@asynccontextmanager
async def connected(initial_peers: tuple[str, ...], dht_prefix: str) -> AsyncIterator[SwarmClient]:
    """A client of the swarm that `--initial-peers` lead to.

    Raises:
        DirectoryUnreachable: none of them answers.
    """
    from swarm_ft.client.swarm import SwarmClient
    from swarm_ft.discovery.dht import DhtDirectory, DhtOptions
    from swarm_ft.transport.grpc_transport import GrpcTransport

    options = DhtOptions(initial_peers=initial_peers, prefix=dht_prefix, client_mode=True)
    directory = await DhtDirectory.open(options)
    try:
        yield SwarmClient(directory, GrpcTransport())
    finally:
        await directory.close()


@dataclass(frozen=True, slots=True)
class _Watch:
    """A submitted run, and what this client needs to see it through."""

    swarm: SwarmClient
    run_id: RunId
    checkpoint: Checkpoint
    baseline: Baseline | None
    progress: RunProgress

    async def to_report(self, outputs: Outputs) -> RunReport | None:
        """The report; or None, once a stop signal detached this client from the run."""
        from swarm_ft.client.train import report_on

        command = asyncio.current_task()
        fetching = asyncio.ensure_future(self._fetch(outputs))
        on_stop_signal(fetching.cancel)
        self.progress.message(f"watching {self.run_id}; Ctrl-C detaches, and the run goes on")
        await asyncio.wait([fetching])
        if fetching.cancelled():
            return None
        if command is not None:  # the run is over, and nothing is left to detach from
            on_stop_signal(command.cancel)
        events = fetching.result()
        return await report_on(events, self.run_id, self.baseline, self.progress, outputs.out)

    async def _fetch(self, outputs: Outputs) -> list[RunEvent]:
        from swarm_ft.client.trace import open_trace
        from swarm_ft.client.train import fetch_result

        with open_trace(outputs.trace_file, self.progress.message) as trace:
            return await fetch_result(
                self.swarm, self.run_id, self.checkpoint, self.progress, outputs.out, trace
            )


def _tell_way_back(run_id: RunId, initial_peers: tuple[str, ...]) -> None:
    click.echo("detached; the run goes on. Come back, with --eval-dataset where you gave one, by")
    peers = " ".join(f"--initial-peers {peer}" for peer in initial_peers)
    click.echo(f"  swarm-ft client attach --run {run_id} {peers}")


def conclude(report: RunReport, json_file: Path | None) -> None:
    """Show the report and write it down."""
    from rich.console import Console

    report.print_summary(Console(highlight=False))
    if json_file is not None:
        report.write(json_file)
