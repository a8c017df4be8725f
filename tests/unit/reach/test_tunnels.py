"""Tunnels over loopback, with streams that come late or never."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from swarm_ft.protocol.messages.meeting import Way
from swarm_ft.reach import tunnels as module
from swarm_ft.reach.meet import Link
from swarm_ft.reach.tunnels import Tunnels


class Coming:
    """A source of streams on demand; the longest waiting caller gets the first one."""

    def __init__(self) -> None:
        self._streams: asyncio.Queue[socket.socket] = asyncio.Queue()

    async def link(self, _name: str) -> Link:
        return Link(await self._streams.get(), Way.RELAYED)

    def comes(self) -> socket.socket:
        """Provide a stream; return its other end."""
        near, far = socket.socketpair()
        far.setblocking(False)
        self._streams.put_nowait(near)
        return far


@asynccontextmanager
async def connected(tunnels: Tunnels) -> AsyncIterator[socket.socket]:
    with tunnels.place_to("n").connect("127.0.0.1:1") as sock:
        yield sock


async def test_a_stream_that_comes_late_is_for_who_waits_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.01)
    coming, loop = Coming(), asyncio.get_running_loop()
    tunnels = Tunnels(coming.link)
    async with asyncio.timeout(10):
        async with connected(tunnels) as early:
            assert await loop.sock_recv(early, 1) == b""
        monkeypatch.setattr(module, "PATIENCE_S", 10.0)
        async with connected(tunnels) as later:
            with coming.comes() as other_end:
                await loop.sock_sendall(later, b"hello")
                assert await loop.sock_recv(other_end, 5) == b"hello"
    await tunnels.close()
