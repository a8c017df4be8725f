"""Policies of peers that leave, see `plan.succession`. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from swarm_ft.coordinator.decide import attempts, drain
from swarm_ft.coordinator.decide.policies.holding import Hold
from swarm_ft.coordinator.facts.events import Transition
from swarm_ft.coordinator.facts.state import Run, SwarmState
from swarm_ft.coordinator.plan.membership import with_caught_up
from swarm_ft.coordinator.plan.succession import dispensable_leavers, reason_to_hold


@dataclass(frozen=True, slots=True)
class ReleaseLeavers:
    """Continues without the leavers whose state others have."""

    def apply(self, turn: Transition, run: Run) -> None:
        """End the attempt; the next one begins without the leavers."""
        attempts.interrupt(turn, drain.with_leavers(turn, with_caught_up(run)))


def release_leavers(state: SwarmState, run: Run, now_s: float) -> ReleaseLeavers | None:
    """Release leavers without which the run loses nothing."""
    if run.has_all_steps:
        return None
    leavers = dispensable_leavers(state, with_caught_up(run), now_s)
    return ReleaseLeavers() if leavers else None


def hold_for_leavers(state: SwarmState, run: Run, now_s: float) -> Hold | None:
    """Hold a run of which a leaver has the only state, until a snapshot or the peer has it."""
    reason = reason_to_hold(state, run, now_s) if run.step is None else None
    return None if reason is None else Hold(reason, saves=True)
