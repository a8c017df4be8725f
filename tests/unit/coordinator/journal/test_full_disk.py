"""A full disk: current runs go on, and no job is accepted."""

import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from swarm_ft.coordinator.facts.events import ReputationRecord
from swarm_ft.coordinator.facts.reasons import Reason, ReasonKind
from swarm_ft.coordinator.facts.reputation import Reputation
from swarm_ft.coordinator.journal import tokens
from swarm_ft.coordinator.journal.journal import Journal
from swarm_ft.coordinator.journal.registry import Registry
from swarm_ft.coordinator.journal.reserve import Reserve
from swarm_ft.errors import JournalError, JournalFull
from swarm_ft.identity.keys import new_key
from swarm_ft.identity.roles import Caller, Role
from swarm_ft.ids import PeerId, RunId
from tests.unit.coordinator.conftest import MakeSpec

MIB = 1 << 20
NUM_RECORDS = 100


def record(number: int) -> ReputationRecord:
    standing = Reputation(times_aside=1, reason=Reason(kind=ReasonKind.PEER_ERROR, text="x" * 900))
    return ReputationRecord(PeerId(f"peer-{number}"), standing, 3600.0)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    made = mount and subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)],
        check=False,
        capture_output=True,
    )
    if not made or made.returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Fill the disk with another program's file."""
    path = folder / "somebody-elses"
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    return path


def test_commits_go_on_and_jobs_are_refused_until_there_is_room_again(
    small_disk: Path, make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "RESERVE_BYTES", 64 << 10)
    run_id, spec = RunId("run"), make_spec()
    with closing(Journal(str(small_disk / "journal.db"), reserve_bytes=2 * MIB)) as journal:
        journal.write([record(0)])
        others = fill(small_disk)
        for number in range(NUM_RECORDS):
            journal.write([record(number)])
        with pytest.raises(JournalFull, match="reserved for current runs"):
            journal.tokens.begin(run_id, spec)
        others.unlink()
        journal.tokens.begin(run_id, spec).discard()
        assert (small_disk / "journal.db.reserve").stat().st_blocks * 512 >= 2 * MIB
    with closing(Journal(str(small_disk / "journal.db"))) as journal:
        assert len(journal.standings(0.0)) == NUM_RECORDS


def test_without_a_reserve_a_full_disk_is_an_error(small_disk: Path) -> None:
    with closing(Journal(str(small_disk / "journal.db"))) as journal:
        fill(small_disk)
        with pytest.raises(JournalError, match="disk is full"):
            journal.write(record(number) for number in range(10_000))


def test_a_member_comes_back_on_a_full_disk_and_a_newcomer_is_told_of_it(small_disk: Path) -> None:
    """Check enrolment, with which `status` once failed with "no transaction is active"."""
    now = datetime.now(UTC)
    with closing(Registry(small_disk)) as registry:
        until = now + timedelta(days=1)
        invite = registry.invite(bytes(16), ("203.0.113.7:1",), Role.CLIENT, 9, until)
        key, other = new_key().public_key(), new_key().public_key()
        bearer = Caller(role=Role.NEWCOMER, name=invite.name, key=key)
        member = registry.admit(bearer, now)
        fill(small_disk)
        later = now + timedelta(minutes=1)
        assert registry.admit(bearer, later) == registry.admit(member, later) == member
        with pytest.raises(
            JournalError, match=r"members\.db: the disk is full; free some space on it"
        ):
            registry.admit(replace(bearer, key=other), later)


class FullDisk(sqlite3.Connection):
    """A disk without room for standings as long as the reserve is there."""

    reserve = Path()

    def execute(self, sql: str, parameters: object = (), /) -> sqlite3.Cursor:
        if sql.startswith("INSERT OR REPLACE INTO standings") and self.reserve.exists():
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error
        return super().execute(sql, parameters)  # type: ignore[arg-type]


def test_a_write_for_which_there_is_no_room_is_done_again_with_the_reserve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, connect = tmp_path / "journal.db", sqlite3.connect
    monkeypatch.setattr(FullDisk, "reserve", tmp_path / "journal.db.reserve")
    monkeypatch.setattr(sqlite3, "connect", lambda *a, **k: connect(*a, **k, factory=FullDisk))
    with closing(Journal(str(path), reserve_bytes=4096)) as journal:
        journal.write([record(0), record(1)])
        assert len(journal.standings(0.0)) == 2
        assert not FullDisk.reserve.exists()


def test_a_reserve_is_held_once_and_released_once(tmp_path: Path) -> None:
    path = tmp_path / "reserve"
    reserve = Reserve(path, 10_000)
    assert path.stat().st_size == 10_000
    assert path.stat().st_mode & 0o077 == 0
    assert reserve.ensure()
    assert reserve.release()
    assert not reserve.release()
    assert reserve.ensure()
    assert path.stat().st_size == 10_000


def test_no_reserve_is_no_file_and_always_there(tmp_path: Path) -> None:
    reserve = Reserve(tmp_path / "reserve", 0)
    assert reserve.ensure()
    assert not reserve.release()
    assert not list(tmp_path.iterdir())
