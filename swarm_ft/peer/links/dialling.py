"""Keeping a stream to another peer: found, dialled, and dialled again whenever it breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from swarm_ft.clock import Clock
from swarm_ft.discovery.directory import Directory, find_peer
from swarm_ft.errors import RunMismatch, SwarmError, Unavailable, VersionMismatch
from swarm_ft.ids import PeerId
from swarm_ft.log import get_logger
from swarm_ft.transport.base import Channel, Transport

logger = get_logger(__name__)

UNREACHABLE_AFTER_S = 30.0
"""A peer that cannot be reached for so long fails the attempt; the coordinator tells why."""
MIN_BACKOFF_S, MAX_BACKOFF_S = 0.1, 2.0

Converse = Callable[[Channel, Callable[[], None]], Awaitable[None]]
"""Opens a stream on the channel and works on it until it ends; calls the function once the other
side has said hello."""


class Redialler:
    """Calls one peer for as long as it runs."""

    def __init__(
        self,
        peer_id: PeerId,
        converse: Converse,
        *,
        directory: Directory,
        transport: Transport,
        clock: Clock,
    ) -> None:
        self._peer_id = peer_id
        self._converse = converse
        self._directory = directory
        self._transport = transport
        self._clock = clock
        self._failing_since_s: float | None = None

    async def run(self) -> None:
        """Connect, and connect again whenever the stream breaks, until cancelled.

        Raises:
            Unavailable: the peer works by another RunSpec or speaks another version, or could
                not be reached for UNREACHABLE_AFTER_S.
        """
        backoff_s = MIN_BACKOFF_S
        while True:
            try:
                await self._connect_once()
            except (RunMismatch, VersionMismatch) as error:
                # This side was checked against the coordinator, so the fault lies there.
                raise Unavailable(f"peer {self._peer_id}: {error.message}") from error
            except SwarmError as error:  # whatever ails the peer, it may get over it
                self._give_up_late(error)
                logger.debug("peer %s: %s", self._peer_id, error.message)
            is_failing = self._failing_since_s is not None
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S) if is_failing else MIN_BACKOFF_S
            await asyncio.sleep(backoff_s)

    async def _connect_once(self) -> None:
        channel = self._transport.connect(await find_peer(self._directory, self._peer_id))
        try:
            await self._converse(channel, self._greeted)
        finally:
            await channel.close()

    def _greeted(self) -> None:
        self._failing_since_s = None

    def _give_up_late(self, error: SwarmError) -> None:
        now_s = self._clock.now_s()
        if self._failing_since_s is None:
            self._failing_since_s = now_s
        if now_s - self._failing_since_s >= UNREACHABLE_AFTER_S:
            raise Unavailable(f"peer {self._peer_id} cannot be reached: {error.message}") from error
