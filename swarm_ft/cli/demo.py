"""`swarm-ft demo`: a whole swarm on this machine, as separate processes, and a job for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from swarm_ft.cli.client import DEFAULT_LR, conclude, connected
from swarm_ft.cli.options import log_option
from swarm_ft.cli.processes import ProcessSwarm
from swarm_ft.cli.running import on_stop_signal, run_async
from swarm_ft.cli.train_options import collect_options, train_options
from swarm_ft.errors import BadOption

if TYPE_CHECKING:
    from swarm_ft.client.job import Job
    from swarm_ft.client.options import TrainOptions
    from swarm_ft.client.report import RunReport
    from swarm_ft.client.swarm import SwarmClient

SAMPLE_LR = 2e-3
"""For the demo's own model, which starts from random weights; a trained one wants far less."""


@click.command()
@click.option("--stages", default=3, show_default=True, type=click.IntRange(1), help="Peers.")
@click.option("--model", metavar="DIR|HUB_ID", help="[default: a small GPT-2 made on the spot]")
@click.option("--dataset", metavar="PATH", help="[default: Python's own source text]")
@train_options
@log_option
def demo(stages: int, model: str | None, dataset: str | None, **given: Any) -> int:
    r"""Start a DHT node, a coordinator and stage peers here, and fine-tune a model with them.

    Needs no GPU and no network. The processes' logs are kept beside the result.

    \b
    Examples:
      swarm-ft demo
      swarm-ft demo --stages 4 --fw aq3 --bw q6 --epochs 5
      swarm-ft demo --model ./gpt2 --dataset train.txt --eval-dataset test.txt --steps 100
    """
    if (model is None) != (dataset is None):
        raise BadOption("--model and --dataset: give both, or neither for the demo's own input")

    def options() -> TrainOptions:
        if model is not None and dataset is not None:
            return collect_options(model, dataset, default_lr=DEFAULT_LR, **given)
        return _sample_options(given)

    return run_async(lambda: _demo(stages, options))


def _work_dir(out: Path) -> Path:
    return out.with_name(out.name + "-demo")


def _sample_options(given: dict[str, Any]) -> TrainOptions:
    from swarm_ft.client.job import check_outputs
    from swarm_ft.client.sample import write_sample

    check_outputs(Path(given["out"]), None)
    made = write_sample(_work_dir(Path(given["out"])) / "input", seed=given["seed"])
    given = {**given, "eval_dataset": given["eval_dataset"] or made.eval_file}
    return collect_options(made.model_dir, made.train_file, default_lr=SAMPLE_LR, **given)


async def _demo(stages: int, make_options: Callable[[], TrainOptions]) -> int:
    from swarm_ft.client.job import prepare_job
    from swarm_ft.protocol.layers import split_evenly

    main = asyncio.current_task()
    if main is not None:
        on_stop_signal(main.cancel)
    options = await asyncio.to_thread(make_options)
    job = await asyncio.to_thread(prepare_job, options)
    layers = split_evenly(job.spec.model.layers, stages)
    work_dir = _work_dir(options.out)
    swarm = ProcessSwarm(work_dir / "logs")
    click.echo(f"starting a DHT node, a coordinator and {stages} peers; logs: {work_dir}/logs")
    try:
        address = await _start(swarm, [str(part) for part in layers], work_dir)
        async with connected((address,), "swarm-ft") as client:
            report = await _train(swarm, client, job, options)
    except asyncio.CancelledError:
        click.echo("interrupted; the swarm is taken down", err=True)
        return 130
    finally:
        await asyncio.shield(swarm.stop())
    return conclude(report, options.json_file)


async def _start(swarm: ProcessSwarm, layers: Sequence[str], work_dir: Path) -> str:
    """Start everybody; the DHT address that others start from."""
    dht = await swarm.start("dht", ["dht"])
    addresses = dht["addresses"]
    if not isinstance(addresses, list):
        raise BadOption("dht: printed no addresses")
    address = str(addresses[0])
    journal = _fresh_journal(work_dir)
    common = ("--initial-peers", address)
    starts = [swarm.start("coordinator", ["coordinator", "--journal", str(journal), *common])]
    for part in layers:
        arguments = ["serve-stage", "--layers", part, "--device", "auto", "--threads", "1", *common]
        starts.append(swarm.start(f"stage-{part}", arguments))
    await asyncio.gather(*starts)
    return address


def _fresh_journal(work_dir: Path) -> Path:
    """Every demo is a new swarm; the journal of the last one would take up its run."""
    for leftover in work_dir.glob("coordinator.db*"):
        leftover.unlink()
    return work_dir / "coordinator.db"


async def _train(
    swarm: ProcessSwarm, client: SwarmClient, job: Job, options: TrainOptions
) -> RunReport:
    """Submit the job and see it through, unless a process of the swarm ends first."""
    watching = asyncio.ensure_future(swarm.first_end())
    training = asyncio.ensure_future(_see_through(client, job, options))
    try:
        await asyncio.wait((watching, training), return_when=asyncio.FIRST_COMPLETED)
        if not training.done():
            watching.result()
        return await training
    finally:
        watching.cancel()
        training.cancel()
        await asyncio.gather(watching, training, return_exceptions=True)


async def _see_through(client: SwarmClient, job: Job, options: TrainOptions) -> RunReport:
    from swarm_ft.client.progress import RunProgress
    from swarm_ft.client.train import finish, measure_baseline

    progress = RunProgress(job.spec.train)
    baseline = await measure_baseline(options.model, job.eval_data, progress)
    status = await client.submit(job.spec, job.samples)
    return await finish(
        client,
        status.run_id,
        checkpoint=job.checkpoint,
        baseline=baseline,
        progress=progress,
        out_dir=options.out,
    )
