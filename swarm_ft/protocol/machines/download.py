"""Assignment of a file's chunks to its sources: a state machine without I/O or clock.

Sources get ranges that shrink towards the end (guided self-scheduling, Polychronopoulos and Kuck
1987), so a fast one returns sooner and gets more. When no chunk is free, a source without work gets
the second half of another's longest range (work stealing). A single chunk goes to both, and the
first arrival counts. So a download never waits for a slow or a silent source while another one
answers.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable

from swarm_ft.ids import PeerId

MAX_RANGE_CHUNKS = 16
"""Chunks of a range: 64 MiB, so long that a round trip does not matter."""
_NOTHING = range(0)


class DownloadPlan:
    """Missing chunks of a download, and their sources; see the module's docstring."""

    def __init__(
        self, num_chunks: int, sources: Iterable[PeerId], *, present: Collection[int] = ()
    ) -> None:
        """Begin a download, or resume one that has the chunks in `present`."""
        self._missing = set(range(num_chunks)) - set(present)
        self._free = sorted(self._missing)  # a heap of chunks without a source
        self._assigned = dict.fromkeys(sources, _NOTHING)

    @property
    def num_missing(self) -> int:
        """Number of missing chunks."""
        return len(self._missing)

    @property
    def is_complete(self) -> bool:
        """Whether all chunks are present."""
        return not self._missing

    def next_range(self, source: PeerId) -> range:
        """Return the range to request from a source without a call; empty if there is none now.

        A call before the end of its last range returns the rest of that range.
        """
        taken = self._rest(source) or self._take_free() or self._steal(source)
        self._assigned[source] = taken
        return taken

    def wants(self, source: PeerId, index: int) -> bool:
        """Whether this chunk is missing and belongs to the source's range."""
        return index in self._missing and index in self._assigned.get(source, _NOTHING)

    def received(self, index: int) -> None:
        """Record a correct chunk; a second arrival changes nothing."""
        self._missing.discard(index)
        for source, assigned in self._assigned.items():
            if index in assigned:
                self._assigned[source] = range(index + 1, assigned.stop)

    def drop(self, source: PeerId) -> None:
        """Drop a source; its chunks go to the others."""
        for index in self._assigned.pop(source, _NOTHING):
            if index in self._missing and not self._holders(index):
                heapq.heappush(self._free, index)

    def _rest(self, source: PeerId) -> range:
        assigned = self._assigned[source]
        return assigned if self._missing.intersection(assigned) else _NOTHING

    def _take_free(self) -> range:
        if not self._free:
            return _NOTHING
        # Half of the free chunks in even shares; the other half balances fast and slow sources.
        share = -(-len(self._free) // (2 * len(self._assigned)))
        first = heapq.heappop(self._free)
        stop = first + 1
        while self._free and self._free[0] == stop and stop - first < min(share, MAX_RANGE_CHUNKS):
            stop = heapq.heappop(self._free) + 1
        return range(first, stop)

    def _steal(self, thief: PeerId) -> range:
        others = [assigned for source, assigned in self._assigned.items() if source != thief]
        longest = max(others, key=len, default=_NOTHING)
        if len(longest) > 1:
            return self._split(longest)
        lone = [one for one in others if len(one) == 1 and len(self._holders(one.start)) == 1]
        return min(lone, key=lambda one: one.start, default=_NOTHING)

    def _split(self, longest: range) -> range:
        victim = next(source for source, assigned in self._assigned.items() if assigned == longest)
        middle = longest.start + (len(longest) + 1) // 2
        self._assigned[victim] = range(longest.start, middle)
        return range(middle, longest.stop)

    def _holders(self, index: int) -> list[PeerId]:
        return [source for source, assigned in self._assigned.items() if index in assigned]
