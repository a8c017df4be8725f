"""Snapshots: each stage is saved by one of its replicas, then all of them count as one."""

from __future__ import annotations

from dataclasses import replace

from swarm_ft.coordinator.effects import SnapshotRecord, WriteSnapshot
from swarm_ft.coordinator.state import Run, Snapshot
from swarm_ft.coordinator.turn import Turn
from swarm_ft.ids import PeerId, RunId, StepNumber
from swarm_ft.protocol.coordinator_messages import SavedStage, SaveStage
from swarm_ft.protocol.peer_messages import StageSaved
from swarm_ft.protocol.status import RunPhase

MAX_UNLISTED = 4
"""Manifests that are being written; one whose writing fails is never heard of again."""


def is_due(run: Run) -> bool:
    """Whether the state as of the last commit is to be saved."""
    save_steps = run.spec.train.save_steps
    return bool(save_steps) and run.committed_steps % save_steps == 0


def is_end_due(run: Run) -> bool:
    """Whether the trained state is to be saved, so that a lost result costs no training."""
    saved_steps = run.snapshot.step if run.snapshot else 0
    return bool(run.spec.train.save_steps) and saved_steps < run.committed_steps


def save(turn: Turn, run: Run) -> Run:
    """Ask one replica of each stage to save the state as of the last commit."""
    if run.last_commit is None:
        return run
    run = replace(
        run, saving=Snapshot(last_commit=run.last_commit, sent=run.sent, traffic=run.traffic)
    )
    turn.keep(run)
    step = StepNumber(run.committed_steps)
    for stage in run.computing:
        turn.say(stage.peers[0], SaveStage(run_id=run.run_id, step=step))
    return run


def stage_saved(turn: Turn, peer_id: PeerId, message: StageSaved) -> None:
    """A stage lies among the run's snapshots; with the last one the snapshot is whole."""
    run = turn.state.runs.get(message.name.run_id)
    if run is None or peer_id not in run.peers or run.phase > RunPhase.FINISHED:
        return
    saving = run.saving
    if saving is None or message.name.step != saving.step:
        return  # a later snapshot took its place
    saved = SavedStage(
        layers=message.name.layers, digest=message.digest, total_bytes=message.total_bytes
    )
    others = [stage for stage in saving.stages if stage.layers != saved.layers]
    stages = tuple(sorted((*others, saved), key=lambda stage: stage.layers))
    saving = replace(saving, stages=stages)
    is_whole = [s.layers for s in stages] == [s.layers for s in run.pipeline]
    if not is_whole:
        turn.keep(replace(run, saving=saving))
    else:
        unlisted = (*run.unlisted, saving)[-MAX_UNLISTED:]
        turn.keep(replace(run, saving=None, unlisted=unlisted))
        turn.effects.append(WriteSnapshot(run.run_id, run.spec, saving))


def snapshot_written(turn: Turn, run_id: RunId, snapshot: Snapshot) -> None:
    """The run can go back to the snapshot from now on, unless its history is void by now."""
    run = turn.state.runs.get(run_id)
    if run is None or run.phase > RunPhase.FINISHED or snapshot not in run.unlisted:
        return
    # An older one's manifest may be there later; the newest counts.
    unlisted = tuple(other for other in run.unlisted if other.step > snapshot.step)
    turn.keep(replace(run, snapshot=snapshot, unlisted=unlisted))
    turn.write(SnapshotRecord(run_id, snapshot))
