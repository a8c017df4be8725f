"""What a buffer store decides: which record is where, what is written, read and dropped next.

No thread and no lock: `BufferStore` calls it under its own, and does the reads and writes that it
asks for outside, so that a result may arrive when it is no longer wanted. Every version of a
record has a number, and a result counts only for the version that it was begun for. So neither can
a late write pass for a newer record, nor a late read, nor one whose slot was used again meanwhile.

If a key is not in memory, what is on disk is its newest version: whoever lets go of a newer one
drops the older one too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import dataclass, field

import numpy as np

from swarm_ft.buffers.disk import DiskTier, OtherRun, Place
from swarm_ft.buffers.memory import CachedRecord, MemoryTier, Visits
from swarm_ft.buffers.records import BufferKey, BufferRecord, Index
from swarm_ft.buffers.slab import Broken, SlabError
from swarm_ft.ids import BlockIndex, SampleId
from swarm_ft.protocol.messages.reports import BufferCounts
from swarm_ft.protocol.spec.training_plan import NEVER


@dataclass(frozen=True, slots=True)
class WriteJob:
    """Put a record into a slot."""

    key: BufferKey
    record: BufferRecord
    place: Place

    def run(self) -> OSError | SlabError | None:
        """Do it; what went wrong."""
        try:
            self.place.slab.write(self.place.slot, self.key, self.place.version, self.record)
        except (OSError, SlabError) as error:
            return error
        return None


@dataclass(frozen=True, slots=True)
class ReadJob:
    """Read a slot."""

    key: BufferKey
    place: Place

    def run(self) -> BufferRecord | Broken:
        """Do it."""
        return self.place.slab.read(self.place.slot, self.key, self.place.version)


@dataclass(slots=True)
class _Counts:
    """Of one boundary, see `BufferCounts`."""

    memory_bytes: int = 0
    events: Counter[str] = field(default_factory=Counter)


class Tiers:
    """See the module's docstring.

    Args:
        disk: None if there is no disk tier.
    """

    def __init__(
        self, memory: MemoryTier, disk: DiskTier | None, index: Index, visits: Visits
    ) -> None:
        self._memory, self._disk, self._index, self._visits = memory, disk, index, visits
        self._next_version = disk.next_version if disk else 1
        self._staged: dict[BufferKey, BufferRecord] = {}
        self._lent: dict[BufferKey, BufferRecord] = {}
        self._wanted: dict[BufferKey, None] = {}
        self._lost: dict[BufferKey, None] = {}
        self._counts: dict[BlockIndex, _Counts] = {}

    # ---- what is asked for

    def find(self, key: BufferKey) -> BufferRecord | ReadJob | None:
        """The newest committed record, or how to read it; None if there is none."""
        cached = self._memory.get(key)
        if cached is not None:
            return cached.record
        if key in self._lent:
            return self._lent[key]
        place = self._disk.find(key) if self._disk else None
        return ReadJob(key, place) if place else None

    def lend(self, key: BufferKey, record: BufferRecord) -> None:
        """The open step builds on it, and may have to again: it stays until the step commits.

        Such records are in flight: no more than a step's, beside the budget.
        """
        self._lent[key] = record

    def is_current(self, job: ReadJob) -> bool:
        """Whether the job's slot still holds the newest version of its key."""
        return self._memory.get(job.key) is None and self._place(job.key) == job.place

    def found_broken(self, job: ReadJob, broken: Broken) -> None:
        """The newest version of a record cannot be read: it is lost."""
        if self._disk:
            self._disk.tell_broken(job.place, broken.reason)
            self._disk.drop(job.key)
        self._lose(job.key, "repairs")

    def count(self, key: BufferKey, event: str) -> None:
        """One more `memory_hits`, `disk_hits` and so on of a boundary."""
        self._of(key.boundary).events[event] += 1

    # ---- what becomes of records

    @property
    def step(self) -> int:
        """The last one that was committed; -1 before the first."""
        return self._memory.step

    def stage(self, key: BufferKey, record: BufferRecord) -> None:
        """Keep what the open step made of a record."""
        self._staged[key] = record

    def rollback(self, but: Container[SampleId]) -> None:
        """The open step begins anew, but for these samples."""
        self._staged = {key: r for key, r in self._staged.items() if key.sample in but}

    def commit(self, step: int) -> None:
        """What is staged takes the place of what was committed before."""
        self._memory.step = step
        samples = np.array([key.sample for key in self._staged], np.int64)
        visits = self._visits.next_visits(samples, step).tolist()
        for (key, record), visit in zip(self._staged.items(), visits, strict=True):
            if visit == NEVER:
                self._let_go(key)
            else:
                self._hold(key, record, visit)
        self._lent.clear()
        in_flight = sum(len(record.payload) for record in self._staged.values())
        self._memory.in_flight_bytes = in_flight
        self._staged.clear()
        self._memory.move_on(step)
        self._make_room()

    def lose_staged(self) -> None:
        """What was staged is lost, and what was committed before of the same keys out of date."""
        for key in self._staged:
            self._let_go(key)
            self._lose(key, "repairs")
        self._staged.clear()

    def drop(self, keys: Iterable[BufferKey]) -> None:
        """Nobody needs these any more."""
        for key in keys:
            if self._index.holds(key):
                self._let_go(key)

    def move_to(self, step: int) -> None:
        """The run goes on after this step, wherever it was before."""
        self._memory.move_to(step)

    def put(self, key: BufferKey, record: BufferRecord) -> None:
        """Hold a committed record that came from elsewhere."""
        self._memory.in_flight_bytes = max(self._memory.in_flight_bytes, len(record.payload))
        self._hold(key, record, self._memory.next_visit(key))
        self._make_room()

    def should_write_first(self, num_bytes: int) -> bool:
        """Whether to hold so much more would make records go that only wait for the writer."""
        if not self._disk or not self._memory.waiting_bytes:
            return False
        in_flight = max(self._memory.in_flight_bytes, num_bytes)
        return self._memory.waiting_bytes + num_bytes > in_flight

    # ---- writing behind

    @property
    def has_writes(self) -> bool:
        """Whether a record waits for the writer."""
        return self._memory.has_queue

    def start_write(self) -> WriteJob | OtherRun | None:
        """What to write next, or to delete; None if nothing is to be written."""
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
            self._memory.settle(key)
            self._make_room()
        return None

    def finish_write(self, job: WriteJob | OtherRun, error: OSError | SlabError | None) -> None:
        """A write is over; it counts if the record is still the newest version of its key."""
        if self._disk is None:
            return
        if isinstance(job, OtherRun):
            self._disk.removed(job)
            return
        cached = self._memory.get(job.key)
        if error is not None:
            for key in self._disk.failed(job.place, error):
                self._gone(key)
            if isinstance(error, SlabError):
                self._memory.wait_again(job.key)
                return
        elif cached is None or cached.version != job.place.version:
            self._disk.abandon(job.place)
            return
        else:
            self._disk.finish_write(job.place, job.key)
        if cached is not None and cached.version == job.place.version:
            self._memory.settle(job.key)
        self._make_room()

    # ---- reading ahead

    def want(self, keys: Iterable[BufferKey]) -> None:
        """These will be asked for, in this order."""
        self._wanted.update(dict.fromkeys(keys))

    @property
    def has_reads(self) -> bool:
        """Whether there is something to look at for `start_read`."""
        return bool(self._wanted)

    def start_read(self) -> ReadJob | None:
        """What to read next; None if nothing that is wanted is on disk or has room in memory."""
        while self._wanted:
            key = next(iter(self._wanted))
            del self._wanted[key]
            found = self.find(key)
            if isinstance(found, ReadJob):
                num_bytes = found.place.slab.payload_bytes
                if self._memory.has_room(num_bytes, self._memory.next_visit(key)):
                    return found
        return None

    def finish_read(self, job: ReadJob, result: BufferRecord | Broken) -> None:
        """A read is over; its result counts if the slot is still that of the newest version."""
        if not self.is_current(job):
            return
        if isinstance(result, Broken):
            self.found_broken(job, result)
            return
        cached = CachedRecord(result, job.place.version)
        self._enter(job.key, cached, self._memory.next_visit(job.key), waits=False)
        self._make_room()

    # ---- the whole

    def forget(self) -> None:
        """Drop all records."""
        for key in list(self._index.keys()):
            self._let_go(key)
        self._staged.clear()
        self._lent.clear()
        self._wanted.clear()
        self._lost.clear()
        if self._disk:
            self._disk.forget()

    def take_lost(self) -> list[BufferKey]:
        """Keys of records that went since the last call and are not back."""
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
        """By boundary; events are counted anew from now on."""
        stats = {boundary: self._stats_of(boundary) for boundary in sorted(self._boundaries())}
        for counts in self._counts.values():
            counts.events.clear()
        return stats

    # ---- inside

    def _of(self, boundary: BlockIndex) -> _Counts:
        return self._counts.setdefault(boundary, _Counts())

    def _place(self, key: BufferKey) -> Place | None:
        return self._disk.find(key) if self._disk else None

    def _hold(self, key: BufferKey, record: BufferRecord, visit: int) -> None:
        self._lent.pop(key, None)
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
            self._left_memory(key, cached)

    def _left_memory(self, key: BufferKey, cached: CachedRecord) -> None:
        self._of(key.boundary).memory_bytes -= cached.num_bytes
        self._index.set_in_memory(key, False)

    def _let_go(self, key: BufferKey) -> None:
        """Nobody needs it any more."""
        self._lent.pop(key, None)
        self._remove_from_memory(key)
        if self._disk:
            self._disk.drop(key)

    def _make_room(self) -> None:
        while (evicted := self._memory.evict_one()) is not None:
            key, cached = evicted
            self._left_memory(key, cached)
            place = self._place(key)
            if place is None or place.version != cached.version:
                if self._disk:
                    self._disk.drop(key)
                self._lose(key, "evictions")

    def _lose_evicted(self) -> None:
        """What the disk tier let go of is lost, unless it is in memory."""
        if self._disk:
            for key in self._disk.evicted:
                if self._memory.get(key) is None:
                    self._lose(key, "evictions")
            self._disk.evicted.clear()

    def _gone(self, key: BufferKey) -> None:
        """A record's file is gone; what is in memory is written again."""
        if self._memory.get(key) is None:
            self._lose(key, "repairs")
        else:
            self._memory.unsettle(key)

    def _lose(self, key: BufferKey, why: str) -> None:
        self._lost[key] = None
        self.count(key, why)
