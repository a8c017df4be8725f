"""One peer's buffers by sample. Knows bytes and steps' outcomes; knows no tensors and no wire.

All of it is in memory; a disk tier is later work.
"""

from __future__ import annotations

import threading
from collections.abc import Container
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from swarm_ft.ids import BlockIndex, RunId, SampleId


class End(IntEnum):
    """What this peer's end of the boundary keeps of a sample."""

    SENT = 1
    """The buffer that it sends changes against."""
    RECEIVED = 2
    """The buffer that it receives changes against."""
    RESIDUAL = 3
    """What it still owes of the gradients that it sent; nobody else has it."""


class BufferKey(NamedTuple):
    """Names a buffer on this peer."""

    run_id: RunId
    boundary: BlockIndex
    end: End
    sample: SampleId


@dataclass(frozen=True, slots=True)
class BufferRecord:
    """A buffer in its stored form.

    Attributes:
        digest: of the buffer; both ends compare it in every delta frame.
        tokens: rows of the tensor.
        channels: columns of the tensor.
        payload: the values, as `codec.pack_buffer` writes them.
    """

    digest: bytes
    tokens: int
    channels: int
    payload: bytes


class BufferStore:
    """Buffers as of the last committed step, and beside them those the open step made.

    Until a step commits it can be redone, and must then start from the same bases: so `get`
    never shows what the open step staged. Safe to use from several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._committed: dict[BufferKey, BufferRecord] = {}
        self._staged: dict[BufferKey, BufferRecord] = {}
        self._payload_bytes = 0

    def get(self, key: BufferKey) -> BufferRecord | None:
        """The committed record, if there is one."""
        with self._lock:
            return self._committed.get(key)

    def stage(self, key: BufferKey, record: BufferRecord) -> None:
        """Keep what the open step made of a buffer; staged again, the last one counts."""
        with self._lock:
            self._staged[key] = record

    def commit(self) -> None:
        """The step counts: all staged records take the place of the committed ones."""
        with self._lock:
            for key, record in self._staged.items():
                self._payload_bytes += len(record.payload) - self._size_of(key)
                self._committed[key] = record
            self._staged.clear()

    def rollback(self, but: Container[SampleId] = ()) -> None:
        """The step is to be redone, but for these samples: all other staged records vanish."""
        with self._lock:
            self._staged = {key: r for key, r in self._staged.items() if key.sample in but}

    def records(self) -> dict[BufferKey, BufferRecord]:
        """All committed records."""
        with self._lock:
            return dict(self._committed)

    def forget(self, run_id: RunId) -> None:
        """Drop all records of a run, committed and staged."""
        with self._lock:
            for key in [key for key in self._committed if key.run_id == run_id]:
                self._payload_bytes -= self._size_of(key)
                del self._committed[key]
            for key in [key for key in self._staged if key.run_id == run_id]:
                del self._staged[key]

    def __len__(self) -> int:
        with self._lock:
            return len(self._committed)

    @property
    def payload_bytes(self) -> int:
        """Bytes of all committed payloads."""
        with self._lock:
            return self._payload_bytes

    def _size_of(self, key: BufferKey) -> int:
        record = self._committed.get(key)
        return len(record.payload) if record else 0
