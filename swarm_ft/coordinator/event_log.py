"""The log of events: it numbers them, writes them to the journal, and serves followers.

A follower reads pages of the journal and has no queue: however slowly it reads, nothing piles up.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence

from swarm_ft.coordinator.facts.events import EmitEvent, EventRecord
from swarm_ft.coordinator.journal import journal as journals
from swarm_ft.coordinator.journal.journal import Journal
from swarm_ft.protocol.messages.events import MAX_PAGE_EVENTS, EventKind

MAX_PAGES = 64
"""Pages that are cached: more events than the journal has."""


class EventLog:
    """Numbered events of the swarm, in the journal.

    Args:
        journal: Journal that holds them.
        unix_s: Function that returns the wall clock's time.
    """

    def __init__(self, journal: Journal, unix_s: Callable[[], float]) -> None:
        self._journal = journal
        self._unix_s = unix_s
        self._next_serial = journal.next_serial()
        self._counts = Counter(journal.event_counts())
        self._pages: OrderedDict[int, Sequence[EventRecord]] = OrderedDict()
        self._news = asyncio.Event()

    @property
    def next_serial(self) -> int:
        """Number of the next event."""
        return self._next_serial

    @property
    def counts(self) -> Mapping[EventKind, int]:
        """Number of events of each kind: those in the journal at the start, and all since."""
        return self._counts

    def number(self, happened: Iterable[EmitEvent]) -> list[EventRecord]:
        """Assign numbers and times to events; call `written` once the journal has them."""
        unix_s = self._unix_s()
        return [
            EventRecord(serial, unix_s, one)
            for serial, one in enumerate(happened, self._next_serial)
        ]

    def notify_written(self, events: list[EventRecord]) -> None:
        """Notify followers that these events are in the journal."""
        if events:
            self._next_serial = events[-1].serial + 1
            self._counts.update(event.event.kind for event in events)
            self._news.set()
            self._news = asyncio.Event()

    async def pages(
        self, since: int, *, follows: bool
    ) -> AsyncGenerator[Sequence[EventRecord], None]:
        """Yield events from this serial number on, at most `MAX_PAGE_EVENTS` at a time.

        Args:
            since: First serial number.
            follows: Whether to continue with new events.
        """
        while True:
            news = self._news
            while since < self._next_serial:
                since = max(since, self._next_serial - journals.MAX_EVENTS)
                page = [event for event in self._page(since) if event.serial >= since]
                yield page
                end = since - since % MAX_PAGE_EVENTS + MAX_PAGE_EVENTS
                since = page[-1].serial + 1 if page else min(end, self._next_serial)
            if not follows:
                return
            await news.wait()

    def _page(self, since: int) -> Sequence[EventRecord]:
        """Return some events from this serial number on; many readers cost no more than one."""
        first = since - since % MAX_PAGE_EVENTS
        if first + MAX_PAGE_EVENTS > self._next_serial:  # the newest page, which still grows
            return self._journal.events(since, MAX_PAGE_EVENTS)
        page = self._pages.pop(first, None)
        if page is None:
            page = self._journal.events(first, MAX_PAGE_EVENTS)
        self._pages[first] = page
        if len(self._pages) > MAX_PAGES:
            self._pages.popitem(last=False)
        return page
