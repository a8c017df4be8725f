"""Attempts: assignments of stages to peers, from the first one to those after losses.

An attempt ends with `interrupt`; `advance` starts the next as soon as its peers are there.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from swarm_ft.coordinator.decide import blame
from swarm_ft.coordinator.facts.events import RollbackRecord, Transition
from swarm_ft.coordinator.facts.messages import Idle, Release
from swarm_ft.coordinator.facts.reasons import MAX_NAMED, Reason, ReasonKind, several
from swarm_ft.coordinator.facts.state import (
    AttemptState,
    CommittedState,
    PhaseProgress,
    Repartition,
    Run,
    Saving,
    Snapshot,
    SwarmState,
)
from swarm_ft.coordinator.plan import keepers
from swarm_ft.coordinator.plan.allocation import Allocation, allocate_members, share_of
from swarm_ft.coordinator.plan.inputs import division_inputs
from swarm_ft.coordinator.plan.membership import (
    eligible_members,
    find_placement,
    is_suspended_for,
    learners_of,
    loss_of,
    lost_stages,
    misfit_of_all,
    offers_in,
    offers_to_begin,
    patience_s,
    place_first_hosts,
    reasons_to_idle,
    remedy_for,
    surely_begins,
    suspension_of,
    weights_lost,
    with_caught_up,
    with_newcomers,
    with_survivors,
    without_state,
)
from swarm_ft.coordinator.plan.neighbours import with_better_neighbours
from swarm_ft.coordinator.plan.offers import Offers
from swarm_ft.coordinator.plan.placement import SETTLE_S, Placement
from swarm_ft.coordinator.plan.stage_keys import peer_key, stage_keys
from swarm_ft.coordinator.plan.steps import measured_on, with_ledger
from swarm_ft.ids import NO_ATTEMPT, Attempt, PeerId, StepNumber
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.messages.control import (
    Assign,
    CatchUp,
    CaughtUp,
    GiveShard,
    Learner,
    StageAssignment,
    StageOffered,
)
from swarm_ft.protocol.messages.events import EventKind
from swarm_ft.protocol.messages.shard import ShardName
from swarm_ft.protocol.spec.layers import LayerRange


def interrupt(turn: Transition, run: Run) -> None:
    """End the present attempt; `advance` starts the next when it can."""
    turn.save_run(replace(with_caught_up(run), phase=RunPhase.WAITING, notice=None))


def keeps_polling(turn: Transition, run: Run) -> bool:
    """Whether a failed attempt goes on loading, to learn which other peers cannot host the run.

    If no peer can, the run is over; a peer that is released before it checked would never report
    it. A peer that is ready, or waits for others, has loaded its stage: then one can.
    """
    unknown = turn.state.members.keys() & set(run.peers) - run.misfits.keys()
    if run.phase is not RunPhase.LOADING or run.committed_steps:
        return False
    if run.attempt.loaded or run.attempt.awaited.waited_s:
        return False
    able = share_of(turn.state, run, turn.now_s)
    return bool(unknown) and not find_placement(able, run, turn.now_s).assignments


def advance(turn: Transition) -> None:
    """Continue runs whose attempt ended, and end failed attempts that learn nothing more."""
    for run in turn.state.active_runs:
        is_loading = run.phase is RunPhase.LOADING
        if is_loading and any(p in run.peers for p in run.misfits) and not keeps_polling(turn, run):
            interrupt(turn, run)
    for run in turn.state.active_runs:
        if run.phase <= RunPhase.WAITING and turn.now_s >= run.not_before_s:
            _resume(turn, run)


def expire(turn: Transition) -> None:
    """End runs that no set of members could host for too long."""
    queue_s = turn.state.queue_s
    for run in turn.state.going_runs:
        if turn.now_s - run.unplaced_since_s < queue_s or run.steering.is_paused:
            continue
        if find_placement(
            eligible_members(turn.state, run, turn.now_s), run, turn.now_s
        ).assignments:
            turn.set_run(replace(run, unplaced_since_s=math.inf))
        else:
            waited = () if run.detail is None else (run.detail,)
            expired = Reason(kind=ReasonKind.QUEUE_EXPIRED, amount=queue_s, parts=waited)
            end(turn, run, RunPhase.FAILED, expired)


def end(turn: Transition, run: Run, phase: RunPhase, detail: Reason) -> None:
    """End the run, and release every connected member, including former participants.

    The run's storage key is dropped, so that nobody can decrypt what remains on other machines'
    disks.
    """
    turn.save_run(replace(run, phase=phase, detail=detail, storage_key=b""))
    if run.attempt.number != NO_ATTEMPT:
        for peer in turn.state.members:
            turn.send(peer, Release(run_id=run.run_id, reason=detail, is_over=True))


def release(turn: Transition, run: Run, peer_id: PeerId, kind: ReasonKind) -> None:
    """Release a peer from the run."""
    turn.send(peer_id, Release(run_id=run.run_id, reason=Reason(kind=kind)))


def send_idle_reasons(turn: Transition) -> None:
    """Send each member without work the reason, once."""
    state, members = turn.state, dict(turn.state.members)
    reasons = _reasons_to_idle(state, turn.now_s)
    for peer_id, member in state.members.items():
        reason = reasons[peer_id]
        if reason != member.idle:
            members[peer_id] = replace(member, idle=reason)
        if reason is not None and reason != member.idle and member.leaving is None:
            turn.send(peer_id, Idle(reason=reason))
    if any(reasons[peer] != member.idle for peer, member in state.members.items()):
        turn.state = replace(state, members=MappingProxyType(members))


def _reasons_to_idle(state: SwarmState, now_s: float) -> Mapping[PeerId, Reason | None]:
    """Return each member's reason to be idle, cached until an input changes."""
    answers = state.memo.of((division_inputs(state, now_s), state.standings))
    if "idle" not in answers:
        answers["idle"] = reasons_to_idle(state, now_s)
    found: Mapping[PeerId, Reason | None] = answers["idle"]
    return found


def suspend_and_continue(
    turn: Transition,
    run: Run,
    reasons: Mapping[PeerId, Reason],
    *,
    no_control: Collection[PeerId] = (),
) -> None:
    """Suspend peers, each for its reason, and continue without them.

    Args:
        turn: Present transition.
        run: Run of these peers.
        reasons: Reason for each of them.
        no_control: Those of them that no other peer can be compared with; only this run suspends
            them.
    """
    losses = []
    for peer, why in reasons.items():
        losses.append(loss_of(turn.state, run, peer, why))
        if peer in no_control:
            run = blame.suspend_from_run(turn, run, peer, why)
        else:
            blame.suspend(turn, run, peer, why)
        run = without_state(run, peer)
    interrupt(turn, replace(run, detail=several(losses)))


def on_stage_offered(turn: Transition, run: Run, peer_id: PeerId, offer: StageOffered) -> None:
    """Forward a source's first offer to its learners; the other sources offer the same bytes."""
    attempt, proofs = run.attempt, dict(run.attempt.proofs)
    for learner in attempt.learners:
        proof = offer.proofs.get(learner.peer_id)
        if proof is None or learner.step != offer.step or peer_id not in learner.sources:
            continue
        if learner.peer_id not in proofs:
            turn.send(learner.peer_id, _catch_up(run, peer_id, offer, learner))
        proofs[learner.peer_id] = proofs.get(learner.peer_id, frozenset()) | {proof}
    turn.set_run(replace(run, attempt=replace(attempt, proofs=MappingProxyType(proofs))))


def _catch_up(run: Run, source: PeerId, offer: StageOffered, learner: Learner) -> CatchUp:
    return CatchUp(
        run_id=run.run_id,
        attempt=run.attempt.number,
        digest=offer.digest,
        total_bytes=offer.total_bytes,
        sources=(source, *(other for other in learner.sources if other != source)),
    )


def on_caught_up(turn: Transition, run: Run, peer_id: PeerId, message: CaughtUp) -> None:
    """Count a learner that proves its stage's state as a replica from the next plan on."""
    attempt, measured = run.attempt, run.measured
    if peer_id in attempt.caught_up or all(t.peer_id != peer_id for t in attempt.learners):
        return
    if message.proof not in attempt.proofs.get(peer_id, ()):
        suspend_and_continue(turn, run, {peer_id: Reason(kind=ReasonKind.WRONG_STATE)})
        return
    attempt = replace(attempt, caught_up=attempt.caught_up | {peer_id})
    took_s = turn.now_s - attempt.learning_since_s.get(peer_id, turn.now_s)
    measured = replace(
        measured,
        state_bytes=measured.state_bytes + message.state_bytes,
        state_bytes_per_s=message.state_bytes / took_s if took_s else measured.state_bytes_per_s,
    )
    turn.set_run(replace(run, attempt=attempt, measured=measured))


def _resume(turn: Transition, run: Run) -> None:
    run = with_caught_up(run)  # a learner may have caught up since the last attempt ended
    able = share_of(turn.state, run, turn.now_s)
    grace_s = patience_s(able, run, turn.now_s)
    settled_run = with_survivors(able, run, turn.now_s, grace_s)
    if settled_run is None and _is_waited_for(turn, run, able):
        return
    if settled_run is None:
        lost = lost_stages(able, run)
        why = weights_lost(turn.state, run, lost, turn.now_s)
        go_back(turn, run, why, [stage.layers for stage in lost])  # `place_waiting` follows
        _let_leavers_go(turn, run)
        return
    away = [a for a in settled_run.attempt.assignments if a.peer_id not in turn.state.members]
    if away:
        may_return = Reason(
            kind=ReasonKind.PEER_MAY_RETURN,
            layers=tuple(dict.fromkeys(assignment.layers for assignment in away)),
            amount=round(grace_s) if turn.now_s >= settled_run.gather_until_s else None,
        )
        _wait(turn, settled_run, may_return)
    else:
        _assign(turn, with_newcomers(able, settled_run), fresh=not settled_run.committed_steps)
        _let_leavers_go(turn, run)


def _let_leavers_go(turn: Transition, before: Run) -> None:
    """Release those of a run's leaving peers that it continues without."""
    peers = turn.state.runs[before.run_id].peers
    for peer in before.peers:
        if peer in turn.state.leaving and peer not in peers:
            release(turn, before, peer, ReasonKind.RELEASED_LEAVER)


def _is_waited_for(turn: Transition, run: Run, able: SwarmState) -> bool:
    """Whether the run lacks only suspended peers, and no placement does without them."""
    connected = [p for p in run.peers if p in turn.state.members and p not in run.misfits]
    suspended = [p for p in connected if is_suspended_for(turn.state, run, p, turn.now_s)]
    if not suspended or find_placement(able, run, turn.now_s).assignments:
        return False
    resting, parts = suspended[0], (suspension_of(turn.state, run, suspended[0], turn.now_s),)
    reason = Reason(kind=ReasonKind.AWAITS_SUSPENDED, peers=(resting,), parts=parts)
    _without_peers(turn, run, reason)
    return True


def go_back(turn: Transition, run: Run, why: Reason, lost: Sequence[LayerRange]) -> None:
    """Roll back to the newest snapshot, or the beginning, with the members that are there.

    Args:
        turn: Present transition.
        run: Run that lost a part of its state.
        why: Reason of the loss.
        lost: Layers of the loss.
    """
    past = run.past.rolled_back
    run = replace(run, moving=_moving_from(run, past))
    _tell_went_back(turn, run, past, why, lost)
    if past.trained_steps is None:
        is_evaluated = past.judged.step == past.committed_steps
        turn.write(RollbackRecord(run.run_id, StepNumber(past.committed_steps), is_evaluated))
    if not past.all_steps:
        run = replace(run, steering=run.steering.measured_anew)
    turn.save_run(_at(run, past))
    if past.snapshot is None:
        for peer in run.peers:
            if peer in turn.state.members:
                release(turn, run, peer, ReasonKind.RELEASED_AT_START)


def _moving_from(run: Run, past: CommittedState) -> Repartition | None:
    """Return the new stages, if the snapshot belongs to a repartition."""
    moving = run.moving
    if moving is None or past.snapshot is None or past.snapshot.step != moving.step:
        return None
    return replace(moving, has_begun=True)


def _tell_went_back(
    turn: Transition, run: Run, past: CommittedState, why: Reason, lost: Sequence[LayerRange]
) -> None:
    """Notify watchers and emit an event, if the rollback voids steps."""
    from_step, to_step = run.past.all_steps, past.all_steps
    if to_step >= from_step:
        return
    went_back = Reason(
        kind=ReasonKind.WENT_BACK,
        step=to_step,
        amount=from_step,
        parts=(why, remedy_for(turn.state, run, lost)),
    )
    turn.publish(run.run_id, went_back)
    turn.emit(EventKind.RUN_WENT_BACK, run, reason=went_back, from_step=from_step, to_step=to_step)


def load_best(turn: Transition, run: Run, best: Snapshot) -> None:
    """Have all peers of a trained run load its best weights, which become the result."""
    worth = run.past.judged.saved
    detail = Reason(
        kind=ReasonKind.LOADING_BEST,
        step=best.step,
        text=run.spec.train.best_metric if worth else "",
        value=worth.value if worth else None,
    )
    turn.save_run(
        replace(_at(run, run.past.with_best(best)), phase=RunPhase.WAITING, detail=detail)
    )


def _at(run: Run, past: CommittedState) -> Run:
    """Return the run reset to `past`; no peer has loaded it yet."""
    attempt = AttemptState(number=run.attempt.number)
    return replace(run, past=past, attempt=attempt, step=None, saving=Saving())


def place_waiting(turn: Transition) -> None:
    """Give free peers to runs that have none, see `sharing`.

    A pass that changes nothing is not repeated until one of its inputs changes.
    """
    if len(turn.state.active_runs) == len(turn.state.going_runs):
        return
    inputs = division_inputs(turn.state, turn.now_s)
    sharing = allocate_members(turn.state, turn.now_s, inputs)
    answers = turn.state.memo.of(inputs)
    waiting = _waiting(turn, sharing)
    if answers.get("nothing to place") == waiting:
        return
    before, num_effects = turn.state, len(turn.effects)
    everybody = offers_to_begin(turn.state, turn.now_s)
    at_work = turn.state.active_runs
    for position, run in enumerate(waiting[0]):
        if turn.now_s >= run.not_before_s:
            line = _Line(at_work, position, everybody)
            at_work = turn.state.active_runs if _place(turn, run, sharing, line) else at_work
    if turn.state is before and len(turn.effects) == num_effects:
        answers["nothing to place"] = waiting


def _waiting(
    turn: Transition, sharing: Allocation
) -> tuple[tuple[Run, ...], tuple[bool, ...], tuple[PeerId, ...]]:
    """Return runs without peers in their order, which of them rest, and the newest members."""
    runs = tuple(turn.state.runs[name] for name in sharing.in_turn)
    rest = tuple(turn.now_s < run.not_before_s for run in runs)
    members = turn.state.members.items()
    new = tuple(peer for peer, member in members if turn.now_s - member.joined_at_s < SETTLE_S)
    return runs, rest, new


@dataclass(frozen=True, slots=True)
class _Line:
    """A waiting run's place in the queue.

    Attributes:
        at_work: Runs that have peers.
        position: Number of waiting runs before it.
        everybody: Offers of all members, as if they were free.
    """

    at_work: Sequence[Run]
    position: int
    everybody: Offers


def _place(turn: Transition, run: Run, sharing: Allocation, line: _Line) -> bool:
    """Assign to a run the peers that it may use now, or set its reason to wait; return success."""
    placement, members = Placement(()), turn.state.members
    if sharing.members.get(run.run_id):
        able = eligible_members(sharing.view_for(turn.state, run), run, turn.now_s)
        placement, members = find_placement(able, run, turn.now_s), able.members
    if placement.assignments and not _waits_for_keepers(turn, run):
        placed = placement.assignments
        if not placement.is_by_speed:
            placed = with_better_neighbours(run.spec, placed, members, turn.state.ways)
        _assign(turn, run.with_assignments(placed), fresh=True)
        return True
    if not placement.assignments:
        _unplaced(turn, run, placement, line)
    return False


def _waits_for_keepers(turn: Transition, run: Run) -> bool:
    """Whether the keepers of the snapshot that it starts from are away.

    After a while it goes back to an older snapshot.
    """
    missing = keepers.without_keepers(turn.state, run.past.saved)
    since_s = min(run.keeping.missing_since_s, turn.now_s) if missing else math.inf
    run = replace(run, keeping=replace(run.keeping, missing_since_s=since_s))
    turn.set_run(run)
    if not missing:
        return False
    reason = Reason(
        kind=ReasonKind.AWAITS_KEEPERS,
        peers=tuple(dict.fromkeys(peer for stage in missing for peer in stage.keepers)),
        layers=tuple(stage.layers for stage in missing),
        step=run.committed_steps,
    )
    is_late = turn.now_s - since_s >= keepers.patience_s(turn.state, run)
    if is_late and run.past.trained_steps is None:
        past = replace(run.past, snapshots=keepers.available(turn.state, run))
        away = replace(reason, kind=ReasonKind.KEEPERS_AWAY)
        go_back(turn, replace(run, past=past), away, reason.layers)
    else:
        _without_peers(turn, run, reason)
    return True


def _unplaced(turn: Transition, run: Run, placement: Placement, line: _Line) -> None:
    """Set the reason that a run waits for, or end it if nothing can help."""
    state = turn.state
    hopeless = misfit_of_all(state, run)
    if hopeless is not None:
        misfit = Reason(kind=ReasonKind.NO_PEER_CAN_HOST, parts=(hopeless,))
        end(turn, run, RunPhase.FAILED, misfit)
        return
    offers, could_begin = line.everybody.without(run.misfits), False
    if run.doubts or run.conducts:
        offers = offers_in(eligible_members(state, run, turn.now_s))
    if not placement.is_gathering:
        could_begin = surely_begins(offers, run, turn.now_s)
    if not (placement.is_gathering or could_begin):
        placement = place_first_hosts(offers, run, turn.now_s)
    if could_begin or placement.assignments:
        _without_peers(turn, run, _behind(line), RunPhase.QUEUED)
        return
    busy = len(state.members.keys() & state.result_keepers)
    results = Reason(kind=ReasonKind.RESULTS_KEPT, amount=busy) if busy else None
    misfits = [replace(misfit, peers=(peer,)) for peer, misfit in run.misfits.items()]
    _without_peers(turn, run, several([placement.reason, results, *misfits[:MAX_NAMED]]))


def _behind(line: _Line) -> Reason:
    """Return the reason of a run that could begin if others were over."""
    names = [run.run_id for run in line.at_work]
    return Reason(
        kind=ReasonKind.BEHIND,
        runs=tuple(names[:MAX_NAMED]),
        num_more=len(names[MAX_NAMED:]),
        amount=line.position,
    )


def _without_peers(
    turn: Transition, run: Run, detail: Reason | None, phase: RunPhase = RunPhase.WAITING
) -> None:
    """Let the run wait, and note since when; see `expire` and `sharing`."""
    if turn.now_s < run.unplaced_since_s:
        run = replace(run, unplaced_since_s=turn.now_s)
        turn.set_run(run)
    _wait(turn, run, detail, phase)


def _wait(
    turn: Transition, run: Run, detail: Reason | None, phase: RunPhase = RunPhase.WAITING
) -> None:
    if (run.phase, run.detail) != (phase, detail):
        turn.save_run(replace(run, phase=phase, detail=detail))


def _assign(turn: Transition, run: Run, *, fresh: bool) -> None:
    before, learners = run, () if fresh else tuple(learners_of(turn.state, run))
    attempt = AttemptState(
        number=Attempt(run.attempt.number + 1),
        awaited=PhaseProgress(since_s=turn.now_s),
        assignments=tuple(_reachable(turn, stage) for stage in run.attempt.assignments),
        learners=learners,
        learning_since_s=_learning_since_s(run, learners, turn.now_s),
    )
    run = replace(
        with_ledger(run),
        phase=RunPhase.LOADING,
        detail=Reason(kind=ReasonKind.LOADING),
        attempt=attempt,
    )
    if fresh:
        run = replace(run, measured=measured_on(run))
    turn.save_run(run)
    turn.write_ledger(before, run)
    assign = _assignment(turn.state, run, fresh=fresh)
    _order_shards(turn, run, assign)
    for stage in attempt.assignments:
        turn.send(stage.peer_id, _with_keys(assign, run.storage_key, stage))


def _learning_since_s(
    run: Run, learners: Collection[Learner], now_s: float
) -> Mapping[PeerId, float]:
    """Return when each learner began; a learner of the same step keeps its time."""
    steps = {learner.peer_id: learner.step for learner in run.attempt.learners}
    known = run.attempt.learning_since_s
    return MappingProxyType(
        {
            t.peer_id: known.get(t.peer_id, now_s) if steps.get(t.peer_id) == t.step else now_s
            for t in learners
        }
    )


def _reachable(turn: Transition, stage: StageAssignment) -> StageAssignment:
    member = turn.state.members.get(stage.peer_id)
    return replace(stage, endpoint=member.hello.endpoint if member else "")


def _order_shards(turn: Transition, run: Run, assign: Assign) -> None:
    """Order the keepers of a snapshot to send it to the peers that start from it."""
    for stage in assign.saved:
        takers = [a.peer_id for a in assign.assignments if a.layers.overlaps(stage.layers)]
        name = ShardName(
            run_id=run.run_id,
            step=StepNumber(assign.committed_steps),
            layers=stage.layers,
            is_saved=True,
        )
        for keeper in stage.keepers:
            turn.send(keeper, GiveShard(name=name, takers=tuple(takers)))


def _assignment(state: SwarmState, run: Run, *, fresh: bool) -> Assign:
    past, attempt = run.past, run.attempt
    went_back = fresh and past.committed_steps
    saved = past.saved.stages if went_back and past.saved else ()
    return Assign(
        run_id=run.run_id,
        spec=run.spec,
        attempt=attempt.number,
        assignments=attempt.assignments,
        committed_steps=past.committed_steps,
        fresh=fresh,
        spec_digest=run.spec.digest(),
        learners=attempt.learners,
        saved=tuple(replace(stage, keepers=keepers.holders(state, stage)) for stage in saved),
        last_attempt=past.last_commit.attempt if past.last_commit else NO_ATTEMPT,
        owner=run.owner,
        priority=run.priority,
        claim=run.claim.name,
        weight=run.claim.weight,
    )


def _with_keys(assign: Assign, run_key: bytes, stage: StageAssignment) -> Assign:
    """Return the assignment with the keys that this peer needs."""
    return replace(
        assign,
        storage_key=peer_key(run_key, stage.peer_id),
        stage_keys=stage_keys(run_key, stage.layers, assign.saved),
    )
