"""The decisions of a buffer store: what is written, read and evicted next.

This module has no threads and no locks. `BufferStore` calls it under its own lock, and performs the
reads and writes outside, so that a result may arrive when it is out of date. Every version of a
record has a number, and a result counts only for the version for which it was started. Neither a
late write nor a late read can therefore pass for a newer record, even if its slot was reused.

Invariant: if a key is not in memory, its record on disk is the newest version. Code that removes a
newer version from memory also drops the older one on disk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import dataclass, field

import numpy as np

from swarm_ft.buffers.disk import DeleteJob, DiskTier, Place
from swarm_ft.buffers.memory import CachedRecord, MemoryTier, Visits
from swarm_ft.buffers.records import BufferKey, BufferRecord, Index
from swarm_ft.buffers.slab import Broken, SlabError
from swarm_ft.ids import BlockIndex, SampleId
from swarm_ft.protocol.messages.reports import BufferCounts
from swarm_ft.protocol.spec.training_plan import NEVER


@dataclass(frozen=True, slots=True)
class WriteJob:
    """A write of a record to a slot."""

    key: BufferKey
    record: BufferRecord
    place: Place

    def run(self) -> OSError | SlabError | None:
        """Write the record; return the error, or None."""
        try:
            self.place.slab.write(self.place.slot, self.key, self.place.version, self.record)
        except (OSError, SlabError) as error:
            return error
        return None


@dataclass(frozen=True, slots=True)
class ReadJob:
    """A read of a slot."""

    key: BufferKey
    place: Place

    def run(self) -> BufferRecord | Broken:
        """Read and verify the record."""
        return self.place.slab.read(self.place.slot, self.key, self.place.version)


@dataclass(slots=True)
class _Counts:
    memory_bytes: int = 0
    events: Counter[str] = field(default_factory=Counter)


class Tiers:
    """Decisions over both tiers; see the module.

    Args:
        memory: Memory tier.
        disk: Disk tier; None if there is none.
        index: Index of all records, shared with the disk tier.
        visits: Order in which samples are needed.
    """

    def __init__(
        self, memory: MemoryTier, disk: DiskTier | None, index: Index, visits: Visits
    ) -> None:
        self._memory, self._disk, self._index, self._visits = memory, disk, index, visits
        self._next_version = disk.next_version if disk else 1
        self._staged: dict[BufferKey, BufferRecord] = {}
        self._pinned: dict[BufferKey, BufferRecord] = {}
        self._to_prefetch: dict[BufferKey, None] = {}
        self._lost: dict[BufferKey, None] = {}
        self._counts: dict[BlockIndex, _Counts] = {}

    # ---- lookups

    def find(self, key: BufferKey) -> BufferRecord | ReadJob | None:
        """Return the newest committed record, or a job that reads it; None if there is none."""
        cached = self._memory.get(key)
        if cached is not None:
            return cached.record
        if key in self._pinned:
            return self._pinned[key]
        place = self._disk.find(key) if self._disk else None
        return ReadJob(key, place) if place else None

    def pin(self, key: BufferKey, record: BufferRecord) -> None:
        """Pin a record that the open step uses until the step commits, since it may be redone.

        Pinned records are in flight: at most one step's, and they do not count against the budget.
        """
        self._pinned[key] = record

    def is_current(self, job: ReadJob) -> bool:
        """Whether the job's slot still holds the newest version of its key."""
        return self._memory.get(job.key) is None and self._place(job.key) == job.place

    def on_damaged(self, job: ReadJob, broken: Broken) -> None:
        """Drop a record whose newest version cannot be read."""
        if self._disk:
            self._disk.warn_damaged(job.place, broken.reason)
            self._disk.drop(job.key)
        self._lose(job.key, "repairs")

    def count(self, key: BufferKey, event: str) -> None:
        """Count one event of a boundary, such as `memory_hits` or `disk_hits`."""
        self._of(key.boundary).events[event] += 1

    # ---- changes

    @property
    def step(self) -> int:
        """Last committed step; -1 before the first."""
        return self._memory.step

    def stage(self, key: BufferKey, record: BufferRecord) -> None:
        """Store a record of the open step."""
        self._staged[key] = record

    def rollback(self, but: Container[SampleId]) -> None:
        """Discard staged records, except those of the samples in `but`."""
        self._staged = {key: r for key, r in self._staged.items() if key.sample in but}

    def commit(self, step: int) -> None:
        """Replace committed records by the staged ones."""
        self._memory.step = step
        samples = np.array([key.sample for key in self._staged], np.int64)
        visits = self._visits.next_visits(samples, step).tolist()
        for (key, record), visit in zip(self._staged.items(), visits, strict=True):
            if visit == NEVER:
                self._drop(key)
            else:
                self._insert(key, record, visit)
        self._pinned.clear()
        in_flight = sum(len(record.payload) for record in self._staged.values())
        self._memory.in_flight_bytes = in_flight
        self._staged.clear()
        self._memory.advance(step)
        self._make_room()

    def lose_staged(self) -> None:
        """Drop staged records and the committed ones of the same keys, which are out of date."""
        for key in self._staged:
            self._drop(key)
            self._lose(key, "repairs")
        self._staged.clear()

    def drop(self, keys: Iterable[BufferKey]) -> None:
        """Drop records that no step needs any more."""
        for key in keys:
            if self._index.holds(key):
                self._drop(key)

    def seek(self, step: int) -> None:
        """Continue after `step`, wherever the run was before."""
        self._memory.seek(step)

    def put(self, key: BufferKey, record: BufferRecord) -> None:
        """Insert a committed record that came from another peer."""
        self._memory.in_flight_bytes = max(self._memory.in_flight_bytes, len(record.payload))
        self._insert(key, record, self._memory.next_visit(key))
        self._make_room()

    def should_write_first(self, num_bytes: int) -> bool:
        """Whether a record of this size would evict records that still wait for the writer."""
        if not self._disk or not self._memory.waiting_bytes:
            return False
        in_flight = max(self._memory.in_flight_bytes, num_bytes)
        return self._memory.waiting_bytes + num_bytes > in_flight

    # ---- writing behind

    @property
    def has_writes(self) -> bool:
        """Whether a record waits for the writer."""
        return self._memory.has_queue

    def start_write(self) -> WriteJob | DeleteJob | None:
        """Return the next write or deletion, or None if nothing waits."""
        while self._disk and (waiting := self._memory.take_next_waiting()):
            key, cached, visit = waiting
            place = self._disk.begin_write(
                key,
                cached.version,
                len(cached.record.payload),
                visit,
                self._memory.step,
            )
            self._lose_evicted()
            if isinstance(place, Place):
                return WriteJob(key, cached.record, place)
            if place is not None:
                self._memory.wait_again(key)
                return place
            self._memory.mark_flushed(key)
            self._make_room()
        return None

    def finish_write(self, job: WriteJob | DeleteJob, error: OSError | SlabError | None) -> None:
        """Apply the result of a write, if its record is still the newest version of its key."""
        if self._disk is None:
            return
        if isinstance(job, DeleteJob):
            self._disk.on_folder_removed(job)
            return
        cached = self._memory.get(job.key)
        if error is not None:
            for key in self._disk.on_write_failed(job.place, error):
                self._on_file_lost(key)
            if isinstance(error, SlabError):
                self._memory.wait_again(job.key)
                return
        elif cached is None or cached.version != job.place.version:
            self._disk.discard_write(job.place)
            return
        else:
            self._disk.finish_write(job.place, job.key)
        if cached is not None and cached.version == job.place.version:
            self._memory.mark_flushed(job.key)
        self._make_room()

    # ---- reading ahead

    def prefetch(self, keys: Iterable[BufferKey]) -> None:
        """Queue keys that will be requested soon, in this order."""
        self._to_prefetch.update(dict.fromkeys(keys))

    @property
    def has_reads(self) -> bool:
        """Whether prefetched keys wait to be examined by `start_read`."""
        return bool(self._to_prefetch)

    def start_read(self) -> ReadJob | None:
        """Return the next read; None if no queued key is on disk and fits into memory."""
        while self._to_prefetch:
            key = next(iter(self._to_prefetch))
            del self._to_prefetch[key]
            found = self.find(key)
            if isinstance(found, ReadJob):
                num_bytes = found.place.slab.payload_bytes
                if self._memory.has_room(num_bytes, self._memory.next_visit(key)):
                    return found
        return None

    def finish_read(self, job: ReadJob, result: BufferRecord | Broken) -> None:
        """Apply the result of a read, if its slot still holds the newest version."""
        if not self.is_current(job):
            return
        if isinstance(result, Broken):
            self.on_damaged(job, result)
            return
        cached = CachedRecord(result, job.place.version)
        self._enter(job.key, cached, self._memory.next_visit(job.key), waits=False)
        self._make_room()

    # ---- the whole

    def forget(self) -> None:
        """Drop all records and delete this run's files."""
        for key in list(self._index.keys()):
            self._drop(key)
        self._staged.clear()
        self._pinned.clear()
        self._to_prefetch.clear()
        self._lost.clear()
        if self._disk:
            self._disk.forget()

    def take_lost(self) -> list[BufferKey]:
        """Return the keys of records that were lost since the last call and did not come back."""
        lost = [key for key in self._lost if not self._index.holds(key)]
        self._lost.clear()
        return lost

    def _boundaries(self) -> set[BlockIndex]:
        return {name.boundary for name in self._index.shelves()} | self._counts.keys()

    def _stats_of(self, boundary: BlockIndex) -> BufferCounts:
        names = [name for name in self._index.shelves() if name.boundary == boundary]
        counts = self._of(boundary)
        return BufferCounts(
            boundary=boundary,
            samples=self._index.num_samples(names),
            memory_bytes=counts.memory_bytes,
            disk_bytes=self._disk.bytes_of(boundary) if self._disk else 0,
            **counts.events,
        )

    def take_stats(self) -> dict[BlockIndex, BufferCounts]:
        """Return counts by boundary, and reset the counts of events."""
        stats = {boundary: self._stats_of(boundary) for boundary in sorted(self._boundaries())}
        for counts in self._counts.values():
            counts.events.clear()
        return stats

    # ---- inside

    def _of(self, boundary: BlockIndex) -> _Counts:
        return self._counts.setdefault(boundary, _Counts())

    def _place(self, key: BufferKey) -> Place | None:
        return self._disk.find(key) if self._disk else None

    def _insert(self, key: BufferKey, record: BufferRecord, visit: int) -> None:
        self._pinned.pop(key, None)
        cached = CachedRecord(record, self._next_version)
        self._next_version += 1
        self._enter(key, cached, visit, waits=self._disk is not None)

    def _enter(self, key: BufferKey, cached: CachedRecord, visit: int, *, waits: bool) -> None:
        self._remove_from_memory(key)
        self._memory.put(key, cached, visit, waits=waits)
        self._of(key.boundary).memory_bytes += cached.num_bytes
        self._index.set_in_memory(key, True)

    def _remove_from_memory(self, key: BufferKey) -> None:
        cached = self._memory.remove(key)
        if cached is not None:
            self._on_removed(key, cached)

    def _on_removed(self, key: BufferKey, cached: CachedRecord) -> None:
        self._of(key.boundary).memory_bytes -= cached.num_bytes
        self._index.set_in_memory(key, False)

    def _drop(self, key: BufferKey) -> None:
        self._pinned.pop(key, None)
        self._remove_from_memory(key)
        if self._disk:
            self._disk.drop(key)

    def _make_room(self) -> None:
        while (evicted := self._memory.evict_one()) is not None:
            key, cached = evicted
            self._on_removed(key, cached)
            place = self._place(key)
            if place is None or place.version != cached.version:
                if self._disk:
                    self._disk.drop(key)
                self._lose(key, "evictions")

    def _lose_evicted(self) -> None:
        """Report evicted records as lost, unless they are in memory."""
        if self._disk:
            for key in self._disk.evicted:
                if self._memory.get(key) is None:
                    self._lose(key, "evictions")
            self._disk.evicted.clear()

    def _on_file_lost(self, key: BufferKey) -> None:
        """Write a record again whose file is gone, or report it lost if it is not in memory."""
        if self._memory.get(key) is None:
            self._lose(key, "repairs")
        else:
            self._memory.mark_unflushed(key)

    def _lose(self, key: BufferKey, why: str) -> None:
        self._lost[key] = None
        self.count(key, why)
