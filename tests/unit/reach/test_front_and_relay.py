"""The front port and a relay behind it, over loopback."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing

import pytest

from swarm_ft import systems
from swarm_ft.errors import NotAllowed
from swarm_ft.identity.keys import new_key
from swarm_ft.identity.tickets import LIFETIME_S, Ticket, check_ticket, member_hash, sign_ticket
from swarm_ft.reach import sockets
from swarm_ft.reach.front import Front
from swarm_ft.reach.relay import Relay, RelayLimits
from swarm_ft.reach.shaping import MAX_CHUNK_BYTES
from swarm_ft.reach.sockets import (
    JOINED,
    LEG,
    MAGIC,
    dial,
    outside_address,
    receive_address,
    receive_exactly,
)
from swarm_ft.transport.local_places import LocalPlace, LocalPlaces

MEETING = bytes(range(16))
CALLER, CALLEE = (member_hash(name, b"secret") for name in ("caller", "callee"))
KEY = new_key()


@pytest.fixture
async def front() -> AsyncIterator[Front]:
    front = Front()
    yield front
    await front.close()


@pytest.fixture(params=["spliced", "copied"])
def way_of_moving(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "copied":
        monkeypatch.delattr(os, "splice", raising=False)


@pytest.fixture(params=["path", "port"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalPlace]:
    """Where gRPC listens: at a path, or, as on Windows, at a port; what connects is the test's."""
    if request.param == "port":
        monkeypatch.setattr(systems, "HAS_SOCKET_PATHS", False)
    places = LocalPlaces()
    yield places.new()
    places.close()


async def leg(endpoint: str, *, is_caller: bool, key: object = KEY) -> tuple[socket.socket, str]:
    assert isinstance(key, type(KEY))
    ticket = sign_ticket(key, Ticket(MEETING, is_caller, CALLER, CALLEE), time.time())
    sock = await dial(endpoint)
    loop = asyncio.get_running_loop()
    try:
        await loop.sock_sendall(sock, MAGIC + LEG + bytes([len(ticket)]) + ticket)
        return sock, await receive_address(sock)
    except OSError:
        sock.close()
        raise


@asynccontextmanager
async def both_legs(endpoint: str) -> AsyncIterator[tuple[socket.socket, socket.socket]]:
    one, seen = await leg(endpoint, is_caller=True)
    with closing(one):
        assert seen == sockets.endpoint_of(one.getsockname())
        other, _ = await leg(endpoint, is_caller=False)
        with closing(other):
            assert await receive_exactly(one, 1) == await receive_exactly(other, 1) == JOINED
            yield one, other


async def test_whoever_asks_is_told_where_it_comes_from(front: Front) -> None:
    endpoint = await front.listen("127.0.0.1", 0)
    address, port = await outside_address(endpoint)
    assert address == f"127.0.0.1:{port}"


@pytest.mark.usefixtures("way_of_moving")
async def test_a_relay_joins_two_legs_of_one_meeting(front: Front) -> None:
    relay = Relay(front, KEY.public_key)
    loop, data = asyncio.get_running_loop(), os.urandom(3_000_000)
    async with both_legs(await front.listen("127.0.0.1", 0)) as (one, other):
        sending = asyncio.create_task(loop.sock_sendall(one, data))
        assert await receive_exactly(other, len(data)) == data
        await sending
        await loop.sock_sendall(other, b"thanks")
        assert await receive_exactly(one, 6) == b"thanks"
        assert relay.carries.links == 1
        assert len(front.kept) == 2
        one.shutdown(socket.SHUT_WR)
        assert await loop.sock_recv(other, 1) == b"", "a leg ends with the other one"
        other.shutdown(socket.SHUT_WR)
        assert await loop.sock_recv(one, 1) == b""
        assert relay.carries.relayed_bytes == len(data) + 6, "all is counted before an end is told"


@pytest.mark.parametrize("wrong", ["stranger", "expired", "altered", "short", "side"])
def test_a_ticket_that_is_not_good_is_refused(wrong: str) -> None:
    key = new_key() if wrong == "stranger" else KEY
    data = bytearray(sign_ticket(key, Ticket(MEETING, True, CALLER, CALLEE), 1000.0))
    now_s = 1000.0 + (LIFETIME_S + 1 if wrong == "expired" else 0)
    if wrong == "altered":
        data[3] ^= 1
    if wrong == "side":
        data[16] = 7
    shown = bytes(data[:10] if wrong == "short" else data)
    with pytest.raises(NotAllowed, match="ticket"):
        check_ticket(KEY.public_key(), shown, now_s)


async def test_a_relay_hangs_up_on_who_has_no_ticket(front: Front) -> None:
    relay = Relay(front, KEY.public_key)
    endpoint = await front.listen("127.0.0.1", 0)
    with pytest.raises(OSError, match=r"ended after|reset"):
        await leg(endpoint, is_caller=True, key=new_key())
    assert relay.carries.links == 0


async def test_a_relay_gives_away_as_much_as_it_says(front: Front) -> None:
    limits = RelayLimits(link_bytes_per_s=400_000)
    Relay(front, KEY.public_key, limits)
    async with both_legs(await front.listen("127.0.0.1", 0)) as (one, other):
        began_s, data = time.monotonic(), bytes(200_000)
        sending = asyncio.create_task(asyncio.get_running_loop().sock_sendall(one, data))
        await receive_exactly(other, len(data))
        await sending
        # What comes in one piece passes in one piece: the last one is not waited for.
        assert time.monotonic() - began_s >= 0.5 * (len(data) - MAX_CHUNK_BYTES) / 400_000


async def test_what_is_neither_tls_nor_a_preamble_is_dropped(front: Front) -> None:
    endpoint = await front.listen("127.0.0.1", 0)
    for first in (b"GET / HTTP/1.1\r\n\r\n", b"SFT1X", b"\x16\x03\x01"):
        sock = await dial(endpoint)
        await asyncio.get_running_loop().sock_sendall(sock, first)
        with pytest.raises(OSError, match=r"ended after|reset"):
            await receive_exactly(sock, 1)
        sock.close()


async def test_tls_goes_to_grpc_whole(place: LocalPlace) -> None:
    front = Front()
    front.lead_to(place, tuple)
    taken: asyncio.Queue[bytes] = asyncio.Queue()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        taken.put_nowait(await reader.readexactly(5))
        writer.write(b"hello")
        await writer.drain()
        writer.close()

    inner = await asyncio.start_server(answer, sock=place.listen())
    sock = await dial(await front.listen("127.0.0.1", 0))
    await asyncio.get_running_loop().sock_sendall(sock, b"\x16tls!")
    assert await receive_exactly(sock, 5) == b"hello"
    assert await taken.get() == b"\x16tls!"
    sock.close()
    await front.close()
    inner.close()
