"""A relay joins two legs of one meeting. It sees ciphertext, and who talks to whom how much.

Nobody gets in without a ticket that the coordinator signed, which is good for one leg of one
meeting and for a minute. One that goes away costs its meetings a reconnect. The coordinator's own
is beside it; others are processes of their own, which keep a conversation with it (`Attendance`).
"""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random

from swarm_ft.errors import (
    Busy,
    MalformedMessage,
    NotAllowed,
    SwarmError,
    Unavailable,
    VersionMismatch,
)
from swarm_ft.identity.keys import PublicKey, public_key
from swarm_ft.identity.roles import COORDINATOR_NAME
from swarm_ft.identity.tickets import Ticket, check_ticket
from swarm_ft.log import get_logger
from swarm_ft.protocol.messages.meeting import FromRelay, RelayCarries, RelayHello, RelayWelcome
from swarm_ft.reach.front import Front
from swarm_ft.reach.sockets import (
    GREETING_S,
    JOINED,
    Address,
    Joint,
    receive_exactly,
    send_address,
)
from swarm_ft.transport.base import MessageStream, Transport, until_one_ends
from swarm_ft.transport.methods import RELAY

logger = get_logger(__name__)

WAIT_S = 15.0
"""How long a leg waits for the other one."""
MAX_WAITING = 256
SAID_EVERY_S = 2.0
"""How often the coordinator hears of a relay: it gives up after some silence."""
TOLD_EVERY_S = 60.0
MIN_RETRY_S, MAX_RETRY_S = 0.25, 2.0
"""Between calls of a coordinator that does not answer."""

Stream = MessageStream[FromRelay, RelayWelcome]


@dataclass(frozen=True, kw_only=True, slots=True)
class RelayLimits:
    """What a relay gives away.

    Attributes:
        links: at a time.
        link_bytes_per_s: of one, each way.
        bytes_per_s: of all together, each way.
    """

    links: int = 256
    link_bytes_per_s: float = math.inf
    bytes_per_s: float = math.inf


class Relay:
    """See the module's docstring.

    Args:
        front: where legs come in.
        keys: whose tickets count: the coordinator's key, as of now.
        limits: what it gives away.
        unix_s: the coordinator's clock, by which tickets end.
    """

    def __init__(
        self,
        front: Front,
        keys: Callable[[], PublicKey],
        limits: RelayLimits | None = None,
        unix_s: Callable[[], float] = time.time,
    ) -> None:
        self._front = front
        self._keys = keys
        self._unix_s = unix_s
        self._limits = limits or RelayLimits()
        self._waiting: dict[Ticket, asyncio.Future[socket.socket]] = {}
        self._joints: set[Joint] = set()
        self._ended_bytes = 0
        front.on_leg(self._leg)

    @property
    def carries(self) -> RelayCarries:
        """How much, as of now."""
        moved_bytes = self._ended_bytes + sum(joint.moved_bytes for joint in self._joints)
        is_full = len(self._joints) >= self._limits.links
        return RelayCarries(links=len(self._joints), is_full=is_full, relayed_bytes=moved_bytes)

    async def tell(self) -> None:
        """A line a minute as long as it moves anything, until cancelled; how much it was then."""
        before = self.carries
        try:
            while True:
                await asyncio.sleep(TOLD_EVERY_S)
                now = self.carries
                num_bytes = now.relayed_bytes - before.relayed_bytes
                if num_bytes or now.links != before.links:
                    mbps = 8e-6 * num_bytes / TOLD_EVERY_S
                    logger.info("relay links=%d bytes=%d mbps=%.1f", now.links, num_bytes, mbps)
                before = now
        finally:
            logger.info("relay bytes=%d in all", self.carries.relayed_bytes)

    async def _leg(self, sock: socket.socket, remote: Address) -> None:
        async with asyncio.timeout(GREETING_S):
            (length,) = await receive_exactly(sock, 1)
            shown = await receive_exactly(sock, length)
            ticket = check_ticket(self._keys(), shown, self._unix_s())
            self._front.keep(sock, remote)
            await send_address(sock, remote)
        other = self._waiting.pop(Ticket(ticket.meeting, not ticket.is_caller), None)
        if other is not None and not other.done():
            other.set_result(sock)
            return
        await self._wait(ticket, sock)

    async def _wait(self, ticket: Ticket, sock: socket.socket) -> None:
        """The first leg waits for the second, and joins them."""
        if len(self._waiting) >= MAX_WAITING or self.carries.is_full:
            raise Busy(f"this relay has {len(self._joints)} links; try another one")
        second: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()
        replaced = self._waiting.get(ticket)
        if replaced is not None:
            replaced.cancel()
        self._waiting[ticket] = second
        try:
            async with asyncio.timeout(WAIT_S):
                other = await second
        finally:
            if self._waiting.get(ticket) is second:
                del self._waiting[ticket]
        await self._join(sock, other)

    async def _join(self, one: socket.socket, other: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            for sock in (one, other):
                await loop.sock_sendall(sock, JOINED)
        except BaseException:
            other.close()
            raise
        joint = Joint(one, other, self._rate)
        self._joints.add(joint)
        logger.debug("a link begins: %d now", len(self._joints))
        try:
            await joint.wait()
        finally:
            self._joints.discard(joint)
            self._ended_bytes += joint.moved_bytes
            logger.debug("a link ended: %d now", len(self._joints))

    def _rate(self) -> float:
        shared = self._limits.bytes_per_s / max(1, len(self._joints))
        return min(self._limits.link_bytes_per_s, shared)


class Attendance:
    """A relay's conversation with the coordinator, begun anew whenever it breaks.

    It has the key of the coordinator that last welcomed it, and goes on with what it carries
    whatever becomes of that.

    Args:
        transport: reaches the coordinator.
        find_coordinator: tells where it is.
        rng: so that not all call in step.
    """

    def __init__(
        self,
        transport: Transport,
        find_coordinator: Callable[[], Awaitable[str]],
        rng: Random,
    ) -> None:
        self._transport = transport
        self._find_coordinator = find_coordinator
        self._rng = rng
        self._key: PublicKey | None = None
        self._behind_s = 0.0
        self.welcomed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done once a coordinator knows this relay: where members are told that it is."""

    def key(self) -> PublicKey:
        """Whose tickets count.

        Raises:
            Unavailable: no coordinator has told one yet.
        """
        if self._key is None:
            raise Unavailable("no coordinator knows this relay yet")
        return self._key

    def unix_s(self) -> float:
        """The coordinator's clock."""
        return time.time() + self._behind_s

    async def run(self, relay: Relay, hello: RelayHello) -> None:
        """Be known as a relay, until cancelled.

        Raises:
            NotAllowed: its key was revoked, it has no relay's invitation, or it is elsewhere than
                it says.
            VersionMismatch: this relay or the coordinator is to be updated.
        """
        reason = ""
        while True:
            try:
                await self._converse(relay, hello)
            except (NotAllowed, VersionMismatch):
                raise
            except SwarmError as error:  # it comes back, or is found anew
                if error.message != reason:
                    logger.warning("coordinator: %s; trying on", error.message)
                reason = error.message
            await asyncio.sleep(self._rng.uniform(MIN_RETRY_S, MAX_RETRY_S))

    async def _converse(self, relay: Relay, hello: RelayHello) -> None:
        channel = self._transport.connect(await self._find_coordinator(), COORDINATOR_NAME)
        try:
            stream = channel.open(RELAY)
            await stream.send(hello)
            welcome = await stream.receive()
            if welcome is None:
                raise Unavailable("it ended the conversation")
            self._key = public_key(welcome.ticket_key)
            self._behind_s = welcome.unix_s - time.time()
            logger.info("members are told of this relay at %s", welcome.endpoint)
            if not self.welcomed.done():
                self.welcomed.set_result(welcome.endpoint)
            await until_one_ends(_say(stream, relay), _until_ended(stream))
        finally:
            await channel.close()


async def _say(stream: Stream, relay: Relay) -> None:
    while True:
        await stream.send(relay.carries)
        await asyncio.sleep(SAID_EVERY_S)


async def _until_ended(stream: Stream) -> None:
    if await stream.receive() is not None:
        raise MalformedMessage(f"{stream.remote} welcomed this relay twice")
