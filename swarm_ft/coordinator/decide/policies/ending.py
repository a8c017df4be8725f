"""Policies of trained runs: the best weights are loaded, then the result is exported. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from swarm_ft.coordinator.decide import attempts, snapshots
from swarm_ft.coordinator.facts.events import Transition
from swarm_ft.coordinator.facts.reasons import Reason, ReasonKind
from swarm_ft.coordinator.facts.state import PhaseProgress, Run, Snapshot, SwarmState
from swarm_ft.coordinator.plan.steps import best_to_load, is_trained
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.messages.control import ExportStage


@dataclass(frozen=True, slots=True)
class LoadBest:
    """Loads the snapshot of the best weights, which become the result."""

    best: Snapshot

    def apply(self, turn: Transition, run: Run) -> None:
        """Begin an attempt that loads the snapshot."""
        attempts.load_best(turn, run, self.best)


@dataclass(frozen=True, slots=True)
class Export:
    """Exports the weights that the peers have."""

    def apply(self, turn: Transition, run: Run) -> None:
        """Release learners, and have all others export their stages."""
        late = run.listeners
        staying = tuple(a for a in run.attempt.assignments if a.peer_id not in late)
        awaited = PhaseProgress(since_s=turn.now_s)
        attempt = replace(run.attempt, assignments=staying, learners=(), awaited=awaited)
        run = replace(run, attempt=attempt)
        if run.spec.train.takes_snapshots and run.past.saved is None:
            run = snapshots.request(turn, run)  # so that a lost result costs no training
        exporting = Reason(kind=ReasonKind.EXPORTING)
        turn.save_run(replace(run, phase=RunPhase.EXPORTING, detail=exporting))
        for peer in late:
            attempts.release(turn, run, peer, ReasonKind.RELEASED_LATE_JOINER)
        for peer in run.peers:
            turn.send(peer, ExportStage(run_id=run.run_id))


def load_best(_state: SwarmState, run: Run, _now_s: float) -> LoadBest | None:
    """Load the best weights of a trained run, if the peers have others."""
    best = best_to_load(run) if is_trained(run) else None
    return None if best is None else LoadBest(best)


def export_result(_state: SwarmState, run: Run, _now_s: float) -> Export | None:
    """Export the result of a trained run."""
    return Export() if is_trained(run) else None
