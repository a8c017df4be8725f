"""Inputs of a division of the members, as one value that is cheap to compare. Pure.

States with equal inputs have the same division, see `sharing`. A heartbeat, a commit or a tick
changes no input: of time and steps, the value contains only answers, such as whether a peer is
suspended now.
"""

from __future__ import annotations

from collections.abc import Hashable

from swarm_ft.coordinator.facts.state import Run, SwarmState
from swarm_ft.coordinator.plan.membership import bypassed_stages
from swarm_ft.protocol.messages.client import RunPhase

SAVED_AFTER_S = 3600.0
"""Seconds of waiting after which free peers that a run could begin with begin no other run.
Otherwise small runs could keep a large one waiting for ever.
"""


def division_inputs(state: SwarmState, now_s: float) -> tuple[object, ...]:
    """Return all values that a division of the members depends on.

    Args:
        state: Members and runs.
        now_s: Monotonic seconds.
    """
    members = tuple([(m.hello, m.grant, m.leaving, m.joined_at_s) for m in state.members.values()])
    suspended = frozenset(filter(lambda peer: state.is_suspended(peer, now_s), state.standings))
    runs = state.memo.of_runs(state.runs)
    if "inputs" not in runs:
        runs["inputs"] = tuple([_inputs_of(run) for run in state.runs.values()])
    late = tuple(run.run_id for run in state.going_runs if has_waited_for_long(run, now_s))
    resting = tuple(
        (run.run_id, peer)
        for run in state.going_runs
        for peer in run.conducts
        if run.has_suspended(peer, now_s)
    )
    return members, suspended & state.members.keys(), resting, state.ways, runs["inputs"], late


def has_waited_for_long(run: Run, now_s: float) -> bool:
    """Whether peers are reserved for a waiting run, see `SAVED_AFTER_S`."""
    return now_s - run.unplaced_since_s >= SAVED_AFTER_S


def _inputs_of(run: Run) -> Hashable:
    past, attempt = run.past, run.attempt
    if run.phase.is_over:
        keeps_result = run.phase is RunPhase.FINISHED
        return keeps_result and (run.run_id, run.spec, attempt.assignments, tuple(past.exported))
    waits = (
        run.run_id,
        run.spec,
        run.owner,
        run.priority,
        run.claim,
        run.phase,
        run.steering.is_paused,
        run.misfits,
        frozenset(peer for peer, step in run.doubts.items() if step >= run.committed_steps),
        run.moving,
        past.snapshot,
        attempt.number,
    )
    if not attempt.assignments:
        return waits
    steps = run.committed_steps
    return (
        *waits,
        attempt.assignments,
        tuple([past.holds.get(peer) == steps for peer in run.peers]),
        bool(steps),
        past.saved is not None,
        tuple([stage.layers for stage in bypassed_stages(run)]),
    )
