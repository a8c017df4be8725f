"""The place of the one stream between this peer and another: the newest takes it.

Knows how streams end, and how often the other side broke one; what messages mean is its owner's to
know.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from swarm_ft.errors import ProtocolError, SwarmError, Unavailable
from swarm_ft.log import get_logger

logger = get_logger(__name__)

MAX_BROKEN_STREAMS = 3
"""A peer that breaks the protocol again and again fails the attempt, with its error."""

Work = tuple[Coroutine[Any, Any, None], ...]


class StreamSlot:
    """See the module's docstring. Made in a running event loop.

    Args:
        name: what the streams are of, for messages.
        opened: called when a stream is up and is the only one.
        closed: called when it is gone.
    """

    def __init__(
        self, name: str, *, opened: Callable[[], None], closed: Callable[[], None]
    ) -> None:
        self._name = name
        self._opened = opened
        self._closed = closed
        self._one_at_a_time = asyncio.Lock()
        self._newest: object = None
        self._break: asyncio.Future[None] | None = None
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._broken_streams = 0

    async def watch(self) -> None:
        """Wait until cancelled; then no stream is served any more.

        Raises:
            ProtocolError: the other side's streams were broken off too often.
        """
        try:
            await self._over
        finally:
            self._over.cancel()
            self.break_off(Unavailable("the attempt is over here"))

    async def serve(self, stream: object, begin: Callable[[], Work]) -> None:
        """Work on a stream until it ends; ends an older one.

        Args:
            stream: which it is.
            begin: gives what is to be done with it, once it is the only one.

        Raises:
            SwarmError: why it ended.
        """
        self._newest = stream
        self.break_off(Unavailable("a newer stream took over"))
        async with self._one_at_a_time:
            if self._newest is not stream:
                raise Unavailable("a newer stream took over")
            if self._over.done():
                raise Unavailable("the attempt is over here")
            try:
                await self._work(begin)
            except Unavailable:
                raise
            except SwarmError as error:
                self._count_broken(error)
                raise

    def break_off(self, error: SwarmError) -> None:
        """End the present stream, if there is one."""
        if self._break is not None and not self._break.done():
            self._break.set_exception(error)

    async def _work(self, begin: Callable[[], Work]) -> None:
        self._break = asyncio.get_running_loop().create_future()
        tasks: list[asyncio.Task[None]] = []
        try:
            tasks += [asyncio.create_task(part) for part in begin()]
            self._opened()
            ends: list[asyncio.Future[None]] = [*tasks, self._break]
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for end in done:
                end.result()
        finally:
            self._break.cancel()
            self._break = None
            self._closed()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _count_broken(self, error: SwarmError) -> None:
        logger.warning("%s: %s", self._name, error.message)
        self._broken_streams += 1
        if self._broken_streams >= MAX_BROKEN_STREAMS and not self._over.done():
            # In our own words: an error that the other side sent must not pass for one of ours.
            self._over.set_exception(
                ProtocolError(
                    f"{self._name}: {self._broken_streams} streams were broken off, at last by "
                    f"{error.code}: {error.message}"
                )
            )
