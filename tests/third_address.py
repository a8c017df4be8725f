"""A member that tries to have a third machine dialled, in hundreds of ways; a process of its own.

    python -m tests.third_address HOST_PREFIX

The coordinator is at HOST_PREFIX.1, as is an honest member, and the hostile one calls from
HOST_PREFIX.5. A listener takes connections to one port at every address of the machine, but that
of the hostile member, who may have itself dialled. In a network namespace with
`ip route add local default dev lo` every address is one of the machine. Prints a line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import math
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import grpc

from swarm_ft.base.clock import SystemClock
from swarm_ft.coordinator.meetings import Introductions
from swarm_ft.coordinator.relays import ConnectedRelay
from swarm_ft.identity.certificates import key_name
from swarm_ft.identity.keys import new_key
from swarm_ft.identity.roles import COORDINATOR_NAME, Role
from swarm_ft.proto import meeting_pb2
from swarm_ft.protocol.messages.meeting import RelayPlace
from swarm_ft.protocol.spec.addresses import is_socket_address
from swarm_ft.protocol.spec.version import PROTOCOL_VERSION
from swarm_ft.reach.relay import Relay
from swarm_ft.reach.sockets import CHOSEN, LEG, MAGIC, PAIR, PROBE, PROOF_BYTES, proof
from swarm_ft.reach.transport import FrontedTransport, HomeTransport
from swarm_ft.transport.allowance import Allowances, Rates
from swarm_ft.transport.credentials import Credentials, name_argument
from swarm_ft.transport.grpc_options import GrpcOptions
from swarm_ft.transport.grpc_transport import GrpcTransport
from swarm_ft.transport.metering import Meter
from swarm_ft.transport.methods import INTRODUCE, RELAY
from tests.members import Swarm, make_swarm

TIMEOUT_S = 60.0
WAYS_OF_ONE = 12
"""Attempts with one key: two members may have 16 meetings under way."""
SEEN_FIELD = b"\x1a"
"""Of `FromMember`: the address of a leg in a member's word, before version 8; length follows."""

PUBLIC = ("198.51.100.9", "203.0.113.9", "8.8.8.8", "100.63.255.255", "11.0.0.1", "192.169.0.1")
PRIVATE = ("10.0.0.1", "10.9.9.9", "172.16.0.1", "172.31.255.1", "192.168.0.1", "192.168.1.1")
SPECIAL = (
    *("100.64.0.1", "169.254.169.254", "127.0.0.1", "127.0.0.9", "127.255.255.254"),
    *("0.0.0.0", "0.0.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255"),
)
IPV6 = (
    *("::1", "::", "2001:db8::9", "2606:4700::1", "fd00::9", "fc00::1", "fe80::1", "fec0::1"),
    *("ff02::1", "::ffff:127.0.0.1", "::ffff:198.51.100.9", "::ffff:c633:6409", "::127.0.0.1"),
    *("64:ff9b::c633:6409", "64:ff9b:1::c633:6409", "2002:c633:6409::1", "2001:0:c633:6409::1"),
)
NAMES = (
    *("localhost", "localhost.localdomain", "third.example", "127.1", "127.0.1", "2130706433"),
    *("0x7f000001", "0x7f.0.0.1", "0177.0.0.1", "127.0.0.01", "198.51.100.009", "0"),
)


def third_endpoints(port: int, coordinator: str) -> list[str]:
    """Return a third machine's address, in all ways to write it."""
    hosts = [coordinator, *PUBLIC, *PRIVATE, *SPECIAL, *NAMES]
    return [f"{host}:{port}" for host in hosts] + [f"[{host}]:{port}" for host in IPV6]


def bound_at(host: str, port: int = 0) -> socket.socket:
    """A TCP socket at this address and a port that others may be bound to as well."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((host, port))
    except BaseException:
        sock.close()
        raise
    return sock


class Third:
    """Counts connections to its port at all addresses but one."""

    def __init__(self, but: str) -> None:
        self._but = but
        self._listener = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
        self._listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._listener.bind(("::", 0))
        self._listener.listen(128)
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        self.found: Counter[str] = Counter()

    async def count(self) -> None:
        """Take connections, until cancelled."""
        while True:
            sock, _ = await asyncio.get_running_loop().sock_accept(self._listener)
            host = sock.getsockname()[0].removeprefix("::ffff:")
            sock.close()
            if host != self._but:
                self.found[host] += 1


class Door:
    """A port of the hostile member's, which shows that an attempt got as far as dialling."""

    def __init__(self, host: str) -> None:
        self._sock = bound_at(host)
        self._sock.listen(64)
        self.endpoint = f"{host}:{self._sock.getsockname()[1]}"
        self._arrivals: dict[bytes, asyncio.Future[socket.socket]] = {}

    def awaited(self, shown: bytes) -> asyncio.Future[socket.socket]:
        """The connection that shows this proof."""
        return self._arrivals.setdefault(shown, asyncio.get_running_loop().create_future())

    async def take(self) -> None:
        """Take connections, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            sock, _ = await loop.sock_accept(self._sock)
            with suppress(OSError):
                preamble = await exactly(sock, len(MAGIC + PAIR) + PROOF_BYTES)
                arrival = self.awaited(preamble[-PROOF_BYTES:])
                if not arrival.done():
                    arrival.set_result(sock)


async def exactly(sock: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        part = await asyncio.get_running_loop().sock_recv(sock, num_bytes - len(data))
        if not part:
            raise ConnectionResetError
        data += part
    return data


@dataclass
class Call:
    """A conversation in bytes."""

    stream: Any

    async def send(self, message: bytes) -> None:
        await self.stream.write(message)

    async def receive(self, kind: str) -> Any:
        """The next message of this kind; None: the call has ended."""
        while True:
            try:
                data = await self.stream.read()
            except grpc.aio.AioRpcError:
                return None
            if data is grpc.aio.EOF:
                return None
            message = meeting_pb2.ToMember.FromString(data)
            if message.WhichOneof("body") == kind:
                return getattr(message, kind)


@dataclass
class World:
    """A coordinator, an honest member, and where others are."""

    swarm: Swarm
    endpoint: str
    introductions: Introductions
    victim: HomeTransport
    victim_name: str
    third: Third
    door: Door
    host: str
    proxy: str
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    refused: Counter[str] = field(default_factory=Counter)
    dialled: Counter[str] = field(default_factory=Counter)

    async def has_relays(self, number: int) -> None:
        """Wait until the coordinator knows so many relays."""
        async with self.changed, asyncio.timeout(TIMEOUT_S):
            await self.changed.wait_for(lambda: len(self.introductions.relays.present) == number)

    async def notify(self) -> None:
        """The relays have changed."""
        async with self.changed:
            self.changed.notify_all()

    @asynccontextmanager
    async def call(self, credentials: Credentials, path: str, at: str) -> AsyncIterator[Call]:
        options = [name_argument(COORDINATOR_NAME), ("grpc.use_local_subchannel_pool", 1)]
        channel = grpc.aio.secure_channel(f"dns:///{at}", credentials.for_channel(), options)
        try:
            yield Call(channel.stream_stream(path)())
        finally:
            await channel.close()


def reachable(*endpoints: str) -> bytes:
    reachable = meeting_pb2.Reachable(endpoints=endpoints, protocol_version=PROTOCOL_VERSION)
    return meeting_pb2.FromMember(reachable=reachable).SerializeToString()


def want(name: str) -> bytes:
    return meeting_pb2.FromMember(want=meeting_pb2.MeetingRequest(name=name)).SerializeToString()


def linked(number: bytes) -> bytes:
    linked = meeting_pb2.Linked(meeting=number, way=meeting_pb2.WAY_DIRECT, took_s=0.1)
    return meeting_pb2.FromMember(linked=linked).SerializeToString()


def forged_seen(number: bytes, address: str) -> bytes:
    """Encode the message of a member before version 8: field 3 with the meeting and the address."""
    encoded = address.encode()
    body = b"\n" + bytes([len(number)]) + number + b"\x12" + bytes([len(encoded)]) + encoded
    return SEEN_FIELD + bytes([len(body)]) + body


class Attack:
    """One attempt: a meeting of the hostile member and the honest one."""

    def __init__(self, world: World, credentials: Credentials, way: str) -> None:
        self.world, self.credentials, self.way = world, credentials, way
        self.name = key_name(credentials.certificate)

    async def announce(self, evil: str) -> None:
        """Announce it, and request a meeting."""
        await self._meet((self.world.door.endpoint, evil))

    async def announce_later(self, evil: str) -> None:
        """Announce it in a second message."""
        await self._meet((self.world.door.endpoint,), reachable(evil, self.world.door.endpoint))

    async def be_called(self, evil: str) -> None:
        """Announce it, and let the honest member request a meeting."""
        world = self.world
        async with world.call(self.credentials, INTRODUCE.path, world.proxy) as call:
            await call.send(reachable(evil, world.door.endpoint))
            if await call.receive("relays") is None:
                world.refused[self.way] += 1
                return
            asking = asyncio.ensure_future(world.victim.reach.link(self.name))
            meet = await call.receive("meet")
            await self._end(call, meet, is_caller=False)
            (await asking).sock.close()

    async def forge_seen(self, evil: str) -> None:
        """Send a message that only a relay may send."""
        await self._meet(
            (self.world.door.endpoint,), after=lambda number: forged_seen(number, evil)
        )

    async def leave_leg(self, evil: str) -> None:
        """Show the ticket from there, as an accomplice or an open proxy would."""
        await self._leg(evil, times=1)

    async def leave_legs(self, evil: str) -> None:
        """... again and again."""
        await self._leg(evil, times=5)

    async def alter_ticket(self, evil: str) -> None:
        """Show another meeting's, another side's or another member's ticket from there."""
        await self._leg(evil, times=4, altered=True)

    async def _leg(self, evil: str, times: int, *, altered: bool = False) -> None:
        world = self.world
        host, _, port = evil.rpartition(":")
        async with self._began((world.door.endpoint,)) as (call, meet):
            assert meet is not None
            legs = []
            for number in range(times):
                ticket = bytearray(meet.ticket)
                ticket[8 * number] ^= altered
                try:
                    sock = bound_at(host, int(port))
                except OSError:
                    world.refused[self.way] += 1
                    break
                legs.append(sock)
                with suppress(OSError):  # the same four numbers as the connection before
                    await shown(sock, meet.relay, bytes(ticket))
                    assert not altered, "the coordinator signed no such ticket"
            await self._punched(meet, partial_leg(world.host, meet))
            await self._end(call, meet, is_caller=True)
            for sock in legs:
                sock.close()

    async def _punched(self, meet: Any, leg: Callable[[], Coroutine[Any, Any, Door]]) -> None:
        """The honest member punches to the leg that may be passed on: it has read all before."""
        door = await leg()
        taking = asyncio.ensure_future(door.take())
        shown_by_victim = proof(bytes(meet.meeting), is_caller=False)
        async with asyncio.timeout(TIMEOUT_S):
            (await door.awaited(shown_by_victim)).close()
        taking.cancel()

    async def _meet(
        self,
        endpoints: tuple[str, ...],
        then: bytes = b"",
        after: Callable[[bytes], bytes] | None = None,
    ) -> None:
        async with self._began(endpoints, then) as (call, meet):
            if meet is None:
                self.world.refused[self.way] += 1
                return
            if after is not None:
                await call.send(after(bytes(meet.meeting)))
                assert await call.receive("nothing") is None, "until the call ends"
                self.world.refused[self.way] += 1
            await self._end(call, meet, is_caller=True)

    @asynccontextmanager
    async def _began(
        self, endpoints: tuple[str, ...], then: bytes = b""
    ) -> AsyncIterator[tuple[Call, Any]]:
        world = self.world
        async with world.call(self.credentials, INTRODUCE.path, world.proxy) as call:
            # gRPC reports a refusal to a sender only after all replies are read.
            asking = asyncio.ensure_future(self._ask(call, endpoints, then))
            meet = await call.receive("meet")
            await asking
            yield call, meet

    async def _ask(self, call: Call, endpoints: tuple[str, ...], then: bytes) -> None:
        await call.send(reachable(*endpoints))
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            if then:
                await call.send(then)
            await call.send(want(self.world.victim_name))

    async def _end(self, call: Call, meet: Any, *, is_caller: bool) -> None:
        """The honest member dials where it may; then this meeting has its stream."""
        number, loop = bytes(meet.meeting), asyncio.get_running_loop()
        async with asyncio.timeout(TIMEOUT_S):
            sock = await self.world.door.awaited(proof(number, is_caller=not is_caller))
        with suppress(OSError):
            mine = MAGIC + PAIR + proof(number, is_caller=is_caller)
            await loop.sock_sendall(sock, mine + (CHOSEN if is_caller else b""))
            if not is_caller:
                await exactly(sock, 1)
        sock.close()
        self.world.dialled[self.way] += 1
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await call.send(linked(number))


def partial_leg(host: str, meet: Any) -> Callable[[], Coroutine[Any, Any, Door]]:
    async def leave() -> Door:
        door = Door(host)
        sock = bound_at(host, int(door.endpoint.rpartition(":")[2]))
        await shown(sock, meet.relay, bytes(meet.ticket))
        return door

    return leave


async def shown(sock: socket.socket, relay: str, ticket: bytes) -> None:
    loop = asyncio.get_running_loop()
    host, _, port = relay.rpartition(":")
    async with asyncio.timeout(TIMEOUT_S):
        await loop.sock_connect(sock, (host, int(port)))
        await loop.sock_sendall(sock, MAGIC + LEG + bytes([len(ticket)]) + ticket)
        await exactly(sock, 1)


class LyingRelay:
    """A relay with a good key that reports legs where it likes."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._credentials = world.swarm.member(Role.RELAY)
        self.legs: asyncio.Queue[bytes] = asyncio.Queue()
        self.endpoint = ""

    async def listen(self, host: str) -> asyncio.Server:
        server = await asyncio.start_server(self._serve, host, 0)
        self.endpoint = f"{host}:{server.sockets[0].getsockname()[1]}"
        return server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            preamble = await reader.readexactly(len(MAGIC) + 1)
            if preamble == MAGIC + LEG:
                (length,) = await reader.readexactly(1)
                self.legs.put_nowait(await reader.readexactly(length))
            writer.write(bytes([14]) + b"198.51.100.1:5")
            await writer.drain()
            if preamble != MAGIC + PROBE:
                await reader.read()
        writer.close()

    async def report(self, evil: str) -> None:
        """Report a leg of the hostile member at an address of another one."""
        world = self.world
        async with world.call(self._credentials, RELAY.path, world.endpoint) as call:
            await call.send(
                meeting_pb2.FromRelay(
                    hello=meeting_pb2.RelayHello(
                        endpoint=self.endpoint,
                        probe_endpoint=self.endpoint,
                        protocol_version=PROTOCOL_VERSION,
                    )
                ).SerializeToString()
            )
            await call.stream.read()
            await call.send(
                meeting_pb2.FromRelay(carries=meeting_pb2.RelayCarries()).SerializeToString()
            )
            attack = Attack(world, world.swarm.member(), "report")
            await world.has_relays(1)
            async with attack._began((world.door.endpoint,)) as (own_call, meet):  # noqa: SLF001
                assert meet.relay == self.endpoint
                await self.legs.get()  # the honest member's
                await call.send(self._leg(meet, evil))
                if is_socket_address(evil):
                    await attack._punched(meet, lambda: self._good_leg(call, meet))  # noqa: SLF001
                else:
                    with suppress(grpc.aio.AioRpcError):
                        assert await call.stream.read() is grpc.aio.EOF
                    world.refused["report"] += 1
                await attack._end(own_call, meet, is_caller=True)  # noqa: SLF001
        await world.has_relays(0)

    async def _good_leg(self, call: Call, meet: Any) -> Door:
        door = Door(self.world.host)
        await call.send(self._leg(meet, door.endpoint))
        return door

    @staticmethod
    def _leg(meet: Any, address: str) -> bytes:
        leg = meeting_pb2.LegSeen(meeting=meet.meeting, is_caller=True, address=address)
        return meeting_pb2.FromRelay(leg_seen=leg).SerializeToString()


# ---- the world, and all attempts in it


@asynccontextmanager
async def proxy(host: str, coordinator: str) -> AsyncIterator[str]:
    """Run a proxy to the coordinator, which sees connections come from this host."""

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        coordinator_host, _, port = coordinator.rpartition(":")
        inner, outer = await asyncio.open_connection(
            coordinator_host, int(port), local_addr=(host, 0)
        )
        await asyncio.gather(pump(reader, outer), pump(inner, writer))

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(pass_on, host, 0)
    try:
        yield f"{host}:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


UNLIMITED = Rates(messages_per_s=math.inf, calls_per_s=math.inf)


@asynccontextmanager
async def world_at(prefix: str, *, has_relay: bool) -> AsyncIterator[World]:
    """A coordinator with its relay or without one, and an honest member."""
    own_host, third_host = f"{prefix}.1", f"{prefix}.5"
    swarm, key = make_swarm(), new_key()
    introductions = Introductions(lambda: key, SystemClock())
    # The subject here is where a connection leads, not how often: 300 ways exceed the rates.
    options, meter = GrpcOptions(credentials=swarm.coordinator()), Meter(Allowances(UNLIMITED))
    transport = FrontedTransport(GrpcTransport(options, meter))
    credentials = swarm.member()
    async with AsyncExitStack() as stack:
        server = await transport.serve(own_host, 0, introductions.handlers())
        stack.push_async_callback(server.stop)
        if has_relay:
            relay = Relay(transport.front, key.public_key)
            probe = await transport.front.listen(own_host, 0)
            place = RelayPlace(endpoint=server.endpoint, probe_endpoint=probe)
            introductions.relays.set_own_relay(
                lambda: ConnectedRelay(place=place, carries=relay.carries)
            )
            relay.on_leg(introductions.relays.own_leg)

        async def find() -> str:
            return server.endpoint

        grpc_there = GrpcTransport(GrpcOptions(credentials=credentials))
        victim = HomeTransport(grpc_there, find, SystemClock(), Random(1))
        serving = await victim.serve(own_host, 0, {})
        stack.push_async_callback(serving.stop)
        victim.start()
        await victim.wait_joined()
        third, door = Third(third_host), Door(third_host)
        for work in (third.count(), door.take()):
            stack.callback(asyncio.create_task(work).cancel)
        world = World(
            swarm=swarm,
            endpoint=server.endpoint,
            introductions=introductions,
            victim=victim,
            victim_name=key_name(credentials.certificate),
            third=third,
            door=door,
            host=third_host,
            proxy=await stack.enter_async_context(proxy(third_host, server.endpoint)),
        )
        introductions.relays.on_change(lambda: asyncio.ensure_future(world.notify()))
        yield world


async def attacked(prefix: str) -> dict[str, Any]:
    """All attempts, one after the other; what came of them."""
    ways, third = 0, Counter[str]()
    refused, dialled = Counter[str](), Counter[str]()
    for has_relay in (True, False):
        async with world_at(prefix, has_relay=has_relay) as world:
            endpoints = third_endpoints(world.third.port, f"{prefix}.1")
            if has_relay:
                attempts = list(own_relay(world, endpoints))
            else:
                lying = LyingRelay(world)
                server = await lying.listen(f"{prefix}.1")
                attempts = [partial(lying.report, endpoint) for endpoint in endpoints]
            for attempt in attempts:
                await attempt()
            if not has_relay:
                server.close()
            ways += len(attempts)
            # Earlier messages to the honest member are dialled before.
            await Attack(world, world.swarm.member(), "last").announce(world.door.endpoint)
            third += world.third.found
            refused += world.refused
            dialled += world.dialled
    return {"ways": ways, "third": third, "refused": refused, "dialled": dialled}


Attempt = Callable[[], Coroutine[Any, Any, None]]


def own_relay(world: World, endpoints: list[str]) -> Iterator[Attempt]:
    """Attack with the key of a peer or a client."""
    number = 0
    for endpoint in endpoints:
        for way in ("announce", "announce_later", "be_called", "forge_seen", *legs_from(endpoint)):
            if number % WAYS_OF_ONE == 0:
                role = Role.CLIENT if number % (2 * WAYS_OF_ONE) else Role.PEER
                credentials = world.swarm.member(role)
            number += 1
            yield partial(getattr(Attack(world, credentials, way), way), endpoint)


def legs_from(endpoint: str) -> tuple[str, ...]:
    """Legs leave from addresses that a socket may be bound to."""
    try:
        bound_at(endpoint.rpartition(":")[0], 0).close()
    except OSError:
        return ()
    return ("leave_leg", "leave_legs", "alter_ticket")


def main() -> None:
    """Run with the arguments of the command line."""
    sys.stdout.write(json.dumps(asyncio.run(attacked(sys.argv[1]))) + "\n")


if __name__ == "__main__":
    main()
