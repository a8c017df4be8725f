"""Peers that request to leave, to pause or to work again. Pure."""

from __future__ import annotations

from dataclasses import replace

from swarm_ft.coordinator.decide import attempts
from swarm_ft.coordinator.facts.events import Transition
from swarm_ft.coordinator.facts.messages import Progress
from swarm_ft.coordinator.facts.reasons import Reason, ReasonKind, gist_of, several
from swarm_ft.coordinator.facts.state import Run
from swarm_ft.coordinator.plan.membership import loss_of
from swarm_ft.coordinator.plan.succession import dispensable_leavers, progress_of
from swarm_ft.ids import PeerId
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.messages.control import PeerLeaving, PeerResumed
from swarm_ft.protocol.messages.events import EventKind

RETOLD_AFTER_S = 5.0
"""Seconds by which an estimate must be wrong, or a changed number old, to be sent again."""


def on_message(turn: Transition, peer_id: PeerId, message: PeerLeaving | PeerResumed) -> None:
    """Record a member's request to leave or pause, or its return."""
    member = turn.state.members.get(peer_id)
    leaving = message if isinstance(message, PeerLeaving) else None
    if member is not None:
        turn.state = turn.state.with_member(replace(member, leaving=leaving, told=None))
        _emit_request(turn, peer_id, leaving)


def _emit_request(turn: Transition, peer_id: PeerId, leaving: PeerLeaving | None) -> None:
    if leaving is None:
        event, kind = EventKind.PEER_RESUMED, ReasonKind.PEER_RESUMED
    elif leaving.stays:
        event, kind = EventKind.PEER_PAUSED, ReasonKind.PEER_PAUSING
    else:
        event, kind = EventKind.PEER_LEAVING, ReasonKind.PEER_LEAVING
    text = leaving.reason if leaving is not None else ""
    for run in turn.state.runs_of(peer_id) or (None,):
        reason = Reason(kind=kind, peers=(peer_id,), text=text)
        turn.emit(event, run, peer_id, reason=reason)


def reconcile(turn: Transition) -> None:
    """Continue without leavers that a run can do without while its peers load.

    In a run that trains, `commits` handles them at the end of a step.
    """
    for run in turn.state.going_runs:
        if run.phase is RunPhase.LOADING and dispensable_leavers(turn.state, run, turn.now_s):
            attempts.interrupt(turn, with_leavers(turn, run))


def with_leavers(turn: Transition, run: Run) -> Run:
    """Return the run with a detail that names the peers that leave now."""
    leavers = dispensable_leavers(turn.state, run, turn.now_s)
    losses = [loss_of(turn.state, run, peer, _cause(turn, peer)) for peer in leavers]
    return replace(run, detail=several(losses)) if losses else run


def _cause(turn: Transition, peer: PeerId) -> Reason:
    leaving = turn.state.members[peer].leaving
    is_paused = leaving is not None and leaving.stays
    return Reason(kind=ReasonKind.PEER_PAUSES if is_paused else ReasonKind.PEER_LEAVES)


def send_progress(turn: Transition) -> None:
    """Send each leaver its reason to wait, when the reason or the estimate changes."""
    for peer in turn.state.leaving:
        member, progress = turn.state.members[peer], progress_of(turn.state, peer, turn.now_s)
        if member.told is None or _is_news(member.told, progress, turn.now_s - member.told_at_s):
            sent = replace(member, told=progress, told_at_s=turn.now_s)
            turn.state = turn.state.with_member(sent)
            turn.send(peer, progress)


def _is_news(before: Progress, now: Progress, after_s: float) -> bool:
    """Whether the change is worth a message; counts of steps alone are not, at once."""
    if (before.may_go, gist_of(before.reason)) != (now.may_go, gist_of(now.reason)):
        return True
    expected_s = max(0.0, before.seconds - after_s)
    is_off = abs(now.seconds - expected_s) >= RETOLD_AFTER_S
    return is_off or (now.reason != before.reason and after_s >= RETOLD_AFTER_S)
