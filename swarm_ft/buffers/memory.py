"""The memory tier: holds records in memory and evicts them at its budget. Pure.

A record is *settled* when it is on disk, or when it will not be written. Before that it waits for
the writer. The tier evicts settled records first, those needed last before others. If that is not
enough, the writer has fallen behind, and waiting records are evicted too: no caller blocks.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from swarm_ft.buffers.records import BufferKey, BufferRecord, Samples

# ---- when records are needed next, and which of them last


class Visits(Protocol):
    """The order in which steps visit samples; `protocol.training_plan.VisitOrder` is one."""

    def next_visits(self, samples: Samples, after_step: int) -> Samples:
        """Return the first step after `after_step` that visits each sample, or `NEVER`."""


class UnknownVisits:
    """An order for stores that know none: the next step may visit every sample."""

    def next_visits(self, samples: Samples, after_step: int) -> Samples:
        """Return the step after `after_step` for every sample."""
        return np.full(len(samples), after_step + 1, np.int64)


class VisitQueue:
    """A priority queue of keys by the step that needs them next; operations take O(log steps)."""

    def __init__(self) -> None:
        self._visit_of: dict[BufferKey, int] = {}
        self._keys_at: dict[int, dict[BufferKey, None]] = {}
        self._first: list[int] = []
        self._last: list[int] = []

    def __contains__(self, key: object) -> bool:
        return key in self._visit_of

    def __iter__(self) -> Iterator[BufferKey]:
        return iter(self._visit_of)

    def add(self, key: BufferKey, visit: int) -> None:
        """Insert a key, or change its step."""
        self.remove(key)
        self._visit_of[key] = visit
        if visit not in self._keys_at:
            self._keys_at[visit] = {}
            heapq.heappush(self._first, visit)
            heapq.heappush(self._last, -visit)
            self._drop_passed()
        self._keys_at[visit][key] = None

    def remove(self, key: BufferKey) -> None:
        """Remove a key, if present."""
        visit = self._visit_of.pop(key, None)
        if visit is not None:
            keys = self._keys_at[visit]
            del keys[key]
            if not keys:
                del self._keys_at[visit]

    def visit_of(self, key: BufferKey) -> int:
        """Return the step that needs a key; the key is present."""
        return self._visit_of[key]

    def last(self) -> tuple[BufferKey, int] | None:
        """Return one of the keys that are needed last, with its step; None if there are no keys."""
        while self._last:
            keys = self._keys_at.get(-self._last[0])
            if keys:
                key, _ = keys.popitem()  # popitem and reinsert peek at a key in constant time
                keys[key] = None
                return key, -self._last[0]
            heapq.heappop(self._last)
        return None

    def take_due(self, step: int) -> list[BufferKey]:
        """Remove and return all keys whose step is `step` or earlier."""
        found: list[BufferKey] = []
        while self._first and self._first[0] <= step:
            keys = self._keys_at.pop(heapq.heappop(self._first), {})
            found += keys
        for key in found:
            del self._visit_of[key]
        return found

    def _drop_passed(self) -> None:
        # An emptied step stays in the heaps until it reaches the top, and some never do.
        if len(self._last) > 2 * len(self._keys_at) + 64:
            self._first = sorted(self._keys_at)
            self._last = [-visit for visit in reversed(self._first)]


@dataclass(frozen=True, slots=True)
class CachedRecord:
    """A record in memory. Of two versions of a key the higher number is the newer one."""

    record: BufferRecord
    version: int

    @property
    def num_bytes(self) -> int:
        """Bytes that count against the budget."""
        return len(self.record.payload)


class MemoryTier:
    """The records of one store in memory; see the module.

    Args:
        budget_bytes: Limit of all payloads; None: no limit.
        visits: Order in which samples are needed.

    Attributes:
        step: Last committed step; visits are counted after it.
        in_flight_bytes: Bytes of waiting records that do not count against the budget.
        waiting_bytes: Bytes of records that wait for the writer.
        num_bytes: Bytes of all records.
    """

    def __init__(self, budget_bytes: int | None, visits: Visits) -> None:
        self._budget_bytes = budget_bytes
        self._visits = visits
        self._cached: dict[BufferKey, CachedRecord] = {}
        self._settled, self._waiting = VisitQueue(), VisitQueue()
        self._queue: dict[BufferKey, None] = {}
        self.step = -1
        self.in_flight_bytes = self.waiting_bytes = self.num_bytes = 0

    def get(self, key: BufferKey) -> CachedRecord | None:
        """Return a record, or None if it is not in memory."""
        return self._cached.get(key)

    def next_visit(self, key: BufferKey) -> int:
        """Return the step that needs a record next."""
        return int(self._visits.next_visits(np.array([key.sample]), self.step)[0])

    def put(self, key: BufferKey, cached: CachedRecord, visit: int, *, waits: bool) -> None:
        """Insert a record in place of an older version; the budget may be exceeded afterwards."""
        self.remove(key)
        self._cached[key] = cached
        self.num_bytes += cached.num_bytes
        if waits:
            self._waiting.add(key, visit)
            self._queue[key] = None
            self.waiting_bytes += cached.num_bytes
        else:
            self._settled.add(key, visit)

    def remove(self, key: BufferKey) -> CachedRecord | None:
        """Remove and return a record, if present."""
        cached = self._cached.pop(key, None)
        if cached is not None:
            self.num_bytes -= cached.num_bytes
            self._settled.remove(key)
            if key in self._waiting:
                self._waiting.remove(key)
                self.waiting_bytes -= cached.num_bytes
            self._queue.pop(key, None)
        return cached

    def mark_flushed(self, key: BufferKey) -> None:
        """Mark a record as written, or as one that will not be written."""
        if key in self._waiting:
            self._settled.add(key, self._waiting.visit_of(key))
            self._waiting.remove(key)
            self._queue.pop(key, None)
            self.waiting_bytes -= self._cached[key].num_bytes

    def mark_unflushed(self, key: BufferKey) -> None:
        """Queue a settled record for the writer again, because its copy on disk is gone."""
        if key in self._settled:
            visit = self._settled.visit_of(key)
            self.put(key, self._cached[key], visit, waits=True)

    def take_next_waiting(self) -> tuple[BufferKey, CachedRecord, int] | None:
        """Dequeue the record that has waited longest, with the step that needs it.

        The record counts as waiting until `settle`.
        """
        if not self._queue:
            return None
        key = next(iter(self._queue))
        del self._queue[key]
        return key, self._cached[key], self._waiting.visit_of(key)

    def wait_again(self, key: BufferKey) -> None:
        """Put a dequeued record back at the head of the queue; it could not be written yet."""
        if key in self._waiting:
            self._queue = {key: None, **self._queue}

    @property
    def has_queue(self) -> bool:
        """Whether a record waits for the writer."""
        return bool(self._queue)

    def advance(self, step: int) -> None:
        """Advance to a committed step and look up the next visit of the records that it used."""
        self.step = step
        for calendar in (self._settled, self._waiting):
            self._enter(calendar, calendar.take_due(step))

    def seek(self, step: int) -> None:
        """Continue after any step, earlier or later, and look up every record's next visit."""
        self.step = step
        for calendar in (self._settled, self._waiting):
            self._enter(calendar, list(calendar))

    def _enter(self, calendar: VisitQueue, keys: list[BufferKey]) -> None:
        samples = np.array([key.sample for key in keys], np.int64)
        visits = self._visits.next_visits(samples, self.step)
        for key, visit in zip(keys, visits.tolist(), strict=True):
            calendar.add(key, visit)

    @property
    def excess_bytes(self) -> int:
        """Bytes above the budget; negative below it."""
        if self._budget_bytes is None:
            return -1
        counted = self.num_bytes - min(self.waiting_bytes, self.in_flight_bytes)
        return counted - self._budget_bytes

    def has_room(self, num_bytes: int, visit: int) -> bool:
        """Whether a record needed at `visit` fits without evicting one that is needed earlier.

        Only settled records that are needed later can make room for it.
        """
        if self._budget_bytes is None or self.excess_bytes + num_bytes <= 0:
            return True
        last = self._settled.last()
        return last is not None and last[1] > visit and num_bytes <= self._budget_bytes

    def evict_one(self) -> tuple[BufferKey, CachedRecord] | None:
        """Evict the record that is needed last, if the budget is exceeded; return it or None."""
        if self.excess_bytes <= 0:
            return None
        last = self._settled.last() or self._waiting.last()
        if last is None:
            return None
        key = last[0]
        cached = self._cached[key]
        self.remove(key)
        return key, cached
