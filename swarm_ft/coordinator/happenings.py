"""What happened in the swarm: it gets numbers and times, is kept in the journal, and is told.

Who follows has a place in it and no queue: however slowly it reads, nothing piles up here.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from swarm_ft.coordinator.facts.events import Happened
from swarm_ft.coordinator.journal.journal import Journal
from swarm_ft.errors import Busy
from swarm_ft.ids import StepNumber
from swarm_ft.protocol.messages.events import EventKind, SwarmEvent
from swarm_ft.protocol.spec.bounds import MAX_TEXT_BYTES, cut_text

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

    def numbered(self, happened: Iterable[Happened]) -> list[SwarmEvent]:
        """What is to be written down; then say `written`."""
        unix_s = self._unix_s()
        return [
            SwarmEvent(
                serial=serial,
                unix_s=unix_s,
                kind=one.kind,
                run_id=one.run_id,
                peer_id=one.peer_id,
                from_step=_step(one.from_step),
                to_step=_step(one.to_step),
                words=cut_text(one.words, MAX_TEXT_BYTES),
            )
            for serial, one in enumerate(happened, self._next_serial)
        ]

    def written(self, events: list[SwarmEvent]) -> None:
        """These are in the journal: who follows is told."""
        if events:
            self._next_serial = events[-1].serial + 1
            self._counts.update(event.kind for event in events)
            self._news.set()
            self._news = asyncio.Event()

    async def told(self, since: int, *, follows: bool) -> AsyncGenerator[SwarmEvent, None]:
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


def _step(number: int | None) -> StepNumber | None:
    return None if number is None else StepNumber(number)
