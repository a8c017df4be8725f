"""How the two ends of a boundary meet: upstream dials, downstream answers, both check hellos."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from swarm_ft.clock import Clock
from swarm_ft.discovery.base import Directory
from swarm_ft.errors import OutOfTurn, RunMismatch
from swarm_ft.ids import PeerId
from swarm_ft.log import get_logger
from swarm_ft.peer.boundary import Boundary, BoundaryStream
from swarm_ft.peer.dialling import Redialler
from swarm_ft.protocol.boundary_messages import BoundaryHello
from swarm_ft.protocol.boundary_wire import boundary_from_wire, boundary_to_wire
from swarm_ft.transport.base import Channel, Transport
from swarm_ft.transport.methods import BOUNDARY

logger = get_logger(__name__)


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


def dialler(
    boundary: Boundary,
    peer_id: PeerId,
    *,
    directory: Directory,
    transport: Transport,
    clock: Clock,
) -> Redialler:
    """Upstream: what keeps a boundary connected to the peer behind it."""
    converse = partial(_converse, boundary, peer_id)
    return Redialler(peer_id, converse, directory=directory, transport=transport, clock=clock)


async def _converse(
    boundary: Boundary, peer_id: PeerId, channel: Channel, greeted: Callable[[], None]
) -> None:
    stream = channel.open(BOUNDARY)
    ours = boundary.hello
    await stream.send(boundary_to_wire(ours))
    theirs = await receive_hello(stream)
    check_hello(ours, theirs, peer_id)
    logger.debug("boundary %d: connected to %s", ours.boundary, peer_id)
    greeted()
    await boundary.serve(stream, theirs)
