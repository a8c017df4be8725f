"""What forecasts are made of, asked over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random
from types import MappingProxyType
from typing import Any

import pytest

from swarm_ft.coordinator.capacity import MAX_SAMPLES, PLACES_BURST, Capacity, check_lent
from swarm_ft.coordinator.facts.state import Member, SwarmState
from swarm_ft.coordinator.facts.ways import Home, Ways
from swarm_ft.errors import BadInput, Busy, MalformedMessage
from swarm_ft.ids import PeerId
from swarm_ft.peer.capacity import measure_link
from swarm_ft.protocol.messages.capacity import LinkEcho, LinkSample, Machine, PlaceRequest
from swarm_ft.protocol.messages.control import PeerHello
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.transport.base import Channel, Handler, Method, call
from swarm_ft.transport.grpc_transport import GrpcTransport
from swarm_ft.transport.methods import MEASURE_LINK, PLACE
from tests.doubles.clock import ManualClock
from tests.specs import run_spec

MACHINE = Machine(flops_per_s=1e12, watts=250.0)


def member(name: str, layers: LayerRange | None = None) -> Member:
    hello = PeerHello(
        peer_id=PeerId(name),
        endpoint="127.0.0.1:1",
        layers=layers,
        memory_bytes=1 << 30,
    )
    return Member(hello=hello, joined_at_s=0.0, heard_at_s=0.0)


def test_a_peer_lends_no_more_than_its_device_has() -> None:
    hello = replace(member("a").hello, device_memory_bytes=1 << 30)
    check_lent(hello)
    check_lent(replace(hello, memory_bytes=500 << 30, device_memory_bytes=0))  # it does not know
    with pytest.raises(BadInput, match=r"peer a: expected at most 1 GiB, .*, got 500 GiB"):
        check_lent(replace(hello, memory_bytes=500 << 30))


def swarm_of(*members: Member) -> SwarmState:
    return SwarmState(members=MappingProxyType({m.hello.peer_id: m for m in members}))


@asynccontextmanager
async def asked(state: Callable[[], SwarmState] = SwarmState) -> AsyncIterator[Channel]:
    capacity = Capacity(ManualClock(), state)
    for name in "ab":
        capacity.heard(PeerId(name), MACHINE)
    handlers: Mapping[Method[Any, Any], Handler] = {
        PLACE: capacity.place,
        MEASURE_LINK: capacity.measure,
    }
    server = await GrpcTransport().serve("127.0.0.1", 0, handlers)
    channel = GrpcTransport().connect(server.endpoint)
    try:
        yield channel
    finally:
        await channel.close()
        await server.stop()


async def test_a_plan_says_who_would_host_what_and_what_they_can_do() -> None:
    state = swarm_of(member("a", LayerRange(0, 2)), member("b"))
    async with asked(lambda: state) as channel:
        placed = await call(channel, PLACE, PlaceRequest(spec=run_spec()), 5.0)
    assert [(one.peer_id, str(one.layers)) for one in placed.peers] == [("a", "0-2"), ("b", "2-4")]
    assert {one.machine for one in placed.peers} == {MACHINE}
    assert placed.reason == ""


async def test_a_plan_seats_peers_beside_those_whom_they_reach() -> None:
    """Of three, only the last one reaches the others without a relay."""
    varies = Home(house="", mapping_varies=True)
    homes = {"a": varies, "b": varies, "c": Home(house="", is_open=True)}
    state = replace(swarm_of(*map(member, "abc")), ways=Ways(homes=homes))
    spec = run_spec(num_blocks=6)
    async with asked(lambda: state) as channel:
        placed = await call(channel, PLACE, PlaceRequest(spec=spec), 5.0)
        assert [one.peer_id for one in placed.peers][1] == "c"
        assert placed.relayed_percent == 0
        state = replace(state, ways=Ways(homes=dict.fromkeys("abc", varies)))
        placed = await call(channel, PLACE, PlaceRequest(spec=spec), 5.0)
        assert placed.relayed_percent == 100
        state = replace(state, ways=Ways())
        placed = await call(channel, PLACE, PlaceRequest(spec=spec), 5.0)
        assert placed.relayed_percent == 0, "nothing is known"


async def test_a_plan_says_what_is_missing() -> None:
    async with asked(lambda: swarm_of(member("a", LayerRange(0, 2)))) as channel:
        placed = await call(channel, PLACE, PlaceRequest(spec=run_spec()), 5.0)
    assert (placed.peers, placed.reason) == ((), "waiting for layers 2-4")


async def test_plans_are_not_made_without_end() -> None:
    async with asked() as channel:
        for _ in range(PLACES_BURST):
            await call(channel, PLACE, PlaceRequest(spec=run_spec()), 5.0)
        with pytest.raises(Busy, match="plans are asked for"):
            await call(channel, PLACE, PlaceRequest(spec=run_spec()), 5.0)


async def test_a_link_is_measured_and_the_rest_is_kept() -> None:
    async with asked() as channel:
        found = await measure_link(channel, MACHINE, Random(0))
    assert (found.flops_per_s, found.watts) == (MACHINE.flops_per_s, MACHINE.watts)
    assert min(found.up_bytes_per_s, found.down_bytes_per_s) > 1e5
    assert 0 < found.round_trip_s < 5


async def test_a_coordinator_that_is_away_leaves_the_link_unknown() -> None:
    nobody = GrpcTransport().connect("127.0.0.1:1")
    try:
        assert await measure_link(nobody, MACHINE, Random(0)) == MACHINE
    finally:
        await nobody.close()


async def test_two_are_not_measured_at_once() -> None:
    async with asked() as channel:
        first = channel.open(MEASURE_LINK)
        await first.send(LinkSample())
        assert await first.receive() == LinkEcho()
        with pytest.raises(Busy, match="another peer measures"):
            await call(channel, MEASURE_LINK, LinkSample(), 5.0)
        await first.finish()
        assert await first.receive() == LinkEcho()


async def test_nobody_has_more_echoed_than_a_measurement_takes() -> None:
    async with asked() as channel:
        stream = channel.open(MEASURE_LINK)
        sending = (stream.send(LinkSample(data=b"x")) for _ in range(MAX_SAMPLES + 1))
        with pytest.raises(MalformedMessage, match="messages at most"):
            await asyncio.gather(*sending, stream.receive())
