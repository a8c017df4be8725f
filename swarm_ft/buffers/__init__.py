"""The per-sample buffers that this peer keeps. Knows no torch and no network."""

from swarm_ft.buffers.store import BufferKey, BufferRecord, BufferStore, End

__all__ = ["BufferKey", "BufferRecord", "BufferStore", "End"]
