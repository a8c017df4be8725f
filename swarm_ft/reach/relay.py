"""A relay joins two legs of one meeting. It sees ciphertext, and who talks to whom how much.

Nobody gets in without a ticket that the coordinator signed, which is good for one leg of one
meeting and for a minute. The ticket names both members, hashed, and the relay counts legs and
links against the one that asked for the meeting. It reports the address of each leg to the
coordinator, which sends the other side there. A relay that goes away costs its meetings a
reconnect. The coordinator's own is beside it; others are processes of their own, which keep a
conversation with it (`Attendance`).
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
"""How long a leg waits for the other one."""
MAX_WAITING = 256
IDLE_S = 60.0
"""A link that moves no byte for so long is closed. A gRPC connection probes the other end after
3 s of silence (`GrpcOptions.keepalive_idle_s`), whether it has calls or not."""
MEMBER_LINKS = 8
"""Links that a member may ask for. A peer hosts stages of four runs (`MAX_HOSTED`), and a stage has
two neighbours, to each of which a run keeps one link."""
MAX_MEMBER_LINKS = 32
"""... with links that it borrows, as long as half of the relay is free: a client fetches a result
from all stages, and a stage may have many replicas. Members that have fewer get these first."""
MEMBER_LEGS = 2 * MEMBER_LINKS
"""Legs that wait in meetings of one member."""
MAX_UNREPORTED = 1024
"""Legs that wait to be reported to the coordinator; more are relayed without a punch."""
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
        links: at a time, of all members.
        idle_s: a link without a byte for so long is closed.
        link_bytes_per_s: of one, each way.
        bytes_per_s: of all together, each way.
    """

    links: int = 256
    idle_s: float = IDLE_S
    link_bytes_per_s: float = math.inf
    bytes_per_s: float = math.inf


@dataclass(eq=False, slots=True)
class _Leg:
    """The first leg of a meeting, which waits for the second.

    Attributes:
        caller: the member that asked for the meeting, hashed.
        second: the other leg's socket, once that is there.
        over: the link is, and so both sockets.
        joint: the link, once it stands.
    """

    caller: bytes
    second: asyncio.Future[socket.socket]
    over: asyncio.Future[None]
    joint: Joint | None = None


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
        self._waiting: dict[Ticket, _Leg] = {}
        self._callers: dict[Joint, bytes] = {}
        self._ending: set[Joint] = set()
        self._ended_bytes = 0
        self._leg_listener: Callable[[LegSeen], object] = lambda _leg: None
        front.on_leg(self._leg)

    def on_leg(self, listener: Callable[[LegSeen], object]) -> None:
        """Call it with each leg that shows a good ticket, before the leg is answered."""
        self._leg_listener = listener

    @property
    def carries(self) -> RelayCarries:
        """How much, as of now."""
        num_links = len(self._callers)
        moved_bytes = self._ended_bytes + sum(joint.moved_bytes for joint in self._callers)
        is_full = num_links >= self._limits.links
        return RelayCarries(links=num_links, is_full=is_full, relayed_bytes=moved_bytes)

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
        """Take a leg. This lasts as long as its socket, which counts for the address meanwhile."""
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
        if is_socket_address(address):  # one of a link has a zone, and is of no use to others
            self._leg_listener(
                LegSeen(meeting=ticket.meeting, is_caller=ticket.is_caller, address=address)
            )

    async def _follow(self, first: _Leg, sock: socket.socket) -> None:
        """Wait with the second leg until the link is over; being cancelled ends it."""
        try:
            await asyncio.shield(first.over)
        finally:
            if first.joint is not None:
                first.joint.close()
            sock.close()

    def _check_room(self, caller: bytes) -> None:
        """Raise Busy if no more legs can wait, or no link of this member can begin."""
        own = sum(leg.caller == caller for leg in self._waiting.values())
        if len(self._waiting) >= MAX_WAITING or own >= MEMBER_LEGS:
            raise Busy(f"{own} legs of this member wait, {len(self._waiting)} of all")
        self._link_to_close(caller)

    def _link_to_close(self, caller: bytes) -> Joint | None:
        """The link that makes room for one more of this member; None: there is room.

        It is the idlest of the member that has the most, if that keeps more than this one has: so
        no two members take the last place from each other in turn.

        Raises:
            Busy: this member has its share, or nobody has much more.
        """
        links = {j: member for j, member in self._callers.items() if j not in self._ending}
        held, num_links, limit = Counter(links.values()), len(links), self._limits.links
        may_borrow = 2 * num_links < limit and held[caller] < MAX_MEMBER_LINKS
        if held[caller] >= MEMBER_LINKS and not may_borrow:
            raise Busy(f"{held[caller]} links of this member stand; try another relay")
        if num_links < limit:
            return None
        most = max(held.values(), default=0)
        if most < held[caller] + 2:
            raise Busy(f"this relay has {num_links} links; try another one")
        crowded = [joint for joint, member in links.items() if held[member] == most]
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


class Attendance:
    """A relay's conversation with the coordinator, begun anew whenever it breaks.

    It has the key of the coordinator that last welcomed it, and goes on with what it carries
    whatever becomes of that. It reports the relay's legs on the way.

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
        self._legs: asyncio.Queue[LegSeen] = asyncio.Queue(MAX_UNREPORTED)
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
        relay.on_leg(self._leg_came)
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
            await until_one_ends(self._report(stream, relay), _until_ended(stream))
        finally:
            await channel.close()

    def _leg_came(self, leg: LegSeen) -> None:
        if not self._legs.full():
            self._legs.put_nowait(leg)

    async def _report(self, stream: Stream, relay: Relay) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await stream.send(relay.carries)
            until_s = loop.time() + SAID_EVERY_S
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
