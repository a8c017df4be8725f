"""How far an engine is with each microbatch of its open step. Knows no tensor, no arithmetic."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from swarm_ft.errors import MalformedMessage, OutOfTurn
from swarm_ft.ids import MicrobatchIndex, StepNumber

Graph = TypeVar("Graph")
Left = TypeVar("Left")


@dataclass(slots=True)
class OpenStep(Generic[Graph, Left]):
    """One attempt at an optimizer step; a microbatch is in one of its three places at most.

    Attributes:
        number: the step's.
        num_targets: target tokens of the whole step; its loss is the mean over them.
        graphs: what a microbatch's forward left for its backward.
        left: what its backward left for its weights' gradients.
        counted: those whose gradients are summed.

    Raises:
        MalformedMessage: no targets.
    """

    number: StepNumber
    num_targets: int
    graphs: dict[MicrobatchIndex, Graph] = field(default_factory=dict)
    left: dict[MicrobatchIndex, Left] = field(default_factory=dict)
    counted: set[MicrobatchIndex] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self.num_targets < 1:
            raise MalformedMessage(
                f"step {self.number}: expected 1 target or more, got {self.num_targets}"
            )

    def resume(self, step: StepNumber, counted: Set[MicrobatchIndex]) -> None:
        """Drop what is under way, and keep what is counted.

        Raises:
            OutOfTurn: it is another step, or others are counted, or one is so by half.
        """
        if (self.number, self.counted) != (step, counted) or self.left:
            raise OutOfTurn(
                f"step {step} cannot be resumed with microbatches {sorted(counted)}: step "
                f"{self.number} is under way, with {sorted(self.counted)}, and half of "
                f"{sorted(self.left)}"
            )
        self.graphs.clear()

    def check_untouched(self, microbatch: MicrobatchIndex) -> None:
        """Whether nothing of a microbatch is in the gradients.

        Raises:
            OutOfTurn: something is.
        """
        if microbatch in self.counted:
            raise OutOfTurn(f"step {self.number}: microbatch {microbatch} is counted already")
        if microbatch in self.left:
            raise OutOfTurn(f"step {self.number}: microbatch {microbatch} has had its backward")

    def graph_of(self, microbatch: MicrobatchIndex) -> Graph:
        """What there is for a backward.

        Raises:
            OutOfTurn: the microbatch has had no forward, or its backward already.
        """
        self.check_untouched(microbatch)
        if microbatch not in self.graphs:
            raise OutOfTurn(f"step {self.number}: backward of microbatch {microbatch} came first")
        return self.graphs[microbatch]

    def count(self, microbatch: MicrobatchIndex) -> Left:
        """Take what there is for the weights' gradients.

        It counts from now on, so should they fail, nobody who knows of it less resumes the step.

        Raises:
            OutOfTurn: the microbatch has had no backward, or is counted already.
        """
        if microbatch not in self.left:
            raise OutOfTurn(f"step {self.number}: nothing is left of microbatch {microbatch}")
        self.counted.add(microbatch)
        return self.left.pop(microbatch)

    def check_complete(self) -> None:
        """Whether no microbatch is in the gradients by half.

        Raises:
            OutOfTurn: one is.
        """
        if self.left:
            raise OutOfTurn(
                f"step {self.number}: the weights' gradients of microbatches {sorted(self.left)} "
                f"are still to be computed"
            )
