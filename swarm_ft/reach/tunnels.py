"""For gRPC a place of this process, for all else a stream to another member, whichever way.

gRPC cannot be given a socket. So a tunnel listens at a place of this process (`local_places`); what
connects there is joined to a stream of its own to that member, within which TLS is end to end.

What goes over a relay betters itself: now and then another way is looked for. A stream that is had
so waits until nothing is under way (`at_rest`). Then the relayed one is ended, and who dials again,
as gRPC's users do, gets the better one.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

from swarm_ft.errors import SwarmError
from swarm_ft.log import get_logger
from swarm_ft.protocol.messages.meeting import Way
from swarm_ft.reach.meet import SPARE_S, Link
from swarm_ft.reach.shaping import Shape
from swarm_ft.reach.sockets import Joint
from swarm_ft.transport.grpc_options import GrpcOptions
from swarm_ft.transport.local_places import LocalPlace, LocalPlaces

logger = get_logger(__name__)

MAX_TUNNELS = 1024
PATIENCE_S = GrpcOptions().connect_timeout_s
"""How long gRPC waits for an answer, and then connects anew. A stream that comes later is for
whoever waits then: joined to what gRPC has hung up on, it would be lost, and so the next ones."""
BETTER_AFTER_S, MAX_BETTER_AFTER_S = 300.0, 3600.0
"""After which a better way than a relay is looked for: at first, and at most."""
KEPT_S = 0.9 * SPARE_S
"""How long a better stream waits to be taken: less than the other side keeps it."""


class Tunnels:
    """See the module's docstring.

    Args:
        link: makes a stream to a member.
        better_after_s: when a better way than a relay is looked for, at first.
        shape: of this machine's link.
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
        """Where a connection leads to this member; it is there from now on."""
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

    def at_rest(self) -> None:
        """Nothing is under way: what goes over a relay moves, where there is a better way."""
        for joint, name in self._relayed.items():
            if name in self._better:
                logger.info("%s is reached %s from now on", name, self._better[name].way)
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
        """Without a word to whoever uses the relay meanwhile."""
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
                    asyncio.get_running_loop().call_later(KEPT_S, self._drop, name, link)

    def _drop(self, name: str, link: Link) -> None:
        if self._better.get(name) is link:
            del self._better[name]
            link.sock.close()

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
