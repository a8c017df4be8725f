"""Schedule of one stage's microbatches: 1F1B with split backwards, as a state machine.

A backward has two parts: the gradient of the input, which the stage upstream waits for, and those
of the weights, which nobody waits for and which fill idle time (Qi et al. 2023, arXiv 2401.10241).
Work that another stage waits for goes first. Each kind of task runs in the order of the
microbatches, so that gradients are summed in one order however frames arrive. The schedule knows no
tensor and no clock.

A microbatch holds memory from its forward until its weights' gradients are done. A stage may hold
at least as many as plain 1F1B needs, links counted as stages, since they take as much time
(Narayanan et al. 2021, arXiv 2104.04473, section 2.2, with links). Where links take longer than
stages, more are useful, up to the memory. Whatever bounds the stages have, no order of arrivals
blocks the pipeline: no stage holds anything before the oldest microbatch that is not done.

Held-out microbatches, which are only evaluated, go forward alone and hold nothing here. A stage
computes them when it would idle, after everything that trains. Nothing comes back from them that
would limit the stages in front. So a stage computes the next one once the stage behind has finished
all but a few of those before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from swarm_ft.errors import OutOfTurn
from swarm_ft.ids import MicrobatchIndex


class TaskKind(Enum):
    """Kind of a task of the compute thread."""

    FORWARD = auto()
    BACKWARD = auto()
    """Gradient of the input."""
    FORWARD_BACKWARD = auto()
    """Forward, loss and backward in one go, at the last stage."""
    WEIGHTS = auto()
    """Gradients of the weights, after which the microbatch is done."""
    EVALUATE = auto()
    """Forward of a held-out microbatch; at the last stage, with its loss."""

    @property
    def num_parts(self) -> int:
        """Number of a microbatch's `PARTS` in this task."""
        return 2 if self is TaskKind.FORWARD_BACKWARD else 1


PARTS = 3
"""Parts of the work on a microbatch at any stage, about equal: forward, backward and weights."""
KEPT_FREE = 2
"""Microbatches whose memory is reserved for the tasks themselves."""
EVALUATED_AHEAD = 2
"""Held-out microbatches on their way to the stage behind, or waiting there."""
ALLOCATED = 1.25
"""Bytes that an allocator needs per byte in use, at most, since there are gaps between tensors."""


def min_microbatches(num_stages: int, stage_index: int) -> int:
    """Return the microbatches of a stage in plain 1F1B: twice the stages behind, plus one."""
    return 2 * (num_stages - 1 - stage_index) + 1


def max_microbatches(least: int, *, room_bytes: int, microbatch_bytes: int) -> int:
    """Return the microbatches that a stage may hold at once.

    Args:
        least: Microbatches at least, see `least_held`.
        room_bytes: Bytes of memory for them.
        microbatch_bytes: Bytes of tensors that each holds; 0 if unknown.
    """
    if not microbatch_bytes:
        return least
    return max(least, int(room_bytes / (ALLOCATED * microbatch_bytes)) - KEPT_FREE)


@dataclass(frozen=True, slots=True)
class Task:
    """Computation of one microbatch at this stage."""

    kind: TaskKind
    microbatch: MicrobatchIndex


@dataclass(frozen=True, slots=True)
class StepDone:
    """End of the step at this stage: all microbatches passed it, both ways if they train."""


class StageSchedule:
    """Schedule of one peer during one step; at most one task is out at a time.

    Args:
        is_first: Whether this is the first stage, whose backward nobody waits for.
        is_last: Whether it is the last one, whose forward and backward are one task.
        has_backward: Whether gradients come back to it. Without, a microbatch is done with its
            forward, and holds nothing.
        microbatches: Microbatches that pass this peer, in computing order.
        max_held: Microbatches that may hold memory at once; 1 or more.
        held_out: Microbatches that are only evaluated, in computing order.
    """

    def __init__(
        self,
        *,
        is_first: bool,
        is_last: bool,
        microbatches: Sequence[MicrobatchIndex],
        max_held: int,
        has_backward: bool = True,
        held_out: Sequence[MicrobatchIndex] = (),
    ) -> None:
        self._has_backward = has_backward
        self._held_out = held_out
        self._num_evaluated = 0
        self._taken: set[MicrobatchIndex] = set()
        self._is_first = is_first
        self._is_last = is_last
        self._microbatches = microbatches
        self._max_held = max_held
        self._inputs: set[MicrobatchIndex] = set()
        self._gradients: set[MicrobatchIndex] = set()
        self._next_forward = 0
        self._next_backward = 0
        self._next_weights = 0
        self._running: Task | None = None

    def begin(self) -> Task | StepDone | None:
        """Begin the step; it is done at once if no microbatch passes this peer."""
        return self._next()

    def input_ready(self, microbatch: MicrobatchIndex) -> Task | StepDone | None:
        """Record that all samples of a microbatch's input are present."""
        self._check(microbatch)
        self._inputs.add(microbatch)
        return self._next()

    def gradient_ready(self, microbatch: MicrobatchIndex) -> Task | StepDone | None:
        """Record that all samples of the gradient of a microbatch's output are present."""
        self._check(microbatch)
        self._gradients.add(microbatch)
        return self._next()

    def output_taken(self, microbatch: MicrobatchIndex) -> Task | StepDone | None:
        """Record that the stage behind computed with the output of a held-out microbatch."""
        self._check(microbatch)
        self._taken.add(microbatch)
        return self._next()

    def computed(self, task: Task) -> Task | StepDone | None:
        """Record that the task is finished.

        Raises:
            OutOfTurn: Another task is out.
        """
        if task != self._running:
            raise OutOfTurn(f"{task} is finished, but {self._running} was under way")
        self._running = None
        self._next_forward += task.kind in (TaskKind.FORWARD, TaskKind.FORWARD_BACKWARD)
        self._next_backward += task.kind in (TaskKind.BACKWARD, TaskKind.FORWARD_BACKWARD)
        self._next_weights += task.kind is TaskKind.WEIGHTS
        self._num_evaluated += task.kind is TaskKind.EVALUATE
        if not self._has_backward:
            self._next_backward = self._next_weights = self._next_forward
        return self._next()

    @property
    def lacks(self) -> tuple[Task, ...]:
        """Tasks that would be next with their input or gradient; empty if one is under way."""
        if self._running is not None:
            return ()
        found = []
        if self._has_room and self._next_forward < len(self._microbatches):
            found.append(TaskKind.FORWARD)
        if self._next_backward < self._next_forward:
            found.append(TaskKind.BACKWARD)
        if self._may_evaluate and self._num_evaluated < len(self._held_out):
            found.append(TaskKind.EVALUATE)
        return tuple(self._task(kind) for kind in found)

    def _check(self, microbatch: MicrobatchIndex) -> None:
        if microbatch not in self._microbatches and microbatch not in self._held_out:
            raise OutOfTurn(f"microbatch {microbatch} does not pass here in this step")

    def _next(self) -> Task | StepDone | None:
        if self._running is not None:
            return None
        is_trained = self._next_weights == len(self._microbatches)
        if is_trained and self._num_evaluated == len(self._held_out):
            return StepDone()
        kind = self._choose() or (TaskKind.EVALUATE if self._can_evaluate else None)
        if kind is None:
            return None
        self._running = self._task(kind)
        return self._running

    def _task(self, kind: TaskKind) -> Task:
        if kind is TaskKind.EVALUATE:
            return Task(kind, self._held_out[self._num_evaluated])
        return Task(kind, self._microbatches[self._position(kind)])

    def _choose(self) -> TaskKind | None:
        """Choose a task that trains: first those that other stages wait for, then the others."""
        if self._can_backward and not self._is_first:
            return TaskKind.BACKWARD
        if self._can_forward:
            return TaskKind.FORWARD_BACKWARD if self._is_last else TaskKind.FORWARD
        if self._next_weights < self._next_backward:
            return TaskKind.WEIGHTS
        return TaskKind.BACKWARD if self._can_backward else None

    @property
    def _has_room(self) -> bool:
        return self._next_forward - self._next_weights < self._max_held

    @property
    def _can_forward(self) -> bool:
        return self._has_room and self._is_in(self._inputs, self._next_forward)

    @property
    def _can_backward(self) -> bool:
        is_computed = self._next_backward < self._next_forward
        return is_computed and self._is_in(self._gradients, self._next_backward)

    @property
    def _may_evaluate(self) -> bool:
        on_their_way = self._num_evaluated - len(self._taken)
        return self._is_last or on_their_way < EVALUATED_AHEAD

    @property
    def _can_evaluate(self) -> bool:
        is_left = self._num_evaluated < len(self._held_out)
        return (
            is_left and self._may_evaluate and self._held_out[self._num_evaluated] in self._inputs
        )

    def _is_in(self, arrived: set[MicrobatchIndex], position: int) -> bool:
        return position < len(self._microbatches) and self._microbatches[position] in arrived

    def _position(self, kind: TaskKind) -> int:
        match kind:
            case TaskKind.BACKWARD:
                return self._next_backward
            case TaskKind.WEIGHTS:
                return self._next_weights
            case _:
                return self._next_forward
