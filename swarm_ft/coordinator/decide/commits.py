"""Steps of a run with all its peers: reports, commits, and the results after the last one.

`policies` decides what follows a commit; `plan.steps` computes the contents of plans and commits.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from swarm_ft.coordinator.decide import attempts, blame, losses
from swarm_ft.coordinator.decide.contributions import credit
from swarm_ft.coordinator.decide.policies.order import (
    AFTER_COMMIT,
    BETWEEN_STEPS,
    WITH_PRESENT_PEERS,
    decide_next,
)
from swarm_ft.coordinator.decide.steering import follow_quality
from swarm_ft.coordinator.facts.events import CommitRecord, EvaluationRecord, Transition
from swarm_ft.coordinator.facts.reasons import Reason, ReasonKind
from swarm_ft.coordinator.facts.state import PlannedStep, Run
from swarm_ft.coordinator.plan.agreement import (
    outvoted_results,
    without_results_of,
    wrong_norms,
)
from swarm_ft.coordinator.plan.keepers import seen_at_work
from swarm_ft.coordinator.plan.membership import joining_of
from swarm_ft.coordinator.plan.steps import (
    commit_step,
    compression_excess,
    is_trained,
    took_stock,
    with_buffer_report,
    with_evaluation,
)
from swarm_ft.coordinator.plan.succession import is_between_steps
from swarm_ft.ids import PeerId, StepNumber
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.messages.control import StageExported, StageReady, StepReady
from swarm_ft.protocol.messages.events import EventKind
from swarm_ft.protocol.spec.training_plan import evaluates_at

SAVE_S = 600.0
"""Seconds that a step waits, at most, for the snapshot of the weights that it began with."""


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
        decide_next(turn, run, WITH_PRESENT_PEERS)
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
            decide_next(turn, run, BETWEEN_STEPS)


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
    if not (run.has_all_steps or is_trained(run)):
        run = seen_at_work(_commit(turn, run, step), turn.now_s)
        decide_next(turn, run, AFTER_COMMIT)
    else:
        decide_next(turn, replace(run, step=None), WITH_PRESENT_PEERS)


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
