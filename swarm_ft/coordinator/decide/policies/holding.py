"""Policy of paused runs, and the action of runs that plan no step for now. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from swarm_ft.coordinator.decide import snapshots
from swarm_ft.coordinator.facts.events import Transition
from swarm_ft.coordinator.facts.reasons import Reason, ReasonKind
from swarm_ft.coordinator.facts.state import PhaseProgress, Run, SwarmState
from swarm_ft.coordinator.plan.succession import may_save


@dataclass(frozen=True, slots=True)
class Hold:
    """Plans no step for now.

    The waiting time counts from the first time with this kind of reason at this step.

    Attributes:
        reason: Reason of the wait.
        saves: Whether the run waits for a snapshot.
    """

    reason: Reason
    saves: bool = False

    def apply(self, turn: Transition, run: Run) -> None:
        """Record the reason, and request the snapshot if it is not on its way."""
        if run.detail != self.reason:
            if run.detail is None or run.detail.wait != self.reason.wait:
                run = run.with_awaited(PhaseProgress(since_s=turn.now_s))
            run = replace(run, detail=self.reason)
            turn.save_run(run)
        may_be_saved = self.saves and may_save(turn.state, run, turn.now_s)
        if may_be_saved and not snapshots.is_on_its_way(run):
            snapshots.request(turn, run)


def pause(_state: SwarmState, run: Run, _now_s: float) -> Hold | None:
    """Hold a paused run; a step that an earlier attempt began is repeated first."""
    if run.step is not None or not run.steering.is_paused:
        return None
    return Hold(Reason(kind=ReasonKind.PAUSED, step=run.committed_steps))
