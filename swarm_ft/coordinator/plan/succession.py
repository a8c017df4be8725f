"""Leaving peers: their successors, and what they wait for. Pure.

A leaver that loses a run nothing goes at the end of a step: replicas have its state, or a snapshot
has it, or no step is committed. From the last peer that has a stage's state another peer copies it
while all train on: an idle peer, or a replica of another stage that can be spared. Where no peer
can, the run waits after its next step: for a snapshot if there can be one, or, if the peer only
pauses, for its return. Otherwise the peer receives what would be lost, and stays until it insists.
A paused run admits successors, and no other peers. A finished run whose result would go with a
leaver is saved, unless its client fetches the result first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import median

from swarm_ft.coordinator.facts.messages import Progress
from swarm_ft.coordinator.facts.reasons import Reason, ReasonKind
from swarm_ft.coordinator.facts.state import Member, Run, SwarmState
from swarm_ft.coordinator.plan.hosting import refusal
from swarm_ft.coordinator.plan.keepers import sole_keeper_of
from swarm_ft.coordinator.plan.lateness import UNMEASURED_BYTES_S, state_bytes
from swarm_ft.coordinator.plan.membership import eligible_members, without_state
from swarm_ft.coordinator.plan.placement import fits
from swarm_ft.ids import PeerId
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.messages.control import PeerLeaving, Stage
from swarm_ft.protocol.spec.layers import LayerRange

SAVE_S = 600.0
"""Most seconds that a run waits for the snapshot that a leaver needs."""


def dispensable_leavers(state: SwarmState, run: Run, now_s: float) -> list[PeerId]:
    """Return the run's leavers without which it can go on, and loses nothing."""
    leaving = set(state.leaving)
    if leaving.isdisjoint(run.peers):
        return []
    able = eligible_members(state, run, now_s)
    return [p for p in run.peers if p in leaving and p not in able.members]


def with_successors_free(able: SwarmState, run: Run) -> Run:
    """Return the run without replicas that take over from leavers of other stages.

    Args:
        able: State with the members that may work for it, see `eligible_members`.
        run: Run at present; idle successors need not be freed.
    """
    for stage in _left(able, run):
        successor = _successor(able, run, stage.layers)
        if successor in run.peers:
            others = [a for a in run.attempt.assignments if a.peer_id != successor]
            run = without_state(run, successor).with_assignments(others)
    return run


def has_successors(able: SwarmState, run: Run) -> bool:
    """Whether a peer without a request so far could take over from a stage's last peers.

    Args:
        able: State with the members that may work for it, see `eligible_members`.
        run: Run at present.
    """
    return any(_successor(able, run, stage.layers) is not None for stage in _left(able, run))


def reason_to_hold(state: SwarmState, run: Run, now_s: float) -> Reason | None:
    """Return the reason why the run plans no further step for a leaver; None if it does."""
    if not state.leaving or not run.committed_steps or run.has_all_steps:
        return None
    able = eligible_members(state, run, now_s)
    for stage in _left(able, run):
        leavers = tuple(p for p in stage.peers if p in able.leaving)
        if _successor(able, run, stage.layers) is not None:
            continue
        stays = all(_leaving(able, p).stays for p in leavers)
        saves = ReasonKind.SAVES_BEFORE_PAUSE if stays else ReasonKind.SAVES_BEFORE_LEAVE
        may_be_saved = may_save(state, run, now_s)
        if may_be_saved or stays:
            kind = saves if may_be_saved else ReasonKind.AWAITS_PAUSED
            layers, step = (stage.layers,), run.committed_steps
            return Reason(kind=kind, peers=leavers, layers=layers, step=step)
    return None


def may_save(state: SwarmState, run: Run, now_s: float) -> bool:
    """Whether a snapshot of the committed steps can be had, or is there."""
    is_late = is_between_steps(run) and now_s - run.attempt.awaited.since_s >= SAVE_S
    return state.keeps_snapshots and not run.saving.failed and not is_late


def is_between_steps(run: Run) -> bool:
    """Whether the run waits between two steps."""
    return run.phase is RunPhase.TRAINING and run.step is None


def _left(able: SwarmState, run: Run) -> Iterator[Stage]:
    """Yield stages all of whose peers leave, and that no peer takes over yet."""
    leaving = set(able.leaving)
    for stage in run.stages if leaving else ():
        present = [p for p in stage.peers if p in able.members]
        stay = (p for p in present if p not in leaving and able.may_host_alone(p))
        if not leaving.isdisjoint(present) and not any(stay):
            yield stage


def _successor(able: SwarmState, run: Run, layers: LayerRange) -> PeerId | None:
    """Return an idle member, or a spare replica of another stage, to host the layers; or None."""
    kept_out = able.result_keepers.union(run.peers, *(other.peers for other in able.active_runs))
    idle = (p for p, m in able.members.items() if p not in kept_out and _can_host(run, m, layers))
    spare = (p for p in _spare(able, run) if _can_host(run, able.members[p], layers))
    return next(idle, None) or next(spare, None)


def _spare(able: SwarmState, run: Run) -> Iterator[PeerId]:
    """Yield replicas that may host other layers and are not alone, from the largest stage first."""
    for stage in sorted(run.computing, key=lambda stage: -len(stage.peers)):
        staying = [p for p in stage.peers if p in able.members and p not in able.leaving]
        carrying = [p for p in staying if able.may_host_alone(p)]
        if len(carrying) > 1:
            yield from (p for p in reversed(carrying) if able.members[p].hello.layers is None)


def _can_host(run: Run, member: Member, layers: LayerRange) -> bool:
    """Whether a member can host the layers, also alone."""
    hello, is_alone = member.hello, not member.grant.replica_only
    is_offered = hello.layers == layers or (hello.layers is None and fits(run.spec, layers, hello))
    is_free = member.leaving is None
    return is_alone and is_free and is_offered and not refusal(run.spec, member, layers)


def _leaving(state: SwarmState, peer: PeerId) -> PeerLeaving:
    return state.members[peer].leaving or PeerLeaving()


# ---- progress of a leaver


def progress_of(state: SwarmState, peer: PeerId, now_s: float) -> Progress:
    """Return the progress of a leaver: its reason to wait, the time, whether it may go."""
    stays = _leaving(state, peer).stays
    in_runs = [_progress_in(state, run, peer, now_s) for run in state.runs_of(peer)]
    waiting = next((progress for progress in in_runs if not progress.may_go), None)
    if waiting is not None:
        return waiting
    for run in state.runs.values():
        if not stays and _is_last_of_result(state, run, peer):
            return Progress(may_go=False, reason=_not_collected(state, run, peer, now_s))
    only_copy = None if stays else sole_keeper_of(state, peer)
    if only_copy is not None:
        run, stage = only_copy
        return Progress(may_go=False, reason=_about(run, stage.layers, ReasonKind.KEEPERS_COPY))
    return in_runs[0] if in_runs else Progress(may_go=True)


def _about(run: Run, layers: LayerRange, kind: ReasonKind) -> Reason:
    return Reason(kind=kind, run_id=run.run_id, layers=(layers,))


def _progress_in(state: SwarmState, run: Run, peer: PeerId, now_s: float) -> Progress:
    layers = next(a.layers for a in run.attempt.assignments if a.peer_id == peer)
    rest_s = _rest_s(run, now_s)
    if peer in dispensable_leavers(state, run, now_s):
        if run.phase is RunPhase.WAITING:
            reason = _about(run, layers, ReasonKind.STATE_HANDED_OVER)
            return Progress(may_go=True, reason=reason)
        reason = _about(run, layers, ReasonKind.GOES_AFTER_STEP)
        return Progress(may_go=False, reason=reason, seconds=rest_s)
    if run.phase is RunPhase.EXPORTING or run.has_all_steps:
        reason = _about(run, layers, ReasonKind.RESULT_IS_WRITTEN)
        return Progress(may_go=False, reason=reason)
    others = (p for p in _stage(run, peer).peers if p in state.members)
    taking = [p for p in others if p not in state.leaving and state.may_host_alone(p)]
    able = eligible_members(state, run, now_s)
    successor = taking[0] if taking else _successor(able, run, layers)
    if successor is not None:
        seconds = rest_s + _hand_over_s(state, run, peer, successor, now_s) + _step_s(run)
        kind = ReasonKind.SUCCESSOR_COPIES if taking else ReasonKind.SUCCESSOR_CHOSEN
        reason = replace(_about(run, layers, kind), others=(successor,))
        return Progress(may_go=False, reason=reason, seconds=seconds)
    return _alone(state, run, peer, now_s)


def _alone(state: SwarmState, run: Run, peer: PeerId, now_s: float) -> Progress:
    """Return the progress of the last peer of a stage, where no peer can take over."""
    layers, stays = _stage(run, peer).layers, _leaving(state, peer).stays
    rest_s = _rest_s(run, now_s)
    is_waiting = run.phase is RunPhase.WAITING  # no snapshot is complete without the others
    if may_save(state, run, now_s) and not is_waiting:
        kind = (
            ReasonKind.SNAPSHOT_IS_WRITTEN if is_between_steps(run) else ReasonKind.SNAPSHOT_IS_DUE
        )
        return Progress(may_go=False, reason=_about(run, layers, kind), seconds=rest_s)
    if stays:
        reason = _about(run, layers, ReasonKind.RUN_AWAITS_PEER)
        return Progress(may_go=is_between_steps(run), reason=reason, seconds=rest_s)
    lost = run.committed_steps - run.past.rolled_back.committed_steps
    reason = replace(
        _about(run, layers, ReasonKind.STEPS_AT_RISK),
        amount=lost,
        limit=lost * _step_s(run),
        parts=(_why_unsaved(run),),
    )
    return Progress(may_go=False, reason=reason)


def _why_unsaved(run: Run) -> Reason:
    if run.saving.failed is not None:
        return Reason(kind=ReasonKind.SNAPSHOT_IMPOSSIBLE, parts=(run.saving.failed,))
    is_waiting = run.phase is RunPhase.WAITING
    return Reason(kind=ReasonKind.RUN_AWAITS_OTHERS if is_waiting else ReasonKind.NO_SNAPSHOTS)


def _not_collected(state: SwarmState, run: Run, peer: PeerId, now_s: float) -> Reason:
    lost = run.committed_steps - run.past.rolled_back.committed_steps
    return replace(
        _about(run, _stage(run, peer).layers, ReasonKind.RESULT_NOT_COLLECTED),
        amount=None if may_save(state, run, now_s) else lost,
    )


def takes_result_along(state: SwarmState, run: Run) -> bool:
    """Whether a part of a finished run's result would go with members that leave for good."""
    if run.phase is not RunPhase.FINISHED:
        return False
    leavers = (peer for peer in state.leaving if not _leaving(state, peer).stays)
    return any(_is_last_of_result(state, run, peer) for peer in leavers)


def _is_last_of_result(state: SwarmState, run: Run, peer: PeerId) -> bool:
    """Whether only this peer, of all that stay, has a part of a run's result."""
    if run.phase is not RunPhase.FINISHED or peer not in run.past.exported:
        return False
    others = [p for p in _stage(run, peer).peers if p in run.past.exported and p != peer]
    is_safe = any(p in state.members and p not in state.leaving for p in others)
    return not is_safe and run.past.saved is None


def _stage(run: Run, peer: PeerId) -> Stage:
    return next(stage for stage in run.stages if peer in stage.peers)


def _step_s(run: Run) -> float:
    return median(run.measured.step_seconds or (0.0,))


def _rest_s(run: Run, now_s: float) -> float:
    """Return the remaining seconds of the present step."""
    return max(0.0, _step_s(run) - (now_s - run.step.began_s)) if run.step else 0.0


def _hand_over_s(
    state: SwarmState, run: Run, peer: PeerId, successor: PeerId, now_s: float
) -> float:
    """Return the remaining seconds of the copy, by measurements of other copies or of the link."""
    layers, leaving = _stage(run, peer).layers, _leaving(state, peer)
    caps = (
        state.members[peer].hello.max_up_bytes_per_s,
        state.members[successor].hello.max_down_bytes_per_s,
    )
    measured = run.measured.state_bytes_per_s or leaving.up_bytes_per_s or UNMEASURED_BYTES_S
    bytes_per_s = min([measured, *(cap for cap in caps if cap)])
    since_s = run.attempt.learning_since_s.get(successor, now_s)
    return max(0.0, state_bytes(run.spec, layers) / bytes_per_s - (now_s - since_s))
