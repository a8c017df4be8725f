"""Calls between members through routers: gRPC behind fronts, over tunnels."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from random import Random
from typing import Any

from swarm_ft.base.clock import Clock
from swarm_ft.identity.roles import COORDINATOR_NAME
from swarm_ft.protocol.spec.bounds import host_of, is_private
from swarm_ft.reach.front import Front
from swarm_ft.reach.meet import Reach
from swarm_ft.reach.portmap import map_port
from swarm_ft.reach.shaping import Shape
from swarm_ft.reach.tunnels import BETTER_AFTER_S, Tunnels
from swarm_ft.transport.admission import MAX_PER_ADDRESS
from swarm_ft.transport.base import Channel, Handler, Method, Server
from swarm_ft.transport.grpc_options import check_address
from swarm_ft.transport.grpc_transport import GrpcServer, GrpcTransport
from swarm_ft.transport.local_places import LocalPlaces


class FrontedServer:
    """gRPC at a place of this process, behind a front port; see `Server`."""

    def __init__(self, endpoint: str, inner: GrpcServer, transport: FrontedTransport) -> None:
        self._endpoint = endpoint
        self._inner = inner
        self._transport = transport

    @property
    def endpoint(self) -> str:
        """Endpoint of the front."""
        return self._endpoint

    async def stop(self, grace_s: float = 0.0) -> None:
        """See `Server`."""
        await self._inner.stop(grace_s)
        await self._transport.close()


class FrontedTransport:
    """Transport that serves behind a front, and dials like gRPC itself; see `Transport`.

    Args:
        grpc: The gRPC transport behind the front.
        plaintext: Whether gRPC has no TLS.
        per_address: Connections that one address may have.
        shape: Rates of this machine's link.
    """

    def __init__(
        self,
        grpc: GrpcTransport,
        *,
        plaintext: bool = False,
        per_address: int = MAX_PER_ADDRESS,
        shape: Shape | None = None,
    ) -> None:
        self._grpc = grpc
        self._places = LocalPlaces()
        self.front = Front(plaintext=plaintext, per_address=per_address, shape=shape)

    async def serve(
        self, host: str, port: int, handlers: Mapping[Method[Any, Any], Handler]
    ) -> Server:
        """See `Transport`."""
        await check_address(host, port)
        place = self._places.new()
        inner = await self._grpc.serve_at(place, handlers)
        self.front.pass_tls_to(place, inner.callers)
        inner.on_flood(self.front.slow_down)
        endpoint = await self.front.listen(host, port)
        return FrontedServer(endpoint, inner, self)

    async def close(self) -> None:
        """End the front and all of its connections."""
        await self.front.close()
        self._places.close()

    def connect(self, endpoint: str, name: str = "") -> Channel:
        """See `Transport`."""
        return self._grpc.connect(endpoint, name)


class HomeTransport(FrontedTransport):
    """Transport of a member, which reaches other members by name, by any way; see `Transport`.

    Args:
        grpc: Carrier of calls, with the member's credentials.
        find_coordinator: Returns the coordinator's endpoint.
        clock: Source of the time.
        rng: Random numbers that keep members from calling in step.
        control: Carrier of the stream to the coordinator, if not `grpc`.
        better_after_s: Seconds until the first search for a better way than a relay.
        shape: Rates of this machine's link.
    """

    def __init__(  # noqa: PLR0913 - all parts of a process's links
        self,
        grpc: GrpcTransport,
        find_coordinator: Callable[[], Awaitable[str]],
        clock: Clock,
        rng: Random,
        control: GrpcTransport | None = None,
        *,
        better_after_s: float = BETTER_AFTER_S,
        shape: Shape | None = None,
    ) -> None:
        super().__init__(grpc, shape=shape)
        self._reach = Reach(control or grpc, find_coordinator, self.front, clock, rng)
        self._tunnels = Tunnels(self._reach.link, better_after_s, shape)
        self._running: asyncio.Task[None] | None = None

    @property
    def reach(self) -> Reach:
        """The member's part in introductions."""
        return self._reach

    def start(self, endpoints: tuple[str, ...] = ()) -> None:
        """Take part in introductions, until closed.

        Args:
            endpoints: Endpoints of the front for others, the best first.
        """
        asks_router = bool(endpoints) and is_private(host_of(endpoints[0]))
        if asks_router:
            self._reach.has_mapping_answer.clear()
        self._running = asyncio.create_task(self._run(endpoints, asks_router=asks_router))

    async def _run(self, endpoints: tuple[str, ...], *, asks_router: bool) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._reach.run(endpoints))
            if asks_router:
                group.create_task(self._map_port(int(endpoints[0].rpartition(":")[2])))

    async def _map_port(self, port: int) -> None:
        async with map_port(port) as endpoint:
            if endpoint is not None:
                self.add_endpoint(endpoint)
            self._reach.has_mapping_answer.set()
            if endpoint is not None:
                await asyncio.Event().wait()

    async def close(self) -> None:
        """See `FrontedTransport`."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        await self._tunnels.close()
        await super().close()

    def is_relayed(self, name: str) -> bool:
        """Whether a stream to or from this member goes over a relay now."""
        return self._tunnels.is_relayed(name) or self._reach.is_relayed(name)

    def add_endpoint(self, endpoint: str) -> None:
        """Add an endpoint of the front for others, which they try first."""
        self._reach.add_endpoint(endpoint)

    async def wait_joined(self) -> None:
        """Wait until others can be introduced to this member."""
        await self._reach.joined.wait()

    def upgrade_links(self) -> None:
        """Move relayed links to better ways; call this while no calls are under way."""
        self._tunnels.upgrade_links()

    def connect(self, endpoint: str, name: str = "") -> Channel:
        """See `Transport`: the endpoint is the coordinator's, or has no use."""
        if name == COORDINATOR_NAME:
            return super().connect(endpoint, name)
        return self._grpc.connect_at(self._tunnels.place_to(name), endpoint, name)
