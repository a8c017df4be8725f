"""A revoked key loses its open calls, at the coordinator and at peers: real gRPC and TLS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from swarm_ft.base.clock import SystemClock
from swarm_ft.coordinator import enrolment as enrolment_module
from swarm_ft.coordinator.enrolment import Enrolment
from swarm_ft.coordinator.journal.journal import Journal
from swarm_ft.coordinator.journal.registry import Registry
from swarm_ft.coordinator.meetings import Introductions
from swarm_ft.coordinator.service import CoordinatorService
from swarm_ft.errors import NotAllowed, SwarmError, Unavailable
from swarm_ft.identity.authority import Authority
from swarm_ft.identity.certificates import LIFETIME_S
from swarm_ft.identity.keys import new_key
from swarm_ft.identity.roles import COORDINATOR_NAME, Role
from swarm_ft.ids import PeerId, RunId, SampleId
from swarm_ft.net.enrol import Membership, enrol, renew_enrolment
from swarm_ft.peer.node import PeerNode, PeerOptions
from swarm_ft.protocol.messages.client import (
    SampleTokens,
    StatusRequest,
    SubmitHeader,
    WatchRequest,
)
from swarm_ft.protocol.messages.control import PeerHello
from swarm_ft.protocol.messages.events import EventsRequest, SwarmEvents
from swarm_ft.protocol.messages.meeting import Reachable, RelayHello
from swarm_ft.transport.base import Handler, MessageStream, Method, call
from swarm_ft.transport.grpc_options import GrpcOptions
from swarm_ft.transport.grpc_transport import GrpcServer, GrpcTransport
from swarm_ft.transport.methods import (
    EVENTS,
    FETCH_CHUNKS,
    GENERATE,
    INTRODUCE,
    JOIN,
    LINK,
    RELAY,
    STATUS,
    SUBMIT,
    WATCH,
)
from tests.doubles.directory import Board, StaticDirectory
from tests.local_swarm import cpu_engine
from tests.specs import run_spec

DEADLINE_S = 30.0
Stream = MessageStream[Any, Any]


@dataclass
class Swarm:
    """A coordinator with keys, and members that a test drives."""

    authority: Authority
    registry: Registry
    enrolment: Enrolment
    directory: StaticDirectory
    endpoint: str
    stack: AsyncExitStack
    keys: dict[str, Any] = field(default_factory=dict)

    async def member(self, role: Role) -> Membership:
        until = datetime.now(UTC) + timedelta(days=1)
        where = (self.endpoint,)
        invite = self.registry.invite(self.authority.fingerprint, where, role, 1, until)
        await self.enrolment.refresh()
        key = new_key()
        made = await enrol(invite, key)
        self.keys[made.name] = key
        return made

    def open(
        self, membership: Membership, method: Method[Any, Any], endpoint: str = "", name: str = ""
    ) -> Stream:
        """A call over a connection of its own."""
        transport = GrpcTransport(GrpcOptions(credentials=membership.credentials))
        channel = transport.connect(endpoint or self.endpoint, name or COORDINATOR_NAME)
        self.stack.push_async_callback(channel.close)
        return channel.open(method)

    async def revoke(self, *members: Membership) -> None:
        for member in members:
            self.registry.revoke(member.name)
        await self.enrolment.refresh()

    async def peer(self, handlers: dict[Method[Any, Any], Handler] | None = None) -> Peer:
        """A peer that has joined, and serves."""
        member = await self.member(Role.PEER)
        transport = GrpcTransport(GrpcOptions(credentials=member.credentials))
        options = PeerOptions(
            peer_id=PeerId(member.name), layers=None, memory_bytes=1 << 30, shard_dir=Path()
        )
        node = PeerNode(
            options,
            directory=self.directory,
            transport=transport,
            clock=SystemClock(),
            make_engine=cpu_engine,
            validity=member.credentials.validity,
        )
        server = await transport.serve("127.0.0.1", 0, handlers or node.handlers())
        self.stack.push_async_callback(server.stop)
        running = asyncio.create_task(node.run(server.endpoint))
        self.stack.push_async_callback(_ended, running)
        owner = await self.member(Role.CLIENT)
        while member.name not in await self.members(owner):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return Peer(member, server)

    async def members(self, membership: Membership) -> set[str]:
        transport = GrpcTransport(GrpcOptions(credentials=membership.credentials))
        channel = transport.connect(self.endpoint, COORDINATOR_NAME)
        try:
            status = await call(channel, STATUS, StatusRequest(), DEADLINE_S)
        finally:
            await channel.close()
        return {one.peer_id for one in status.members}


@dataclass
class Peer:
    member: Membership
    server: GrpcServer

    async def has_calls(self, count: int) -> None:
        """Wait until so many calls are under way here, each over its own connection."""
        while len(self.server.callers()) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def _ended(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def swarm_in(
    folder: Path, later: Sequence[timedelta] = (timedelta(),)
) -> AsyncIterator[Swarm]:
    Authority.make(folder / "keys")
    authority = Authority.open(folder / "keys", lambda: datetime.now(UTC) + later[0])
    async with AsyncExitStack() as stack:
        registry = stack.enter_context(closing(Registry(folder / "keys")))
        journal = stack.enter_context(closing(Journal(str(folder / "journal.db"))))
        service = CoordinatorService(journal, SystemClock())
        ticket_key = new_key()
        introductions = Introductions(lambda: ticket_key, SystemClock())
        enrolment = Enrolment(
            authority,
            registry,
            (),
            "a-swarm",
            on_revoked=service.revoke,
            on_void=service.dismiss_all_peers,
            on_renewed=service.renewed,
        )
        transport = GrpcTransport(GrpcOptions(credentials=enrolment.credentials))
        handlers = service.handlers(), enrolment.handlers(), introductions.handlers()
        served = {**handlers[0], **handlers[1], **handlers[2]}
        server = await transport.serve("127.0.0.1", 0, served)
        stack.push_async_callback(server.stop)
        directory = StaticDirectory(Board(), SystemClock())
        await directory.announce(Role.COORDINATOR, COORDINATOR_NAME, server.endpoint)
        stack.push_async_callback(_ended, asyncio.create_task(service.run()))
        async with asyncio.timeout(DEADLINE_S):
            yield Swarm(authority, registry, enrolment, directory, server.endpoint, stack)


def names(page: SwarmEvents | None, peer: str) -> bool:
    return page is not None and any(event.peer_id == peer for event in page.events)


async def end_of(stream: Stream) -> SwarmError:
    """The error with which a call ends, whatever came before it."""
    try:
        while await stream.receive() is not None:
            pass
    except SwarmError as error:
        return error
    raise AssertionError("the call ended without an error")


async def submit(stream: Stream, name: str, *, is_whole: bool) -> None:
    spec = run_spec()
    header = SubmitHeader(spec=spec, spec_digest=spec.digest(), run_id=RunId(name))
    await stream.send(header)
    tokens = bytes(spec.train.sample_bytes * (spec.train.num_rows if is_whole else 1))
    await stream.send(SampleTokens(sample=SampleId(0), token_ids=tokens))
    if is_whole:
        await stream.finish()
        assert await stream.receive() is not None


async def test_the_coordinator_ends_all_calls_of_a_revoked_key(tmp_path: Path) -> None:
    async with swarm_in(tmp_path) as swarm:
        client, peer, relay = [
            await swarm.member(role) for role in (Role.CLIENT, Role.PEER, Role.RELAY)
        ]
        other = await swarm.member(Role.CLIENT)
        await submit(swarm.open(client, SUBMIT), "a-run", is_whole=True)
        watch, events, introduce = [swarm.open(client, m) for m in (WATCH, EVENTS, INTRODUCE)]
        half_a_job, join, relaying = (
            swarm.open(client, SUBMIT),
            swarm.open(peer, JOIN),
            swarm.open(relay, RELAY),
        )
        others = swarm.open(other, EVENTS)
        await watch.send(WatchRequest(run_id=RunId("a-run")))
        await events.send(EventsRequest(follows=True))
        await others.send(EventsRequest(follows=True))
        await introduce.send(Reachable())
        await submit(half_a_job, "half-a-job", is_whole=False)
        await join.send(
            PeerHello(peer_id=PeerId(peer.name), endpoint="p:1", layers=None, memory_bytes=1)
        )
        await relaying.send(RelayHello(endpoint="127.0.0.1:1", probe_endpoint="127.0.0.1:2"))
        for answered in (watch, events, others, introduce, relaying):
            assert await answered.receive() is not None
        while peer.name not in await swarm.members(other):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await swarm.revoke(client, peer, relay)
        for stream in (watch, events, introduce, half_a_job, join, relaying):
            error = await end_of(stream)
            assert isinstance(error, NotAllowed)
            assert "its key was revoked" in error.message
        # Nobody else's call ends.
        newcomer = await swarm.peer()
        while not names(await others.receive(), newcomer.member.name):
            pass
    assert enrolment_module.WATCH_EVERY_S < 1.0, "the registry's changes are heeded within this"


async def test_a_peer_ends_all_calls_of_a_revoked_key(tmp_path: Path) -> None:
    async with swarm_in(tmp_path) as swarm:
        peer = await swarm.peer()
        client, neighbour = await swarm.member(Role.CLIENT), await swarm.member(Role.PEER)
        bystander = await swarm.member(Role.CLIENT)
        at = peer.server.endpoint, peer.member.name
        streams = [swarm.open(client, method, *at) for method in (GENERATE, FETCH_CHUNKS)]
        streams.append(swarm.open(neighbour, LINK, *at))
        others = swarm.open(bystander, GENERATE, *at)
        # They send nothing, so that the handlers wait: connected, they are calls under way.
        waiting = [asyncio.create_task(end_of(stream)) for stream in (*streams, others)]
        await peer.has_calls(4)
        await swarm.revoke(client, neighbour)
        for task in waiting[:3]:
            error = await task
            assert isinstance(error, NotAllowed)
            assert "its key was revoked" in error.message
        assert not waiting[3].done()
        waiting[3].cancel()


async def test_a_peer_is_told_of_renewals_and_keeps_calls_that_began_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm_ft.transport.open_calls.CHECK_EVERY_S", 0.01)

    async def hold(stream: Stream) -> None:
        while await stream.receive() is not None:
            pass

    later = [timedelta()]
    async with swarm_in(tmp_path, later) as swarm:
        peer = await swarm.peer({GENERATE: hold})
        validity, at = peer.member.credentials.validity, (peer.server.endpoint, peer.member.name)
        renewing, expiring = await swarm.member(Role.CLIENT), await swarm.member(Role.CLIENT)
        calls = [swarm.open(membership, GENERATE, *at) for membership in (renewing, expiring)]
        ends = [asyncio.create_task(end_of(stream)) for stream in calls]
        await peer.has_calls(2)
        soon_s = datetime.now(UTC).timestamp() + LIFETIME_S - 60.0
        validity.unix_s = lambda: soon_s
        later[0] = timedelta(hours=2)
        await renew_enrolment(renewing.credentials, swarm.keys[renewing.name], swarm.endpoint)
        while (validity.expires_unix_s(renewing.name) or 0.0) < soon_s + 3600.0:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        soon_s += 120.0
        error = await ends[1]
        assert isinstance(error, Unavailable)
        assert "its certificate has expired" in error.message
        for _ in range(20):
            await asyncio.sleep(0.01)
        assert not ends[0].done()
        ends[0].cancel()
