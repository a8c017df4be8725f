"""Relay: it joins two legs of one meeting. It sees ciphertext, both addresses, and amounts.

A leg needs a ticket that the coordinator signed, for one leg of one meeting and for a minute. The
ticket names both members, hashed, and the relay counts legs and links against the one that
requested the meeting. It reports the address of each leg to the coordinator, which sends it to the
other side. A relay that goes away costs its meetings a reconnect. The coordinator runs its own
relay; others are processes of their own, with a stream to the coordinator (`Attendance`).
"""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from random import Random

from swarm_ft.base.log import get_logger
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
from swarm_ft.protocol.messages.meeting import (
    FromRelay,
    LegSeen,
    RelayCarries,
    RelayHello,
    RelayWelcome,
)
from swarm_ft.protocol.spec.addresses import is_socket_address
from swarm_ft.reach.front import Front
from swarm_ft.reach.sockets import (
    GREETING_S,
    JOINED,
    Address,
    Joint,
    endpoint_of,
    receive_exactly,
    send_address,
)
from swarm_ft.transport.base import MessageStream, Transport, until_one_ends
from swarm_ft.transport.methods import RELAY

logger = get_logger(__name__)

WAIT_S = 15.0
"""Seconds that a leg waits for the other one."""
MAX_WAITING = 256
IDLE_S = 60.0
"""Seconds without a byte after which a link is closed.

A gRPC connection probes the other end after 3 s of silence (`GrpcOptions.keepalive_idle_s`), with
or without calls.
"""
MEMBER_LINKS = 8
"""Links that a member may have.

A peer hosts stages of four runs (`MAX_HOSTED`), and a stage has two neighbours, to each of which a
run keeps one link.
"""
MAX_MEMBER_LINKS = 32
"""... with links that it borrows, as long as half of the relay is free: a client fetches a result
from all stages, and a stage may have many replicas. Members that have fewer get these first."""
MEMBER_LEGS = 2 * MEMBER_LINKS
"""Legs of one member that may wait."""
MAX_UNREPORTED = 1024
"""Legs that may wait for their report to the coordinator; more get no punch."""
REPORT_EVERY_S = 2.0
"""Seconds between two reports to the coordinator, which gives a silent relay up."""
LOG_EVERY_S = 60.0
MIN_RETRY_S, MAX_RETRY_S = 0.25, 2.0
"""Seconds between two calls of a coordinator that does not answer."""

Stream = MessageStream[FromRelay, RelayWelcome]


@dataclass(frozen=True, kw_only=True, slots=True)
class RelayLimits:
    """Limits of a relay.

    Attributes:
        links: Links at a time, of all members.
        idle_s: Seconds without a byte after which a link is closed.
        link_bytes_per_s: Bytes per second of one link, each way.
        bytes_per_s: Bytes per second of all links together, each way.
    """

    links: int = 256
    idle_s: float = IDLE_S
    link_bytes_per_s: float = math.inf
    bytes_per_s: float = math.inf


@dataclass(eq=False, slots=True)
class _Leg:
    """The first leg of a meeting, which waits for the second.

    Attributes:
        caller: Hash of the member that requested the meeting.
        second: Future with the other leg's socket.
        over: Future that is done at the end of the link, and so of both sockets.
        joint: The link, once it stands.
    """

    caller: bytes
    second: asyncio.Future[socket.socket]
    over: asyncio.Future[None]
    joint: Joint | None = None


class Relay:
    """Relay of a process; see the module's docstring.

    Args:
        front: Front through which legs arrive.
        keys: Returns the coordinator's present key, which signs tickets.
        limits: Limits of the relay.
        unix_s: The coordinator's clock, by which tickets expire.
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
        self._waiting: dict[Ticket, _Leg] = {}
        self._callers: dict[Joint, bytes] = {}
        self._ending: set[Joint] = set()
        self._ended_bytes = 0
        self._leg_listener: Callable[[LegSeen], object] = lambda _leg: None
        front.on_leg(self._leg)

    def on_leg(self, listener: Callable[[LegSeen], object]) -> None:
        """Call `listener` with each leg with a good ticket, before the leg is answered."""
        self._leg_listener = listener

    @property
    def carries(self) -> RelayCarries:
        """Present number of links, and bytes so far."""
        num_links = len(self._callers)
        moved_bytes = self._ended_bytes + sum(joint.moved_bytes for joint in self._callers)
        is_full = num_links >= self._limits.links
        return RelayCarries(links=num_links, is_full=is_full, relayed_bytes=moved_bytes)

    async def log_traffic(self) -> None:
        """Log a line a minute while the relay is in use, until cancelled; then log the total."""
        before = self.carries
        try:
            while True:
                await asyncio.sleep(LOG_EVERY_S)
                now = self.carries
                num_bytes = now.relayed_bytes - before.relayed_bytes
                if num_bytes or now.links != before.links:
                    mbps = 8e-6 * num_bytes / LOG_EVERY_S
                    logger.info("relay links=%d bytes=%d mbps=%.1f", now.links, num_bytes, mbps)
                before = now
        finally:
            logger.info("relay bytes=%d in all", self.carries.relayed_bytes)

    async def _leg(self, sock: socket.socket, remote: Address) -> None:
        """Serve a leg as long as its socket lives, which counts for the address meanwhile."""
        async with asyncio.timeout(GREETING_S):
            (length,) = await receive_exactly(sock, 1)
            shown = await receive_exactly(sock, length)
            ticket = check_ticket(self._keys(), shown, self._unix_s())
            opposite = replace(ticket, is_caller=not ticket.is_caller)
            if opposite not in self._waiting:
                self._check_room(ticket.caller)
            self._front.keep(sock, remote)
            self._notify(ticket, endpoint_of(remote))
            await send_address(sock, remote)
        first = self._waiting.pop(opposite, None)
        if first is None or first.second.done():
            await self._wait(ticket, sock)
        else:
            first.second.set_result(sock)
            await self._follow(first, sock)

    def _notify(self, ticket: Ticket, address: str) -> None:
        if is_socket_address(address):  # a link-local one has a zone, and is of no use to others
            self._leg_listener(
                LegSeen(meeting=ticket.meeting, is_caller=ticket.is_caller, address=address)
            )

    async def _follow(self, first: _Leg, sock: socket.socket) -> None:
        """Wait with the second leg until the link is over; cancelling this ends the link."""
        try:
            await asyncio.shield(first.over)
        finally:
            if first.joint is not None:
                first.joint.close()
            sock.close()

    def _check_room(self, caller: bytes) -> None:
        """Raise Busy if no more legs may wait, or this member may begin no link."""
        own = sum(leg.caller == caller for leg in self._waiting.values())
        if len(self._waiting) >= MAX_WAITING or own >= MEMBER_LEGS:
            raise Busy(f"{own} legs of this member wait, {len(self._waiting)} of all")
        self._link_to_close(caller)

    def _link_to_close(self, caller: bytes) -> Joint | None:
        """Return the link that makes room for one more of this member; None if there is room.

        It is the idlest link of the member with most links, if that member keeps more than this
        one. So two members never take the last place from each other in turn.

        Raises:
            Busy: This member has its share, or no member has much more.
        """
        links = {j: member for j, member in self._callers.items() if j not in self._ending}
        own, num_links, limit = Counter(links.values()), len(links), self._limits.links
        may_borrow = 2 * num_links < limit and own[caller] < MAX_MEMBER_LINKS
        if own[caller] >= MEMBER_LINKS and not may_borrow:
            raise Busy(f"this member has {own[caller]} links at this relay; try another relay")
        if num_links < limit:
            return None
        most = max(own.values(), default=0)
        if most < own[caller] + 2:
            raise Busy(f"this relay has {num_links} links; try another one")
        crowded = [joint for joint, member in links.items() if own[member] == most]
        return max(crowded, key=lambda joint: joint.idle_s)

    async def _wait(self, ticket: Ticket, sock: socket.socket) -> None:
        """Wait with the first leg for the second one, and join them."""
        loop = asyncio.get_running_loop()
        leg = _Leg(ticket.caller, loop.create_future(), loop.create_future())
        replaced = self._waiting.get(ticket)
        if replaced is not None:
            replaced.second.cancel()
        self._waiting[ticket] = leg
        try:
            async with asyncio.timeout(WAIT_S):
                other = await leg.second
            await self._join(leg, sock, other)
        finally:
            if self._waiting.get(ticket) is leg:
                del self._waiting[ticket]
            leg.second.cancel()
            leg.over.set_result(None)

    async def _join(self, leg: _Leg, one: socket.socket, other: socket.socket) -> None:
        crowding = self._link_to_close(leg.caller)
        if crowding is not None:
            logger.info("a link ends for one of a member that has fewer")
            self._ending.add(crowding)
            crowding.close()
        loop = asyncio.get_running_loop()
        for sock in (one, other):
            await loop.sock_sendall(sock, JOINED)
        joint = leg.joint = Joint(one, other, self._rate)
        self._callers[joint] = leg.caller
        logger.debug("a link begins: %d now", len(self._callers))
        try:
            await self._until_over(joint)
        finally:
            del self._callers[joint]
            self._ending.discard(joint)
            self._ended_bytes += joint.moved_bytes
            logger.debug("a link ended: %d now", len(self._callers))

    async def _until_over(self, joint: Joint) -> None:
        """Wait until a link ends, and end it once it is idle."""
        ending = asyncio.ensure_future(joint.wait())
        try:
            while not ending.done():
                left_s = self._limits.idle_s - joint.idle_s
                if left_s <= 0:
                    logger.info("a link moved no byte for %.0f s, and is closed", joint.idle_s)
                    joint.close()
                    left_s = self._limits.idle_s
                await asyncio.wait({ending}, timeout=left_s)
        finally:
            ending.cancel()
            joint.close()

    def _rate(self) -> float:
        shared = self._limits.bytes_per_s / max(1, len(self._callers))
        return min(self._limits.link_bytes_per_s, shared)


class CoordinatorStream:
    """A relay's stream to the coordinator, which begins anew after each break.

    It has the key of the coordinator that last welcomed it, and its relay keeps its links over a
    break. It reports the relay's legs on the stream.

    Args:
        transport: Connects to the coordinator.
        find_coordinator: Returns the coordinator's endpoint.
        rng: Random numbers that keep relays from calling in step.
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
        self._legs: asyncio.Queue[LegSeen] = asyncio.Queue(MAX_UNREPORTED)
        self.welcomed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Future with the endpoint that members receive, done once a coordinator knows this relay.
        """

    def key(self) -> PublicKey:
        """Return the key that signs tickets.

        Raises:
            Unavailable: No coordinator has sent one yet.
        """
        if self._key is None:
            raise Unavailable("no coordinator knows this relay yet")
        return self._key

    def unix_s(self) -> float:
        """Return the coordinator's clock in Unix seconds."""
        return time.time() + self._behind_s

    async def run(self, relay: Relay, hello: RelayHello) -> None:
        """Serve as a relay of the coordinator, until cancelled.

        Raises:
            NotAllowed: Its key was revoked, it has no relay's invitation, or the coordinator does
                not find it at its announced address.
            VersionMismatch: This relay or the coordinator needs an update.
        """
        reason = ""
        relay.on_leg(self._on_leg)
        while True:
            try:
                await self._converse(relay, hello)
            except (NotAllowed, VersionMismatch):
                raise
            except SwarmError as error:  # the coordinator returns, or is found anew
                if error.message != reason:
                    logger.warning("coordinator: %s; retrying", error.message)
                reason = error.message
            await asyncio.sleep(self._rng.uniform(MIN_RETRY_S, MAX_RETRY_S))

    async def _converse(self, relay: Relay, hello: RelayHello) -> None:
        channel = self._transport.connect(await self._find_coordinator(), COORDINATOR_NAME)
        try:
            stream = channel.open(RELAY)
            await stream.send(hello)
            welcome = await stream.receive()
            if welcome is None:
                raise Unavailable("the coordinator ended the stream")
            self._key = public_key(welcome.ticket_key)
            self._behind_s = welcome.unix_s - time.time()
            logger.info("members learn of this relay at %s", welcome.endpoint)
            if not self.welcomed.done():
                self.welcomed.set_result(welcome.endpoint)
            await until_one_ends(self._report(stream, relay), _until_ended(stream))
        finally:
            await channel.close()

    def _on_leg(self, leg: LegSeen) -> None:
        if not self._legs.full():
            self._legs.put_nowait(leg)

    async def _report(self, stream: Stream, relay: Relay) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await stream.send(relay.carries)
            until_s = loop.time() + REPORT_EVERY_S
            while (leg := await self._next_leg(until_s)) is not None:
                await stream.send(leg)

    async def _next_leg(self, until_s: float) -> LegSeen | None:
        if asyncio.get_running_loop().time() >= until_s:
            return None
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until_s):
                return await self._legs.get()
        return None


async def _until_ended(stream: Stream) -> None:
    if await stream.receive() is not None:
        raise MalformedMessage(f"{stream.remote} welcomed this relay twice")
