"""Journals of earlier commits: migrated once, with a copy beside, and every run is listed."""

import sqlite3
import stat
from contextlib import closing
from pathlib import Path

import pytest

from swarm_ft.coordinator.facts.reasons import ReasonKind
from swarm_ft.coordinator.journal import migrations
from swarm_ft.coordinator.journal.journal import VERSION, Journal
from swarm_ft.errors import JournalError
from swarm_ft.ids import SampleId
from swarm_ft.protocol.messages.client import RunPhase
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
