"""Tunnels: a place of this process for gRPC, and behind it a stream to another member.

gRPC accepts no socket. So a tunnel listens at a place of this process (`local_places`). It joins
each connection there to a stream of its own to that member, within which TLS is end to end.

A relayed tunnel improves itself: it looks for another way now and then. A stream found so waits
until no call is under way (`at_rest`). Then the relayed one ends, and gRPC's next connection uses
the better one.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

from swarm_ft.base.log import get_logger
from swarm_ft.errors import SwarmError
from swarm_ft.protocol.messages.meeting import Way
from swarm_ft.reach.meet import SPARE_S, Link
from swarm_ft.reach.shaping import Shape
from swarm_ft.reach.sockets import Joint
from swarm_ft.transport.grpc_options import GrpcOptions
from swarm_ft.transport.local_places import LocalPlace, LocalPlaces

logger = get_logger(__name__)

MAX_TUNNELS = 1024
PATIENCE_S = GrpcOptions().connect_timeout_s
"""Seconds that gRPC waits for an answer before it connects anew.

A stream that comes later serves the next connection: joined to the one that gRPC has closed, it
would be lost, and so would the next ones.
"""
BETTER_AFTER_S, MAX_BETTER_AFTER_S = 300.0, 3600.0
"""Seconds until a search for a better way than a relay: at first, and at most."""
SPARE_USE_S = 0.9 * SPARE_S
"""Seconds that a better stream waits for use: less than the other side keeps it."""


class Tunnels:
    """Tunnels of a member; see the module's docstring.

    Args:
        link: Opens a stream to a member.
        better_after_s: Seconds until the first search for a better way than a relay.
        shape: Rates of this machine's link.
    """

    def __init__(
        self,
        link: Callable[[str], Awaitable[Link]],
        better_after_s: float = BETTER_AFTER_S,
        shape: Shape | None = None,
    ) -> None:
        self._shape = shape
        self._link = link
        self._places = LocalPlaces()
        self._place_to: dict[str, LocalPlace] = {}
        self._better_after_s = better_after_s
        self._better: dict[str, Link] = {}
        self._relayed: dict[Joint, str] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._listeners: list[socket.socket] = []

    def place_to(self, name: str) -> LocalPlace:
        """Return the place whose connections lead to this member; create it at the first call."""
        if name not in self._place_to:
            place = self._places.new()
            listener = place.listen()
            self._listeners.append(listener)
            self._place_to[name] = place
            self._start(self._accept_all(name, listener))
        return self._place_to[name]

    def is_relayed(self, name: str) -> bool:
        """Whether a stream to this member goes over a relay."""
        return name in self._relayed.values()

    def upgrade_links(self) -> None:
        """Close relayed streams with a better way; call this while no calls are under way."""
        for joint, name in self._relayed.items():
            if name in self._better:
                logger.info("%s: the link is %s from now on", name, self._better[name].way)
                joint.close()

    async def close(self) -> None:
        """End all tunnels."""
        for link in self._better.values():
            link.sock.close()
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
                link = self._better.pop(name, None) or await self._link(name)
        except (SwarmError, TimeoutError) as error:
            local.close()
            logger.info("%s", error if isinstance(error, SwarmError) else f"no way to {name} yet")
            return
        except BaseException:
            local.close()
            raise
        with suppress(OSError):
            joint = Joint(link.sock, local, shape=self._shape)
            await (self._relay(name, joint) if link.way is Way.RELAYED else joint.wait())

    async def _relay(self, name: str, joint: Joint) -> None:
        self._relayed[joint] = name
        looking = self._start(self._look_for_better(name))
        try:
            await joint.wait()
        finally:
            looking.cancel()
            del self._relayed[joint]

    async def _look_for_better(self, name: str) -> None:
        """Look for better ways, unnoticed by the users of the relay."""
        wait_s = self._better_after_s
        while True:
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, MAX_BETTER_AFTER_S)
            if name in self._better:
                continue
            with suppress(SwarmError):
                link = await self._link(name)
                if link.way is Way.RELAYED or name in self._better:
                    link.sock.close()
                else:
                    self._better[name] = link
                    asyncio.get_running_loop().call_later(SPARE_USE_S, self._drop, name, link)

    def _drop(self, name: str, link: Link) -> None:
        if self._better.get(name) is link:
            del self._better[name]
            link.sock.close()

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
