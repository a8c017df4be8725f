"""Attempts: assignments of stages to peers, from the first one to those after losses.

An attempt ends with `interrupt`. A run with peers then gets its next attempt from `advance`, as
soon as these peers are there. If weights are lost, `go_back` returns the run to a snapshot and
leaves it without peers. Such runs, and new ones, get peers from `place_waiting`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

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

# ---- the end of an attempt, and of a run


def interrupt(turn: Transition, run: Run) -> None:
    """End the present attempt; the run waits until `advance` starts the next one.

    Learners that caught up are replicas in the next attempt.
    """
    turn.save_run(replace(with_caught_up(run), phase=RunPhase.WAITING, notice=None))


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
        no_control: Those of them whose failure no other peer confirms; only this run suspends
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


def continues_loading(turn: Transition, run: Run) -> bool:
    """Whether a first attempt that failed goes on loading.

    It does while no placement is left and some peers have yet to report whether they can host the
    run. These peers stay assigned, because a released peer would not report it. If none can host
    the run, the run fails. A peer that is ready, or waits for others, has loaded its stage, so it
    can host the run.
    """
    unchecked = turn.state.members.keys() & (set(run.peers) - run.misfits.keys())
    if run.phase is not RunPhase.LOADING or run.committed_steps:
        return False
    if run.attempt.loaded or run.attempt.awaited.waited_s:
        return False
    able = share_of(turn.state, run, turn.now_s)
    return bool(unchecked) and not find_placement(able, run, turn.now_s).assignments


def end(turn: Transition, run: Run, phase: RunPhase, detail: Reason) -> None:
    """End the run, and release every connected member, including former participants.

    The run's storage key is dropped, so that nobody can decrypt what remains on other machines'
    disks.
    """
    turn.save_run(replace(run, phase=phase, detail=detail, storage_key=b""))
    if run.attempt.number != NO_ATTEMPT:
        for peer in turn.state.members:
            turn.send(peer, Release(run_id=run.run_id, reason=detail, is_over=True))


def expire(turn: Transition) -> None:
    """End runs that have waited for too long, and that the present members cannot host."""
    state, now_s = turn.state, turn.now_s
    for run in state.going_runs:
        if now_s - run.unplaced_since_s < state.queue_s or run.steering.is_paused:
            continue
        if find_placement(eligible_members(turn.state, run, now_s), run, now_s).assignments:
            # The run waits for its turn only. Its time starts again if that changes.
            turn.set_run(replace(run, unplaced_since_s=math.inf))
        else:
            last_detail = () if run.detail is None else (run.detail,)
            expired = Reason(kind=ReasonKind.QUEUE_EXPIRED, amount=state.queue_s, parts=last_detail)
            end(turn, run, RunPhase.FAILED, expired)


def release(turn: Transition, run: Run, peer_id: PeerId, kind: ReasonKind) -> None:
    """Release a peer from the run."""
    turn.send(peer_id, Release(run_id=run.run_id, reason=Reason(kind=kind)))


# ---- the next attempt of a run that has peers


def advance(turn: Transition) -> None:
    """Start the next attempt of each run whose attempt ended, if its peers are there.

    A failed attempt that loads ends here as soon as it learns nothing more.
    """
    for run in turn.state.active_runs:
        has_misfits = any(peer in run.peers for peer in run.misfits)
        if run.phase is RunPhase.LOADING and has_misfits and not continues_loading(turn, run):
            interrupt(turn, run)
    for run in turn.state.active_runs:
        is_between_attempts = run.phase in (RunPhase.QUEUED, RunPhase.WAITING)
        if is_between_attempts and turn.now_s >= run.not_before_s:
            _continue(turn, run)


def _continue(turn: Transition, run: Run) -> None:
    """Assign the run's stages to the peers that remain, wait for absent ones, or go back."""
    run = with_caught_up(run)  # a learner may have caught up since the last attempt ended
    able = share_of(turn.state, run, turn.now_s)
    grace_s = patience_s(able, run, turn.now_s)
    remaining = with_survivors(able, run, turn.now_s, grace_s)
    if remaining is None:
        _continue_without_weights(turn, run, able)
        return
    away = [a for a in remaining.attempt.assignments if a.peer_id not in turn.state.members]
    if away:
        may_return = Reason(
            kind=ReasonKind.PEER_MAY_RETURN,
            layers=tuple(dict.fromkeys(assignment.layers for assignment in away)),
            amount=round(grace_s) if turn.now_s >= remaining.gather_until_s else None,
        )
        _wait(turn, remaining, may_return)
    else:
        _assign(turn, with_newcomers(able, remaining), fresh=not remaining.committed_steps)
        _release_leavers(turn, run)


def _continue_without_weights(turn: Transition, run: Run, able: SwarmState) -> None:
    """Wait for suspended peers if the run needs them; otherwise go back to a snapshot."""
    suspension = _awaited_suspension(turn, run, able)
    if suspension is not None:
        _wait_unplaced(turn, run, suspension)
        return
    lost = lost_stages(able, run)
    why = weights_lost(turn.state, run, lost, turn.now_s)
    go_back(turn, run, why, [stage.layers for stage in lost])
    _release_leavers(turn, run)


def _awaited_suspension(turn: Transition, run: Run, able: SwarmState) -> Reason | None:
    """Return the reason to wait for a suspended peer, if no placement does without it."""
    connected = [p for p in run.peers if p in turn.state.members and p not in run.misfits]
    suspended = [p for p in connected if is_suspended_for(turn.state, run, p, turn.now_s)]
    if not suspended or find_placement(able, run, turn.now_s).assignments:
        return None
    suspension = suspension_of(turn.state, run, suspended[0], turn.now_s)
    return Reason(kind=ReasonKind.AWAITS_SUSPENDED, peers=(suspended[0],), parts=(suspension,))


def _release_leavers(turn: Transition, before: Run) -> None:
    """Release those of a run's leaving peers that it continues without."""
    peers = turn.state.runs[before.run_id].peers
    for peer in before.peers:
        if peer in turn.state.leaving and peer not in peers:
            release(turn, before, peer, ReasonKind.RELEASED_LEAVER)


# ---- rollback


def go_back(turn: Transition, run: Run, why: Reason, lost: Sequence[LayerRange]) -> None:
    """Roll back to the newest snapshot, or the beginning; the run then has no peers.

    Args:
        turn: Present transition.
        run: Run that lost a part of its state.
        why: Reason of the loss.
        lost: Layers of the loss.
    """
    past = run.past.rolled_back
    run = replace(run, moving=_repartition_after(run, past))
    _report_rollback(turn, run, past, why, lost)
    is_training = past.trained_steps is None
    if is_training:  # a trained run that loads its best weights again loses no step
        is_evaluated = past.judged.step == past.committed_steps
        turn.write(RollbackRecord(run.run_id, StepNumber(past.committed_steps), is_evaluated))
    is_at_beginning = not past.all_steps
    if is_at_beginning:
        run = replace(run, steering=run.steering.without_measurements)
    turn.save_run(_reset_to(run, past))
    if past.snapshot is None:
        for peer in run.peers:
            if peer in turn.state.members:
                release(turn, run, peer, ReasonKind.RELEASED_AT_START)


def _repartition_after(run: Run, past: CommittedState) -> Repartition | None:
    """Return the run's repartition, begun, if `past` ends with its snapshot; None otherwise."""
    moving = run.moving
    if moving is None or past.snapshot is None or past.snapshot.step != moving.step:
        return None
    return replace(moving, has_begun=True)


def _report_rollback(
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
    evaluation = run.past.judged.saved
    detail = Reason(
        kind=ReasonKind.LOADING_BEST,
        step=best.step,
        text=run.spec.train.best_metric if evaluation else "",
        value=evaluation.value if evaluation else None,
    )
    run = _reset_to(run, run.past.with_best(best))
    turn.save_run(replace(run, phase=RunPhase.WAITING, detail=detail))


def _reset_to(run: Run, past: CommittedState) -> Run:
    """Return the run with another history and without peers: none has loaded that state yet."""
    attempt = AttemptState(number=run.attempt.number)
    return replace(run, past=past, attempt=attempt, step=None, saving=Saving())


# ---- learners


def on_stage_offered(turn: Transition, run: Run, peer_id: PeerId, offer: StageOffered) -> None:
    """Handle a source's offer of its stage's state, with a proof for each learner.

    The first offer is forwarded to the learner, which fetches the state from all its sources. The
    proofs stay here: a learner that has the state can compute the same, see `on_caught_up`.
    """
    attempt, proofs = run.attempt, dict(run.attempt.proofs)
    for learner in attempt.learners:
        proof = offer.proofs.get(learner.peer_id)
        if proof is None or learner.step != offer.step or peer_id not in learner.sources:
            continue
        is_first = learner.peer_id not in proofs
        if is_first:
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
    """Make a learner a replica from the next plan on, if it proves that it has the state.

    A learner without the proof is suspended.
    """
    attempt, measured = run.attempt, run.measured
    is_learner = any(learner.peer_id == peer_id for learner in attempt.learners)
    if peer_id in attempt.caught_up or not is_learner:
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


# ---- runs without peers


class _WaitingRuns(NamedTuple):
    """Runs without peers, and what decides whether they can be placed now.

    Attributes:
        runs: Runs without peers, in the order of the queue.
        is_delayed: For each of them, whether it waits until its `not_before_s`.
        newcomers: Members that joined so recently that others may follow.
    """

    runs: tuple[Run, ...]
    is_delayed: tuple[bool, ...]
    newcomers: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class _QueuePlace:
    """A waiting run's place in the queue.

    Attributes:
        at_work: Runs that have peers.
        num_before: Number of waiting runs before it.
        all_offers: Offers of all members, as if they were free.
    """

    at_work: Sequence[Run]
    num_before: int
    all_offers: Offers


def place_waiting(turn: Transition) -> None:
    """Give free peers to runs that have none, as `plan.allocation` divides them.

    A pass that changes nothing is not repeated until one of its inputs changes.
    """
    if len(turn.state.active_runs) == len(turn.state.going_runs):
        return
    inputs = division_inputs(turn.state, turn.now_s)
    allocation = allocate_members(turn.state, turn.now_s, inputs)
    cached = turn.state.memo.of(inputs)
    waiting = _waiting_runs(turn, allocation)
    if cached.get("nothing to place") == waiting:
        return
    before, num_effects = turn.state, len(turn.effects)
    all_offers = offers_to_begin(turn.state, turn.now_s)
    at_work = turn.state.active_runs
    for num_before, run in enumerate(waiting.runs):
        if turn.now_s < run.not_before_s:
            continue
        if _place(turn, run, allocation, _QueuePlace(at_work, num_before, all_offers)):
            at_work = turn.state.active_runs
    if turn.state is before and len(turn.effects) == num_effects:
        cached["nothing to place"] = waiting


def _waiting_runs(turn: Transition, allocation: Allocation) -> _WaitingRuns:
    runs = tuple(turn.state.runs[name] for name in allocation.in_turn)
    is_delayed = tuple(turn.now_s < run.not_before_s for run in runs)
    members = turn.state.members.items()
    new = tuple(peer for peer, member in members if turn.now_s - member.joined_at_s < SETTLE_S)
    return _WaitingRuns(runs, is_delayed, new)


def _place(turn: Transition, run: Run, allocation: Allocation, place: _QueuePlace) -> bool:
    """Assign to a run the peers that it may use now, or set its reason to wait; return success."""
    able, placement = turn.state, Placement(())
    if allocation.members.get(run.run_id):
        able = eligible_members(allocation.view_for(turn.state, run), run, turn.now_s)
        placement = find_placement(able, run, turn.now_s)
    if not placement.assignments:
        _wait_in_queue(turn, run, placement, place)
        return False
    if _wait_for_keepers(turn, run):
        return False
    run = turn.state.runs[run.run_id]  # the wait for keepers is over
    assignments = placement.assignments
    if not placement.is_by_speed:  # peers may swap their stages
        ways = turn.state.ways
        assignments = with_better_neighbours(run.spec, assignments, able.members, ways)
    _assign(turn, run.with_assignments(assignments), fresh=True)
    return True


def _wait_for_keepers(turn: Transition, run: Run) -> bool:
    """Let the run wait if all keepers of a stage of its snapshot are away; return whether it does.

    If the wait takes too long, the run goes back to an older snapshot.
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
        _wait_unplaced(turn, run, reason)
    return True


def _wait_in_queue(turn: Transition, run: Run, placement: Placement, place: _QueuePlace) -> None:
    """Set the reason that a run without a placement waits for; end it if nothing can help.

    Args:
        turn: Present transition.
        run: Run without peers.
        placement: Its empty placement on the members that it may use, with the reason.
        place: Its place in the queue.
    """
    misfit = misfit_of_all(turn.state, run)
    if misfit is not None:
        no_host = Reason(kind=ReasonKind.NO_PEER_CAN_HOST, parts=(misfit,))
        end(turn, run, RunPhase.FAILED, no_host)
        return
    if not placement.is_gathering:
        # Would the run begin if all members were free? Then it waits for other runs only.
        offers = _offers_as_if_free(turn, run, place)
        if surely_begins(offers, run, turn.now_s):  # cheaper than a placement
            _wait_unplaced(turn, run, _behind(place), RunPhase.QUEUED)
            return
        placement = place_first_hosts(offers, run, turn.now_s)
        if placement.assignments:
            _wait_unplaced(turn, run, _behind(place), RunPhase.QUEUED)
            return
    num_busy = len(turn.state.members.keys() & turn.state.result_keepers)
    results = Reason(kind=ReasonKind.RESULTS_KEPT, amount=num_busy) if num_busy else None
    misfits = [replace(misfit, peers=(peer,)) for peer, misfit in run.misfits.items()]
    _wait_unplaced(turn, run, several([placement.reason, results, *misfits[:MAX_NAMED]]))


def _offers_as_if_free(turn: Transition, run: Run, place: _QueuePlace) -> Offers:
    """Return the offers of all members that are eligible for the run, busy or not."""
    if run.doubts or run.conducts:
        return offers_in(eligible_members(turn.state, run, turn.now_s))
    return place.all_offers.without(run.misfits)


def _behind(place: _QueuePlace) -> Reason:
    """Return the reason of a run that could begin if others were over."""
    names = [run.run_id for run in place.at_work]
    return Reason(
        kind=ReasonKind.BEHIND,
        runs=tuple(names[:MAX_NAMED]),
        num_more=len(names[MAX_NAMED:]),
        amount=place.num_before,
    )


def _wait_unplaced(
    turn: Transition, run: Run, detail: Reason | None, phase: RunPhase = RunPhase.WAITING
) -> None:
    """Let a run without a placement wait, and note since when; see `expire`."""
    if turn.now_s < run.unplaced_since_s:
        run = replace(run, unplaced_since_s=turn.now_s)
        turn.set_run(run)
    _wait(turn, run, detail, phase)


def _wait(
    turn: Transition, run: Run, detail: Reason | None, phase: RunPhase = RunPhase.WAITING
) -> None:
    """Set the phase and the reason of a waiting run, unless it has both already."""
    if (run.phase, run.detail) != (phase, detail):
        turn.save_run(replace(run, phase=phase, detail=detail))


# ---- the assignment of an attempt


def _assign(turn: Transition, run: Run, *, fresh: bool) -> None:
    """Begin the next attempt: send its assignments to all peers.

    Args:
        turn: Present transition.
        run: Run with the new assignments.
        fresh: Whether all peers load their stage from the snapshot, or as of the run's beginning.
            Otherwise they continue with the weights that they have, and learners copy these.
    """
    learners = () if fresh else tuple(learners_of(turn.state, run))
    attempt = AttemptState(
        number=Attempt(run.attempt.number + 1),
        awaited=PhaseProgress(since_s=turn.now_s),
        assignments=tuple(_with_endpoint(turn, stage) for stage in run.attempt.assignments),
        learners=learners,
        learning_since_s=_learning_since_s(run, learners, turn.now_s),
    )
    assigned = replace(
        with_ledger(run),
        phase=RunPhase.LOADING,
        detail=Reason(kind=ReasonKind.LOADING),
        attempt=attempt,
    )
    if fresh:
        assigned = replace(assigned, measured=measured_on(assigned))
    turn.save_run(assigned)
    turn.write_ledger(run, assigned)
    assign = _assignment(turn.state, assigned, fresh=fresh)
    _order_shards(turn, assigned, assign)
    for stage in attempt.assignments:
        turn.send(stage.peer_id, _with_keys(assign, run.storage_key, stage))


def _learning_since_s(
    run: Run, learners: Collection[Learner], now_s: float
) -> Mapping[PeerId, float]:
    """Return when each learner began its copy.

    A learner that copied the same step's state in the last attempt continues that copy.
    """
    copied_step = {learner.peer_id: learner.step for learner in run.attempt.learners}
    began_s = run.attempt.learning_since_s
    continuing = {t.peer_id for t in learners if copied_step.get(t.peer_id) == t.step}
    return MappingProxyType(
        {
            t.peer_id: began_s.get(t.peer_id, now_s) if t.peer_id in continuing else now_s
            for t in learners
        }
    )


def _with_endpoint(turn: Transition, stage: StageAssignment) -> StageAssignment:
    """Return the assignment with the address at which neighbours reach the peer now."""
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
    """Return the assignment as all peers get it; `_with_keys` adds the keys of each peer."""
    past, attempt = run.past, run.attempt
    loads_snapshot = fresh and past.committed_steps
    saved = past.saved.stages if loads_snapshot and past.saved else ()
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


# ---- members without work


def send_idle_reasons(turn: Transition) -> None:
    """Send each member without work the reason, once."""
    members = turn.state.members
    reasons = _reasons_to_idle(turn.state, turn.now_s)
    changed = {
        peer: replace(member, idle=reasons[peer])
        for peer, member in members.items()
        if reasons[peer] != member.idle
    }
    if not changed:
        return
    turn.state = replace(turn.state, members=MappingProxyType({**members, **changed}))
    for peer, member in changed.items():
        if member.idle is not None and member.leaving is None:
            turn.send(peer, Idle(reason=member.idle))


def _reasons_to_idle(state: SwarmState, now_s: float) -> Mapping[PeerId, Reason | None]:
    """Return each member's reason to be idle, cached until an input changes."""
    cached = state.memo.of((division_inputs(state, now_s), state.standings))
    if "idle" not in cached:
        cached["idle"] = reasons_to_idle(state, now_s)
    found: Mapping[PeerId, Reason | None] = cached["idle"]
    return found
