"""Sealed buffers: the disk holds nothing of them, and they outlive the process all the same."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from swarm_ft.base.sealing import Sealer
from swarm_ft.buffers import BufferKey, BufferLimits, BufferRecord, BufferStore, End
from swarm_ft.buffers.disk import find_runs, folders_older_than
from swarm_ft.ids import BlockIndex, RunId, SampleId

RUN = RunId("run-1")
KEY, OTHER_KEY = b"k" * 32, b"o" * 32
PAYLOAD = b"somebody's activations " * 400


def key_of(sample: int) -> BufferKey:
    return BufferKey(RUN, BlockIndex(2), End.SENT, SampleId(sample))


def record_of(sample: int) -> BufferRecord:
    return BufferRecord(bytes([sample]) * 16, 4, 8, PAYLOAD + bytes([sample]))


def opened(path: Path, key: bytes | None, run_id: RunId = RUN) -> BufferStore:
    sealer = Sealer(key, "buffers of me") if key else None
    limits = BufferLimits(memory_bytes=0)
    return BufferStore(limits, directory=path, run_id=run_id, sealer=sealer)


def filled(path: Path, key: bytes | None) -> None:
    store = opened(path, key)
    for sample in range(3):
        store.put(key_of(sample), record_of(sample))
    store.close()


def files(path: Path) -> Iterator[bytes]:
    return (found.read_bytes() for found in path.rglob("*.slab"))


def test_they_come_back_with_the_key(tmp_path: Path) -> None:
    filled(tmp_path, KEY)
    store = opened(tmp_path, KEY)
    assert [store.get(key_of(sample)) for sample in range(3)] == [record_of(s) for s in range(3)]
    store.close()


@pytest.mark.parametrize("key", [KEY, None], ids=["sealed", "plain"])
def test_nothing_of_them_is_on_the_disk(tmp_path: Path, key: bytes | None) -> None:
    filled(tmp_path, key)
    (data,) = files(tmp_path)
    assert (b"activations" in data) == (key is None)
    assert (record_of(2).digest in data) == (key is None)


@pytest.mark.parametrize(("before", "after"), [(KEY, OTHER_KEY), (KEY, None), (None, KEY)])
def test_what_another_key_sealed_costs_key_frames_alone(
    tmp_path: Path, before: bytes | None, after: bytes | None
) -> None:
    filled(tmp_path, before)
    store = opened(tmp_path, after)
    assert [store.get(key_of(sample)) for sample in range(3)] == [None] * 3
    store.put(key_of(0), record_of(0))
    store.flush()
    assert store.get(key_of(0)) == record_of(0)
    store.close()


def test_a_directory_tells_whose_buffers_are_in_it_and_how_old_they_are(tmp_path: Path) -> None:
    filled(tmp_path, KEY)
    other = opened(tmp_path, None, RunId("run-2"))
    other.put(key_of(0)._replace(run_id=RunId("run-2")), record_of(0))
    other.close()
    assert set(find_runs(tmp_path).values()) == {"run-1", "run-2"}
    written_unix_s = max(slab.stat().st_mtime for slab in tmp_path.rglob("*.slab"))
    assert folders_older_than(tmp_path, written_unix_s - 60) == []
    assert set(folders_older_than(tmp_path, written_unix_s + 60)) == set(find_runs(tmp_path))


def test_a_file_that_cannot_be_told_is_nobodys(tmp_path: Path) -> None:
    filled(tmp_path, None)
    (slab,) = tmp_path.rglob("*.slab")
    slab.write_bytes(b"x" * 5000)
    assert find_runs(tmp_path) == {}
