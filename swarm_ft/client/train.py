"""A job from submission to report. Decides nothing about training; the swarm does that."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from swarm_ft.client.evaluate import Evaluation, evaluate
from swarm_ft.client.export import assemble, shard_dir
from swarm_ft.client.job import EvalData, Job, read_tokens
from swarm_ft.client.options import EvalOptions
from swarm_ft.client.progress import RunProgress
from swarm_ft.client.report import RunReport
from swarm_ft.client.swarm import SwarmClient
from swarm_ft.client.trace import TraceFile
from swarm_ft.errors import NotFound, RunFailed, RunMismatch
from swarm_ft.ids import RunId
from swarm_ft.protocol.messages.client import RunEvent, RunPhase, RunStatus
from swarm_ft.protocol.spec.run_spec import RunSpec
from swarm_ft.stage.checkpoint import Checkpoint, open_checkpoint


@dataclass(frozen=True, slots=True)
class Baseline:
    """The text a run is judged by, and how the model did on it before training."""

    data: EvalData
    before: Evaluation


def note_untied(spec: RunSpec, progress: RunProgress) -> None:
    """Say so where training changes what the model is: two weights where there was one."""
    if spec.model.tied_embeddings and not spec.train.sync_tied_embeddings:
        progress.message(
            "the model ties its head to its embeddings; they are trained apart, and the result is "
            "untied (--tied-embeddings sync keeps them tied)"
        )


async def begin(client: SwarmClient, job: Job, *, resume: bool, progress: RunProgress) -> RunId:
    """Submit a job; or find its run, if that is to be gone on with and is not over.

    Raises:
        NotFound: there is no run of the same model, data and options that could be resumed.
    """
    if not resume:
        submitted = client.submit(job.spec, job.samples, on_trouble=progress.message)
        return (await submitted).run_id
    digest = job.spec.digest()
    for run in reversed((await client.status()).runs):
        if run.spec.digest() == digest and run.phase <= RunPhase.FINISHED:
            progress.message(f"run {run.run_id}: resumed at step {run.committed_steps}")
            return run.run_id
    raise NotFound(
        "--resume: the coordinator has no unfinished run of this model with these options; "
        "start it with the journal of the run, or submit the job without --resume"
    )


async def measure_baseline(model: str, data: EvalData, progress: RunProgress) -> Baseline:
    """Evaluate the model as it is."""
    progress.message(f"evaluating the model on {data.source}")
    return Baseline(data, await _evaluate(model, data))


async def _evaluate(model: str, data: EvalData) -> Evaluation:
    """Evaluate in a thread, which ends at its next batch if this is cancelled."""
    is_over = threading.Event()

    def work() -> Evaluation:
        torch.set_num_threads(os.cpu_count() or 1)
        return evaluate(model, data.samples, on_progress=go_on)

    def go_on(_num_done: int, _num_samples: int) -> None:
        if is_over.is_set():
            raise asyncio.CancelledError

    try:
        return await asyncio.to_thread(work)
    finally:
        is_over.set()


async def watch_to_end(
    client: SwarmClient,
    run_id: RunId | None,
    progress: RunProgress,
    trace: TraceFile | None = None,
) -> tuple[RunStatus, list[RunEvent]]:
    """Show a run until it is over; its last status, and all its events.

    What peers did meanwhile goes into `trace`.

    Raises:
        RunFailed: it was cancelled or failed.
    """
    events: list[RunEvent] = []
    status: RunStatus | None = None
    on_timeline = trace.add if trace is not None else None
    async with aclosing(client.watch(run_id, progress.message, on_timeline)) as arriving:
        async for event in arriving:
            events.append(event)
            if isinstance(event, RunStatus):
                status = event
                progress.show_status(event)
            else:
                progress.show_step(event)
    if status is None:
        raise RunFailed("the coordinator told nothing of the run")
    check_not_ended(status)
    if status.phase is not RunPhase.FINISHED:
        raise RunFailed(f"run {status.run_id}: the coordinator stopped telling of it")
    return status, events


def check_not_ended(status: RunStatus) -> None:
    """Refuse a run that gives no result any more.

    Raises:
        RunFailed: it was cancelled or failed, or its result was collected.
    """
    if status.phase is RunPhase.COLLECTED:
        raise RunFailed(f"run {status.run_id}: its result was collected already")
    if status.phase in (RunPhase.CANCELLED, RunPhase.FAILED):
        raise RunFailed(f"run {status.run_id} {status.phase.name.lower()}: {status.detail}")


async def collect(
    client: SwarmClient,
    status: RunStatus,
    checkpoint: Checkpoint,
    progress: RunProgress,
    out_dir: Path,
) -> bool:
    """Fetch the trained stages, make a Hugging Face checkpoint of them, let the peers go.

    Returns:
        False if a part of the result was lost before it was here; the run goes on.
    """
    tied = status.spec.model.tied_embeddings and status.spec.train.sync_tied_embeddings

    def write_config(directory: Path) -> None:
        checkpoint.save_config(directory, tie_word_embeddings=tied)
        checkpoint.tokenizer().save_pretrained(directory)

    with shard_dir(out_dir) as directory:
        shards = await client.fetch_result(status, directory, progress.message)
        if shards is None:
            return False
        await asyncio.to_thread(assemble, out_dir, shards, write_config)
    await client.collected(status.run_id)
    return True


async def fetch_result(
    client: SwarmClient,
    run_id: RunId,
    checkpoint: Checkpoint,
    progress: RunProgress,
    out_dir: Path,
    trace: TraceFile | None = None,
) -> list[RunEvent]:
    """Watch a run to its end and collect its result into `out_dir`; all its events.

    What peers did meanwhile goes into `trace`.

    A result of which a peer took a part along is made again, and this goes on until it is here.
    Cancelling this leaves the run as it is, and `out_dir` too.

    Raises:
        RunFailed: there is no result.
    """
    with progress:
        while True:
            status, events = await watch_to_end(client, run_id, progress, trace)
            progress.message("collecting the result")
            if await collect(client, status, checkpoint, progress, out_dir):
                return events


async def report_on(
    events: Sequence[RunEvent],
    run_id: RunId,
    baseline: Baseline | None,
    progress: RunProgress,
    out_dir: Path,
) -> RunReport:
    """Evaluate the result in `out_dir`, uncompressed, and say what came of the run."""
    after = None
    if baseline is not None:
        progress.message(f"evaluating the result on {baseline.data.source}")
        after = await _evaluate(str(out_dir), baseline.data)
    return RunReport.build(
        events,
        run_id=run_id,
        eval_before=baseline.before if baseline else None,
        eval_after=after,
        model_dir=str(out_dir),
    )


# ---- coming back to a run: all that the client needs is found again from the run's own spec


@dataclass(frozen=True, kw_only=True, slots=True)
class Attached:
    """A run that was found again, with the model and the text it is judged by."""

    status: RunStatus
    checkpoint: Checkpoint
    eval_data: EvalData | None

    async def baseline(self, progress: RunProgress) -> Baseline | None:
        """How the model did before training, as if this client had never left."""
        if self.eval_data is None:
            return None
        return await measure_baseline(self.checkpoint.reference, self.eval_data, progress)


async def attach_to(
    client: SwarmClient,
    run_name: str | None,
    model: str | None,
    evaluation: EvalOptions,
) -> Attached:
    """Find a run (the newest, if None) and what belongs to it.

    Raises:
        NotFound: the coordinator knows no such run.
        RunFailed: the run ended without a result, or its result was collected.
        RunMismatch: `model` has other weights than the run began with.
    """
    status = _named(run_name, (await client.status()).runs)
    check_not_ended(status)
    checkpoint = await asyncio.to_thread(open_checkpoint, model or status.spec.model.reference)
    described = await asyncio.to_thread(checkpoint.describe)
    if replace(described, reference=status.spec.model.reference) != status.spec.model:
        raise RunMismatch(
            f"model '{checkpoint.reference}': not the model that run {status.run_id} began with; "
            "give that one with --model"
        )
    eval_data, dataset = None, evaluation.eval_dataset
    if dataset is not None:
        seq_length = status.spec.train.seq_length
        tokens = await asyncio.to_thread(read_tokens, dataset, checkpoint, seq_length)
        eval_data = EvalData(samples=tokens[: evaluation.max_eval_samples], source=dataset)
    return Attached(status=status, checkpoint=checkpoint, eval_data=eval_data)


def _named(run_name: str | None, runs: Sequence[RunStatus]) -> RunStatus:
    if not runs:
        raise NotFound("the coordinator knows no run yet; submit one with 'swarm-ft client train'")
    for run in reversed(runs):
        if run_name in (None, run.run_id):
            return run
    known = ", ".join(run.run_id for run in runs)
    raise NotFound(f"run {run_name}: not known to the coordinator; it knows {known}")
