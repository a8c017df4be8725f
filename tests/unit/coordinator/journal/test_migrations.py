"""Journals of earlier commits: migrated once, with a copy beside, and every run is listed."""

import sqlite3
import stat
from contextlib import closing
from pathlib import Path

import pytest

from swarm_ft.coordinator.facts.reasons import Reason, ReasonKind
from swarm_ft.coordinator.facts.state import RateChange, Repartition, Steering, SteeringRequest
from swarm_ft.coordinator.journal import migrations
from swarm_ft.coordinator.journal.journal import Journal
from swarm_ft.coordinator.journal.schema import VERSION
from swarm_ft.errors import JournalError
from swarm_ft.ids import PeerId, SampleId, StepNumber
from swarm_ft.protocol.messages.client import CodecChange, RunPhase
from swarm_ft.protocol.messages.control import SavedStage, StageAssignment
from swarm_ft.protocol.messages.events import Actor, EventKind
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.priority import Claim
from swarm_ft.protocol.spec.quality import QualityControl
from swarm_ft.protocol.spec.run_spec import Codecs
from swarm_ft.protocol.wire import RUN_SPEC
from swarm_ft.protocol.wire.earlier import salvaged_spec, upgraded_specs
from tests.earlier_files import ALL, CANCELLED, DONE_STEPS, NUM_STEPS, RUN, SEALED, Earlier

EARLIER = pytest.mark.parametrize("earlier", [*ALL, SEALED], ids=lambda one: one.name)

EARLIER_TABLES = pytest.mark.parametrize(
    "earlier", [one for one in (*ALL, SEALED) if one.journal < VERSION], ids=lambda one: one.name
)
EARLIER_SPECS = pytest.mark.parametrize(
    "earlier", [one for one in ALL if one.journal < 10], ids=lambda one: one.name
)
"""Journals whose RunSpecs have earlier versions."""


def journal_of(earlier: Earlier, folder: Path) -> Path:
    earlier.unpack(folder)
    return folder / "files" / "journal.db"


def version_in(path: Path) -> int:
    with closing(sqlite3.connect(path)) as file:
        return int(file.execute("PRAGMA user_version").fetchone()[0])


@EARLIER
def test_a_run_keeps_its_digest_and_its_tokens(tmp_path: Path, earlier: Earlier) -> None:
    path = journal_of(earlier, tmp_path)
    for _ in range(2):  # it is migrated once
        with closing(Journal(str(path), earlier.key)) as journal:
            cancelled, run = journal.load(0.0)
            assert (run.run_id, run.phase) == (RUN, RunPhase.WAITING)
            assert (run.committed_steps, run.spec.train.num_steps) == (DONE_STEPS, NUM_STEPS)
            assert run.spec.digest().hex() == earlier.digest
            assert run.spec.train.drain_microbatches == 1
            assert (cancelled.run_id, cancelled.phase) == (CANCELLED, RunPhase.CANCELLED)
            samples = [SampleId(number) for number in range(8)]
            assert len(journal.tokens.read(RUN, run.spec, samples)) == len(samples)
            assert len(journal.steps(RUN, 0, 9)) == DONE_STEPS
            assert journal.events(0, 99)


@EARLIER_TABLES
def test_a_copy_of_the_earlier_file_stays_beside_it(tmp_path: Path, earlier: Earlier) -> None:
    path = journal_of(earlier, tmp_path)
    with closing(sqlite3.connect(path)) as file:
        rows = file.execute("SELECT * FROM runs").fetchall()
    Journal(str(path), earlier.key).close()
    copy = path.with_name(f"journal.db.v{earlier.journal}")
    with closing(sqlite3.connect(copy)) as file:
        assert file.execute("SELECT * FROM runs").fetchall() == rows
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    assert (version_in(copy), version_in(path)) == (earlier.journal, VERSION)
    assert not list(path.parent.glob("journal.db.copy*"))


def test_an_encrypted_journal_stays_so_and_another_key_migrates_nothing(tmp_path: Path) -> None:
    path = journal_of(SEALED, tmp_path)
    before = path.read_bytes()
    for key in (None, bytes(32)):
        with pytest.raises(JournalError):
            Journal(str(path), key)
        assert version_in(path) == SEALED.journal
        assert path.read_bytes() == before
    with closing(Journal(str(path), SEALED.key)) as journal:
        plain = [RUN_SPEC.to_bytes(run.spec) for run in journal.load(0.0)]
    with closing(sqlite3.connect(path)) as file:
        found = file.execute("SELECT spec, detail FROM runs").fetchall()
    assert len(found) == len(plain)
    for spec, detail in found:
        assert spec not in plain
        assert b"GPT2" not in spec
        assert b"kind" not in detail


def test_a_migration_that_ends_half_way_changes_nothing_and_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = journal_of(ALL[0], tmp_path)

    def fails(_journal: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    with monkeypatch.context() as patch:
        patch.setattr(migrations, "_STEPS", (*migrations._STEPS[:1], fails))  # noqa: SLF001
        with pytest.raises(JournalError):
            Journal(str(path))
    assert version_in(path) == ALL[0].journal
    with closing(Journal(str(path))) as journal:
        assert [run.phase for run in journal.load(0.0)] == [RunPhase.CANCELLED, RunPhase.WAITING]
        assert all(event.event.reason is not None for event in journal.events(2, 3))


STEERING_11 = (
    '{"is_paused": true, "rates": [[3, 0.25]], "codecs": [[2, "aq4", "q8"]], '
    '"quality": {"allowed": 0.01, "step_size": 0.5, "num_measured": 2, "excess": 0.125, '
    '"adapts": false}, "measured_steps": 2, "requests": [[1, 34, 2, "{\\"kind\\":'
    '\\"paused-by-owner\\",\\"layers\\":[[0,1]],\\"step\\":2,\\"num_more\\":0,'
    '\\"actor\\":3}"]]}'
)
MOVING_11 = (
    '{"step": 2, "hosts": [["a", 0, 1], ["b", 1, 2]], "before_s": 2.0, "after_s": 1.5, '
    '"has_begun": false}'
)
SAVED_11 = '[[0, 1, "000102030405060708090a0b0c0d0e0f", 7, "a", "c"]]'
"""Values as version 11 wrote them."""
VERSION_11 = next(one for one in ALL if one.journal == 11)


def test_values_of_version_11_come_back(tmp_path: Path) -> None:
    path = journal_of(VERSION_11, tmp_path)
    with closing(sqlite3.connect(path)) as file:
        for table, *values in (
            ("priorities", 5),
            ("claims", "friends", 3),
            ("steerings", STEERING_11),
            ("movings", MOVING_11),
        ):
            marks = ", ".join("?" * (1 + len(values)))
            file.execute(f"INSERT INTO {table} VALUES ({marks})", (RUN, *values))
        file.execute("UPDATE snapshots SET stages=? WHERE step=2", (SAVED_11,))
        file.commit()
    with closing(Journal(str(path))) as journal:
        run = next(run for run in journal.load(0.0) if run.run_id == RUN)
    pause = Reason(
        kind=ReasonKind.PAUSE_REQUESTED, layers=(LayerRange(0, 1),), step=2, actor=Actor.OPERATOR
    )
    assert (run.priority, run.claim) == (5, Claim("friends", 3))
    assert run.steering == Steering(
        is_paused=True,
        rates=(RateChange(StepNumber(3), 0.25),),
        codecs=(CodecChange(StepNumber(2), Codecs("aq4", "q8")),),
        quality=QualityControl(0.01, 0.5, 2, 0.125),
        measured_steps=2,
        requests=(SteeringRequest(1, EventKind.RUN_PAUSED, 2, pause),),
    )
    assert run.moving == Repartition(
        step=StepNumber(2),
        assignments=(
            StageAssignment(peer_id=PeerId("a"), layers=LayerRange(0, 1)),
            StageAssignment(peer_id=PeerId("b"), layers=LayerRange(1, 2)),
        ),
        before_s=2.0,
        after_s=1.5,
    )
    assert [str(stage.layers) for stage in run.stages] == ["0-1", "1-2"]
    older, newest = run.past.snapshots
    assert [len(older.stages), newest.step] == [2, 2]
    assert newest.stages == (
        SavedStage(
            layers=LayerRange(0, 1),
            digest=bytes(range(16)),
            total_bytes=7,
            keepers=(PeerId("a"), PeerId("c")),
        ),
    )


@pytest.mark.parametrize("table", ["steerings", "movings"])
def test_a_run_with_a_damaged_value_has_failed_and_stops_no_other(
    tmp_path: Path, table: str
) -> None:
    path = journal_of(VERSION_11, tmp_path)
    with closing(sqlite3.connect(path)) as file:
        file.execute(f"INSERT INTO {table} VALUES (?, ?)", (RUN, '{"rates": 1}'))
        file.commit()
    with closing(Journal(str(path))) as journal:
        assert [run.phase for run in journal.load(0.0)] == [RunPhase.CANCELLED, RunPhase.FAILED]


@EARLIER_SPECS
def test_a_run_whose_spec_nothing_proves_has_failed_and_stops_no_other(
    tmp_path: Path, earlier: Earlier
) -> None:
    path = journal_of(earlier, tmp_path)
    (tokens,) = (path.parent / "journal.db.tokens").iterdir()
    tokens.write_bytes(bytes(tokens.stat().st_size))
    with closing(Journal(str(path))) as journal:
        cancelled, run = journal.load(0.0)
    assert cancelled.phase is RunPhase.CANCELLED
    assert (run.phase, run.committed_steps) == (RunPhase.FAILED, DONE_STEPS)
    assert (run.spec.model.reference, run.spec.train.num_steps) == ("model", NUM_STEPS)
    assert run.detail is not None
    assert run.detail.kind is ReasonKind.RUN_UNREADABLE
    assert run.detail.text.endswith("do not prove it; submit the job again")


def test_a_cancelled_run_that_cannot_be_read_stops_no_other(tmp_path: Path) -> None:
    path = journal_of(ALL[0], tmp_path)
    with closing(sqlite3.connect(path)) as file:
        file.execute("UPDATE runs SET spec=x'0801' WHERE run_id=?", (CANCELLED,))
        file.commit()
    with closing(Journal(str(path))) as journal:
        assert [run.phase for run in journal.load(0.0)] == [RunPhase.FAILED, RunPhase.WAITING]


@EARLIER_SPECS
def test_the_digests_of_an_earlier_spec_differ(tmp_path: Path, earlier: Earlier) -> None:
    path = journal_of(earlier, tmp_path)
    with closing(sqlite3.connect(path)) as file:
        ((data,),) = file.execute("SELECT spec FROM runs WHERE run_id=?", (RUN,)).fetchall()
    digests = [spec.digest().hex() for spec in upgraded_specs(data)]
    assert earlier.digest in digests
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize("data", [b"", b"\xff\xff", b"\x12\x03\x0a\x01\x07"])
def test_anything_has_a_spec_that_stands_for_it(data: bytes) -> None:
    spec = salvaged_spec(data, 7)
    assert (spec.model.reference, spec.train.num_steps) == ("", 7)
