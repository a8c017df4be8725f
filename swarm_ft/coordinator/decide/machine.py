"""The coordinator's decisions: `decide(state, event, now) -> (state, effects)`. No I/O, no clock.

Several runs train side by side, see `plan.sharing`. A run goes QUEUED -> WAITING -> LOADING ->
TRAINING -> EXPORTING -> FINISHED -> COLLECTED, and may end as CANCELLED or FAILED. Inside TRAINING
every step is plan -> run -> ready -> commit:

    event                      effect
    -------------------------  ----------------------------------------------------------------
    all stages placed          attempt + 1; Assign to all                            -> LOADING
    StageReady from all        PlanStep of the first uncommitted step                -> TRAINING
    StepReady from all         commit: global clip factor, learning rate; plan the next
    ... but evaluations are    the run ends with the step before, see `protocol.spec.best`
        no better for long
    last step committed        ExportStage to all                                    -> EXPORTING
    a person pauses it         the present step is committed; none is planned until it resumes
    ... but other weights are  attempt + 1, in which all load these, then ExportStage -> WAITING
        the best
    StageExported from all     the result can be fetched                             -> FINISHED
    a part of it is lost       back to the newest snapshot, or the beginning, see `losses`
    a replica is lost          attempt + 1 without it; the uncommitted step runs again
    a replica is outvoted      attempt + 1 without it, see `plan.agreement`; it is suspended
    a replica becomes slow     attempt + 1 in which the others compute most of its share
    a replica is never ready   it is suspended; attempt + 1 without it, see `lateness`
    a stage's last one is lost wait for it; then go back to the weights the run began with
    a peer requests to leave   others take its stage over first, see `plan.leaving`
    a peer joins (again)       while others load, or when the next step begins: attempt + 1 with it
    a run waits for replicas   at the step's end: attempt + 1 without them; the other begins
    ... and lacks the state    it listens until CaughtUp; then the next plan includes it

The journal gets every change (a `Record`) before `SendMessage` or `Publish` reports it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import MappingProxyType
from typing import assert_never

from swarm_ft.coordinator.decide import (
    attempts,
    blame,
    commits,
    drain,
    history,
    losses,
    snapshot_keepers,
    snapshots,
    steering,
)
from swarm_ft.coordinator.decide.contributions import count_sent, write_sent
from swarm_ft.coordinator.facts.events import (
    CodecsChanged,
    Effect,
    Event,
    PeerJoined,
    PeerLost,
    PeerSaid,
    RateChanged,
    ResultCollected,
    RunAborted,
    RunCancelled,
    RunPaused,
    RunResumed,
    RunSubmitted,
    SnapshotLost,
    SnapshotWritten,
    Tick,
    TokensLost,
    Transition,
)
from swarm_ft.coordinator.facts.messages import Release
from swarm_ft.coordinator.facts.reasons import Reason, ReasonKind, error_of, several
from swarm_ft.coordinator.facts.state import Member, Run, SwarmState
from swarm_ft.coordinator.plan.allocation import share_of
from swarm_ft.coordinator.plan.membership import (
    SILENT_S,
    holds_last_commit,
    is_wanted,
    knows_of,
    loss_of,
    may_hold_last_commit,
    missed_last_commit,
    with_exports_of,
    with_newcomers,
    without_misfit,
    without_state,
)
from swarm_ft.coordinator.plan.shared_memory import divide_memory
from swarm_ft.coordinator.plan.steps import report_refusal
from swarm_ft.errors import (
    BadInput,
    BuffersLost,
    MalformedMessage,
    NonFinite,
    NonFiniteWeights,
    NotAllowed,
    OutOfMemory,
    OutOfTurn,
    SwarmError,
    Unavailable,
    from_code,
)
from swarm_ft.ids import PeerId, RunId, StepNumber
from swarm_ft.protocol.messages.capacity import Machine
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.messages.contribution import ContributionRequest
from swarm_ft.protocol.messages.control import (
    CaughtUp,
    ClockProbe,
    FromPeer,
    PeerAlive,
    PeerGoodbye,
    PeerHello,
    PeerLeaving,
    PeerResumed,
    ShardKept,
    ShardLost,
    StageExported,
    StageFailed,
    StageOffered,
    StageReady,
    StageSaved,
    StageUnsaved,
    StepReady,
)
from swarm_ft.protocol.messages.events import Actor, EventKind
from swarm_ft.protocol.messages.timeline import StepTimeline

_NO_RUN = RunId("")


def decide(state: SwarmState, event: Event, now_s: float) -> tuple[SwarmState, list[Effect]]:
    """Return the state and the effects after an event.

    Args:
        state: State before the event.
        event: Event to handle.
        now_s: Monotonic seconds.
    """
    if isinstance(event, RunAborted):  # decide nothing else: that may raise again
        turn = Transition(state, now_s)
        aborted = Reason(kind=ReasonKind.RUN_ABORTED, text=event.reason)
        _end(turn, event.run_id, RunPhase.FAILED, aborted)
        return turn.state, turn.effects
    turn = Transition(losses.after_gap(state, now_s), now_s)
    _take_in(turn, event)
    snapshot_keepers.reconcile(turn)
    commits.resume_saved_steps(turn)
    commits.resume_waiting_runs(turn)
    snapshots.save_leaving_results(turn)
    losses.reconcile_results(turn)
    drain.reconcile(turn)
    attempts.advance(turn)
    _place_waiting(turn, event)
    drain.send_progress(turn)
    return turn.state, turn.effects


def _take_in(turn: Transition, event: Event) -> None:
    match event:
        case PeerJoined():
            _joined(turn, event)
        case PeerSaid(peer_id, message):
            _on_peer_message(turn, peer_id, message)
        case PeerLost(peer_id):
            lost = Reason(kind=ReasonKind.PEER_DISCONNECTED)
            _peer_gone(turn, peer_id, lost, away_since_s=turn.now_s)
        case RunSubmitted():
            turn.save_run(_run_of(event))
        case RunCancelled() | ResultCollected() | TokensLost():
            _end_for(turn, event)
        case RunPaused() | RunResumed() | RateChanged() | CodecsChanged():
            steering.steer(turn, event)
        case SnapshotWritten() | SnapshotLost():
            snapshots.on_snapshot_written(turn, event)
        case Tick(ways):
            turn.state = replace(turn.state, ways=ways or turn.state.ways)
            _time_passed(turn)
        case RunAborted():
            pass  # `decide` handled it
        case _:
            assert_never(event)


def _run_of(event: RunSubmitted) -> Run:
    return Run(
        run_id=event.run_id,
        spec=event.spec,
        owner=event.owner,
        storage_key=event.storage_key,
        priority=event.priority,
        claim=event.claim,
    )


def _place_waiting(turn: Transition, event: Event) -> None:
    """Place waiting runs; a peer's message alone frees no peers if it had no effects."""
    if turn.effects or not isinstance(event, PeerSaid):
        attempts.place_waiting(turn)


def _time_passed(turn: Transition) -> None:
    _dismiss_silent(turn)
    snapshot_keepers.reconcile_complete(turn)
    attempts.expire(turn)
    history.expire_results(turn)
    history.forget(turn)
    losses.drop_late(turn)
    losses.publish_notices(turn)
    attempts.send_idle_reasons(turn)


# ---- messages of peers


def _on_peer_message(turn: Transition, peer_id: PeerId, message: FromPeer) -> None:
    turn.state = turn.state.with_message_at(peer_id, turn.now_s)
    count_sent(turn, peer_id, message)
    own = {run.run_id: run for run in turn.state.runs_of(peer_id)}
    run = own.get(getattr(message, "run_id", None) or _NO_RUN)
    match message:
        case PeerGoodbye():
            left = Reason(kind=ReasonKind.PEER_LEFT)
            _peer_gone(turn, peer_id, left, EventKind.PEER_LEFT, away_since_s=-math.inf)
        case PeerLeaving() | PeerResumed():
            drain.on_message(turn, peer_id, message)
        case StageReady() | StepReady() | StageOffered() | CaughtUp() | StageExported():
            _on_report(turn, run, peer_id, message)
        case StageFailed():
            _stage_failed(turn, peer_id, message)
        case StageSaved() | StageUnsaved():
            snapshots.on_stage_saved(turn, peer_id, message)
        case ShardKept() | ShardLost():
            snapshot_keepers.on_message(turn, peer_id, message)
        case PeerAlive():
            _alive(turn, run, peer_id, message)
        case PeerHello() | StepTimeline() | ClockProbe() | Machine() | ContributionRequest():
            pass  # `service` handles these; they decide nothing
        case _:
            assert_never(message)


def _on_report(
    turn: Transition,
    run: Run | None,
    peer_id: PeerId,
    message: StageReady | StepReady | StageOffered | CaughtUp | StageExported,
) -> None:
    """Handle a report about a stage; one of a run or an attempt that is over is void."""
    if run is None:
        return
    if isinstance(message, StageExported):
        commits.stage_exported(turn, run, peer_id, message)
    elif _is_current(run, peer_id, message):
        if isinstance(message, (StageReady, StepReady)):
            _ready(turn, run, peer_id, message)
        else:
            _handed_over(turn, run, peer_id, message)


def _alive(turn: Transition, run: Run | None, peer_id: PeerId, message: PeerAlive) -> None:
    turn.state = turn.state.with_links(peer_id, message.links)
    if run:
        losses.on_heartbeat(turn, run, peer_id, message)


def _is_current(
    run: Run,
    peer_id: PeerId,
    message: StageReady | CaughtUp | StepReady | StageFailed | StageOffered,
) -> bool:
    named = (message.run_id, message.attempt)
    return named == (run.run_id, run.attempt.number) and peer_id in run.peers


def _handed_over(
    turn: Transition, run: Run, peer_id: PeerId, message: StageOffered | CaughtUp
) -> None:
    if isinstance(message, StageOffered):
        attempts.on_stage_offered(turn, run, peer_id, message)
    else:
        attempts.on_caught_up(turn, run, peer_id, message)


def _ready(turn: Transition, run: Run, peer_id: PeerId, message: StageReady | StepReady) -> None:
    refusal = report_refusal(run, peer_id, message)
    if refusal is not None:
        why = Reason(kind=ReasonKind.INVALID_REPORT, parts=(refusal,))
        turn.set_run(blame.count(turn, run, peer_id, why))
        _peer_gone(turn, peer_id, why, EventKind.PEER_REFUSED, away_since_s=-math.inf)
        turn.dismiss(peer_id, MalformedMessage, replace(why, peers=(peer_id,)))
    elif isinstance(message, StageReady):
        commits.stage_ready(turn, run, peer_id, message)
    else:
        commits.step_ready(turn, run, peer_id, message)


def _stage_failed(turn: Transition, peer_id: PeerId, failed: StageFailed) -> None:
    """Handle one peer's failure; a single report may affect this peer, and never end the run.

    A peer that cannot host the run cannot in any attempt; all other failures concern the present
    one.
    """
    run = turn.state.runs.get(failed.run_id)
    if run is None or run.phase.is_over or peer_id not in turn.state.members:
        return
    error = from_code(failed.code, failed.message)
    # The run's digests matched, so another peer would find the same weights.
    is_of_model = isinstance(error, NonFiniteWeights) and _is_current(run, peer_id, failed)
    if is_of_model:
        _on_nonfinite_report(turn, run, peer_id, error)
    elif isinstance(error, BadInput):
        _cannot_host(turn, run, peer_id, error)
    elif not _is_current(run, peer_id, failed):
        return
    elif isinstance(error, NonFinite):
        _on_nonfinite_report(turn, run, peer_id, error)
    elif isinstance(error, BuffersLost) and run.lost_at.get(peer_id) != run.committed_steps:
        _lost(turn, run, peer_id, error)
    else:
        _failed(turn, run, peer_id, error, failed.about)


def _cannot_host(turn: Transition, run: Run, peer_id: PeerId, error: SwarmError) -> None:
    """Continue the run without this peer, which stays available for others."""
    misfit = Reason(kind=ReasonKind.PEER_MISFIT, code=error.code, text=error.message)
    misfits = MappingProxyType({**run.misfits, peer_id: misfit})
    run = replace(without_state(run, peer_id), misfits=misfits)
    if peer_id not in run.peers:
        turn.set_run(run)
        return
    cause = replace(misfit, kind=ReasonKind.CANNOT_HOST)
    run = replace(run, detail=loss_of(turn.state, run, peer_id, cause))
    if attempts.continues_loading(turn, run):
        turn.save_run(run)
    else:
        attempts.interrupt(turn, run)


def _on_nonfinite_report(turn: Transition, run: Run, peer_id: PeerId, error: SwarmError) -> None:
    """Have others do the step, where they can; if they fail too, the run diverged, see `blame`.

    Reports of peers on probation end no run: in an open swarm anybody could end one.
    """
    if not turn.state.may_host_alone(peer_id):
        run = blame.record_doubt(turn, run, peer_id, error_of(error, ReasonKind.PEER_ERROR))
        alone = error_of(error, ReasonKind.UNCONFIRMED_ERROR)
        attempts.suspend_and_continue(turn, run, {peer_id: alone}, no_control={peer_id})
        return
    run, ends_for = blame.suspect(turn, run, peer_id, error)
    if ends_for is not None:
        attempts.end(turn, run, RunPhase.FAILED, ends_for)
        return
    reason = error_of(error, ReasonKind.PEER_ERROR)
    run = blame.record_doubt(turn, run, peer_id, reason)
    attempts.interrupt(turn, replace(run, detail=replace(reason, peers=(peer_id,))))


def _lost(turn: Transition, run: Run, peer_id: PeerId, error: SwarmError) -> None:
    """Plan the step again after a peer dropped buffers to make room, at most once a step.

    This is no failure. In the next attempt the peer reports its inventory, and the plan follows it.
    """
    lost_at = {**run.lost_at, peer_id: StepNumber(run.committed_steps)}
    detail = replace(error_of(error, ReasonKind.PEER_ERROR), peers=(peer_id,))
    attempts.interrupt(turn, replace(run, lost_at=MappingProxyType(lost_at), detail=detail))


def _failed(
    turn: Transition, run: Run, peer_id: PeerId, error: SwarmError, about: PeerId | None = None
) -> None:
    """Retry after a peer's own failure, or a neighbour's that it cannot reach.

    Nobody can know which end of a link is broken, so the failure counts against both. A broken peer
    has other neighbours that report it too, and is suspended before them. A peer on probation
    accuses no other peer.
    """
    run, ends_for = blame.suspect(turn, run, peer_id, error)
    if ends_for is not None:
        attempts.end(turn, run, RunPhase.FAILED, ends_for)
        return
    reason = error_of(error, ReasonKind.PEER_ERROR)
    details = [replace(reason, peers=(peer_id,))]
    if isinstance(error, OutOfTurn) and run.phase is RunPhase.LOADING:
        # Its state disagrees with this one; retry at once from this one.
        run = replace(without_state(run, peer_id), not_before_s=turn.now_s)
    elif peer_id in run.listeners and not isinstance(error, Unavailable):
        run = without_state(run, peer_id)  # a sum is lost, or the state is inconsistent
    is_credible = about in run.peers and about != peer_id and turn.state.may_host_alone(peer_id)
    ends = {peer_id: ""} | ({about: peer_id} if about is not None and is_credible else {})
    has_control = not isinstance(error, OutOfMemory)
    for end, by in ends.items():
        run = blame.count(turn, run, end, reason, by=by, has_control=has_control)
        if run.has_suspended(end, turn.now_s):
            details.append(Reason(kind=ReasonKind.SUSPENDED, peers=(end,)))
    attempts.interrupt(turn, replace(run, detail=several(details)))


# ---- peers that join and leave


def _joined(turn: Transition, event: PeerJoined) -> None:
    hello, grant = event.hello, event.grant
    if hello.layers is not None and not grant.covers(hello.layers):
        granted = () if grant.layers is None else (grant.layers,)
        refusal = Reason(
            kind=ReasonKind.GRANT_LAYERS,
            peers=(hello.peer_id,),
            layers=(*granted, hello.layers),
        )
        turn.dismiss(hello.peer_id, NotAllowed, refusal)
        return
    member = Member(
        hello=hello,
        joined_at_s=turn.now_s,
        heard_at_s=turn.now_s,
        grant=grant,
        leaving=hello.leaving,
        site=event.site,
        offered_bytes=hello.memory_bytes,
    )
    turn.state = without_misfit(with_exports_of(turn.state, member), hello.peer_id)
    former = turn.state.members.get(hello.peer_id)
    turn.state = turn.state.with_member(member)
    _divide_memory(turn, member.site)
    if former is not None and former.site != member.site:
        _divide_memory(turn, former.site)
    joined = Reason(
        kind=ReasonKind.PEER_JOINED,
        peers=(hello.peer_id,),
        layers=(hello.layers,) if hello.layers else (),
    )
    turn.emit(EventKind.PEER_JOINED, None, hello.peer_id, reason=joined)
    for run in turn.state.going_runs:
        _on_peer_rejoined(turn, run, hello)
    for stage in hello.held:
        if not is_wanted(turn.state, hello.peer_id, stage):
            release = Release(
                run_id=stage.run_id,
                reason=Reason(kind=ReasonKind.RELEASED_UNUSED),
                is_over=_is_over(turn.state, stage.run_id),
            )
            turn.send(hello.peer_id, release)
    snapshot_keepers.joined(turn, hello)
    for run_id in hello.kept_runs:
        if _is_over(turn.state, run_id):
            reason = Reason(kind=ReasonKind.RELEASED_OVER)
            turn.send(hello.peer_id, Release(run_id=run_id, reason=reason, is_over=True))


def _is_over(state: SwarmState, run_id: RunId) -> bool:
    """Whether the coordinator knows the run, and knows that it is over."""
    run = state.runs.get(run_id)
    return run is not None and run.phase > RunPhase.FINISHED


def _on_peer_rejoined(turn: Transition, run: Run, hello: PeerHello) -> None:
    """Handle a peer that joined a run's swarm again; its inventory determines its use."""
    peer, before, held = hello.peer_id, run, hello.held_of(run.run_id)
    is_loading = run.phase is RunPhase.LOADING
    if not (is_loading or held or knows_of(run, peer)):
        return
    run = without_state(run, peer)
    holds = dict(run.past.holds)
    if held and missed_last_commit(run, held, peer) and run.past.last_commit:
        turn.send(peer, run.past.last_commit)
        holds[peer] = run.committed_steps
    elif held and holds_last_commit(run, held) and may_hold_last_commit(before, peer):
        holds[peer] = run.committed_steps
    away = {name: since for name, since in run.attempt.away_since_s.items() if name != peer}
    run = run.with_holds(holds).with_away(away)
    if peer in run.peers or (is_loading and _grows(turn, run)):
        joins = Reason(kind=ReasonKind.PEERS_JOIN, peers=(peer,))
        detail = run.detail if run.phase is RunPhase.WAITING else joins
        attempts.interrupt(turn, replace(run, detail=detail))
    else:
        turn.set_run(run)


def _grows(turn: Transition, run: Run) -> bool:
    """Whether a member can join the run's stages."""
    return with_newcomers(share_of(turn.state, run, turn.now_s), run) is not run


def _dismiss_silent(turn: Transition) -> None:
    """Dismiss members that sent no message for too long."""
    for peer_id, member in turn.state.members.items():
        silent_s = turn.now_s - member.heard_at_s
        if silent_s >= SILENT_S:
            why = Reason(kind=ReasonKind.PEER_SILENT, amount=silent_s)
            _peer_gone(turn, peer_id, why, away_since_s=turn.now_s)
            turn.dismiss(peer_id, Unavailable, replace(why, peers=(peer_id,)))


def _divide_memory(turn: Transition, site: str) -> None:
    """Divide the memory of a machine among its members, and notify those whose share changed."""
    turn.state, notices = divide_memory(turn.state, site)
    for peer_id, share in notices:
        turn.send(peer_id, share)


def _peer_gone(
    turn: Transition,
    peer_id: PeerId,
    why: Reason,
    kind: EventKind = EventKind.PEER_GONE,
    *,
    away_since_s: float,
) -> None:
    if peer_id not in turn.state.members:
        return
    site = turn.state.members[peer_id].site
    turn.state = turn.state.without_member(peer_id)
    _divide_memory(turn, site)
    write_sent(turn, peer_id)
    losses.holder_gone(turn, peer_id, away_since_s=away_since_s)
    runs = turn.state.runs_of(peer_id)
    given = turn.state.contribution_of(peer_id)
    for run in runs or (None,):
        reason = replace(why, peers=(peer_id,), given=given if given.steps else None)
        turn.emit(kind, run, peer_id, reason=reason)
    for run in runs:
        away = {**run.attempt.away_since_s, peer_id: away_since_s}
        detail = loss_of(turn.state, run, peer_id, why)
        after = without_state(run, peer_id) if peer_id in run.listeners else run
        attempts.interrupt(turn, replace(after.with_away(away), detail=detail))


# ---- ends


def _end_for(turn: Transition, event: RunCancelled | ResultCollected | TokensLost) -> None:
    if isinstance(event, RunCancelled):
        by_operator, by_client = ReasonKind.CANCELLED_BY_OPERATOR, ReasonKind.CANCELLED_BY_CLIENT
        kind = by_operator if event.actor is Actor.OPERATOR else by_client
        reason = Reason(kind=kind, actor=event.actor)
        _end(turn, event.run_id, RunPhase.CANCELLED, reason)
    elif isinstance(event, TokensLost):
        unreadable = Reason(kind=ReasonKind.DATA_UNREADABLE, text=event.message)
        _end(turn, event.run_id, RunPhase.FAILED, unreadable)
    else:
        _collected(turn, event.run_id)


def _end(turn: Transition, run_id: RunId, phase: RunPhase, detail: Reason) -> None:
    run = turn.state.runs.get(run_id)
    if run is not None and run.phase <= RunPhase.FINISHED:
        attempts.end(turn, run, phase, detail)


def _collected(turn: Transition, run_id: RunId) -> None:
    run = turn.state.runs.get(run_id)
    if run is not None and run.phase is RunPhase.FINISHED:
        collected = Reason(kind=ReasonKind.RESULT_COLLECTED)
        attempts.end(turn, run, RunPhase.COLLECTED, collected)
