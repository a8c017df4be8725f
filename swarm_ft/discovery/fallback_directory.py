"""A member's directory: the swarm's DHT while it answers, and the coordinator's last endpoint.

A router that forgets its connections cuts a member off from the DHT, and so does a DHT whose nodes
moved: a client of it drops nodes that do not answer, and then has none left. This directory joins
the DHT again and again. Meanwhile it returns the coordinator's last known endpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from swarm_ft.base.log import get_logger
from swarm_ft.discovery.directory import Directory
from swarm_ft.errors import SwarmError, Unavailable
from swarm_ft.identity.roles import COORDINATOR_NAME, Role

logger = get_logger(__name__)

ENTER_S = 5.0
"""Seconds that a member waits for the DHT at its start before it goes on without it."""
FIND_S = 1.0
"""Seconds that the DHT may take to find the coordinator before its last endpoint counts."""
LOOK_EVERY_S = 1.0
"""Seconds between two checks for a lost DHT; a check sends no request."""
MAX_REST_S = 120.0
"""Seconds between two tries to join the DHT, at most.

Each try starts a process and may request a certificate from the coordinator; rests double.
"""


class Losable(Directory, Protocol):
    """A directory that may lose its swarm for good."""

    @property
    def is_lost(self) -> bool:
        """Whether it knows no node any more that it could query."""
        ...

    async def abandon(self) -> None:
        """Close without withdrawing records, since no node would receive that."""
        ...


class FallbackDirectory:
    """See the module's docstring. Call `enter` before anything else, and `close` at the end.

    Args:
        open_dht: Joins the DHT.
        coordinator: Endpoint of the coordinator as far as known; None: unknown.
        dht: A DHT that this process has joined already.
    """

    def __init__(
        self,
        open_dht: Callable[[], Awaitable[Losable]],
        coordinator: str | None = None,
        dht: Losable | None = None,
    ) -> None:
        self._open_dht = open_dht
        self._coordinator = coordinator
        self._dht = dht
        self._announced: dict[tuple[Role, str], str] = {}
        self._last_error = ""
        self._tried = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None
        self._staying: asyncio.Task[None] | None = None

    @property
    def addresses(self) -> tuple[str, ...]:
        """Multiaddrs of this process's node, as of `DhtDirectory`: a client has none."""
        return ()

    async def enter(self) -> None:
        """Join the DHT and stay in it; return once the first try ended, or after `ENTER_S`."""
        self._staying = asyncio.create_task(self._stay())
        try:
            async with asyncio.timeout(ENTER_S):
                await self._tried.wait()
        except TimeoutError:
            logger.info("the DHT does not answer yet; going on without it")
        except BaseException:
            await self.close()
            raise

    async def announce(self, role: Role, name: str, endpoint: str) -> None:
        """See `Directory`; without a DHT, announce the record once there is one."""
        self._announced[role, name] = endpoint
        if self._dht is not None and not self._is_lost:
            await self._dht.announce(role, name, endpoint)

    async def withdraw(self, role: Role, name: str) -> None:
        """See `Directory`."""
        self._announced.pop((role, name), None)
        if self._dht is not None and not self._is_lost:
            await self._dht.withdraw(role, name)

    async def find(self, role: Role) -> dict[str, str]:
        """See `Directory`; return the coordinator's present or last endpoint within `FIND_S`.

        While the DHT does not answer, the directory returns no other members.
        """
        if role is not Role.COORDINATOR:
            return await self._found(role)
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        # The task continues: the next call returns its result.
        await asyncio.wait({self._looking}, timeout=FIND_S)
        return {COORDINATOR_NAME: self._coordinator} if self._coordinator else {}

    async def close(self) -> None:
        """See `Directory`."""
        tasks = [task for task in (self._staying, self._looking) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._dht is not None:
            await (self._dht.abandon() if self._is_lost else self._dht.close())

    async def _look(self) -> None:
        for endpoint in (await self._found(Role.COORDINATOR)).values():
            self._coordinator = endpoint

    async def _found(self, role: Role) -> dict[str, str]:
        if self._dht is None or self._is_lost:
            return {}
        try:
            return await self._dht.find(role)
        except Unavailable as error:
            logger.debug("directory: %s", error.message)
            return {}

    async def _stay(self) -> None:
        rest_s = LOOK_EVERY_S
        while True:
            if self._is_lost:
                await self._enter()
            self._tried.set()
            rest_s = min(2 * rest_s, MAX_REST_S) if self._is_lost else LOOK_EVERY_S
            await asyncio.sleep(rest_s)

    @property
    def _is_lost(self) -> bool:
        return self._dht is None or self._dht.is_lost

    async def _enter(self) -> None:
        try:
            lost, self._dht = self._dht, await self._open_dht()
            if lost is not None:
                await lost.abandon()
            await self._announce_all(self._dht)
        except SwarmError as error:  # the DHT, or the way to it, may return
            if error.message != self._last_error:
                logger.warning("without the DHT for now: %s; retrying", error.message)
            self._last_error = error.message
        except Exception:
            # hivemind documents no errors; the next turn tries again after any of them.
            logger.exception("the DHT could not be entered")
        else:
            if self._last_error or lost is not None:
                logger.info("in the DHT again")
            self._last_error = ""

    async def _announce_all(self, dht: Losable) -> None:
        try:
            for (role, name), endpoint in tuple(self._announced.items()):
                await dht.announce(role, name, endpoint)
        except SwarmError:
            self._dht = None
            await dht.abandon()
            raise
