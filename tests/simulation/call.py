"""One call of a simulated network, seen from both of its ends. Knows connections, no listeners."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from swarm_ft.errors import MalformedMessage, OutOfTurn, SwarmError, Unavailable
from swarm_ft.ids import RunId
from swarm_ft.protocol.messages.boundary import Frame
from swarm_ft.protocol.messages.link import LinkHello
from swarm_ft.protocol.wire.convert import WireType
from swarm_ft.transport.base import Method
from swarm_ft.transport.methods import LINK, MAX_MESSAGE_BYTES, from_bytes, to_bytes
from tests.simulation.links import Connection, Pipe
from tests.simulation.tampering import Tamperer
from tests.simulation.trace import Trace

HEADER_BYTES = 40
"""Of TCP, IP and HTTP/2, about."""


@dataclass(kw_only=True, slots=True)
class Observed:
    """The tampering with messages on their way, and their observers.

    Attributes:
        tamperer: what broken peers do to messages.
        trace: receives every message.
        window_messages: a sender waits once so many of its messages are unread.
        on_frame: called for every frame with a digest that arrives over a boundary: with its run,
            and the machines that it comes from and goes to.
    """

    tamperer: Tamperer
    trace: Trace
    window_messages: int
    on_frame: Callable[[RunId, str, str, Frame], None]


class Call:
    """The state that both ends of a call share; messages go through its connection's pipes."""

    def __init__(self, observed: Observed, method: Method[Any, Any]) -> None:
        self.observed = observed
        self.method = method
        self.connection: Connection | None = None
        self.run_id: RunId | None = None
        """What a link is for."""
        self.client: SimStream | None = None
        self.server: SimStream | None = None

    @property
    def client_name(self) -> str:
        """Return the client's name for the server's log."""
        return self.connection.client.process.name if self.connection else "client"

    def begin(self, connection: Connection) -> None:
        """The connection is up."""
        self.connection = connection
        if self.client is not None:
            self.client.changed.set()

    def put(self, num_bytes: int, arrive: Callable[[], None], *, up: bool) -> None:
        """Send something to the other end."""
        if self.connection is not None:
            pipe = self.connection.up if up else self.connection.down
            pipe.put(num_bytes, arrive)

    def pipe(self, *, up: bool) -> Pipe | None:
        """The direction, once connected."""
        if self.connection is None:
            return None
        return self.connection.up if up else self.connection.down

    def end_client(self, failure: SwarmError | None) -> None:
        """The server's last word has arrived."""
        if self.client is not None:
            self.client.ended(failure)

    def names(self, *, up: bool) -> tuple[str, str]:
        """Machines that a message comes from and goes to."""
        if self.connection is None:
            return ("", "")
        names = (self.connection.client.process.name, self.connection.server.process.name)
        return names if up else (names[1], names[0])


class SimStream:
    """One end of a call; see `MessageStream`."""

    def __init__(self, call: Call, remote: str, *, is_client: bool) -> None:
        self.changed = asyncio.Event()
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._call = call
        self._remote = remote
        ways: tuple[WireType[Any], WireType[Any]] = call.method.request, call.method.reply
        self._outgoing, self._incoming = ways if is_client else ways[::-1]
        self._is_client = is_client
        self._inbox: deque[bytes] = deque()
        self._num_unread = 0
        self._sending = asyncio.Lock()
        self._finished = False
        self._is_ended = False
        self._failure: SwarmError | None = None

    @property
    def remote(self) -> str:
        """See `MessageStream`."""
        return self._remote

    @property
    def caller(self) -> None:
        """Nobody is known: nothing is encrypted here."""

    @property
    def is_over(self) -> bool:
        """Whether nothing more can happen to it."""
        return self.lost.done() or (self._is_client and self._is_ended and not self._inbox)

    # ---- sending

    async def send(self, message: Any) -> None:
        """See `MessageStream`."""
        data = to_bytes(self._outgoing, message, MAX_MESSAGE_BYTES)
        async with self._sending:
            if self._finished and not self.lost.done():
                raise OutOfTurn("send after finish: this side has ended its messages")
            while not self._may_send():
                self.changed.clear()
                await self.changed.wait()
            self._transmit(data)

    def _may_send(self) -> bool:
        if self.lost.done():
            raise Unavailable(self.lost.result())
        if self._is_client and self._is_ended:
            if self._failure is not None:
                raise type(self._failure)(self._failure.message)
            raise Unavailable(f"{self._remote} has ended the call")
        is_connected = self._call.connection is not None
        return is_connected and self._num_unread < self._call.observed.window_messages

    def _transmit(self, data: bytes) -> None:
        call, up, observed = self._call, self._is_client, self._call.observed
        source, target = call.names(up=up)
        pipe = call.pipe(up=up)
        for sent in observed.tamperer.altered(source, target, call.method.path, data):
            self._num_unread += 1
            observed.trace.note(f"{source}>{target} {call.method.name} {len(sent.data)}")
            if pipe is not None:
                arrive = partial(self._arrive, sent.data)
                pipe.put(HEADER_BYTES + len(sent.data), arrive, sent.late_s)

    def _arrive(self, data: bytes) -> None:
        other = self._call.server if self._is_client else self._call.client
        if other is not None:
            self._show(data)
            other._inbox.append(data)
            other.changed.set()

    def _show(self, data: bytes) -> None:
        call = self._call
        if call.method.path != LINK.path:
            return
        with contextlib.suppress(MalformedMessage):  # the other end will report it
            message = LINK.request.from_bytes(data)
            if isinstance(message, LinkHello):
                call.run_id = message.run_id
            if isinstance(message, Frame) and message.result_digest and call.run_id is not None:
                source, target = call.names(up=self._is_client)
                call.observed.on_frame(call.run_id, source, target, message)

    async def finish(self) -> None:
        """See `MessageStream`."""
        async with self._sending:
            while self._call.connection is None and not self.lost.done():
                self.changed.clear()
                await self.changed.wait()
            if not self._finished:
                self._finished = True
                self._call.put(HEADER_BYTES, self._finish_arrives, up=self._is_client)

    def _finish_arrives(self) -> None:
        if self._call.server is not None:
            self._call.server.ended(None)

    # ---- receiving

    async def receive(self) -> Any:
        """See `MessageStream`."""
        while not self.lost.done() and not self._inbox and not self._is_ended:
            self.changed.clear()
            await self.changed.wait()
        if self.lost.done():
            raise Unavailable(self.lost.result())
        if self._inbox:
            return self._take()
        if self._failure is not None:
            raise type(self._failure)(self._failure.message)
        return None

    def _take(self) -> Any:
        data = self._inbox.popleft()
        other = self._call.server if self._is_client else self._call.client
        if other is not None:
            other._num_unread -= 1
            other.changed.set()
        return from_bytes(self._incoming, data, self._remote, MAX_MESSAGE_BYTES)

    def ended(self, failure: SwarmError | None) -> None:
        """The other side has sent its last message."""
        self._is_ended, self._failure = True, failure
        self.changed.set()

    # ---- ends

    async def cancel(self) -> None:
        """See `MessageStream`."""
        if self.is_over:
            return
        other_is_server = self._is_client
        call, reason = self._call, f"the call with {self._remote} was cancelled"
        self.lose(reason)

        def arrive() -> None:
            other = call.server if other_is_server else call.client
            if other is not None:
                other.lose("the other side cancelled the call")

        call.put(HEADER_BYTES, arrive, up=self._is_client)

    def lose(self, reason: str) -> None:
        """The call is no more at this end."""
        if not self.lost.done() and not self.is_over:
            self.lost.set_result(reason)
            self.changed.set()
