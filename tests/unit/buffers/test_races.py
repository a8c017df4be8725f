"""Late writes and late reads: each is held up by hand, and what came meanwhile stands.

The published code (notes in tests/unit/codec/test_published_defects.py, 4) lets the reader of the
next batch and the writer of the last one share a buffer: the wrong sample is stored.
"""

import threading
from typing import Any

import pytest

from swarm_ft.buffers import BufferRecord, BufferStore, End
from swarm_ft.buffers.disk import DeleteJob
from swarm_ft.buffers.slab import Slab
from swarm_ft.buffers.tiers import ReadJob, Tiers, WriteJob
from swarm_ft.ids import SampleId, StepNumber

from .conftest import BOUNDARY, CyclicVisits, OpenStore, key, record

SAMPLES = 4


@pytest.fixture
def store(open_store: OpenStore) -> BufferStore:
    """Four records on disk, none in memory; room for two."""
    store = open_store(memory_bytes=0, visits=CyclicVisits(SAMPLES))
    for sample in range(SAMPLES):
        store.stage(key(sample), record(f"old {sample}"))
        store.commit(StepNumber(sample))
    store.flush()
    store = open_store(memory_bytes=200, visits=CyclicVisits(SAMPLES))
    store.resume_at(StepNumber(SAMPLES))
    return store


def commit(store: BufferStore, sample: int, step: int) -> None:
    store.stage(key(sample), record(f"new {sample}"))
    store.commit(StepNumber(step))


def read_begun(tiers: Tiers) -> ReadJob:
    job = tiers.start_read()
    assert job is not None
    return job


def write_begun(tiers: Tiers) -> WriteJob | DeleteJob:
    job = tiers.start_write()
    assert job is not None
    return job


def everything(store: BufferStore) -> dict[SampleId, BufferRecord]:
    return {name.sample: value for name, value in store.records()}


def test_a_late_read_does_not_undo_a_newer_version(store: BufferStore) -> None:
    tiers = store.tiers
    store.prefetch([key(0)])
    late = read_begun(tiers)
    result = late.run()
    commit(store, 0, step=4)
    tiers.finish_read(late, result)
    assert store.get(key(0)) == record("new 0")
    store.flush()
    assert store.get(key(0)) == record("new 0")


def test_a_late_read_of_a_slot_that_was_used_again_is_no_damage(store: BufferStore) -> None:
    tiers = store.tiers
    store.prefetch([key(0)])
    late = read_begun(tiers)
    for step in range(4, 12):
        commit(store, step % SAMPLES, step)
        store.flush()
    result = late.run()
    tiers.finish_read(late, result)
    assert everything(store) == {i: record(f"new {i}") for i in range(SAMPLES)}
    assert store.take_stats()[BOUNDARY].repairs == 0
    assert store.take_lost() == []


def test_a_late_write_does_not_undo_a_newer_version(store: BufferStore) -> None:
    tiers = store.tiers
    commit(store, 0, step=4)
    late = write_begun(tiers)
    store.stage(key(0), record("newest"))
    store.commit(StepNumber(8))
    while store.write_next():
        pass
    tiers.finish_write(late, late.run())
    assert store.get(key(0)) == record("newest")
    for step in range(9, 12):
        commit(store, step % SAMPLES, step)
        while store.write_next():
            pass
    assert store.get(key(0)) == record("newest")


def test_a_record_dropped_while_it_was_being_written_does_not_come_back(store: BufferStore) -> None:
    tiers = store.tiers
    commit(store, 0, step=4)
    late = write_begun(tiers)
    store.forget()
    tiers.finish_write(late, late.run())
    assert store.get(key(0)) is None
    assert len(store) == 0


def test_writing_the_last_batch_and_reading_the_next_never_meet(store: BufferStore) -> None:
    """The published race, both jobs half done at once, in either order of their ends."""
    tiers = store.tiers
    for step in range(4, 40):
        last, following = step % SAMPLES, (step + 1) % SAMPLES
        before = store.get(key(following))
        store.stage(key(last), record(f"step {step}"))
        store.commit(StepNumber(step))
        write = write_begun(tiers)
        store.prefetch([key(following)])
        read = tiers.start_read()
        result = read.run() if read else None
        if step % 2:
            tiers.finish_write(write, write.run())
        if read and result is not None:
            tiers.finish_read(read, result)
        if not step % 2:
            tiers.finish_write(write, write.run())
        assert store.get(key(last)) == record(f"step {step}")
        assert store.get(key(following)) == before


def test_threads_with_a_slow_disk_hold_up_no_commit_and_mix_nothing_up(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk stands still until the test lets it go on; nothing but the writer waits for it."""
    disk_goes_on, disk_is_asked = threading.Event(), threading.Event()
    write = Slab.write

    def slow(slab: Slab, *arguments: Any) -> None:
        disk_is_asked.set()
        assert disk_goes_on.wait(60)
        write(slab, *arguments)

    monkeypatch.setattr(Slab, "write", slow)
    store = open_store(memory_bytes=300, threads=True, visits=CyclicVisits(8))
    for step in range(24):
        for sample in (step % 8,):
            store.stage(key(sample), record(f"step {step}"))
        store.commit(StepNumber(step))
        store.prefetch([key((step + 1) % 8)])
        if step == 0:
            assert disk_is_asked.wait(60)
        assert store.get(key(step % 8)) in (record(f"step {step}"), None)
    held = dict(store.records())
    assert len(held) <= 4, "three are in the budget, one is in flight"
    assert store.take_stats()[BOUNDARY].evictions > 0
    disk_goes_on.set()
    store.flush()
    assert dict(store.records()) == held
    assert set(held.values()) <= {record(f"step {step}") for step in range(16, 24)}
    assert open_store().samples(BOUNDARY, End.SENT).tolist() == [name.sample for name in held]
