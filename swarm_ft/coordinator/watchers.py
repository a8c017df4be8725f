"""Who watches which run, and what each has yet to be told. Nothing of it outlives the process.

A watcher may want to know what peers do when: as long as one does, plans ask the run's peers for
it. Their timelines pass through here, unread and unkept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from swarm_ft.ids import RunId
from swarm_ft.protocol.status import RunEvent
from swarm_ft.protocol.timeline import PeerTimeline

MAX_QUEUED = 100_000
"""Of one watcher that does not read; what comes then, it misses."""
MAX_QUEUED_TIMELINES = 1_000
"""They are larger by far, and go first."""


class Watcher:
    """One who watches a run.

    Args:
        is_tracing: whether it wants timelines.
    """

    def __init__(self, *, is_tracing: bool) -> None:
        self.is_tracing = is_tracing
        self._queue: asyncio.Queue[RunEvent | PeerTimeline] = asyncio.Queue(MAX_QUEUED)
        self._num_missed = 0

    async def next(self) -> RunEvent | PeerTimeline:
        """What it has yet to be told, in order."""
        return await self._queue.get()

    def tell(self, event: RunEvent) -> None:
        """Something happened in the run."""
        if not self._queue.full():
            self._queue.put_nowait(event)

    def trace(self, told: PeerTimeline) -> None:
        """A peer told what it did; what a slow reader misses is counted in the next it gets."""
        timeline = told.timeline
        if self._queue.qsize() >= MAX_QUEUED_TIMELINES:
            self._num_missed += len(timeline.spans) + timeline.num_dropped
            return
        dropped = min(timeline.num_dropped + self._num_missed, (1 << 32) - 1)
        self._num_missed = 0
        self._queue.put_nowait(replace(told, timeline=replace(timeline, num_dropped=dropped)))


class Watchers:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._watchers: dict[RunId, list[Watcher]] = {}

    @contextmanager
    def watching(self, run_id: RunId, *, is_tracing: bool) -> Iterator[Watcher]:
        """Somebody who watches the run as long as the context lasts."""
        watcher = Watcher(is_tracing=is_tracing)
        self._watchers.setdefault(run_id, []).append(watcher)
        try:
            yield watcher
        finally:
            self._watchers[run_id].remove(watcher)

    def is_traced(self, run_id: RunId) -> bool:
        """Whether somebody wants to know what the run's peers do when."""
        return any(watcher.is_tracing for watcher in self._watchers.get(run_id, ()))

    def tell(self, run_id: RunId, event: RunEvent) -> None:
        """Something happened in a run."""
        for watcher in self._watchers.get(run_id, ()):
            watcher.tell(event)

    def trace(self, timeline: PeerTimeline) -> None:
        """A peer of a run told what it did."""
        for watcher in self._watchers.get(timeline.timeline.run_id, ()):
            if watcher.is_tracing:
                watcher.trace(timeline)
