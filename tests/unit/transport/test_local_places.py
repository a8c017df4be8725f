"""Local places of a process for its own gRPC: its calls come through its front."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from swarm_ft.protocol.messages.client import StatusRequest, SwarmStatus
from swarm_ft.reach.transport import FrontedTransport
from swarm_ft.transport.base import MessageStream, call
from swarm_ft.transport.grpc_transport import GrpcTransport
from swarm_ft.transport.local_places import LocalPlaces
from swarm_ft.transport.methods import STATUS

TIMEOUT_S = 20.0


class CallCounter:
    """A handler that records its callers."""

    def __init__(self) -> None:
        self.remotes: list[str] = []

    async def __call__(self, stream: MessageStream[SwarmStatus, StatusRequest]) -> None:
        await stream.receive()
        self.remotes.append(stream.remote)
        await stream.send(SwarmStatus(members=(), runs=()))


@asynccontextmanager
async def serving(counter: CallCounter) -> AsyncIterator[str]:
    transport = FrontedTransport(GrpcTransport(), plaintext=True)
    server = await transport.serve("127.0.0.1", 0, {STATUS: counter})
    yield server.endpoint
    await server.stop()


async def call_once(endpoint: str) -> None:
    channel = GrpcTransport().connect(endpoint)
    try:
        await call(channel, STATUS, StatusRequest(), TIMEOUT_S)
    finally:
        await channel.close()


async def test_who_calls_through_the_front_is_known_by_its_own_endpoint() -> None:
    counter = CallCounter()
    async with serving(counter) as endpoint:
        for _ in range(3):
            await call_once(endpoint)
    assert {remote.rpartition(":")[0] for remote in counter.remotes} == {"127.0.0.1"}
    assert len(set(counter.remotes)) == 3, "each connection has a port of its own"


def test_a_place_is_listened_at_and_connected_to() -> None:
    places = LocalPlaces()
    one, other = places.new(), places.new()
    listeners = [place.listen() for place in (one, other)]
    socks = [place.connect("192.0.2.1:7000") for place in (one, other)]
    assert one.target != other.target
    for sock in (*socks, *listeners):
        sock.close()
    places.close()
