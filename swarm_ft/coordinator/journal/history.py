"""Reading a run's steps, evaluations, snapshots and buffers from the journal's tables."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from swarm_ft.coordinator.facts.ledger import Ledger
from swarm_ft.coordinator.facts.state import PlannedStep, Snapshot
from swarm_ft.coordinator.journal.columns import RUN_VALUES, value_of
from swarm_ft.coordinator.plan.steps import MEASURED_STEPS
from swarm_ft.ids import Attempt, BlockIndex, MicrobatchIndex, PeerId, RunId, SampleId, StepNumber
from swarm_ft.protocol.messages.client import Evaluated, StepCommitted
from swarm_ft.protocol.messages.control import CommitStep, SavedStage
from swarm_ft.protocol.messages.reports import ByteCounts, GradientTraffic, Traffic
from swarm_ft.protocol.spec.best import Judged
from swarm_ft.protocol.spec.microbatch import Microbatch


class RunHistory:
    """The rows of one run.

    All methods raise `sqlite3.Error` if the disk cannot be read, and the errors of `value_of` if a
    row cannot be understood.
    """

    def __init__(self, db: sqlite3.Connection, run_id: RunId) -> None:
        self._db = db
        self._run_id = run_id

    def _rows(self, query: str, *args: object) -> list[Any]:
        """Return the rows that the query finds; its first parameter is the run."""
        return self._db.execute(query, (self._run_id, *args)).fetchall()

    # ---- steps

    def steps(self, first: int, limit: int) -> tuple[StepCommitted, ...]:
        """Return at most `limit` committed steps, from `first` on."""
        found = self._rows(
            "SELECT step, loss, learning_rate, grad_norm, num_samples, seconds, traffic,"
            " gradients, state_bytes FROM commits WHERE run_id=? AND step>=?"
            " ORDER BY step LIMIT ?",
            first,
            limit,
        )
        return tuple(
            replace(
                _step_of(row[:6]),
                traffic=value_of(tuple[Traffic, ...], row[6]),
                gradients=value_of(GradientTraffic, row[7]),
                state_bytes=row[8],
            )
            for row in found
        )

    def chosen_steps(self, steps: Sequence[int]) -> tuple[StepCommitted, ...]:
        """Return these committed steps, in rising order, without their traffic."""
        found = self._rows(
            "SELECT step, loss, learning_rate, grad_norm, num_samples, seconds FROM commits"
            " WHERE run_id=? AND step IN (SELECT value FROM json_each(?)) ORDER BY step",
            json.dumps(steps),
        )
        return tuple(map(_step_of, found))

    def step_seconds(self) -> tuple[float, ...]:
        """Return the seconds of the last steps."""
        found = self._rows(
            "SELECT seconds FROM commits WHERE run_id=? ORDER BY step DESC LIMIT ?", MEASURED_STEPS
        )
        return tuple(seconds for (seconds,) in reversed(found))

    def planned_step(self, committed_steps: int) -> PlannedStep | None:
        """Return the microbatches of the present step; their routes are not stored."""
        found = self._rows(
            "SELECT microbatches FROM plans WHERE run_id=? AND step=?", committed_steps
        )
        if not found:
            return None
        batches = value_of(tuple[tuple[SampleId, ...], ...], found[0][0])
        return PlannedStep(
            microbatches=tuple(Microbatch(MicrobatchIndex(i), own) for i, own in enumerate(batches))
        )

    # ---- evaluations

    def evaluations(self, first: int, stop: int) -> tuple[Evaluated, ...]:
        """Return the evaluations of weights with `first` to `stop` - 1 steps, in order."""
        found = self._rows(
            "SELECT step, num_samples, eval_loss, compressed_eval_loss, counts, traffic"
            " FROM evaluations WHERE run_id=? AND step>=? AND step<? ORDER BY step",
            first,
            stop,
        )
        return tuple(
            Evaluated(
                step=StepNumber(step),
                num_samples=num_samples,
                eval_loss=loss,
                compressed_eval_loss=compressed_loss,
                counts=value_of(tuple[int, ...], counts),
                traffic=value_of(tuple[Traffic, ...], traffic),
            )
            for step, num_samples, loss, compressed_loss, counts, traffic in found
        )

    def last_evaluation(self) -> Evaluated | None:
        """Return the newest evaluation."""
        ((step,),) = self._rows("SELECT max(step) FROM evaluations WHERE run_id=?")
        return None if step is None else self.evaluations(step, step + 1)[0]

    def judged(self) -> Judged:
        """Return the summary of all evaluations."""
        found = self._rows(
            "SELECT judged FROM evaluations WHERE run_id=? ORDER BY step DESC LIMIT 1"
        )
        judged: Judged = value_of(Judged, found[0][0]) if found else Judged()
        return judged

    # ---- states to go back to

    def as_of(self, committed_steps: int) -> Snapshot | None:
        """Return the run's state at these steps, without stages; None if it is not stored."""
        found = self._rows(
            "SELECT attempt, clip_factor, learning_rate, sent, all_traffic FROM commits"
            " WHERE run_id=? AND step=?",
            committed_steps - 1,
        )
        if not found:
            return None
        attempt, clip_factor, learning_rate, sent, traffic = found[0]
        commit = CommitStep(
            run_id=self._run_id,
            attempt=Attempt(attempt),
            step=StepNumber(committed_steps - 1),
            clip_factor=clip_factor,
            learning_rate=learning_rate,
        )
        return Snapshot(
            last_commit=commit,
            sent=value_of(ByteCounts, sent),
            traffic=value_of(tuple[Traffic, ...], traffic),
        )

    def snapshots(self) -> tuple[Snapshot, ...]:
        """Return the snapshots, by rising step."""
        found = self._rows(
            "SELECT step, stages, judged FROM snapshots WHERE run_id=? ORDER BY step"
        )
        return tuple(
            replace(
                known,
                stages=value_of(tuple[SavedStage, ...], stages),
                judged=value_of(Judged, judged),
            )
            for step, stages, judged in found
            if (known := self.as_of(step))
        )

    def ledger(self, num_samples: int) -> Ledger | None:
        """Return the holders of the run's buffers, if it has any."""
        found = self._rows("SELECT boundaries, peers FROM ledgers WHERE run_id=?")
        if not found:
            return None
        chunks = self._rows("SELECT chunk, holders FROM ledger_chunks WHERE run_id=?")
        return _ledger_of(found[0], chunks, num_samples)

    def run_values(self) -> dict[str, Any]:
        """Return those fields of the run that `run_values` has."""
        found = self._rows("SELECT name, value FROM run_values WHERE run_id=?")
        return {name: value_of(RUN_VALUES[name], text) for name, text in found}


def _step_of(row: tuple[int, float, float, float, int, float]) -> StepCommitted:
    step, loss, learning_rate, grad_norm, num_samples, seconds = row
    return StepCommitted(
        step=StepNumber(step),
        loss=loss,
        learning_rate=learning_rate,
        grad_norm=grad_norm,
        num_samples=num_samples,
        seconds=seconds,
    )


def _ledger_of(
    row: tuple[str, str], chunks: Iterable[tuple[int, bytes]], num_samples: int
) -> Ledger:
    """Return a run's ledger from its boundaries, peers and chunks.

    Raises:
        ValueError: The rows do not fit together.
    """
    empty = Ledger.empty(value_of(tuple[BlockIndex, ...], row[0]), num_samples)
    stored = list(empty.chunks)
    for place, chunk in chunks:
        if not (0 <= place < len(stored) and len(chunk) == len(stored[place])):
            raise ValueError(f"ledger: chunk {place} of {len(chunk)} bytes is none of this run's")
        stored[place] = chunk
    peers = value_of(tuple[PeerId, ...], row[1])
    ledger = replace(empty, peers=peers, chunks=tuple(stored))
    highest = int(ledger.all_entries().max(initial=0))
    if highest > len(peers):
        raise ValueError(f"ledger: peer {highest} holds buffers, but {len(peers)} are named")
    return ledger
