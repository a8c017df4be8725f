"""Calls inside one process, without sockets. It knows no message; tests stand on it.

A real transport held to the same conformance suite as gRPC: messages travel as bytes, queues
are bounded, endpoints are names. One `MemoryTransport` is one network: who shares it can meet.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from swarm_ft.errors import InternalError, OutOfTurn, PortInUse, SwarmError, Unavailable
from swarm_ft.identity.roles import Caller
from swarm_ft.protocol.wire.convert import WireType
from swarm_ft.transport.base import Handler, Method, Reply, Request, first_done, run_handler
from swarm_ft.transport.metering import CallMeter, Meter
from swarm_ft.transport.methods import MAX_MESSAGE_BYTES, from_bytes, to_bytes
from swarm_ft.transport.open_calls import OpenCalls
from swarm_ft.transport.validity import Validity

QUEUE_MESSAGES = 4
"""A sender waits once this many of its messages are unread."""

FIRST_FREE_PORT = 49152

Out = TypeVar("Out")
In = TypeVar("In")


class MemoryTransport:
    """A network of names; see `Transport`.

    Args:
        meter: measures the calls to all its servers; None: by the usual rates.
        caller: who calls over all its channels; None: nobody has keys.
        validity: of callers.
    """

    def __init__(
        self,
        meter: Meter | None = None,
        caller: Caller | None = None,
        validity: Validity | None = None,
    ) -> None:
        self.meter = meter or Meter()
        self.caller = caller
        self.validity = validity or Validity()
        self._servers: dict[str, MemoryServer] = {}
        self._next_port = FIRST_FREE_PORT

    async def serve(
        self, host: str, port: int, handlers: Mapping[Method[Any, Any], Handler]
    ) -> MemoryServer:
        """See `Transport`."""
        if port == 0:
            port, self._next_port = self._next_port, self._next_port + 1
        endpoint = f"{host}:{port}"
        if endpoint in self._servers:
            raise PortInUse(f"cannot listen on {endpoint}: the port is taken; choose another")
        server = MemoryServer(self, endpoint, handlers)
        self._servers[endpoint] = server
        return server

    def connect(self, endpoint: str, name: str = "") -> MemoryChannel:
        """See `Transport`."""
        if not endpoint:
            raise Unavailable(f"nobody knows where {name} is")
        return self.connect_as(self.caller, endpoint)

    def connect_as(self, caller: Caller | None, endpoint: str) -> MemoryChannel:
        """A channel of another member's."""
        return MemoryChannel(self, endpoint, caller)

    def server_at(self, endpoint: str) -> MemoryServer | None:
        """The server that listens at `endpoint`."""
        return self._servers.get(endpoint)

    def forget(self, endpoint: str) -> None:
        """Nobody listens at `endpoint` any more."""
        self._servers.pop(endpoint, None)


class MemoryChannel:
    """See `Channel`."""

    def __init__(self, network: MemoryTransport, endpoint: str, caller: Caller | None) -> None:
        self._network = network
        self._caller = caller
        self._endpoint = endpoint
        self._calls: list[_Call] = []

    def open(self, method: Method[Request, Reply]) -> MemoryStream[Request, Reply]:
        """See `Channel`."""
        made = _Call()
        self._calls = [*(c for c in self._calls if not c.lost.done()), made]
        server = self._network.server_at(self._endpoint)
        if server is None:
            made.lose(f"{self._endpoint}: nobody listens there")
        else:
            server.accept(method, made, self._caller)
        return MemoryStream(
            made,
            self._endpoint,
            method.request,
            method.reply,
            inbox=made.replies,
            outbox=made.requests,
        )

    async def close(self) -> None:
        """See `Channel`."""
        for made in self._calls:
            made.lose("this side has closed the channel")


class MemoryServer:
    """See `Server`."""

    def __init__(
        self, network: MemoryTransport, endpoint: str, handlers: Mapping[Method[Any, Any], Handler]
    ) -> None:
        self._network = network
        self._endpoint = endpoint
        self._handlers = {method.path: (method, handler) for method, handler in handlers.items()}
        self._running: dict[asyncio.Task[None], _Call] = {}
        self._open: OpenCalls[_Call] = OpenCalls(network.validity, _Call.refuse)
        self._open.start()

    @property
    def endpoint(self) -> str:
        """See `Server`."""
        return self._endpoint

    def accept(
        self, method: Method[Any, Any], accepted: _Call, caller: Caller | None = None
    ) -> None:
        """Serve a call that a channel has opened."""
        task = asyncio.create_task(self._serve(method, accepted, caller))
        self._running[task] = accepted
        task.add_done_callback(self._running.pop)

    async def _serve(
        self, method: Method[Any, Any], accepted: _Call, caller: Caller | None
    ) -> None:
        failure: SwarmError | None = InternalError(f"{self._endpoint} does not serve {method}")
        if method.path in self._handlers:
            method, handler = self._handlers[method.path]
            stream: MemoryStream[Any, Any] = MemoryStream(
                accepted,
                "client",
                method.reply,
                method.request,
                inbox=accepted.requests,
                outbox=accepted.replies,
                caller=caller,
                meter=CallMeter(self._network.meter, method, caller, "client:1", accepted.lost),
            )
            failure = self._network.validity.refusal(caller) if caller is not None else None
            if failure is None:
                self._open.add(accepted, caller)
                failure = await run_handler(handler, stream, method, accepted.lost)
                self._open.discard(accepted)
        accepted.replies.finish(failure)
        accepted.requests.break_off(failure or Unavailable(f"{self._endpoint} ended the call"))

    async def stop(self, grace_s: float = 0.0) -> None:
        """See `Server`."""
        self._network.forget(self._endpoint)
        self._open.stop()
        if self._running:
            await asyncio.wait(set(self._running), timeout=grace_s)
        for running in self._running.values():
            running.lose(f"{self._endpoint} has stopped")
        await asyncio.gather(*self._running)


class _Call:
    """The state that both ends of a call share."""

    def __init__(self) -> None:
        self.requests, self.replies = _Pipe(), _Pipe()
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def lose(self, reason: str) -> None:
        """Drop the call: every present or later operation raises Unavailable."""
        self._end(reason, Unavailable(reason))

    def refuse(self, error: SwarmError) -> None:
        """Drop the call; its client gets this error."""
        self._end(error.message, error)

    def _end(self, reason: str, error: SwarmError) -> None:
        if not self.lost.done():
            self.lost.set_result(reason)
            self.requests.break_off(error)
            self.replies.break_off(error)


class MemoryStream(Generic[Out, In]):
    """One end of a call; see `MessageStream`."""

    def __init__(
        self,
        shared: _Call,
        remote: str,
        outgoing: WireType[Out],
        incoming: WireType[In],
        *,
        inbox: _Pipe,
        outbox: _Pipe,
        caller: Caller | None = None,
        meter: CallMeter | None = None,
    ) -> None:
        self._caller = caller
        self._meter = meter
        self._reading: asyncio.Task[bytes | None] | None = None
        self._shared = shared
        self._remote = remote
        self._outgoing = outgoing
        self._incoming = incoming
        self._inbox = inbox
        self._outbox = outbox

    @property
    def remote(self) -> str:
        """See `MessageStream`."""
        return self._remote

    @property
    def caller(self) -> Caller | None:
        """See `MessageStream`."""
        return self._caller

    async def send(self, message: Out) -> None:
        """See `MessageStream`."""
        data = to_bytes(self._outgoing, message, MAX_MESSAGE_BYTES)
        if self._meter is not None:
            await self._meter.replied(len(data))
        await self._outbox.put(data)

    async def receive(self) -> In | None:
        """See `MessageStream`."""
        if self._meter is None:
            data = await self._inbox.get()
        else:
            data = await self._metered(self._meter)
        return (
            None
            if data is None
            else from_bytes(self._incoming, data, self._remote, MAX_MESSAGE_BYTES)
        )

    async def _metered(self, meter: CallMeter) -> bytes | None:
        """The next message once it may be handled; who cancels this leaves it to the next."""

        async def read() -> bytes | None:
            data = await self._inbox.get()
            if data is not None:
                await meter.received(len(data))
            return data

        if self._reading is None:
            self._reading = asyncio.create_task(read())
            # Nobody may be left to read its result.
            self._reading.add_done_callback(lambda done: done.cancelled() or done.exception())
        await first_done(self._reading, self._shared.lost)
        if self._shared.lost.done():
            self._reading.cancel()
            raise Unavailable(self._shared.lost.result())
        reading, self._reading = self._reading, None
        return reading.result()

    async def finish(self) -> None:
        """See `MessageStream`."""
        self._outbox.finish()

    async def cancel(self) -> None:
        """See `MessageStream`."""
        if not self._inbox.drained:
            self._shared.lose(f"the call with {self._remote} was cancelled")


class _Pipe:
    """One direction of a call: a bounded queue that ends cleanly, with an error, or breaks."""

    def __init__(self) -> None:
        self._queue: deque[bytes] = deque()
        self._changed = asyncio.Event()
        self._sending = asyncio.Lock()
        self._finished = False
        self._failure: SwarmError | None = None
        self._broken: SwarmError | None = None

    async def put(self, data: bytes) -> None:
        async with self._sending:
            if self._finished and self._broken is None:
                raise OutOfTurn("send after finish: this side has ended its messages")
            while self._broken is None and len(self._queue) >= QUEUE_MESSAGES:
                await self._change()
            _raise(self._broken)
            self._queue.append(data)
            self._changed.set()

    async def get(self) -> bytes | None:
        while self._broken is None and not self._queue and not self._finished:
            await self._change()
        _raise(self._broken)
        if not self._queue:
            _raise(self._failure)
            return None
        self._changed.set()
        return self._queue.popleft()

    def finish(self, failure: SwarmError | None = None) -> None:
        """No more will be put. What was put can still be got; then `failure` is raised."""
        self._finished, self._failure = True, failure
        self._changed.set()

    def break_off(self, reason: SwarmError) -> None:
        """Both ends raise `reason` from now on."""
        self._broken = reason
        self._changed.set()

    @property
    def drained(self) -> bool:
        """Whether it ended, and all of it was got."""
        return self._finished and not self._queue

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


def _raise(error: SwarmError | None) -> None:
    if error is not None:
        raise type(error)(error.message)
