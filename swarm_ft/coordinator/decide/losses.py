"""Lost results, and peers that are silent, late or slow. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from swarm_ft.coordinator.decide import attempts
from swarm_ft.coordinator.facts.events import Transition
from swarm_ft.coordinator.facts.reasons import Reason, ReasonKind, several
from swarm_ft.coordinator.facts.state import AttemptState, Run, SwarmState
from swarm_ft.coordinator.plan.agreement import differing_results
from swarm_ft.coordinator.plan.allocation import share_of
from swarm_ft.coordinator.plan.lateness import late_peers, overdue_peers
from swarm_ft.coordinator.plan.membership import (
    SILENT_S,
    find_placement,
    lost_parts,
)
from swarm_ft.coordinator.plan.routes import longest_s
from swarm_ft.ids import PeerId
from swarm_ft.protocol.machines.pipeline import PARTS
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.messages.control import PeerAlive
from swarm_ft.protocol.messages.events import EventKind
from swarm_ft.protocol.spec.layers import LayerRange

# ---- results that wait for their clients: a lost part is computed again
#
# A finished run whose result lost a part goes back to its newest snapshot, or the beginning, as
# soon as there are peers for it, or no run trains. Until then the part's holder may come back.


def result_ready(run: Run) -> Reason:
    """Return the detail of a finished run."""
    return Reason(kind=ReasonKind.RESULT_READY, layers=differing_results(run))


def holder_gone(turn: Transition, peer_id: PeerId, *, away_since_s: float) -> None:
    """Record that a peer went away, in finished runs whose result it may have."""
    for run in _finished(turn):
        if peer_id in run.peers:
            turn.set_run(run.with_away({**run.attempt.away_since_s, peer_id: away_since_s}))


def reconcile_results(turn: Transition) -> None:
    """Check whether results are still there, and repeat those that are lost."""
    for run in _finished(turn):
        lost = lost_parts(turn.state, run, turn.now_s)
        others = turn.state.active_runs if lost else []
        if not lost:
            _set_detail(turn, run, result_ready(run))
        elif not others or _could_begin(turn.state, run, turn.now_s):
            _make_again(turn, run, lost)
        else:
            _set_detail(turn, run, replace(_result_lost(lost), runs=(others[0].run_id,)))


def _could_begin(state: SwarmState, run: Run, now_s: float) -> bool:
    """Whether there are peers for it, including those with the rest of its result."""
    again = replace(run, phase=RunPhase.WAITING, past=run.past.rolled_back, attempt=AttemptState())
    able = share_of(state.with_run(again), again, now_s)
    return bool(find_placement(able, again, now_s).assignments)


def _finished(turn: Transition) -> list[Run]:
    return [run for run in turn.state.runs.values() if run.phase is RunPhase.FINISHED]


def _make_again(turn: Transition, run: Run, lost: Sequence[LayerRange]) -> None:
    step = run.past.rolled_back.committed_steps
    detail = replace(_result_lost(lost), step=step)
    run = replace(run, phase=RunPhase.WAITING, detail=detail)
    attempts.go_back(turn, run, _result_lost(lost), lost)


def _set_detail(turn: Transition, run: Run, detail: Reason) -> None:
    if run.detail != detail:
        turn.save_run(replace(run, detail=detail))


def _result_lost(lost: Sequence[LayerRange]) -> Reason:
    return Reason(kind=ReasonKind.RESULT_LOST, layers=tuple(lost))


# ---- silence: of a peer, or of everything while the coordinator stood still
#
# A coordinator that stood still (a laptop that slept, a process that was stopped, a clock that
# jumped ahead) received no messages, which shows nothing about the peers: this time does not count.

STALLED_S = 2.0
"""Seconds between two events that show that the coordinator itself stood still; `Tick`s are more
frequent.
"""
NOTICED_S = SILENT_S / 2
"""Seconds of a peer's silence before watchers see a notice."""


def after_gap(state: SwarmState, now_s: float) -> SwarmState:
    """Return the state without the time in which the coordinator stood still."""
    gap_s = now_s - state.seen_at_s
    state = replace(state, seen_at_s=now_s)
    return _postponed(state, gap_s) if gap_s >= STALLED_S else state


def _postponed(state: SwarmState, gap_s: float) -> SwarmState:
    members = {
        name: replace(m, heard_at_s=m.heard_at_s + gap_s, joined_at_s=m.joined_at_s + gap_s)
        for name, m in state.members.items()
    }
    runs = {run_id: _run_postponed(run, gap_s) for run_id, run in state.runs.items()}
    return replace(state, members=MappingProxyType(members), runs=MappingProxyType(runs))


def _run_postponed(run: Run, gap_s: float) -> Run:
    attempt, step = run.attempt, run.step
    away = {peer: since_s + gap_s for peer, since_s in attempt.away_since_s.items()}
    learning = {peer: since_s + gap_s for peer, since_s in attempt.learning_since_s.items()}
    attempt = replace(
        attempt,
        awaited=attempt.awaited.postponed(gap_s),
        away_since_s=MappingProxyType(away),
        learning_since_s=MappingProxyType(learning),
    )
    return replace(
        run,
        attempt=attempt,
        step=step and replace(step, began_s=step.began_s + gap_s),
        unplaced_since_s=run.unplaced_since_s + gap_s,
        finished_since_s=run.finished_since_s + gap_s,
        gather_until_s=run.gather_until_s + gap_s,
        not_before_s=run.not_before_s + gap_s,
    )


def publish_notices(turn: Transition) -> None:
    """Publish a notice about silent or late peers, while there are any."""
    for run in turn.state.going_runs:
        notice = _notice(turn, run) if run.phase.is_working else None
        if notice != run.notice:
            noticed = replace(run, notice=notice)
            turn.set_run(noticed)
            turn.publish(run.run_id, noticed)
            if notice:
                turn.emit(EventKind.PEER_SILENT, noticed, reason=notice)


def _notice(turn: Transition, run: Run) -> Reason | None:
    members, overdue = turn.state.members, overdue_peers(turn.state, run, turn.now_s)
    noticed = []
    for stage in run.attempt.assignments:
        peer, layers = stage.peer_id, (stage.layers,)
        if peer in members and turn.now_s - members[peer].heard_at_s >= NOTICED_S:
            kind, amount = ReasonKind.PEER_SILENT, NOTICED_S
            noticed.append(Reason(kind=kind, peers=(peer,), layers=layers, amount=amount))
        elif peer in overdue:
            noticed.append(Reason(kind=ReasonKind.PEER_AWAITED, peers=(peer,), layers=layers))
    return several(noticed)


# ---- peers that delay the others, see `lateness`


def drop_late(turn: Transition) -> None:
    """Continue without late peers that the others can do without.

    Where a peer is overdue the other peers are ready: these are the control. A learner that takes
    too long has no control: the size of the state, or its sources, may be the cause.
    """
    for run in turn.state.active_runs:
        late = late_peers(turn.state, run, turn.now_s) if run.phase.is_working else {}
        if late:
            taking = late.keys() - overdue_peers(turn.state, run, turn.now_s).keys()
            attempts.suspend_and_continue(turn, run, late, no_control=taking)


# ---- a peer that becomes slow within a step is relieved in that step, if it has replicas
#
# It reports its progress every few seconds. The comparison is with its own past: a peer that was
# always slow has few microbatches, see `routes`.

MEASURED_AT_LEAST = 3
"""Steps before a peer's speed is known well enough."""


def on_heartbeat(turn: Transition, run: Run, peer_id: PeerId, alive: PeerAlive) -> None:
    """Record a peer's progress; divide its share again if the others would wait for long."""
    is_of_step = run.phase is RunPhase.TRAINING and alive.step == run.committed_steps
    is_current = run.phase is RunPhase.LOADING or is_of_step
    if not is_current or alive.attempt != run.attempt.number:
        return
    parts_begun = min(alive.parts_begun, _num_parts(run, peer_id)) if is_of_step else 0
    awaited = run.attempt.awaited.with_report(peer_id, alive.waits_for, parts_begun, turn.now_s)
    run = run.with_awaited(awaited)
    turn.set_run(run)
    if is_of_step:
        _relieve(turn, run, peer_id, alive)


def _relieve(turn: Transition, run: Run, peer_id: PeerId, alive: PeerAlive) -> None:
    seconds = _seconds_each(run, peer_id, alive, turn.now_s)
    if seconds is None:
        return
    usual = run.measured.seconds[peer_id]
    known = MappingProxyType({**run.measured.seconds, peer_id: (*usual, seconds)})
    measured = replace(run.measured, seconds=known)
    detail = Reason(
        kind=ReasonKind.PEER_RELIEVED, peers=(peer_id,), amount=seconds, limit=longest_s(usual)
    )
    turn.emit(EventKind.PEER_RELIEVED, run, peer_id, reason=detail)
    attempts.interrupt(turn, replace(run, measured=measured, detail=detail))


def _num_parts(run: Run, peer_id: PeerId) -> int:
    """Return the number of parts in a peer's microbatches of the step, see `pipeline.PARTS`."""
    for index, stage in enumerate(run.computing):
        if run.step is not None and peer_id in stage.peers:
            held_out = run.step.eval_share(index, stage.peers.index(peer_id))
            return PARTS * _share(run, peer_id) + held_out
    return 0


def _share(run: Run, peer_id: PeerId) -> int:
    """Return how many microbatches of the present step a peer computes in this attempt."""
    for index, stage in enumerate(run.computing):
        if run.step is not None and peer_id in stage.peers:
            return run.step.share(index, stage.peers.index(peer_id))
    return 0  # it listens


def _seconds_each(run: Run, peer_id: PeerId, alive: PeerAlive, now_s: float) -> float | None:
    """Return a peer's present seconds per microbatch, if that delays the step.

    It does if the microbatches that it has not begun will take longer than its whole share ever
    did. Reports of more computing time than the step is old are cut to that.
    """
    usual = run.measured.seconds.get(peer_id, ())
    stage = next((s for s in run.computing if peer_id in s.peers), None)
    if stage is None:
        return None  # it listens
    if len(stage.peers) == 1 or len(usual) < MEASURED_AT_LEAST or not alive.parts_begun:
        return None
    compute_s = min(alive.compute_s, now_s - run.step.began_s) if run.step else alive.compute_s
    seconds = compute_s / alive.parts_begun * PARTS
    share = _share(run, peer_id)
    remaining = share - -(-alive.parts_begun // PARTS)
    is_slow = remaining > 0 and remaining * seconds > share * longest_s(usual)
    return seconds if is_slow else None
