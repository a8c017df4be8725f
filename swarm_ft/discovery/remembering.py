"""A member's directory: the swarm's DHT as long as it answers, and where the coordinator last was.

A router that forgets its connections cuts a member off from the DHT, and so does a DHT whose nodes
have moved: a client of it drops who does not answer and asks nobody any more. It is then entered
anew, again and again; meanwhile the coordinator is where it was, as far as is known here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from swarm_ft.discovery.directory import Directory
from swarm_ft.errors import SwarmError, Unavailable
from swarm_ft.identity.roles import COORDINATOR_NAME, Role
from swarm_ft.log import get_logger

logger = get_logger(__name__)

ENTER_S = 5.0
"""How long a member waits for the DHT before it goes on without it for the time being."""
FIND_S = 1.0
"""How long the DHT may take to tell where the coordinator is before that is where it last was."""
LOOK_EVERY_S = 1.0
"""How soon it is seen that the DHT is lost; nobody is asked for that."""
MAX_REST_S = 120.0
"""Between two tries to enter it anew, of which each starts a process and may ask the coordinator
for a certificate. Rests double up to here."""


class Losable(Directory, Protocol):
    """A directory that may fall silent for good."""

    @property
    def is_lost(self) -> bool:
        """Whether it knows nobody any more whom it could ask."""
        ...

    async def abandon(self) -> None:
        """As `close`, without a word: nobody would hear it."""
        ...


class RememberingDirectory:
    """See the module's docstring. Use `enter` before anything else, and `close`.

    Args:
        open_dht: enters the DHT.
        coordinator: where that is, as far as is known; None: it is not.
        dht: that was entered already.
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
        self._told = ""
        self._tried = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None
        self._staying: asyncio.Task[None] | None = None

    @property
    def addresses(self) -> tuple[str, ...]:
        """As of `DhtDirectory`: a client has none."""
        return ()

    async def enter(self) -> None:
        """Be in the DHT from now on, as far as that can be done."""
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
        """See `Directory`; without a DHT it is announced once there is one."""
        self._announced[role, name] = endpoint
        if self._dht is not None and not self._is_lost:
            await self._dht.announce(role, name, endpoint)

    async def withdraw(self, role: Role, name: str) -> None:
        """See `Directory`."""
        self._announced.pop((role, name), None)
        if self._dht is not None and not self._is_lost:
            await self._dht.withdraw(role, name)

    async def find(self, role: Role) -> dict[str, str]:
        """See `Directory`; where the coordinator is, or was, is told soon.

        Others are nowhere, as far as is known, while the DHT does not answer.
        """
        if role is not Role.COORDINATOR:
            return await self._found(role)
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        # It goes on looking: what it finds later counts next time.
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
        except SwarmError as error:  # it, or the way there, may come back
            if error.message != self._told:
                logger.warning("without the DHT for now: %s; trying on", error.message)
            self._told = error.message
        except Exception:
            # hivemind lists no errors; whatever it was, the next turn tries again.
            logger.exception("the DHT could not be entered")
        else:
            if self._told or lost is not None:
                logger.info("in the DHT again")
            self._told = ""

    async def _announce_all(self, dht: Losable) -> None:
        try:
            for (role, name), endpoint in tuple(self._announced.items()):
                await dht.announce(role, name, endpoint)
        except SwarmError:
            self._dht = None
            await dht.abandon()
            raise
