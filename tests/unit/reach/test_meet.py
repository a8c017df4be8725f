"""Members that meet, over loopback: real gRPC and TLS within streams of every way."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from random import Random

import pytest

from swarm_ft.base.clock import SystemClock
from swarm_ft.coordinator.facts.connectivity import pair_of
from swarm_ft.coordinator.meetings import Introductions
from swarm_ft.coordinator.relays import ConnectedRelay
from swarm_ft.identity.certificates import key_name
from swarm_ft.identity.keys import new_key
from swarm_ft.identity.roles import Role
from swarm_ft.protocol.messages.client import StatusRequest, SwarmStatus
from swarm_ft.protocol.messages.meeting import (
    FromMember,
    Meet,
    Punch,
    RelayPlace,
    Relays,
    ToMember,
    Way,
)
from swarm_ft.reach.meet import MAX_MEETINGS_WITH, MAX_PUNCHES
from swarm_ft.reach.relay import Relay
from swarm_ft.reach.shaping import Shape
from swarm_ft.reach.sockets import LEG, MAGIC
from swarm_ft.reach.transport import FrontedTransport, HomeTransport
from swarm_ft.transport.base import MessageStream, call
from swarm_ft.transport.credentials import Credentials
from swarm_ft.transport.grpc_options import GrpcOptions
from swarm_ft.transport.grpc_transport import GrpcTransport
from swarm_ft.transport.methods import INTRODUCE, STATUS
from tests.members import make_swarm

SWARM = make_swarm()
TIMEOUT_S = 20.0
HANDSHAKE_BYTES = 500
"""Bytes of a TLS handshake with both sides' certificates, each way at least."""


@dataclass
class Hub:
    """The coordinator, with its relay."""

    endpoint: str
    introductions: Introductions
    relay: Relay


@dataclass
class Member:
    name: str
    transport: HomeTransport
    callers: list[tuple[str, bool]]
    shape: Shape

    async def request(self, name: str) -> bool:
        """Call another member; return whether the link goes over the relay."""
        channel = self.transport.connect("", name)
        try:
            await call(channel, STATUS, StatusRequest(), TIMEOUT_S)
            return self.transport.is_relayed(name)
        finally:
            await channel.close()


def grpc_of(credentials: Credentials) -> GrpcTransport:
    return GrpcTransport(GrpcOptions(credentials=credentials))


@pytest.fixture(params=["linux", "macos"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS has no `splice`."""
    if request.param == "macos":
        monkeypatch.delattr(os, "splice")


@pytest.fixture
async def hub() -> AsyncIterator[Hub]:
    key = new_key()
    introductions = Introductions(lambda: key, SystemClock())
    transport = FrontedTransport(grpc_of(SWARM.coordinator()))
    relay = Relay(transport.front, key.public_key)
    server = await transport.serve("127.0.0.1", 0, introductions.handlers())
    probe = await transport.front.listen("127.0.0.1", 0)
    place = RelayPlace(endpoint=server.endpoint, probe_endpoint=probe)
    introductions.relays.set_own_relay(lambda: ConnectedRelay(place=place, carries=relay.carries))
    relay.on_leg(introductions.relays.own_leg)
    yield Hub(server.endpoint, introductions, relay)
    await server.stop()


@asynccontextmanager
async def member(hub: Hub, role: Role, *, is_open: bool) -> AsyncIterator[Member]:
    credentials = SWARM.member(role)
    callers: list[tuple[str, bool]] = []

    async def status(stream: MessageStream[SwarmStatus, StatusRequest]) -> None:
        await stream.receive()
        assert stream.caller is not None
        callers.append((stream.caller.name, transport.is_relayed(stream.caller.name)))
        await stream.send(SwarmStatus(members=(), runs=()))

    async def find() -> str:
        return hub.endpoint

    shape = Shape()
    transport = HomeTransport(grpc_of(credentials), find, SystemClock(), Random(1), shape=shape)
    server = await transport.serve("127.0.0.1", 0, {STATUS: status})
    transport.start((server.endpoint,) if is_open else ())
    try:
        await transport.wait_joined()
        yield Member(key_name(credentials.certificate), transport, callers, shape)
    finally:
        await server.stop()


@pytest.mark.usefixtures("system")
@pytest.mark.parametrize(
    ("is_open", "ways"),
    [
        ((False, True), {Way.DIRECT}),
        ((True, False), {Way.REVERSE}),
        # Without a delay two calls seldom cross on their way, and each is refused.
        ((False, False), {Way.PUNCHED, Way.RELAYED}),
    ],
)
async def test_two_members_meet_the_way_there_is(
    hub: Hub, is_open: tuple[bool, bool], ways: set[Way]
) -> None:
    async with AsyncExitStack() as stack:
        # A client: two peers would have tried to reach each other already.
        caller, callee = [
            await stack.enter_async_context(member(hub, role, is_open=one))
            for role, one in zip((Role.CLIENT, Role.PEER), is_open, strict=True)
        ]
        is_relayed = await caller.request(callee.name)
        assert callee.callers == [(caller.name, is_relayed)]
        (way,) = hub.introductions.meetings.ways.values()
        assert way in ways
        assert (hub.relay.carries.relayed_bytes > 0) == (way is Way.RELAYED) == is_relayed
        assert not caller.transport.is_relayed("somebody else")
        for one in (caller, callee):  # whichever way, all of it passes what caps a link
            assert min(one.shape.up.passed_bytes, one.shape.down.passed_bytes) > HANDSHAKE_BYTES


async def test_two_peers_that_come_try_each_other_and_nobody_asked(hub: Hub) -> None:
    meetings = hub.introductions.meetings
    async with (
        member(hub, Role.PEER, is_open=False) as one,
        member(hub, Role.PEER, is_open=False) as other,
    ):
        async with asyncio.timeout(TIMEOUT_S):
            while not meetings.ways:  # noqa: ASYNC110 - introductions tell nobody
                await asyncio.sleep(0.01)
        assert list(meetings.known().met) == [pair_of(one.name, other.name)]
        assert not one.callers
        assert not other.callers
        await one.request(other.name)
        assert [name for name, _ in other.callers] == [one.name]


class Listener:
    """Counts connections, and leaves them unanswered."""

    def __init__(self) -> None:
        self.server: asyncio.Server
        self.endpoint = ""
        self.arrivals: asyncio.Queue[None] = asyncio.Queue()

    async def listen(self, stack: AsyncExitStack) -> Listener:
        async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.arrivals.put_nowait(None)
            await reader.read()
            writer.close()

        self.server = await asyncio.start_server(take, "127.0.0.1", 0)
        stack.callback(self.server.close)
        self.endpoint = f"127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self


@asynccontextmanager
async def introduced(*messages: ToMember) -> AsyncIterator[None]:
    """Yield with a member whose coordinator sends these messages in this order."""

    async def introduce(stream: MessageStream[ToMember, FromMember]) -> None:
        await stream.receive()
        for message in (Relays(), *messages):
            await stream.send(message)
        await stream.receive()

    transport = GrpcTransport(GrpcOptions(credentials=SWARM.coordinator()))
    server = await transport.serve("127.0.0.1", 0, {INTRODUCE: introduce})

    async def find() -> str:
        return server.endpoint

    own = HomeTransport(grpc_of(SWARM.member(Role.PEER)), find, SystemClock(), Random(1))
    serving = await own.serve("127.0.0.1", 0, {})
    own.start()
    try:
        yield
    finally:
        await serving.stop()
        await server.stop()


def meeting(number: int, name: str, *endpoints: str) -> Meet:
    return Meet(meeting=number.to_bytes(16, "big"), name=name, is_caller=False, endpoints=endpoints)


async def test_one_member_has_another_dial_so_often_at_once_and_no_more() -> None:
    async with AsyncExitStack() as stack:
        crowd, last = [await Listener().listen(stack) for _ in range(2)]
        flood = [meeting(number, "greedy", crowd.endpoint) for number in range(40)]
        async with introduced(*flood, meeting(99, "another", last.endpoint)):
            async with asyncio.timeout(TIMEOUT_S):
                await last.arrivals.get()
            assert crowd.arrivals.qsize() == MAX_MEETINGS_WITH


async def test_a_meeting_is_dialled_once_however_often_it_is_told() -> None:
    async with AsyncExitStack() as stack:
        crowd, last = [await Listener().listen(stack) for _ in range(2)]
        again = [meeting(7, f"peer-{number}", crowd.endpoint) for number in range(40)]
        punches = [Punch(meeting=again[0].meeting, address=crowd.endpoint)] * 40
        async with introduced(*again, *punches, meeting(99, "another", last.endpoint)):
            async with asyncio.timeout(TIMEOUT_S):
                await last.arrivals.get()
            assert crowd.arrivals.qsize() == 1


async def test_punches_at_once_are_bounded_and_one_a_meeting() -> None:
    async with AsyncExitStack() as stack:
        crowd, last = [await Listener().listen(stack) for _ in range(2)]
        hub = await stack.enter_async_context(answering_relay())
        messages: list[ToMember] = []
        for number in range(2 * MAX_PUNCHES):
            meet = replace(meeting(number, f"peer-{number}"), may_punch=True, relay=hub)
            punch = Punch(meeting=meet.meeting, address=crowd.endpoint)
            messages += [meet, punch, punch]
        async with introduced(*messages):
            for _ in range(MAX_PUNCHES):
                async with asyncio.timeout(TIMEOUT_S):
                    await crowd.arrivals.get()
            async with introduced(meeting(99, "another", last.endpoint)):
                async with asyncio.timeout(TIMEOUT_S):
                    await last.arrivals.get()
            assert crowd.arrivals.empty()


@asynccontextmanager
async def answering_relay() -> AsyncIterator[str]:
    """Run a relay that answers each leg with an address, and joins none."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(MAGIC + LEG) + 1)
        writer.write(bytes([11]) + b"192.0.2.7:9")
        await writer.drain()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
