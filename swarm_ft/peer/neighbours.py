"""How the two ends of a boundary meet: upstream dials, downstream answers, both check hellos."""

from __future__ import annotations

import asyncio

from swarm_ft.clock import Clock
from swarm_ft.discovery.base import Directory, Role
from swarm_ft.errors import OutOfTurn, RunMismatch, SwarmError, Unavailable
from swarm_ft.ids import PeerId
from swarm_ft.log import get_logger
from swarm_ft.peer.boundary import Boundary, BoundaryStream
from swarm_ft.protocol.boundary_messages import BoundaryHello
from swarm_ft.protocol.boundary_wire import boundary_from_wire, boundary_to_wire
from swarm_ft.transport.base import Channel, Transport
from swarm_ft.transport.methods import BOUNDARY

logger = get_logger(__name__)

UNREACHABLE_AFTER_S = 30.0
"""A neighbour that cannot be reached for so long fails the attempt; the coordinator tells why."""
MIN_BACKOFF_S, MAX_BACKOFF_S = 0.1, 2.0


async def find_peer(directory: Directory, peer_id: PeerId) -> str:
    """The endpoint of a peer.

    Raises:
        Unavailable: the directory does not know it (yet).
    """
    endpoint = (await directory.find(Role.PEER)).get(peer_id)
    if endpoint is None:
        raise Unavailable(f"peer {peer_id} is not in the DHT")
    return endpoint


async def receive_hello(stream: BoundaryStream) -> BoundaryHello:
    """The other side's first message.

    Raises:
        OutOfTurn: it is something else.
    """
    first = await stream.receive()
    hello = boundary_from_wire(first) if first is not None else None
    if not isinstance(hello, BoundaryHello):
        raise OutOfTurn(f"{stream.remote}: expected a hello as the first message")
    return hello


def check_hello(ours: BoundaryHello, theirs: BoundaryHello, expected_peer: PeerId) -> None:
    """Whether the other side speaks of the same boundary of the same run.

    Raises:
        RunMismatch: it works by another RunSpec.
        OutOfTurn: it is not the neighbour, or at another boundary or attempt.
    """
    if theirs.spec_digest != ours.spec_digest:
        raise RunMismatch(
            f"run {ours.run_id}: RunSpec digest {ours.spec_digest.hex()} here, "
            f"{theirs.spec_digest.hex()} at peer {theirs.peer_id}"
        )
    mine = (ours.run_id, ours.boundary, ours.attempt, expected_peer)
    got = (theirs.run_id, theirs.boundary, theirs.attempt, theirs.peer_id)
    if mine != got:
        raise OutOfTurn(f"boundary: expected run, boundary, attempt, peer {mine}, got {got}")


async def answer(boundary: Boundary, stream: BoundaryStream, theirs: BoundaryHello) -> None:
    """Downstream: serve a stream whose hello was checked, until it ends."""
    await stream.send(boundary_to_wire(boundary.hello))
    await boundary.serve(stream, theirs)


class Dialer:
    """Upstream: keeps a boundary connected to the peer behind it."""

    def __init__(
        self,
        boundary: Boundary,
        peer_id: PeerId,
        *,
        directory: Directory,
        transport: Transport,
        clock: Clock,
    ) -> None:
        self._boundary = boundary
        self._peer_id = peer_id
        self._directory = directory
        self._transport = transport
        self._clock = clock
        self._failing_since_s: float | None = None

    async def run(self) -> None:
        """Connect, and connect again whenever the stream breaks, until cancelled.

        Raises:
            Unavailable: the neighbour works by another RunSpec, or could not be reached for
                UNREACHABLE_AFTER_S.
        """
        backoff_s = MIN_BACKOFF_S
        while True:
            try:
                await self._connect_once()
            except RunMismatch as error:
                # This side checked its spec against the coordinator's, so the fault lies there.
                raise Unavailable(f"peer {self._peer_id}: {error.message}") from error
            except SwarmError as error:  # whatever ails the neighbour, it may get over it
                self._give_up_late(error)
                logger.debug("peer %s: %s", self._peer_id, error.message)
            is_failing = self._failing_since_s is not None
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S) if is_failing else MIN_BACKOFF_S
            await asyncio.sleep(backoff_s)

    async def _connect_once(self) -> None:
        endpoint = await find_peer(self._directory, self._peer_id)
        channel = self._transport.connect(endpoint)
        try:
            await self._converse(channel)
        finally:
            await channel.close()

    async def _converse(self, channel: Channel) -> None:
        stream = channel.open(BOUNDARY)
        ours = self._boundary.hello
        await stream.send(boundary_to_wire(ours))
        theirs = await receive_hello(stream)
        check_hello(ours, theirs, self._peer_id)
        logger.debug("boundary %d: connected to %s", ours.boundary, self._peer_id)
        self._failing_since_s = None
        await self._boundary.serve(stream, theirs)

    def _give_up_late(self, error: SwarmError) -> None:
        now_s = self._clock.now_s()
        if self._failing_since_s is None:
            self._failing_since_s = now_s
        if now_s - self._failing_since_s >= UNREACHABLE_AFTER_S:
            raise Unavailable(f"peer {self._peer_id} cannot be reached: {error.message}") from error
