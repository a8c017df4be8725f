"""The journal's tables, and how values lie in their rows. Knows no database."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace

from swarm_ft.coordinator.facts.events import CommitRecord
from swarm_ft.coordinator.facts.ledger import Ledger
from swarm_ft.coordinator.facts.state import Run
from swarm_ft.ids import BlockIndex, MicrobatchIndex, PeerId, StepNumber
from swarm_ft.protocol.messages.client import StepCommitted
from swarm_ft.protocol.messages.control import SavedStage, StageAssignment
from swarm_ft.protocol.messages.reports import ByteCounts, GradientTraffic, Traffic
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import RunSpec
from swarm_ft.protocol.spec.training_plan import Microbatch
from swarm_ft.protocol.wire import RUN_SPEC

VERSION = 8
"""Of the tables, and of the RunSpecs in them; a journal of another one is not touched."""
SCHEMA = """
CREATE TABLE IF NOT EXISTS runs (
    position INTEGER PRIMARY KEY, run_id TEXT UNIQUE NOT NULL, spec BLOB NOT NULL,
    data_digest BLOB NOT NULL,
    phase INTEGER NOT NULL, detail TEXT NOT NULL, attempt INTEGER NOT NULL,
    committed_steps INTEGER NOT NULL, stages TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS plans (
    run_id TEXT PRIMARY KEY, step INTEGER NOT NULL, attempt INTEGER NOT NULL,
    microbatches TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS commits (
    run_id TEXT NOT NULL, step INTEGER NOT NULL, attempt INTEGER NOT NULL,
    loss REAL NOT NULL, learning_rate REAL NOT NULL, clip_factor REAL NOT NULL,
    grad_norm REAL NOT NULL, num_samples INTEGER NOT NULL,
    seconds REAL NOT NULL, traffic TEXT NOT NULL, gradients TEXT NOT NULL,
    state_bytes INTEGER NOT NULL, sent TEXT NOT NULL, all_traffic TEXT NOT NULL,
    PRIMARY KEY (run_id, step)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS snapshots (
    run_id TEXT NOT NULL, step INTEGER NOT NULL, stages TEXT NOT NULL,
    PRIMARY KEY (run_id, step)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS ledgers (
    run_id TEXT PRIMARY KEY, boundaries TEXT NOT NULL, peers TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS ledger_chunks (
    run_id TEXT NOT NULL, chunk INTEGER NOT NULL, holders BLOB NOT NULL,
    PRIMARY KEY (run_id, chunk)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS standings (
    peer_id TEXT PRIMARY KEY, times_aside INTEGER NOT NULL, until_unix_s REAL NOT NULL,
    reason TEXT NOT NULL) WITHOUT ROWID;
"""


# ---- runs


def run_row(run: Run) -> tuple[int, str, int, int, str]:
    """What changes of a run: phase, detail, attempt, committed steps, stages."""
    assigned = run.attempt.assignments
    stages = json.dumps([(a.peer_id, a.layers.start, a.layers.stop) for a in assigned])
    return run.phase, run.detail, run.attempt.number, run.committed_steps, stages


def assignments_from(text: str) -> tuple[StageAssignment, ...]:
    """Who hosts what, of a run's row."""
    return tuple(
        StageAssignment(peer_id=PeerId(peer), layers=LayerRange(start, stop))
        for peer, start, stop in json.loads(text)
    )


def spec_bytes(spec: RunSpec) -> bytes:
    """A RunSpec in a run's row."""
    return RUN_SPEC.to_bytes(spec)


def spec_from(data: bytes) -> RunSpec:
    """The RunSpec of a run's row.

    Raises:
        MalformedMessage: it is none.
    """
    return RUN_SPEC.from_bytes(data)


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
        traffic_text(step.traffic),
        json.dumps(asdict(step.gradients)),
        step.state_bytes,
        json.dumps(asdict(record.sent)),
        traffic_text(record.traffic),
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
        traffic=traffic_from(traffic),
        gradients=GradientTraffic(**json.loads(gradients)),
        state_bytes=state,
    )


def sent_from(text: str) -> ByteCounts:
    """Bytes of a commit's row."""
    return ByteCounts(**json.loads(text))


def traffic_text(traffic: Sequence[Traffic]) -> str:
    """Counts of boundaries."""
    return json.dumps([asdict(one) for one in traffic])


def traffic_from(text: str) -> tuple[Traffic, ...]:
    """Counts of a commit's row."""
    return tuple(Traffic(**fields) for fields in json.loads(text))


# ---- ledgers


def ledger_from(
    row: tuple[str, str], chunks: Iterable[tuple[int, bytes]], num_samples: int
) -> Ledger:
    """A run's ledger, of its boundaries and peers, and its chunks.

    Raises:
        ValueError: its rows do not fit together.
    """
    boundaries = tuple(BlockIndex(block) for block in json.loads(row[0]))
    empty = Ledger.empty(boundaries, num_samples)
    kept = list(empty.chunks)
    for place, chunk in chunks:
        if not (0 <= place < len(kept) and len(chunk) == len(kept[place])):
            raise ValueError(f"ledger: chunk {place} of {len(chunk)} bytes is none of this run's")
        kept[place] = chunk
    peers = tuple(PeerId(peer) for peer in json.loads(row[1]))
    ledger = replace(empty, peers=peers, chunks=tuple(kept))
    highest = int(ledger.all_entries().max(initial=0))
    if highest > len(peers):
        raise ValueError(f"ledger: peer {highest} holds buffers, but {len(peers)} are named")
    return ledger


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
