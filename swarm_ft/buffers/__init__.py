"""Per-sample buffers of a peer, in memory and on disk. Imports no torch and no network."""

from swarm_ft.buffers.records import (
    BufferKey,
    BufferLimits,
    BufferRecord,
    End,
)
from swarm_ft.buffers.store import BufferStore

__all__ = ["BufferKey", "BufferLimits", "BufferRecord", "BufferStore", "End"]
