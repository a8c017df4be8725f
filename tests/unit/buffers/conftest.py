"""Records and stores for the tests of buffers."""

import pytest

from swarm_ft.buffers import BufferKey, BufferLimits, BufferRecord, BufferStore, End
from swarm_ft.ids import BlockIndex, RunId, SampleId
from swarm_ft.protocol.spec.digest import fingerprint_of

RUN = RunId("run")
SPEC = b"s" * 16
SLOT_BYTES = 4096
"""What any record of these tests takes on disk; the first page of a file takes as much."""


def key(sample=0, *, boundary=1, end=End.SENT, run=RUN):
    return BufferKey(RunId(run), BlockIndex(boundary), end, SampleId(sample))


def record(text="a record", size=100):
    payload = text.encode().ljust(size, b".")
    return BufferRecord(fingerprint_of(payload), 10, 5, payload)


class CyclicVisits:
    """Samples 0..period-1 in order, one a step, again and again."""

    def __init__(self, period):
        self.period = period

    def next_visits(self, samples, after_step):
        first = after_step + 1
        return first + (samples - first) % self.period


@pytest.fixture
def open_store(tmp_path):
    """Stores on one directory, one after the other; all are closed in the end."""
    opened = []

    def open_store(memory_bytes=None, disk_slots=None, **options):
        for store in opened:
            store.close()
        disk_bytes = None if disk_slots is None else (1 + disk_slots) * SLOT_BYTES
        limits = BufferLimits(memory_bytes=memory_bytes, disk_bytes=disk_bytes)
        fields = {"directory": tmp_path / "buffers", "run_id": RUN, "identity": SPEC}
        store = BufferStore(limits, **fields | {"threads": False} | options)
        opened.append(store)
        return store

    yield open_store
    for store in opened:
        store.close()
