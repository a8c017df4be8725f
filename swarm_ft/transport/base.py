"""Calls as streams of messages, independent of gRPC and of the messages' meaning.

Messages are values of `protocol`. A stream encodes and decodes them by its `Method`, so that
handlers receive checked values only.

Every call of any kind is one `MessageStream` seen from two ends; a unary call is one message each
way. `grpc_transport` carries calls between machines, and `memory` within a process. One conformance
suite holds both to this module's contract.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from swarm_ft.base.log import get_logger
from swarm_ft.errors import InternalError, MalformedMessage, SwarmError, Unavailable
from swarm_ft.identity.roles import Caller
from swarm_ft.protocol.wire.convert import WireType

Send = TypeVar("Send", contravariant=True)
Receive = TypeVar("Receive", covariant=True)
Request = TypeVar("Request")
Reply = TypeVar("Reply")


class MessageStream(Protocol[Send, Receive]):
    """An end of a call.

    Any number of tasks may send; one at a time may receive. Cancelling `receive` loses no message.
    A cancelled `send` has sent its message whole or not at all, and later ones keep their order.
    """

    @property
    def remote(self) -> str:
        """Address of the other side, for people to read."""
        ...

    @property
    def caller(self) -> Caller | None:
        """Caller by its certificate, at a server; None if links are not encrypted."""
        ...

    async def send(self, message: Send) -> None:
        """Send one message; wait while the other side is slow to read.

        Raises:
            SwarmError: The error with which the other side ended the call.
            Unavailable: The other side is gone, or ended the call without an error.
            MalformedMessage: The message is larger than the transport carries.
        """
        ...

    async def receive(self) -> Receive | None:
        """Return the next message, or None after the other side's clean end.

        Raises:
            SwarmError: The error with which the other side ended the call.
            Unavailable: The other side is gone, or this side cancelled the call.
            MalformedMessage: The bytes are not the expected message, or a field is out of its
                bounds; the error names the other side.
            VersionMismatch: The other side has another version of the protocol.
        """
        ...

    async def finish(self) -> None:
        """Announce the end of this client's messages; it may still receive. Servers return."""
        ...

    async def cancel(self) -> None:
        """Drop the call now, with messages under way; do nothing once it has ended."""
        ...


# Handlers of different messages share one table; each declares its own types.
Handler = Callable[[MessageStream[Any, Any]], Awaitable[None]]
"""Handler of one call. A return ends the call cleanly.

A SwarmError reaches the other side as it is, and any other exception as InternalError without
detail. When the other side goes away, `send` and `receive` raise Unavailable; a handler that waits
for something else is cancelled soon after.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Method(Generic[Request, Reply]):
    """An rpc of a proto service.

    Attributes:
        service: Full name of the service, for example `swarm_ft.v1.Coordinator`.
        name: Name of the rpc, for example `Join`.
        request: Wire type of the client's messages.
        reply: Wire type of the server's messages.
        request_bytes: Bytes of the client's largest message.
        reply_bytes: Bytes of the server's largest message.
    """

    service: str
    name: str
    request: WireType[Request]
    reply: WireType[Reply]
    request_bytes: int
    reply_bytes: int

    @property
    def path(self) -> str:
        """Path of the rpc on the wire: `/swarm_ft.v1.Coordinator/Join`."""
        return f"/{self.service}/{self.name}"

    def __str__(self) -> str:
        return f"{self.service.rpartition('.')[2]}.{self.name}"


class Server(Protocol):
    """A listener with its handlers."""

    @property
    def endpoint(self) -> str:
        """Address that the listener bound, `host:port`."""
        ...

    async def stop(self, grace_s: float = 0.0) -> None:
        """Accept no more calls, give those under way `grace_s` to end, then drop them.

        Return when every handler has ended.
        """
        ...


class Channel(Protocol):
    """A connection to one server; it sends nothing before the first call."""

    def open(self, method: Method[Request, Reply]) -> MessageStream[Request, Reply]:
        """Begin a call. An unreachable server shows in the first send or receive."""
        ...

    async def close(self) -> None:
        """Drop all calls and the connection."""
        ...


class Transport(Protocol):
    """Carrier of calls between processes."""

    async def serve(
        self, host: str, port: int, handlers: Mapping[Method[Any, Any], Handler]
    ) -> Server:
        """Listen on `host:port` (0: any free port), and serve calls from now on.

        Raises:
            PortInUse: The address is taken.
            BadOption: The address is not one of this machine's, or not allowed.
        """
        ...

    def connect(self, endpoint: str, name: str = "") -> Channel:
        """Return a channel to `host:port`; needs a running event loop.

        Args:
            endpoint: Address of the server; empty: the address that the transport knows for `name`.
            name: Name that the server has to prove, where links are encrypted: a peer's id, or
                `COORDINATOR_NAME`. Any other server is Unavailable, and so is every server
                without a name.

        Raises:
            Unavailable: The transport knows no address of `name`.
            BadOption: Links are not encrypted, and the address is another machine's.
        """
        ...


async def call(
    channel: Channel, method: Method[Request, Reply], request: Request, timeout_s: float
) -> Reply:
    """Send one request, and return the one reply.

    Raises:
        SwarmError: The error that the other side raised.
        Unavailable: The other side cannot be reached, or did not answer within `timeout_s`.
        MalformedMessage: The other side ended the call without a reply.
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
    # Wait for the call's end: an error after the reply counts, and no handler is cut short.
    if await stream.receive() is not None:
        raise MalformedMessage(f"{stream.remote} sent more than the one reply of {method}")
    return reply


# ---- running a handler to its end, over any transport

LOST_GRACE_S = 1.0
"""Seconds that a handler may continue after its call is lost."""

HIDDEN = "the other side failed at this call; its log says why"

_logger = get_logger(__name__, lines_per_s=10)
# The log has a limit: a caller that finds a bug may call again and again.


async def run_handler(
    handler: Handler,
    stream: MessageStream[Any, Any],
    method: Method[Any, Any],
    lost: asyncio.Future[str],
) -> SwarmError | None:
    """Run `handler`; return the error to send to the other side, None for a clean end.

    Args:
        handler: The handler.
        stream: Its end of the call.
        method: Method of the call, for the log.
        lost: Future with the reason, done when the call is lost. `stream` must then raise
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
    # An exception other than a SwarmError is our bug: it goes to the log, and the other side learns
    # no detail.
    try:
        await handler(stream)
    except Exception as error:
        known = first_error(error)
        if known is None:
            _logger.exception("handler_failed method=%s remote=%s", method, stream.remote)
        return known or InternalError(HIDDEN)
    return None


async def first_done(*futures: asyncio.Future[Any]) -> None:
    """Wait until one future is done; cancelling this call cancels none of them."""
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


async def until_one_ends(*parts: Awaitable[None]) -> None:
    """Run all parts at once; the first that ends cancels the others, and its error is raised."""
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
    """Return a SwarmError as it is, or the first of a TaskGroup with no others; else None."""
    if isinstance(error, ExceptionGroup):
        return None if error.split(SwarmError)[1] else first_error(error.exceptions[0])
    return error if isinstance(error, SwarmError) else None
