"""A peer's side of the conversation with the coordinator; it is begun anew whenever it breaks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from random import Random

from swarm_ft.discovery.directory import Directory, find_coordinator
from swarm_ft.errors import NotAllowed, SwarmError, VersionMismatch
from swarm_ft.identity.roles import COORDINATOR_NAME
from swarm_ft.log import get_logger
from swarm_ft.peer.links import Backoff
from swarm_ft.protocol.messages.control import FromPeer, PeerAlive, PeerGoodbye, PeerHello, ToPeer
from swarm_ft.transport.base import Channel, MessageStream, Transport, until_one_ends
from swarm_ft.transport.methods import JOIN

logger = get_logger(__name__)

MIN_RECONNECT_S, MAX_RECONNECT_S = 0.25, 2.0
"""Between tries to join. A coordinator that starts again gathers peers for a little longer."""
ALIVE_EVERY_S = 2.0
"""How often the coordinator hears from this peer at least; it gives up after some silence."""
GOODBYE_S = 2.0
"""How long a goodbye may take to be heard, when the coordinator may be gone too."""

MAX_INBOX = 64
"""Messages that wait until the ones before are obeyed; then the coordinator has to wait."""

ControlStream = MessageStream[FromPeer, ToPeer]
Inbox = asyncio.Queue[ToPeer | SwarmError | None]


class CoordinatorLink:
    """See the module's docstring.

    Args:
        directory: where the coordinator is found.
        transport: how it is reached.
        rng: draws how long to wait between tries.
        hello: what this peer says first, every time.
        alive: what it says from time to time.
        obey: does what the coordinator says, one message after the other.
        obey_at_once: does what need not wait for earlier messages, and tells whether it did.
        beside: is done with the coordinator's channel beside all that, every time.
    """

    def __init__(  # noqa: PLR0913 - a conversation's parts
        self,
        directory: Directory,
        transport: Transport,
        *,
        rng: Random,
        hello: Callable[[], PeerHello],
        alive: Callable[[], Iterable[PeerAlive]],
        obey: Callable[[ToPeer], Awaitable[None]],
        obey_at_once: Callable[[ToPeer], bool] = lambda _: False,
        beside: Callable[[Channel], Awaitable[None]],
    ) -> None:
        self._directory = directory
        self._transport = transport
        self._hello = hello
        self._alive = alive
        self._obey = obey
        self._obey_at_once = obey_at_once
        self._beside = beside
        self._backoff = Backoff(rng, min_s=MIN_RECONNECT_S, max_s=MAX_RECONNECT_S)
        # Bounded: after some messages a step the peer has nothing to say until it is told to go on.
        self._outbox: asyncio.Queue[FromPeer] = asyncio.Queue()
        self._is_ended = asyncio.Event()
        # Told already; the same one later, after it was over, is another.
        self._trouble = ""

    def say(self, message: FromPeer) -> None:
        """Say this soon; it is forgotten if the conversation breaks before."""
        self._outbox.put_nowait(message)

    async def say_goodbye(self) -> None:
        """Tell the coordinator that this peer leaves, and wait until it heard it, if not for long.

        Who hung up at once would take back what is on its way.
        """
        self._is_ended.clear()
        self.say(PeerGoodbye())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_ended.wait(), GOODBYE_S)

    async def stay_joined(self) -> None:
        """Find the coordinator and do as it says, again and again, until cancelled.

        Whatever else the coordinator says of it, this peer stays.

        Raises:
            VersionMismatch: one of the two is to be updated.
            NotAllowed: this peer's key was revoked.
        """
        while True:
            try:
                await self._join_once()
            except (VersionMismatch, NotAllowed):
                raise
            except SwarmError as error:  # its trouble may pass, and the weights here are kept
                if error.message != self._trouble:
                    logger.warning("coordinator: %s; trying on", error.message)
                self._trouble = error.message
            await asyncio.sleep(self._backoff.draw_s())

    async def _join_once(self) -> None:
        endpoint = await find_coordinator(self._directory)
        channel = self._transport.connect(endpoint, COORDINATOR_NAME)
        try:
            stream = channel.open(JOIN)
            while not self._outbox.empty():
                self._outbox.get_nowait()  # said to a coordinator that is gone; hello tells anew
            await stream.send(self._hello())
            logger.info("joined the coordinator at %s", endpoint)
            inbox: Inbox = asyncio.Queue(MAX_INBOX)
            parts = self._write(stream), self._obey_all(inbox), self._stay_alive()
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
                self.say(alive)

    async def _write(self, stream: ControlStream) -> None:
        while True:
            message = await self._outbox.get()
            await stream.send(message)
            if isinstance(message, PeerGoodbye):
                await stream.finish()  # it ends the call when it has read all
                await self._is_ended.wait()

    async def _read(self, stream: ControlStream, inbox: Inbox) -> None:
        """Pass messages on, and at last how they ended: all that came before is obeyed first."""
        try:
            while (message := await stream.receive()) is not None:
                self._backoff.reset()
                self._trouble = ""
                if not self._obey_at_once(message):
                    await inbox.put(message)
            await inbox.put(None)
        except SwarmError as error:
            await inbox.put(error)
        await asyncio.Event().wait()

    async def _obey_all(self, inbox: Inbox) -> None:
        while (item := await inbox.get()) is not None:
            if isinstance(item, SwarmError):
                raise item
            await self._obey(item)
        self._is_ended.set()
