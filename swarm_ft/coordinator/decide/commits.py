"""Steps of a run with all its peers: plans, commits, and the export after the last one.

`steps` computes the contents of plans and commits.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from types import MappingProxyType

from swarm_ft.coordinator.decide import attempts, blame, drain, losses
from swarm_ft.coordinator.decide.contributions import credit
from swarm_ft.coordinator.decide.steering import follow_quality
from swarm_ft.coordinator.facts.events import (
    CommitRecord,
    EvaluationRecord,
    PlanRecord,
    SnapshotLost,
    SnapshotRecord,
    SnapshotWritten,
    Transition,
    WriteSnapshot,
)
from swarm_ft.coordinator.facts.reasons import Reason, ReasonKind, several
from swarm_ft.coordinator.facts.state import PhaseProgress, PlannedStep, Run, Snapshot
from swarm_ft.coordinator.plan import moving
from swarm_ft.coordinator.plan.agreement import (
    outvoted_results,
    without_results_of,
    wrong_norms,
)
from swarm_ft.coordinator.plan.allocation import allocate_members, makes_room
from swarm_ft.coordinator.plan.keepers import (
    can_take_snapshots,
    has_all_stages,
    is_due_by_time,
    is_spreading,
    seen_at_work,
)
from swarm_ft.coordinator.plan.membership import (
    bypassed_stages,
    caught_up_of,
    eligible_members,
    joining_of,
    with_caught_up,
    with_newcomers,
    with_some_let_go,
    without_state,
)
from swarm_ft.coordinator.plan.steps import (
    best_to_load,
    commit_step,
    compression_excess,
    is_trained,
    kept_snapshots,
    lacks_snapshot,
    plan_step,
    tokens_for,
    took_stock,
    with_buffer_report,
    with_evaluation,
)
from swarm_ft.coordinator.plan.succession import (
    dispensable_leavers,
    has_successors,
    is_between_steps,
    may_save,
    reason_to_hold,
    takes_result_along,
    with_successors_free,
)
from swarm_ft.ids import PeerId, StepNumber
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.messages.control import (
    ExportStage,
    SavedStage,
    SaveStage,
    StageExported,
    StageReady,
    StageSaved,
    StageUnsaved,
    StepReady,
)
from swarm_ft.protocol.messages.events import EventKind
from swarm_ft.protocol.spec.training_plan import evaluates_at

# ---- snapshots: one replica of each stage saves it, and all stages together are a snapshot

MAX_UNLISTED = 4
"""Most manifests that are written at the same time."""
SAVE_S = 600.0
"""Seconds that a step waits, at most, for the snapshot of the weights that it began with."""


def _save(turn: Transition, run: Run) -> Run:
    """Request a snapshot of the last commit from one replica of each stage.

    Stages that were saved in an earlier attempt are not requested again.
    """
    past, saving, step = run.past, run.saving, StepNumber(run.committed_steps)
    if past.last_commit is None:
        return run
    snapshot = saving.asked
    if snapshot is None or snapshot.step != step:
        snapshot = Snapshot(
            last_commit=past.last_commit, sent=past.sent, traffic=past.traffic, judged=past.judged
        )
    saving = replace(saving, asked=snapshot, attempt=run.attempt.number)
    run = replace(run, saving=saving, keeping=replace(run.keeping, began_s=turn.now_s))
    turn.set_run(run)
    saved_layers = {stage.layers for stage in snapshot.stages}
    for stage in run.computing:
        peers = [p for p in stage.peers if p in past.exported] or stage.peers  # once it is finished
        saves = next(filter(turn.state.may_host_alone, peers), peers[0])
        if stage.layers not in saved_layers:
            by_peers = turn.state.num_keepers > 0
            turn.send(saves, SaveStage(run_id=run.run_id, step=step, by_peers=by_peers))
    return run


def _save_again(turn: Transition, run: Run) -> Run:
    """Repeat the request for a snapshot that an ended attempt or a restart interrupted."""
    is_asked = _asked_in_this_attempt(run) or is_spreading(turn.state, run)
    return run if is_asked or not lacks_snapshot(run) else _save(turn, run)


def _asked_in_this_attempt(run: Run) -> bool:
    return run.saving.attempt == run.attempt.number


def on_stage_saved(turn: Transition, peer_id: PeerId, message: StageSaved | StageUnsaved) -> None:
    """Record one saved stage, or a failure; the last stage completes the snapshot."""
    run = turn.state.runs.get(message.name.run_id)
    if run is None or peer_id not in run.peers or run.phase > RunPhase.FINISHED:
        return
    if not turn.state.may_host_alone(peer_id):
        return  # no peer on probation gets a request
    snapshot = run.saving.asked
    if snapshot is None or message.name.step != snapshot.step:
        return  # a later snapshot took its place
    if isinstance(message, StageUnsaved):
        run = replace(run, saving=replace(run.saving, asked=None))
        failed = Reason(kind=ReasonKind.SAVE_FAILED, peers=(peer_id,), text=message.reason)
        fail_snapshot(turn, run, snapshot.step, failed)
        return
    saved = SavedStage(
        layers=message.name.layers,
        digest=message.digest,
        total_bytes=message.total_bytes,
        keepers=(peer_id,) if turn.state.num_keepers else (),
    )
    snapshot = snapshot.with_stage(saved)
    # Where peers keep snapshots, `keeping` spreads the saved stages.
    if turn.state.num_keepers or not has_all_stages(run, snapshot):
        turn.set_run(replace(run, saving=replace(run.saving, asked=snapshot)))
    else:
        unlisted = (*run.saving.unlisted, snapshot)[-MAX_UNLISTED:]
        turn.set_run(replace(run, saving=replace(run.saving, asked=None, unlisted=unlisted)))
        turn.effects.append(WriteSnapshot(run.run_id, run.spec, snapshot))


def on_snapshot_written(turn: Transition, event: SnapshotWritten | SnapshotLost) -> None:
    """Record a written manifest, or a failure; void snapshots are ignored."""
    run, snapshot = turn.state.runs.get(event.run_id), event.snapshot
    if run is None or run.phase > RunPhase.FINISHED or snapshot not in run.saving.unlisted:
        return
    if isinstance(event, SnapshotLost):
        unlisted = tuple(other for other in run.saving.unlisted if other != snapshot)
        run = replace(run, saving=replace(run.saving, unlisted=unlisted))
        failed = Reason(kind=ReasonKind.MANIFEST_FAILED, text=event.message)
        fail_snapshot(turn, run, snapshot.step, failed)
        return
    keeping = replace(run.keeping, took_s=turn.now_s - run.keeping.began_s)
    complete_snapshot(turn, replace(run, keeping=keeping), snapshot)


def complete_snapshot(turn: Transition, run: Run, snapshot: Snapshot) -> None:
    """Record a complete snapshot; the run can go back to it from now on."""
    # An older manifest may be written later; the newest snapshot counts.
    unlisted = tuple(other for other in run.saving.unlisted if other.step > snapshot.step)
    saving = replace(run.saving, unlisted=unlisted, failed=None)
    snapshots = kept_snapshots(run, snapshot)
    run = replace(run, past=replace(run.past, snapshots=snapshots), saving=saving)
    if run.moving is not None and run.moving.has_begun and run.moving.step < snapshot.step:
        turn.save_run(replace(run, moving=None))  # the new stages have a snapshot now
        run = turn.state.runs[run.run_id]
    turn.set_run(run)
    turn.write(SnapshotRecord(run.run_id, snapshot, frozenset(one.step for one in snapshots)))
    complete = Reason(kind=ReasonKind.SNAPSHOT_COMPLETE, step=snapshot.step)
    turn.emit(EventKind.SNAPSHOT_WHOLE, run, reason=complete, to_step=snapshot.step)
    _make_room(turn, run)


def fail_snapshot(turn: Transition, run: Run, step: StepNumber, reason: Reason) -> None:
    """Record that the snapshot of this step failed."""
    lost = Reason(kind=ReasonKind.SNAPSHOT_FAILED, step=step, parts=(reason,))
    turn.emit(EventKind.SNAPSHOT_LOST, run, reason=lost, to_step=step)
    run = replace(run, saving=replace(run.saving, failed=reason))
    if run.spec.train.load_best_model_at_end and not run.phase.is_over:
        turn.save_run(replace(run, detail=replace(lost, kind=ReasonKind.BEST_NOT_SAVED)))
    else:
        turn.set_run(run)


def stage_ready(turn: Transition, run: Run, peer_id: PeerId, ready: StageReady) -> None:
    """Record that a peer has its stage, or listens; with the last peer the step begins."""
    if run.phase is not RunPhase.LOADING or peer_id in _unproven(run):
        return
    done = MappingProxyType({**run.attempt.done, peer_id: ready.done})
    attempt = replace(run.attempt, loaded=run.attempt.loaded | {peer_id}, done=done)
    run = _moved(replace(took_stock(run, peer_id, ready.buffers), attempt=attempt), peer_id, turn)
    if peer_id not in run.listeners:
        run = run.with_holds({**run.past.holds, peer_id: run.committed_steps})
    if attempt.loaded >= set(run.peers):
        run = replace(run, phase=RunPhase.TRAINING, detail=joining_of(run))
        turn.save_run(run)
        _plan_or_export(turn, run)
    elif run.misfits.keys() & set(run.peers):
        attempts.interrupt(turn, run)  # some can host it: it waits for more of them
    else:
        turn.set_run(run)


def _unproven(run: Run) -> set[PeerId]:
    """Return learners that all peers wait for, and that have not proved their state."""
    taking = {learner.peer_id for learner in run.attempt.learners}
    return taking.difference(run.listeners, run.attempt.caught_up)


def step_ready(turn: Transition, run: Run, peer_id: PeerId, message: StepReady) -> None:
    """Record that a peer did its part of the step; the last peer's report commits it."""
    step = run.step
    is_current = run.phase is RunPhase.TRAINING and message.step == run.committed_steps
    if step is None or not is_current:
        return
    # No peer can have computed for longer than the step is old.
    compute_s = min(message.compute_s, turn.now_s - step.began_s)
    message = replace(message, compute_s=compute_s)
    step = replace(step, ready=MappingProxyType({**step.ready, peer_id: message}))
    run = _moved(replace(with_buffer_report(run, peer_id, message), step=step), peer_id, turn)
    turn.set_run(run)
    _step_done(turn, run, step)


def resume_saved_steps(turn: Transition) -> None:
    """Continue steps that waited for a snapshot, once it is complete."""
    for run in turn.state.active_runs:
        if run.phase is RunPhase.TRAINING and run.step is not None:
            _step_done(turn, run, run.step)


def resume_waiting_runs(turn: Transition) -> None:
    """Continue runs that wait between two steps, once the cause is gone."""
    for run in turn.state.active_runs:
        if is_between_steps(run):
            _grow_or_plan(turn, run)


def save_leaving_results(turn: Transition) -> None:
    """Save finished runs whose result would leave with its peers before the client came."""
    for run in tuple(turn.state.runs.values()):
        if run.saving.is_under_way or not takes_result_along(turn.state, run):
            continue
        if may_save(turn.state, run, turn.now_s):
            _save(turn, run)


def _step_done(turn: Transition, run: Run, step: PlannedStep) -> None:
    """Commit the step once all peers are ready and the evaluated weights are saved."""
    if len(step.ready) < len(run.peers) or not step.ready.keys() >= set(run.peers):
        return
    wrong = wrong_norms(turn.state, run, step)
    if wrong:
        why = Reason(kind=ReasonKind.WRONG_NORM)
        attempts.suspend_and_continue(turn, run, dict.fromkeys(wrong, why))
        return
    if _waits_for_snapshot(run, turn.now_s):
        return
    run = _evaluate(turn, run, step)
    if run.committed_steps < run.spec.train.num_steps and not is_trained(run):
        _go_on(turn, _commit(turn, run, step))
    else:
        _plan_or_export(turn, replace(run, step=None))


def _waits_for_snapshot(run: Run, now_s: float) -> bool:
    """Whether the evaluated weights may be the best and are still being saved.

    Where the best weights are loaded at the end, the snapshot must exist, however long it takes.
    Meanwhile peers compute with these weights, so that most of the time costs nothing.
    """
    if not run.spec.train.load_best_model_at_end:
        return False
    on_their_way = {
        snapshot.step for snapshot in (run.saving.asked, *run.saving.unlisted) if snapshot
    }
    is_late = now_s - run.attempt.awaited.newest_s >= SAVE_S
    return run.committed_steps in on_their_way and not is_late


def stage_exported(turn: Transition, run: Run, peer_id: PeerId, message: StageExported) -> None:
    """Record an exported stage; the last one completes the result."""
    if run.phase is not RunPhase.EXPORTING:
        return
    exported = MappingProxyType({**run.past.exported, peer_id: message.file})
    run = _moved(replace(run, past=replace(run.past, exported=exported)), peer_id, turn)
    if exported.keys() >= set(run.peers):
        _finish(turn, run)
    else:
        turn.save_run(run)


def _moved(run: Run, peer_id: PeerId, turn: Transition) -> Run:
    return run.with_awaited(run.attempt.awaited.with_progress(peer_id, turn.now_s))


def _finish(turn: Transition, run: Run) -> None:
    """Finish the run without the results of outvoted replicas."""
    outvoted = outvoted_results(turn.state, run)
    run = blame.settle_failures(turn, run, run.committed_steps)
    run = without_results_of(run, outvoted)
    turn.save_run(replace(run, phase=RunPhase.FINISHED, detail=losses.result_ready(run)))
    for peer in outvoted:  # not suspended: other hardware computes other last bits
        attempts.release(turn, run, peer, ReasonKind.RELEASED_OUTVOTED)


def _plan_or_export(turn: Transition, run: Run) -> None:
    run = _admit(turn, run)
    if not is_trained(run):
        run = _unless_it_moves(turn, run)
        if moving.awaits_move(run):
            _move(turn, run)
            return
        left = reason_to_hold(turn.state, run, turn.now_s) if run.step is None else None
        why = left or (_paused(run) if run.step is None else None)
        if why is not None:
            _hold(turn, run, why, saves=left is not None)
        else:
            _plan(turn, _save_again(turn, run))
        return
    best = best_to_load(run)
    if best is not None:
        attempts.load_best(turn, run, best)
    else:
        _export(turn, run)


def _paused(run: Run) -> Reason | None:
    """Return the reason of a paused run; None if the run is not paused."""
    paused = Reason(kind=ReasonKind.PAUSED, step=run.committed_steps)
    return paused if run.steering.is_paused else None


def _hold(turn: Transition, run: Run, why: Reason, *, saves: bool) -> None:
    """Plan no step, because the run is paused or a peer that it needs leaves.

    The waiting time counts from the first time with this kind of reason at this step.

    Args:
        turn: Present transition.
        run: Run between two steps.
        why: Reason of the wait.
        saves: Whether it waits for a snapshot.
    """
    if run.detail != why:
        if run.detail is None or run.detail.wait != why.wait:
            run = run.with_awaited(PhaseProgress(since_s=turn.now_s))
        run = replace(run, detail=why)
        turn.save_run(run)
    asked, steps = run.saving.asked, run.committed_steps
    is_asked = asked is not None and asked.step == steps and _asked_in_this_attempt(run)
    on_its_way = steps in {snapshot.step for snapshot in run.saving.unlisted}
    if saves and may_save(turn.state, run, turn.now_s) and not is_asked and not on_its_way:
        _save(turn, run)


def _export(turn: Transition, run: Run) -> None:
    late = run.listeners
    staying = tuple(a for a in run.attempt.assignments if a.peer_id not in late)
    awaited = PhaseProgress(since_s=turn.now_s)
    attempt = replace(run.attempt, assignments=staying, learners=(), awaited=awaited)
    run = replace(run, attempt=attempt)
    if run.spec.train.takes_snapshots and run.past.saved is None:
        run = _save(turn, run)  # so that a lost result costs no training
    turn.save_run(replace(run, phase=RunPhase.EXPORTING, detail=Reason(kind=ReasonKind.EXPORTING)))
    for peer in late:
        attempts.release(turn, run, peer, ReasonKind.RELEASED_LATE_JOINER)
    for peer in run.peers:
        turn.send(peer, ExportStage(run_id=run.run_id))


def _admit(turn: Transition, run: Run) -> Run:
    """Count learners that have caught up as replicas from the next plan on."""
    caught_up = caught_up_of(run)
    run = with_caught_up(run)
    if caught_up is not None:
        run = replace(run, detail=caught_up)
        turn.save_run(run)
    return run


def _plan(turn: Transition, run: Run) -> None:
    awaiting = run.with_awaited(PhaseProgress(since_s=turn.now_s))
    run, plan = plan_step(awaiting, turn.now_s, turn.state.ways)
    turn.set_run(run)
    turn.write(PlanRecord(run.run_id, plan.step, plan.attempt, plan.microbatches))
    for peer in run.peers:
        turn.send(peer, plan, tokens_for(run, plan, peer))


def _evaluate(turn: Transition, run: Run, step: PlannedStep) -> Run:
    """Write and publish the evaluation of a step, if it had one."""
    if not step.evaluation or not evaluates_at(run.spec.train, StepNumber(run.committed_steps)):
        return run
    run, found = with_evaluation(run, step)
    turn.set_run(run)
    turn.write(EvaluationRecord(run.run_id, found, run.past.judged))
    reason = Reason(kind=ReasonKind.EVALUATED, step=found.step, value=found.loss)
    turn.emit(EventKind.RUN_EVALUATED, run, reason=reason, to_step=found.step)
    turn.publish(run.run_id, found)
    return run


def _commit(turn: Transition, run: Run, step: PlannedStep) -> Run:
    before = run
    settled = blame.settle_failures(turn, run, run.committed_steps)
    run, committed, commit = commit_step(settled, step, turn.now_s, turn.state.link_caps)
    turn.set_run(run)
    turn.write(CommitRecord(run.run_id, committed, commit, run.past.sent, run.past.traffic))
    turn.write_ledger(before, run)
    credit(turn, before, step, committed)
    for peer in run.peers:
        turn.send(peer, commit)
    turn.publish(run.run_id, committed)
    return follow_quality(turn, run, committed.step, compression_excess(before, step))


def _go_on(turn: Transition, run: Run) -> None:
    """Continue after a commit: save if it is due, admit newcomers, and plan."""
    is_last = run.committed_steps >= run.spec.train.num_steps
    gives = bool(_wanted(turn, run))  # the next attempt requests the snapshot
    run = seen_at_work(run, turn.now_s)
    is_due = lacks_snapshot(run) or (not is_last and is_due_by_time(turn.state, run, turn.now_s))
    saves = is_due and not is_spreading(turn.state, run)
    if not gives and (saves or (not is_last and _is_to_make_room(turn, run))):
        run = _save(turn, run)
    if not gives:
        run = _looked_for_better_stages(turn, run)
    _grow_or_plan(turn, run)


def _wanted(turn: Transition, run: Run) -> Collection[PeerId]:
    """Return replicas of the run that a waiting run gets now."""
    if run.committed_steps >= run.spec.train.num_steps:
        return ()
    return allocate_members(turn.state, turn.now_s).to_give.get(run.run_id, ())


def _grow_or_plan(turn: Transition, run: Run) -> None:
    """Admit newcomers and release leavers between two steps, or plan the next step."""
    wanted = _wanted(turn, run)
    if wanted:
        _give(turn, run, wanted)
        return
    is_last = run.committed_steps >= run.spec.train.num_steps
    run = _unless_it_moves(turn, run)
    if moving.awaits_move(run):
        _move(turn, run)
        return
    caught_up = with_caught_up(run)
    able = eligible_members(
        allocate_members(turn.state, turn.now_s).view_for(turn.state, run), caught_up, turn.now_s
    )
    is_left = dispensable_leavers(turn.state, caught_up, turn.now_s) or has_successors(able, run)
    if run.steering.is_paused and not is_left:
        _plan_or_export(turn, run)  # newcomers are admitted when the run resumes
        return
    fewer = with_successors_free(able, with_some_let_go(able, run))
    grown = with_newcomers(able, fewer)
    if not is_last and dispensable_leavers(turn.state, caught_up, turn.now_s):
        attempts.interrupt(turn, drain.with_leavers(turn, caught_up))
    elif not is_last and grown is not run:
        attempts.interrupt(turn, _let_go(turn, run, fewer, grown))
    else:
        _plan_or_export(turn, run)


def _is_to_make_room(turn: Transition, run: Run) -> bool:
    """Whether a repartition needs a new snapshot, and none is under way."""
    if run.saving.is_under_way or not can_take_snapshots(turn.state, run):
        return False
    return makes_room(turn.state, run, turn.now_s)


def _make_room(turn: Transition, run: Run) -> None:
    """Repartition the run from its new snapshot, if a waiting run can begin then."""
    if run.phase is RunPhase.TRAINING and makes_room(turn.state, run, turn.now_s):
        step = run.past.rolled_back.committed_steps
        detail = Reason(kind=ReasonKind.CUT_ANEW, step=step)
        stages = [stage.layers for stage in run.stages]
        run = replace(run, phase=RunPhase.WAITING, detail=detail, moving=None)
        attempts.go_back(turn, run, Reason(kind=ReasonKind.MAKES_ROOM), stages)


# ---- repartitions for speed, see `plan.moving`


def _looked_for_better_stages(turn: Transition, run: Run) -> Run:
    """Return the run with its repartition, if one pays."""
    if not moving.is_to_look(turn.state, run, turn.now_s):
        return run
    run = replace(run, moves=replace(run.moves, looked_s=turn.now_s))
    better = moving.better_stages(turn.state, run, turn.now_s)
    run = run if better is None else replace(run, moving=better)
    turn.set_run(run)
    return run


def _unless_it_moves(turn: Transition, run: Run) -> Run:
    """Return the run without a repartition that has become impossible."""
    if not moving.awaits_move(run) or moving.is_possible(turn.state, run, turn.now_s):
        return run
    run = replace(run, moving=None, detail=Reason(kind=ReasonKind.MOVE_IMPOSSIBLE))
    turn.save_run(run)
    return run


def _move(turn: Transition, run: Run) -> None:
    """Continue on new stages once a snapshot of this step is complete; plan no step before.

    So no step is repeated. A fault meanwhile is an ordinary one: until the run gives up its old
    stages it can continue on them, and later it can load the snapshot as often as necessary.
    """
    if run.moving is None or run.past.saved is None:
        why = Reason(kind=ReasonKind.MOVE_SAVES_FIRST, step=run.committed_steps)
        _hold(turn, run, why, saves=True)
        return
    moved, stages = moving.moved_reason(run, run.moving), [stage.layers for stage in run.stages]
    turn.emit(EventKind.RUN_MOVED, run, reason=moved, to_step=run.committed_steps)
    staying = {assignment.peer_id for assignment in run.moving.assignments}
    leavers = [peer for peer in run.peers if peer not in staying]
    run = replace(moving.with_begun_move(run, turn.now_s), phase=RunPhase.WAITING, detail=moved)
    attempts.go_back(turn, run, moved, stages)
    for peer in leavers:
        attempts.release(turn, run, peer, ReasonKind.RELEASED_MOVED)


def _give(turn: Transition, run: Run, peers: Collection[PeerId]) -> None:
    """Release replicas to a run that can begin with them, see `sharing`."""
    released = [a.peer_id for a in run.attempt.assignments if a.peer_id in peers]
    for peer in released:
        run = without_state(run, peer)
    run = run.with_assignments(a for a in run.attempt.assignments if a.peer_id not in peers)
    reason = Reason(kind=ReasonKind.PEERS_GIVEN, peers=tuple(released))
    attempts.interrupt(turn, replace(run, detail=reason))
    for peer in released:
        attempts.release(turn, run, peer, ReasonKind.RELEASED_GIVEN)


def _let_go(turn: Transition, run: Run, fewer: Run, grown: Run) -> Run:
    """Release peers without work, and return the run for its next attempt.

    The next attempt finds newcomers again, among them peers that move to other layers.
    """
    new = {a.peer_id: a.layers for a in grown.attempt.assignments}
    newcomers = tuple(peer for peer in grown.peers if peer not in run.peers)
    changes = [Reason(kind=ReasonKind.PEERS_JOIN, peers=newcomers)] if newcomers else []
    freed = (a for a in run.attempt.assignments if a.peer_id not in fewer.peers)
    passed = {stage.layers for stage in bypassed_stages(run)}
    for peer, layers in ((a.peer_id, a.layers) for a in freed):
        is_done = layers in passed
        why = Reason(kind=ReasonKind.LAYERS_DONE if is_done else ReasonKind.STAGE_LEFT)
        changes.append(
            Reason(
                kind=ReasonKind.PEER_MOVES if peer in new else ReasonKind.PEER_LET_GO,
                peers=(peer,),
                layers=(layers, new[peer]) if peer in new else (layers,),
                parts=(why,),
            )
        )
        if peer not in new:
            attempts.release(turn, run, peer, ReasonKind.RELEASED_DONE)
    return replace(fewer, detail=several(changes))
