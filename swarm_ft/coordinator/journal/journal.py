"""The coordinator's memory: one SQLite database, the only `import sqlite3`. Decides nothing.

Records are durable when `write` returns (WAL, synchronous FULL). `load` gives every run back as
it was when the last record was written; peers then say what they still hold. The tokens of runs
lie in files beside it (`token_files`), so that a transaction is a few rows and nobody waits for it.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType

from swarm_ft.coordinator.facts.events import (
    CommitRecord,
    LedgerRecord,
    PlanRecord,
    Record,
    RollbackRecord,
    RunRecord,
    SnapshotRecord,
    StandingRecord,
)
from swarm_ft.coordinator.facts.ledger import Ledger
from swarm_ft.coordinator.facts.standing import FORGOTTEN_AFTER_S, MAX_REST_S, Standing
from swarm_ft.coordinator.facts.state import (
    MAX_STANDINGS,
    AttemptState,
    Measured,
    Past,
    PlannedStep,
    Run,
    Snapshot,
)
from swarm_ft.coordinator.journal import rows as rows
from swarm_ft.coordinator.journal.tokens import TokenFiles
from swarm_ft.coordinator.plan.membership import GATHER_S
from swarm_ft.coordinator.plan.steps import MEASURED_STEPS
from swarm_ft.errors import JournalError, SwarmError
from swarm_ft.ids import Attempt, PeerId, RunId, StepNumber
from swarm_ft.private_files import FILE_MODE, make_private
from swarm_ft.protocol.messages.client import RunPhase, StepCommitted
from swarm_ft.protocol.messages.control import CommitStep
from swarm_ft.protocol.messages.reports import ByteCounts, Traffic


class Journal:
    """The database at `path`; `:memory:` keeps nothing. One owner at a time.

    Attributes:
        tokens: those of its runs, in the folder `PATH.tokens`.

    Raises:
        JournalError: the file cannot be opened, read or written, another process has it, or
            another version wrote it.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        _keep_private(path)
        with self._errors_named():
            self._db = sqlite3.connect(path, timeout=1.0)
            self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._check_version()
            self._db.executescript(rows.SCHEMA)
            self._db.execute(f"PRAGMA user_version={rows.VERSION}")
            # A write takes the exclusive lock now, so that a second coordinator learns it at once.
            self._db.execute("BEGIN IMMEDIATE")
            self._db.commit()
        try:
            self.tokens = self._open_tokens()
        except BaseException:
            self._db.close()
            raise

    def _check_version(self) -> None:
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        (num_tables,) = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if num_tables and version != rows.VERSION:
            self._db.close()
            raise JournalError(
                f"journal {self._path}: expected tables of version {rows.VERSION}, found "
                f"{version}; end its runs with the swarm-ft that wrote it, or name another file"
            )

    def _open_tokens(self) -> TokenFiles:
        """The files of runs that may still need them; what is left of others is deleted."""
        with self._errors_named():
            found = self._db.execute(
                "SELECT run_id FROM runs WHERE phase<=?", (RunPhase.FINISHED,)
            ).fetchall()
        folder = None if self._path == ":memory:" else Path(f"{self._path}.tokens")
        if found and folder is not None and not folder.is_dir():
            raise JournalError(
                f"journal {self._path}: expected its runs' tokens in {folder}, which is not there; "
                "put it back beside the journal"
            )
        tokens = TokenFiles(folder)
        tokens.sweep(RunId(run_id) for (run_id,) in found)
        return tokens

    def close(self) -> None:
        """Close the file; nothing is lost by not calling it."""
        self._db.close()
        self.tokens.close()

    # ---- writing

    def write(self, records: Iterable[Record]) -> None:
        """Make records durable, all of them or none; nothing is done for none.

        Raises:
            JournalError: the disk refused.
        """
        listed = list(records)
        if not listed:
            return
        with self._errors_named(), self._db:
            for record in listed:
                self._write_one(record)

    def write_run(self, run: Run, data_digest: bytes) -> None:
        """Make a new run durable, whose tokens are: `data_digest` is that of all of them.

        Raises:
            JournalError: the disk refused.
        """
        with self._errors_named(), self._db:
            self._db.execute(
                "INSERT INTO runs (run_id, spec, data_digest,"
                " phase, detail, attempt, committed_steps, stages)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (run.run_id, rows.spec_bytes(run.spec), data_digest, *rows.run_row(run)),
            )

    def _write_one(self, record: Record) -> None:
        execute = self._db.execute
        match record:
            case RunRecord(run):
                execute(
                    "UPDATE runs SET phase=?, detail=?, attempt=?, committed_steps=?, stages=?"
                    " WHERE run_id=?",
                    (*rows.run_row(run), run.run_id),
                )
                if run.phase > RunPhase.FINISHED:
                    self._forget_ledger(run.run_id)
            case PlanRecord(run_id, step, attempt, microbatches):
                row = (run_id, step, attempt, rows.plan_text(microbatches))
                execute("INSERT OR REPLACE INTO plans VALUES (?, ?, ?, ?)", row)
            case CommitRecord():
                self._write_commit(record)
            case LedgerRecord():
                self._write_ledger(record)
            case StandingRecord(peer_id, standing, for_s):
                told = (peer_id, standing.times_aside, time.time() + for_s, standing.reason)
                execute("INSERT OR REPLACE INTO standings VALUES (?, ?, ?, ?)", told)
            case SnapshotRecord(run_id, snapshot):
                saved = (run_id, snapshot.step, rows.saved_text(snapshot.stages))
                execute("INSERT OR REPLACE INTO snapshots VALUES (?, ?, ?)", saved)
            case RollbackRecord(run_id, first_void_step):
                void = (run_id, first_void_step)
                execute("DELETE FROM commits WHERE run_id=? AND step>=?", void)
                execute("DELETE FROM plans WHERE run_id=? AND step>=?", void)
                execute("DELETE FROM snapshots WHERE run_id=? AND step>?", void)
                if not first_void_step:
                    self._forget_ledger(run_id)

    def _write_commit(self, record: CommitRecord) -> None:
        row = rows.commit_row(record)
        self._db.execute(
            "INSERT INTO commits VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row
        )
        self._db.execute(
            "UPDATE runs SET committed_steps=? WHERE run_id=?",
            (record.step.step + 1, record.run_id),
        )

    def _write_ledger(self, record: LedgerRecord) -> None:
        run_id, change = record.run_id, record.change
        if change.is_new:
            self._forget_ledger(run_id)
        if change.peers is not None:
            texts = json.dumps(change.boundaries), json.dumps(change.peers)
            self._db.execute("INSERT OR REPLACE INTO ledgers VALUES (?, ?, ?)", (run_id, *texts))
        self._db.executemany(
            "INSERT OR REPLACE INTO ledger_chunks VALUES (?, ?, ?)",
            ((run_id, place, holders) for place, holders in change.chunks),
        )

    def _forget_ledger(self, run_id: RunId) -> None:
        self._db.execute("DELETE FROM ledgers WHERE run_id=?", (run_id,))
        self._db.execute("DELETE FROM ledger_chunks WHERE run_id=?", (run_id,))

    # ---- reading

    def load(self, now_s: float) -> tuple[Run, ...]:
        """All runs, oldest first; those under way wait for their peers from `now_s` on."""
        with self._errors_named():
            found = self._db.execute(
                "SELECT run_id, spec, phase, detail, attempt, committed_steps, stages"
                " FROM runs ORDER BY position"
            ).fetchall()
        try:
            return tuple(self._run(row, now_s) for row in found)
        except (SwarmError, ValueError, TypeError) as error:
            raise JournalError(f"journal {self._path}: a run cannot be read: {error}") from error

    def standings(self, now_s: float) -> dict[PeerId, Standing]:
        """Peers that were set aside of late, as of `now_s`; others are forgotten."""
        unix_s = time.time()
        with self._errors_named(), self._db:
            void = unix_s - FORGOTTEN_AFTER_S
            self._db.execute("DELETE FROM standings WHERE until_unix_s<?", (void,))
            found = self._db.execute(
                "SELECT peer_id, times_aside, until_unix_s, reason FROM standings"
                " ORDER BY until_unix_s DESC LIMIT ?",
                (MAX_STANDINGS,),
            ).fetchall()
        # A clock that was set back must not make a rest longer than it can be.
        return {
            PeerId(peer): Standing(
                times_aside=times,
                aside_until_s=now_s + min(until_unix_s - unix_s, MAX_REST_S),
                reason=reason,
            )
            for peer, times, until_unix_s, reason in reversed(found)
        }

    def _run(self, row: tuple[str, bytes, int, str, int, int, str], now_s: float) -> Run:
        run_id, spec_bytes, phase_number, detail, attempt, committed_steps, stages = row
        phase = RunPhase(phase_number)
        under_way = not phase.is_over and phase is not RunPhase.QUEUED
        assignments = rows.assignments_from(stages)
        peers = [assignment.peer_id for assignment in assignments]
        spec = rows.spec_from(spec_bytes)
        sent, traffic = self._sent(RunId(run_id), committed_steps)
        return Run(
            run_id=RunId(run_id),
            spec=spec,
            phase=RunPhase.WAITING if under_way else phase,
            detail="the coordinator was restarted" if under_way else detail,
            past=Past(
                committed_steps=committed_steps,
                last_commit=self._last_commit(RunId(run_id), committed_steps),
                committers=frozenset(peers),
                # Until their hellos tell otherwise.
                exported=MappingProxyType(
                    dict.fromkeys(peers if phase is RunPhase.FINISHED else ())
                ),
                sent=sent,
                traffic=traffic,
                ledger=self._ledger(RunId(run_id), spec.train.num_samples),
                snapshot=self._snapshot(RunId(run_id)),
            ),
            attempt=AttemptState(
                number=Attempt(attempt),
                assignments=assignments,
                away_since_s=MappingProxyType(dict.fromkeys(peers, now_s)),
            ),
            step=self._planned_step(RunId(run_id), committed_steps),
            measured=Measured(step_seconds=self._step_seconds(RunId(run_id))),
            gather_until_s=now_s + GATHER_S,
        )

    def _last_commit(self, run_id: RunId, committed_steps: int) -> CommitStep | None:
        with self._errors_named():
            row = self._db.execute(
                "SELECT attempt, clip_factor, learning_rate FROM commits WHERE run_id=? AND step=?",
                (run_id, committed_steps - 1),
            ).fetchone()
        if row is None:
            return None
        step = StepNumber(committed_steps - 1)
        attempt, clip_factor, learning_rate = row
        return CommitStep(
            run_id=run_id,
            attempt=Attempt(attempt),
            step=step,
            clip_factor=clip_factor,
            learning_rate=learning_rate,
        )

    def _planned_step(self, run_id: RunId, committed_steps: int) -> PlannedStep | None:
        """The microbatches of the step under way; which peers they were to pass is not kept."""
        with self._errors_named():
            row = self._db.execute(
                "SELECT microbatches FROM plans WHERE run_id=? AND step=?",
                (run_id, committed_steps),
            ).fetchone()
        if row is None:
            return None
        return PlannedStep(microbatches=rows.plan_from(row[0]))

    def _step_seconds(self, run_id: RunId) -> tuple[float, ...]:
        """Of the last steps."""
        with self._errors_named():
            found = self._db.execute(
                "SELECT seconds FROM commits WHERE run_id=? ORDER BY step DESC LIMIT ?",
                (run_id, MEASURED_STEPS),
            ).fetchall()
        return tuple(seconds for (seconds,) in reversed(found))

    def _sent(self, run_id: RunId, committed_steps: int) -> tuple[ByteCounts, tuple[Traffic, ...]]:
        """What peers sent each other in so many steps; of that, what went over each boundary."""
        with self._errors_named():
            row = self._db.execute(
                "SELECT sent, all_traffic FROM commits WHERE run_id=? AND step=?",
                (run_id, committed_steps - 1),
            ).fetchone()
        return (rows.sent_from(row[0]), rows.traffic_from(row[1])) if row else (ByteCounts(), ())

    def _ledger(self, run_id: RunId, num_samples: int) -> Ledger | None:
        """Who holds which buffers, if the run has any."""
        with self._errors_named():
            row = self._db.execute(
                "SELECT boundaries, peers FROM ledgers WHERE run_id=?", (run_id,)
            ).fetchone()
            if row is None:
                return None
            chunks = self._db.execute(
                "SELECT chunk, holders FROM ledger_chunks WHERE run_id=?", (run_id,)
            )
            return rows.ledger_from(row, chunks, num_samples)

    def _snapshot(self, run_id: RunId) -> Snapshot | None:
        """The newest."""
        with self._errors_named():
            row = self._db.execute(
                "SELECT step, stages FROM snapshots WHERE run_id=? ORDER BY step DESC LIMIT 1",
                (run_id,),
            ).fetchone()
        last_commit = self._last_commit(run_id, row[0]) if row else None
        if last_commit is None:
            return None
        sent, traffic = self._sent(run_id, row[0])
        stages = rows.saved_from(row[1])
        return Snapshot(last_commit=last_commit, sent=sent, traffic=traffic, stages=stages)

    def steps(self, run_id: RunId, first: int, limit: int) -> tuple[StepCommitted, ...]:
        """Committed steps of a run, from `first` on, so many at most."""
        with self._errors_named():
            found = self._db.execute(
                "SELECT step, loss, learning_rate, grad_norm, num_samples, seconds, traffic,"
                " gradients, state_bytes FROM commits WHERE run_id=? AND step>=?"
                " ORDER BY step LIMIT ?",
                (run_id, first, limit),
            ).fetchall()
        return tuple(rows.committed_from(row) for row in found)

    def data_digest(self, run_id: RunId) -> bytes:
        """The digest of all tokens of a run that is here, `digest_of` them in a row."""
        with self._errors_named():
            query = "SELECT data_digest FROM runs WHERE run_id=?"
            return bytes(self._db.execute(query, (run_id,)).fetchone()[0])

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            hint = "; does another coordinator use it?" if "locked" in str(error) else ""
            raise JournalError(f"journal {self._path}: {error}{hint}") from error


def _keep_private(path: str) -> None:
    """Let nobody else read the database; its write-ahead log gets the rights that it has."""
    if path == ":memory:":
        return
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE))
    except FileExistsError:
        # Not opened: closing it would let go of another connection's locks, which are POSIX's.
        for file in (path, f"{path}-wal", f"{path}-shm"):
            with suppress(OSError):
                make_private(Path(file))
    except OSError:
        return  # SQLite is about to say what is wrong
