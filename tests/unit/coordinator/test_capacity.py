"""Inputs of forecasts, requested over real gRPC."""

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
from swarm_ft.coordinator.facts.connectivity import Connectivity, NatInfo
from swarm_ft.coordinator.facts.state import (
    AttemptState,
    CommittedState,
    Measurements,
    Member,
    Run,
    SwarmState,
)
from swarm_ft.coordinator.plan.forecast import crossing
from swarm_ft.coordinator.plan.learned_costs import IDLE_PART, load_on, loads_of
from swarm_ft.errors import BadInput, Busy, MalformedMessage, NotFound
from swarm_ft.ids import PeerId, RunId
from swarm_ft.peer.capacity import measure_link
from swarm_ft.protocol.messages.capacity import LinkEcho, LinkSample, Machine, PlaceRequest
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.messages.control import PeerHello, StageAssignment
from swarm_ft.protocol.spec.flops import stage_flops
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
async def asked(
    state: Callable[[], SwarmState] = SwarmState, machine: Machine = MACHINE
) -> AsyncIterator[Channel]:
    capacity = Capacity(ManualClock(), state)
    for name in "ab":
        capacity.on_machine_report(PeerId(name), machine)
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
    """Check three peers, of which only the last one reaches the others without a relay."""
    varies = NatInfo(house="", mapping_varies=True)
    homes = {"a": varies, "b": varies, "c": NatInfo(house="", is_open=True)}
    state = replace(swarm_of(*map(member, "abc")), ways=Connectivity(homes=homes))
    spec = run_spec(num_blocks=6)
    async with asked(lambda: state) as channel:
        placed = await call(channel, PLACE, PlaceRequest(spec=spec), 5.0)
        assert [one.peer_id for one in placed.peers][1] == "c"
        assert placed.relayed_percent == 0
        state = replace(state, ways=Connectivity(homes=dict.fromkeys("abc", varies)))
        placed = await call(channel, PLACE, PlaceRequest(spec=spec), 5.0)
        assert placed.relayed_percent == 100
        state = replace(state, ways=Connectivity())
        placed = await call(channel, PLACE, PlaceRequest(spec=spec), 5.0)
        assert placed.relayed_percent == 0, "nothing is known"


async def test_a_plan_says_what_is_missing() -> None:
    async with asked(lambda: swarm_of(member("a", LayerRange(0, 2)))) as channel:
        placed = await call(channel, PLACE, PlaceRequest(spec=run_spec()), 5.0)
    assert (placed.peers, placed.reason) == ((), "waiting for layers 2-4")


def training(name: str, *assignments: StageAssignment, owner: str = "") -> Run:
    """A run of 100 steps, 20 of them made in 2 s each, of which each peer computes 1.5 s."""
    spec = run_spec(num_steps=100)
    microbatches = spec.train.batch_size // spec.train.micro_batch_size
    rates = {
        one.peer_id: (stage_flops(spec, one.layers) * microbatches / 1.5,) for one in assignments
    }
    return Run(
        run_id=RunId(name),
        spec=spec,
        owner=owner,
        phase=RunPhase.TRAINING,
        past=CommittedState(committed_steps=20),
        attempt=AttemptState(assignments=assignments),
        measured=Measurements(step_seconds=(2.0,) * 5, flops_per_s=MappingProxyType(rates)),
    )


def at(peer: str, layers: str) -> StageAssignment:
    return StageAssignment(peer_id=PeerId(peer), layers=LayerRange(*map(int, layers.split("-"))))


async def test_a_plan_counts_who_else_trains_there_and_learns_from_it() -> None:
    roomy = [replace(one, hello=replace(one.hello, max_beside=3)) for one in map(member, "ab")]
    state = swarm_of(*roomy).with_run(training("run-1", at("a", "0-4")))
    state = state.with_run(Run(run_id=RunId("run-2"), spec=run_spec()))
    async with asked(lambda: state) as channel:
        placed = await call(channel, PLACE, PlaceRequest(spec=run_spec()), 5.0)
    busy = {one.peer_id: (one.num_runs, one.busy) for one in placed.peers}
    assert busy == {"a": (1, 0.75), "b": (0, 0.0)}
    assert (placed.num_waiting, placed.starts_after_s) == (1, 0.0)
    assert placed.beside_s == pytest.approx(80 * 2.0)
    assert placed.costs is not None
    assert placed.costs.num_runs == 1


async def test_peers_on_one_machine_are_slowed_by_runs_of_each_other() -> None:
    """Check a run at `b` that computes 1.5 of 2 s, on the cores that `a` computes with."""
    state = swarm_of(member("a"), member("b")).with_run(training("run-1", at("b", "0-4")))
    machines = {PeerId(n): replace(MACHINE, host="one", cores=2.0) for n in "ab"}
    found = load_on(state, machines, PeerId("a"))
    assert (found.num_runs, found.busy) == (0, 0.0)
    assert found.host_busy == pytest.approx(0.375)
    apart = {PeerId(n): replace(MACHINE, host=n, cores=1.0) for n in "ab"}
    assert load_on(state, apart, PeerId("a")).host_busy == 0.0


def test_a_run_leaves_the_rest_of_a_link_to_the_next_one_or_an_equal_part() -> None:
    """Check a run of two stages that sends and receives between `a` and `b` each step of 2 s."""
    state = swarm_of(member("a"), member("b"))
    run = training("run-1", at("a", "0-2"), at("b", "2-4"))
    machines = {PeerId(name): MACHINE for name in "ab"}
    load = {n: load_on(state.with_run(run), machines, PeerId(n)) for n in "ab"}
    assert load["a"].up_bytes_per_s == pytest.approx(load["b"].down_bytes_per_s)
    assert load["b"].up_bytes_per_s == pytest.approx(load["a"].down_bytes_per_s)
    used = load["a"].up_bytes_per_s
    microbatches = run.spec.train.batch_size // run.spec.train.micro_batch_size
    sent_bytes = crossing(run.spec, run.computing[1], is_first=False).forward
    assert used == pytest.approx(microbatches * sent_bytes / 2.0)
    fast = replace(MACHINE, up_bytes_per_s=10 * used)
    assert load["a"].share_link(fast).up_bytes_per_s == pytest.approx(9 * used)
    slow = replace(MACHINE, up_bytes_per_s=1.2 * used)
    assert load["a"].share_link(slow).up_bytes_per_s == pytest.approx(0.6 * used)
    assert load["a"].share_link(MACHINE).up_bytes_per_s == 0.0, "an unknown rate stays unknown"


async def test_a_plan_has_the_whole_rates_of_a_link_and_those_beside_other_runs() -> None:
    """Check a run of two stages whose frames take a tenth of the uplink of `a`."""
    roomy = [replace(one, hello=replace(one.hello, max_beside=3)) for one in map(member, "abc")]
    run = training("run-1", at("a", "0-2"), at("b", "2-4"))
    state = swarm_of(*roomy).with_run(run)
    used = load_on(state, {}, PeerId("a")).up_bytes_per_s
    machine = replace(MACHINE, up_bytes_per_s=10 * used, down_bytes_per_s=100 * used)
    async with asked(lambda: state, machine) as channel:
        placed = await call(channel, PLACE, PlaceRequest(spec=run_spec()), 5.0)
    found = {one.peer_id: one for one in placed.peers}
    assert found[PeerId("a")].machine == found[PeerId("b")].machine == machine
    assert found[PeerId("a")].shared_up_bytes_per_s == pytest.approx(9 * used)
    assert 9 * used < found[PeerId("a")].shared_down_bytes_per_s < 100 * used
    assert (found[PeerId("c")].num_runs, found[PeerId("c")].shared_up_bytes_per_s) == (0, 0.0)


def test_what_other_programs_ask_for_is_what_members_do_not_use() -> None:
    """Check two members with 1.5 of two cores, which demand three; others have the rest."""
    known = replace(MACHINE, host="one", cores=2.0, demand=9.0, busy=2.0, uses=0.75, waits=0.75)
    machines = {PeerId("a"): known, PeerId("b"): known, PeerId("c"): MACHINE}
    found = loads_of(machines, map(PeerId, "abc"))
    assert found == {"one": pytest.approx(0.75 * 1.0 + 0.25 * IDLE_PART * 6.0), "c": 0.0}
    idle = {PeerId("a"): replace(known, demand=1.5, uses=0.0, waits=0.0)}
    assert loads_of(idle, [PeerId("a")]) == {"one": pytest.approx(IDLE_PART * 1.5)}


async def test_a_job_that_has_to_wait_for_peers_is_told_for_how_long() -> None:
    state = swarm_of(member("a")).with_run(training("run-1", at("a", "0-4")))
    async with asked(lambda: state) as channel:
        placed = await call(channel, PLACE, PlaceRequest(spec=run_spec()), 5.0)
    assert placed.starts_after_s == pytest.approx(80 * 2.0)
    assert [(one.num_runs, one.busy) for one in placed.peers] == [(0, 0.0)]


async def test_a_run_s_own_hosts_are_told_and_it_is_not_beside_itself() -> None:
    run = training("run-1", at("b", "0-2"), at("a", "2-4"))
    state = swarm_of(member("a"), member("b")).with_run(run)
    async with asked(lambda: state) as channel:
        request = PlaceRequest(spec=run.spec, run_id=run.run_id)
        placed = await call(channel, PLACE, request, 5.0)
        assert [(one.peer_id, one.num_runs) for one in placed.peers] == [("b", 0), ("a", 0)]
        with pytest.raises(NotFound, match="run-9 is not known here, or not yours"):
            await call(channel, PLACE, replace(request, run_id=RunId("run-9")), 5.0)


async def test_plans_are_not_made_without_end() -> None:
    async with asked() as channel:
        for _ in range(PLACES_BURST):
            await call(channel, PLACE, PlaceRequest(spec=run_spec()), 5.0)
        with pytest.raises(Busy, match="plans are requested"):
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
        with pytest.raises(MalformedMessage, match=r"at most .* messages"):
            await asyncio.gather(*sending, stream.receive())
