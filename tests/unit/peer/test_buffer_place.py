"""A peer goes on without its place for buffers if that fails."""

from pathlib import Path

import pytest

from swarm_ft.base.sealing import Sealer
from swarm_ft.buffers import BufferKey, BufferLimits, BufferRecord, BufferStore, End
from swarm_ft.digest import fingerprint_of
from swarm_ft.ids import BlockIndex, RunId, SampleId
from swarm_ft.peer.buffer_storage import BufferStorage
from tests.specs import run_spec

RUN = RunId("run")
KEY = BufferKey(RUN, BlockIndex(2), End.SENT, SampleId(3))
RECORD = BufferRecord(fingerprint_of(b"payload"), 1, 1, b"payload")
LIMITS = BufferLimits(memory_bytes=1000, disk_bytes=1 << 20)


def stored(store: BufferStore) -> BufferRecord | None:
    try:
        return store.get(KEY)
    finally:
        store.close()


def filled(store: BufferStore) -> None:
    store.put(KEY, RECORD)
    store.close()


def test_what_an_earlier_start_left_is_found_again(tmp_path: Path) -> None:
    place = BufferStorage(limits=LIMITS, directory=tmp_path)
    filled(place.open(RUN, run_spec()))
    assert stored(place.open(RUN, run_spec())) == RECORD


@pytest.mark.parametrize(
    ("run", "seed"), [("other", 0), ("run", 1)], ids=["another run", "another spec"]
)
def test_what_another_run_left_is_not_used(tmp_path: Path, run: str, seed: int) -> None:
    place = BufferStorage(limits=LIMITS, directory=tmp_path)
    filled(place.open(RUN, run_spec()))
    other = place.open(RunId(run), run_spec(seed=seed))
    other.close()
    assert len(other) == 0


@pytest.mark.parametrize("sealer", [None, Sealer(bytes(32), "buffers")], ids=["plain", "sealed"])
def test_a_run_is_deleted_by_its_name_and_others_stay(
    tmp_path: Path, sealer: Sealer | None
) -> None:
    place, other = BufferStorage(limits=LIMITS, directory=tmp_path), RunId("other")
    filled(place.open(RUN, run_spec(), sealer))
    filled(place.open(RUN, run_spec(seed=1), sealer))
    second = place.open(other, run_spec(), sealer)
    second.put(KEY._replace(run_id=other), RECORD)
    second.close()
    assert place.runs() == {RUN, other}
    place.delete(RUN)
    assert place.runs() == {other}
    place.delete(RUN)


@pytest.mark.parametrize(("age_s", "is_kept"), [(90.0, True), (110.0, False)])
def test_what_was_not_written_to_for_too_long_is_deleted(
    tmp_path: Path, age_s: float, is_kept: bool
) -> None:
    place = BufferStorage(limits=LIMITS, directory=tmp_path, keep_s=100.0)
    filled(place.open(RUN, run_spec()))
    newest_unix_s = max(path.stat().st_mtime for path in tmp_path.rglob("*"))
    place.delete_old(newest_unix_s + age_s)
    assert place.runs() == ({RUN} if is_kept else set())


@pytest.mark.parametrize("directory", [None, Path("/nonexistent")])
def test_where_nothing_is_kept_nothing_is_deleted(directory: Path | None) -> None:
    place = BufferStorage(directory=directory)
    place.delete_old(0.0)
    place.delete(RUN)
    assert place.runs() == set()


def test_a_directory_that_cannot_be_used_costs_the_disk_tier_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    place = BufferStorage(limits=LIMITS, directory=tmp_path / "file")
    store = place.open(RUN, run_spec())
    store.put(KEY, RECORD)
    assert stored(store) == RECORD
    assert "buffers are kept in memory only" in caplog.text
