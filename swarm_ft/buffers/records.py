"""What a buffer store holds and tells: keys, records, limits, counts. Values only."""

from __future__ import annotations

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


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferLimits:
    """How much a store may take; None is no bound.

    Attributes:
        memory_bytes: payloads of committed records in memory. What the open step staged, and what
            the last one committed and is still on its way to disk, is in flight and not counted.
        disk_bytes: all files below the store's directory, other runs' among them.
    """

    memory_bytes: int | None = None
    disk_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundaryStats:
    """One boundary's buffers at this peer: the first three as of now, the others counted.

    They are counted since the start, or since they were taken.

    Attributes:
        samples: of which there is a record, at whatever end.
        memory_bytes: payloads in memory.
        disk_bytes: slots on disk.
        memory_hits: records asked for that were in memory.
        disk_hits: records asked for that had to be read.
        misses: records asked for that were not here, first visits among them.
        evictions: records that went for want of room.
        repairs: records that were found broken or gone, and so will be made anew.
    """

    samples: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0
    memory_hits: int = 0
    disk_hits: int = 0
    misses: int = 0
    evictions: int = 0
    repairs: int = 0
