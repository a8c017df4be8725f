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
