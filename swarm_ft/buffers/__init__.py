"""The per-sample buffers that this peer keeps. Knows no torch and no network."""

from swarm_ft.buffers.records import (
    BufferKey,
    BufferLimits,
    BufferRecord,
    End,
)
from swarm_ft.buffers.store import BufferStore

__all__ = ["BufferKey", "BufferLimits", "BufferRecord", "BufferStore", "End"]
