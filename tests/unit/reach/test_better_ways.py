"""Tunnels: a relayed one moves to a better way, once it is idle and not before."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from swarm_ft.errors import Unavailable
from swarm_ft.protocol.messages.meeting import Way
from swarm_ft.reach.meet import Link
from swarm_ft.reach.sockets import receive_exactly
from swarm_ft.reach.tunnels import Tunnels


class Ways:
    """A source of streams, each with the next of these ways; it keeps their other ends."""

    def __init__(self, *ways: Way) -> None:
        self.left = list(ways)
        self.ends: asyncio.Queue[socket.socket] = asyncio.Queue()
        self.refused = asyncio.Event()

    async def link(self, name: str) -> Link:
        assert name == "other"
        if not self.left:
            self.refused.set()
            raise Unavailable("no way")
        one, end = socket.socketpair()
        end.setblocking(False)
        self.ends.put_nowait(end)
        return Link(one, self.left.pop(0))


@pytest.fixture
async def called() -> AsyncIterator[list[socket.socket]]:
    """Connections that the test made."""
    made: list[socket.socket] = []
    yield made
    for sock in made:
        sock.close()


async def dial(tunnels: Tunnels, called: list[socket.socket]) -> socket.socket:
    sock = tunnels.place_to("other").connect("127.0.0.1:1")
    called.append(sock)
    return sock


async def assert_joined(one: socket.socket, other: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    for sender, receiver in ((one, other), (other, one)):
        await loop.sock_sendall(sender, b"hello")
        assert await receive_exactly(receiver, 5) == b"hello"


async def test_a_relayed_stream_moves_when_nothing_is_under_way(
    called: list[socket.socket],
) -> None:
    # The second is no better, the third is.
    ways = Ways(Way.RELAYED, Way.RELAYED, Way.PUNCHED)
    tunnels = Tunnels(ways.link, better_after_s=0.0)
    link, loop = await dial(tunnels, called), asyncio.get_running_loop()
    relayed, worse, better = [await ways.ends.get() for _ in range(3)]
    called.extend((relayed, worse, better))
    assert await loop.sock_recv(worse, 1) == b"", "a relay's second stream is of no use"
    await assert_joined(link, relayed)
    tunnels.upgrade_links()
    assert await loop.sock_recv(link, 1) == await loop.sock_recv(relayed, 1) == b""
    await assert_joined(await dial(tunnels, called), better)
    await tunnels.close()


async def test_a_stream_that_cannot_be_bettered_stays(called: list[socket.socket]) -> None:
    ways = Ways(Way.RELAYED)
    tunnels = Tunnels(ways.link, better_after_s=0.0)
    local, end = await dial(tunnels, called), await ways.ends.get()
    called.append(end)
    await ways.refused.wait()
    tunnels.upgrade_links()
    await assert_joined(local, end)
    await tunnels.close()


async def test_a_stream_without_a_relay_is_left_alone(called: list[socket.socket]) -> None:
    ways = Ways(Way.PUNCHED, Way.DIRECT)
    tunnels = Tunnels(ways.link, better_after_s=0.0)
    local, end = await dial(tunnels, called), await ways.ends.get()
    called.append(end)
    tunnels.upgrade_links()
    await assert_joined(local, end)
    assert ways.left == [Way.DIRECT]
    await tunnels.close()
