"""`swarm-ft client`: submit a job, come back to it, end it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from swarm_ft.cli.options import dht_prefix_option, initial_peers_option, log_option, stack
from swarm_ft.cli.running import on_stop_signal, run_async
from swarm_ft.cli.train_options import (
    collect_options,
    eval_options,
    result_options,
    train_options,
)

if TYPE_CHECKING:
    from swarm_ft.client.report import RunReport
    from swarm_ft.client.swarm import SwarmClient
    from swarm_ft.ids import RunId

DEFAULT_LR = 5e-5

swarm_options = stack(initial_peers_option, dht_prefix_option, log_option)
run_option = click.option("--run", "run_name", metavar="ID", help="The run.  [default: the newest]")


@click.group()
def client() -> None:
    """Submit a job to a swarm, watch it, fetch its result."""


@client.command()
@click.option("--model", required=True, metavar="DIR|HUB_ID", help="What to fine-tune.")
@click.option("--dataset", required=True, metavar="PATH", help="UTF-8 text: a file, or .txt files.")
@train_options
@swarm_options
def train(
    model: str, dataset: str, initial_peers: tuple[str, ...], dht_prefix: str, **given: Any
) -> int:
    r"""Fine-tune a model; Ctrl-C detaches, and the run goes on.

    \b
    Examples:
      swarm-ft client train --model gpt2 --dataset notes.txt --initial-peers /ip4/...
      swarm-ft client train --model ./llama --dataset texts/ --eval-dataset held-out.txt \\
          --epochs 3 --fw aq3 --bw q6 --out ./tuned --initial-peers @swarm.txt
    """
    options = collect_options(model, dataset, default_lr=DEFAULT_LR, **given)

    async def work() -> int:
        from swarm_ft.client.job import prepare_job
        from swarm_ft.client.progress import RunProgress
        from swarm_ft.client.train import finish, measure_baseline

        job = await asyncio.to_thread(prepare_job, options)
        async with connected(initial_peers, dht_prefix) as swarm:
            progress = RunProgress(job.spec.train)
            baseline = await measure_baseline(options.model, job.eval_data, progress)
            status = await swarm.submit(job.spec, job.samples)
            progress.message(f"submitted as {status.run_id}")
            finishing = finish(
                swarm,
                status.run_id,
                checkpoint=job.checkpoint,
                baseline=baseline,
                progress=progress,
                out_dir=options.out,
            )
            report = await until_detached(finishing, status.run_id)
        return conclude(report, options.json_file)

    return run_async(work)


@client.command()
@run_option
@click.option("--model", metavar="DIR|HUB_ID", help="The model, if not where the run says.")
@eval_options
@result_options
@swarm_options
def attach(
    run_name: str | None,
    model: str | None,
    eval_dataset: str | None,
    max_eval_samples: int | None,
    out: str,
    json_file: str | None,
    initial_peers: tuple[str, ...],
    dht_prefix: str,
) -> int:
    r"""Come back to a run: watch it to its end and fetch the result.

    \b
    Example:
      swarm-ft client attach --run run-1a2b3c4d --eval-dataset held-out.txt --initial-peers /ip4/...
    """
    json_path = Path(json_file) if json_file else None

    async def work() -> int:
        from swarm_ft.client.attach import attach_to
        from swarm_ft.client.job import check_outputs

        check_outputs(Path(out), json_path)
        async with connected(initial_peers, dht_prefix) as swarm:
            attached = await attach_to(
                swarm,
                run_name,
                model=model,
                eval_dataset=eval_dataset,
                max_eval_samples=max_eval_samples,
            )
            finishing = attached.finish(swarm, Path(out))
            report = await until_detached(finishing, attached.status.run_id)
        return conclude(report, json_path)

    return run_async(work)


@client.command()
@run_option
@swarm_options
def cancel(run_name: str | None, initial_peers: tuple[str, ...], dht_prefix: str) -> int:
    r"""End a run; what it trained is lost.

    \b
    Example:
      swarm-ft client cancel --run run-1a2b3c4d --initial-peers /ip4/...
    """

    async def work() -> int:
        from swarm_ft.ids import RunId

        async with connected(initial_peers, dht_prefix) as swarm:
            status = await swarm.cancel(RunId(run_name) if run_name else None)
        click.echo(f"{status.run_id}: {status.phase.name.lower()}, {status.detail}")
        return 0

    return run_async(work)


@asynccontextmanager
async def connected(initial_peers: tuple[str, ...], dht_prefix: str) -> AsyncIterator[SwarmClient]:
    """A client of the swarm that `--initial-peers` lead to.

    Raises:
        BadOption: there are none.
        DirectoryUnreachable: none of them answers.
    """
    from swarm_ft.client.swarm import SwarmClient
    from swarm_ft.discovery import expand_initial_peers
    from swarm_ft.discovery.dht import DhtDirectory, DhtOptions
    from swarm_ft.errors import BadOption
    from swarm_ft.transport.grpc_transport import GrpcTransport

    peers = expand_initial_peers(initial_peers)
    if not peers:
        raise BadOption("--initial-peers is missing: the address that 'swarm-ft dht' printed")
    options = DhtOptions(initial_peers=peers, prefix=dht_prefix, client_mode=True)
    directory = await DhtDirectory.open(options)
    try:
        yield SwarmClient(directory, GrpcTransport())
    finally:
        await directory.close()


async def until_detached(
    finishing: Coroutine[Any, Any, RunReport], run_id: RunId
) -> RunReport | None:
    """The report; or None, once Ctrl-C detached this client from the run."""
    task = asyncio.ensure_future(finishing)
    on_stop_signal(task.cancel)
    await asyncio.wait([task])
    if not task.cancelled():
        return task.result()
    click.echo(f"detached; the run goes on. Come back with: swarm-ft client attach --run {run_id}")
    return None


def conclude(report: RunReport | None, json_file: Path | None) -> int:
    """Show the report and write it down."""
    if report is not None:
        from rich.console import Console

        report.print_summary(Console(highlight=False))
        if json_file is not None:
            report.write(json_file)
    return 0
