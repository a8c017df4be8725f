"""Which microbatch a stage computes next: 1F1B as a state machine. No tensor, no clock.

Backward goes before forward whenever its gradient is there, and both run in the order of the
microbatches, so that gradients are summed in one order however frames arrive. The number of
forwards ahead of the first backward is bounded by the depth of the pipeline behind this stage,
each link counted as a stage of its own, since it takes time as one (Narayanan et al. 2021,
arXiv 2104.04473, section 2.2, with links).
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
    FORWARD_BACKWARD = auto()
    """The last stage: forward, loss and backward in one go."""


@dataclass(frozen=True, slots=True)
class Task:
    """One microbatch's computation at this stage."""

    kind: TaskKind
    microbatch: MicrobatchIndex


@dataclass(frozen=True, slots=True)
class StepDone:
    """All microbatches of the step went through this stage both ways."""


class StageSchedule:
    """What one peer computes during one step; at most one task is out at a time.

    Args:
        num_stages: of the pipeline.
        stage_index: this peer's stage, counted from 0.
        microbatches: those that pass this peer, in the order in which they are computed.
    """

    def __init__(
        self, *, num_stages: int, stage_index: int, microbatches: Sequence[MicrobatchIndex]
    ) -> None:
        stages_behind = num_stages - 1 - stage_index
        self._is_last = stages_behind == 0
        self._max_in_flight = 2 * stages_behind + 1
        self._microbatches = microbatches
        self._inputs: set[MicrobatchIndex] = set()
        self._gradients: set[MicrobatchIndex] = set()
        self._next_forward = 0
        self._next_backward = 0
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

    def computed(self, task: Task) -> Task | StepDone | None:
        """The task that was handed out is finished.

        Raises:
            OutOfTurn: another task was handed out.
        """
        if task != self._running:
            raise OutOfTurn(f"{task} is finished, but {self._running} was under way")
        self._running = None
        if task.kind is not TaskKind.BACKWARD:
            self._next_forward += 1
        if task.kind is not TaskKind.FORWARD:
            self._next_backward += 1
        return self._next()

    def _check(self, microbatch: MicrobatchIndex) -> None:
        if microbatch not in self._microbatches:
            raise OutOfTurn(f"microbatch {microbatch} does not pass here in this step")

    def _next(self) -> Task | StepDone | None:
        if self._running is not None:
            return None
        if self._next_backward == len(self._microbatches):
            return StepDone()
        kind = self._choose()
        if kind is None:
            return None
        position = self._next_backward if kind is TaskKind.BACKWARD else self._next_forward
        self._running = Task(kind, self._microbatches[position])
        return self._running

    def _choose(self) -> TaskKind | None:
        in_flight = self._next_forward - self._next_backward
        if in_flight and self._microbatches[self._next_backward] in self._gradients:
            return TaskKind.BACKWARD
        is_input_here = (
            self._next_forward < len(self._microbatches)
            and self._microbatches[self._next_forward] in self._inputs
        )
        if is_input_here and in_flight < self._max_in_flight:
            return TaskKind.FORWARD_BACKWARD if self._is_last else TaskKind.FORWARD
        return None
