"""Calls as streams of messages, whatever carries them. It knows no gRPC and no message's meaning.

Messages are values of `protocol`. A stream turns them into bytes and back as its `Method` says, so
that what a handler receives is checked.

Every call, of whatever kind, is one `MessageStream` seen from two ends; a unary call is one
message each way. `grpc_transport` carries calls between machines, `memory` inside a process,
and one conformance suite holds both to what is written here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from swarm_ft.errors import InternalError, MalformedMessage, SwarmError, Unavailable
from swarm_ft.identity.roles import Caller
from swarm_ft.log import get_logger
from swarm_ft.protocol.wire.convert import WireType

Send = TypeVar("Send", contravariant=True)
Receive = TypeVar("Receive", covariant=True)
Request = TypeVar("Request")
Reply = TypeVar("Reply")


class MessageStream(Protocol[Send, Receive]):
    """One end of a call.

    Any number of tasks may send; one at a time may receive. Cancelling `receive` loses no
    message. A `send` that is cancelled has sent its message wholly or not at all, and later
    ones still keep their order.
    """

    @property
    def remote(self) -> str:
        """The other side's address, for people to read."""
        ...

    @property
    def caller(self) -> Caller | None:
        """Servers: who calls, by its certificate; None where links are not encrypted."""
        ...

    async def send(self, message: Send) -> None:
        """Hand over one message; waits while the other side is slow to read.

        Raises:
            SwarmError: the error with which the other side ended the call.
            Unavailable: the other side is gone, or ended the call without an error.
            MalformedMessage: the message is larger than the transport carries.
        """
        ...

    async def receive(self) -> Receive | None:
        """The next message, or None once the other side has cleanly said its last.

        Raises:
            SwarmError: the error with which the other side ended the call.
            Unavailable: the other side is gone, or this side cancelled.
            MalformedMessage: the bytes are not the message they should be, or it has a field out
                of its bounds; the error names the other side.
            VersionMismatch: the other side speaks another version of the protocol.
        """
        ...

    async def finish(self) -> None:
        """Client: no more messages will be sent; receiving goes on. Servers return instead."""
        ...

    async def cancel(self) -> None:
        """Drop the call now, with what is under way in it; nothing once it has ended."""
        ...


# Handlers of different messages share one table; each states its own types.
Handler = Callable[[MessageStream[Any, Any]], Awaitable[None]]
"""Serves one call. Returning ends it cleanly; a SwarmError reaches the other side as it is,
anything else as InternalError without detail. When the other side goes away, `send` and
`receive` raise Unavailable; a handler that waits for something else is cancelled soon after."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Method(Generic[Request, Reply]):
    """One rpc of a proto service.

    Attributes:
        service: full name, for example `swarm_ft.v1.Coordinator`.
        request: how what the client sends travels.
        reply: how what the server sends does.
        request_bytes: of the largest message that the client sends.
        reply_bytes: of the largest that the server sends.
    """

    service: str
    name: str
    request: WireType[Request]
    reply: WireType[Reply]
    request_bytes: int
    reply_bytes: int

    @property
    def path(self) -> str:
        """As it goes over the wire: `/swarm_ft.v1.Coordinator/Join`."""
        return f"/{self.service}/{self.name}"

    def __str__(self) -> str:
        return f"{self.service.rpartition('.')[2]}.{self.name}"


class Server(Protocol):
    """A listener that is serving."""

    @property
    def endpoint(self) -> str:
        """`host:port` as really bound."""
        ...

    async def stop(self, grace_s: float = 0.0) -> None:
        """Take no more calls, give those under way `grace_s` to end, then drop them.

        Returns when every handler has ended.
        """
        ...


class Channel(Protocol):
    """A way to one server. Nothing is sent before the first call."""

    def open(self, method: Method[Request, Reply]) -> MessageStream[Request, Reply]:
        """Begin a call. That the server cannot be reached shows in its first send or receive."""
        ...

    async def close(self) -> None:
        """Drop all calls and the connection."""
        ...


class Transport(Protocol):
    """Carries calls from one process to another."""

    async def serve(
        self, host: str, port: int, handlers: Mapping[Method[Any, Any], Handler]
    ) -> Server:
        """Listen on `host:port` (0: any free port) and serve calls from now on.

        Raises:
            PortInUse: the address is taken.
            BadOption: the address is not one of this machine's, or not allowed.
        """
        ...

    def connect(self, endpoint: str, name: str = "") -> Channel:
        """A channel to `host:port`; needs a running event loop.

        Args:
            endpoint: where; empty: wherever `name` is.
            name: who has to answer there, where links are encrypted: a peer's id, or
                `COORDINATOR_NAME`. Anybody else is Unavailable, as everybody is without it.

        Raises:
            Unavailable: nobody here knows where that is.
            BadOption: links are not encrypted, and it is another machine's.
        """
        ...


async def call(
    channel: Channel, method: Method[Request, Reply], request: Request, timeout_s: float
) -> Reply:
    """Send one request, and return the one reply.

    Raises:
        SwarmError: as the other side raised it.
        Unavailable: it cannot be reached, or did not answer within `timeout_s`.
        MalformedMessage: it ended the call without a reply.
    """
    stream = channel.open(method)
    try:
        async with asyncio.timeout(timeout_s):
            return await _exchange(stream, method, request)
    except TimeoutError:
        raise Unavailable(
            f"{stream.remote} did not answer {method} within {timeout_s:g} s"
        ) from None
    finally:
        await stream.cancel()


async def _exchange(
    stream: MessageStream[Request, Reply], method: Method[Request, Reply], request: Request
) -> Reply:
    await stream.send(request)
    await stream.finish()
    reply = await stream.receive()
    if reply is None:
        raise MalformedMessage(f"{stream.remote} ended {method} without the one reply expected")
    # The call's own end: an error after the reply counts, and a handler is not cut short.
    if await stream.receive() is not None:
        raise MalformedMessage(f"{stream.remote} sent more than the one reply of {method}")
    return reply


# ---- running a handler to its end, whatever carries its call

LOST_GRACE_S = 1.0
"""How long a handler may go on after its call is lost before it is cancelled."""

HIDDEN = "the other side failed at this call; its log says why"

_logger = get_logger(__name__, lines_per_s=10)
# A caller that finds a bug may call again and again.


async def run_handler(
    handler: Handler,
    stream: MessageStream[Any, Any],
    method: Method[Any, Any],
    lost: asyncio.Future[str],
) -> SwarmError | None:
    """Run `handler`; return the error that the other side is to be told, None for a clean end.

    Args:
        handler: what to run.
        stream: its end of the call.
        method: names the call in the log.
        lost: done when the call is no more, with the reason. `stream` must then raise
            Unavailable; a handler that does not notice is cancelled after LOST_GRACE_S.
    """
    running = asyncio.create_task(_outcome(handler, stream, method))
    try:
        await first_done(running, lost)
        await asyncio.wait({running}, timeout=LOST_GRACE_S)
    finally:
        running.cancel()
        await asyncio.wait({running})
    return Unavailable("the call was dropped") if running.cancelled() else running.result()


async def _outcome(
    handler: Handler, stream: MessageStream[Any, Any], method: Method[Any, Any]
) -> SwarmError | None:
    # Anything but a SwarmError is our bug: it is logged here, and the other side learns no
    # detail of it.
    try:
        await handler(stream)
    except Exception as error:
        spoken = first_error(error)
        if spoken is None:
            _logger.exception("handler_failed method=%s remote=%s", method, stream.remote)
        return spoken or InternalError(HIDDEN)
    return None


async def first_done(*futures: asyncio.Future[Any]) -> None:
    """Wait until one of them is done; cancelling this cancels none of them."""
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


async def until_one_ends(*parts: Awaitable[None]) -> None:
    """Do all of these at once; the first that ends, ends the others, and its error is raised."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        await first_done(*tasks)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def first_error(error: Exception) -> SwarmError | None:
    """The SwarmError that it is, or the first of a TaskGroup's if it has no others; else None."""
    if isinstance(error, ExceptionGroup):
        return None if error.split(SwarmError)[1] else first_error(error.exceptions[0])
    return error if isinstance(error, SwarmError) else None
