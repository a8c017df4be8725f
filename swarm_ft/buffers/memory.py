"""The memory tier: which records are in memory, and which go when there are too many. Pure.

A record is *settled* when nothing is left to do about it: it is on disk, or there is no disk for
it. Before that it waits for the writer. Settled records go first, those needed last before others;
if that is not enough, the writer has fallen behind, and waiting records go too: nobody waits.
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
    """What is known of the order to come; `protocol.training_plan.VisitOrder` is one."""

    def next_visits(self, samples: Samples, after_step: int) -> Samples:
        """The first step after `after_step` that visits each sample, `NEVER` if none does."""


class UnknownVisits:
    """For a store that was told no order: every sample may be next."""

    def next_visits(self, samples: Samples, after_step: int) -> Samples:
        """All at once."""
        return np.full(len(samples), after_step + 1, np.int64)


class Calendar:
    """Keys by the step that needs them next. All operations take O(log steps)."""

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
        """Enter a key, or move it."""
        self.remove(key)
        self._visit_of[key] = visit
        if visit not in self._keys_at:
            self._keys_at[visit] = {}
            heapq.heappush(self._first, visit)
            heapq.heappush(self._last, -visit)
            self._drop_passed()
        self._keys_at[visit][key] = None

    def remove(self, key: BufferKey) -> None:
        """Strike a key out, if it is in."""
        visit = self._visit_of.pop(key, None)
        if visit is not None:
            keys = self._keys_at[visit]
            del keys[key]
            if not keys:
                del self._keys_at[visit]

    def visit_of(self, key: BufferKey) -> int:
        """When a key that is in is needed."""
        return self._visit_of[key]

    def last(self) -> tuple[BufferKey, int] | None:
        """A key that is needed last, and when."""
        while self._last:
            keys = self._keys_at.get(-self._last[0])
            if keys:
                key, _ = keys.popitem()  # the way to look at it that takes no time in the end
                keys[key] = None
                return key, -self._last[0]
            heapq.heappop(self._last)
        return None

    def take_due(self, step: int) -> list[BufferKey]:
        """Strike out all keys that were needed by a step up to this one."""
        found: list[BufferKey] = []
        while self._first and self._first[0] <= step:
            keys = self._keys_at.pop(heapq.heappop(self._first), {})
            found += keys
        for key in found:
            del self._visit_of[key]
        return found

    def _drop_passed(self) -> None:
        # Emptied steps stay in the heaps until they come to the top, which some never do.
        if len(self._last) > 2 * len(self._keys_at) + 64:
            self._first = sorted(self._keys_at)
            self._last = [-visit for visit in reversed(self._first)]


@dataclass(frozen=True, slots=True)
class CachedRecord:
    """A record in memory; of a key's versions the one of the highest number is the newest."""

    record: BufferRecord
    version: int

    @property
    def num_bytes(self) -> int:
        """What counts against the budget."""
        return len(self.record.payload)


class MemoryTier:
    """See the module's docstring.

    Args:
        budget_bytes: of payloads; None is no bound.

    Attributes:
        step: the last one that was committed; visits are those after it.
        in_flight_bytes: waiting records up to so many do not count against the budget.
        waiting_bytes: of records that wait for the writer.
        num_bytes: of all records.
    """

    def __init__(self, budget_bytes: int | None, visits: Visits) -> None:
        self._budget_bytes = budget_bytes
        self._visits = visits
        self._cached: dict[BufferKey, CachedRecord] = {}
        self._settled, self._waiting = Calendar(), Calendar()
        self._queue: dict[BufferKey, None] = {}
        self.step = -1
        self.in_flight_bytes = self.waiting_bytes = self.num_bytes = 0

    def get(self, key: BufferKey) -> CachedRecord | None:
        """The record, if it is in memory."""
        return self._cached.get(key)

    def next_visit(self, key: BufferKey) -> int:
        """The step that needs it next."""
        return int(self._visits.next_visits(np.array([key.sample]), self.step)[0])

    def put(self, key: BufferKey, cached: CachedRecord, visit: int, *, waits: bool) -> None:
        """Hold a record, in place of an older version; there may be too many then."""
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
        """Let go of a record, if it is here."""
        cached = self._cached.pop(key, None)
        if cached is not None:
            self.num_bytes -= cached.num_bytes
            self._settled.remove(key)
            if key in self._waiting:
                self._waiting.remove(key)
                self.waiting_bytes -= cached.num_bytes
            self._queue.pop(key, None)
        return cached

    def settle(self, key: BufferKey) -> None:
        """The writer is done with it."""
        if key in self._waiting:
            self._settled.add(key, self._waiting.visit_of(key))
            self._waiting.remove(key)
            self._queue.pop(key, None)
            self.waiting_bytes -= self._cached[key].num_bytes

    def unsettle(self, key: BufferKey) -> None:
        """Its copy on disk is gone: it waits for the writer again."""
        if key in self._settled:
            visit = self._settled.visit_of(key)
            self.put(key, self._cached[key], visit, waits=True)

    def take_next_waiting(self) -> tuple[BufferKey, CachedRecord, int] | None:
        """The record that has waited longest, and when it is needed; it waits until settled."""
        if not self._queue:
            return None
        key = next(iter(self._queue))
        del self._queue[key]
        return key, self._cached[key], self._waiting.visit_of(key)

    def wait_again(self, key: BufferKey) -> None:
        """What `take_next_waiting` gave could not be written yet: it is the first again."""
        if key in self._waiting:
            self._queue = {key: None, **self._queue}

    @property
    def has_queue(self) -> bool:
        """Whether `take_next_waiting` has something."""
        return bool(self._queue)

    def move_on(self, step: int) -> None:
        """A step was committed: what it needed is needed again at some later one."""
        self.step = step
        for calendar in (self._settled, self._waiting):
            self._enter(calendar, calendar.take_due(step))

    def move_to(self, step: int) -> None:
        """The run goes on behind this step, wherever it was: every visit is looked up anew."""
        self.step = step
        for calendar in (self._settled, self._waiting):
            self._enter(calendar, list(calendar))

    def _enter(self, calendar: Calendar, keys: list[BufferKey]) -> None:
        samples = np.array([key.sample for key in keys], np.int64)
        visits = self._visits.next_visits(samples, self.step)
        for key, visit in zip(keys, visits.tolist(), strict=True):
            calendar.add(key, visit)

    @property
    def excess_bytes(self) -> int:
        """By how much the budget is exceeded; negative if it is not."""
        if self._budget_bytes is None:
            return -1
        counted = self.num_bytes - min(self.waiting_bytes, self.in_flight_bytes)
        return counted - self._budget_bytes

    def has_room(self, num_bytes: int, visit: int) -> bool:
        """Whether a record needed at `visit` could come in without one going that is needed first.

        What would have to go for it is bounded by what is settled and needed later.
        """
        if self._budget_bytes is None or self.excess_bytes + num_bytes <= 0:
            return True
        last = self._settled.last()
        return last is not None and last[1] > visit and num_bytes <= self._budget_bytes

    def evict_one(self) -> tuple[BufferKey, CachedRecord] | None:
        """Let go of what is needed last, if there is too much."""
        if self.excess_bytes <= 0:
            return None
        last = self._settled.last() or self._waiting.last()
        if last is None:
            return None
        key = last[0]
        cached = self._cached[key]
        self.remove(key)
        return key, cached
