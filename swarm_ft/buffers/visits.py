"""When records are needed next, and which of them last. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

from swarm_ft.buffers.records import BufferKey
from swarm_ft.protocol.training_plan import NEVER

__all__ = ["NEVER", "Calendar", "Numbers", "UnknownVisits", "Visits"]

Numbers = npt.NDArray[np.int64]


class Visits(Protocol):
    """What is known of the order to come; `protocol.training_plan.VisitOrder` is one."""

    def next_visits(self, samples: Numbers, after_step: int) -> Numbers:
        """The first step after `after_step` that visits each sample, `NEVER` if none does."""


class UnknownVisits:
    """For a store that was told no order: every sample may be next."""

    def next_visits(self, samples: Numbers, after_step: int) -> Numbers:
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

    def __len__(self) -> int:
        return len(self._visit_of)

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
