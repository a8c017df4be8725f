"""What a run does while its peers are there: plan a step, commit it, and export after the last.

What is in a plan and in a commit is computed in `steps`.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from swarm_ft.coordinator.decide import attempts, losses
from swarm_ft.coordinator.facts.events import (
    CommitRecord,
    EvaluationRecord,
    PlanRecord,
    SnapshotRecord,
    Turn,
    WriteSnapshot,
)
from swarm_ft.coordinator.facts.state import Awaited, PlannedStep, Run, Saving, Snapshot
from swarm_ft.coordinator.plan.agreement import (
    outvoted_results,
    without_results_of,
    wrong_norms,
)
from swarm_ft.coordinator.plan.membership import (
    able_for,
    caught_up_in_words,
    joining_in_words,
    with_caught_up,
    with_newcomers,
)
from swarm_ft.coordinator.plan.steps import (
    after_report,
    commit_step,
    evaluated,
    lacks_evaluation,
    plan_step,
    tokens_for,
    took_stock,
)
from swarm_ft.ids import PeerId, RunId, StepNumber
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.messages.control import (
    ExportStage,
    ReleaseStage,
    SavedStage,
    SaveStage,
    StageExported,
    StageReady,
    StageSaved,
    StepReady,
)

# ---- snapshots: each stage is saved by one of its replicas, then all of them count as one

MAX_UNLISTED = 4
"""Manifests that are being written; one whose writing fails is never heard of again."""


def _save(turn: Turn, run: Run) -> Run:
    """Ask one replica of each stage to save the state as of the last commit."""
    past = run.past
    if past.last_commit is None:
        return run
    asked = Snapshot(last_commit=past.last_commit, sent=past.sent, traffic=past.traffic)
    run = replace(run, saving=replace(run.saving, asked=asked))
    turn.keep(run)
    step = StepNumber(run.committed_steps)
    for stage in run.computing:
        saves = next(filter(turn.state.carries, stage.peers), stage.peers[0])
        turn.say(saves, SaveStage(run_id=run.run_id, step=step))
    return run


def stage_saved(turn: Turn, peer_id: PeerId, message: StageSaved) -> None:
    """A stage lies among the run's snapshots; with the last one the snapshot is whole."""
    run = turn.state.runs.get(message.name.run_id)
    if run is None or peer_id not in run.peers or run.phase > RunPhase.FINISHED:
        return
    asked = run.saving.asked
    if asked is None or message.name.step != asked.step:
        return  # a later snapshot took its place
    saved = SavedStage(
        layers=message.name.layers, digest=message.digest, total_bytes=message.total_bytes
    )
    others = [stage for stage in asked.stages if stage.layers != saved.layers]
    stages = tuple(sorted((*others, saved), key=lambda stage: stage.layers))
    asked = replace(asked, stages=stages)
    is_whole = [s.layers for s in stages] == [s.layers for s in run.stages]
    if not is_whole:
        turn.keep(replace(run, saving=replace(run.saving, asked=asked)))
    else:
        unlisted = (*run.saving.unlisted, asked)[-MAX_UNLISTED:]
        turn.keep(replace(run, saving=Saving(unlisted=unlisted)))
        turn.effects.append(WriteSnapshot(run.run_id, run.spec, asked))


def snapshot_written(turn: Turn, run_id: RunId, snapshot: Snapshot) -> None:
    """The run can go back to the snapshot from now on, unless its history is void by now."""
    run = turn.state.runs.get(run_id)
    if run is None or run.phase > RunPhase.FINISHED or snapshot not in run.saving.unlisted:
        return
    # An older one's manifest may be there later; the newest counts.
    unlisted = tuple(other for other in run.saving.unlisted if other.step > snapshot.step)
    saving = replace(run.saving, unlisted=unlisted)
    turn.keep(replace(run, past=replace(run.past, snapshot=snapshot), saving=saving))
    turn.write(SnapshotRecord(run_id, snapshot))


def stage_ready(turn: Turn, run: Run, peer_id: PeerId, ready: StageReady) -> None:
    """A peer has its stage, or listens; with the last one the first uncommitted step begins."""
    if run.phase is not RunPhase.LOADING or peer_id in _unproven(run):
        return
    done = MappingProxyType({**run.attempt.done, peer_id: ready.done})
    attempt = replace(run.attempt, loaded=run.attempt.loaded | {peer_id}, done=done)
    run = _moved(replace(took_stock(run, peer_id, ready.buffers), attempt=attempt), peer_id, turn)
    if peer_id not in run.listeners:
        run = run.with_holds({**run.past.holds, peer_id: run.committed_steps})
    if attempt.loaded >= set(run.peers):
        run = replace(run, phase=RunPhase.TRAINING, detail=joining_in_words(run))
        turn.put(run)
        _plan_or_export(turn, run)
    elif run.misfits.keys() & set(run.peers):
        attempts.interrupt(turn, run)  # some can host it: it waits for more of them
    else:
        turn.keep(run)


def _unproven(run: Run) -> set[PeerId]:
    """Peers that all wait for, and that have yet to show that they have their stage's state."""
    taking = {learner.peer_id for learner in run.attempt.learners}
    return taking.difference(run.listeners, run.attempt.caught_up)


def step_ready(turn: Turn, run: Run, peer_id: PeerId, message: StepReady) -> None:
    """A peer did its part of the step; with the last one the step is committed."""
    step = run.step
    is_current = run.phase is RunPhase.TRAINING and message.step == run.committed_steps
    if step is None or not is_current:
        return
    # Nobody computed for longer than the step is old.
    compute_s = min(message.compute_s, turn.now_s - step.began_s)
    message = replace(message, compute_s=compute_s)
    step = replace(step, ready=MappingProxyType({**step.ready, peer_id: message}))
    run = _moved(replace(after_report(run, peer_id, message), step=step), peer_id, turn)
    turn.keep(run)
    if not step.ready.keys() >= set(run.peers):
        return
    wrong = wrong_norms(turn.state, run, step)
    if wrong:
        why = "told another gradient norm than its replicas"
        attempts.do_without(turn, run, dict.fromkeys(wrong, why))
    elif run.committed_steps < run.spec.train.num_steps:
        _go_on(turn, _commit(turn, run, step))
    else:
        _plan_or_export(turn, replace(_evaluate(turn, run, step), step=None))


def stage_exported(turn: Turn, run: Run, peer_id: PeerId, message: StageExported) -> None:
    """A peer wrote its stage down; with the last one the result can be fetched."""
    if run.phase is not RunPhase.EXPORTING:
        return
    exported = MappingProxyType({**run.past.exported, peer_id: message.file})
    run = _moved(replace(run, past=replace(run.past, exported=exported)), peer_id, turn)
    if exported.keys() >= set(run.peers):
        _finish(turn, run)
    else:
        turn.put(run)


def _moved(run: Run, peer_id: PeerId, turn: Turn) -> Run:
    return run.with_awaited(run.attempt.awaited.moved(peer_id, turn.now_s))


def _finish(turn: Turn, run: Run) -> None:
    """The result is there; who has another one than most of its replicas has none."""
    outvoted = outvoted_results(turn.state, run)
    run = without_results_of(run, outvoted)
    turn.put(replace(run, phase=RunPhase.FINISHED, detail=losses.result_in_words(run)))
    for peer in outvoted:  # not set aside: other hardware than most has other last bits
        reason = "most replicas of this peer's stage wrote down another result"
        turn.say(peer, ReleaseStage(run_id=run.run_id, reason=reason))


def _plan_or_export(turn: Turn, run: Run) -> None:
    run = _admit(turn, run)
    if run.committed_steps < run.spec.train.num_steps or lacks_evaluation(run):
        _plan(turn, run)
        return
    late = run.listeners
    staying = tuple(a for a in run.attempt.assignments if a.peer_id not in late)
    awaited = Awaited(since_s=turn.now_s)
    attempt = replace(run.attempt, assignments=staying, learners=(), awaited=awaited)
    run = replace(run, attempt=attempt)
    saved_steps = run.past.snapshot.step if run.past.snapshot else 0
    if run.spec.train.save_steps and saved_steps < run.committed_steps:
        run = _save(turn, run)  # so that a lost result costs no training
    turn.put(replace(run, phase=RunPhase.EXPORTING, detail="peers write their stages down"))
    for peer in late:
        reason = "the run was trained before this peer had caught up"
        turn.say(peer, ReleaseStage(run_id=run.run_id, reason=reason))
    for peer in run.peers:
        turn.say(peer, ExportStage(run_id=run.run_id))


def _admit(turn: Turn, run: Run) -> Run:
    """Let learners that have caught up compute from the next plan on."""
    words = caught_up_in_words(run)
    run = with_caught_up(run)
    if words:
        run = replace(run, detail=words)
        turn.put(run)
    return run


def _plan(turn: Turn, run: Run) -> None:
    awaiting = run.with_awaited(Awaited(since_s=turn.now_s))
    run, plan = plan_step(awaiting, turn.now_s, turn.state.ways)
    turn.keep(run)
    turn.write(PlanRecord(run.run_id, plan.step, plan.attempt, plan.microbatches))
    for peer in run.peers:
        turn.say(peer, plan, tokens_for(run, plan, peer))


def _evaluate(turn: Turn, run: Run, step: PlannedStep) -> Run:
    """Write down what came of the evaluation in a step, if there was one."""
    if not step.evaluation:
        return run
    run, found = evaluated(run, step)
    turn.keep(run)
    turn.write(EvaluationRecord(run.run_id, found))
    turn.publish(run.run_id, found)
    return run


def _commit(turn: Turn, run: Run, step: PlannedStep) -> Run:
    before = run = _evaluate(turn, run, step)
    run, committed, commit = commit_step(run, step, turn.now_s)
    turn.keep(run)
    turn.write(CommitRecord(run.run_id, committed, commit, run.past.sent, run.past.traffic))
    turn.write_ledger(before, run)
    for peer in run.peers:
        turn.say(peer, commit)
    turn.publish(run.run_id, committed)
    return run


def _go_on(turn: Turn, run: Run) -> None:
    """After a commit: save if it is time, take newcomers in, and on to what is next."""
    is_last = run.committed_steps >= run.spec.train.num_steps
    save_steps = run.spec.train.save_steps
    if not is_last and save_steps and run.committed_steps % save_steps == 0:
        run = _save(turn, run)
    grown = with_newcomers(able_for(turn.state, run, turn.now_s), run)
    if not is_last and grown is not run:
        newcomers = ", ".join(peer for peer in grown.peers if peer not in run.peers)
        attempts.interrupt(turn, replace(run, detail=f"joined by {newcomers}"))
    else:
        _plan_or_export(turn, run)
