"""Types of policies and of the actions that they return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from swarm_ft.coordinator.facts.events import Transition
from swarm_ft.coordinator.facts.state import Run, SwarmState


class Action(Protocol):
    """An action on a run that waits between two steps."""

    def apply(self, turn: Transition, run: Run) -> Run | None:
        """Perform the action.

        Returns:
            The run, if later policies are to decide; None if the decision is made.
        """


Policy: TypeAlias = Callable[[SwarmState, Run, float], Action | None]
"""A function of the state, the run and the monotonic seconds; None: the policy does not apply."""
