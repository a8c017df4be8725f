"""Which chunks of a file to ask of which source: a state machine without I/O or clock.

Sources get ranges that shrink towards the end (guided self-scheduling, Polychronopoulos and Kuck
1987), so a fast one comes back sooner and gets more. When none is left to give, a source that is
free takes over the second half of the longest range that another one still has (work stealing);
of a single chunk both go on, and the first to bring it counts. So nobody waits for a slow or a
silent source while another one answers.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable

from swarm_ft.ids import PeerId

MAX_RANGE_CHUNKS = 16
"""64 MiB: long enough that the way there and back is nothing beside it."""
_NOTHING = range(0)


class DownloadPlan:
    """What is missing, what is promised by whom. See the module's docstring."""

    def __init__(
        self, num_chunks: int, sources: Iterable[PeerId], *, present: Collection[int] = ()
    ) -> None:
        """Begin, or go on where `present` chunks are here already."""
        self._missing = set(range(num_chunks)) - set(present)
        self._free = sorted(self._missing)  # a heap: of nobody yet
        self._held = dict.fromkeys(sources, _NOTHING)

    @property
    def num_missing(self) -> int:
        """Chunks that did not come yet."""
        return len(self._missing)

    @property
    def is_complete(self) -> bool:
        """Whether all chunks are here."""
        return not self._missing

    def next_range(self, source: PeerId) -> range:
        """What to ask of a source that has no call under way; empty if there is nothing for it now.

        Asked again before it brought all of it, it is the rest.
        """
        taken = self._rest(source) or self._take_free() or self._steal(source)
        self._held[source] = taken
        return taken

    def wants(self, source: PeerId, index: int) -> bool:
        """Whether the source is still to bring this chunk of its range."""
        return index in self._missing and index in self._held.get(source, _NOTHING)

    def received(self, index: int) -> None:
        """A chunk came and is what it should be; a second time changes nothing."""
        self._missing.discard(index)
        for source, held in self._held.items():
            if index in held:
                self._held[source] = range(index + 1, held.stop)

    def drop(self, source: PeerId) -> None:
        """Expect nothing of this source any more; its chunks are for the others."""
        for index in self._held.pop(source, _NOTHING):
            if index in self._missing and not self._holders(index):
                heapq.heappush(self._free, index)

    def _rest(self, source: PeerId) -> range:
        held = self._held[source]
        return held if self._missing.intersection(held) else _NOTHING

    def _take_free(self) -> range:
        if not self._free:
            return _NOTHING
        # Half of what is left, shared out evenly: the rest evens out who is fast and who slow.
        share = -(-len(self._free) // (2 * len(self._held)))
        first = heapq.heappop(self._free)
        stop = first + 1
        while self._free and self._free[0] == stop and stop - first < min(share, MAX_RANGE_CHUNKS):
            stop = heapq.heappop(self._free) + 1
        return range(first, stop)

    def _steal(self, thief: PeerId) -> range:
        others = [held for source, held in self._held.items() if source != thief]
        longest = max(others, key=len, default=_NOTHING)
        if len(longest) > 1:
            return self._split(longest)
        lone = [held for held in others if len(held) == 1 and len(self._holders(held.start)) == 1]
        return min(lone, key=lambda held: held.start, default=_NOTHING)

    def _split(self, longest: range) -> range:
        victim = next(source for source, held in self._held.items() if held == longest)
        middle = longest.start + (len(longest) + 1) // 2
        self._held[victim] = range(longest.start, middle)
        return range(middle, longest.stop)

    def _holders(self, index: int) -> list[PeerId]:
        return [source for source, held in self._held.items() if index in held]
