"""What a run does while its peers are there: plan a step, commit it, and export after the last.

What is in a plan and in a commit is computed in `steps`.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from swarm_ft.coordinator import attempts, results, saving
from swarm_ft.coordinator.effects import CommitRecord, PlanRecord
from swarm_ft.coordinator.holdings import told, took_stock
from swarm_ft.coordinator.membership import (
    caught_up_in_words,
    joining_in_words,
    with_newcomers,
    with_taken,
)
from swarm_ft.coordinator.state import Run
from swarm_ft.coordinator.steps import commit_step, plan_step, tokens_for
from swarm_ft.coordinator.turn import Turn
from swarm_ft.ids import PeerId
from swarm_ft.protocol.coordinator_messages import ExportStage, ReleaseStage
from swarm_ft.protocol.peer_messages import StageReady, StepReady
from swarm_ft.protocol.status import RunPhase


def stage_ready(turn: Turn, run: Run, peer_id: PeerId, ready: StageReady) -> None:
    """A peer has its stage, or listens; with the last one the first uncommitted step begins."""
    if run.phase is not RunPhase.LOADING:
        return
    done = MappingProxyType({**run.done, peer_id: ready.done})
    run = took_stock(run, peer_id, ready.buffers)
    run = replace(run, loaded=run.loaded | {peer_id}, done=done)
    if peer_id not in run.listeners:
        holds = {**run.holds, peer_id: run.committed_steps}
        run = replace(run, holds=MappingProxyType(holds))
    if run.loaded >= set(run.peers):
        detail = joining_in_words(run)
        run = replace(run, phase=RunPhase.TRAINING, detail=detail, step_began_s=turn.now_s)
        turn.put(run)
        _plan_or_export(turn, run)
    else:
        turn.keep(run)


def step_ready(turn: Turn, run: Run, peer_id: PeerId, message: StepReady) -> None:
    """A peer did its part of the step; with the last one the step is committed."""
    if run.phase is not RunPhase.TRAINING or message.step != run.committed_steps:
        return
    run = told(run, peer_id, message)
    run = replace(run, ready=MappingProxyType({**run.ready, peer_id: message}))
    turn.keep(run)
    if run.ready.keys() >= set(run.peers):
        _go_on(turn, _commit(turn, run))


def stage_exported(turn: Turn, run: Run, peer_id: PeerId) -> None:
    """A peer wrote its stage down; with the last one the result can be fetched."""
    if run.phase is not RunPhase.EXPORTING:
        return
    run = replace(run, exported=run.exported | {peer_id})
    if run.exported >= set(run.peers):
        turn.put(replace(run, phase=RunPhase.FINISHED, detail=results.TO_BE_FETCHED))
    else:
        turn.keep(run)


def _plan_or_export(turn: Turn, run: Run) -> None:
    run = _admit(turn, run)
    if run.committed_steps < run.spec.train.num_steps:
        _plan(turn, run)
        return
    late = run.listeners
    stages = tuple(stage for stage in run.stages if stage.peer_id not in late)
    run = replace(run, stages=stages, takers=())
    if saving.is_end_due(run):
        run = saving.save(turn, run)
    turn.put(replace(run, phase=RunPhase.EXPORTING, detail="peers write their stages down"))
    for peer in late:
        reason = "the run was trained before this peer had caught up"
        turn.say(peer, ReleaseStage(run_id=run.run_id, reason=reason))
    for peer in run.peers:
        turn.say(peer, ExportStage(run_id=run.run_id))


def _admit(turn: Turn, run: Run) -> Run:
    """Let takers that have caught up compute from the next plan on."""
    told = caught_up_in_words(run)
    run = with_taken(run)
    if told:
        run = replace(run, detail=told)
        turn.put(run)
    return run


def _plan(turn: Turn, run: Run) -> None:
    run, plan = plan_step(run)
    turn.keep(run)
    turn.write(PlanRecord(run.run_id, plan.step, run.attempt, plan.microbatches))
    for peer in run.peers:
        turn.say(peer, plan, tokens_for(run, plan, peer))


def _commit(turn: Turn, run: Run) -> Run:
    before = run
    run, committed, commit = commit_step(run, turn.now_s)
    turn.keep(run)
    turn.write(CommitRecord(run.run_id, committed, commit, run.sent, run.traffic))
    turn.write_ledger(before, run)
    for peer in run.peers:
        turn.say(peer, commit)
    turn.publish(run.run_id, committed)
    return run


def _go_on(turn: Turn, run: Run) -> None:
    """After a commit: save if it is time, take newcomers in, and on to what is next."""
    is_last = run.committed_steps >= run.spec.train.num_steps
    if not is_last and saving.is_due(run):
        run = saving.save(turn, run)
    grown = with_newcomers(turn.state, run)
    if not is_last and grown is not run:
        newcomers = ", ".join(peer for peer in grown.peers if peer not in run.peers)
        attempts.interrupt(turn, replace(run, detail=f"joined by {newcomers}"))
    else:
        _plan_or_export(turn, run)
