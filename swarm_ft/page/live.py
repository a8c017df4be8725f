"""The page's live data, made once a second for all viewers, and only while there are any."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

from swarm_ft.errors import Busy
from swarm_ft.page.status_cache import Documents, StatusCache, StatusSource
from swarm_ft.protocol.messages.events import EventsRequest

MAX_VIEWERS = 32
PERIOD_S = 1.0
NEWEST_EVENTS = 200
"""Events that a browser receives at its first connection."""


@dataclass(frozen=True, slots=True)
class _Frame:
    """Status at a time; `next_event` is the serial number of the first later event."""

    next_event: int
    message: bytes


class Live:
    """Live data of the page; see the module's docstring.

    Args:
        facts: Status of the swarm.
        source: Source of the events.
        documents: Converters to JSON documents.
    """

    def __init__(self, facts: StatusCache, source: StatusSource, documents: Documents) -> None:
        self._facts = facts
        self._source = source
        self._documents = documents
        self._viewers = 0
        self._frame: _Frame | None = None
        self._news = asyncio.Event()
        self._refreshing: asyncio.Task[None] | None = None

    @property
    def num_viewers(self) -> int:
        """Number of present viewers."""
        return self._viewers

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count a viewer as long as the context lasts.

        Raises:
            Busy: The page has its maximum of viewers.
        """
        if self._viewers >= MAX_VIEWERS:
            raise Busy(f"{MAX_VIEWERS} browsers show this page already; close one of them")
        self._viewers += 1
        self._refreshing = self._refreshing or asyncio.create_task(self._refresh())
        try:
            yield
        finally:
            self._viewers -= 1
            if not self._viewers:
                self._refreshing.cancel()
                self._refreshing, self._frame = None, None

    async def messages(self, since: int | None) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events with the swarm's events and its status, until the reader goes.

        Args:
            since: Serial number of the first event that the browser lacks; None: all.
        """
        frame: _Frame | None = None
        while True:
            frame = await self._after(frame)
            if since is None or since > frame.next_event:  # the journal may have been replaced
                since = max(0, frame.next_event - NEWEST_EVENTS)
            if since < frame.next_event:
                async with aclosing(self._source.events(EventsRequest(since=since))) as events:
                    async for event in events:
                        since = event.serial + 1
                        yield message("happened", json.dumps(self._documents.event(event)), since)
            yield frame.message

    async def _after(self, seen: _Frame | None) -> _Frame:
        """Return the newest frame, once it differs from this one; a slow reader misses some."""
        while self._frame is None or self._frame is seen:
            await self._news.wait()
        return self._frame

    async def _refresh(self) -> None:
        while True:
            known = self._facts.status()
            document = self._documents.status(known)
            self._frame = _Frame(known.next_event, message_of(document, known.next_event))
            self._news.set()
            self._news = asyncio.Event()
            await asyncio.sleep(PERIOD_S)


def message_of(document: dict[str, Any], next_event: int) -> bytes:
    """Return the status as a server-sent event for all viewers."""
    return message("state", json.dumps(document, separators=(",", ":")), next_event)


def message(kind: str, text: str, serial: int) -> bytes:
    """Return a server-sent event; a returning browser sends the last serial number it got."""
    return f"event: {kind}\nid: {serial}\ndata: {text}\n\n".encode()
