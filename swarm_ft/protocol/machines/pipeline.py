"""Which microbatch a stage computes next: 1F1B with split backwards, as a state machine.

A backward is cut in two: the gradient of the input, which the stage upstream waits for, and those
of the weights, which nobody waits for and which fill the time in which the stage would idle (Qi et
al. 2023, arXiv 2401.10241). What somebody waits for goes first; each kind of task runs in the
order of the microbatches, so that gradients are summed in one order however frames arrive. No
tensor, no clock.

A microbatch holds memory from its forward until its weights' gradients are done. At least as many
are held as plain 1F1B needs, links counted as stages, since they take time as one (Narayanan et
al. 2021, arXiv 2104.04473, section 2.2, with links); where links take longer than stages, more are
of use, and memory is their bound. Whatever bounds the stages have, no order of arrivals blocks the
pipeline: wherever the oldest microbatch that is not done comes, nothing is held before it.

Held-out microbatches, which are only evaluated, go forward alone and hold nothing here. They are
computed in the time in which the stage would idle: whatever trains goes before them. Nothing comes
back of them that would hold the stages in front; so a stage goes on with the next once the stage
behind has computed with all but a few of those before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from swarm_ft.errors import OutOfTurn
from swarm_ft.ids import MicrobatchIndex


class TaskKind(Enum):
    """What the compute thread is asked to do."""

    FORWARD = auto()
    BACKWARD = auto()
    """The gradient of the input."""
    FORWARD_BACKWARD = auto()
    """The last stage: forward, loss and backward in one go."""
    WEIGHTS = auto()
    """The gradients of the weights; the microbatch is done then."""
    EVALUATE = auto()
    """The forward of a held-out microbatch; at the last stage, its loss as well."""

    @property
    def num_parts(self) -> int:
        """How many of a microbatch's `PARTS` it is."""
        return 2 if self is TaskKind.FORWARD_BACKWARD else 1


PARTS = 3
"""Of the work on a microbatch at any stage, about equal: forward, backward and weights."""
KEPT_FREE = 2
"""Microbatches whose memory is left to the tasks themselves."""
EVALUATED_AHEAD = 2
"""Held-out microbatches on their way to the stage behind, or waiting there."""
ALLOCATED = 1.25
"""Bytes that an allocator takes for one that is held, at most: there are gaps between tensors."""


def least_held(num_stages: int, stage_index: int) -> int:
    """Microbatches that a stage holds in plain 1F1B: twice the stages behind it, and one."""
    return 2 * (num_stages - 1 - stage_index) + 1


def most_held(least: int, *, room_bytes: int, microbatch_bytes: int) -> int:
    """How many microbatches a stage may hold at once.

    Args:
        least: of them, see `least_held`; no fewer will do.
        room_bytes: memory that is left for them.
        microbatch_bytes: what each holds in tensors; 0 if that is not known yet.
    """
    if not microbatch_bytes:
        return least
    return max(least, int(room_bytes / (ALLOCATED * microbatch_bytes)) - KEPT_FREE)


@dataclass(frozen=True, slots=True)
class Task:
    """One microbatch's computation at this stage."""

    kind: TaskKind
    microbatch: MicrobatchIndex


@dataclass(frozen=True, slots=True)
class StepDone:
    """All microbatches of the step went through this stage: both ways, but those held out."""


class StageSchedule:
    """What one peer computes during one step; at most one task is out at a time.

    Args:
        is_first: whether this is the stage in front, which nobody waits for a backward of.
        is_last: whether it is the last, whose forward and backward are one.
        has_backward: whether gradients come back to it. Without, a microbatch is done with its
            forward, and nothing of it is held.
        microbatches: those that pass this peer, in the order in which they are computed.
        max_held: how many of them may hold memory at once; 1 or more.
        held_out: those that are only evaluated, in the order in which they are computed.
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
        """The step begins; it is done at once if no microbatch passes this peer."""
        return self._next()

    def input_ready(self, microbatch: MicrobatchIndex) -> Task | StepDone | None:
        """All samples of a microbatch's input are here."""
        self._check(microbatch)
        self._inputs.add(microbatch)
        return self._next()

    def gradient_ready(self, microbatch: MicrobatchIndex) -> Task | StepDone | None:
        """All samples of the gradient of a microbatch's output are here."""
        self._check(microbatch)
        self._gradients.add(microbatch)
        return self._next()

    def output_taken(self, microbatch: MicrobatchIndex) -> Task | StepDone | None:
        """The stage behind has computed with the output of a held-out microbatch."""
        self._check(microbatch)
        self._taken.add(microbatch)
        return self._next()

    def computed(self, task: Task) -> Task | StepDone | None:
        """The task that was handed out is finished.

        Raises:
            OutOfTurn: another task was handed out.
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
        """What would be computed next if its input, or gradient, were here; nothing if one is."""
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
        """Of what trains. The stages around wait for the first two; the others make room."""
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
