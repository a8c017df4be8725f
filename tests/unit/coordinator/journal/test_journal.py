import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from swarm_ft.base.sealing import Sealer
from swarm_ft.coordinator.facts.events import (
    CommitRecord,
    EmitEvent,
    EvaluationRecord,
    EventRecord,
    ForgetRecord,
    PlanRecord,
    ReputationRecord,
    RollbackRecord,
    RunRecord,
)
from swarm_ft.coordinator.facts.reasons import Reason, ReasonKind
from swarm_ft.coordinator.facts.reputation import Reputation
from swarm_ft.coordinator.facts.state import AttemptState, CommittedState, PlannedStep, Run
from swarm_ft.coordinator.journal.columns import recorded
from swarm_ft.coordinator.journal.journal import Journal
from swarm_ft.coordinator.journal.schema import SCHEMA, VERSION
from swarm_ft.coordinator.journal.tokens import NewTokenFile
from swarm_ft.coordinator.plan.membership import GATHER_S
from swarm_ft.digest import digest_of
from swarm_ft.errors import JournalError
from swarm_ft.ids import (
    Attempt,
    BlockIndex,
    MicrobatchIndex,
    PeerId,
    RunId,
    SampleId,
    StepNumber,
)
from swarm_ft.proto import run_pb2
from swarm_ft.protocol.messages.client import Evaluated, RunPhase, StepCommitted
from swarm_ft.protocol.messages.control import CommitStep, StageAssignment
from swarm_ft.protocol.messages.events import EventKind
from swarm_ft.protocol.messages.reports import Traffic
from swarm_ft.protocol.spec.best import Best, Judged
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.microbatch import Microbatch
from swarm_ft.protocol.wire import RUN_SPEC
from tests.unit.coordinator.conftest import MakeSpec

RUN = RunId("run-1")
DIGEST = b"d" * 16
WHY = Reason(kind=ReasonKind.DATA_UNREADABLE, text="why")
NOW_S = 50.0
PINNED_TABLES = "0052a745d873ed988043c0a161f937b3"
Reopen: TypeAlias = Callable[[], Journal]
ASSIGNMENTS = (
    StageAssignment(peer_id=PeerId("a"), layers=LayerRange(0, 2)),
    StageAssignment(peer_id=PeerId("b"), layers=LayerRange(2, 4)),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


@pytest.fixture
def journal(path: Path) -> Iterator[Journal]:
    book = Journal(str(path))
    yield book
    book.close()


@pytest.fixture
def run(make_spec: MakeSpec) -> Run:
    return Run(run_id=RUN, spec=make_spec())


@pytest.fixture
def reopen(tmp_path: Path, path: Path) -> Iterator[Reopen]:
    """Open the journal as a kill leaves it: the files as they are, the first owner not closed."""
    opened: list[Journal] = []

    def after_kill() -> Journal:
        copy = tmp_path / f"after-kill-{len(opened)}"
        copy.mkdir()
        for file in path.parent.glob("journal.db*"):
            (shutil.copytree if file.is_dir() else shutil.copy)(file, copy / file.name)
        opened.append(Journal(str(copy / "journal.db")))
        return opened[-1]

    yield after_kill
    for book in opened:
        book.close()


def commit_record(step: int, *, loss: float = 2.5) -> CommitRecord:
    committed = StepCommitted(
        step=StepNumber(step),
        loss=loss,
        learning_rate=0.1,
        grad_norm=1.0 / 3.0,
        num_samples=4,
        seconds=0.7,
        traffic=(Traffic(boundary=BlockIndex(2), forward_bytes=2**63, key_frames=4),),
    )
    commit = CommitStep(
        run_id=RUN,
        attempt=Attempt(1),
        step=StepNumber(step),
        clip_factor=0.3,
        learning_rate=0.1,
    )
    return CommitRecord(RUN, committed, commit, committed.sent)


def test_a_new_journal_knows_no_run(journal: Journal) -> None:
    assert journal.load(NOW_S) == ()


def test_a_new_run_comes_back_queued_with_its_spec(
    journal: Journal, reopen: Reopen, run: Run
) -> None:
    journal.write_run(run, DIGEST)
    (loaded,) = reopen().load(NOW_S)
    assert loaded == replace(run, gather_until_s=NOW_S + GATHER_S)
    assert loaded.spec.digest() == run.spec.digest()


def test_a_run_under_way_waits_for_its_peers(journal: Journal, reopen: Reopen, run: Run) -> None:
    journal.write_run(run, DIGEST)
    attempt = AttemptState(number=Attempt(7), assignments=ASSIGNMENTS)
    working = replace(run, phase=RunPhase.TRAINING, attempt=attempt)
    journal.write([RunRecord(working)])
    (loaded,) = reopen().load(NOW_S)
    assert loaded == replace(
        working,
        phase=RunPhase.WAITING,
        detail=Reason(kind=ReasonKind.COORDINATOR_RESTARTED),
        past=CommittedState(committers=frozenset((PeerId("a"), PeerId("b")))),
        attempt=replace(attempt, away_since_s={PeerId("a"): NOW_S, PeerId("b"): NOW_S}),
        gather_until_s=NOW_S + GATHER_S,
    )


@pytest.mark.parametrize("phase", [phase for phase in RunPhase if phase.is_over])
def test_a_run_that_is_over_stays_over(
    journal: Journal, reopen: Reopen, run: Run, phase: RunPhase
) -> None:
    journal.write_run(run, DIGEST)
    journal.write(
        [RunRecord(replace(run, phase=phase, detail=WHY, past=CommittedState(committed_steps=3)))]
    )
    (loaded,) = reopen().load(NOW_S)
    assert (loaded.phase, loaded.detail, loaded.committed_steps) == (phase, WHY, 3)


def test_runs_come_back_in_the_order_of_their_submission(
    journal: Journal, reopen: Reopen, run: Run
) -> None:
    names = [RunId(f"run-{letter}") for letter in "zbx"]
    for name in names:
        journal.write_run(replace(run, run_id=name), DIGEST)
    assert [loaded.run_id for loaded in reopen().load(NOW_S)] == names


def test_commits_come_back_exactly_and_count_the_steps(
    journal: Journal, reopen: Reopen, run: Run
) -> None:
    journal.write_run(run, DIGEST)
    records = [commit_record(step, loss=1.0 / (step + 3)) for step in range(3)]
    for record in records:
        journal.write([record])
    book = reopen()
    assert book.steps(RUN, 0, 100) == tuple(record.step for record in records)
    assert book.steps(RUN, 1, 1) == (records[1].step,)
    (loaded,) = book.load(NOW_S)
    assert loaded.committed_steps == 3
    assert loaded.past.last_commit == records[-1].commit


def test_a_step_is_committed_once(journal: Journal, run: Run) -> None:
    journal.write_run(run, DIGEST)
    journal.write([commit_record(0)])
    with pytest.raises(JournalError):
        journal.write([commit_record(0, loss=1.0)])
    assert [step.loss for step in journal.steps(RUN, 0, 100)] == [2.5]


def test_records_of_one_decision_are_written_all_or_none(
    journal: Journal, reopen: Reopen, run: Run
) -> None:
    journal.write_run(run, DIGEST)
    journal.write([commit_record(0)])
    working = RunRecord(
        replace(run, phase=RunPhase.TRAINING, attempt=AttemptState(number=Attempt(9)))
    )
    with pytest.raises(JournalError):
        journal.write([working, commit_record(0)])
    (loaded,) = reopen().load(NOW_S)
    assert loaded.attempt.number == 0


def test_a_rollback_deletes_commits_and_plans(
    journal: Journal, reopen: Reopen, path: Path, run: Run
) -> None:
    journal.write_run(run, DIGEST)
    for step in range(3):
        plan = PlanRecord(RUN, StepNumber(step), Attempt(1), (planned(step),))
        journal.write([plan, commit_record(step)])
    back = replace(run, past=CommittedState(committed_steps=1))
    journal.write([RollbackRecord(RUN, StepNumber(1)), RunRecord(back)])
    book = reopen()
    assert [step.step for step in book.steps(RUN, 0, 100)] == [0]
    (loaded,) = book.load(NOW_S)
    assert loaded.committed_steps == 1
    assert loaded.past.last_commit == commit_record(0).commit
    journal.write([commit_record(1)])
    journal.close()
    assert not rows(path, "SELECT * FROM plans")


def test_a_rollback_to_the_start_leaves_no_last_commit(journal: Journal, run: Run) -> None:
    journal.write_run(run, DIGEST)
    journal.write([commit_record(0)])
    journal.write([RollbackRecord(RUN, StepNumber(0)), RunRecord(run)])
    (loaded,) = journal.load(NOW_S)
    assert loaded.past.last_commit is None


def test_a_run_keeps_no_plan_but_its_last(journal: Journal, path: Path, run: Run) -> None:
    journal.write_run(run, DIGEST)
    for step in range(3):
        plan = PlanRecord(RUN, StepNumber(step), Attempt(1), (planned(step, 4),))
        journal.write([plan, commit_record(step)])
    journal.write([PlanRecord(RUN, StepNumber(3), Attempt(2), (planned(3, 1),))])
    journal.close()
    assert rows(path, "SELECT * FROM plans") == [(RUN, 3, 2, "[[3,1]]")]


def planned(*samples: int, index: int = 0) -> Microbatch:
    return Microbatch(MicrobatchIndex(index), tuple(SampleId(sample) for sample in samples))


def test_the_step_under_way_keeps_its_microbatches(
    journal: Journal, reopen: Reopen, run: Run
) -> None:
    journal.write_run(run, DIGEST)
    batches = planned(3, 1), planned(2, index=1)
    journal.write([PlanRecord(RUN, StepNumber(0), Attempt(1), batches)])
    (loaded,) = reopen().load(NOW_S)
    assert loaded.step == PlannedStep(microbatches=batches)
    journal.write([commit_record(0)])
    (loaded,) = reopen().load(NOW_S)
    assert loaded.step is None


def rows(path: Path, query: str) -> list[tuple[Any, ...]]:
    db = sqlite3.connect(path)
    try:
        return db.execute(query).fetchall()
    finally:
        db.close()


# ---- data


def test_the_digest_of_a_runs_data_is_kept(journal: Journal, reopen: Reopen, run: Run) -> None:
    journal.write_run(run, DIGEST)
    assert reopen().data_digest(RUN) == DIGEST


def write_tokens(journal: Journal, run: Run, *, is_kept: bool = True) -> NewTokenFile:
    """Write all tokens of a run; each sample's are its number."""
    new = journal.tokens.begin(run.run_id, run.spec)
    for sample in range(run.spec.train.num_samples):
        new.append(bytes([sample, 0, 0, 0]) * run.spec.train.seq_length)
    if is_kept:
        new.keep()
    return new


def files_of(journal: Journal) -> list[str]:
    return sorted(path.suffix for path in journal.tokens.folder.iterdir())


@pytest.mark.parametrize("phase", RunPhase)
def test_tokens_are_kept_until_nobody_can_need_them(
    journal: Journal, reopen: Reopen, run: Run, phase: RunPhase
) -> None:
    """Check a result that is lost before its client came: it is repeated from the same tokens."""
    write_tokens(journal, run)
    journal.write_run(run, DIGEST)
    journal.write([RunRecord(replace(run, phase=phase))])
    is_needed = phase not in (RunPhase.COLLECTED, RunPhase.CANCELLED, RunPhase.FAILED)
    again = reopen()
    assert files_of(again) == [".tokens"] * is_needed
    if is_needed:
        tokens = again.tokens.read(RUN, run.spec, [SampleId(3)])
        assert tokens == {3: bytes([3, 0, 0, 0]) * run.spec.train.seq_length}


@pytest.mark.parametrize("is_kept", [False, True], ids=["its file grows", "its run is not known"])
def test_a_kill_during_a_submission_leaves_nothing(
    journal: Journal, reopen: Reopen, run: Run, is_kept: bool
) -> None:
    new = write_tokens(journal, run, is_kept=is_kept)
    assert len(files_of(journal)) == 1
    again = reopen()
    assert files_of(again) == []
    assert again.load(NOW_S) == ()
    new.discard()


def test_a_journal_without_its_tokens_is_refused(journal: Journal, path: Path, run: Run) -> None:
    """Check a journal that was moved without them: its runs need not fail for that."""
    write_tokens(journal, run)
    journal.write_run(run, DIGEST)
    journal.close()
    journal.tokens.folder.rename(path.parent / "elsewhere")
    with pytest.raises(JournalError, match="restore that folder beside the journal"):
        Journal(str(path))
    (path.parent / "elsewhere").rename(journal.tokens.folder)
    again = Journal(str(path))
    assert len(again.load(NOW_S)) == 1
    again.close()


# ---- who may read it


def modes_of(path: Path) -> dict[str, int]:
    return {file.name: file.stat().st_mode & 0o777 for file in path.parent.rglob("*")}


@pytest.mark.usefixtures("no_umask")
def test_only_its_owner_reads_a_journal(path: Path, run: Run) -> None:
    journal = Journal(str(path))
    write_tokens(journal, run)
    journal.write_run(run, DIGEST)
    modes = modes_of(path)
    assert modes.pop("journal.db.tokens") == 0o700
    assert {"journal.db", "journal.db-wal"} < modes.keys()
    assert set(modes.values()) == {0o600}
    journal.close()


@pytest.mark.usefixtures("no_umask")
def test_a_journal_that_all_could_read_is_its_owners_from_its_next_start(
    journal: Journal, path: Path, run: Run
) -> None:
    write_tokens(journal, run)
    journal.write_run(run, DIGEST)
    journal.close()
    path.chmod(0o664)
    journal.tokens.folder.chmod(0o755)
    again = Journal(str(path))
    assert again.load(NOW_S)
    assert modes_of(path)["journal.db"] == 0o600
    assert modes_of(path)["journal.db.tokens"] == 0o700
    again.close()


# ---- files that cannot be used


def test_a_second_coordinator_is_told_that_it_is_one(journal: Journal, path: Path) -> None:
    with pytest.raises(JournalError, match="does another coordinator use it"):
        Journal(str(path))


def test_a_closed_journal_can_be_opened_again(journal: Journal, path: Path, run: Run) -> None:
    journal.write_run(run, DIGEST)
    journal.close()
    again = Journal(str(path))
    assert again.load(NOW_S) == (replace(run, gather_until_s=NOW_S + GATHER_S),)
    again.close()


def test_a_file_that_is_no_database_is_refused(path: Path) -> None:
    path.write_bytes(b"this was never a journal" * 100)
    with pytest.raises(JournalError, match=r"journal\.db: the file is of another kind, or damaged"):
        Journal(str(path))


def test_a_directory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="it cannot be opened"):
        Journal(str(tmp_path / "missing" / "journal.db"))


def test_a_directory_is_no_journal(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="it cannot be opened"):
        Journal(str(tmp_path))


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE runs SET spec=x'ffffffff'",
        "UPDATE runs SET spec=x''",
        "UPDATE runs SET phase=99",
        "UPDATE runs SET stages='[[1]]'",
        "UPDATE runs SET stages='not json'",
        'UPDATE runs SET stages=\'[{"peer_id": "a", "layers": [3, 1]}]\'',
    ],
)
def test_a_damaged_run_has_failed_and_stops_no_other(
    journal: Journal, path: Path, run: Run, damage: str
) -> None:
    other = replace(run, run_id=RunId("run-2"))
    for one in (run, other):
        journal.write_run(one, DIGEST)
    journal.close()
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"{damage} WHERE run_id='{RUN}'")
        db.commit()
        rows = db.execute("SELECT * FROM runs").fetchall()
    with closing(Journal(str(path))) as book:
        damaged, whole = book.load(NOW_S)
    assert (damaged.run_id, damaged.phase) == (RUN, RunPhase.FAILED)
    assert damaged.detail is not None
    assert damaged.detail.kind is ReasonKind.RUN_UNREADABLE
    assert damaged.detail.text
    assert whole == replace(other, gather_until_s=NOW_S + GATHER_S)
    with closing(sqlite3.connect(path)) as db:  # a later swarm-ft may read it
        assert db.execute("SELECT * FROM runs").fetchall() == rows


def test_a_run_with_a_codec_of_an_earlier_version_has_failed_and_names_another(
    journal: Journal, path: Path, run: Run
) -> None:
    changed = replace(run, run_id=RunId("run-2"))
    for one in (run, changed):
        journal.write_run(one, DIGEST)
    journal.close()
    earlier = run_pb2.RunSpec.FromString(RUN_SPEC.to_bytes(run.spec))
    earlier.train.backward_codec = "top10+efmix"
    codecs = {"forward": "aq2", "backward": "lowrank8"}
    steering = {"codecs": [{"first_step": 3, "codecs": codecs}]}
    with closing(sqlite3.connect(path)) as db:
        spec = earlier.SerializeToString()
        db.execute("UPDATE runs SET spec=? WHERE run_id=?", (spec, RUN))
        value = json.dumps(steering)
        db.execute("INSERT INTO run_values VALUES ('run-2', 'steering', ?)", (value,))
        db.commit()
    with closing(Journal(str(path))) as book:
        found = book.load(NOW_S)
    assert [one.phase for one in found] == [RunPhase.FAILED] * 2
    for one, reason in zip(
        found,
        (
            "--bw: codec 'top10+efmix': swarm-ft no longer has +efmix; use +ef",
            "--bw: codec 'lowrank8': swarm-ft no longer has lowrank; use q4+z",
        ),
        strict=True,
    ):
        assert one.detail is not None
        assert one.detail.kind is ReasonKind.RUN_UNREADABLE
        assert reason in one.detail.text


def test_a_torn_page_is_a_journal_error(journal: Journal, path: Path, run: Run) -> None:
    journal.write_run(
        replace(run, detail=Reason(kind=ReasonKind.PEER_ERROR, text="long" * 5000)), DIGEST
    )
    journal.close()
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xa5" * (len(data) - 4096)
    path.write_bytes(data)
    with pytest.raises(JournalError):
        Journal(str(path)).load(NOW_S)


def test_nothing_to_write_needs_no_transaction(journal: Journal) -> None:
    """Check that a tick, four times a second, does not wait for the disk."""
    journal.close()
    journal.write([])  # a closed database refuses all transactions


def test_a_closed_journal_writes_nothing(journal: Journal, run: Run) -> None:
    journal.close()
    with pytest.raises(JournalError):
        journal.write_run(run, DIGEST)
    with pytest.raises(JournalError):
        journal.write([RunRecord(run)])


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (0, "expected version 8 to 12, found 0; end its runs with the swarm-ft that wrote it"),
        (7, "expected version 8 to 12, found 7; end its runs with the swarm-ft that wrote it"),
        (13, "expected version 12 or earlier, found 13, which a later swarm-ft wrote; update"),
    ],
)
def test_a_journal_of_another_version_is_refused_in_one_line_and_left_as_it_is(
    tmp_path: Path, version: int, words: str
) -> None:
    path = tmp_path / "other.db"
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE runs (position INTEGER PRIMARY KEY)")
        other.execute(f"PRAGMA user_version={version}")
        other.commit()
    with pytest.raises(JournalError, match=words) as refused:
        Journal(str(path))
    assert "\n" not in str(refused.value)
    with closing(sqlite3.connect(path)) as other:
        assert other.execute("SELECT name FROM sqlite_master").fetchall() == [("runs",)]
        assert other.execute("PRAGMA user_version").fetchone() == (version,)
    assert list(tmp_path.glob("other.db.*")) == []


def test_the_tables_change_only_with_the_version() -> None:
    """Raise `schema.VERSION`, add a step to `migrations`, and see `tests.earlier_files` first."""
    assert (VERSION, digest_of(SCHEMA.encode()).hex()) == (12, PINNED_TABLES)


@pytest.mark.parametrize("key", [None, b"k" * 32], ids=["plain", "encrypted"])
def test_texts_of_a_journal_of_version_8_are_for_the_runs_readers(
    tmp_path: Path, run: Run, key: bytes | None
) -> None:
    path = tmp_path / "old.db"
    standing = Reputation(times_aside=1, aside_until_s=NOW_S + 30.0, reason=WHY)
    with closing(Journal(str(path), key)) as book:
        book.write_run(run, DIGEST)
        book.write([RunRecord(replace(run, phase=RunPhase.FAILED, detail=WHY))])
        book.write([ReputationRecord(PeerId("b"), standing, 30.0)])
        book.write([EventRecord(1, 0.0, EmitEvent(kind=EventKind.RUN_FAILED, run_id=RUN))])
    sealer = None if key is None else Sealer(key, "journal")
    with closing(sqlite3.connect(path)) as old:
        for table, column, place, text in (
            ("runs", "detail", f"detail {RUN}", "peer b: /home/alice"),
            ("standings", "reason", "standing b", "3 failures, the last one: disk full"),
            ("events", "words", "event 1", "peer b left"),
        ):
            value = text.encode() if sealer is None else sealer.seal(text.encode(), place.encode())
            old.execute(f"UPDATE {table} SET {column}=?", (value,))
        old.execute("PRAGMA user_version=8")
        old.commit()
    for _ in range(2):  # it is rewritten once
        with closing(Journal(str(path), key)) as book:
            (loaded,) = book.load(NOW_S)
            assert loaded.detail == recorded("peer b: /home/alice")
            found = book.standings(NOW_S)[PeerId("b")]
            assert found.reason == recorded("3 failures, the last one: disk full")
            (event,) = book.events(0, 9)
            assert event.event.reason == recorded("peer b left")


@pytest.mark.parametrize("kind", list(ReasonKind))
def test_a_reason_of_any_kind_comes_back(
    journal: Journal, reopen: Reopen, run: Run, kind: ReasonKind
) -> None:
    layers = LayerRange(0, 2), LayerRange(2, 4)
    part = Reason(kind=kind, peers=(PeerId("b"),), layers=layers, amount=2.5, text="why: ü")
    written = Reason(
        kind=kind, run_id=RUN, runs=(RUN,), step=0, value=0.0, num_more=3, parts=(part, part)
    )
    journal.write_run(replace(run, phase=RunPhase.FAILED, detail=written), DIGEST)
    (loaded,) = reopen().load(NOW_S)
    assert loaded.detail == written


def evaluated(step: int, **losses: Any) -> EvaluationRecord:
    found = Evaluated(step=StepNumber(step), num_samples=3, **losses)
    return EvaluationRecord(RUN, found, judged_at(step))


def judged_at(step: int) -> Judged:
    """Return a judgement in which the weights before were the best."""
    best = Best(StepNumber(step - 1), 0.1) if step else None
    return Judged(step=StepNumber(step), best=best, num_worse=step)


def test_evaluations_are_kept_until_the_run_goes_back(
    journal: Journal, reopen: Reopen, run: Run
) -> None:
    journal.write_run(run, DIGEST)
    found = [
        evaluated(0, eval_loss=1.5),
        evaluated(2, eval_loss=1.0, compressed_eval_loss=1.25, counts=(3, 0, 7)),
    ]
    journal.write([found[1], found[0], commit_record(0), commit_record(1)])
    (loaded,) = reopen().load(NOW_S)
    assert loaded.past.judged == judged_at(2)
    assert journal.evaluations(RUN, 0, 3) == tuple(record.evaluated for record in found)
    assert journal.evaluations(RUN, 1, 3) == (found[1].evaluated,)
    assert journal.evaluations(RUN, 0, 2) == (found[0].evaluated,)
    journal.write([RollbackRecord(RUN, StepNumber(2))])
    (loaded,) = reopen().load(NOW_S)
    assert loaded.past.judged == judged_at(0)
    journal.write([evaluated(2, eval_loss=9.0)])
    assert [one.eval_loss for one in journal.evaluations(RUN, 0, 3)] == [1.5, 9.0]
    journal.write([ForgetRecord(RUN)])
    assert journal.evaluations(RUN, 0, 3) == ()


def test_a_run_whose_name_is_longer_than_names_are_is_left_out(
    journal: Journal, reopen: Reopen, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """Earlier versions counted the characters of a name; no message may contain this one."""
    journal.write_run(replace(run, run_id=RunId("\N{OCTOPUS}" * 64)), DIGEST)
    journal.write_run(run, DIGEST)
    (loaded,) = reopen().load(NOW_S)
    assert loaded.run_id == RUN
    assert "a run is left out: its name: expected 1 to 64 bytes" in caplog.text
