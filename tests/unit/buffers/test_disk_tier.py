"""Records that outlive memory and processes."""

import logging
from collections.abc import Mapping
from pathlib import Path

import pytest

from swarm_ft.base.sealing import Sealer
from swarm_ft.buffers import BufferKey, BufferRecord, BufferStore, End
from swarm_ft.errors import BadOption, InternalError
from swarm_ft.ids import RunId, StepNumber

from .conftest import BOUNDARY, SLOT_BYTES, CyclicVisits, OpenStore, key, record


def commit(
    store: BufferStore, records: Mapping[BufferKey, BufferRecord], step: int | None = None
) -> None:
    for name, value in records.items():
        store.stage(name, value)
    store.commit(None if step is None else StepNumber(step))


@pytest.mark.parametrize("threads", [False, True])
def test_records_are_there_after_a_restart(open_store: OpenStore, threads: bool) -> None:
    records = {key(i): record(f"sample {i}") for i in range(20)}
    store = open_store(memory_bytes=300, threads=threads)
    commit(store, records)
    store.flush()
    assert dict(store.records()) == records
    store = open_store(threads=threads)
    assert dict(store.records()) == records
    assert store.samples(BOUNDARY, End.SENT).tolist() == list(range(20))
    assert store.take_stats()[BOUNDARY].disk_bytes == 20 * SLOT_BYTES


def test_the_newest_version_is_the_one_that_is_there_after_a_restart(open_store: OpenStore) -> None:
    store = open_store()
    for step in range(5):
        commit(store, {key(): record(f"step {step}")})
        store.flush()
    assert open_store().get(key()) == record("step 4")


def test_what_was_not_written_costs_only_itself(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store()
    commit(store, {key(): record("old"), key(1): record("other")})
    store.flush()
    commit(store, {key(): record("new"), key(2): record("newer")})
    assert store.get(key()) == record("new")


@pytest.mark.parametrize("sealed", [False, True])
def test_records_of_many_sizes_share_a_few_files(
    open_store: OpenStore, tmp_path: Path, sealed: bool
) -> None:
    """Samples of many lengths make such records; each stays the same, however large its slot."""
    how = {"sealer": Sealer(bytes(32), "buffers")} if sealed else {}
    store = open_store(**how)
    records = {key(sample): record(f"r{sample}", 100 + 37 * sample) for sample in range(300)}
    for name, one in records.items():
        store.stage(name, one)
    store.commit()
    assert len(list((tmp_path / "buffers").rglob("*.slab"))) <= 16 + 8 * 7
    again = open_store(memory_bytes=0, **how)
    assert {name: again.get(name) for name in records} == records
    again.stage(key(299), record("newer", 90))
    again.commit()
    assert open_store(memory_bytes=0, **how).get(key(299)) == record("newer", 90)


def test_memory_holds_what_is_needed_first(open_store: OpenStore) -> None:
    store = open_store(memory_bytes=400, directory=None, visits=CyclicVisits(10))
    for step in range(10):
        commit(store, {key(step): record(f"sample {step}")}, step)
    assert store.samples(BOUNDARY, End.SENT).tolist() == [0, 1, 2, 3]
    assert store.take_lost() == [key(4), key(5), key(6), key(7), key(8), key(9)]
    assert store.take_stats()[BOUNDARY].evictions == 6


def test_a_disk_that_is_full_to_its_quota_holds_what_is_needed_first(open_store: OpenStore) -> None:
    store = open_store(memory_bytes=0, disk_slots=5, visits=CyclicVisits(10))
    for step in range(30):
        commit(store, {key(step % 10): record(f"step {step}")}, step)
        store.flush()
        for sample in store.samples(BOUNDARY, End.SENT).tolist():
            last = step - (step - sample) % 10
            assert store.get(key(sample)) == record(f"step {last}")
    # Four of the five slots hold records, one is for new versions of these.
    assert len(store) == 4
    assert store.samples(BOUNDARY, End.SENT).tolist() == [0, 1, 2, 3]


def test_prefetched_records_come_from_memory(open_store: OpenStore) -> None:
    store = open_store(memory_bytes=400, visits=CyclicVisits(10))
    for step in range(10):
        commit(store, {key(step): record(f"sample {step}")}, step)
        store.flush()
    store.prefetch([key(0), key(1), key(2), key(3), key(9)])
    while store.read_next():
        pass
    assert [store.get(key(i)) for i in range(4)] == [record(f"sample {i}") for i in range(4)]
    assert store.take_stats()[BOUNDARY].memory_hits == 4
    assert store.get(key(9)) == record("sample 9")
    assert store.take_stats()[BOUNDARY].disk_hits == 1


def test_a_second_process_is_told_that_the_directory_is_in_use(
    open_store: OpenStore, tmp_path: Path
) -> None:
    open_store()
    from swarm_ft.buffers import BufferStore

    with pytest.raises(BadOption, match="another process uses this directory"):
        BufferStore(directory=tmp_path / "buffers", run_id=key().run_id)


def test_records_of_another_run_are_refused(open_store: OpenStore) -> None:
    with pytest.raises(InternalError, match="a buffer of run other"):
        open_store().stage(key(run="other"), record())


def test_another_runs_files_are_not_used_and_go_first(
    open_store: OpenStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    store = open_store(run_id="first")
    commit(store, {BufferKey(RunId("first"), *key(i)[1:]): record() for i in range(4)})
    store = open_store(disk_slots=6)
    assert len(store) == 0
    assert "buffers of another run; deleted first" in caplog.text
    commit(store, {key(i): record() for i in range(5)})
    store.flush()
    assert len(store) == 5
    assert len(list((tmp_path / "buffers").glob("run-*"))) == 1
    assert len(open_store(run_id="first")) == 0


def test_another_specs_files_are_not_used(open_store: OpenStore) -> None:
    store = open_store()
    commit(store, {key(): record()})
    assert len(open_store(identity=b"t" * 16)) == 0
    assert len(open_store()) == 1


def test_residuals_do_not_outlive_the_process_that_owes_them(open_store: OpenStore) -> None:
    name = key(end=End.RESIDUAL)
    store = open_store(memory_bytes=0)
    commit(store, {name: record()})
    store.flush()
    assert store.get(name) == record()
    assert open_store().get(name) is None


def test_forgetting_deletes_the_files(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store()
    commit(store, {key(): record()})
    store.flush()
    store.forget()
    assert len(store) == 0
    assert not list((tmp_path / "buffers").glob("run-*"))
    commit(store, {key(): record("again")})
    store.flush()
    assert open_store().get(key()) == record("again")


def test_what_is_put_takes_the_place_of_what_is_committed_not_of_what_is_staged(
    open_store: OpenStore,
) -> None:
    store = open_store()
    commit(store, {key(): record("here")})
    store.stage(key(1), record("staged"))
    for sample in range(3):
        store.put(key(sample), record("restored"))
    assert dict(store.records()) == {key(i): record("restored") for i in range(3)}
    store.commit()
    assert store.get(key(1)) == record("staged")


@pytest.mark.parametrize("threads", [False, True])
def test_records_put_faster_than_they_are_written_are_all_written(
    open_store: OpenStore, threads: bool
) -> None:
    store = open_store(memory_bytes=0, threads=threads)
    records = {key(i): record(f"sample {i}") for i in range(200)}
    for name, value in records.items():
        store.put(name, value)
    assert dict(open_store().records()) == records


@pytest.mark.usefixtures("no_umask")
def test_only_their_owner_reads_buffers(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store(memory_bytes=0, directory=tmp_path / "buffers")
    commit(store, {key(): record("private")})
    store.flush()
    paths = [tmp_path / "buffers", *(tmp_path / "buffers").rglob("*")]
    folders = {path.stat().st_mode & 0o777 for path in paths if path.is_dir()}
    files = {path.stat().st_mode & 0o777 for path in paths if path.is_file()}
    assert (folders, files) == ({0o700}, {0o600})


def test_buffers_that_all_could_read_are_their_owners_from_the_next_start(
    open_store: OpenStore, tmp_path: Path
) -> None:
    store = open_store(directory=tmp_path / "buffers")
    commit(store, {key(): record("private")})
    store.flush()
    store.close()
    (slab,) = (tmp_path / "buffers").rglob("*.slab")
    for path in (tmp_path / "buffers", slab.parent):
        path.chmod(0o755)
    slab.chmod(0o644)
    assert open_store(directory=tmp_path / "buffers").get(key()) == record("private")
    assert (tmp_path / "buffers").stat().st_mode & 0o777 == 0o700
    assert slab.stat().st_mode & 0o777 == 0o600
