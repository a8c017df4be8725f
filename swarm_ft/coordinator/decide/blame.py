"""Failures: which count against a peer, and which against the run. Pure.

A failure counts first against the pair of the peer and the run (`Run.conducts`). A peer that fails
too often in a run is suspended from that run alone. The failure counts against the peer in all runs
(`SwarmState.standings`) only where there is a control:

- other peers did the step at which it failed, and the peer alone did not (`settle`);
- the runs of two owners suspend it, and it serves no third owner's run (`_suspend`).

Some failures can be the run's own fault and count against the run as well (`Run.trouble`): values
that are not finite, memory, unexpected errors. Such a run rests for longer after each failure. It
ends when two peers report the same, or when one peer does so repeatedly and no other peer can host
its stage. Reports of peers on probation count against no run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from swarm_ft.coordinator.facts.conduct import Failure, Trouble
from swarm_ft.coordinator.facts.events import ReputationRecord, Transition
from swarm_ft.coordinator.facts.reasons import Reason, ReasonKind, error_of
from swarm_ft.coordinator.facts.reputation import Reputation
from swarm_ft.coordinator.facts.state import Run, SwarmState
from swarm_ft.coordinator.plan.allocation import share_of
from swarm_ft.coordinator.plan.membership import replaceable
from swarm_ft.errors import InternalError, NonFinite, NonFiniteWeights, OutOfMemory, SwarmError
from swarm_ft.ids import PeerId, StepNumber
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.messages.events import EventKind

RETRY_S = 2.0
"""Seconds between an attempt that a peer's failure ended and the next one."""
REST_FACTOR = 2.0
"""Growth of a run's rest after each failure that may be its own."""
MAX_RUN_REST_S = 60.0
MAX_NON_FINITE = 4
"""Reports of the same non-finite step that end a run, if only one peer can host the stage.

With the rests between them these take 14 s: time for a transient error to pass.
"""
MAX_OTHER = 6
"""The same limit for memory and unexpected errors, which are transient more often."""
LATELY_S = 600.0
"""Seconds after a suspension from one run in which it counts beside another owner's."""
_MIN_OWNERS = 2
_NON_FINITE = (NonFinite, NonFiniteWeights)


# ---- against a peer


def count(
    turn: Transition,
    run: Run,
    peer_id: PeerId,
    reason: Reason,
    *,
    by: str = "",
    has_control: bool = True,
) -> Run:
    """Count a failure against a peer in this run; too many suspend it from the run.

    Args:
        turn: Present transition.
        run: Run in whose present attempt it failed.
        peer_id: Peer that failed.
        reason: Reason of the failure.
        by: Other peer that reports it; empty if the peer itself does.
        has_control: Whether another peer's success counts against it. False for memory: a peer with
            less of it is no worse.
    """
    conduct, attempt = run.conduct(peer_id), run.attempt.number
    was_resting = run.has_suspended(peer_id, turn.now_s)
    reason = reason.of(run.run_id)
    after = conduct.standing.after_failure(run.run_id, attempt, reason, turn.now_s, by=by)
    conduct = replace(conduct, standing=after)
    if has_control:
        conduct = conduct.with_failure(_failure(run, reason, by))
    run = run.with_conduct(peer_id, conduct)
    if run.has_suspended(peer_id, turn.now_s) and not was_resting:
        _suspend(turn, run, peer_id)
    return run


def suspend_from_run(turn: Transition, run: Run, peer_id: PeerId, reason: Reason) -> Run:
    """Suspend a peer from this run alone, at once."""
    conduct = run.conduct(peer_id)
    standing = conduct.standing.suspend(reason.of(run.run_id), turn.now_s)
    conduct = replace(conduct, standing=standing)
    run = run.with_conduct(peer_id, conduct)
    _suspend(turn, run, peer_id)
    return run


def record_doubt(turn: Transition, run: Run, peer_id: PeerId, reason: Reason) -> Run:
    """Record a peer's report that a step is not finite; if others can do the step, it was false."""
    stages = [stage for stage in run.stages if peer_id in stage.peers]
    others = {
        p for stage in stages for p in stage.peers if p != peer_id and turn.state.may_host_alone(p)
    }
    failure = replace(_failure(run, reason), is_doubt=True, is_alone=not others)
    return run.with_conduct(peer_id, run.conduct(peer_id).with_failure(failure))


def _failure(run: Run, reason: Reason, by: str = "") -> Failure:
    step = StepNumber(run.committed_steps)
    of_run = reason.of(run.run_id)
    return Failure(step=step, attempt=run.attempt.number, reason=of_run, by=by)


def suspend(turn: Transition, run: Run, peer_id: PeerId, reason: Reason) -> None:
    """Suspend a peer from all runs for a while."""
    known = turn.state.reputation(peer_id)
    _stand(turn, run, peer_id, known.suspend(reason.of(run.run_id), turn.now_s))


def settle_failures(turn: Transition, run: Run, step: int) -> Run:
    """Assign the causes of failures at steps up to a completed one.

    They were a peer's own where its replica did the step, or others did it without the peer: that
    is the control. A peer that succeeded at last and has no replica has no control.

    Args:
        turn: Present transition.
        run: Run with the peers that did the step.
        step: Completed step.
    """
    for peer_id, conduct in run.conducts.items():
        failures = [one for one in conduct.open_failures if one.step <= step]
        if failures:
            run = run.with_conduct(peer_id, conduct.settled(step))
        if failures and _has_control(turn.state, run, peer_id):
            run = _refuted(turn, run, peer_id, failures)
    doubts = {peer: doubted for peer, doubted in run.doubts.items() if doubted > step}
    trouble = run.trouble if run.trouble.step > step else Trouble()
    return replace(run, doubts=MappingProxyType(doubts), trouble=trouble)


def _refuted(turn: Transition, run: Run, peer_id: PeerId, failures: Sequence[Failure]) -> Run:
    """Count failures at which others succeeded in all runs, and false doubts in this run."""
    conduct = run.conduct(peer_id)
    for one in failures:
        known = turn.state.reputation(peer_id)
        counted = (run.run_id, one.attempt, one.reason, turn.now_s)
        _stand(turn, run, peer_id, known.after_failure(*counted, by=one.by))
        if one.is_doubt:
            own = conduct.standing
            rests = own.suspend(one.reason, turn.now_s)
            conduct = replace(
                conduct, standing=rests if one.is_alone else own.after_failure(*counted)
            )
    return run.with_conduct(peer_id, conduct)


def _has_control(state: SwarmState, run: Run, peer_id: PeerId) -> bool:
    """Whether another peer that may host alone did a peer's part of the step, or its share."""
    own = [stage.peers for stage in run.computing if peer_id in stage.peers]
    return all(any(p != peer_id and state.may_host_alone(p) for p in peers) for peers in own)


def _suspend(turn: Transition, run: Run, peer_id: PeerId) -> None:
    """Suspend a peer from this run, and from all if runs of other owners did so too."""
    standing = run.conduct(peer_id).standing
    kind, own = ReasonKind.SUSPENDED_FROM_RUN, standing.suspension
    suspended = replace(own, kind=kind, peers=(peer_id,), run_id=run.run_id)
    turn.emit(EventKind.PEER_SET_ASIDE, run, peer_id, reason=suspended)
    owners = {run.owner_name} | {
        other.owner_name
        for other in turn.state.runs.values()
        if other.conduct(peer_id).standing.aside_until_s > turn.now_s - LATELY_S
    }
    if len(owners) >= _MIN_OWNERS and not _serves_others(turn.state, peer_id, owners):
        last = () if standing.reason is None else (standing.reason,)
        kind = ReasonKind.FAILED_FOR_OWNERS
        reason = Reason(kind=kind, run_id=run.run_id, amount=len(owners), parts=last)
        after = turn.state.reputation(peer_id).suspend(reason, turn.now_s)
        _stand(turn, run, peer_id, after)


def _serves_others(state: SwarmState, peer_id: PeerId, owners: set[str]) -> bool:
    """Whether a run of another owner than these commits steps with a peer now."""
    return any(
        other.owner_name not in owners
        and other.phase is RunPhase.TRAINING
        and peer_id in other.past.committers
        and other.past.last_commit is not None
        and other.past.last_commit.attempt == other.attempt.number
        for other in state.runs_of(peer_id)
    )


def _stand(turn: Transition, run: Run, peer_id: PeerId, standing: Reputation) -> None:
    was_aside = turn.state.is_suspended(peer_id, turn.now_s)
    turn.state = turn.state.with_reputation(peer_id, standing)
    if standing.is_suspended(turn.now_s) and not was_aside:
        suspended = replace(standing.suspension, peers=(peer_id,))
        turn.emit(EventKind.PEER_SET_ASIDE, run, peer_id, reason=suspended)
    if standing.is_suspended(turn.now_s):
        turn.write(ReputationRecord(peer_id, standing, standing.aside_until_s - turn.now_s))


# ---- against the run


def suspect(
    turn: Transition, run: Run, peer_id: PeerId, error: SwarmError
) -> tuple[Run, Reason | None]:
    """Count a failure against the run, if it may be the run's own.

    Args:
        turn: Present transition.
        run: Run in whose present attempt the peer failed, before the failure counts against the
            peer.
        peer_id: Peer that reports the error, and may host a stage alone.
        error: Error that it reports.

    Returns:
        The run, which rests before its next attempt, longer each time if no other peer can host the
        stage; and the reason to end it, or None.
    """
    run = replace(run, not_before_s=turn.now_s + RETRY_S)
    if not _may_be_its_own(turn.state, run, peer_id, error):
        return run, None
    step = StepNumber(run.committed_steps)
    trouble = run.trouble.with_failure(step, peer_id)
    run = replace(run, trouble=trouble)
    limit, is_clear = MAX_OTHER, _is_clear(turn.state, run, peer_id, error)
    if isinstance(error, _NON_FINITE):
        agree = [p for p, doubted in run.doubts.items() if doubted >= step and p != peer_id]
        run = replace(run, doubts=MappingProxyType({**run.doubts, peer_id: step}))
        if agree:
            return run, _ends_for(run, (agree[0], peer_id), error)
        limit = MAX_NON_FINITE
    if not is_clear or _has_other_host(turn, run, peer_id):
        return run, None
    if trouble.count >= limit:
        return run, _ends_for(run, (peer_id,), error)
    rest_s = min(RETRY_S * REST_FACTOR ** (trouble.count - 1), MAX_RUN_REST_S)
    return replace(run, not_before_s=turn.now_s + rest_s), None


def _may_be_its_own(state: SwarmState, run: Run, peer_id: PeerId, error: SwarmError) -> bool:
    """Whether a failure can be the run's, by its kind and the peer's history."""
    if not state.may_host_alone(peer_id):
        return False
    if isinstance(error, OutOfMemory):
        return peer_id not in run.past.committers  # its stage did fit: others use that memory now
    return isinstance(error, (*_NON_FINITE, InternalError))


def _is_clear(state: SwarmState, run: Run, peer_id: PeerId, error: SwarmError) -> bool:
    """Whether the run is the likely cause: a single peer can cause an unexpected error."""
    if not isinstance(error, InternalError) or len(run.trouble.peers) > 1:
        return True
    return _serves_others(state, peer_id, {run.owner_name})


def _has_other_host(turn: Transition, run: Run, peer_id: PeerId) -> bool:
    able = share_of(turn.state, run, turn.now_s)
    return peer_id not in able.members or bool(replaceable(able, run, (peer_id,)))


def _ends_for(run: Run, peers: Sequence[PeerId], error: SwarmError) -> Reason:
    """Return the reason of a run that fails through its own fault."""
    is_repeated = len(peers) == 1
    kind = ReasonKind.REPEATED_ERROR if is_repeated else ReasonKind.CONFIRMED_ERROR
    return replace(
        error_of(error, kind),
        peers=tuple(peers),
        step=run.committed_steps,
        amount=run.trouble.count if is_repeated else None,
    )
