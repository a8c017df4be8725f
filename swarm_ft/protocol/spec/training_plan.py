"""Which samples a step visits, in which microbatches, at which learning rate. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

import numpy as np

from swarm_ft.ids import MicrobatchIndex, SampleId, StepNumber
from swarm_ft.protocol.spec.bounds import Length
from swarm_ft.protocol.spec.layers import MAX_BLOCKS
from swarm_ft.protocol.spec.run_spec import MAX_BATCH_SIZE, LrSchedule, TrainSpec
from swarm_ft.protocol.spec.shuffle import Numbers, Permutation

NEVER = StepNumber(1 << 62)
"""Later than every step: of a sample that no step visits any more."""


@dataclass(frozen=True, slots=True)
class Microbatch:
    """A few samples that travel together through all stages.

    Attributes:
        route: the replica of each stage that it passes, first stage to last, counted from 0;
            empty where every stage has one.
        done: stages that are done with it, as an earlier attempt at the step got so far.
    """

    index: MicrobatchIndex
    samples: Annotated[tuple[SampleId, ...], Length(MAX_BATCH_SIZE, 1)]
    route: Annotated[tuple[int, ...], Length(MAX_BLOCKS)] = ()
    done: Annotated[frozenset[int], Length(MAX_BLOCKS)] = frozenset()

    def replica_at(self, stage_index: int) -> int:
        """Which replica of a stage it passes."""
        return self.route[stage_index] if self.route else 0


@lru_cache(maxsize=4)
def _order_of(num_samples: int, seed: int, epoch: int) -> Permutation:
    """The order of a shuffled epoch; as large as the root of the number of samples."""
    return Permutation(num_samples, f"{seed}/{epoch}".encode())


def step_samples(spec: TrainSpec, step: StepNumber) -> tuple[SampleId, ...]:
    """Samples of a step; batches do not cross epochs, so no step visits a sample twice.

    An epoch visits samples in their order in the file, or in one that is drawn from the seed.
    """
    epoch, position = divmod(step, spec.steps_per_epoch)
    start = position * spec.batch_size
    samples = np.arange(start, min(start + spec.batch_size, spec.num_samples))
    if spec.shuffle:
        samples = _order_of(spec.num_samples, spec.seed, epoch).at(samples)
    return tuple(SampleId(sample) for sample in samples.tolist())


class VisitOrder:
    """When samples are visited next. Computed anew for each question; it keeps nothing."""

    def __init__(self, spec: TrainSpec) -> None:
        self._spec = spec

    def next_visit(self, sample: SampleId, after_step: int) -> StepNumber:
        """The first step after this one that visits the sample, `NEVER` if none does."""
        return StepNumber(int(self.next_visits(np.array([sample]), after_step)[0]))

    def next_visits(self, samples: Numbers, after_step: int) -> Numbers:
        """The same of many samples, int64 [n] each; -1 stands before the first step.

        A sample that the run does not have is never visited.
        """
        first = max(0, after_step + 1)
        epoch = first // self._spec.steps_per_epoch
        visits = np.full(len(samples), NEVER, np.int64)
        left = np.flatnonzero(samples < self._spec.num_samples)
        for following in (epoch, epoch + 1):
            steps = self._steps(samples[left], following)
            is_ahead = steps >= first
            visits[left[is_ahead]] = steps[is_ahead]
            left = left[~is_ahead]
        visits[visits >= self._spec.num_steps] = NEVER
        return visits

    def _steps(self, samples: Numbers, epoch: int) -> Numbers:
        """The step at which an epoch visits each of these samples."""
        spec = self._spec
        places = samples
        if spec.shuffle:
            places = _order_of(spec.num_samples, spec.seed, epoch).places_of(samples)
        return epoch * spec.steps_per_epoch + places // spec.batch_size


def step_microbatches(spec: TrainSpec, step: StepNumber) -> tuple[Microbatch, ...]:
    """The step's samples, cut into microbatches; an epoch's last one may be smaller."""
    samples = step_samples(spec, step)
    size = spec.micro_batch_size
    return tuple(
        Microbatch(MicrobatchIndex(i // size), samples[i : i + size])
        for i in range(0, len(samples), size)
    )


def learning_rate_at(spec: TrainSpec, step: StepNumber) -> float:
    """Learning rate of a step, as the schedules of `transformers` with the same names.

    Warm-up is linear from 0; `linear` then falls to 0 at the last step's end, `cosine`
    follows half a cosine, `constant` stays.
    """
    if step < spec.warmup_steps:
        return spec.learning_rate * step / max(1, spec.warmup_steps)
    if spec.lr_schedule is LrSchedule.CONSTANT:
        return spec.learning_rate
    span = max(1, spec.num_steps - spec.warmup_steps)
    progress = min(1.0, (step - spec.warmup_steps) / span)
    if spec.lr_schedule is LrSchedule.LINEAR:
        return spec.learning_rate * (1.0 - progress)
    return spec.learning_rate * max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))


def clip_factor(spec: TrainSpec, grad_norm: float) -> float:
    """What gradients are multiplied by, as `torch.nn.utils.clip_grad_norm_` computes it."""
    if spec.clip_grad_norm == 0.0:
        return 1.0
    return min(1.0, spec.clip_grad_norm / (grad_norm + 1e-6))
