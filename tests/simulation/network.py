"""A `Transport` between the machines of a simulation: real bytes over virtual links.

What can happen to a call is what can happen to gRPC over TCP; see `links`. Beyond that, a broken
or hostile peer may send messages twice, in another order, or altered: see `tampering`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

from swarm_ft.errors import InternalError, PortInUse, SwarmError, Unavailable
from swarm_ft.transport.base import Handler, Method, run_handler
from tests.simulation.call import HEADER_BYTES, Call, Observed, SimStream
from tests.simulation.links import CONNECT_TIMEOUT_S, Connection, Side, Wires
from tests.simulation.loop import Process

FIRST_FREE_PORT = 49152
RETRY_CONNECT_S = 1.0


class Network:
    """The listeners of a simulated network; it also makes transports.

    Args:
        wires: the links.
        observed: what happens to messages on their way.
    """

    def __init__(self, wires: Wires, observed: Observed) -> None:
        self.wires = wires
        self.observed = observed
        self.listeners: dict[str, SimServer] = {}
        self._next_port = FIRST_FREE_PORT

    def transport(self, process: Process) -> SimTransport:
        """The transport of one process."""
        return SimTransport(self, process)

    def free_port(self) -> int:
        """A port that nobody had before."""
        self._next_port += 1
        return self._next_port - 1

    def killed(self, process: Process, *, silently: bool) -> None:
        """A process is no more."""
        endpoints = [end for end, server in self.listeners.items() if server.process is process]
        for endpoint in endpoints:
            del self.listeners[endpoint]
        self.wires.end_of(process, silently=silently)


class SimTransport:
    """See `Transport`; the host is always the machine's name."""

    def __init__(self, network: Network, process: Process) -> None:
        self._network = network
        self._process = process

    async def serve(
        self, host: str, port: int, handlers: Mapping[Method[Any, Any], Handler]
    ) -> SimServer:
        """See `Transport`."""
        endpoint = f"{self._process.name}:{port or self._network.free_port()}"
        if endpoint in self._network.listeners:
            raise PortInUse(f"cannot listen on {endpoint}: the port is taken; choose another")
        server = SimServer(self._network, self._process, endpoint, handlers)
        self._network.listeners[endpoint] = server
        return server

    def connect(self, endpoint: str, name: str = "") -> SimChannel:
        """See `Transport`."""
        if not endpoint:
            raise Unavailable(f"nobody knows where {name} is")
        return SimChannel(self._network, self._process, endpoint)


class SimChannel:
    """See `Channel`. Its connection is made at the first call, and again at the next when lost."""

    def __init__(self, network: Network, process: Process, endpoint: str) -> None:
        self._network = network
        self._process = process
        self._endpoint = endpoint
        self._connection: Connection | None = None
        self._server: SimServer | None = None
        self._connecting = False
        self._calls: list[Call] = []
        self._deadline_s = 0.0

    def open(self, method: Method[Any, Any]) -> SimStream:
        """See `Channel`."""
        call = Call(self._network.observed, method)
        stream = call.client = SimStream(call, self._endpoint, is_client=True)
        self._calls = [*(c for c in self._calls if c.client and not c.client.is_over), call]
        if self._connection is not None and not self._connection.client.lost:
            self._begin(call, self._connection)
        elif not self._connecting:
            self._connecting = True
            wires = self._network.wires
            self._deadline_s = wires.loop.time() + CONNECT_TIMEOUT_S
            self._knock()
        return stream

    async def close(self) -> None:
        """See `Channel`."""
        self._connecting = False
        self._fail("this side has closed the channel")
        if self._connection is not None and not self._connection.client.lost:
            self._connection.close(self._connection.client, "the client closed the connection")

    # ---- the handshake

    def _knock(self) -> None:
        """Send the first packet; it is sent again while nothing answers."""
        wires, host = self._network.wires, self._endpoint.rpartition(":")[0]
        out, back = wires.link(self._process.name, host), wires.link(host, self._process.name)
        round_trip_s = out.latency_s + back.latency_s
        wires.at(wires.loop.time() + 1.5 * round_trip_s, self._answered)

    def _answered(self) -> None:
        if not self._process.alive or not self._connecting:
            return
        wires, server = self._network.wires, self._network.listeners.get(self._endpoint)
        host = self._endpoint.rpartition(":")[0]
        out, back = wires.link(self._process.name, host), wires.link(host, self._process.name)
        if out.blocked or back.blocked or (server is not None and server.process.paused):
            if wires.loop.time() >= self._deadline_s:
                self._refused(f"{self._endpoint}: does not answer")
            else:
                wires.at(wires.loop.time() + RETRY_CONNECT_S, self._answered)
        elif server is None:
            self._refused(f"{self._endpoint}: nobody listens there")
        else:
            self._connected(server)

    def _refused(self, reason: str) -> None:
        self._connecting = False
        self._fail(reason)

    def _connected(self, server: SimServer) -> None:
        self._connecting = False
        self._server = server

        def on_lost(connection: Connection, side: Side) -> None:
            if side is connection.server:
                server.lost(connection, side.lost)
            elif connection is self._connection:
                self._fail(f"{self._endpoint}: {side.lost}")

        self._connection = self._network.wires.connect(self._process, server.process, on_lost)
        server.connections.append(self._connection)
        for call in self._calls:
            if call.client is not None and not call.client.is_over:
                self._begin(call, self._connection)

    def _begin(self, call: Call, connection: Connection) -> None:
        call.begin(connection)
        if self._server is not None:
            call.put(HEADER_BYTES, partial(self._server.accept, call), up=True)

    def _fail(self, reason: str) -> None:
        for call in self._calls:
            if call.client is not None:
                call.client.lose(reason)


class SimServer:
    """See `Server`."""

    def __init__(
        self,
        network: Network,
        process: Process,
        endpoint: str,
        handlers: Mapping[Method[Any, Any], Handler],
    ) -> None:
        self.process = process
        self.connections: list[Connection] = []
        self._network = network
        self._endpoint = endpoint
        self._handlers = {method.path: (method, handler) for method, handler in handlers.items()}
        self._running: dict[asyncio.Task[None], Call] = {}
        self._is_stopped = False

    @property
    def endpoint(self) -> str:
        """See `Server`."""
        return self._endpoint

    def accept(self, call: Call) -> None:
        """Serve a call that has arrived."""
        if self._is_stopped:
            reason = Unavailable(f"{self._endpoint} has stopped")
            call.put(HEADER_BYTES, partial(call.end_client, reason), up=False)
            return
        call.server = SimStream(call, call.client_name, is_client=False)
        task = self.process.spawn(self._serve(call, call.server))
        self._running[task] = call
        task.add_done_callback(self._running.pop)

    async def _serve(self, call: Call, stream: SimStream) -> None:
        failure: SwarmError | None = InternalError(f"{self._endpoint}: no such method")
        if call.method.path in self._handlers:
            method, handler = self._handlers[call.method.path]
            failure = await run_handler(handler, stream, method, stream.lost)
        stream.lose(f"{self._endpoint} ended the call")
        call.put(HEADER_BYTES, lambda: call.end_client(failure), up=False)

    def lost(self, connection: Connection, reason: str) -> None:
        """A connection is dead."""
        for call in self._running.values():
            if call.connection is connection and call.server is not None:
                call.server.lose(reason)

    async def stop(self, grace_s: float = 0.0) -> None:
        """See `Server`."""
        self._is_stopped = True
        self._network.listeners.pop(self._endpoint, None)
        if self._running:
            await asyncio.wait(set(self._running), timeout=grace_s)
        for call in self._running.values():
            if call.server is not None:
                call.server.lose(f"{self._endpoint} has stopped")
        await asyncio.gather(*self._running)
        for connection in self.connections:
            if not connection.server.lost:
                connection.close(connection.server, "the server has stopped")
