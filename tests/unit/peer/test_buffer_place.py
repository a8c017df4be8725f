"""Where a peer keeps buffers may fail it; it then goes on without."""

from pathlib import Path

import pytest

from swarm_ft.buffers import BufferKey, BufferLimits, BufferRecord, BufferStore, End
from swarm_ft.ids import BlockIndex, RunId, SampleId
from swarm_ft.peer.kept_buffers import BufferPlace
from swarm_ft.protocol.spec.digest import fingerprint_of
from tests.specs import run_spec

RUN = RunId("run")
KEY = BufferKey(RUN, BlockIndex(2), End.SENT, SampleId(3))
RECORD = BufferRecord(fingerprint_of(b"payload"), 1, 1, b"payload")
LIMITS = BufferLimits(memory_bytes=1000, disk_bytes=1 << 20)


def kept(store: BufferStore) -> BufferRecord | None:
    try:
        return store.get(KEY)
    finally:
        store.close()


def filled(store: BufferStore) -> None:
    store.put(KEY, RECORD)
    store.close()


def test_what_an_earlier_start_left_is_found_again(tmp_path: Path) -> None:
    place = BufferPlace(limits=LIMITS, directory=tmp_path)
    filled(place.open(RUN, run_spec()))
    assert kept(place.open(RUN, run_spec())) == RECORD


@pytest.mark.parametrize(
    ("run", "seed"), [("other", 0), ("run", 1)], ids=["another run", "another spec"]
)
def test_what_another_run_left_is_not_used(tmp_path: Path, run: str, seed: int) -> None:
    place = BufferPlace(limits=LIMITS, directory=tmp_path)
    filled(place.open(RUN, run_spec()))
    other = place.open(RunId(run), run_spec(seed=seed))
    other.close()
    assert len(other) == 0


def test_a_directory_that_cannot_be_used_costs_the_disk_tier_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    place = BufferPlace(limits=LIMITS, directory=tmp_path / "file")
    store = place.open(RUN, run_spec())
    store.put(KEY, RECORD)
    assert kept(store) == RECORD
    assert "buffers are kept in memory only" in caplog.text
