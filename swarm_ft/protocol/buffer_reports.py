"""What a peer tells of its buffers: which it has, which it lost, what they take. Values only."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm_ft.ids import BlockIndex
from swarm_ft.protocol.sample_set import SampleSet


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldBuffers:
    """Samples of one boundary whose buffers a peer has, or had and lost."""

    boundary: BlockIndex
    samples: SampleSet = field(default_factory=SampleSet)


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferCounts:
    """A peer's buffers at one boundary: the first three as of now, the others since it told last.

    Attributes:
        samples: that have a buffer here.
        memory_bytes: of buffers in memory.
        disk_bytes: of buffers on disk; what is in memory may be there too.
        memory_hits: buffers that were asked for and were in memory, fetched ahead or not.
        disk_hits: that had to be waited for.
        misses: that are not here.
        evictions: of which no place was left.
        repairs: that were found damaged, and given up.
    """

    boundary: BlockIndex
    samples: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0
    memory_hits: int = 0
    disk_hits: int = 0
    misses: int = 0
    evictions: int = 0
    repairs: int = 0

    def __add__(self, other: BufferCounts) -> BufferCounts:
        names = [name for name in BufferCounts.__dataclass_fields__ if name != "boundary"]
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        return BufferCounts(boundary=self.boundary, **sums)
