"""Policies that request snapshots. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from swarm_ft.coordinator.decide import snapshots
from swarm_ft.coordinator.decide.policies.giving import peers_to_give
from swarm_ft.coordinator.facts.events import Transition
from swarm_ft.coordinator.facts.state import Run, SwarmState
from swarm_ft.coordinator.plan.allocation import makes_room
from swarm_ft.coordinator.plan.keepers import can_take_snapshots, is_due_by_time, is_spreading
from swarm_ft.coordinator.plan.steps import lacks_snapshot


@dataclass(frozen=True, slots=True)
class Save:
    """Requests a snapshot of the last commit; later policies decide how the run goes on."""

    def apply(self, turn: Transition, run: Run) -> Run:
        """Request the snapshot."""
        return snapshots.request(turn, run)


def save_if_due(state: SwarmState, run: Run, now_s: float) -> Save | None:
    """Save a commit that is due by the job, by time, or because a repartition needs it."""
    if peers_to_give(state, run, now_s):
        return None  # the next attempt requests the snapshot, see `save_again`
    is_due = lacks_snapshot(run) or (not run.has_all_steps and is_due_by_time(state, run, now_s))
    if is_due and not is_spreading(state, run):
        return Save()
    return Save() if not run.has_all_steps and _needs_room(state, run, now_s) else None


def _needs_room(state: SwarmState, run: Run, now_s: float) -> bool:
    """Whether a repartition needs a new snapshot, and none is under way."""
    if run.saving.is_under_way or not can_take_snapshots(state, run):
        return False
    return makes_room(state, run, now_s)


def save_again(state: SwarmState, run: Run, _now_s: float) -> Save | None:
    """Repeat the request for a snapshot that an ended attempt or a restart interrupted."""
    is_requested = snapshots.is_requested_in_attempt(run) or is_spreading(state, run)
    return Save() if not is_requested and lacks_snapshot(run) else None
