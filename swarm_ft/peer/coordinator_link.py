"""A peer's connection to the coordinator, which is reopened whenever it breaks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from random import Random

from swarm_ft.base.log import get_logger
from swarm_ft.discovery.directory import Directory, find_coordinator
from swarm_ft.errors import NotAllowed, SwarmError, VersionMismatch
from swarm_ft.identity.roles import COORDINATOR_NAME
from swarm_ft.peer.links import Backoff
from swarm_ft.protocol.messages.control import FromPeer, PeerAlive, PeerGoodbye, PeerHello, ToPeer
from swarm_ft.transport.base import Channel, MessageStream, Transport, until_one_ends
from swarm_ft.transport.methods import JOIN

logger = get_logger(__name__)

MIN_RECONNECT_S, MAX_RECONNECT_S = 0.25, 2.0
"""Seconds between tries to join. A restarted coordinator waits a little longer for its peers."""
ALIVE_EVERY_S = 2.0
"""Seconds between heartbeats; the coordinator declares a silent peer lost after some time."""
GOODBYE_S = 2.0
"""Seconds that a goodbye may take; the coordinator may be gone too."""

MAX_INBOX = 64
"""Messages that may wait while earlier ones are handled; then the coordinator has to wait."""

ControlStream = MessageStream[FromPeer, ToPeer]
Inbox = asyncio.Queue[ToPeer | SwarmError | None]


class CoordinatorLink:
    """The connection to the coordinator; see the module.

    Args:
        directory: Directory in which the coordinator is found.
        transport: Transport to the coordinator.
        rng: Source of the waits between tries.
        hello: Returns the first message of each connection.
        alive: Returns the heartbeats.
        handle: Handles a message; one message after the other.
        handle_immediately: Handles a message out of turn; returns whether it did.
        while_connected: Runs beside each connection, with its channel.
    """

    def __init__(  # noqa: PLR0913 - a conversation's parts
        self,
        directory: Directory,
        transport: Transport,
        *,
        rng: Random,
        hello: Callable[[], PeerHello],
        alive: Callable[[], Iterable[PeerAlive]],
        handle: Callable[[ToPeer], Awaitable[None]],
        handle_immediately: Callable[[ToPeer], bool] = lambda _: False,
        while_connected: Callable[[Channel], Awaitable[None]],
    ) -> None:
        self._directory = directory
        self._transport = transport
        self._hello = hello
        self._alive = alive
        self._handle = handle
        self._handle_immediately = handle_immediately
        self._beside = while_connected
        self._backoff = Backoff(rng, min_s=MIN_RECONNECT_S, max_s=MAX_RECONNECT_S)
        # The outbox is bounded in practice: after a few messages a step the peer waits for the
        # coordinator.
        self._outbox: asyncio.Queue[FromPeer] = asyncio.Queue()
        self._is_ended = asyncio.Event()
        # The last error that was logged. The same error is logged again after a success.
        self._last_error = ""

    def send(self, message: FromPeer) -> None:
        """Queue a message; it is dropped if the connection breaks before it is sent."""
        self._outbox.put_nowait(message)

    async def send_goodbye(self) -> None:
        """Notify the coordinator that this peer leaves, and wait up to `GOODBYE_S` for the end.

        Closing the connection at once could discard the message on its way.
        """
        self._is_ended.clear()
        self.send(PeerGoodbye())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_ended.wait(), GOODBYE_S)

    async def stay_joined(self) -> None:
        """Find the coordinator and handle its messages, again and again, until cancelled.

        The peer stays joined through all other errors that the coordinator reports.

        Raises:
            VersionMismatch: The peer or the coordinator needs an update.
            NotAllowed: This peer's key was revoked.
        """
        while True:
            try:
                await self._join_once()
            except (VersionMismatch, NotAllowed):
                raise
            except SwarmError as error:  # the error may pass, and this peer's weights stay loaded
                if error.message != self._last_error:
                    logger.warning("coordinator: %s; trying again", error.message)
                self._last_error = error.message
            await asyncio.sleep(self._backoff.draw_s())

    async def _join_once(self) -> None:
        endpoint = await find_coordinator(self._directory)
        channel = self._transport.connect(endpoint, COORDINATOR_NAME)
        try:
            stream = channel.open(JOIN)
            while not self._outbox.empty():
                self._outbox.get_nowait()  # meant for a lost connection; the hello has the state
            await stream.send(self._hello())
            logger.info("joined the coordinator at %s", endpoint)
            inbox: Inbox = asyncio.Queue(MAX_INBOX)
            parts = self._write(stream), self._handle_all(inbox), self._stay_alive()
            await until_one_ends(*parts, self._read(stream, inbox), self._do_beside(channel))
        finally:
            await channel.close()

    async def _do_beside(self, channel: Channel) -> None:
        await self._beside(channel)
        await asyncio.Event().wait()

    async def _stay_alive(self) -> None:
        while True:
            await asyncio.sleep(ALIVE_EVERY_S)
            for alive in self._alive():
                self.send(alive)

    async def _write(self, stream: ControlStream) -> None:
        while True:
            message = await self._outbox.get()
            await stream.send(message)
            if isinstance(message, PeerGoodbye):
                await stream.finish()  # the coordinator ends the call once it has read everything
                await self._is_ended.wait()

    async def _read(self, stream: ControlStream, inbox: Inbox) -> None:
        """Queue messages and then the end of the stream: earlier messages are handled first."""
        try:
            while (message := await stream.receive()) is not None:
                self._backoff.reset()
                self._last_error = ""
                if not self._handle_immediately(message):
                    await inbox.put(message)
            await inbox.put(None)
        except SwarmError as error:
            await inbox.put(error)
        await asyncio.Event().wait()

    async def _handle_all(self, inbox: Inbox) -> None:
        while (item := await inbox.get()) is not None:
            if isinstance(item, SwarmError):
                raise item
            await self._handle(item)
        self._is_ended.set()
