"""Faults of a disk: each is noticed, counted, reported once, and costs only itself."""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from swarm_ft.base import systems
from swarm_ft.buffers import BufferStore, slab
from swarm_ft.buffers.slab import PAGE_BYTES, Broken, Slab, SlabError, SlabIdentity
from swarm_ft.ids import StepNumber

from .conftest import BOUNDARY, RUN, SLOT_BYTES, SPEC, CyclicVisits, OpenStore, key, record

WriteAll: TypeAlias = Callable[[int, list[bytes], int], None]

NUM_RECORDS = 10
RECORDS = {key(i): record(f"sample {i}") for i in range(NUM_RECORDS)}


@pytest.fixture
def store(open_store: OpenStore) -> BufferStore:
    """Ten records on disk, none in memory."""
    store = open_store(memory_bytes=0)
    for name, value in RECORDS.items():
        store.stage(name, value)
    store.commit()
    store.flush()
    return store


@pytest.fixture
def path(tmp_path: Path, store: BufferStore) -> Path:
    (path,) = tmp_path.glob("buffers/run-*/*.slab")
    return path


def slot_of(sample: int) -> int:
    return PAGE_BYTES + sample * SLOT_BYTES


def flip(path: Path, offset: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


def assert_lost(store: BufferStore, *samples: int) -> None:
    """These and no others; each is counted and reported."""
    expected = {name: r for name, r in RECORDS.items() if name.sample not in samples}
    assert dict(store.records()) == expected
    assert store.take_stats()[BOUNDARY].repairs == len(samples)
    assert sorted(store.take_lost()) == [key(sample) for sample in samples]


@pytest.mark.parametrize("offset", [0, 8, 16, 60, 72, 87, 88, 150, 187])
@pytest.mark.parametrize("bit", [0, 7])
def test_a_flipped_bit_costs_one_record(
    store: BufferStore, path: Path, caplog: pytest.LogCaptureFixture, offset: int, bit: int
) -> None:
    flip(path, slot_of(3) + offset, bit)
    assert_lost(store, 3)
    assert len(caplog.records) == 1


def test_bits_that_flip_in_many_records_are_told_once(
    store: BufferStore, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for sample in range(5):
        flip(path, slot_of(sample) + 150)
    assert_lost(store, 0, 1, 2, 3, 4)
    assert len(caplog.records) == 1


def test_bits_that_flipped_while_nobody_looked_cost_one_record_each(
    store: BufferStore, path: Path, open_store: OpenStore
) -> None:
    store.close()
    flip(path, slot_of(3) + 20)
    flip(path, slot_of(4) + 150)
    store = open_store(memory_bytes=0)
    assert len(store) == NUM_RECORDS - 1, "the head of one is broken"
    expected = {name: r for name, r in RECORDS.items() if name.sample not in (3, 4)}
    assert dict(store.records()) == expected


def test_a_truncated_file_costs_what_was_cut_off(
    store: BufferStore, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.truncate(path, slot_of(7) + 120)
    assert_lost(store, 7, 8, 9)
    assert len(caplog.records) <= 2, "a cut head and a cut payload are two things"
    store.put(key(7), record("again"))
    assert store.get(key(7)) == record("again")


def test_a_file_truncated_between_processes_costs_what_was_cut_off(
    store: BufferStore, path: Path, open_store: OpenStore
) -> None:
    store.close()
    os.truncate(path, slot_of(7) + 120)
    expected = {name: r for name, r in RECORDS.items() if name.sample < 7}
    assert dict(open_store().records()) == expected


def test_a_deleted_file_costs_its_records_and_is_begun_anew(
    store: BufferStore, path: Path, caplog: pytest.LogCaptureFixture, open_store: OpenStore
) -> None:
    path.unlink()
    store.stage(key(20), record("new"))
    store.commit()
    store.flush()
    assert dict(store.records()) == {key(20): record("new")}
    assert store.take_stats()[BOUNDARY].repairs == NUM_RECORDS
    assert sorted(store.take_lost()) == list(RECORDS)
    assert len(caplog.records) == 1
    assert "10 buffers are lost" in caplog.text
    assert dict(open_store().records()) == {key(20): record("new")}


def test_a_deleted_directory_is_made_again(
    store: BufferStore, path: Path, open_store: OpenStore
) -> None:
    shutil.rmtree(path.parent)
    store.put(key(20), record("new"))
    store.flush()
    assert dict(open_store().records()) == {key(20): record("new")}


def test_what_is_in_memory_is_written_again_after_its_file_was_deleted(
    open_store: OpenStore, tmp_path: Path
) -> None:
    store = open_store()
    for name, value in RECORDS.items():
        store.put(name, value)
    store.flush()
    shutil.rmtree(tmp_path / "buffers")
    store.put(key(20), record("new"))
    assert dict(store.records()) == RECORDS | {key(20): record("new")}
    store.flush()
    assert store.take_lost() == []
    (tmp_path / "buffers" / "lock").touch()
    assert dict(open_store().records()) == RECORDS | {key(20): record("new")}


def test_a_file_that_cannot_be_made_leaves_the_memory_tier(
    store: BufferStore,
    path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.rmtree(path.parent)
    path.parent.write_text("in the way")
    for i in range(20, 30):
        store.put(key(i), record("new"))
        store.flush()
    assert len(store) == 0, "there is no budget in memory"
    counts = store.take_stats()[BOUNDARY]
    assert (counts.repairs, counts.evictions) == (NUM_RECORDS, 10)
    assert len(caplog.records) == 2


def test_a_write_that_was_never_done_is_noticed(store: BufferStore, path: Path) -> None:
    """The disk reports success and keeps the old bytes: an older record of the very same sample."""
    old = path.read_bytes()
    for step in range(2):  # the second one into the slot that was the first
        store.put(key(0), record(f"version {step}"))
        store.flush()
    with path.open("r+b") as file:
        file.write(old)
    assert store.get(key(0)) is None
    assert store.take_stats()[BOUNDARY].repairs == 1


# ---- files that are not ours


def test_another_specs_file_in_place_of_ours_is_not_used(
    store: BufferStore, path: Path, open_store: OpenStore, caplog: pytest.LogCaptureFixture
) -> None:
    other = open_store(identity=b"o" * 16)
    other.put(key(), record("foreign"))
    other.close()
    (foreign,) = {*path.parent.parent.glob("run-*/*.slab")} - {path}
    shutil.copy(foreign, path)
    store = open_store()
    assert len(store) == 0
    assert "its first page is not that of this run" in caplog.text
    store.put(key(), record("ours"))
    assert dict(open_store().records()) == {key(): record("ours")}


def test_another_specs_slots_under_our_first_page_are_not_used(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    slabs = [
        Slab(ours, 100, SlabIdentity(RUN, SPEC)),
        Slab(theirs, 100, SlabIdentity(RUN, b"o" * 16)),
    ]
    for each in slabs:
        each.write(0, key(), 1, record())
    forged = ours.read_bytes()[:PAGE_BYTES] + theirs.read_bytes()[PAGE_BYTES:]
    ours.write_bytes(forged)
    assert list(slabs[0].scan()) == []
    assert isinstance(slabs[0].read(0, key(), 1), Broken)
    for each in slabs:
        each.close()


def test_a_first_page_that_changed_ends_the_file(tmp_path: Path) -> None:
    path = tmp_path / "slab"
    Slab(path, 100, SlabIdentity(RUN, SPEC)).close()
    flip(path, 50)
    with pytest.raises(SlabError, match="first page"):
        Slab(path, 100, SlabIdentity(RUN, SPEC))


def test_a_smaller_quota_cuts_the_file(
    store: BufferStore, path: Path, open_store: OpenStore
) -> None:
    store = open_store(disk_slots=4)
    assert path.stat().st_size == PAGE_BYTES + 4 * SLOT_BYTES
    assert dict(store.records()) == {name: r for name, r in RECORDS.items() if name.sample < 4}


# ---- full disks


def test_a_full_disk_leaves_what_is_there_and_takes_new_versions(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(memory_bytes=0, visits=CyclicVisits(20))
    write_all = systems.write_all

    def full(file: int, parts: list[bytes], offset: int) -> None:
        if offset >= slot_of(6):
            raise OSError(errno.ENOSPC, "No space left on device")
        write_all(file, parts, offset)

    monkeypatch.setattr(slab, "write_all", full)
    for step in range(60):
        store.stage(key(step % 20), record(f"step {step}"))
        store.commit(StepNumber(step))
        store.flush()
        for name, value in store.records():
            last = step - (step - name.sample) % 20
            assert value == record(f"step {last}")
    assert len(store) >= 5
    assert len(caplog.records) == 1
    assert "No space left on device" in caplog.text
    counts = store.take_stats()[BOUNDARY]
    assert counts.evictions > 0
    assert counts.repairs == 0


def test_a_disk_that_has_room_again_is_used_again(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(memory_bytes=0)
    monkeypatch.setattr(slab, "write_all", no_space := _NoSpace(systems.write_all))
    for i in range(1000):
        no_space.is_full = i < 300
        store.put(key(i), record())
        store.flush()
    assert len(store) > 300


class _NoSpace:
    def __init__(self, write_all: WriteAll) -> None:
        self.write_all, self.is_full = write_all, True

    def __call__(self, file: int, parts: list[bytes], offset: int) -> None:
        if self.is_full and offset > 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.write_all(file, parts, offset)


CHILD = """
import resource, sys
from pathlib import Path
from swarm_ft.buffers import BufferLimits, BufferStore
from tests.unit.buffers.conftest import BOUNDARY, RUN, SPEC, key, record
resource.setrlimit(resource.RLIMIT_FSIZE, (5 * 4096 + 100, 5 * 4096 + 100))
store = BufferStore(
    BufferLimits(memory_bytes=0), directory=Path(sys.argv[1]), run_id=RUN, identity=SPEC
)
for i in range(20):
    store.put(key(i), record(f"sample {i}"))
    store.flush()
found = dict(store.records())
assert found and all(found[name] == record(f"sample {name.sample}") for name in found)
store.close()
print(len(found), store.take_stats()[BOUNDARY].evictions)
"""


def test_a_limit_of_the_system_on_a_file_is_a_full_disk(
    tmp_path: Path, open_store: OpenStore
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path / "buffers")],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=os.getcwd(),
        check=True,
    )
    num_stored, evicted = map(int, done.stdout.split())
    assert num_stored + evicted == 20
    assert done.stderr.count("File too large") == 1
    found = dict(open_store().records())
    assert len(found) == num_stored
    assert all(found[name] == record(f"sample {name.sample}") for name in found)
