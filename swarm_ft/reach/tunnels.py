"""For gRPC a place of this process, for all else a stream to another member, whichever way.

gRPC cannot be given a socket. So a tunnel listens at a place of this process (`local_places`); what
connects there is joined to a stream of its own to that member, within which TLS is end to end.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

from swarm_ft.errors import SwarmError
from swarm_ft.log import get_logger
from swarm_ft.reach.meet import Link
from swarm_ft.reach.sockets import Joint
from swarm_ft.transport.grpc_options import GrpcOptions
from swarm_ft.transport.local_places import LocalPlace, LocalPlaces

logger = get_logger(__name__)

MAX_TUNNELS = 1024
PATIENCE_S = GrpcOptions().connect_timeout_s
"""How long gRPC waits for an answer, and then connects anew. A stream that comes later is for
whoever waits then: joined to what gRPC has hung up on, it would be lost, and so the next ones."""


class Tunnels:
    """See the module's docstring.

    Args:
        link: makes a stream to a member.
    """

    def __init__(self, link: Callable[[str], Awaitable[Link]]) -> None:
        self._link = link
        self._places = LocalPlaces()
        self._place_to: dict[str, LocalPlace] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._listeners: list[socket.socket] = []

    def place_to(self, name: str) -> LocalPlace:
        """Where a connection leads to this member; it is there from now on."""
        if name not in self._place_to:
            place = self._places.new()
            listener = place.listen()
            self._listeners.append(listener)
            self._place_to[name] = place
            self._start(self._accept_all(name, listener))
        return self._place_to[name]

    async def close(self) -> None:
        """End all tunnels."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for listener in self._listeners:
            listener.close()
        self._places.close()

    async def _accept_all(self, name: str, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            local, _ = await loop.sock_accept(listener)
            self._start(self._carry(name, local))

    async def _carry(self, name: str, local: socket.socket) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                link = await self._link(name)
        except (SwarmError, TimeoutError) as error:
            local.close()
            logger.info("%s", error if isinstance(error, SwarmError) else f"no way to {name} yet")
            return
        except BaseException:
            local.close()
            raise
        with suppress(OSError):
            await Joint(local, link.sock).wait()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
