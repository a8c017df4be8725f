"""The serving end of gRPC. It knows no message's meaning."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, TypeVar
from urllib.parse import unquote

import grpc
from google.protobuf.message import Message

from swarm_ft.errors import SwarmError, Unavailable
from swarm_ft.transport.base import Handler, Method
from swarm_ft.transport.grpc_options import GrpcOptions, server_arguments
from swarm_ft.transport.grpc_stream import GrpcStream
from swarm_ft.transport.handling import LOST_GRACE_S, first_done, run_handler
from swarm_ft.transport.listening import format_endpoint, refusal
from swarm_ft.transport.status import STATUS, to_metadata

END_GRACE_S = 0.2
END_GRACE_TURNS = 10
"""gRPC reports a client that vanished first as the end of its messages, then as the end of the
call: 3 ms later as a rule, 44 ms on a loop that starves. So an end of messages is believed to be
a clean one only when the call outlives it by this long and by this many turns of the loop."""

Out = TypeVar("Out", bound=Message)
In = TypeVar("In", bound=Message)


class GrpcServer:
    """See `Server`.

    Every rpc is registered as a stream both ways: on gRPC's wire a unary rpc is a stream of
    one message, so clients of any language may call it as the proto says.
    """

    def __init__(self, options: GrpcOptions) -> None:
        self._options = options
        self._server = grpc.aio.server(options=server_arguments(options))
        self._endpoint = ""
        self._running: dict[asyncio.Task[SwarmError | None], ServerStream[Any, Any]] = {}

    @property
    def endpoint(self) -> str:
        """See `Server`."""
        return self._endpoint

    async def start(
        self, host: str, port: int, handlers: Mapping[Method[Any, Any], Handler]
    ) -> None:
        """Bind, and serve from now on.

        Raises:
            PortInUse: gRPC cannot bind; it does not say why.
        """
        for method, handler in handlers.items():
            self._register(method, handler)
        try:
            bound = self._bind(format_endpoint(host, port))
        except RuntimeError as error:  # taken since it was checked, or refused by gRPC
            await self._server.stop(None)
            raise refusal(host, port, error) from None
        self._endpoint = format_endpoint(host, bound)
        await self._server.start()

    async def stop(self, grace_s: float = 0.0) -> None:
        """See `Server`."""
        # The calls are ended here, with a reason, and not by gRPC: its clients print a line of
        # their own when a server cuts calls off. gRPC's own deadline is there to be sure.
        closing = asyncio.create_task(self._server.stop(grace_s + 2 * LOST_GRACE_S))
        if self._running:
            await asyncio.wait(set(self._running), timeout=grace_s)
        for stream in self._running.values():
            stream.lose(f"{self._endpoint} has stopped")
        if self._running:
            await asyncio.wait(set(self._running))
        await closing

    def _register(self, method: Method[Any, Any], handler: Handler) -> None:
        async def serve(_: object, context: grpc.aio.ServicerContext) -> None:
            await self._serve(method, handler, context)

        rpc = grpc.stream_stream_rpc_method_handler(serve)
        service = grpc.method_handlers_generic_handler(method.service, {method.name: rpc})
        self._server.add_generic_rpc_handlers((service,))

    def _bind(self, address: str) -> int:
        credentials = self._options.server_credentials
        if credentials is None:
            return int(self._server.add_insecure_port(address))
        return int(self._server.add_secure_port(address, credentials))

    async def _serve(
        self, method: Method[Any, Any], handler: Handler, context: grpc.aio.ServicerContext
    ) -> None:
        stream: ServerStream[Any, Any] = ServerStream(
            context, method.request, self._options.max_message_bytes
        )
        running = asyncio.create_task(run_handler(handler, stream, method, stream.lost))
        self._running[running] = stream
        running.add_done_callback(self._running.pop)
        try:
            await first_done(running, stream.lost)
        finally:  # gRPC cancels this task, and only this one, when the client is gone
            stream.lose(f"{stream.remote} is gone")
        failure = running.result() if running.done() else Unavailable(stream.lost.result())
        if failure is not None:
            await context.abort(STATUS[failure.code], failure.code, to_metadata(failure))


class ServerStream(GrpcStream[Out, In]):
    """The server's end of a call."""

    def __init__(
        self, context: grpc.aio.ServicerContext, incoming: type[In], max_message_bytes: int
    ) -> None:
        # For example `ipv4:127.0.0.1:5000`, with an IPv6 address's brackets escaped.
        super().__init__(unquote(context.peer()).partition(":")[2], incoming, max_message_bytes)
        self._context = context

    async def _read(self) -> bytes | None:
        try:
            data = await self._context.read()
        except grpc.aio.BaseError as error:
            raise self._gone() from error
        if data is not grpc.aio.EOF:
            return bytes(data)
        if await self._is_lost_soon():
            raise self._gone()
        return None

    async def _write(self, data: bytes) -> None:
        try:
            await self._context.write(data)
        except grpc.aio.BaseError as error:
            raise self._gone() from error

    async def _half_close(self) -> None:
        """Nothing: a server's last word is its handler's return."""

    async def _is_lost_soon(self) -> bool:
        await asyncio.wait({self.lost}, timeout=END_GRACE_S)
        for _ in range(END_GRACE_TURNS):
            await asyncio.sleep(0)
        return self.lost.done()

    def _gone(self) -> Unavailable:
        return Unavailable(f"{self._remote} is gone")
