"""Policies of newcomers: peers that join a run, and learners that caught up. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from swarm_ft.coordinator.decide import attempts
from swarm_ft.coordinator.facts.events import Transition
from swarm_ft.coordinator.facts.reasons import Reason, ReasonKind, several
from swarm_ft.coordinator.facts.state import Run, SwarmState
from swarm_ft.coordinator.plan.allocation import allocate_members
from swarm_ft.coordinator.plan.membership import (
    bypassed_stages,
    caught_up_of,
    eligible_members,
    with_caught_up,
    with_newcomers,
    without_spare_replicas,
)
from swarm_ft.coordinator.plan.succession import has_successors, with_successors_free
from swarm_ft.protocol.messages.control import StageAssignment


@dataclass(frozen=True, slots=True)
class Grow:
    """Continues with newcomers, and without peers that have no work.

    The next attempt finds newcomers again, among them peers that move to other layers.

    Attributes:
        fewer: Run without peers that have no work.
        grown: The same run with newcomers.
    """

    fewer: Run
    grown: Run

    def apply(self, turn: Transition, run: Run) -> None:
        """Release peers without work that get no other, and end the attempt."""
        freed = [a for a in run.attempt.assignments if a.peer_id not in self.fewer.peers]
        for assignment in freed:
            if assignment.peer_id not in self.grown.peers:
                attempts.release(turn, run, assignment.peer_id, ReasonKind.RELEASED_DONE)
        changes = several(self._changes(run, freed))
        attempts.interrupt(turn, replace(self.fewer, detail=changes))

    def _changes(self, run: Run, freed: Sequence[StageAssignment]) -> list[Reason]:
        new = {a.peer_id: a.layers for a in self.grown.attempt.assignments}
        newcomers = tuple(peer for peer in self.grown.peers if peer not in run.peers)
        changes = [Reason(kind=ReasonKind.PEERS_JOIN, peers=newcomers)] if newcomers else []
        passed = {stage.layers for stage in bypassed_stages(run)}
        for peer, layers in ((a.peer_id, a.layers) for a in freed):
            is_done = layers in passed
            why = Reason(kind=ReasonKind.LAYERS_DONE if is_done else ReasonKind.STAGE_LEFT)
            changes.append(
                Reason(
                    kind=ReasonKind.PEER_MOVES if peer in new else ReasonKind.PEER_LET_GO,
                    peers=(peer,),
                    layers=(layers, new[peer]) if peer in new else (layers,),
                    parts=(why,),
                )
            )
        return changes


@dataclass(frozen=True, slots=True)
class AdmitLearners:
    """Counts learners that have caught up as replicas.

    Attributes:
        reason: Reason that names them; None if none of them has a stage any more.
    """

    reason: Reason | None

    def apply(self, turn: Transition, run: Run) -> Run:
        """Record the new replicas; they take part from the next plan on."""
        run = with_caught_up(run)
        if self.reason is not None:
            run = replace(run, detail=self.reason)
            turn.save_run(run)
        return run


def grow(state: SwarmState, run: Run, now_s: float) -> Grow | None:
    """Grow by newcomers; a paused run grows only by successors of leavers."""
    if run.has_all_steps:
        return None
    view = allocate_members(state, now_s).view_for(state, run)
    able = eligible_members(view, with_caught_up(run), now_s)
    if run.steering.is_paused and not has_successors(able, run):
        return None
    fewer = with_successors_free(able, without_spare_replicas(able, run))
    grown = with_newcomers(able, fewer)
    return None if grown is run else Grow(fewer, grown)


def admit_learners(_state: SwarmState, run: Run, _now_s: float) -> AdmitLearners | None:
    """Admit learners that have caught up."""
    return AdmitLearners(caught_up_of(run)) if run.attempt.caught_up else None
