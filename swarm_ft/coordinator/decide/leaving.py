"""Peers that say that they would work no more, or work again: what follows. Pure."""

from __future__ import annotations

from dataclasses import replace

from swarm_ft.coordinator.decide import attempts
from swarm_ft.coordinator.facts.events import Turn
from swarm_ft.coordinator.facts.state import Run
from swarm_ft.coordinator.plan.leaving import gone_from, progress_of
from swarm_ft.coordinator.plan.membership import loss_in_words
from swarm_ft.ids import PeerId
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.messages.control import LeaveProgress, PeerLeaving, PeerWorks, gist_of
from swarm_ft.protocol.messages.events import EventKind

RETOLD_AFTER_S = 5.0
"""An estimate that is wrong by so much is told anew, and so are numbers that changed since."""


def said(turn: Turn, peer_id: PeerId, message: PeerLeaving | PeerWorks) -> None:
    """A member would work no more, or works again."""
    member = turn.state.members.get(peer_id)
    leaving = message if isinstance(message, PeerLeaving) else None
    if member is not None:
        turn.state = turn.state.with_member(replace(member, leaving=leaving, told=None))
        _tell_of(turn, peer_id, leaving)


def _tell_of(turn: Turn, peer_id: PeerId, leaving: PeerLeaving | None) -> None:
    if leaving is None:
        kind, verb = EventKind.PEER_RESUMED, "works again"
    elif leaving.stays:
        kind, verb = EventKind.PEER_PAUSED, "pauses"
    else:
        kind, verb = EventKind.PEER_LEAVING, "would leave"
    why = f": {leaving.reason}" if leaving is not None and leaving.reason else ""
    for run in turn.state.runs_of(peer_id) or (None,):
        turn.happened(kind, run, peer_id, words=f"peer {peer_id} {verb}{why}")


def look_after(turn: Turn) -> None:
    """Go on without leavers that a run can do without while its peers load.

    In a run that trains they are seen to at the end of a step, see `commits`.
    """
    for run in turn.state.going_runs:
        if run.phase is RunPhase.LOADING and gone_from(turn.state, run, turn.now_s):
            attempts.interrupt(turn, with_words(turn, run))


def with_words(turn: Turn, run: Run) -> Run:
    """The run, whose detail tells which of its peers leave now."""
    gone = gone_from(turn.state, run, turn.now_s)
    words = [loss_in_words(turn.state, run, peer, _verb(turn, peer)) for peer in gone]
    return replace(run, detail="; ".join(words)) if words else run


def _verb(turn: Turn, peer: PeerId) -> str:
    leaving = turn.state.members[peer].leaving
    return "pauses" if leaving is not None and leaving.stays else "leaves"


def tell(turn: Turn) -> None:
    """Tell each leaver what it waits for, when that is something else or takes another time."""
    for peer in turn.state.leaving:
        member, told = turn.state.members[peer], progress_of(turn.state, peer, turn.now_s)
        if member.told is None or _is_news(member.told, told, turn.now_s - member.told_at_s):
            turn.state = turn.state.with_member(replace(member, told=told, told_at_s=turn.now_s))
            turn.say(peer, told)


def _is_news(before: LeaveProgress, now: LeaveProgress, after_s: float) -> bool:
    """Whether to tell it; steps that are counted up are none, at once."""
    if (before.may_go, gist_of(before.words)) != (now.may_go, gist_of(now.words)):
        return True
    expected_s = max(0.0, before.seconds - after_s)
    is_off = abs(now.seconds - expected_s) >= RETOLD_AFTER_S
    return is_off or (now.words != before.words and after_s >= RETOLD_AFTER_S)
