"""A job from submission to report. The swarm makes all decisions about training."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from swarm_ft.base.log import get_logger
from swarm_ft.client.card import CARD, model_card
from swarm_ft.client.data.progress import Listener, ReadProgress
from swarm_ft.client.export import assemble, shard_dir
from swarm_ft.client.forecast import Forecast, placed_forecast, with_mean_length
from swarm_ft.client.hub import push
from swarm_ft.client.job import Job
from swarm_ft.client.options import JobOptions, Outputs
from swarm_ft.client.report import RunProgress, RunReport
from swarm_ft.client.reporting import open_reporters
from swarm_ft.client.result import write_result_files
from swarm_ft.client.swarm import SwarmClient
from swarm_ft.client.trace import TraceFile, open_trace
from swarm_ft.errors import NotFound, RunFailed, RunMismatch, SwarmError
from swarm_ft.ids import RunId
from swarm_ft.protocol.messages.capacity import Placed
from swarm_ft.protocol.messages.client import Evaluated, RunPhase, RunStatus
from swarm_ft.protocol.messages.events import Rollback
from swarm_ft.protocol.spec.run_spec import RunSpec
from swarm_ft.stage.adapters import WEIGHTS_FILE
from swarm_ft.stage.checkpoint import Checkpoint, open_checkpoint

logger = get_logger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchedRun:
    """A submitted or attached run with everything its client needs until its end.

    Attributes:
        client: Connection to the swarm.
        run_id: Name of the run.
        checkpoint: Base model of the run.
        progress: Display of the run's progress.
        spec: Parameters of the run.
        forecast: Forecast of the run; None if the swarm could not make one.
        options: Options of the job; None for an attached run.
    """

    client: SwarmClient
    run_id: RunId
    checkpoint: Checkpoint
    progress: RunProgress
    spec: RunSpec
    forecast: Forecast | None = None
    options: JobOptions | None = None

    async def fetch(self, outputs: Outputs) -> None:
        """Watch the run to its end and fetch its result into `outputs.out`.

        Peers' timelines go to `outputs.trace_file`, losses to `outputs.report_to`, and the result
        also to `outputs.push_to_hub`. If a peer disappears with its part of the result, the swarm
        trains that part again, and this method waits for it. Cancelling this method changes neither
        the run nor `outputs.out`.

        Raises:
            RunFailed: The run has no result, or the hub did not accept it.
            BadOption: The trace or a report cannot be written.
        """
        with (
            open_trace(outputs.trace_file, self.progress.message) as trace,
            open_reporters(outputs, self.run_id, self.spec.train) as take,
            self.progress.notifying(take),
            self.progress.display(),
        ):
            while True:
                status = await self._end(trace)
                self.progress.message("fetching the result")
                if await self._collect(status, outputs):
                    break
        if outputs.push_to_hub is not None:
            self.progress.message(f"uploading the result to {outputs.push_to_hub}")
            where = await asyncio.to_thread(
                push, outputs.out, outputs.push_to_hub, is_private=outputs.hub_private_repo
            )
            self.progress.message(f"the result is also at {where}")

    def report(self, outputs: Outputs) -> RunReport:
        """Return the report of the run.

        Raises:
            ProtocolError: The events of a committed step are missing.
        """
        state = self.progress.state
        return RunReport(
            run_id=self.run_id,
            losses=state.losses,
            totals=state.last,
            evaluations=state.evaluations,
            model_dir=str(outputs.out),
            num_steps=state.num_steps,
            result_step=state.result_step,
            forecast=self.forecast,
            rollbacks=state.rollbacks,
            task=self.progress.task,
            codecs=tuple(one for one in state.codecs if one.first_step < state.committed_steps),
            quality=state.quality,
            steered=state.steered,
            result_dtype=self.spec.result_dtype,
        )

    async def _end(self, trace: TraceFile | None) -> RunStatus:
        """Show the run until it ends; return its last status."""
        status: RunStatus | None = None
        watching = self.client.watch(
            self.run_id, self.progress.message, trace.add if trace is not None else None
        )
        async with aclosing(watching) as arriving:
            async for event in arriving:
                if isinstance(event, RunStatus):
                    status = event
                    self.progress.show_status(event)
                elif isinstance(event, Evaluated):
                    self.progress.show_evaluation(event)
                elif isinstance(event, Rollback):
                    self.progress.show_rollback(event)
                else:
                    self.progress.show_step(event)
        if status is None:
            raise RunFailed("the coordinator sent no events of the run")
        _check_not_ended(status)
        if status.phase is not RunPhase.FINISHED:
            raise RunFailed(f"run {status.run_id}: the coordinator stopped sending its events")
        return status

    async def _collect(self, status: RunStatus, outputs: Outputs) -> bool:
        """Fetch the trained stages, build the checkpoint or adapter, and release the peers.

        Returns:
            False if a part of the result was lost before it arrived; the run then goes on.
        """
        spec, out_dir = status.spec, outputs.out
        card = model_card(self.report(outputs), spec, status.assignments, self.options)
        is_adapter = spec.train.gives_adapter

        def write_config(directory: Path) -> None:
            write_result_files(directory, checkpoint=self.checkpoint, spec=spec)
            (directory / CARD).write_text(card, encoding="utf-8")

        with shard_dir(out_dir) as directory:
            shards = await self.client.fetch_result(status, directory, self.progress.message)
            if shards is None:
                return False
            as_one = WEIGHTS_FILE if is_adapter else None
            await asyncio.to_thread(assemble, out_dir, shards, write_config, as_one=as_one)
        await self.client.acknowledge_result(status.run_id)
        return True


async def submit(
    client: SwarmClient,
    job: Job,
    options: JobOptions,
    progress: RunProgress,
    *,
    forecasts: bool = True,
) -> WatchedRun:
    """Submit the job, or find its run if `options.resume` is set.

    Args:
        client: Connection to the swarm.
        job: The checked job.
        options: All options of the job.
        progress: Display that prints messages of the submission.
        forecasts: Whether to print a forecast first.

    Raises:
        NotFound: No unfinished run has the same model, data and options.
    """
    job = job.owned_by(client.name)
    spec = job.spec
    if spec.model.tied_embeddings and not spec.keeps_tied:
        progress.message(
            "the model ties its head to its embeddings; this run trains them separately, and the "
            "result is untied (--tied-embeddings sync keeps them tied)"
        )
    expected = await _forecast(client, job, progress) if forecasts else None
    if options.resume:
        run_id, spec = await _resumed(client, job, progress)
    else:
        submitted = client.submit(
            spec, job.samples, priority=options.priority, on_trouble=progress.message
        )
        run_id = (await submitted).run_id
    return WatchedRun(
        client=client,
        run_id=run_id,
        checkpoint=job.checkpoint,
        progress=progress,
        spec=spec,
        forecast=expected,
        options=options,
    )


async def _forecast(client: SwarmClient, job: Job, progress: RunProgress) -> Forecast | None:
    """Print and return a forecast of the run; None if the swarm cannot host or measure it now."""
    try:
        placed = await client.place(job.spec)
    except SwarmError as error:
        logger.info("no forecast: %s", error)
        return None
    if not _is_measured(placed):
        return None
    spec = await asyncio.to_thread(with_mean_length, job.spec, job.samples)
    found = placed_forecast(spec, placed)
    for words in found.lines():
        progress.message(words)
    return found


async def _forecast_again(client: SwarmClient, status: RunStatus) -> Forecast | None:
    """Return a forecast of an attached run; None without peers or measurements.

    The samples are at the coordinator, so each is assumed to have the maximum length.
    """
    try:
        placed = await client.place(status.spec, status.run_id)
    except SwarmError as error:
        logger.info("no forecast: %s", error)
        return None
    return placed_forecast(status.spec, placed) if _is_measured(placed) else None


def _is_measured(placed: Placed) -> bool:
    return any(peer.machine.flops_per_s for peer in placed.peers)


async def attach_to(
    client: SwarmClient,
    run_name: str | None,
    model: str | None,
    console: Console | None = None,
) -> WatchedRun:
    """Find a run (the only one, if `run_name` is None) and open its base model.

    Raises:
        NotFound: The coordinator has no such run.
        RunFailed: The run ended without a result, or its result was fetched already.
        RunMismatch: `model` has other weights than the base model of the run.
    """
    status = await client.run(RunId(run_name) if run_name else None)
    _check_not_ended(status)
    reference = model or status.spec.model.reference
    checkpoint = await asyncio.to_thread(open_checkpoint, reference, status.spec.train)
    of_run = status.spec.model
    described = await asyncio.to_thread(checkpoint.describe, of_run.nonce, of_run.owner)
    named = replace(described, reference=of_run.reference, adapter_bytes=of_run.adapter_bytes)
    if named != of_run:
        raise RunMismatch(
            f"model '{checkpoint.reference}': not the base model of run {status.run_id}; "
            "give that one with --model"
        )
    progress = RunProgress(status.spec.train, console)
    expected = await _forecast_again(client, status)
    if expected is not None:
        progress.message(expected.line())
    return WatchedRun(
        client=client,
        run_id=status.run_id,
        checkpoint=checkpoint,
        progress=progress,
        spec=status.spec,
        forecast=expected,
    )


async def _resumed(client: SwarmClient, job: Job, progress: RunProgress) -> tuple[RunId, RunSpec]:
    """Return the newest unfinished run of this job with its spec, whose nonce is an older one."""
    for run in reversed((await client.status()).runs):
        if not run.is_own or run.phase > RunPhase.FINISHED:
            continue
        spec = (await client.run(run.run_id)).spec
        if job.is_of(spec):
            progress.message(f"run {run.run_id}: resumed at step {run.committed_steps}")
            return run.run_id, spec
    raise NotFound(
        "--resume: the coordinator has no unfinished run of this model with these options; "
        "start it with the journal of the run, or submit the job without --resume"
    )


async def read_in_thread(work: Callable[[Listener], T], listener: Listener) -> T:
    """Run `work` in a thread and return its result; cancelling stops it at its next batch."""

    def read(go_on: Callable[[], None]) -> T:
        def show(so_far: ReadProgress) -> None:
            go_on()
            listener.on_progress(so_far)

        return work(replace(listener, on_progress=show))

    return await _in_thread(read)


async def _in_thread(work: Callable[[Callable[[], None]], T]) -> T:
    """Run `work(go_on)` in a thread; `go_on` raises once this task is cancelled."""
    is_over = threading.Event()

    def go_on() -> None:
        if is_over.is_set():
            raise asyncio.CancelledError

    try:
        return await asyncio.to_thread(work, go_on)
    finally:
        is_over.set()


def _check_not_ended(status: RunStatus) -> None:
    """Refuse a run that will give no result."""
    if status.phase is RunPhase.COLLECTED:
        raise RunFailed(f"run {status.run_id}: its result was fetched already")
    if status.phase in (RunPhase.CANCELLED, RunPhase.FAILED):
        raise RunFailed(f"run {status.run_id} {status.ending}")
