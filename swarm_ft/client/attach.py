"""Coming back to a run: all that the client needs is found again from the run's own spec."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from swarm_ft.client.job import EvalData, read_tokens
from swarm_ft.client.options import EvalOptions
from swarm_ft.client.progress import RunProgress
from swarm_ft.client.swarm import SwarmClient
from swarm_ft.client.train import Baseline, check_not_ended, measure_baseline
from swarm_ft.errors import NotFound, RunMismatch
from swarm_ft.protocol.status import RunStatus
from swarm_ft.stage.checkpoint import Checkpoint, open_checkpoint


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
