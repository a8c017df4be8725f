"""What happened in the swarm: it gets numbers and times, is kept in the journal, and is told.

Who follows has a place in it and no queue: however slowly it reads, nothing piles up here.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from swarm_ft.coordinator.facts.events import EventRecord, Happened
from swarm_ft.coordinator.journal.journal import Journal
from swarm_ft.errors import Busy
from swarm_ft.protocol.messages.events import EventKind

MAX_FOLLOWERS = 64
"""At once, of all clients together."""
EVENTS_AT_ONCE = 256
"""Read from the journal; others wait meanwhile."""


class Happenings:
    """See the module's docstring.

    Args:
        journal: where it is kept.
        unix_s: the wall clock.
    """

    def __init__(self, journal: Journal, unix_s: Callable[[], float]) -> None:
        self._journal = journal
        self._unix_s = unix_s
        self._next_serial = journal.next_serial()
        self._counts = Counter(journal.event_counts())
        self._news = asyncio.Event()
        self._num_followers = 0

    @property
    def next_serial(self) -> int:
        """That the next one will have."""
        return self._next_serial

    @property
    def counts(self) -> Mapping[EventKind, int]:
        """How many of each kind happened: those kept as this began, and all since."""
        return self._counts

    def numbered(self, happened: Iterable[Happened]) -> list[EventRecord]:
        """What is to be written down; then say `written`."""
        unix_s = self._unix_s()
        return [
            EventRecord(serial, unix_s, one)
            for serial, one in enumerate(happened, self._next_serial)
        ]

    def written(self, events: list[EventRecord]) -> None:
        """These are in the journal: who follows is told."""
        if events:
            self._next_serial = events[-1].serial + 1
            self._counts.update(event.happened.kind for event in events)
            self._news.set()
            self._news = asyncio.Event()

    async def told(self, since: int, *, follows: bool) -> AsyncGenerator[EventRecord, None]:
        """What happened, from this serial number on; then, if it follows, what happens.

        Raises:
            Busy: so many others follow.
        """
        with self._following():
            while True:
                news = self._news
                while page := self._journal.events(since, EVENTS_AT_ONCE):
                    for event in page:
                        yield event
                    since = page[-1].serial + 1
                if not follows:
                    return
                await news.wait()

    @contextmanager
    def _following(self) -> Iterator[None]:
        if self._num_followers >= MAX_FOLLOWERS:
            raise Busy(f"{MAX_FOLLOWERS} others follow what happens already; end one of these")
        self._num_followers += 1
        try:
            yield
        finally:
            self._num_followers -= 1
