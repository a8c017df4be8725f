"""For gRPC a path of the file system, for all else a stream to another member, whichever way.

gRPC cannot be given a socket. So a tunnel listens where only this process's user gets at it; what
connects there is joined to a stream of its own to that member, within which TLS is end to end.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from swarm_ft.errors import SwarmError
from swarm_ft.log import get_logger
from swarm_ft.reach.meet import Link
from swarm_ft.reach.sockets import Joint

logger = get_logger(__name__)

MAX_TUNNELS = 1024
BACKLOG = 8


class Tunnels:
    """See the module's docstring.

    Args:
        link: makes a stream to a member.
    """

    def __init__(self, link: Callable[[str], Awaitable[Link]]) -> None:
        self._link = link
        self._folder: Path | None = None
        self._paths: dict[str, str] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._listeners: list[socket.socket] = []
        self.relayed: Counter[str] = Counter()
        """How many of the streams that stand go over a relay, by whom they lead to."""

    def path_to(self, name: str) -> str:
        """Where a connection leads to this member; it is there from now on."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="swarm-ft-"))
        if name not in self._paths:
            path = str(self._folder / str(len(self._paths)))
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listeners.append(listener)
            listener.setblocking(False)
            listener.bind(path)
            listener.listen(BACKLOG)
            self._paths[name] = path
            self._start(self._accept_all(name, listener))
        return self._paths[name]

    async def close(self) -> None:
        """End all tunnels."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for listener in self._listeners:
            listener.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _accept_all(self, name: str, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            local, _ = await loop.sock_accept(listener)
            self._start(self._carry(name, local))

    async def _carry(self, name: str, local: socket.socket) -> None:
        try:
            link = await self._link(name)
        except BaseException as error:
            local.close()
            if not isinstance(error, SwarmError):
                raise
            logger.info("%s", error.message)
            return
        with suppress(OSError), link.counted_in(self.relayed, name):
            await Joint(local, link.sock).wait()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
