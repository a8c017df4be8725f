"""Relays of their own over loopback: members meet at the present one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace

import pytest

from swarm_ft.base.clock import SystemClock
from swarm_ft.coordinator.facts.connectivity import pair_of
from swarm_ft.coordinator.meetings import Introductions
from swarm_ft.errors import NotAllowed, Unavailable
from swarm_ft.identity.certificates import key_name
from swarm_ft.identity.keys import new_key
from swarm_ft.identity.roles import Role
from swarm_ft.protocol.messages.client import StatusRequest, SwarmStatus
from swarm_ft.protocol.messages.meeting import LegSeen, RelayHello, Way
from swarm_ft.protocol.spec.bounds import host_of
from swarm_ft.reach.front import Front
from swarm_ft.reach.relay import IDLE_S, CoordinatorStream, Relay, RelayLimits
from swarm_ft.reach.transport import FrontedTransport, HomeTransport
from swarm_ft.reach.tunnels import BETTER_AFTER_S
from swarm_ft.transport.base import MessageStream, Server, call
from swarm_ft.transport.credentials import Credentials
from swarm_ft.transport.grpc_options import GrpcOptions
from swarm_ft.transport.grpc_transport import GrpcTransport
from swarm_ft.transport.methods import STATUS
from tests.members import make_swarm

SWARM = make_swarm()
TIMEOUT_S = 20.0


def grpc_of(credentials: Credentials) -> GrpcTransport:
    return GrpcTransport(GrpcOptions(credentials=credentials))


@dataclass
class Hub:
    """A coordinator without a relay of its own, which can stop and start again."""

    endpoint: str = ""
    introductions: Introductions = field(init=False)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    server: Server | None = None

    async def start(self) -> None:
        key = new_key()
        self.introductions = Introductions(lambda: key, SystemClock())
        self.introductions.relays.on_change(lambda: asyncio.ensure_future(self._report()))
        transport = FrontedTransport(grpc_of(SWARM.coordinator()))
        port = int(self.endpoint.rpartition(":")[2] or 0)
        self.server = await transport.serve("127.0.0.1", port, self.introductions.handlers())
        self.endpoint = self.server.endpoint

    async def stop(self) -> None:
        assert self.server is not None
        await self.server.stop()

    async def find(self) -> str:
        return self.endpoint

    async def has_relays(self, number: int) -> None:
        async with self.changed, asyncio.timeout(TIMEOUT_S):
            await self.changed.wait_for(lambda: len(self.introductions.relays.present) == number)

    async def _report(self) -> None:
        async with self.changed:
            self.changed.notify_all()


@pytest.fixture
async def hub() -> AsyncIterator[Hub]:
    hub = Hub()
    await hub.start()
    yield hub
    await hub.stop()


@asynccontextmanager
async def varying_router() -> AsyncIterator[str]:
    """Simulate a router that maps each destination to another port, at a relay's second port."""

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(bytes([11]) + b"192.0.2.7:9")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


@dataclass
class Process:
    """A relay with the parts of a relay process."""

    relay: Relay
    stack: AsyncExitStack

    def carries_any(self) -> bool:
        return self.relay.carries.relayed_bytes > 0

    async def kill(self) -> None:
        await self.stack.aclose()


async def serve(hub: Hub, limits: RelayLimits | None = None) -> Process:
    stack, front = AsyncExitStack(), Front()
    attendance = CoordinatorStream(grpc_of(SWARM.member(Role.RELAY)), hub.find, Random(2))
    relay = Relay(front, attendance.key, limits, attendance.unix_s)
    with pytest.raises(Unavailable, match="no coordinator"):
        attendance.key()
    stack.push_async_callback(front.close)
    endpoint = await front.listen("127.0.0.1", 0)
    probe = await stack.enter_async_context(varying_router())
    running = asyncio.create_task(
        attendance.run(relay, RelayHello(endpoint=endpoint, probe_endpoint=probe))
    )
    stack.push_async_callback(asyncio.wait, [running])
    stack.callback(running.cancel)
    assert await attendance.welcomed == endpoint
    return Process(relay, stack)


@dataclass
class Member:
    name: str
    endpoint: str
    transport: HomeTransport

    async def request(self, name: str) -> None:
        channel = self.transport.connect("", name)
        try:
            await call(channel, STATUS, StatusRequest(), TIMEOUT_S)
        finally:
            await channel.close()


@asynccontextmanager
async def member(
    hub: Hub, better_after_s: float = BETTER_AFTER_S, release: asyncio.Event | None = None
) -> AsyncIterator[Member]:
    async def status(stream: MessageStream[SwarmStatus, StatusRequest]) -> None:
        await stream.receive()
        if release is not None:
            await release.wait()
        await stream.send(SwarmStatus(members=(), runs=()))

    credentials = SWARM.member(Role.PEER)
    grpc, clock = grpc_of(credentials), SystemClock()
    transport = HomeTransport(grpc, hub.find, clock, Random(1), better_after_s=better_after_s)
    server = await transport.serve("127.0.0.1", 0, {STATUS: status})
    transport.start()
    try:
        await transport.wait_joined()
        yield Member(key_name(credentials.certificate), server.endpoint, transport)
    finally:
        await server.stop()


async def test_when_a_relay_dies_others_are_met_at_another_one(hub: Hub) -> None:
    async with AsyncExitStack() as stack:
        one, other = [await serve(hub) for _ in range(2)]
        await hub.has_relays(2)
        caller, callee = [await stack.enter_async_context(member(hub)) for _ in range(2)]
        await caller.request(callee.name)
        (way,) = hub.introductions.meetings.ways.values()
        assert way is Way.RELAYED
        one, other = sorted((one, other), key=Process.carries_any, reverse=True)
        assert [one.carries_any(), other.carries_any()] == [True, False]
        await one.kill()
        await hub.has_relays(1)
        await caller.request(callee.name)
        assert other.carries_any()
        await other.kill()


async def test_a_quiet_call_keeps_its_link(hub: Hub) -> None:
    """gRPC probes after 3 s of silence, so a tenth of a relay's limit is enough."""
    idle_s = IDLE_S / 10
    async with AsyncExitStack() as stack:
        process = await serve(hub, RelayLimits(idle_s=idle_s))
        await hub.has_relays(1)
        release = asyncio.Event()
        caller, callee = [
            await stack.enter_async_context(member(hub, release=release)) for _ in range(2)
        ]
        asking = asyncio.create_task(caller.request(callee.name))
        await until(lambda: process.relay.carries.links == 1)
        await asyncio.sleep(2.2 * idle_s)  # silence is what is measured
        assert process.relay.carries.links == 1
        assert not asking.done()
        release.set()
        await asking
        await process.kill()


async def test_a_pair_leaves_its_relay_for_a_better_way(hub: Hub) -> None:
    async with AsyncExitStack() as stack:
        process = await serve(hub)
        await hub.has_relays(1)
        callee = await stack.enter_async_context(member(hub))
        caller = await stack.enter_async_context(member(hub, better_after_s=0.02))
        ways, relay = hub.introductions.meetings.ways, process.relay
        channel = caller.transport.connect("", callee.name)
        stack.push_async_callback(channel.close)
        await call(channel, STATUS, StatusRequest(), TIMEOUT_S)
        assert ways == {pair_of(caller.name, callee.name): Way.RELAYED}
        callee.transport.add_endpoint(callee.endpoint)  # as if its router mapped a port by now
        await until(lambda: Way.DIRECT in ways.values())
        assert relay.carries.links, "what is in use stays"

        def moved() -> bool:
            caller.transport.upgrade_links()
            return not relay.carries.links

        await until(moved)
        before = relay.carries.relayed_bytes
        await call(channel, STATUS, StatusRequest(), TIMEOUT_S)
        assert relay.carries.relayed_bytes == before
        await process.kill()


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110 - nobody is told of it
        await asyncio.sleep(0.01)


async def test_a_coordinator_that_comes_back_has_its_relays(hub: Hub) -> None:
    async with AsyncExitStack() as stack:
        process = await serve(hub)
        await hub.has_relays(1)
        await hub.stop()
        await hub.start()  # with another key for its tickets
        await hub.has_relays(1)
        caller, callee = [await stack.enter_async_context(member(hub)) for _ in range(2)]
        await caller.request(callee.name)
        assert process.carries_any()
        await process.kill()


async def test_a_relay_reports_legs_and_the_coordinator_sends_the_other_side_there(
    hub: Hub,
) -> None:
    async with AsyncExitStack() as stack:
        process = await serve(hub)
        await hub.has_relays(1)
        legs: list[tuple[str, LegSeen]] = []
        hub.introductions.relays.on_leg(lambda relay, leg: legs.append((relay, leg)))
        caller, callee = [await stack.enter_async_context(member(hub)) for _ in range(2)]
        await caller.request(callee.name)
        (place,) = hub.introductions.relays.present
        assert {relay for relay, _ in legs} == {place.place.endpoint}
        assert {leg.is_caller for _, leg in legs} == {True, False}
        assert {host_of(leg.address) for _, leg in legs} == {"127.0.0.1"}
        await process.kill()


async def test_a_relay_that_is_full_says_so(hub: Hub) -> None:
    process = await serve(hub, RelayLimits(links=0))
    await hub.has_relays(1)
    (relay,) = hub.introductions.relays.present
    assert relay.carries.is_full
    await process.kill()


async def test_who_has_no_relays_invitation_is_told_so(hub: Hub) -> None:
    attendance = CoordinatorStream(grpc_of(SWARM.member(Role.PEER)), hub.find, Random(2))
    hello = RelayHello(endpoint="127.0.0.1:1", probe_endpoint="127.0.0.1:2")
    with pytest.raises(NotAllowed, match="expected a call by a relay"):
        await attendance.run(Relay(Front(), attendance.key), hello)


async def test_a_relay_goes_by_the_coordinators_clock(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay_clock = SimpleNamespace(time=lambda: 1e6)
    monkeypatch.setattr("swarm_ft.coordinator.relays.time", relay_clock)
    attendance = CoordinatorStream(grpc_of(SWARM.member(Role.RELAY)), hub.find, Random(2))
    hello = RelayHello(endpoint="127.0.0.1:1", probe_endpoint="127.0.0.1:2")
    running = asyncio.create_task(attendance.run(Relay(Front(), attendance.key), hello))
    await attendance.welcomed
    assert 1e6 <= attendance.unix_s() < 2e6
    running.cancel()
    await asyncio.wait([running])
