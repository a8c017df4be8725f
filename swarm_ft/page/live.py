"""What the page shows, made once a second for all who look at it, and only while somebody does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

from swarm_ft.errors import Busy
from swarm_ft.page.facts import Documents, Facts, Source
from swarm_ft.protocol.messages.events import EventsRequest

MAX_VIEWERS = 32
PERIOD_S = 1.0
NEWEST_EVENTS = 200
"""That a browser is told which comes for the first time."""


@dataclass(frozen=True, slots=True)
class _Frame:
    """All that is known at a time; `next_event` is the serial number of what has not happened."""

    next_event: int
    message: bytes


class Live:
    """See the module's docstring.

    Args:
        facts: what is known.
        source: what happened.
        documents: how both are told.
    """

    def __init__(self, facts: Facts, source: Source, documents: Documents) -> None:
        self._facts = facts
        self._source = source
        self._documents = documents
        self._viewers = 0
        self._frame: _Frame | None = None
        self._news = asyncio.Event()
        self._telling: asyncio.Task[None] | None = None

    @property
    def num_viewers(self) -> int:
        """Who looks at it now."""
        return self._viewers

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Somebody who looks at it as long as the context lasts.

        Raises:
            Busy: so many others do.
        """
        if self._viewers >= MAX_VIEWERS:
            raise Busy(f"{MAX_VIEWERS} browsers show this page already; close one of them")
        self._viewers += 1
        self._telling = self._telling or asyncio.create_task(self._tell())
        try:
            yield
        finally:
            self._viewers -= 1
            if not self._viewers:
                self._telling.cancel()
                self._telling, self._frame = None, None

    async def messages(self, since: int | None) -> AsyncGenerator[bytes, None]:
        """Server-sent events: what happened and what is known, until the reader goes.

        Args:
            since: the serial number of the first event that the browser lacks; None: all of them.
        """
        frame: _Frame | None = None
        while True:
            frame = await self._after(frame)
            if since is None or since > frame.next_event:  # the journal may be another one
                since = max(0, frame.next_event - NEWEST_EVENTS)
            if since < frame.next_event:
                async with aclosing(self._source.happened(EventsRequest(since=since))) as events:
                    async for event in events:
                        since = event.serial + 1
                        yield message("happened", json.dumps(self._documents.event(event)), since)
            yield frame.message

    async def _after(self, seen: _Frame | None) -> _Frame:
        """The newest frame, once it is another than this one: who is slow misses some."""
        while self._frame is None or self._frame is seen:
            await self._news.wait()
        return self._frame

    async def _tell(self) -> None:
        while True:
            known = self._facts.status()
            document = self._documents.status(known)
            self._frame = _Frame(known.next_event, message_of(document, known.next_event))
            self._news.set()
            self._news = asyncio.Event()
            await asyncio.sleep(PERIOD_S)


def message_of(document: dict[str, Any], next_event: int) -> bytes:
    """All that is known, for everybody who looks at it."""
    return message("state", json.dumps(document, separators=(",", ":")), next_event)


def message(kind: str, text: str, serial: int) -> bytes:
    """A server-sent event; a browser that comes back names the newest serial number it got."""
    return f"event: {kind}\nid: {serial}\ndata: {text}\n\n".encode()
