"""Records and stores for the tests of buffers."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from swarm_ft.buffers import BufferKey, BufferLimits, BufferRecord, BufferStore, End
from swarm_ft.buffers.records import Samples
from swarm_ft.digest import fingerprint_of
from swarm_ft.ids import BlockIndex, RunId, SampleId

OpenStore: TypeAlias = Callable[..., BufferStore]

RUN, BOUNDARY = RunId("run"), BlockIndex(1)
SPEC = b"s" * 16
SLOT_BYTES = 4096
"""What any record of these tests takes on disk; the first page of a file takes as much."""


def key(
    sample: int = 0, *, boundary: int = BOUNDARY, end: End = End.SENT, run: str = RUN
) -> BufferKey:
    return BufferKey(RunId(run), BlockIndex(boundary), end, SampleId(sample))


def record(text: str = "a record", size: int = 100) -> BufferRecord:
    payload = text.encode().ljust(size, b".")
    return BufferRecord(fingerprint_of(payload), 10, 5, payload)


class CyclicVisits:
    """Samples 0..period-1 in order, one a step, again and again."""

    def __init__(self, period: int) -> None:
        self.period = period

    def next_visits(self, samples: Samples, after_step: int) -> Samples:
        first = after_step + 1
        return first + (samples - first) % self.period


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[OpenStore]:
    """Stores on one directory, one after the other; all are closed in the end."""
    opened: list[BufferStore] = []

    def open_store(
        memory_bytes: int | None = None, disk_slots: int | None = None, **options: Any
    ) -> BufferStore:
        for store in opened:
            store.close()
        disk_bytes = None if disk_slots is None else (1 + disk_slots) * SLOT_BYTES
        limits = BufferLimits(memory_bytes=memory_bytes, disk_bytes=disk_bytes)
        fields: dict[str, Any] = {
            "directory": tmp_path / "buffers",
            "run_id": RUN,
            "identity": SPEC,
        }
        store = BufferStore(limits, **fields | {"threads": False} | options)
        opened.append(store)
        return store

    yield open_store
    for store in opened:
        store.close()
