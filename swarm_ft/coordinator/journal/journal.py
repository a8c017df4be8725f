"""The coordinator's database: one SQLite file, the only `import sqlite3`. Decides nothing.

Records are durable when `write` returns (WAL, synchronous FULL). `load` returns every run as of the
last record; peers then report the stages that they still hold. The tokens of runs lie in files
beside it (`tokens`), so that a transaction has only a few rows and is quick.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType

from swarm_ft.coordinator.facts.events import (
    CommitRecord,
    ContributionRecord,
    EmitEvent,
    EvaluationRecord,
    EventRecord,
    ForgetRecord,
    LedgerRecord,
    PlanRecord,
    Record,
    ReputationRecord,
    RollbackRecord,
    RunRecord,
    SnapshotRecord,
)
from swarm_ft.coordinator.facts.ledger import Ledger
from swarm_ft.coordinator.facts.reasons import Reason, ReasonKind
from swarm_ft.coordinator.facts.reputation import FORGOTTEN_AFTER_S, MAX_REST_S, Reputation
from swarm_ft.coordinator.facts.state import (
    MAX_STANDINGS,
    AttemptState,
    CommittedState,
    Measurements,
    PlannedStep,
    RateChange,
    Repartition,
    Run,
    SentTraffic,
    Snapshot,
    Steering,
    SteeringRequest,
)
from swarm_ft.coordinator.journal import migrations
from swarm_ft.coordinator.journal.disk_errors import IN_USE, error_text
from swarm_ft.coordinator.journal.reason_text import reason_from, text_of
from swarm_ft.coordinator.journal.reserve import Reserve
from swarm_ft.coordinator.journal.schema_version import check_version, copy_beside, version_of
from swarm_ft.coordinator.journal.tokens import TokenFiles
from swarm_ft.coordinator.plan.membership import GATHER_S
from swarm_ft.coordinator.plan.steps import MEASURED_STEPS
from swarm_ft.errors import JournalError, SwarmError
from swarm_ft.ids import Attempt, BlockIndex, MicrobatchIndex, PeerId, RunId, StepNumber
from swarm_ft.log import get_logger
from swarm_ft.private_files import FILE_MODE, make_private, open_private
from swarm_ft.protocol.messages.client import (
    CodecChange,
    Evaluated,
    RunPhase,
    StepCommitted,
)
from swarm_ft.protocol.messages.contribution import Contribution
from swarm_ft.protocol.messages.control import CommitStep, SavedStage, StageAssignment
from swarm_ft.protocol.messages.events import EventKind
from swarm_ft.protocol.messages.reports import (
    ByteCounts,
    GradientTraffic,
    Traffic,
    summed_by_boundary,
)
from swarm_ft.protocol.spec.best import Best, Judged
from swarm_ft.protocol.spec.bounds import Name
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.microbatch import Microbatch
from swarm_ft.protocol.spec.priority import DEFAULT_PRIORITY, NO_CLAIM, Claim
from swarm_ft.protocol.spec.quality import QualityControl
from swarm_ft.protocol.spec.run_spec import Codecs
from swarm_ft.protocol.wire import RUN_SPEC
from swarm_ft.protocol.wire.earlier import is_earlier, salvaged_spec
from swarm_ft.sealing import Sealer
from swarm_ft.systems import lock_file

logger = get_logger(__name__)

VERSION = 11
"""Version of the tables and of the values in them; see `migrations`."""
SCHEMA = """
CREATE TABLE IF NOT EXISTS runs (
    position INTEGER PRIMARY KEY, run_id TEXT UNIQUE NOT NULL, spec BLOB NOT NULL,
    data_digest BLOB NOT NULL, owner TEXT NOT NULL, storage_key BLOB NOT NULL,
    phase INTEGER NOT NULL, detail BLOB NOT NULL, attempt INTEGER NOT NULL,
    committed_steps INTEGER NOT NULL, trained_steps INTEGER, stages TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS priorities (
    run_id TEXT PRIMARY KEY, priority INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS claims (
    run_id TEXT PRIMARY KEY, name TEXT NOT NULL, weight INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS steerings (
    run_id TEXT PRIMARY KEY, steering TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS movings (
    run_id TEXT PRIMARY KEY, moving TEXT NOT NULL) WITHOUT ROWID;
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
CREATE TABLE IF NOT EXISTS evaluations (
    run_id TEXT NOT NULL, step INTEGER NOT NULL, num_samples INTEGER NOT NULL,
    eval_loss REAL, compressed_eval_loss REAL, counts TEXT NOT NULL, judged TEXT NOT NULL,
    traffic TEXT NOT NULL,
    PRIMARY KEY (run_id, step)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS snapshots (
    run_id TEXT NOT NULL, step INTEGER NOT NULL, stages TEXT NOT NULL, judged TEXT NOT NULL,
    PRIMARY KEY (run_id, step)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS ledgers (
    run_id TEXT PRIMARY KEY, boundaries TEXT NOT NULL, peers TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS ledger_chunks (
    run_id TEXT NOT NULL, chunk INTEGER NOT NULL, holders BLOB NOT NULL,
    PRIMARY KEY (run_id, chunk)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS standings (
    peer_id TEXT PRIMARY KEY, times_aside INTEGER NOT NULL, until_unix_s REAL NOT NULL,
    reason BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS contributions (
    peer_id TEXT PRIMARY KEY, samples INTEGER NOT NULL, steps INTEGER NOT NULL,
    seconds REAL NOT NULL, compute_s REAL NOT NULL, sent_bytes INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS sent_traffic (
    peer_id TEXT PRIMARY KEY, session INTEGER NOT NULL, session_bytes INTEGER NOT NULL,
    all_bytes INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS events (
    serial INTEGER PRIMARY KEY, unix_s REAL NOT NULL, kind INTEGER NOT NULL, run_id TEXT,
    peer_id TEXT, from_step INTEGER, to_step INTEGER, words BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS sealing (proof BLOB NOT NULL);
"""
MAX_EVENTS = 10_000
"""Newest events that are kept."""
_PROOF = b"this journal's key"


_RunRow = tuple[str, bytes, str, bytes, int, bytes, int, int, int | None, str]
MAX_REASON_CHARS = 500
TABLES_OF_RUNS = (
    "runs",
    "priorities",
    "claims",
    "steerings",
    "movings",
    "plans",
    "commits",
    "evaluations",
    "snapshots",
)
"""Tables with rows of runs, except those of ledgers."""


class Journal:
    """The database at `path`; `:memory:` stores nothing. One owner at a time.

    Args:
        path: Path of the database; other files lie beside it.
        key: Key that encrypts tokens, and each run's spec, storage key, data digest and reasons;
            None: all is plain. This is fixed at the first start.
        reserve_bytes: Bytes of the disk reserved for commits, in the file `PATH.reserve`.

    Attributes:
        tokens: Tokens of its runs, in the folder `PATH.tokens`.

    Raises:
        JournalError: The file cannot be opened, read or written; another process has it; a later
            version wrote it; or it was made with another key, or with or without one.
    """

    def __init__(self, path: str, key: bytes | None = None, *, reserve_bytes: int = 0) -> None:
        self._path = path
        self._sealer = Sealer(key, "journal") if key is not None else None
        self._unlock: Callable[[], object] = lambda: None
        _keep_private(path)
        with self._errors_named():
            self._db = sqlite3.connect(path, timeout=1.0)
        try:
            version = self._begin()
            self._reserve = Reserve(Path(f"{path}.reserve"), reserve_bytes)
            self._check_key()
            self.tokens = self._open_tokens(key)
            if version is not None and version < VERSION:
                self._migrate(version)
        except BaseException:
            self._close()
            raise

    def _begin(self) -> int | None:
        """Open the file, and create the tables of a new one; return an existing file's version."""
        with self._errors_named():
            version = version_of(self._db)
            check_version(f"journal {self._path}", version, migrations.OLDEST, VERSION)
            self._lock()
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.execute("PRAGMA secure_delete=ON")  # so that deleting a run erases its key
            if version is None:
                self._create()
        return version

    def _lock(self) -> None:
        """Refuse a second coordinator; other programs may read, as `swarm-ft backup` does."""
        if self._path == ":memory:":
            return
        file = open_private(Path(f"{self._path}.lock"), "ab")
        self._unlock = weakref.finalize(self, file.close)
        if not lock_file(file.fileno()):
            raise JournalError(f"journal {self._path}: {IN_USE}")

    def _create(self) -> None:
        self._db.executescript(SCHEMA)
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute(f"PRAGMA user_version={VERSION}")
            if self._sealer is not None:
                proof = self._sealed(_PROOF, "proof")
                self._db.execute("INSERT INTO sealing VALUES (?)", (proof,))

    def _migrate(self, version: int) -> None:
        """Migrate an earlier file to the present version, with a copy of it beside it."""
        with self._errors_named():
            copy_beside(self._db, Path(self._path), version)
            self._db.executescript(SCHEMA)
            with self._db:
                self._db.execute("BEGIN IMMEDIATE")
                opened = migrations.OpenJournal(
                    db=self._db, opened=self._opened, sealed=self._sealed, tokens=self.tokens
                )
                migrations.migrate(opened, version)
                self._db.execute(f"PRAGMA user_version={VERSION}")

    def _check_key(self) -> None:
        with self._errors_named():
            row = self._db.execute("SELECT proof FROM sealing").fetchone()
        if (row is None) != (self._sealer is None):
            how = "not encrypted" if row is None else "encrypted"
            raise JournalError(
                f"journal {self._path}: it was created {how}, and stays so; start with "
                f"{'no' if row is None else 'the same'} --encrypt-at-rest, or name another file"
            )
        if row is not None and self._opened(row[0], "proof") != _PROOF:
            raise JournalError(f"journal {self._path}: its proof is invalid; name another file")

    def _open_tokens(self, key: bytes | None) -> TokenFiles:
        """Open the files of runs that may still need them, and delete all others."""
        with self._errors_named():
            found = self._db.execute(
                "SELECT run_id FROM runs WHERE phase<=?", (RunPhase.FINISHED,)
            ).fetchall()
        folder = None if self._path == ":memory:" else Path(f"{self._path}.tokens")
        if found and folder is not None and not folder.is_dir():
            raise JournalError(
                f"journal {self._path}: expected its runs' tokens in {folder}, got nothing; "
                "restore that folder beside the journal"
            )
        tokens = TokenFiles(folder, key, has_room=self._reserve.ensure)
        tokens.sweep(RunId(run_id) for (run_id,) in found)
        return tokens

    def close(self) -> None:
        """Close the file; without this call nothing is lost."""
        self._close()
        self.tokens.close()

    def _close(self) -> None:
        self._db.close()
        self._unlock()

    # ---- writing

    def write(self, records: Iterable[Record]) -> None:
        """Make records durable, all of them or none.

        If the disk is full, the reserve provides room.

        Raises:
            JournalError: The disk cannot be written.
        """
        listed = list(records)
        if not listed:
            return
        with self._errors_named():
            try:
                self._write_all(listed)
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_FULL or not self._reserve.release():
                    raise
                self._write_all(listed)

    def _write_all(self, records: Iterable[Record]) -> None:
        with self._db:
            for record in records:
                self._write_one(record)

    def _write_event(self, event: EventRecord) -> None:
        """Insert an event, and delete all but the newest `MAX_EVENTS`."""
        happened = event.event
        row = (
            *(event.serial, event.unix_s, happened.kind, happened.run_id, happened.peer_id),
            *(happened.from_step, happened.to_step),
            self._sealed_reason(happened.reason, f"event {event.serial}"),
        )
        self._db.execute("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
        self._db.execute("DELETE FROM events WHERE serial<=?", (event.serial - MAX_EVENTS,))

    def _write_contributions(self, record: ContributionRecord) -> None:
        rows = (
            (peer, g.samples, g.steps, g.seconds, g.compute_s, g.sent_bytes)
            for peer, g in record.given.items()
        )
        self._db.executemany("INSERT OR REPLACE INTO contributions VALUES (?, ?, ?, ?, ?, ?)", rows)
        sent = ((peer, s.session, s.session_bytes, s.all_bytes) for peer, s in record.sent.items())
        self._db.executemany("INSERT OR REPLACE INTO sent_traffic VALUES (?, ?, ?, ?)", sent)
        forgotten = [(peer,) for peer in record.forgotten]
        for table in ("contributions", "sent_traffic"):
            self._db.executemany(f"DELETE FROM {table} WHERE peer_id=?", forgotten)

    def write_run(self, run: Run, data_digest: bytes) -> None:
        """Insert a new run, whose tokens are durable already.

        Raises:
            JournalError: The disk cannot be written.
        """
        with self._errors_named(), self._db:
            self._db.execute(
                "INSERT INTO runs (run_id, spec, data_digest, owner,"
                " storage_key, phase, detail, attempt, committed_steps, trained_steps, stages)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    run.run_id,
                    self._sealed(RUN_SPEC.to_bytes(run.spec), f"spec {run.run_id}"),
                    self._sealed(data_digest, f"data {run.run_id}"),
                    run.owner,
                    *self._run_row(run),
                ),
            )
            if run.priority != DEFAULT_PRIORITY:
                row = run.run_id, run.priority
                self._db.execute("INSERT INTO priorities VALUES (?, ?)", row)
            if run.claim.name:
                claimed = run.run_id, run.claim.name, run.claim.weight
                self._db.execute("INSERT INTO claims VALUES (?, ?, ?)", claimed)

    def _write_one(self, record: Record) -> None:
        match record:
            case ContributionRecord():
                self._write_contributions(record)
            case EventRecord():
                self._write_event(record)
            case ReputationRecord():
                self._write_standing(record)
            case _:
                self._write_of_run(record)

    def _write_of_run(
        self,
        record: RunRecord
        | PlanRecord
        | CommitRecord
        | EvaluationRecord
        | LedgerRecord
        | SnapshotRecord
        | RollbackRecord
        | ForgetRecord,
    ) -> None:
        execute = self._db.execute
        match record:
            case RunRecord(run):
                self._write_state(run)
            case PlanRecord(run_id, step, attempt, microbatches):
                # The journal stores their samples, and not their routes.
                samples = json.dumps([batch.samples for batch in microbatches])
                row = (run_id, step, attempt, samples)
                execute("INSERT OR REPLACE INTO plans VALUES (?, ?, ?, ?)", row)
            case CommitRecord():
                self._write_commit(record)
            case EvaluationRecord():
                self._write_evaluation(record)
            case LedgerRecord():
                self._write_ledger(record)
            case SnapshotRecord():
                self._write_snapshot(record)
            case RollbackRecord():
                self._roll_back(record)
            case ForgetRecord(run_id):
                self._forget(run_id)

    def _forget(self, run_id: RunId) -> None:
        for table in TABLES_OF_RUNS:
            self._db.execute(f"DELETE FROM {table} WHERE run_id=?", (run_id,))
        self._forget_ledger(run_id)

    def _write_snapshot(self, record: SnapshotRecord) -> None:
        run_id, snapshot, execute = record.run_id, record.snapshot, self._db.execute
        texts = _saved_text(snapshot.stages), _judged_text(snapshot.judged)
        saved = (run_id, snapshot.step, *texts)
        execute("INSERT OR REPLACE INTO snapshots VALUES (?, ?, ?, ?)", saved)
        found = execute("SELECT step FROM snapshots WHERE run_id=?", (run_id,)).fetchall()
        for (step,) in found:
            if step not in record.kept:
                execute("DELETE FROM snapshots WHERE run_id=? AND step=?", (run_id, step))

    def forget_snapshots(self, run_id: RunId, steps: Iterable[int]) -> None:
        """Drop a run's snapshots of these steps.

        Raises:
            JournalError: The disk cannot be written.
        """
        rows = [(run_id, step) for step in steps]
        with self._errors_named(), self._db:
            self._db.executemany("DELETE FROM snapshots WHERE run_id=? AND step=?", rows)

    def _write_evaluation(self, record: EvaluationRecord) -> None:
        found = record.evaluated
        losses = found.eval_loss, found.compressed_eval_loss
        judged, traffic = _judged_text(record.judged), _traffic_text(found.traffic)
        texts = json.dumps(found.counts), judged, traffic
        row = (record.run_id, found.step, found.num_samples, *losses, *texts)
        self._db.execute("INSERT OR REPLACE INTO evaluations VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)

    def _write_standing(self, record: ReputationRecord) -> None:
        peer_id, standing = record.peer_id, record.standing
        reason = self._sealed_reason(standing.reason, f"standing {peer_id}")
        row = (peer_id, standing.times_aside, time.time() + record.for_s, reason)
        self._db.execute("INSERT OR REPLACE INTO standings VALUES (?, ?, ?, ?)", row)

    def _write_state(self, run: Run) -> None:
        self._db.execute(
            "UPDATE runs SET storage_key=?, phase=?, detail=?, attempt=?, committed_steps=?,"
            " trained_steps=?, stages=? WHERE run_id=?",
            (*self._run_row(run), run.run_id),
        )
        self._write_steering(run)
        self._write_moving(run)
        if run.phase > RunPhase.FINISHED:
            self._forget_ledger(run.run_id)

    def _write_steering(self, run: Run) -> None:
        self._db.execute("DELETE FROM steerings WHERE run_id=?", (run.run_id,))
        if run.steering != Steering():
            row = (run.run_id, _steering_text(run.steering))
            self._db.execute("INSERT INTO steerings VALUES (?, ?)", row)

    def _write_moving(self, run: Run) -> None:
        self._db.execute("DELETE FROM movings WHERE run_id=?", (run.run_id,))
        if run.moving is not None:
            row = (run.run_id, _moving_text(run.moving))
            self._db.execute("INSERT INTO movings VALUES (?, ?)", row)

    def _roll_back(self, record: RollbackRecord) -> None:
        run_id, execute = record.run_id, self._db.execute
        void = (run_id, record.first_void_step)
        execute("DELETE FROM commits WHERE run_id=? AND step>=?", void)
        first_void = record.first_void_step + record.is_evaluated
        execute("DELETE FROM evaluations WHERE run_id=? AND step>=?", (run_id, first_void))
        execute("DELETE FROM plans WHERE run_id=? AND step>=?", void)
        execute("DELETE FROM snapshots WHERE run_id=? AND step>?", void)
        if not record.first_void_step:
            self._forget_ledger(run_id)

    def _write_commit(self, record: CommitRecord) -> None:
        step, commit = record.step, record.commit
        row = (
            record.run_id,
            step.step,
            commit.attempt,
            step.loss,
            step.learning_rate,
            commit.clip_factor,
            step.grad_norm,
            step.num_samples,
            step.seconds,
            _traffic_text(step.traffic),
            json.dumps(asdict(step.gradients)),
            step.state_bytes,
            json.dumps(asdict(record.sent)),
            _traffic_text(record.traffic),
        )
        self._db.execute(
            "INSERT INTO commits VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row
        )
        self._db.execute(
            "UPDATE runs SET committed_steps=? WHERE run_id=?", (step.step + 1, record.run_id)
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
        """Return all runs, oldest first; active ones wait for their peers from `now_s` on."""
        with self._errors_named():
            found = self._db.execute(
                "SELECT run_id, spec, owner, storage_key, phase, detail, attempt,"
                " committed_steps, trained_steps, stages FROM runs ORDER BY position"
            ).fetchall()
        with self._errors_named():
            return tuple(self._run(row, now_s) for row in found if self._can_be_named(row[0]))

    def _can_be_named(self, run_id: str) -> bool:
        """Whether a run's name is within the present bound; earlier versions counted characters."""
        words = Name().refusal(run_id)
        if words is not None:
            logger.warning("journal %s: a run is left out: its name: %s", self._path, words)
        return words is None

    def standings(self, now_s: float) -> dict[PeerId, Reputation]:
        """Return the reputations of recently suspended peers as of `now_s`; drop all others."""
        unix_s = time.time()
        with self._errors_named(), self._db:
            void = unix_s - FORGOTTEN_AFTER_S
            self._db.execute("DELETE FROM standings WHERE until_unix_s<?", (void,))
            found = self._db.execute(
                "SELECT peer_id, times_aside, until_unix_s, reason FROM standings"
                " ORDER BY until_unix_s DESC LIMIT ?",
                (MAX_STANDINGS,),
            ).fetchall()
        # A clock that was set back must not prolong a suspension beyond the longest one.
        return {
            PeerId(peer): Reputation(
                times_aside=times,
                aside_until_s=now_s + min(until_unix_s - unix_s, MAX_REST_S),
                reason=self._opened_reason(reason, f"standing {peer}"),
            )
            for peer, times, until_unix_s, reason in reversed(found)
        }

    def contributions(self) -> dict[PeerId, Contribution]:
        """Return the contributions of members, the smallest first."""
        with self._errors_named():
            found = self._db.execute(
                "SELECT peer_id, samples, steps, seconds, compute_s, sent_bytes"
                " FROM contributions ORDER BY samples"
            ).fetchall()
        return {
            PeerId(peer): Contribution(
                samples=samples,
                steps=steps,
                seconds=seconds,
                compute_s=compute_s,
                sent_bytes=sent_bytes,
            )
            for peer, samples, steps, seconds, compute_s, sent_bytes in found
        }

    def sent_traffic(self) -> dict[PeerId, SentTraffic]:
        """Return everything that each member sent."""
        with self._errors_named():
            found = self._db.execute(
                "SELECT peer_id, session, session_bytes, all_bytes FROM sent_traffic"
            ).fetchall()
        return {PeerId(peer): SentTraffic(*counts) for peer, *counts in found}

    def events(self, since: int, limit: int) -> tuple[EventRecord, ...]:
        """Return at most `limit` events from this serial number on, oldest first."""
        with self._errors_named():
            found = self._db.execute(
                "SELECT serial, unix_s, kind, run_id, peer_id, from_step, to_step, words"
                " FROM events WHERE serial>=? ORDER BY serial LIMIT ?",
                (since, limit),
            ).fetchall()
        return tuple(
            EventRecord(
                serial,
                unix_s,
                EmitEvent(
                    kind=EventKind(kind),
                    run_id=RunId(run_id) if run_id and Name().refusal(run_id) is None else None,
                    peer_id=peer_id and PeerId(peer_id),
                    from_step=from_step,
                    to_step=to_step,
                    reason=self._opened_reason(words, f"event {serial}"),
                ),
            )
            for serial, unix_s, kind, run_id, peer_id, from_step, to_step, words in found
        )

    def event_counts(self) -> dict[EventKind, int]:
        """Return the number of stored events of each kind."""
        with self._errors_named():
            found = self._db.execute("SELECT kind, count(*) FROM events GROUP BY kind").fetchall()
        return {EventKind(kind): count for kind, count in found}

    def next_serial(self) -> int:
        """Return the number of the next event; the first is 1."""
        with self._errors_named():
            (newest,) = self._db.execute("SELECT max(serial) FROM events").fetchone()
        return (newest or 0) + 1

    def _run(self, row: _RunRow, now_s: float) -> Run:
        """Return the run of a row; an unreadable one is returned as failed, and its row stays."""
        try:
            return self._read_run(row, now_s)
        except (SwarmError, ValueError, TypeError, LookupError) as error:
            if isinstance(error.__cause__, (sqlite3.Error, OSError)):
                raise
            return self._unreadable_run(row, error)

    def _unreadable_run(self, row: _RunRow, error: Exception) -> Run:
        name, sealed_spec, owner, *_, attempt, committed_steps, _, _ = row
        why = error.message if isinstance(error, SwarmError) else repr(error)
        logger.error("journal %s: run %s cannot be read: %s", self._path, name, why)
        try:
            spec_bytes = self._opened(sealed_spec, f"spec {name}")
        except JournalError:
            spec_bytes = b""
        return Run(
            run_id=RunId(name),
            spec=salvaged_spec(spec_bytes, committed_steps),
            owner=owner,
            phase=RunPhase.FAILED,
            detail=Reason(kind=ReasonKind.RUN_UNREADABLE, text=why[:MAX_REASON_CHARS]),
            past=CommittedState(committed_steps=committed_steps),
            attempt=AttemptState(number=Attempt(attempt)),
        )

    def _read_run(self, row: _RunRow, now_s: float) -> Run:
        name, sealed_spec, owner, key, phase_number, sealed_detail, attempt = row[:7]
        committed_steps, trained_steps, stages = row[7:]
        spec_bytes = self._opened(sealed_spec, f"spec {name}")
        detail = self._opened_reason(sealed_detail, f"detail {name}")
        restarted = Reason(kind=ReasonKind.COORDINATOR_RESTARTED)
        run_id, phase = RunId(name), RunPhase(phase_number)
        under_way = not phase.is_over and phase is not RunPhase.QUEUED
        assignments = _assignments_of(json.loads(stages))
        peers = [assignment.peer_id for assignment in assignments]
        if is_earlier(spec_bytes):  # its migration failed
            raise JournalError(
                "its RunSpec is of an earlier version, and its tokens, which are torn or gone, do "
                "not prove it; submit the job again"
            )
        spec, steering = RUN_SPEC.from_bytes(spec_bytes), self._steering(run_id)
        for change in steering.codecs:
            spec.with_codecs(change.codecs)  # this version may lack a codec of an earlier one
        last = self._as_of(run_id, committed_steps)
        # Weights that are not the last have the sums of all steps.
        newest = last if trained_steps is None else self._as_of(run_id, trained_steps)
        past = CommittedState(
            committed_steps=committed_steps,
            committers=frozenset(peers),
            # Their hellos correct this.
            exported=MappingProxyType(dict.fromkeys(peers if phase is RunPhase.FINISHED else ())),
            ledger=self._ledger(run_id, spec.num_buffered_samples),
            judged=self._judged(run_id),
            snapshots=self._snapshots(run_id),
            trained_steps=trained_steps,
        )
        if last is not None and newest is not None:
            past = replace(
                past, last_commit=last.last_commit, sent=newest.sent, traffic=newest.traffic
            )
        past = replace(
            past,
            last_step=next(iter(self.steps(run_id, past.all_steps - 1, 1)), None),
            last_evaluation=self._last_evaluation(run_id),
        )
        # A commit includes the evaluation before it, and no commit follows the last one.
        for found in self.evaluations(run_id, past.all_steps, past.all_steps + 1):
            traffic = summed_by_boundary((*past.traffic, *found.traffic))
            past = replace(past, sent=past.sent + found.sent, traffic=traffic)
        return Run(
            run_id=run_id,
            spec=spec,
            owner=owner,
            storage_key=self._opened(key, f"key {name}"),
            priority=self._priority(run_id),
            claim=self._claim(run_id),
            phase=RunPhase.WAITING if under_way else phase,
            detail=restarted if under_way else detail,
            past=past,
            attempt=AttemptState(
                number=Attempt(attempt),
                assignments=assignments,
                away_since_s=MappingProxyType(dict.fromkeys(peers, now_s)),
            ),
            step=self._planned_step(run_id, committed_steps),
            measured=Measurements(step_seconds=self._step_seconds(run_id)),
            steering=steering,
            moving=self._moving(run_id),
            gather_until_s=now_s + GATHER_S,
        )

    def _priority(self, run_id: RunId) -> int:
        query = "SELECT priority FROM priorities WHERE run_id=?"
        (priority,) = self._db.execute(query, (run_id,)).fetchone() or (DEFAULT_PRIORITY,)
        return int(priority)

    def _claim(self, run_id: RunId) -> Claim:
        query = "SELECT name, weight FROM claims WHERE run_id=?"
        row = self._db.execute(query, (run_id,)).fetchone()
        return Claim(*row) if row else NO_CLAIM

    def _as_of(self, run_id: RunId, committed_steps: int) -> Snapshot | None:
        """Return the run's state at these steps, without stages; None if it is not stored."""
        row = self._db.execute(
            "SELECT attempt, clip_factor, learning_rate, sent, all_traffic FROM commits"
            " WHERE run_id=? AND step=?",
            (run_id, committed_steps - 1),
        ).fetchone()
        if row is None:
            return None
        attempt, clip_factor, learning_rate, sent, traffic = row
        commit = CommitStep(
            run_id=run_id,
            attempt=Attempt(attempt),
            step=StepNumber(committed_steps - 1),
            clip_factor=clip_factor,
            learning_rate=learning_rate,
        )
        return Snapshot(
            last_commit=commit,
            sent=ByteCounts(**json.loads(sent)),
            traffic=_traffic_from(traffic),
        )

    def _steering(self, run_id: RunId) -> Steering:
        query = "SELECT steering FROM steerings WHERE run_id=?"
        row = self._db.execute(query, (run_id,)).fetchone()
        return Steering() if row is None else _steering_from(row[0])

    def _moving(self, run_id: RunId) -> Repartition | None:
        query = "SELECT moving FROM movings WHERE run_id=?"
        row = self._db.execute(query, (run_id,)).fetchone()
        return None if row is None else _moving_from(row[0])

    def _judged(self, run_id: RunId) -> Judged:
        """Return the results of all evaluations."""
        row = self._db.execute(
            "SELECT judged FROM evaluations WHERE run_id=? ORDER BY step DESC LIMIT 1", (run_id,)
        ).fetchone()
        return _judged_from(row[0]) if row else Judged()

    def _last_evaluation(self, run_id: RunId) -> Evaluated | None:
        query = "SELECT max(step) FROM evaluations WHERE run_id=?"
        (step,) = self._db.execute(query, (run_id,)).fetchone()
        return None if step is None else self.evaluations(run_id, step, step + 1)[0]

    def _snapshots(self, run_id: RunId) -> tuple[Snapshot, ...]:
        """Return the run's snapshots, by rising step."""
        found = self._db.execute(
            "SELECT step, stages, judged FROM snapshots WHERE run_id=? ORDER BY step", (run_id,)
        ).fetchall()
        return tuple(
            replace(known, stages=_saved_from(stages), judged=_judged_from(judged))
            for step, stages, judged in found
            if (known := self._as_of(run_id, step))
        )

    def _planned_step(self, run_id: RunId, committed_steps: int) -> PlannedStep | None:
        """Return the microbatches of the present step; their routes are not stored."""
        row = self._db.execute(
            "SELECT microbatches FROM plans WHERE run_id=? AND step=?", (run_id, committed_steps)
        ).fetchone()
        if row is None:
            return None
        planned = enumerate(json.loads(row[0]))
        return PlannedStep(
            microbatches=tuple(Microbatch(MicrobatchIndex(i), tuple(own)) for i, own in planned)
        )

    def _step_seconds(self, run_id: RunId) -> tuple[float, ...]:
        """Return the seconds of the last steps."""
        found = self._db.execute(
            "SELECT seconds FROM commits WHERE run_id=? ORDER BY step DESC LIMIT ?",
            (run_id, MEASURED_STEPS),
        ).fetchall()
        return tuple(seconds for (seconds,) in reversed(found))

    def _ledger(self, run_id: RunId, num_samples: int) -> Ledger | None:
        """Return the holders of the run's buffers, if it has any."""
        row = self._db.execute(
            "SELECT boundaries, peers FROM ledgers WHERE run_id=?", (run_id,)
        ).fetchone()
        if row is None:
            return None
        chunks = self._db.execute(
            "SELECT chunk, holders FROM ledger_chunks WHERE run_id=?", (run_id,)
        )
        return _ledger_from(row, chunks, num_samples)

    def steps(self, run_id: RunId, first: int, limit: int) -> tuple[StepCommitted, ...]:
        """Return at most `limit` committed steps of a run, from `first` on."""
        with self._errors_named():
            found = self._db.execute(
                "SELECT step, loss, learning_rate, grad_norm, num_samples, seconds, traffic,"
                " gradients, state_bytes FROM commits WHERE run_id=? AND step>=?"
                " ORDER BY step LIMIT ?",
                (run_id, first, limit),
            ).fetchall()
        return tuple(_committed_from(row) for row in found)

    def chosen_steps(self, run_id: RunId, steps: Sequence[int]) -> tuple[StepCommitted, ...]:
        """Return these committed steps of a run, in rising order, without their traffic."""
        with self._errors_named():
            found = self._db.execute(
                "SELECT step, loss, learning_rate, grad_norm, num_samples, seconds FROM commits"
                " WHERE run_id=? AND step IN (SELECT value FROM json_each(?)) ORDER BY step",
                (run_id, json.dumps(steps)),
            ).fetchall()
        return tuple(
            StepCommitted(
                step=StepNumber(step),
                loss=loss,
                learning_rate=learning_rate,
                grad_norm=grad_norm,
                num_samples=num_samples,
                seconds=seconds,
            )
            for step, loss, learning_rate, grad_norm, num_samples, seconds in found
        )

    def evaluations(self, run_id: RunId, first: int, stop: int) -> tuple[Evaluated, ...]:
        """Return a run's evaluations of weights with `first` to `stop` - 1 steps, in order."""
        with self._errors_named():
            found = self._db.execute(
                "SELECT step, num_samples, eval_loss, compressed_eval_loss, counts, traffic"
                " FROM evaluations WHERE run_id=? AND step>=? AND step<? ORDER BY step",
                (run_id, first, stop),
            ).fetchall()
        return tuple(
            Evaluated(
                step=StepNumber(step),
                num_samples=num_samples,
                eval_loss=loss,
                compressed_eval_loss=compressed_loss,
                counts=tuple(map(int, json.loads(counts))),
                traffic=_traffic_from(traffic),
            )
            for step, num_samples, loss, compressed_loss, counts, traffic in found
        )

    def data_digest(self, run_id: RunId) -> bytes:
        """Return the digest of all tokens of a run, in their order."""
        with self._errors_named():
            query = "SELECT data_digest FROM runs WHERE run_id=?"
            sealed = self._db.execute(query, (run_id,)).fetchone()[0]
        return self._opened(sealed, f"data {run_id}")

    # ---- encryption

    def _run_row(self, run: Run) -> tuple[bytes, int, bytes, int, int, int | None, str]:
        """Return the columns of a run that change: key, phase, detail, attempt, steps, stages."""
        assigned = run.attempt.assignments
        stages = json.dumps(_hosts(assigned))
        key = self._sealed(run.storage_key, f"key {run.run_id}")
        detail = self._sealed_reason(run.detail, f"detail {run.run_id}")
        steps = run.committed_steps, run.past.trained_steps
        return key, run.phase, detail, run.attempt.number, *steps, stages

    def _sealed_reason(self, reason: Reason | None, place: str) -> bytes:
        return self._sealed(text_of(reason).encode(), place)

    def _opened_reason(self, value: bytes, place: str) -> Reason | None:
        return reason_from(self._opened(value, place).decode())

    def _sealed(self, value: bytes, place: str) -> bytes:
        return value if self._sealer is None else self._sealer.seal(value, place.encode())

    def _opened(self, value: bytes, place: str) -> bytes:
        """Return the value that `_sealed` encrypted.

        Raises:
            JournalError: The key is another one.
        """
        if self._sealer is None:
            return bytes(value)
        try:
            return self._sealer.open(value, place.encode())
        except ValueError as error:
            raise JournalError(
                f"journal {self._path}: {error}; name the key file that it was created with"
            ) from None

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            logger.debug("journal %s: %s", self._path, error)
            raise JournalError(f"journal {self._path}: {error_text(error)}") from error


def _keep_private(path: str) -> None:
    """Restrict the database to its owner; its write-ahead log gets the same permissions."""
    if path == ":memory:":
        return
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL, FILE_MODE))
    except FileExistsError:
        # It is not opened: closing it would release another connection's POSIX locks.
        for file in (path, f"{path}-wal", f"{path}-shm"):
            with suppress(OSError):
                make_private(Path(file))
    except OSError:
        return  # SQLite reports the error


# ---- values of columns


def _committed_from(
    row: tuple[int, float, float, float, int, float, str, str, int],
) -> StepCommitted:
    """Return the step of a commit's row."""
    step, loss, learning_rate, grad_norm, num_samples, seconds, traffic, gradients, state = row
    return StepCommitted(
        step=StepNumber(step),
        loss=loss,
        learning_rate=learning_rate,
        grad_norm=grad_norm,
        num_samples=num_samples,
        seconds=seconds,
        traffic=_traffic_from(traffic),
        gradients=GradientTraffic(**json.loads(gradients)),
        state_bytes=state,
    )


def _steering_text(steering: Steering) -> str:
    rates = [(change.first_step, change.learning_rate) for change in steering.rates]
    codecs = [(one.first_step, one.codecs.forward, one.codecs.backward) for one in steering.codecs]
    fields = {"is_paused": steering.is_paused, "rates": rates, "codecs": codecs}
    if steering.quality is not None:
        fields |= {"quality": asdict(steering.quality), "measured_steps": steering.measured_steps}
    fields["requests"] = [
        (one.number, one.kind, one.step, text_of(one.reason)) for one in steering.requests
    ]
    return json.dumps(fields)


def _steering_from(text: str) -> Steering:
    fields = json.loads(text)
    rates = tuple(RateChange(StepNumber(step), rate) for step, rate in fields["rates"])
    codecs = tuple(
        CodecChange(StepNumber(step), Codecs(forward, backward))
        for step, forward, backward in fields.get("codecs", ())
    )
    quality = fields.get("quality")
    return Steering(
        is_paused=fields["is_paused"],
        rates=rates,
        codecs=codecs,
        quality=QualityControl(**quality) if quality else None,
        measured_steps=fields.get("measured_steps", 0),
        requests=tuple(
            SteeringRequest(number, EventKind(kind), step, reason)
            for number, kind, step, text in fields.get("requests", ())
            if (reason := reason_from(text)) is not None
        ),
    )


def _hosts(assignments: Iterable[StageAssignment]) -> list[tuple[str, int, int]]:
    """Return peers with their layers as plain values."""
    return [(a.peer_id, a.layers.start, a.layers.stop) for a in assignments]


def _assignments_of(hosts: Iterable[tuple[str, int, int]]) -> tuple[StageAssignment, ...]:
    """Return the assignments that `_hosts` wrote."""
    return tuple(
        StageAssignment(peer_id=PeerId(peer), layers=LayerRange(start, stop))
        for peer, start, stop in hosts
    )


def _moving_text(moving: Repartition) -> str:
    return json.dumps(
        {
            "step": moving.step,
            "hosts": _hosts(moving.assignments),
            "before_s": moving.before_s,
            "after_s": moving.after_s,
            "has_begun": moving.has_begun,
        }
    )


def _moving_from(text: str) -> Repartition:
    """Return the value that `_moving_text` wrote."""
    fields = json.loads(text)
    return Repartition(
        step=StepNumber(fields["step"]),
        assignments=_assignments_of(fields["hosts"]),
        before_s=fields["before_s"],
        after_s=fields["after_s"],
        has_begun=fields["has_begun"],
    )


def _traffic_text(traffic: Sequence[Traffic]) -> str:
    return json.dumps([asdict(one) for one in traffic])


def _traffic_from(text: str) -> tuple[Traffic, ...]:
    return tuple(Traffic(**fields) for fields in json.loads(text))


def _judged_text(judged: Judged) -> str:
    return json.dumps(asdict(judged))


def _judged_from(text: str) -> Judged:
    fields = json.loads(text)
    bests = {name: fields[name] and Best(**fields[name]) for name in ("best", "saved")}
    return Judged(step=fields["step"], num_worse=fields["num_worse"], **bests)


def _ledger_from(
    row: tuple[str, str], chunks: Iterable[tuple[int, bytes]], num_samples: int
) -> Ledger:
    """Return a run's ledger from its boundaries, peers and chunks.

    Raises:
        ValueError: The rows do not fit together.
    """
    boundaries = tuple(BlockIndex(block) for block in json.loads(row[0]))
    empty = Ledger.empty(boundaries, num_samples)
    stored = list(empty.chunks)
    for place, chunk in chunks:
        if not (0 <= place < len(stored) and len(chunk) == len(stored[place])):
            raise ValueError(f"ledger: chunk {place} of {len(chunk)} bytes is none of this run's")
        stored[place] = chunk
    peers = tuple(PeerId(peer) for peer in json.loads(row[1]))
    ledger = replace(empty, peers=peers, chunks=tuple(stored))
    highest = int(ledger.all_entries().max(initial=0))
    if highest > len(peers):
        raise ValueError(f"ledger: peer {highest} holds buffers, but {len(peers)} are named")
    return ledger


def _saved_text(stages: Sequence[SavedStage]) -> str:
    return json.dumps(
        [(s.layers.start, s.layers.stop, s.digest.hex(), s.total_bytes, *s.keepers) for s in stages]
    )


def _saved_from(text: str) -> tuple[SavedStage, ...]:
    return tuple(
        SavedStage(
            layers=LayerRange(start, stop),
            digest=bytes.fromhex(digest),
            total_bytes=total_bytes,
            keepers=tuple(map(PeerId, keepers)),
        )
        for start, stop, digest, total_bytes, *keepers in json.loads(text)
    )
