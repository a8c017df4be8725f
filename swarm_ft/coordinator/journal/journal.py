"""The coordinator's database: one SQLite file, the only `import sqlite3`. Decides nothing.

Records are durable when `write` returns (WAL, synchronous FULL). `load` returns every run as of the
last record; peers then report the stages that they still hold. The tokens of runs lie in files
beside it (`tokens`), so that a transaction has only a few rows and is quick.
"""

from __future__ import annotations

import os
import sqlite3
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from swarm_ft.base.log import get_logger
from swarm_ft.base.private_files import FILE_MODE, make_private, open_private
from swarm_ft.base.sealing import Sealer
from swarm_ft.base.systems import lock_file
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
from swarm_ft.coordinator.facts.reasons import Reason, ReasonKind
from swarm_ft.coordinator.facts.reputation import FORGOTTEN_AFTER_S, MAX_REST_S, Reputation
from swarm_ft.coordinator.facts.state import (
    MAX_STANDINGS,
    AttemptState,
    CommittedState,
    Measurements,
    Run,
    SentTraffic,
)
from swarm_ft.coordinator.journal import migrations
from swarm_ft.coordinator.journal.columns import (
    reason_of,
    run_values_of,
    text_of,
    text_of_reason,
    value_of,
)
from swarm_ft.coordinator.journal.disk_errors import IN_USE, error_text
from swarm_ft.coordinator.journal.history import RunHistory
from swarm_ft.coordinator.journal.reserve import Reserve
from swarm_ft.coordinator.journal.schema import SCHEMA, TABLES_OF_RUNS, VERSION
from swarm_ft.coordinator.journal.schema_version import check_version, copy_beside, version_of
from swarm_ft.coordinator.journal.tokens import TokenFiles
from swarm_ft.coordinator.plan.membership import GATHER_S
from swarm_ft.errors import JournalError, SwarmError
from swarm_ft.ids import Attempt, PeerId, RunId
from swarm_ft.protocol.messages.client import Evaluated, RunPhase, StepCommitted
from swarm_ft.protocol.messages.contribution import Contribution
from swarm_ft.protocol.messages.control import StageAssignment
from swarm_ft.protocol.messages.events import EventKind
from swarm_ft.protocol.messages.reports import summed_by_boundary
from swarm_ft.protocol.spec.bounds import Name
from swarm_ft.protocol.wire import RUN_SPEC
from swarm_ft.protocol.wire.earlier import is_earlier, salvaged_spec

logger = get_logger(__name__)

MAX_EVENTS = 10_000
"""Newest events that are kept."""
_PROOF = b"this journal's key"


_RunRow = tuple[str, bytes, str, bytes, int, bytes, int, int, int | None, str]
MAX_REASON_CHARS = 500


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
            self._write_values(run)

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
                samples = text_of(tuple(batch.samples for batch in microbatches))
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
        texts = text_of(snapshot.stages), text_of(snapshot.judged)
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
        texts = text_of(found.counts), text_of(record.judged), text_of(found.traffic)
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
        self._write_values(run)
        if run.phase > RunPhase.FINISHED:
            self._forget_ledger(run.run_id)

    def _write_values(self, run: Run) -> None:
        self._db.execute("DELETE FROM run_values WHERE run_id=?", (run.run_id,))
        self._db.executemany("INSERT INTO run_values VALUES (?, ?, ?)", run_values_of(run))

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
            text_of(step.traffic),
            text_of(step.gradients),
            step.state_bytes,
            text_of(record.sent),
            text_of(record.traffic),
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
            texts = text_of(change.boundaries), text_of(change.peers)
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
        history = RunHistory(self._db, run_id)
        assignments: tuple[StageAssignment, ...] = value_of(tuple[StageAssignment, ...], stages)
        peers = [assignment.peer_id for assignment in assignments]
        if is_earlier(spec_bytes):  # its migration failed
            raise JournalError(
                "its RunSpec is of an earlier version, and its tokens, which are torn or gone, do "
                "not prove it; submit the job again"
            )
        spec, stored = RUN_SPEC.from_bytes(spec_bytes), history.run_values()
        steering = stored.get("steering")
        for change in steering.codecs if steering else ():
            spec.with_codecs(change.codecs)  # this version may lack a codec of an earlier one
        past = CommittedState(
            committed_steps=committed_steps,
            committers=frozenset(peers),
            # Their hellos correct this.
            exported=MappingProxyType(dict.fromkeys(peers if phase is RunPhase.FINISHED else ())),
            ledger=history.ledger(spec.num_buffered_samples),
            judged=history.judged(),
            snapshots=history.snapshots(),
            trained_steps=trained_steps,
        )
        past = _with_sums(past, history)
        return Run(
            run_id=run_id,
            spec=spec,
            owner=owner,
            storage_key=self._opened(key, f"key {name}"),
            phase=RunPhase.WAITING if under_way else phase,
            detail=restarted if under_way else detail,
            past=past,
            attempt=AttemptState(
                number=Attempt(attempt),
                assignments=assignments,
                away_since_s=MappingProxyType(dict.fromkeys(peers, now_s)),
            ),
            step=history.planned_step(committed_steps),
            measured=Measurements(step_seconds=history.step_seconds()),
            gather_until_s=now_s + GATHER_S,
            **stored,
        )

    def steps(self, run_id: RunId, first: int, limit: int) -> tuple[StepCommitted, ...]:
        """Return at most `limit` committed steps of a run, from `first` on."""
        with self._errors_named():
            return RunHistory(self._db, run_id).steps(first, limit)

    def chosen_steps(self, run_id: RunId, steps: Sequence[int]) -> tuple[StepCommitted, ...]:
        """Return these committed steps of a run, in rising order, without their traffic."""
        with self._errors_named():
            return RunHistory(self._db, run_id).chosen_steps(steps)

    def evaluations(self, run_id: RunId, first: int, stop: int) -> tuple[Evaluated, ...]:
        """Return a run's evaluations of weights with `first` to `stop` - 1 steps, in order."""
        with self._errors_named():
            return RunHistory(self._db, run_id).evaluations(first, stop)

    def data_digest(self, run_id: RunId) -> bytes:
        """Return the digest of all tokens of a run, in their order."""
        with self._errors_named():
            query = "SELECT data_digest FROM runs WHERE run_id=?"
            sealed = self._db.execute(query, (run_id,)).fetchone()[0]
        return self._opened(sealed, f"data {run_id}")

    # ---- encryption

    def _run_row(self, run: Run) -> tuple[bytes, int, bytes, int, int, int | None, str]:
        """Return the columns of a run that change: key, phase, detail, attempt, steps, stages."""
        stages = text_of(run.attempt.assignments)
        key = self._sealed(run.storage_key, f"key {run.run_id}")
        detail = self._sealed_reason(run.detail, f"detail {run.run_id}")
        steps = run.committed_steps, run.past.trained_steps
        return key, run.phase, detail, run.attempt.number, *steps, stages

    def _sealed_reason(self, reason: Reason | None, place: str) -> bytes:
        return self._sealed(text_of_reason(reason).encode(), place)

    def _opened_reason(self, value: bytes, place: str) -> Reason | None:
        return reason_of(self._opened(value, place).decode())

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


def _with_sums(past: CommittedState, history: RunHistory) -> CommittedState:
    """Return the committed state with the sums over its steps, and its newest results."""
    last = history.as_of(past.committed_steps)
    # Weights that are not the last have the sums of all steps.
    newest = last if past.trained_steps is None else history.as_of(past.trained_steps)
    if last is not None and newest is not None:
        past = replace(past, last_commit=last.last_commit, sent=newest.sent, traffic=newest.traffic)
    past = replace(
        past,
        last_step=next(iter(history.steps(past.all_steps - 1, 1)), None),
        last_evaluation=history.last_evaluation(),
    )
    # A commit includes the evaluation before it, and no commit follows the last one.
    for found in history.evaluations(past.all_steps, past.all_steps + 1):
        traffic = summed_by_boundary((*past.traffic, *found.traffic))
        past = replace(past, sent=past.sent + found.sent, traffic=traffic)
    return past
