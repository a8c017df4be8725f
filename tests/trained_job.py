"""A job from its options to its result, by the stages of one process and without a swarm."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from swarm_ft.client.data.progress import Listener
from swarm_ft.client.export import assemble
from swarm_ft.client.job import Job, prepare_job
from swarm_ft.client.options import JobOptions
from swarm_ft.client.result import write_result_files
from swarm_ft.ids import MicrobatchIndex, StepNumber
from swarm_ft.protocol.spec.layers import split_evenly
from swarm_ft.protocol.spec.sample_rows import Words, counts_of, rows_in, samples_in
from swarm_ft.protocol.spec.tasks import sum_counts
from swarm_ft.protocol.spec.training_plan import learning_rate_at, step_microbatches
from swarm_ft.stage.adapters import WEIGHTS_FILE
from swarm_ft.stage.engine import StageEngine


class TrainedJob:
    """The stages of a job, with the loop of a swarm around them.

    Args:
        options: of the job.
        num_stages: that its layers are shared out in.

    Attributes:
        lines: that `prepare_job` printed.
        rows: of the samples that are trained on.
    """

    def __init__(self, options: JobOptions, num_stages: int = 2) -> None:
        self.lines: list[str] = []
        self.job: Job = prepare_job(options, Listener(on_line=self.lines.append))
        self.spec = self.job.spec
        train = self.spec.train
        self.rows = rows_in(self.job.samples[: train.num_samples], train.seq_length)
        self.stages = [
            StageEngine(
                self.job.checkpoint,
                self.spec,
                layers,
                device=torch.device("cpu"),
                dtype=torch.float32,
            )
            for layers in split_evenly(self.spec.model.layers, num_stages)
        ]
        for stage in self.stages:
            stage.load()

    def train(self, num_steps: int) -> list[float]:
        """Run so many steps; the loss of each."""
        losses = []
        for step in map(StepNumber, range(num_steps)):
            batches = step_microbatches(self.spec.train, step)
            rows = [self.rows[list(batch.samples)] for batch in batches]
            num_targets = sum(counts_of(one).num_targets for one in rows)
            for stage in self.stages:
                stage.begin_step(step, num_targets)
            sums = [self._microbatch(b.index, own) for b, own in zip(batches, rows, strict=True)]
            losses.append(sum(sums) / num_targets)
            for stage in self.stages:
                stage.apply(1.0, learning_rate_at(self.spec.train, step))
        return losses

    def _microbatch(self, index: MicrobatchIndex, rows: Words) -> float:
        samples = samples_in(rows)
        x, labels = torch.from_numpy(samples.token_ids), torch.from_numpy(samples.labels)
        lengths = samples.lengths.tolist()
        *upstream, last = self.stages
        for stage in upstream:
            x = stage.forward(index, x, lengths)
        found = last.forward_backward(index, x, labels, lengths)
        gradient = found.input_gradient
        for stage in reversed(upstream):
            if gradient is not None:
                gradient = stage.backward(index, gradient)
        for stage in self.stages:
            stage.weight_gradients(index)
        return found.loss_sum

    def evaluate(self) -> tuple[float, tuple[int, ...]]:
        """The loss of all `rows`, a mean over targets, and their counts; in microbatches."""
        size = self.spec.train.micro_batch_size
        loss, counts = 0.0, []
        for start in range(0, len(self.rows), size):
            samples = samples_in(self.rows[start : start + size])
            x, labels = torch.from_numpy(samples.token_ids), torch.from_numpy(samples.labels)
            lengths = samples.lengths.tolist()
            *upstream, last = self.stages
            for stage in upstream:
                x = stage.infer(x, lengths)
            found = last.evaluate(x, labels, lengths)
            loss += found.loss_sum
            counts.append(found.counts)
        return loss / counts_of(self.rows).num_targets, sum_counts(counts) if counts[0] else ()

    def export(self, out: Path) -> Path:
        """The directory of the result, as the client writes it."""
        spec, checkpoint = self.spec, self.job.checkpoint
        write_config = partial(write_result_files, checkpoint=checkpoint, spec=spec)
        folder = out.parent / f"{out.name}-shards"
        folder.mkdir()
        shards = [folder / f"{number}.safetensors" for number in range(len(self.stages))]
        for stage, shard in zip(self.stages, shards, strict=True):
            shard.write_bytes(b"".join(stage.export()))
        as_one = WEIGHTS_FILE if spec.train.gives_adapter else None
        assemble(out, shards, write_config, as_one=as_one)
        return out
