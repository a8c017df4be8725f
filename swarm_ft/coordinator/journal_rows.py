"""The journal's tables, and how values lie in their rows. Knows no database."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from swarm_ft.coordinator.effects import CommitRecord
from swarm_ft.coordinator.state import Run
from swarm_ft.ids import MicrobatchIndex, PeerId, StepNumber
from swarm_ft.proto import run_pb2
from swarm_ft.protocol.coordinator_messages import SavedStage, StageAssignment
from swarm_ft.protocol.layers import LayerRange
from swarm_ft.protocol.run_spec import RunSpec
from swarm_ft.protocol.run_wire import spec_from_wire, spec_to_wire
from swarm_ft.protocol.status import StepCommitted
from swarm_ft.protocol.traffic import ByteCounts, GradientTraffic, Traffic
from swarm_ft.protocol.training_plan import Microbatch

VERSION = 6
"""Of the tables, and of the RunSpecs in them; a journal of another one is not touched."""
SCHEMA = """
CREATE TABLE IF NOT EXISTS runs (
    position INTEGER PRIMARY KEY, run_id TEXT UNIQUE NOT NULL, spec BLOB NOT NULL,
    phase INTEGER NOT NULL, detail TEXT NOT NULL, attempt INTEGER NOT NULL,
    committed_steps INTEGER NOT NULL, stages TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS samples (
    run_id TEXT NOT NULL, sample INTEGER NOT NULL, token_ids BLOB NOT NULL,
    PRIMARY KEY (run_id, sample)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS members (
    number INTEGER PRIMARY KEY, peer_id TEXT NOT NULL, layers TEXT, memory_bytes INTEGER NOT NULL,
    joined INTEGER NOT NULL, at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP);
CREATE TABLE IF NOT EXISTS plans (
    run_id TEXT NOT NULL, step INTEGER NOT NULL, attempt INTEGER NOT NULL,
    microbatches TEXT NOT NULL,
    PRIMARY KEY (run_id, step, attempt)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS commits (
    run_id TEXT NOT NULL, step INTEGER NOT NULL, attempt INTEGER NOT NULL,
    loss REAL NOT NULL, learning_rate REAL NOT NULL, clip_factor REAL NOT NULL,
    grad_norm REAL NOT NULL, num_samples INTEGER NOT NULL,
    seconds REAL NOT NULL, traffic TEXT NOT NULL, gradients TEXT NOT NULL,
    state_bytes INTEGER NOT NULL, sent TEXT NOT NULL,
    PRIMARY KEY (run_id, step)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS snapshots (
    run_id TEXT NOT NULL, step INTEGER NOT NULL, stages TEXT NOT NULL,
    PRIMARY KEY (run_id, step)) WITHOUT ROWID;
"""


# ---- runs


def run_row(run: Run) -> tuple[int, str, int, int, str]:
    """What changes of a run: phase, detail, attempt, committed steps, stages."""
    stages = json.dumps([(s.peer_id, s.layers.start, s.layers.stop) for s in run.stages])
    return run.phase, run.detail, run.attempt, run.committed_steps, stages


def stages_from(text: str) -> tuple[StageAssignment, ...]:
    """Stages of a run's row."""
    return tuple(
        StageAssignment(peer_id=PeerId(peer), layers=LayerRange(start, stop))
        for peer, start, stop in json.loads(text)
    )


def spec_bytes(spec: RunSpec) -> bytes:
    """A RunSpec in a run's row."""
    return spec_to_wire(spec).SerializeToString()


def spec_from(data: bytes) -> RunSpec:
    """The RunSpec of a run's row.

    Raises:
        DecodeError, MalformedMessage: it is none.
    """
    return spec_from_wire(run_pb2.RunSpec.FromString(data))


# ---- steps


def plan_text(microbatches: Sequence[Microbatch]) -> str:
    """The samples of a step's microbatches; their routes are not kept."""
    return json.dumps([batch.samples for batch in microbatches])


def plan_from(text: str) -> tuple[Microbatch, ...]:
    """Microbatches of a plan's row, without routes."""
    planned = enumerate(json.loads(text))
    return tuple(Microbatch(MicrobatchIndex(i), tuple(samples)) for i, samples in planned)


def commit_row(record: CommitRecord) -> tuple[str | int | float, ...]:
    """A committed step."""
    step, commit = record.step, record.commit
    return (
        record.run_id,
        step.step,
        commit.attempt,
        step.loss,
        step.learning_rate,
        commit.clip_factor,
        step.grad_norm,
        step.num_samples,
        step.seconds,
        json.dumps([asdict(traffic) for traffic in step.traffic]),
        json.dumps(asdict(step.gradients)),
        step.state_bytes,
        json.dumps(asdict(record.sent)),
    )


def committed_from(
    row: tuple[int, float, float, float, int, float, str, str, int],
) -> StepCommitted:
    """What watchers are told of a commit's row."""
    step, loss, learning_rate, grad_norm, num_samples, seconds, traffic, gradients, state = row
    return StepCommitted(
        step=StepNumber(step),
        loss=loss,
        learning_rate=learning_rate,
        grad_norm=grad_norm,
        num_samples=num_samples,
        seconds=seconds,
        traffic=tuple(Traffic(**fields) for fields in json.loads(traffic)),
        gradients=GradientTraffic(**json.loads(gradients)),
        state_bytes=state,
    )


def sent_from(text: str) -> ByteCounts:
    """Bytes of a commit's row."""
    return ByteCounts(**json.loads(text))


# ---- snapshots


def saved_text(stages: Sequence[SavedStage]) -> str:
    """Stages of a snapshot."""
    return json.dumps(
        [(s.layers.start, s.layers.stop, s.digest.hex(), s.total_bytes) for s in stages]
    )


def saved_from(text: str) -> tuple[SavedStage, ...]:
    """Stages of a snapshot's row."""
    return tuple(
        SavedStage(
            layers=LayerRange(start, stop),
            digest=bytes.fromhex(digest),
            total_bytes=total_bytes,
        )
        for start, stop, digest, total_bytes in json.loads(text)
    )
