"""`swarm-ft demo`: a whole swarm on this machine, as separate processes, and a job for it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from swarm_ft.cli.client import conclude
from swarm_ft.cli.joining import WayIn, connected
from swarm_ft.cli.keys import first_invitations, keys_folder, leading_to
from swarm_ft.cli.options import (
    DHT_PREFIX,
    BufferOptions,
    declared_options,
    examples,
    json_flag,
    log_option,
    takes,
)
from swarm_ft.cli.running import on_stop_signal, reading_bar, run_async, spinner
from swarm_ft.client.options import JobOptions
from swarm_ft.errors import BadInput, BadOption, RunFailed
from swarm_ft.protocol.spec.options import arguments, build

if TYPE_CHECKING:
    from swarm_ft.client.data.progress import Listener
    from swarm_ft.client.job import Job
    from swarm_ft.client.report import RunReport
    from swarm_ft.client.swarm import SwarmClient

# ---- `swarm-ft sample`: the input of the demo, to look at or to train on by hand


@click.command(
    short_help="Write the demo's input, to train on by hand.",
    epilog=examples("swarm-ft sample ./sample"),
)
@click.argument("directory")
@click.option(
    "--seed",
    default=42,
    show_default=True,
    type=click.IntRange(0),
    help="Draws the model's weights.",
)
@json_flag
def sample(directory: str, seed: int, as_json: bool) -> None:
    """Write a small GPT-2-type model and Python's own source text into DIRECTORY."""
    from swarm_ft.client.sample import write_sample

    made = write_sample(Path(directory), seed=seed)
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


SAMPLE_LR = 2e-3
"""For the demo's own model, which starts from random weights; a trained one wants far less."""
SAMPLE = {"model": "a small GPT-2 made on the spot", "dataset": "Python's own source text"}
"""What is trained, and on what, where nothing else is named."""
JOIN_TIMEOUT_S, JOIN_POLL_S = 60.0, 0.2
JOURNAL, CLIENT_KEY = "coordinator.db", "client.pem"


@click.command(
    short_help="Train a model with a whole swarm on this machine.",
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
    help="Parts that the model's layers are shared out in.",
)
@click.option(
    "--replicas",
    default=1,
    show_default=True,
    type=click.IntRange(1),
    help="Peers that host each stage; with more than one, any of them may die.",
)
@declared_options(JobOptions, instead=SAMPLE)
@takes("buffers", BufferOptions)
@log_option
def demo(
    stages: int,
    replicas: int,
    buffers: BufferOptions,
    **given: Any,
) -> None:
    """Start a coordinator and stage peers here, and fine-tune a model with them.

    It makes the swarm's keys itself, and all links are encrypted. Needs no GPU and no network. The
    processes' logs are kept beside the result.
    """
    with reading_bar() as listener:
        job, options = _prepare(stages, given, listener)
    work_dir = _work_dir(options.outputs.out)
    buffers = replace(buffers, directory=buffers.directory or work_dir / "buffers")

    async def work() -> None:
        command = asyncio.current_task()
        if command is not None:
            on_stop_signal(command.cancel)
        await _train_here(_shares(job, stages, replicas), buffers, job, options)

    run_async(work)


def _shares(job: Job, stages: int, replicas: int) -> dict[str, str]:
    """The layers that each peer hosts, by its name."""
    from swarm_ft.protocol.spec.layers import split_evenly

    layers = [str(part) for part in split_evenly(job.spec.model.layers, stages)]
    return {
        f"stage-{part}" + f".{number}" * (replicas > 1): part
        for number in range(1, replicas + 1)
        for part in layers
    }


def _work_dir(out: Path) -> Path:
    named = out if out.name.strip(".") else out.resolve()
    return named.with_name(named.name + "-demo")


# ---- before anything is started


def _prepare(stages: int, given: dict[str, Any], listener: Listener) -> tuple[Job, JobOptions]:
    """Make what is missing, and check everything; no files are left if it comes to nothing."""
    from swarm_ft.client.job import check_outputs, prepare_job
    from swarm_ft.stage.checkpoint import open_checkpoint

    asked = _asked(given)
    check_outputs(asked.outputs)
    made = _first_missing(_work_dir(asked.outputs.out))
    try:
        options = _with_sample(asked)
        num_blocks = open_checkpoint(options.model, options.train).config.num_hidden_layers
        if stages > num_blocks:
            raise BadOption(f"--stages {stages}: the model has {num_blocks} layers to share out")
        job = prepare_job(options, listener)
    except (BadInput, KeyboardInterrupt):
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
        raise
    return job, options


def _asked(given: Mapping[str, Any]) -> JobOptions:
    """What was asked for; a model or text that is yet to be made has an empty name."""
    own = {name: given[name] or "" for name in SAMPLE}
    if not own["model"] and given["learning_rate"] is None:
        own["learning_rate"] = SAMPLE_LR
    return build(JobOptions, {**given, **own})


def _with_sample(asked: JobOptions) -> JobOptions:
    """The same with a model and text of our own where none is named."""
    from swarm_ft.client.sample import write_sample

    if asked.model and asked.dataset:
        return asked
    made = write_sample(_work_dir(asked.outputs.out) / "input", seed=asked.train.seed)
    evaluation = asked.evaluation
    if not asked.dataset and evaluation.eval_dataset is None:
        evaluation = replace(evaluation, eval_dataset=made.eval_file)
    return replace(
        asked,
        model=asked.model or made.model_dir,
        dataset=asked.dataset or made.train_file,
        evaluation=evaluation,
    )


def _first_missing(path: Path) -> Path | None:
    """The outermost directory that making `path` would make; None if it is there."""
    whole = path.absolute()
    return next((p for p in (*reversed(whole.parents), whole) if not p.exists()), None)


# ---- the swarm


async def _train_here(
    peers: Mapping[str, str], buffers: BufferOptions, job: Job, options: JobOptions
) -> None:
    """Start everybody, train, report, and end everybody, whatever happens."""
    work_dir = _work_dir(options.outputs.out)
    swarm, keys = ProcessSwarm(work_dir / "logs"), keys_folder(str(work_dir / JOURNAL))
    if not options.resume:
        _forget(work_dir, buffers)
    click.echo(
        f"starting a coordinator and {len(peers)} peers; logs: {work_dir / 'logs'}", err=True
    )
    try:
        with spinner("waiting for them to find each other"):
            way = await _start(swarm, peers, buffers, work_dir)
        async with connected(way, keys / CLIENT_KEY) as client:
            with spinner("waiting for them to join the coordinator"):
                await _joined(client, len(peers))
            report = await _train(swarm, client, job, options)
        conclude(report, options.outputs.json_file)
    except asyncio.CancelledError:
        click.echo("taking the swarm down; the logs stay", err=True)
        raise
    finally:
        on_stop_signal(swarm.kill)  # for whoever cannot wait
        await swarm.stop()


async def _joined(client: SwarmClient, num_peers: int) -> None:
    """Wait for all peers: whoever comes after the first step has to fetch what others learnt."""
    try:
        async with asyncio.timeout(JOIN_TIMEOUT_S):
            while len((await client.status()).members) < num_peers:  # noqa: ASYNC110
                await asyncio.sleep(JOIN_POLL_S)
    except TimeoutError:
        raise RunFailed("the peers did not all join the coordinator; see their logs") from None


async def _start(
    swarm: ProcessSwarm, peers: Mapping[str, str], buffers: BufferOptions, work_dir: Path
) -> WayIn:
    """Start everybody; the client's way in."""
    from swarm_ft.identity.certificates import Role

    journal = str(work_dir / JOURNAL)
    invited = first_invitations(journal, {Role.PEER: len(peers), Role.CLIENT: 1})
    common = ("--snapshots", str((work_dir / "snapshots").resolve()))
    words = await swarm.start("coordinator", ["coordinator", "--journal", journal, *common])
    click.echo(f"see it in a browser, while it lasts: {words['page']}", err=True)
    to_here = partial(leading_to, str(words["endpoint"]))
    word = str(to_here(invited[Role.PEER]))
    commands = {}
    for name, part in peers.items():
        own = buffers.directory.resolve() / name if buffers.directory else None
        offer = ("--layers", part, "--threads", "1", *arguments(replace(buffers, directory=own)))
        commands[name] = ["serve-stage", *offer, *common, word]
    await swarm.start_all(commands)
    return WayIn(invite=to_here(invited[Role.CLIENT]), initial_peers=(), dht_prefix=DHT_PREFIX)


def _forget(work_dir: Path, buffers: BufferOptions) -> None:
    """A demo is a new swarm; what the last one left would take up its run."""
    for leftover in work_dir.glob(f"{JOURNAL}*"):
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink()
    if buffers.directory == work_dir / "buffers":
        shutil.rmtree(buffers.directory, ignore_errors=True)


async def _train(
    swarm: ProcessSwarm, client: SwarmClient, job: Job, options: JobOptions
) -> RunReport:
    """Submit the job and see it through, unless a process of the swarm ends first."""
    from swarm_ft.client.report import RunProgress
    from swarm_ft.client.train import submit
    from swarm_ft.transport.base import until_one_ends

    progress = RunProgress(job.spec.train)
    reports: list[RunReport] = []

    async def see_through() -> None:
        # Peers that share one machine are not as fast as each was when it was measured.
        run = await submit(client, job, options, progress, forecasts=False)
        await run.fetch(options.outputs)
        reports.append(run.report(options.outputs))

    await until_one_ends(see_through(), swarm.first_loss(progress.message))
    return reports[0]


# ---- commands as child processes: started, watched, ended

START_TIMEOUT_S = 60.0
ENDING_SIGNALS = (signal.SIGINT, signal.SIGINT, signal.SIGKILL)
"""Politely; then for those that keep a result for its client; then for good."""
STOP_TIMEOUT_S = 5.0
"""After each of them."""


@dataclass(frozen=True, slots=True)
class Child:
    """One running command of ours; those named ROLE.1, ROLE.2, ... stand in for each other."""

    name: str
    process: asyncio.subprocess.Process
    log_file: Path

    @property
    def role(self) -> str:
        """What the run needs at least one of."""
        return self.name.partition(".")[0]


class ProcessSwarm:
    """Commands of `swarm-ft` as children of this process, each with a log of its own.

    Args:
        log_dir: made if absent; one file a process.
    """

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._children: list[Child] = []

    async def start_all(self, commands: Mapping[str, Sequence[str]]) -> None:
        """Start several commands side by side, by their names.

        Raises:
            RunFailed: one of them ended, or said nothing in time; the others may be up.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for name, arguments in commands.items():
                    group.create_task(self.start(name, arguments))
        except* RunFailed as failures:
            raise failures.exceptions[0] from None

    async def start(self, name: str, arguments: Sequence[str]) -> dict[str, object]:
        """Start `swarm-ft ARGUMENTS --json`; what it prints first, once it is up.

        Raises:
            RunFailed: it ended, or said nothing in time.
        """
        self._log_dir.mkdir(parents=True, exist_ok=True)
        log_file = self._log_dir / f"{name}.log"
        command = (sys.executable, "-m", "swarm_ft", *arguments, "--json")
        with log_file.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                # Ctrl-C in the terminal is for us; we then end the children in order.
                start_new_session=True,
            )
        child = Child(name, process, log_file)
        self._children.append(child)
        return await self._first_words(child)

    async def _first_words(self, child: Child) -> dict[str, object]:
        stdout = child.process.stdout
        if stdout is None:
            raise RunFailed(f"{child.name}: started without a pipe")
        try:
            line = await asyncio.wait_for(stdout.readline(), START_TIMEOUT_S)
        except TimeoutError:
            raise RunFailed(f"{child.name} did not come up; see {child.log_file}") from None
        if not line:
            await child.process.wait()
            raise RunFailed(f"{child.name} ended at once: {_last_line(child.log_file)}")
        words: dict[str, object] = json.loads(line)
        return words

    async def first_loss(self, on_end: Callable[[str], None]) -> None:
        """Wait until a child ends that no other can stand in for.

        Args:
            on_end: told in words of a child that ended and whose replicas go on.

        Raises:
            RunFailed: always; it says which and why.
        """
        waits = {asyncio.ensure_future(c.process.wait()): c for c in self._children}
        try:
            while True:
                done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for child in [waits.pop(wait) for wait in done]:
                    ended = f"{child.name} ended with {child.process.returncode}"
                    if child.role not in {other.role for other in waits.values()}:
                        raise RunFailed(f"{ended}: {_last_line(child.log_file)}")
                    on_end(f"{ended}; others host its layers, and the run goes on")
        finally:
            for wait in waits:
                wait.cancel()

    async def stop(self) -> None:
        """End all children, last started first: politely, and at last for good."""
        for number in ENDING_SIGNALS:
            alive = [child.process for child in self._children if child.process.returncode is None]
            for process in reversed(alive):
                process.send_signal(number)
            if alive:
                waits = [asyncio.ensure_future(process.wait()) for process in alive]
                await asyncio.wait(waits, timeout=STOP_TIMEOUT_S)

    def kill(self) -> None:
        """End all children at once."""
        for child in self._children:
            if child.process.returncode is None:
                child.process.kill()


def _last_line(log_file: Path) -> str:
    lines = log_file.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"{lines[-1]} (see {log_file})" if lines else f"see {log_file}"
