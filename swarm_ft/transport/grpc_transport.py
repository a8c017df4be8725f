"""Calls between machines over gRPC: the client's and the server's end."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Coroutine, Iterable, Mapping
from contextlib import suppress
from typing import Any, Generic, TypeVar
from urllib.parse import unquote

import grpc

from swarm_ft.base.log import get_logger
from swarm_ft.errors import InternalError, OutOfTurn, SwarmError, Unavailable, from_code
from swarm_ft.identity.roles import Caller
from swarm_ft.protocol.wire.convert import WireType
from swarm_ft.transport.base import (
    LOST_GRACE_S,
    Handler,
    Method,
    Reply,
    Request,
    first_done,
    run_handler,
)
from swarm_ft.transport.grpc_messages import describe_status
from swarm_ft.transport.grpc_options import (
    GrpcOptions,
    channel_arguments,
    check_address,
    check_plaintext,
    format_endpoint,
    refusal,
    server_arguments,
)
from swarm_ft.transport.local_places import LocalPlace, caller_of
from swarm_ft.transport.metering import CallMeter, Meter, OnFlood
from swarm_ft.transport.methods import from_bytes, to_bytes
from swarm_ft.transport.open_calls import OpenCalls
from swarm_ft.transport.open_files import max_connections, raise_open_files
from swarm_ft.transport.rules import check_rule

logger = get_logger(__name__)

# ---- the one table between this project's errors and gRPC's
#
# An error crosses the wire as trailing metadata (its stable code and its message); the gRPC status
# beside it is for tools that know nothing of this project.

METADATA_KEY = "swarm-error-bin"
"""Metadata key of an error; gRPC carries a `-bin` value as raw bytes, in any language."""

MAX_MESSAGE_CHARS = 1_000
"""Characters of an error's message.

gRPC bounds all metadata of a call at 8 KiB; 1,000 characters fit in any script. The bound also
limits what a hostile peer can write into our logs.
"""

STATUS: dict[str, grpc.StatusCode] = {
    "swarm-error": grpc.StatusCode.UNKNOWN,
    "bad-input": grpc.StatusCode.INVALID_ARGUMENT,
    "bad-option": grpc.StatusCode.INVALID_ARGUMENT,
    "bad-codec": grpc.StatusCode.INVALID_ARGUMENT,
    "bad-model": grpc.StatusCode.INVALID_ARGUMENT,
    "model-unavailable": grpc.StatusCode.FAILED_PRECONDITION,
    "model-not-allowed": grpc.StatusCode.FAILED_PRECONDITION,
    "model-differs": grpc.StatusCode.FAILED_PRECONDITION,
    "non-finite-weights": grpc.StatusCode.INVALID_ARGUMENT,
    "unsupported-dtype": grpc.StatusCode.FAILED_PRECONDITION,
    "bad-dataset": grpc.StatusCode.INVALID_ARGUMENT,
    "bad-layers": grpc.StatusCode.INVALID_ARGUMENT,
    "run-mismatch": grpc.StatusCode.FAILED_PRECONDITION,
    "port-in-use": grpc.StatusCode.FAILED_PRECONDITION,
    "bad-invite": grpc.StatusCode.UNAUTHENTICATED,
    "over-quota": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "dht-unreachable": grpc.StatusCode.FAILED_PRECONDITION,
    "protocol-error": grpc.StatusCode.INVALID_ARGUMENT,
    "malformed-message": grpc.StatusCode.INVALID_ARGUMENT,
    "bad-frame": grpc.StatusCode.INVALID_ARGUMENT,
    "out-of-turn": grpc.StatusCode.FAILED_PRECONDITION,
    "version-mismatch": grpc.StatusCode.FAILED_PRECONDITION,
    "not-found": grpc.StatusCode.NOT_FOUND,
    "not-allowed": grpc.StatusCode.PERMISSION_DENIED,
    "unavailable": grpc.StatusCode.UNAVAILABLE,
    "busy": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "buffers-lost": grpc.StatusCode.UNAVAILABLE,
    "journal-error": grpc.StatusCode.INTERNAL,
    "journal-full": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "out-of-memory": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "bad-snapshot": grpc.StatusCode.DATA_LOSS,
    "non-finite": grpc.StatusCode.ABORTED,
    "run-failed": grpc.StatusCode.ABORTED,
    "internal": grpc.StatusCode.INTERNAL,
}

_GONE = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    }
)

Metadata = Iterable[tuple[str, str | bytes]]


def to_metadata(error: SwarmError) -> tuple[tuple[str, bytes], ...]:
    """Return the trailing metadata that carries `error`."""
    text = f"{error.code}\n{_printable(error.message)}"
    return ((METADATA_KEY, text.encode("utf-8", "replace")),)


def from_status(
    status: grpc.StatusCode, details: str, trailing: Metadata, remote: str
) -> SwarmError:
    """Return the error that ended a call, as `to_metadata` wrote it.

    Without our metadata the status is gRPC's own: Unavailable if the other side cannot be reached
    or dropped the call, else InternalError.
    """
    for key, value in trailing:
        if key == METADATA_KEY and isinstance(value, bytes):
            code, _, message = value.decode("utf-8", "replace").partition("\n")
            return from_code(code, _printable(message))
    logger.debug("%s: gRPC %s: %s", remote, status.name, _printable(details))
    error = Unavailable if status in _GONE else InternalError
    return error(f"{remote}: {describe_status(status, details)}")


def _printable(text: str) -> str:
    """Return one bounded line, so that nobody can forge lines of a log or control a terminal."""
    return "".join(c if c.isprintable() else " " for c in text[:MAX_MESSAGE_CHARS])


# ---- one end of a gRPC call as a `MessageStream`

Out = TypeVar("Out")
In = TypeVar("In")
T = TypeVar("T")


class GrpcStream(ABC, Generic[Out, In]):
    """Base of both ends of a call: one write at a time, and operations that are safe to cancel.

    gRPC drops the whole call when a read or write under way is cancelled, and refuses a second one
    beside it. So each runs as a task of its own. A cancelled caller leaves the task for the next
    caller.

    Args:
        call: gRPC's own object for this end.
        remote: Address of the other side.
        outgoing: Wire type of the messages that this end sends.
        incoming: Wire type of the messages that it receives.
        max_sent_bytes: Bytes of a message that it sends, at most.
        max_received_bytes: Bytes of a message that it receives, at most.
    """

    def __init__(
        self,
        call: grpc.aio.StreamStreamCall | grpc.aio.ServicerContext,
        remote: str,
        outgoing: WireType[Out],
        incoming: WireType[In],
        max_sent_bytes: int,
        max_received_bytes: int,
    ) -> None:
        self._call = call
        self._remote = remote
        self._outgoing = outgoing
        self._incoming = incoming
        self._max_sent_bytes = max_sent_bytes
        self._max_received_bytes = max_received_bytes
        self._one_sender = asyncio.Lock()
        self._writing: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[bytes | None] | None = None
        self._finished = False
        self._caller: Caller | None = None
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Future with the reason, done when the call is lost."""

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
        data = to_bytes(self._outgoing, message, self._max_sent_bytes)
        async with self._one_sender:
            if self._finished:
                raise OutOfTurn("send after finish: this side has ended its messages")
            await self._write_under_way()
            self._writing = _begin(self._write(data))
            await self._write_under_way()

    async def receive(self) -> In | None:
        """See `MessageStream`."""
        if self._reading is None:
            self._reading = _begin(self._read())
        data = await self._result(self._reading)
        if data is None:
            return None  # the finished read stays, and returns None again
        self._reading = None
        return from_bytes(self._incoming, data, self._remote, self._max_received_bytes)

    async def finish(self) -> None:
        """See `MessageStream`."""
        async with self._one_sender:
            await self._write_under_way()
            if not self._finished:
                self._finished = True
                self._writing = _begin(self._half_close())
            await self._write_under_way()

    async def cancel(self) -> None:
        """See `MessageStream`."""
        self.lose(f"the call with {self._remote} was cancelled")

    def lose(self, reason: str) -> None:
        """Mark the call as lost: present and later waits raise Unavailable with this reason."""
        if not self.lost.done():
            self.lost.set_result(reason)

    @abstractmethod
    async def _read(self) -> bytes | None:
        """Return the next message's bytes, None at the clean end; raise SwarmErrors."""

    @abstractmethod
    async def _write(self, data: bytes) -> None:
        """Write one message's bytes; raise SwarmErrors."""

    @abstractmethod
    async def _half_close(self) -> None:
        """Announce that this side writes no more."""

    async def _write_under_way(self) -> None:
        if self._writing is not None:
            await self._result(self._writing)

    async def _result(self, task: asyncio.Task[T]) -> T:
        await first_done(task, self.lost)
        if task.done() and not task.cancelled():
            return task.result()
        reason = self.lost.result() if self.lost.done() else f"the call with {self._remote} ended"
        raise Unavailable(reason)


def _begin(operation: Coroutine[object, object, T]) -> asyncio.Task[T]:
    task = asyncio.create_task(operation)
    # The result may have no reader left; fetch its error, or asyncio logs it as lost.
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task


# ---- the calling end of gRPC


class GrpcChannel:
    """Client's gRPC connection to one server; see `Channel`."""

    def __init__(
        self, endpoint: str, name: str, options: GrpcOptions, place: LocalPlace | None = None
    ) -> None:
        self._remote = endpoint or f"peer {name}"
        self._name = name
        self._options = options
        # The prefix `dns:///` keeps an endpoint, which a stranger may have announced, from choosing
        # another of gRPC's schemes, such as `unix:`.
        self._target = f"dns:///{endpoint}" if place is None else place.target
        self._channel, self._shown = self._new_channel()
        self._older: list[grpc.aio.Channel] = []

    def _new_channel(self) -> tuple[grpc.aio.Channel, object]:
        """Return a new connection, and the certificate that it will show."""
        credentials, arguments = self._options.credentials, channel_arguments(self._options)
        if credentials is None:
            return grpc.aio.insecure_channel(self._target, options=arguments), None
        from swarm_ft.transport.credentials import name_argument  # needs cryptography

        channel = grpc.aio.secure_channel(
            self._target,
            credentials.for_channel(),
            options=[*arguments, name_argument(self._name)],
        )
        return channel, credentials.certificate

    def _show_newest(self) -> None:
        """Connect anew after a renewal: servers refuse calls by an expired certificate.

        Calls under way stay on the older connection, which the server closes after them.
        """
        credentials = self._options.credentials
        if credentials is not None and credentials.certificate is not self._shown:
            self._older.append(self._channel)
            self._channel, self._shown = self._new_channel()

    def open(self, method: Method[Request, Reply]) -> GrpcStream[Request, Reply]:
        """Begin a call; all kinds of rpc look alike on the wire, so all are opened alike."""
        self._show_newest()
        begun = self._channel.stream_stream(method.path)(wait_for_ready=False)
        return ClientStream(
            begun,
            self._remote,
            method.request,
            method.reply,
            method.request_bytes,
            method.reply_bytes,
        )

    async def close(self) -> None:
        """See `Channel`."""
        for channel in (*self._older, self._channel):
            await channel.close()


class ClientStream(GrpcStream[Out, In]):
    """Client's end of a call."""

    def __init__(
        self,
        call: grpc.aio.StreamStreamCall,
        remote: str,
        outgoing: WireType[Out],
        incoming: WireType[In],
        max_sent_bytes: int,
        max_received_bytes: int,
    ) -> None:
        super().__init__(call, remote, outgoing, incoming, max_sent_bytes, max_received_bytes)
        self._one_reader = asyncio.Lock()
        self._stored_replies: deque[bytes] = deque()

    async def cancel(self) -> None:
        """See `MessageStream`."""
        await super().cancel()
        self._call.cancel()

    async def _read(self) -> bytes | None:
        async with self._one_reader:
            if self._stored_replies:
                return self._stored_replies.popleft()
            try:
                data = await self._call.read()
            except grpc.aio.AioRpcError as error:
                raise self._error(error) from None
            return None if data is grpc.aio.EOF else bytes(data)

    async def _write(self, data: bytes) -> None:
        try:
            await self._call.wait_for_connection()
            if self._call.done():
                raise await self._why_ended()
            # gRPC's own `write` does this too. But when it fails because the server refuses the
            # call, it puts "Internal error from Core" in place of the server's reason, if that
            # has not been read yet.
            await self._call._cython_call.send_serialized_message(data)  # noqa: SLF001 - see above
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from None
        except grpc.aio.InternalError:  # the call ended during the write
            raise await self._why_ended() from None

    async def _half_close(self) -> None:
        # A broken call needs no end of messages; the next receive raises the reason.
        with suppress(grpc.aio.InternalError):
            await self._call.done_writing()

    async def _why_ended(self) -> SwarmError:
        await self._store_replies()
        status = await self._call.code()
        if status is grpc.StatusCode.OK:
            return Unavailable(f"{self._remote} has ended the call")
        details, trailing = await self._call.details(), await self._call.trailing_metadata()
        return from_status(status, details or "", trailing, self._remote)

    async def _store_replies(self) -> None:
        """Read the last replies of a call that has ended, for `receive`.

        gRPC reports the status of a call after its last reply is read, so a sender without a reader
        would wait for the status without end.
        """
        async with self._one_reader:
            with suppress(grpc.aio.AioRpcError):
                while (data := await self._call.read()) is not grpc.aio.EOF:
                    self._stored_replies.append(bytes(data))

    def _error(self, error: grpc.aio.AioRpcError) -> SwarmError:
        details, trailing = error.details(), error.trailing_metadata()
        return from_status(error.code(), details or "", trailing, self._remote)


# ---- the serving end of gRPC

END_GRACE_S = 0.2
END_GRACE_TURNS = 10
"""Grace after which an end of messages counts as a clean one.

gRPC reports a vanished client first as the end of its messages, then as the end of the call: 3 ms
later as a rule, 44 ms on a starved loop. So the call has to outlive the end of its messages by this
many seconds and by this many turns of the loop.
"""


class GrpcServer:
    """Server of calls over gRPC; see `Server`.

    Every rpc is registered as a stream both ways: on gRPC's wire a unary rpc is a stream of one
    message, so clients of any language may call it as the proto declares.

    Args:
        options: Settings of its links.
        handlers: Handlers by method.
        meter: Meter of its calls.
    """

    def __init__(
        self,
        options: GrpcOptions,
        handlers: Mapping[Method[Any, Any], Handler],
        meter: Meter | None = None,
    ) -> None:
        self._options = options
        self._meter = meter or Meter()
        largest = max((method.request_bytes for method in handlers), default=0)
        arguments = server_arguments(options, largest, max_connections(raise_open_files()))
        self._server = grpc.aio.server(options=arguments)
        for method, handler in handlers.items():
            self._register(method, handler)
        self._endpoint = ""
        self._is_fronted = False
        self._on_flood: OnFlood = lambda _remote: None
        self._running: dict[asyncio.Task[SwarmError | None], ServerStream[Any, Any]] = {}
        validity = options.credentials.validity if options.credentials else None
        self._open: OpenCalls[ServerStream[Any, Any]] = OpenCalls(validity, ServerStream.refuse)

    @property
    def endpoint(self) -> str:
        """See `Server`."""
        return self._endpoint

    def on_flood(self, notify: OnFlood) -> None:
        """Call `notify` with the other end, `host:port`, of each connection that sends too much."""
        self._on_flood = notify

    async def start_at(self, place: LocalPlace) -> None:
        """Serve at a local place of this process from now on."""
        self._bind(place.target)
        self._is_fronted, self._endpoint = True, place.target
        await self._server.start()
        self._open.start()

    async def start(self, host: str, port: int) -> None:
        """Bind, and serve from now on.

        Raises:
            PortInUse: gRPC cannot bind; it gives no reason.
        """
        try:
            bound = self._bind(format_endpoint(host, port))
        except RuntimeError as error:  # taken since the check, or refused by gRPC
            await self._server.stop(None)
            raise refusal(host, port, error) from None
        self._endpoint = format_endpoint(host, bound)
        await self._server.start()
        self._open.start()

    def callers(self) -> set[str]:
        """Return the other ends, `host:port`, of all connections with a call under way."""
        return {stream.remote for stream in self._running.values()}

    async def stop(self, grace_s: float = 0.0) -> None:
        """See `Server`."""
        self._open.stop()
        # This method ends the calls with a reason, instead of gRPC: its clients print a line of
        # their own when a server cuts calls off. gRPC's own deadline is a safeguard.
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
        credentials = self._options.credentials
        if credentials is None:
            return int(self._server.add_insecure_port(address))
        return int(self._server.add_secure_port(address, credentials.for_server()))

    def _remote(self, peer: str) -> str:
        """Return the caller's `host:port` from gRPC's text, such as `ipv4:127.0.0.1:5000`."""
        if self._is_fronted:
            return caller_of(peer)
        return unquote(peer).partition(":")[2]  # an IPv6 address's brackets are escaped

    def _caller(self, method: Method[Any, Any], context: grpc.aio.ServicerContext) -> Caller | None:
        """Return the caller, if it may call the method.

        Raises:
            NotAllowed: It may not.
        """
        credentials = self._options.credentials
        caller = credentials.caller(context.auth_context()) if credentials else None
        check_rule(method, caller)
        return caller

    async def _serve(
        self, method: Method[Any, Any], handler: Handler, context: grpc.aio.ServicerContext
    ) -> None:
        try:
            remote = self._remote(context.peer())
        except SwarmError as error:
            await context.abort(STATUS[error.code], error.code, to_metadata(error))
        stream: ServerStream[Any, Any] = ServerStream(
            context,
            remote,
            method.reply,
            method.request,
            method.reply_bytes,
            method.request_bytes,
        )
        try:
            caller = self._caller(method, context)
            meter = CallMeter(self._meter, method, caller, remote, stream.lost, self._on_flood)
            stream.set_caller(caller, meter)
        except SwarmError as error:
            await context.abort(STATUS[error.code], error.code, to_metadata(error))
        # `abort` sends the initial metadata again while the first `write` is on its way. gRPC
        # refuses that batch, and the call then never gets a status.
        await context.send_initial_metadata(())
        patience_s = self._options.first_message_s
        waiting = asyncio.get_running_loop().call_later(patience_s, stream.lose_if_silent)
        running = asyncio.create_task(run_handler(handler, stream, method, stream.lost))
        running.add_done_callback(lambda _: waiting.cancel())
        self._running[running] = stream
        running.add_done_callback(self._running.pop)
        self._open.add(stream, caller)
        try:
            await first_done(running, stream.lost)
        finally:  # gRPC cancels this task, and only this one, when the client is gone
            self._open.discard(stream)
            stream.lose(f"{stream.remote} is gone")
        failure = stream.refusal
        if failure is None:
            failure = running.result() if running.done() else Unavailable(stream.lost.result())
        if failure is not None:
            await context.abort(STATUS[failure.code], failure.code, to_metadata(failure))


class ServerStream(GrpcStream[Out, In]):
    """Server's end of a call."""

    _has_received = False
    _meter: CallMeter | None = None
    refusal: SwarmError | None = None
    """Error that ended the call because its caller became invalid; None otherwise."""

    def refuse(self, error: SwarmError) -> None:
        """End the call with this error, because its caller became invalid."""
        if not self.lost.done():
            self.refusal = error
            self.lose(error.message)

    def lose_if_silent(self) -> None:
        """End the call, unless the client has sent a message."""
        if not self._has_received:
            self.lose(f"{self._remote} opened a call and sent nothing")

    def set_caller(self, caller: Caller | None, meter: CallMeter) -> None:
        """Set the call's caller and meter, before the first read."""
        self._caller, self._meter = caller, meter

    async def _read(self) -> bytes | None:
        try:
            data = await self._call.read()
        except grpc.aio.BaseError as error:
            raise self._gone() from error
        self._has_received = True
        if data is not grpc.aio.EOF:
            if self._meter is not None:
                await self._meter.received(len(data))
            return bytes(data)
        if await self._is_lost_soon():
            raise self._gone()
        return None

    async def _write(self, data: bytes) -> None:
        if self._meter is not None:
            await self._meter.replied(len(data))
        try:
            await self._call.write(data)
        except grpc.aio.BaseError as error:
            raise self._gone() from error

    async def _half_close(self) -> None:
        """Do nothing: a server ends its messages by its handler's return."""

    async def _is_lost_soon(self) -> bool:
        await asyncio.wait({self.lost}, timeout=END_GRACE_S)
        for _ in range(END_GRACE_TURNS):
            await asyncio.sleep(0)
        return self.lost.done()

    def _gone(self) -> Unavailable:
        return Unavailable(f"{self._remote} is gone")


class GrpcTransport:
    """Transport over gRPC; see `Transport`.

    Args:
        options: Settings of all its links.
        meter: Meter of the calls to its servers; None: with the default rates.
    """

    def __init__(self, options: GrpcOptions | None = None, meter: Meter | None = None) -> None:
        self._options = options or GrpcOptions()
        self._meter = meter or Meter()

    async def serve(
        self, host: str, port: int, handlers: Mapping[Method[Any, Any], Handler]
    ) -> GrpcServer:
        """See `Transport`."""
        if self._options.credentials is None:
            check_plaintext(format_endpoint(host, 1))
        await check_address(host, port)
        server = GrpcServer(self._options, handlers, self._meter)
        await server.start(host, port)
        return server

    async def serve_at(
        self, place: LocalPlace, handlers: Mapping[Method[Any, Any], Handler]
    ) -> GrpcServer:
        """Serve like `serve`, at a place that only this process connects to."""
        server = GrpcServer(self._options, handlers, self._meter)
        await server.start_at(place)
        return server

    def connect(self, endpoint: str, name: str = "") -> GrpcChannel:
        """See `Transport`."""
        if not endpoint:
            raise Unavailable(f"peer {name} is not in the DHT")
        if self._options.credentials is None:
            check_plaintext(endpoint)
        return GrpcChannel(endpoint, name, self._options)

    def connect_at(self, place: LocalPlace, endpoint: str, name: str) -> GrpcChannel:
        """Connect like `connect`, through a local place that leads to `endpoint`."""
        return GrpcChannel(endpoint, name, self._options, place)
