"""Coming back to a run: all that the client needs is found again from the run's own spec."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from swarm_ft.client.job import EvalData, read_tokens
from swarm_ft.client.progress import RunProgress
from swarm_ft.client.report import RunReport
from swarm_ft.client.swarm import SwarmClient
from swarm_ft.client.train import finish, measure_baseline
from swarm_ft.errors import NotFound, RunMismatch
from swarm_ft.protocol.messages import RunStatus
from swarm_ft.stage.checkpoint import Checkpoint, open_checkpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class Attached:
    """A run that was found again, with the model and the text it is judged by."""

    status: RunStatus
    checkpoint: Checkpoint
    eval_data: EvalData | None

    async def finish(self, client: SwarmClient, out_dir: Path) -> RunReport:
        """Watch the run to its end and report, as if this client had never left."""
        progress = RunProgress(self.status.spec.train)
        baseline = None
        if self.eval_data is not None:
            baseline = await measure_baseline(self.checkpoint.reference, self.eval_data, progress)
        return await finish(
            client,
            self.status.run_id,
            checkpoint=self.checkpoint,
            baseline=baseline,
            progress=progress,
            out_dir=out_dir,
        )


async def attach_to(
    client: SwarmClient,
    run_name: str | None,
    *,
    model: str | None,
    eval_dataset: str | None,
    max_eval_samples: int | None,
) -> Attached:
    """Find a run (the newest, if None) and what belongs to it.

    Raises:
        NotFound: the coordinator knows no such run.
        RunMismatch: `model` has other weights than the run began with.
    """
    runs = (await client.status()).runs
    status = next((run for run in reversed(runs) if run_name in (None, run.run_id)), None)
    if status is None:
        raise NotFound(f"run {run_name or ''}: not known to the coordinator")
    checkpoint = await asyncio.to_thread(open_checkpoint, model or status.spec.model.reference)
    described = await asyncio.to_thread(checkpoint.describe)
    if described.block_digests != status.spec.model.block_digests:
        raise RunMismatch(f"model {checkpoint.reference}: not the weights that the run began with")
    eval_data = None
    if eval_dataset is not None:
        seq_length = status.spec.train.seq_length
        tokens = await asyncio.to_thread(read_tokens, eval_dataset, checkpoint, seq_length)
        eval_data = EvalData(samples=tokens[:max_eval_samples], source=eval_dataset)
    return Attached(status=status, checkpoint=checkpoint, eval_data=eval_data)
