"""A relay joins two legs of one meeting. It sees ciphertext, and who talks to whom how much.

Nobody gets in without a ticket that the coordinator signed, which is good for one leg of one
meeting and for a minute. One that goes away costs its meetings a reconnect.
"""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from swarm_ft.errors import Busy
from swarm_ft.identity.keys import PublicKey
from swarm_ft.identity.tickets import Ticket, check_ticket
from swarm_ft.reach.front import Front
from swarm_ft.reach.sockets import (
    GREETING_S,
    JOINED,
    Address,
    Joint,
    receive_exactly,
    send_address,
)

WAIT_S = 15.0
"""How long a leg waits for the other one."""
MAX_WAITING = 256


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
    """

    def __init__(
        self, front: Front, keys: Callable[[], PublicKey], limits: RelayLimits | None = None
    ) -> None:
        self._front = front
        self._keys = keys
        self._limits = limits or RelayLimits()
        self._waiting: dict[Ticket, asyncio.Future[socket.socket]] = {}
        self._joints: set[Joint] = set()
        self._ended_bytes = 0
        front.on_leg(self._leg)

    @property
    def links(self) -> int:
        """That stand now."""
        return len(self._joints)

    @property
    def relayed_bytes(self) -> int:
        """Since it was started, both ways."""
        return self._ended_bytes + sum(joint.moved_bytes for joint in self._joints)

    async def _leg(self, sock: socket.socket, remote: Address) -> None:
        async with asyncio.timeout(GREETING_S):
            (length,) = await receive_exactly(sock, 1)
            ticket = check_ticket(self._keys(), await receive_exactly(sock, length), time.time())
            self._front.keep(sock, remote)
            await send_address(sock, remote)
        other = self._waiting.pop(Ticket(ticket.meeting, not ticket.is_caller), None)
        if other is not None and not other.done():
            other.set_result(sock)
            return
        await self._wait(ticket, sock)

    async def _wait(self, ticket: Ticket, sock: socket.socket) -> None:
        """The first leg waits for the second, and joins them."""
        if len(self._waiting) >= MAX_WAITING or self.links >= self._limits.links:
            raise Busy(f"this relay has {self.links} links; try another one")
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
        try:
            await joint.wait()
        finally:
            self._joints.discard(joint)
            self._ended_bytes += joint.moved_bytes

    def _rate(self) -> float:
        shared = self._limits.bytes_per_s / max(1, self.links)
        return min(self._limits.link_bytes_per_s, shared)
