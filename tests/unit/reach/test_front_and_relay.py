"""The front port and a relay behind it, over loopback."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from functools import partial
from itertools import count
from typing import Any

import pytest

from swarm_ft.errors import NotAllowed
from swarm_ft.identity.keys import new_key
from swarm_ft.identity.tickets import LIFETIME_S, Ticket, check_ticket, member_hash, sign_ticket
from swarm_ft.protocol.messages.meeting import LegSeen
from swarm_ft.reach import sockets
from swarm_ft.reach.front import BACKS_PER_S, Front
from swarm_ft.reach.relay import (
    IDLE_S,
    MAX_MEMBER_LINKS,
    MEMBER_LEGS,
    MEMBER_LINKS,
    Relay,
    RelayLimits,
)
from swarm_ft.reach.shaping import MAX_CHUNK_BYTES
from swarm_ft.reach.sockets import (
    JOINED,
    LEG,
    MAGIC,
    Joint,
    dial,
    is_dialled_back,
    outside_address,
    receive_address,
    receive_exactly,
)
from swarm_ft.transport.local_places import LocalPlace, LocalPlaces

MEETING = bytes(range(16))
CALLER, CALLEE = (member_hash(name, b"secret") for name in ("caller", "callee"))
KEY = new_key()
TIMEOUT_S = 20.0


@pytest.fixture
async def front() -> AsyncIterator[Front]:
    front = Front()
    yield front
    await front.close()


@pytest.fixture
def place() -> Iterator[LocalPlace]:
    """Place of gRPC; the test owns its connections."""
    places = LocalPlaces()
    yield places.new()
    places.close()


async def leg(
    endpoint: str,
    *,
    is_caller: bool,
    key: object = KEY,
    meeting: bytes = MEETING,
    caller: bytes = CALLER,
) -> tuple[socket.socket, str]:
    assert isinstance(key, type(KEY))
    ticket = sign_ticket(key, Ticket(meeting, is_caller, caller, CALLEE), time.time())
    sock = await dial(endpoint)
    loop = asyncio.get_running_loop()
    try:
        await loop.sock_sendall(sock, MAGIC + LEG + bytes([len(ticket)]) + ticket)
        return sock, await receive_address(sock)
    except OSError:
        sock.close()
        raise


Link = tuple[socket.socket, socket.socket]


class Links:
    """Makes links over a relay, each in a meeting of its own, and closes their ends."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._numbers = count()
        self._ends: list[socket.socket] = []

    async def leg(self, caller: str, number: int, *, is_caller: bool) -> socket.socket:
        found, _ = await leg(
            self._endpoint,
            is_caller=is_caller,
            meeting=number.to_bytes(16, "big"),
            caller=member_hash(caller, b"secret"),
        )
        self._ends.append(found)
        return found

    async def add(self, caller: str) -> Link:
        number = next(self._numbers)
        one = await self.leg(caller, number, is_caller=True)
        other = await self.leg(caller, number, is_caller=False)
        for sock in (one, other):
            async with asyncio.timeout(TIMEOUT_S):
                assert await receive_exactly(sock, 1) == JOINED
        return one, other

    async def wait(self, caller: str) -> socket.socket:
        """A single leg."""
        return await self.leg(caller, next(self._numbers), is_caller=True)

    def close(self) -> None:
        for sock in self._ends:
            sock.close()


@pytest.fixture
async def links(front: Front) -> AsyncIterator[Links]:
    links = Links(await front.listen("127.0.0.1", 0))
    yield links
    links.close()


async def ended(sock: socket.socket) -> bool:
    """Wait until the other side has closed."""
    async with asyncio.timeout(TIMEOUT_S):
        try:
            return await asyncio.get_running_loop().sock_recv(sock, 1) == b""
        except ConnectionResetError:
            return True


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not is_so():  # noqa: ASYNC110 - a relay notifies nobody
            await asyncio.sleep(0.01)


async def passes(link: Link) -> bool:
    one, other = link
    await asyncio.get_running_loop().sock_sendall(one, b"x")
    async with asyncio.timeout(TIMEOUT_S):
        return await receive_exactly(other, 1) == b"x"


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
        assert len(front.protected) == 2
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


async def test_a_member_has_its_share_of_a_relay_and_borrows_what_is_free(
    front: Front, links: Links
) -> None:
    relay = Relay(front, KEY.public_key, RelayLimits(links=2 * MEMBER_LINKS + 4))
    own = [await links.add("greedy") for _ in range(MEMBER_LINKS + 2)]
    assert relay.carries.links == MEMBER_LINKS + 2, "half of the relay was free"
    with pytest.raises(OSError, match=r"ended after|reset"):
        await links.wait("greedy")
    own[0][0].close()
    assert await ended(own[0][1])
    own[1][0].close()
    assert await ended(own[1][1])
    own[0][1].close()
    own[1][1].close()
    await until(lambda: relay.carries.links == MEMBER_LINKS)
    # Being called by another member does not count.
    assert await passes(await links.add("another"))
    assert all([await passes(link) for link in own[2:]])


async def test_no_member_borrows_without_end(front: Front, links: Links) -> None:
    relay = Relay(front, KEY.public_key, RelayLimits(links=1000))
    for _ in range(MAX_MEMBER_LINKS):
        await links.add("greedy")
    with pytest.raises(OSError, match=r"ended after|reset"):
        await links.wait("greedy")
    assert relay.carries.links == MAX_MEMBER_LINKS


async def test_in_a_full_relay_the_idlest_link_of_who_has_most_makes_room(
    front: Front, links: Links
) -> None:
    relay = Relay(front, KEY.public_key, RelayLimits(links=6))
    crowd = [await links.add("greedy") for _ in range(4)]
    modest = [await links.add("modest") for _ in range(2)]
    assert relay.carries.is_full
    for number in (0, 2, 3):
        assert await passes(crowd[number])
    new = await links.add("new")
    assert await ended(crowd[1][0])
    assert await ended(crowd[1][1])
    assert all([await passes(link) for link in (new, crowd[0], crowd[2], crowd[3], *modest)])
    await until(lambda: relay.carries.links == 6)
    # With three, two and one links, no member takes a link from another that takes it back.
    with pytest.raises(OSError, match=r"ended after|reset"):
        await links.wait("modest")
    assert await passes(await links.add("new"))


async def test_legs_that_wait_are_counted_by_member(front: Front, links: Links) -> None:
    Relay(front, KEY.public_key)
    for _ in range(MEMBER_LEGS):
        await links.wait("greedy")
    with pytest.raises(OSError, match=r"ended after|reset"):
        await links.wait("greedy")
    await links.wait("another")


async def test_a_link_without_a_byte_is_closed_and_one_in_use_is_not(
    front: Front, links: Links, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_late = False

    def idle_s(joint: Joint) -> float:
        return IDLE_S if is_late and not joint.moved_bytes else 0.0

    monkeypatch.setattr(Joint, "idle_s", property(idle_s))
    monkeypatch.setattr(asyncio, "wait", partial(wait_briefly, asyncio.wait))
    relay = Relay(front, KEY.public_key)
    idle, used = await links.add("a"), await links.add("a")
    assert await passes(used)
    is_late = True
    assert await ended(idle[0])
    assert await ended(idle[1])
    assert await passes(used)
    await until(lambda: relay.carries.links == 1)


async def wait_briefly(wait: Any, tasks: Any, *, timeout: float) -> Any:
    """Shorten a relay's minute."""
    assert 0 < timeout <= IDLE_S
    return await wait(tasks, timeout=0.01)


def wait_counted(joint: Joint, since_s: float) -> None:
    """Wait until a joint has counted a byte that passed; its own thread does so afterwards."""
    while joint.idle_s > time.monotonic() - since_s:
        time.sleep(0)


async def test_a_joint_is_idle_since_its_last_byte() -> None:
    one, other = socket.socketpair()
    near, far = socket.socketpair()
    before_s = time.monotonic()
    joint = Joint(one, near)
    for sender, receiver in ((other, far), (far, other)):
        wait_counted(joint, before_s)
        before_s = time.monotonic()
        sender.sendall(b"x")
        assert receiver.recv(1) == b"x"
    other.close()
    far.close()
    await joint.wait()


async def test_both_legs_of_a_link_are_connections_of_their_address() -> None:
    narrow = Front(per_address=4)
    Relay(narrow, KEY.public_key)
    links = Links(await narrow.listen("127.0.0.1", 0))
    first = [await links.add("a") for _ in range(2)]
    with pytest.raises(OSError, match=r"ended after|reset"):
        await links.wait("a")
    assert all([await passes(link) for link in first])
    links.close()
    await narrow.close()


async def test_a_relay_reports_each_leg_with_the_address_of_its_socket(front: Front) -> None:
    relay, reported = Relay(front, KEY.public_key), list[LegSeen]()
    relay.on_leg(reported.append)
    async with both_legs(await front.listen("127.0.0.1", 0)) as legs:
        assert reported == [
            LegSeen(meeting=MEETING, is_caller=is_caller, address=sockets.endpoint_of(address))
            for is_caller, address in zip((True, False), map(name_of_socket, legs), strict=True)
        ]


def name_of_socket(sock: socket.socket) -> tuple[str, int]:
    host, port = sock.getsockname()
    return str(host), int(port)


async def test_a_front_dials_back_where_its_process_is_announced(front: Front) -> None:
    endpoint = await front.listen("127.0.0.1", 0)
    port = int(endpoint.rpartition(":")[2])
    with pytest.raises(OSError, match=r"ended after|reset"):
        await is_dialled_back(endpoint, port)
    for host, answer in (
        ("192.0.2.1", None),
        ("192.168.1.1", None),
        ("swarm.example", None),
        ("127.0.0.1", True),
    ):
        other = Front()
        other.dial_back_from(host)
        listener = await other.listen("127.0.0.1", 0)
        assert await is_dialled_back(listener, port) is answer, host
        await other.close()


async def test_a_front_dials_an_address_back_once_a_second(front: Front) -> None:
    front.dial_back_from("127.0.0.1")
    endpoint = await front.listen("127.0.0.1", 0)
    port, began_s = int(endpoint.rpartition(":")[2]), time.monotonic()
    answers = await asyncio.gather(*(is_dialled_back(endpoint, port) for _ in range(3)))
    assert answers == [True] * 3
    assert time.monotonic() - began_s >= 2 / BACKS_PER_S


async def test_a_relay_gives_away_as_much_as_it_says(front: Front) -> None:
    limits = RelayLimits(link_bytes_per_s=400_000)
    Relay(front, KEY.public_key, limits)
    async with both_legs(await front.listen("127.0.0.1", 0)) as (one, other):
        began_s, data = time.monotonic(), bytes(200_000)
        sending = asyncio.create_task(asyncio.get_running_loop().sock_sendall(one, data))
        await receive_exactly(other, len(data))
        await sending
        # One piece passes in one piece; the joint does not wait for the next.
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
    front.pass_tls_to(place, tuple)
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
