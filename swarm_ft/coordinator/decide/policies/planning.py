"""Policy that plans the next step. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from swarm_ft.coordinator.facts.events import PlanRecord, Transition
from swarm_ft.coordinator.facts.state import PhaseProgress, Run, SwarmState
from swarm_ft.coordinator.plan.steps import plan_step, tokens_for


@dataclass(frozen=True, slots=True)
class Plan:
    """Plans the first uncommitted step."""

    def apply(self, turn: Transition, run: Run) -> None:
        """Record the plan, and send it to all peers with the tokens that each needs."""
        awaiting = run.with_awaited(PhaseProgress(since_s=turn.now_s))
        run, plan = plan_step(awaiting, turn.now_s, turn.state.ways)
        turn.set_run(run)
        turn.write(PlanRecord(run.run_id, plan.step, plan.attempt, plan.microbatches))
        for peer in run.peers:
            turn.send(peer, plan, tokens_for(run, plan, peer))


def plan_next(_state: SwarmState, _run: Run, _now_s: float) -> Plan:
    """Plan the next step: no other policy ended the decision."""
    return Plan()
