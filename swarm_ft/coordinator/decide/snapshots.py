"""Snapshots of a run: one replica of each stage saves it, and all stages together are complete.

Where peers keep snapshots, `snapshot_keepers` spreads the saved stages. Pure.
"""

from __future__ import annotations

from dataclasses import replace

from swarm_ft.coordinator.decide import attempts
from swarm_ft.coordinator.facts.events import (
    SnapshotLost,
    SnapshotRecord,
    SnapshotWritten,
    Transition,
    WriteSnapshot,
)
from swarm_ft.coordinator.facts.reasons import Reason, ReasonKind
from swarm_ft.coordinator.facts.state import Run, Snapshot
from swarm_ft.coordinator.plan.allocation import makes_room
from swarm_ft.coordinator.plan.keepers import has_all_stages
from swarm_ft.coordinator.plan.steps import kept_snapshots
from swarm_ft.coordinator.plan.succession import may_save, takes_result_along
from swarm_ft.ids import PeerId, StepNumber
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.messages.control import SavedStage, SaveStage, StageSaved, StageUnsaved
from swarm_ft.protocol.messages.events import EventKind

MAX_UNLISTED = 4
"""Most manifests that are written at the same time."""


def request(turn: Transition, run: Run) -> Run:
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


def is_requested_in_attempt(run: Run) -> bool:
    """Whether the run's present attempt requested a snapshot."""
    return run.saving.attempt == run.attempt.number


def is_on_its_way(run: Run) -> bool:
    """Whether a snapshot of the last commit is requested in this attempt, or being written."""
    asked, steps = run.saving.asked, run.committed_steps
    is_requested = asked is not None and asked.step == steps and is_requested_in_attempt(run)
    return is_requested or steps in {snapshot.step for snapshot in run.saving.unlisted}


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
        fail(turn, run, snapshot.step, failed)
        return
    saved = SavedStage(
        layers=message.name.layers,
        digest=message.digest,
        total_bytes=message.total_bytes,
        keepers=(peer_id,) if turn.state.num_keepers else (),
    )
    snapshot = snapshot.with_stage(saved)
    # Where peers keep snapshots, `snapshot_keepers` spreads the saved stages.
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
        fail(turn, run, snapshot.step, failed)
        return
    keeping = replace(run.keeping, took_s=turn.now_s - run.keeping.began_s)
    complete(turn, replace(run, keeping=keeping), snapshot)


def complete(turn: Transition, run: Run, snapshot: Snapshot) -> None:
    """Record a complete snapshot; the run can go back to it from now on."""
    # An older manifest may be written later; the newest snapshot counts.
    unlisted = tuple(other for other in run.saving.unlisted if other.step > snapshot.step)
    saving = replace(run.saving, unlisted=unlisted, failed=None)
    kept = kept_snapshots(run, snapshot)
    run = replace(run, past=replace(run.past, snapshots=kept), saving=saving)
    if run.moving is not None and run.moving.has_begun and run.moving.step < snapshot.step:
        turn.save_run(replace(run, moving=None))  # the new stages have a snapshot now
        run = turn.state.runs[run.run_id]
    turn.set_run(run)
    turn.write(SnapshotRecord(run.run_id, snapshot, frozenset(one.step for one in kept)))
    reason = Reason(kind=ReasonKind.SNAPSHOT_COMPLETE, step=snapshot.step)
    turn.emit(EventKind.SNAPSHOT_WHOLE, run, reason=reason, to_step=snapshot.step)
    _make_room(turn, run)


def fail(turn: Transition, run: Run, step: StepNumber, reason: Reason) -> None:
    """Record that the snapshot of this step failed."""
    lost = Reason(kind=ReasonKind.SNAPSHOT_FAILED, step=step, parts=(reason,))
    turn.emit(EventKind.SNAPSHOT_LOST, run, reason=lost, to_step=step)
    run = replace(run, saving=replace(run.saving, failed=reason))
    if run.spec.train.load_best_model_at_end and not run.phase.is_over:
        turn.save_run(replace(run, detail=replace(lost, kind=ReasonKind.BEST_NOT_SAVED)))
    else:
        turn.set_run(run)


def _make_room(turn: Transition, run: Run) -> None:
    """Repartition the run from its new snapshot, if a waiting run can begin then."""
    if run.phase is RunPhase.TRAINING and makes_room(turn.state, run, turn.now_s):
        step = run.past.rolled_back.committed_steps
        detail = Reason(kind=ReasonKind.CUT_ANEW, step=step)
        stages = [stage.layers for stage in run.stages]
        run = replace(run, phase=RunPhase.WAITING, detail=detail, moving=None)
        attempts.go_back(turn, run, Reason(kind=ReasonKind.MAKES_ROOM), stages)


def save_leaving_results(turn: Transition) -> None:
    """Save finished runs whose result would leave with its peers before the client came."""
    for run in tuple(turn.state.runs.values()):
        if run.saving.is_under_way or not takes_result_along(turn.state, run):
            continue
        if may_save(turn.state, run, turn.now_s):
            request(turn, run)
