"""Policies of repartitions for speed, see `plan.moving`. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from swarm_ft.coordinator.decide import attempts
from swarm_ft.coordinator.decide.policies.giving import peers_to_give
from swarm_ft.coordinator.decide.policies.holding import Hold
from swarm_ft.coordinator.facts.events import Transition
from swarm_ft.coordinator.facts.reasons import Reason, ReasonKind
from swarm_ft.coordinator.facts.state import Repartition, Run, SwarmState
from swarm_ft.coordinator.plan import moving
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.messages.events import EventKind


@dataclass(frozen=True, slots=True)
class NoteComparison:
    """Records a comparison of stages, and the better ones; `move_layers` follows.

    Attributes:
        better: Faster stages; None if no others pay.
    """

    better: Repartition | None

    def apply(self, turn: Transition, run: Run) -> Run:
        """Record the time and the result."""
        run = replace(run, moves=replace(run.moves, looked_s=turn.now_s))
        run = run if self.better is None else replace(run, moving=self.better)
        turn.set_run(run)
        return run


@dataclass(frozen=True, slots=True)
class GiveUpMove:
    """Gives up a repartition that has become impossible."""

    def apply(self, turn: Transition, run: Run) -> Run:
        """Record the reason."""
        run = replace(run, moving=None, detail=Reason(kind=ReasonKind.MOVE_IMPOSSIBLE))
        turn.save_run(run)
        return run


@dataclass(frozen=True, slots=True)
class Move:
    """Continues on new stages, which load the snapshot of this step."""

    moving: Repartition

    def apply(self, turn: Transition, run: Run) -> None:
        """Give up the old stages, and release peers that get none of the new ones."""
        reason = moving.moved_reason(run, self.moving)
        stages = [stage.layers for stage in run.stages]
        turn.emit(EventKind.RUN_MOVED, run, reason=reason, to_step=run.committed_steps)
        staying = {assignment.peer_id for assignment in self.moving.assignments}
        leavers = [peer for peer in run.peers if peer not in staying]
        begun = moving.with_begun_move(run, turn.now_s)
        run = replace(begun, phase=RunPhase.WAITING, detail=reason)
        attempts.go_back(turn, run, reason, stages)
        for peer in leavers:
            attempts.release(turn, run, peer, ReasonKind.RELEASED_MOVED)


def compare_stages(state: SwarmState, run: Run, now_s: float) -> NoteComparison | None:
    """Compare the run's stages with others, at intervals."""
    if not moving.is_to_look(state, run, now_s) or peers_to_give(state, run, now_s):
        return None
    return NoteComparison(moving.better_stages(state, run, now_s))


def move_layers(state: SwarmState, run: Run, now_s: float) -> GiveUpMove | Hold | Move | None:
    """Move to better stages once a snapshot of this step is complete; plan no step before.

    So no step is repeated. A fault meanwhile is an ordinary one: until the run gives up its old
    stages it can continue on them, and later it can load the snapshot as often as necessary.
    """
    if run.moving is None or not moving.awaits_move(run):
        return None
    if not moving.is_possible(state, run, now_s):
        return GiveUpMove()
    if run.past.saved is not None:
        return Move(run.moving)
    return Hold(Reason(kind=ReasonKind.MOVE_SAVES_FIRST, step=run.committed_steps), saves=True)
