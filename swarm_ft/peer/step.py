"""A step at one stage: receives samples, computes the schedule's tasks, sends tensors.

The schedule decides, and the engine computes in the compute thread. This module moves tensors
between them and the boundaries.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from swarm_ft.base import failpoints
from swarm_ft.codec.spec import Direction
from swarm_ft.errors import BuffersLost, MalformedMessage, OutOfTurn
from swarm_ft.ids import MicrobatchIndex, PeerId, SampleId, StepNumber
from swarm_ft.peer.boundary.coder import FrameCoder
from swarm_ft.peer.boundary.end import Boundary
from swarm_ft.peer.context import PeerContext, run_in, run_uncancellable
from swarm_ft.protocol.machines.pipeline import PARTS, StageSchedule, StepDone, Task, TaskKind
from swarm_ft.protocol.messages.boundary import Frame, FrameKey
from swarm_ft.protocol.messages.control import EvalSum, PlanStep
from swarm_ft.protocol.messages.reports import Traffic, summed_by_boundary
from swarm_ft.protocol.messages.timeline import SpanKind
from swarm_ft.protocol.spec.microbatch import Microbatch
from swarm_ft.protocol.spec.run_spec import BYTES_PER_TOKEN, TrainSpec
from swarm_ft.protocol.spec.sample_rows import CONTEXT, counts_of, rows_in, samples_in
from swarm_ft.protocol.spec.tasks import CausalLm, sum_counts
from swarm_ft.protocol.spec.tasks import Task as Learned
from swarm_ft.stage.base import Engine, Lengths, LossAndCounts, is_packed

# ---- the progress of the open step at this peer, until the step commits


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Loss and counts of a held-out microbatch, summed over its targets."""

    samples: tuple[SampleId, ...]
    result: LossAndCounts
    num_targets: int


@dataclass(slots=True)
class StepProgress:
    """Progress of a step at this peer.

    If an attempt ends before its step, the next attempt resumes this progress. Microbatches whose
    gradients are summed are not computed again, and their messages are sent again to neighbours
    that lack them. Unfinished microbatches run again from the same buffers. For held-out
    microbatches only the losses at the last stage remain.

    Attributes:
        step: Number of the step.
        done: Microbatches whose gradients the engine has summed, with their samples.
        loss_sum: Loss of these microbatches, at the last stage.
        num_targets: Targets that `loss_sum` is summed over.
        evaluated: Losses of held-out microbatches, at the last stage.
        shadowed: Loss of the first microbatch as it was trained, at the last stage, if the step
            also computes it without compression.
        gradient: Sum of the gradients, float32 [n], once the engine holds the sum of all replicas;
            None before.
    """

    step: StepNumber
    done: dict[MicrobatchIndex, tuple[SampleId, ...]] = field(default_factory=dict)
    loss_sum: float = 0.0
    num_targets: int = 0
    evaluated: dict[MicrobatchIndex, Evaluation] = field(default_factory=dict)
    shadowed: EvalSum | None = None
    gradient: Tensor | None = None
    _traffic: tuple[Traffic, ...] = ()
    _sent: dict[tuple[Direction, SampleId], Tensor | Frame] = field(default_factory=dict)

    @property
    def samples(self) -> frozenset[SampleId]:
        """Samples of the finished microbatches."""
        return frozenset(sample for samples in self.done.values() for sample in samples)

    def check(self, done: Iterable[Microbatch]) -> None:
        """Check that exactly these microbatches are finished here.

        Raises:
            OutOfTurn: Other microbatches are finished.
        """
        planned = {batch.index: batch.samples for batch in done}
        done_here = self.done | {index: one.samples for index, one in self.evaluated.items()}
        if planned != done_here:
            raise OutOfTurn(
                f"step {self.step}: expected the plan to count microbatches {sorted(done_here)} as "
                f"done here, got {sorted(planned)}"
            )

    def eval_sums(self, train: TrainSpec) -> tuple[EvalSum, ...]:
        """Return the losses of each pass over the held-out samples; empty if there are none."""
        found = [one for one in self.evaluated.values() if not train.is_shadow(one.samples[0])]
        passes = [
            [one for one in found if train.pass_of(one.samples[0]) == place]
            for place in range(len(train.eval_passes))
        ]
        # The order of arrival does not matter: `fsum` is exact.
        return tuple(
            EvalSum(
                loss_sum=math.fsum(one.result.loss_sum for one in of_pass),
                num_targets=sum(one.num_targets for one in of_pass),
                counts=sum_counts(one.result.counts for one in of_pass),
            )
            for of_pass in (passes if found else ())
        )

    def shadow_sum(self, train: TrainSpec) -> EvalSum | None:
        """Return the loss of shadow microbatches; None if there is none."""
        found = [one for one in self.evaluated.values() if train.is_shadow(one.samples[0])]
        if not found:
            return None
        return EvalSum(
            loss_sum=math.fsum(one.result.loss_sum for one in found),
            num_targets=sum(one.num_targets for one in found),
        )

    def keep(self, sent: Iterable[tuple[FrameKey, Tensor | Frame]]) -> None:
        """Save what an attempt that ended sent, or queued, of the finished microbatches."""
        for key, value in sent:
            if key.microbatch in self.done:
                self._sent[key.direction, key.sample] = value

    def sent(self, key: FrameKey) -> Tensor | Frame:
        """Return what an earlier attempt sent, or queued, of a sample.

        Raises:
            OutOfTurn: There is nothing.
        """
        found = self._sent.get((key.direction, key.sample))
        if found is None:
            raise OutOfTurn(f"frame {key}: nothing of it is stored here")
        return found

    def count(self, traffic: Iterable[Traffic]) -> tuple[Traffic, ...]:
        """Add traffic, and return the sum of the step over all attempts."""
        self._traffic = summed_by_boundary((*self._traffic, *traffic))
        return self._traffic


READ_AHEAD = 2
"""Microbatches whose cached inputs are read ahead of their computation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRoutes:
    """The microbatches of a step that pass this peer and are not finished here.

    Attributes:
        stage_index: Index of this peer's stage.
        batches: All these microbatches, in the order of computation.
        upstream: Boundary through which each arrives; empty at the first stage, and without
            microbatches whose inputs are cached here.
        downstream: Boundary through which each leaves; empty at the last stage.
        input_cache: Coder that reads inputs cached here; None if none are.
        held_out: Microbatches that are only evaluated.
        shadowed: Whether the step's first microbatch is computed without compression as well.
        task: Task of the run, which determines the labels.
    """

    stage_index: int
    batches: Mapping[MicrobatchIndex, Microbatch]
    upstream: Mapping[MicrobatchIndex, Boundary]
    downstream: Mapping[MicrobatchIndex, Boundary]
    input_cache: FrameCoder | None = None
    held_out: frozenset[MicrobatchIndex] = frozenset()
    shadowed: bool = False
    task: Learned = CausalLm()  # noqa: RUF009 - frozen, and without fields


class StageStep:
    """The state of one step at this peer.

    Args:
        plan: Plan of the step, with tokens at the first and the last stage.
        routes: Microbatches that pass here.
        progress: Progress of the step here, updated by this object.
        engine: Engine of the stage, used in the compute thread only.
        context: Context of the peer.
        max_held: Microbatches that may hold memory at once.

    Attributes:
        parts_begun: Parts of all microbatches begun so far, see `pipeline.PARTS`.

    Raises:
        MalformedMessage: The plan lacks rows that this stage needs, or has rows that are no
            samples.
    """

    def __init__(
        self,
        plan: PlanStep,
        routes: StepRoutes,
        progress: StepProgress,
        *,
        engine: Engine,
        context: PeerContext,
        max_held: int,
    ) -> None:
        self._plan = plan
        self._routes = routes
        self._progress = progress
        self._engine = engine
        self._context = context
        self._schedule = StageSchedule(
            is_first=engine.is_first,
            is_last=engine.is_last,
            microbatches=[index for index in routes.batches if index not in routes.held_out],
            max_held=max_held,
            held_out=[index for index in routes.batches if index in routes.held_out],
            has_backward=engine.has_backward,
        )
        # The queue is bounded by the step's plan: other frames, and repeated ones, are refused
        # before.
        self._arrivals: asyncio.Queue[tuple[FrameKey, Tensor | None]] = asyncio.Queue()
        self._consumed: set[FrameKey] = set()
        self._samples: dict[FrameKey, Tensor] = {}
        self._inputs: dict[MicrobatchIndex, Tensor] = {}
        self._gradients: dict[MicrobatchIndex, Tensor] = {}
        self._loss_sums: dict[MicrobatchIndex, float] = {}
        self._lengths = plan.length_of
        if plan.documents and not isinstance(routes.task, CausalLm):
            raise MalformedMessage(f"plan of step {plan.step}: expected one document a sample")
        needs_tokens = engine.is_first or engine.is_last
        batches = routes.batches.values() if needs_tokens else ()
        entering = [b for b in routes.batches.values() if 0 < b.entry == routes.stage_index]
        self._entered = frozenset(batch.index for batch in entering)
        self._unread = deque(entering)
        self._rows = {batch.index: _rows_of(plan, batch, routes.task) for batch in batches}
        self.parts_begun = 0
        self._num_before_backward = sum(index not in routes.held_out for index in routes.batches)
        self._compute_s = self._evaluate_s = 0.0
        self._task_began_s: float | None = None

    @property
    def progress(self) -> StepProgress:
        """Progress of the step here."""
        return self._progress

    @property
    def compute_s(self) -> float:
        """Seconds that tasks took so far, the running one included, without tasks of other runs."""
        began_s = self._task_began_s
        return self._compute_s + (self._busy_s - began_s if began_s is not None else 0.0)

    @property
    def train_s(self) -> float:
        """Seconds of `compute_s` that trained; valid once the step is finished here."""
        return self._compute_s - self._evaluate_s

    @property
    def is_computing(self) -> bool:
        """Whether a task is running."""
        return self._task_began_s is not None

    @property
    def waits_for(self) -> tuple[PeerId, ...]:
        """Neighbours whose samples the next tasks need."""
        found: dict[PeerId, None] = {}
        for task in self._schedule.lacks:
            is_forward = task.kind in (TaskKind.FORWARD, TaskKind.EVALUATE)
            direction = Direction.FORWARD if is_forward else Direction.BACKWARD
            batch = self._routes.batches[task.microbatch]
            routed = self._routes.upstream if is_forward else self._routes.downstream
            boundary = routed.get(batch.index)  # None if the inputs are cached here
            if boundary is not None and boundary.lacks(
                self._key(batch, sample, direction) for sample in batch.samples
            ):
                found[boundary.peer_id] = None
        return tuple(found)

    def expected(self, boundary: Boundary, direction: Direction) -> Mapping[FrameKey, int]:
        """Return the keys and tokens of all frames of this step that arrive over a boundary."""
        if direction is Direction.BACKWARD and not self._engine.has_backward:
            return {}
        routes = (
            self._routes.upstream if direction is Direction.FORWARD else self._routes.downstream
        )
        return {
            self._key(self._routes.batches[index], sample, direction): self._lengths[sample]
            for index, passed in routes.items()
            if passed is boundary
            if direction is Direction.FORWARD or index not in self._routes.held_out
            for sample in self._routes.batches[index].samples
        }

    def on_arrival(self, key: FrameKey, value: Tensor) -> None:
        """Queue a decoded sample of a neighbour; float32 [tokens, channels]."""
        self._arrivals.put_nowait((key, value))

    def on_consumed(self, key: FrameKey) -> None:
        """Queue the notice that a neighbour has consumed a held-out sample of this peer."""
        self._arrivals.put_nowait((key, None))

    async def run(self) -> None:
        """Compute everything of this step; the engine then holds the summed gradients.

        Microbatches that had their backward are completed even if the step is cancelled. That needs
        no other peer, and they are not computed again.

        Raises:
            NonFinite: An activation, a loss or a gradient is inf or NaN.
            BuffersLost: A cached input of a sample is missing.
        """
        try:
            await self._run()
        finally:
            await run_uncancellable(asyncio.create_task(self._complete()))

    async def _run(self) -> None:
        pending = self._schedule.begin() or await self._first_inputs()
        while True:
            while isinstance(pending, Task):
                # Cancelling between the halves of a backward would leave a useless gradient.
                await run_uncancellable(asyncio.create_task(self._compute(pending)))
                while not self._arrivals.empty():
                    self._assemble(*self._arrivals.get_nowait())
                await self._read_ahead()
                pending = self._schedule.computed(pending)
            if isinstance(pending, StepDone):
                return
            pending = await self._wait()

    async def _read_ahead(self) -> Task | StepDone | None:
        """Read cached inputs, a few microbatches ahead of their computation."""
        pending = None
        while self._unread and len(self._entered & self._inputs.keys()) < READ_AHEAD:
            batch = self._unread.popleft()
            self._inputs[batch.index] = _stacked(
                [await self._read_cached(one) for one in batch.samples]
            )
            pending = self._schedule.input_ready(batch.index) or pending
        return pending

    async def _read_cached(self, sample: SampleId) -> Tensor:
        value = None
        if self._routes.input_cache is not None:
            read, tokens = self._routes.input_cache.read_cached_input, self._lengths[sample]
            value = await run_in(self._context.codecs, read, sample, tokens)
        if value is None:
            raise BuffersLost(
                f"sample {sample}: the cached output of frozen stages is missing here"
            )
        return value

    async def _wait(self) -> Task | StepDone | None:
        """Wait for arrivals until the schedule has a task or the step is done."""
        timeline = self._context.timeline
        begin_s, pending = timeline.now_s(), None
        while pending is None:
            pending = self._assemble(*await self._arrivals.get())
        if isinstance(pending, Task):
            is_gradient = pending.kind is TaskKind.BACKWARD
            kind = SpanKind.WAIT_GRADIENT if is_gradient else SpanKind.WAIT_INPUT
            timeline.add(kind, begin_s, microbatch=pending.microbatch)
        return pending

    async def _first_inputs(self) -> Task | StepDone | None:
        pending = await self._read_ahead()
        if self._engine.is_first:
            for index, rows in self._rows.items():
                self._inputs[index] = rows.token_ids
                pending = self._schedule.input_ready(index) or pending
        return pending

    def _assemble(self, key: FrameKey, value: Tensor | None) -> Task | StepDone | None:
        """Store an arrived sample or acknowledgement.

        Notify the schedule of a complete microbatch.
        """
        batch = self._routes.batches[key.microbatch]
        keys = [self._key(batch, sample, key.direction) for sample in batch.samples]
        if value is None:
            self._consumed.add(key)
            return self._schedule.output_taken(batch.index) if self._consumed >= set(keys) else None
        self._samples[key] = value
        if any(k not in self._samples for k in keys):
            return None
        stacked = _stacked([self._samples.pop(k) for k in keys])
        if key.direction is Direction.FORWARD:
            self._inputs[batch.index] = stacked
            return self._schedule.input_ready(batch.index)
        self._gradients[batch.index] = stacked
        return self._schedule.gradient_ready(batch.index)

    async def _compute(self, task: Task) -> None:
        index, timed = task.microbatch, self._context.timeline.timed
        is_all = task.kind is TaskKind.FORWARD and not self._engine.has_backward
        self.parts_begun += PARTS if is_all else task.kind.num_parts
        self._task_began_s = self._busy_s
        lengths = self._lengths_in(index)
        match task.kind:
            case TaskKind.FORWARD:
                failpoints.reached("before-forward")
                x = self._inputs.pop(index)
                forward = timed(SpanKind.FORWARD, self._engine.forward, index)
                output = await run_in(self._context.compute, forward, index, x, lengths)
                self._send(index, output, Direction.FORWARD)
                if not self._engine.has_backward:
                    self._num_before_backward -= 1
                    self._loss_sums[index] = 0.0
                    await self._count(index)
            case TaskKind.BACKWARD:
                failpoints.reached("before-backward")
                gradient = self._gradients.pop(index)
                failpoints.reached_meanwhile("mid-backward")
                backward = timed(SpanKind.BACKWARD, self._engine.backward, index)
                result = await run_in(self._context.compute, backward, index, gradient)
                self._finish_backward(index, 0.0, result)
            case TaskKind.FORWARD_BACKWARD:
                failpoints.reached("before-forward")
                x, labels = self._inputs.pop(index), self._rows[index].labels
                failpoints.reached_meanwhile("mid-backward")
                both = timed(SpanKind.FORWARD_BACKWARD, self._engine.forward_backward, index)
                last = await run_in(self._context.compute, both, index, x, labels, lengths)
                self._finish_backward(index, last.loss_sum, last.input_gradient)
            case TaskKind.WEIGHTS:
                failpoints.reached_meanwhile("mid-weights")
                await self._count(index)
            case TaskKind.EVALUATE:
                await self._evaluate(index)
        before_s, self._compute_s, self._task_began_s = self._compute_s, self.compute_s, None
        if task.kind is TaskKind.EVALUATE:
            self._evaluate_s += self._compute_s - before_s

    @property
    def _busy_s(self) -> float:
        """Time without the seconds in which the compute thread worked for other runs."""
        return self._context.clock.now_s() - self._context.waited_s

    def _lengths_in(self, index: MicrobatchIndex) -> Lengths:
        """Return the tokens of a microbatch's samples; None if they are equal and unpacked."""
        lengths = _lengths_of(self._plan, self._routes.batches[index].samples)
        return lengths if is_packed(lengths) or len(set(lengths)) > 1 else None

    async def _evaluate(self, index: MicrobatchIndex) -> None:
        """Compute a held-out microbatch: send it on, or at the last stage store its loss."""
        batch, x = self._routes.batches[index], self._inputs.pop(index)
        lengths = self._lengths_in(index)
        timed = self._context.timeline.timed
        failpoints.reached_meanwhile("mid-evaluation")
        if self._engine.is_last:
            evaluate, rows = (
                timed(SpanKind.FORWARD, self._engine.evaluate, index),
                self._rows[index],
            )
            judged = await run_in(self._context.background, evaluate, x, rows.labels, lengths)
            self._progress.evaluated[index] = Evaluation(
                samples=batch.samples, result=judged, num_targets=rows.num_targets
            )
        else:
            infer = timed(SpanKind.FORWARD, self._engine.infer, index)
            output = await run_in(self._context.background, infer, x, lengths)
            self._send(index, output, Direction.FORWARD)
        if index in self._routes.upstream:
            for sample in batch.samples:
                key = self._key(batch, sample, Direction.FORWARD)
                self._routes.upstream[index].acknowledge_consumed(key)

    def _finish_backward(
        self, index: MicrobatchIndex, loss_sum: float, input_gradient: Tensor | None
    ) -> None:
        self._num_before_backward -= 1
        self._loss_sums[index] = loss_sum
        if input_gradient is not None:
            self._send(index, input_gradient, Direction.BACKWARD)

    async def _count(self, index: MicrobatchIndex) -> None:
        """Compute the remaining weight gradients of a microbatch and add its sums, once."""
        loss_sum, timed = self._loss_sums.pop(index), self._context.timeline.timed
        compute = timed(SpanKind.WEIGHTS, self._engine.weight_gradients, index)
        # After the last backward all peers wait for these gradients, so that they are no longer
        # background work.
        pool = self._context.background if self._num_before_backward > 0 else self._context.compute
        await run_in(pool, compute, index)
        self._progress.loss_sum += loss_sum
        if self._engine.is_last:
            num_targets = self._rows[index].num_targets
            self._progress.num_targets += num_targets
            if index == 0 and self._routes.shadowed:
                self._progress.shadowed = EvalSum(loss_sum=loss_sum, num_targets=num_targets)
        self._progress.done[index] = self._routes.batches[index].samples

    async def _complete(self) -> None:
        """Finish all microbatches that had their backward."""
        for index in list(self._loss_sums):
            await self._count(index)

    def _send(self, index: MicrobatchIndex, values: Tensor, direction: Direction) -> None:
        batch, is_forward = self._routes.batches[index], direction is Direction.FORWARD
        boundary = (self._routes.downstream if is_forward else self._routes.upstream)[index]
        is_done = self._routes.stage_index + (1 if is_forward else -1) in batch.done
        for row, sample in enumerate(batch.samples):
            key = self._key(batch, sample, direction)
            own = values[row, : self._lengths[sample]]  # without the padding
            if is_done:
                boundary.mark_delivered(key, own)
            else:
                boundary.send(key, own)

    def _key(self, batch: Microbatch, sample: SampleId, direction: Direction) -> FrameKey:
        return FrameKey(self._plan.attempt, self._plan.step, batch.index, sample, direction)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rows:
    """A microbatch's samples, padded to the longest; int64 [B, T] each. See `sample_rows`."""

    token_ids: Tensor
    labels: Tensor
    num_targets: int


def _lengths_of(plan: PlanStep, samples: Sequence[SampleId]) -> list[int | tuple[int, ...]]:
    length_of = plan.length_of
    return [plan.documents.get(sample) or length_of[sample] for sample in samples]


def _rows_of(plan: PlanStep, batch: Microbatch, learned: Learned) -> _Rows:
    expected_lengths = _lengths_of(plan, batch.samples)
    try:
        data = [plan.tokens[sample] for sample in batch.samples]
        rows = rows_in(data, len(data[0]) // BYTES_PER_TOKEN)
    except (KeyError, ValueError) as error:
        raise MalformedMessage(f"plan of step {plan.step}: tokens missing or uneven") from error
    # The plan's rows are checked without the size of the vocabulary, which the engine checks.
    refused, counts = learned.refusal(rows, CONTEXT), counts_of(rows)
    documents = counts.documents or ((),) * len(rows)
    found = [one or length for one, length in zip(documents, counts.lengths, strict=True)]
    if refused is not None or found != expected_lengths:
        why = refused[1] if refused else f"lengths {expected_lengths} of {found}"
        raise MalformedMessage(f"plan of step {plan.step}, microbatch {batch.index}: {why}")
    samples = samples_in(rows)
    return _Rows(
        token_ids=torch.from_numpy(samples.token_ids),
        labels=torch.from_numpy(samples.labels),
        num_targets=counts.num_targets,
    )


def _stacked(samples: list[Tensor]) -> Tensor:
    """Stack [tokens, channels] tensors to [samples, tokens, channels], padded with zeros.

    A single tensor is not copied.
    """
    return samples[0][None] if len(samples) == 1 else pad_sequence(samples, batch_first=True)
