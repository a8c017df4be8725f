"""The order of the policies, and the only place that knows it. Pure.

Each policy returns an action or None. The first action that returns no run ends the decision; an
action that returns the run leaves it to the policies after it.
"""

from __future__ import annotations

from swarm_ft.coordinator.decide.policies.action import Policy
from swarm_ft.coordinator.decide.policies.ending import export_result, load_best
from swarm_ft.coordinator.decide.policies.giving import give_peers
from swarm_ft.coordinator.decide.policies.growing import admit_learners, grow
from swarm_ft.coordinator.decide.policies.holding import pause
from swarm_ft.coordinator.decide.policies.leaving import hold_for_leavers, release_leavers
from swarm_ft.coordinator.decide.policies.moving import compare_stages, move_layers
from swarm_ft.coordinator.decide.policies.planning import plan_next
from swarm_ft.coordinator.decide.policies.saving import save_again, save_if_due
from swarm_ft.coordinator.facts.events import Transition
from swarm_ft.coordinator.facts.state import Run

WITH_PRESENT_PEERS: tuple[Policy, ...] = (
    # All policies below count learners that caught up as replicas. The policies of BETWEEN_STEPS
    # end the attempt, which admits learners too.
    admit_learners,
    # A trained run ends, whether or not it is paused or has leavers. The best weights come before
    # the export, which takes those that the peers have.
    load_best,
    export_result,
    # An attempt may begin while the run waits for the snapshot of its repartition.
    move_layers,
    # Leavers come before a pause: a paused run still saves what they would take along.
    hold_for_leavers,
    pause,
    # A peer must receive the request before the plan, to save the state before the step.
    save_again,
    plan_next,
)
"""Policies of an attempt whose peers are ready, and of a run after its last step."""
BETWEEN_STEPS: tuple[Policy, ...] = (
    # A waiting run comes first: moves and growth would count on peers that go.
    give_peers,
    # A move fixes the peers of the next attempt, so it comes before leavers and newcomers.
    move_layers,
    # Leavers come before newcomers: the attempt that begins without the former finds the latter.
    release_leavers,
    grow,
    *WITH_PRESENT_PEERS,
)
"""Policies of a run that waits between two steps."""
AFTER_COMMIT: tuple[Policy, ...] = (
    # A peer must receive the request before any other order, to save the state of this commit.
    save_if_due,
    # The comparison respects a snapshot under way, and orders the move of BETWEEN_STEPS.
    compare_stages,
    *BETWEEN_STEPS,
)
"""Policies of a run that has just committed a step."""


def decide_next(turn: Transition, run: Run, policies: tuple[Policy, ...]) -> None:
    """Apply the policies in their order until an action ends the decision.

    Args:
        turn: Present transition.
        run: Run whose peers have nothing to do.
        policies: One of the tuples above.
    """
    for policy in policies:
        action = policy(turn.state, run, turn.now_s)
        after = run if action is None else action.apply(turn, run)
        if after is None:
            return
        run = after
