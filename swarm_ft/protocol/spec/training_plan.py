"""Samples, microbatches and learning rate of each step. Pure."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from swarm_ft.ids import MicrobatchIndex, SampleId, StepNumber
from swarm_ft.protocol.spec.microbatch import Microbatch
from swarm_ft.protocol.spec.quality import measures_at
from swarm_ft.protocol.spec.run_spec import (
    EvalStrategy,
    LrSchedule,
    SaveStrategy,
    TrainSpec,
)

NEVER = StepNumber(1 << 62)
"""Step later than every step, for a sample that no step visits any more."""


# ---- a permutation of 0..n-1 that is drawn from a salt and not stored
#
# It is a Feistel network (Luby and Rackoff 1988) over pairs (l, r) of numbers below `side`, the
# root of n or more: a round maps them to (r, l + F(r) mod side), and F is a table of random
# numbers. A number past the last element is permuted again until it is not (Black and Rogaway
# 2002). So any element's place is computed alone, both ways, from integers only: the same on every
# machine.

Numbers = npt.NDArray[np.int64]
_Pairs = npt.NDArray[np.uint32]

ROUNDS = 6
MAX_SIZE = 1 << 30
"""Largest size: a pair's number is a uint32, and so is a sum of two."""
_MIN_SIDE = 16
"""Least side: with fewer pairs than 256 some permutations come up far too often."""
_PIECE = 1 << 15
"""Elements at a time: their numbers stay in a processor's cache, and memory is bounded."""


class Permutation:
    """A permutation of `size` elements.

    Args:
        size: Number of elements, from 1 to MAX_SIZE.
        salt: Bytes that the permutation is drawn from.
    """

    def __init__(self, size: int, salt: bytes) -> None:
        self.size = size
        self._side = max(_MIN_SIDE, math.isqrt(size - 1) + 1)
        drawn = hashlib.shake_128(salt).digest(4 * ROUNDS * self._side)
        # The remainder favours small numbers by less than side / 2^32: one in 100,000.
        numbers = np.frombuffer(drawn, "<u4") % np.uint32(self._side)
        self._tables = numbers.reshape(ROUNDS, self._side)

    def at(self, places: Numbers) -> Numbers:
        """Return the elements at these places, int64 [n] each; places lie below `size`."""
        return self._mapped(places, is_inverse=False)

    def places_of(self, elements: Numbers) -> Numbers:
        """Return the places of these elements: the inverse of `at`."""
        return self._mapped(elements, is_inverse=True)

    def _mapped(self, numbers: Numbers, *, is_inverse: bool) -> Numbers:
        network = self._backwards if is_inverse else self._forwards
        mapped = np.empty(len(numbers), np.int64)
        for start in range(0, len(numbers), _PIECE):
            found = network(numbers[start : start + _PIECE].astype(np.uint32))
            outside = np.flatnonzero(found >= self.size)
            while len(outside):
                found[outside] = network(found[outside])
                outside = outside[found[outside] >= self.size]
            mapped[start : start + _PIECE] = found
        return mapped

    def _forwards(self, numbers: _Pairs) -> _Pairs:
        side = np.uint32(self._side)
        left, right = np.divmod(numbers, side)
        for table in self._tables:
            left += table.take(right)
            np.minimum(left, left - side, out=left)  # the difference wraps if it is below 0
            left, right = right, left
        return left * side + right

    def _backwards(self, numbers: _Pairs) -> _Pairs:
        side = np.uint32(self._side)
        left, right = np.divmod(numbers, side)
        for table in self._tables[::-1]:
            left, right = right, left
            left -= table.take(right)
            np.minimum(left, left + side, out=left)
        return left * side + right


# ---- samples of steps


@lru_cache(maxsize=4)
def _order_of(num_samples: int, seed: int, epoch: int) -> Permutation:
    """Return the order of a shuffled epoch, whose tables have the root of the samples' number."""
    return Permutation(num_samples, f"{seed}/{epoch}".encode())


def step_samples(spec: TrainSpec, step: StepNumber) -> tuple[SampleId, ...]:
    """Return the samples of a step; batches do not cross epochs, so a step visits none twice.

    An epoch visits samples in their order in the file, or in one that is drawn from the seed.
    """
    epoch, position = divmod(step, spec.steps_per_epoch)
    start = position * spec.batch_size
    samples = np.arange(start, min(start + spec.batch_size, spec.num_samples))
    if spec.shuffle:
        samples = _order_of(spec.num_samples, spec.seed, epoch).at(samples)
    return tuple(SampleId(sample) for sample in samples.tolist())


class VisitOrder:
    """Next visits of samples, computed anew at each call without state."""

    def __init__(self, spec: TrainSpec) -> None:
        self._spec = spec

    def next_visit(self, sample: SampleId, after_step: int) -> StepNumber:
        """Return the first step after this one that visits the sample, `NEVER` if none does."""
        return StepNumber(int(self.next_visits(np.array([sample]), after_step)[0]))

    def next_visits(self, samples: Numbers, after_step: int) -> Numbers:
        """Return the next visits of many samples, int64 [n] each; -1 stands before the first step.

        A held-out sample is visited at evaluations, after the last step too; one that the run does
        not have, never.
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
        is_held_out = (samples >= self._spec.num_samples) & (samples < self._spec.num_names)
        visits[is_held_out] = next_evaluation(self._spec, first)
        return visits

    def _steps(self, samples: Numbers, epoch: int) -> Numbers:
        """Return the step at which an epoch visits each of these samples."""
        spec = self._spec
        places = samples
        if spec.shuffle:
            places = _order_of(spec.num_samples, spec.seed, epoch).places_of(samples)
        return epoch * spec.steps_per_epoch + places // spec.batch_size


def step_microbatches(spec: TrainSpec, step: StepNumber) -> tuple[Microbatch, ...]:
    """Return the step's samples in microbatches; an epoch's last one may be smaller."""
    samples = step_samples(spec, step)
    size = spec.micro_batch_size
    return tuple(
        Microbatch(MicrobatchIndex(i // size), samples[i : i + size])
        for i in range(0, len(samples), size)
    )


# ---- evaluation: held-out samples pass the stages forward alone, in idle time

MAX_EVAL_BATCH = 32
"""Samples of an evaluated microbatch, a few of which fit into a boundary's window."""


def evaluates_at(spec: TrainSpec, step: StepNumber) -> bool:
    """Whether the weights after `step` steps are evaluated: the first and last in any case."""
    if spec.eval_strategy is EvalStrategy.NO or not spec.num_eval_samples:
        return False
    every = _steps_between_evaluations(spec)
    return step in (0, spec.num_steps) or (every > 0 and step % every == 0)


def next_evaluation(spec: TrainSpec, first: int) -> StepNumber:
    """Return the first evaluation at or after a step; `NEVER` if there is none."""
    if first > spec.num_steps or not evaluates_at(spec, StepNumber(0)):
        return NEVER
    every = _steps_between_evaluations(spec)
    following = -(-first // every) * every if every else spec.num_steps * bool(first)
    return StepNumber(min(following, spec.num_steps))


def num_evaluations(spec: TrainSpec) -> int:
    """Return the number of evaluations of the whole run."""
    if not evaluates_at(spec, StepNumber(0)):
        return 0
    every = _steps_between_evaluations(spec)
    between = (spec.num_steps - 1) // every if every else 0
    return 2 + between


def _steps_between_evaluations(spec: TrainSpec) -> int:
    """Return the steps between evaluations; 0: only before the first step and after the last."""
    is_epoch = spec.eval_strategy is EvalStrategy.EPOCH
    return spec.steps_per_epoch if is_epoch else spec.eval_steps


def saves_at(spec: TrainSpec, step: StepNumber) -> bool:
    """Whether a snapshot is taken of the weights after `step` steps."""
    if not spec.takes_snapshots or not step:
        return False
    is_epoch = spec.save_strategy is SaveStrategy.EPOCH
    return step % (spec.steps_per_epoch if is_epoch else spec.save_steps) == 0


def evaluation_microbatches(spec: TrainSpec, first: int) -> tuple[Microbatch, ...]:
    """Return all held-out samples, pass after pass, in microbatches numbered from `first` on."""
    size = min(spec.micro_batch_size, MAX_EVAL_BATCH)
    groups = [
        range(start, min(start + size, stop))
        for stop in eval_stops(spec)
        for start in range(stop - spec.num_eval_samples, stop, size)
    ]
    return tuple(
        Microbatch(MicrobatchIndex(first + place), tuple(map(SampleId, group)))
        for place, group in enumerate(groups)
    )


def shadow_microbatches(
    spec: TrainSpec, samples: Sequence[SampleId], first: int
) -> tuple[Microbatch, ...]:
    """Return training samples by their shadows' names, in microbatches numbered from `first`."""
    size, shadows = min(spec.micro_batch_size, MAX_EVAL_BATCH), [*map(spec.shadow_of, samples)]
    return tuple(
        Microbatch(MicrobatchIndex(first + place), tuple(shadows[start : start + size]))
        for place, start in enumerate(range(0, len(shadows), size))
    )


def casts_shadows(spec: TrainSpec, step: StepNumber) -> bool:
    """Whether a step measures the cost of compression."""
    return spec.quality > 0 and step < spec.num_steps and measures_at(step)


def eval_stops(spec: TrainSpec) -> tuple[int, ...]:
    """Return the end of each pass's range of samples."""
    passes = range(1, len(spec.eval_passes) + 1)
    return tuple(spec.num_samples + number * spec.num_eval_samples for number in passes)


def learning_rate_at(spec: TrainSpec, step: StepNumber) -> float:
    """Return the learning rate of a step, as the schedules of `transformers` with the same names.

    Warm-up is linear from 0; `linear` then falls to 0 at the last step's end, `cosine` follows half
    a cosine, `constant` stays.
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
    """Return the factor of gradients, as `torch.nn.utils.clip_grad_norm_` computes it."""
    if spec.clip_grad_norm == 0.0:
        return 1.0
    return min(1.0, spec.clip_grad_norm / (grad_norm + 1e-6))
