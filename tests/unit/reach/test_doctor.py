"""The doctor beside a front of its own, over loopback; beside real routers: tests/integration."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random

import pytest

from swarm_ft.base.clock import SystemClock
from swarm_ft.build import UPDATE, described_version
from swarm_ft.coordinator.meetings import Introductions
from swarm_ft.coordinator.relays import ConnectedRelay
from swarm_ft.identity.invites import Invite
from swarm_ft.identity.keys import fingerprint_of, new_key
from swarm_ft.identity.roles import Role
from swarm_ft.protocol.messages.meeting import RelayPlace
from swarm_ft.protocol.spec.version import PROTOCOL_VERSION
from swarm_ft.reach import doctor
from swarm_ft.reach.doctor import (
    Cause,
    ReachabilityFacts,
    Verdict,
    examine_member,
    examine_way,
    reachability,
)
from swarm_ft.reach.sockets import FrontReply, is_dialled_back, query_front
from swarm_ft.reach.transport import FrontedTransport, HomeTransport
from swarm_ft.transport.grpc_options import GrpcOptions
from swarm_ft.transport.grpc_transport import GrpcTransport
from tests.members import Swarm, make_swarm


@pytest.fixture
def swarm() -> Swarm:
    return make_swarm()


@pytest.fixture
async def coordinator(swarm: Swarm) -> AsyncIterator[str]:
    """The coordinator's front, with a second port."""
    options = GrpcOptions(credentials=swarm.coordinator())
    transport = FrontedTransport(GrpcTransport(options))
    server = await transport.serve("127.0.0.1", 0, {})
    await transport.front.listen("127.0.0.1", 0)
    transport.front.dial_back_from("127.0.0.1")
    yield server.endpoint
    await server.stop()


def invite_to(swarm: Swarm, *addresses: str) -> Invite:
    return Invite(
        fingerprint=fingerprint_of(swarm.key.public_key()),
        number=bytes(4),
        secret=bytes(10),
        addresses=addresses,
    )


async def findings(invite: Invite) -> dict[str, tuple[Verdict, str]]:
    return {found.about: (found.verdict, found.text) async for found in examine_way(invite)}


async def test_a_front_tells_where_it_sees_whom_and_what_time_it_is(coordinator: str) -> None:
    reply = await query_front(coordinator)
    assert reply.address.startswith("127.0.0.1:")
    assert reply.other_port
    assert reply.own_host == "127.0.0.1"
    assert reply.version == PROTOCOL_VERSION
    assert abs(reply.unix_s - time.time()) < 60


async def test_a_front_dials_back_whoever_asks(coordinator: str) -> None:
    assert await is_dialled_back(coordinator, int(coordinator.rpartition(":")[2]))
    assert not await is_dialled_back(coordinator, 1)


async def test_on_one_machine_all_is_well(swarm: Swarm, coordinator: str) -> None:
    found = await findings(invite_to(swarm, coordinator))
    about = ["coordinator", "swarm", "clock", "version", "router", "ipv6", "relay", "others"]
    assert list(found) == about
    assert {verdict for verdict, _ in found.values()} == {Verdict.OK}
    assert found["router"][1] == "no router in the way, seen as 127.0.0.1"
    assert found["others"][1] == "reach this machine directly"


async def test_who_does_not_answer_is_named_and_the_next_one_asked(
    swarm: Swarm, coordinator: str
) -> None:
    (unreached,) = [found async for found in examine_way(invite_to(swarm, "127.0.0.1:1"))]
    assert (unreached.about, unreached.verdict) == ("coordinator", Verdict.BAD)
    assert unreached.text == "127.0.0.1:1: Connection refused"
    assert unreached.advice
    invite = invite_to(swarm, "127.0.0.1:1", coordinator)
    verdicts = [
        found.verdict async for found in examine_way(invite) if found.about == "coordinator"
    ]
    assert verdicts == [Verdict.NOTE, Verdict.OK]  # one that answers is enough to join


IPV6_AT_HOME, IPV6_THERE = "2a45:1::10", "[2a45:2::1]:7000"


@pytest.mark.parametrize(
    ("own", "addresses", "text"),
    [
        (None, ("192.0.2.1:7000",), "this machine has no IPv6 address"),
        (IPV6_AT_HOME, ("192.0.2.1:7000",), "the invitation names no IPv6 address"),
        (IPV6_AT_HOME, ("192.0.2.1:7000", IPV6_THERE), "does not reach the coordinator over IPv6"),
    ],
)
@pytest.mark.parametrize("is_open", [True, False])
def test_ipv6_that_is_not_used_matters_to_who_is_behind_a_router(
    own: str | None, addresses: tuple[str, ...], text: str, is_open: bool
) -> None:
    standing = replace(AT_HOME, is_open=is_open)
    finding = doctor.ipv6(own, addresses, ("192.0.2.1:7000",), standing)
    assert text in finding.text
    assert finding.verdict is (Verdict.OK if is_open else Verdict.NOTE)
    assert bool(finding.advice) is not is_open


def test_ipv6_that_is_used_is_told() -> None:
    finding = doctor.ipv6(IPV6_AT_HOME, (IPV6_THERE,), (IPV6_THERE,), AT_HOME)
    assert (finding.verdict, finding.advice) == (Verdict.OK, "")
    assert IPV6_AT_HOME in finding.text


async def test_a_coordinator_without_a_relay_is_told_with_what_makes_one(swarm: Swarm) -> None:
    async with introducing(swarm, has_relay=False) as coordinator:
        (relay,) = [
            found
            async for found in examine_way(invite_to(swarm, coordinator))
            if found.about == "relay"
        ]
    assert relay.verdict is Verdict.NOTE
    assert "swarm-ft relay" in relay.advice


async def test_another_swarms_coordinator_is_told(swarm: Swarm, coordinator: str) -> None:
    key = new_key()
    invite = replace(invite_to(swarm, coordinator), fingerprint=fingerprint_of(key.public_key()))
    verdict, text = (await findings(invite))["swarm"]
    assert verdict is Verdict.BAD
    assert "not the coordinator of this invitation" in text


async def test_a_coordinator_of_another_version_is_told(
    swarm: Swarm, coordinator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for theirs, older in ((PROTOCOL_VERSION + 1, "this machine"), (1, "the coordinator")):
        monkeypatch.setattr("swarm_ft.reach.front.PROTOCOL_VERSION", theirs)
        (finding,) = [
            finding
            async for finding in examine_way(invite_to(swarm, coordinator))
            if finding.about == "version"
        ]
        assert finding.verdict is Verdict.BAD
        assert finding.advice == f"update {older}: {UPDATE}"
        assert described_version() in finding.text


# ---- behind a router


async def seen_as(
    swarm: Swarm, coordinator: str, monkeypatch: pytest.MonkeyPatch, router: str | None
) -> dict[str, tuple[Verdict, str]]:
    """Return the findings of a machine that the coordinator sees at 192.0.2.7, without dial-ins."""

    async def query_from_home(endpoint: str) -> FrontReply:
        return replace(await query_front(endpoint), address="192.0.2.7:5000", own_host="10.0.0.2")

    async def query_router() -> str | None:
        return router

    async def refuse(_endpoint: str, _port: int) -> bool:
        return False

    monkeypatch.setattr(doctor, "query_front", query_from_home)
    monkeypatch.setattr(doctor, "router_address", query_router)
    monkeypatch.setattr(doctor, "is_dialled_back", refuse)
    return await findings(invite_to(swarm, coordinator))


@pytest.mark.parametrize(
    ("router", "verdict", "text"),
    [
        (None, Verdict.NOTE, "maps no ports"),
        ("192.0.2.7", Verdict.OK, "gives a peer one"),
        ("100.64.3.4", Verdict.NOTE, "CGNAT"),
    ],
)
async def test_a_router_that_maps_ports_and_one_before_it_are_told(
    swarm: Swarm,
    coordinator: str,
    monkeypatch: pytest.MonkeyPatch,
    router: str | None,
    verdict: Verdict,
    text: str,
) -> None:
    found = await seen_as(swarm, coordinator, monkeypatch, router)
    assert found["mapping"][0] is verdict
    assert text in found["mapping"][1]
    assert found["router"][1] == "seen as 192.0.2.7, with one port for all destinations"


# ---- how others reach a machine

AT_HOME = ReachabilityFacts(
    seen="192.0.2.7", own="10.0.0.2", port=7001, is_open=False, varies=False
)


@pytest.mark.parametrize(
    ("standing", "verdict", "cause", "text"),
    [
        (AT_HOME, Verdict.OK, Cause.ROUTER, "reach this machine by hole punching"),
        (replace(AT_HOME, varies=None), Verdict.OK, Cause.ROUTER, "punched"),
        (replace(AT_HOME, is_open=True, varies=True), Verdict.OK, Cause.NONE, "direct"),
        (replace(AT_HOME, is_open=True, has_relay=False), Verdict.OK, Cause.NONE, "direct"),
        (
            replace(AT_HOME, varies=True),
            Verdict.NOTE,
            Cause.SYMMETRIC_ROUTER,
            "through a relay; it dials",
        ),
        (
            replace(AT_HOME, varies=True, has_relay=True),
            Verdict.NOTE,
            Cause.SYMMETRIC_ROUTER,
            "through a relay; it dials",
        ),
        (replace(AT_HOME, seen="", own=""), Verdict.OK, Cause.ROUTER, "punched"),
        (replace(AT_HOME, own="192.0.2.7"), Verdict.NOTE, Cause.FIREWALL, "port closed"),
        (
            replace(AT_HOME, own="10.0.0.2", seen="10.0.0.2", is_open=None),
            Verdict.NOTE,
            Cause.NONE,
            "does not test private addresses such as 10.0.0.2",
        ),
        (replace(AT_HOME, is_open=None), Verdict.OK, Cause.ROUTER, "punched"),
        (replace(AT_HOME, has_relay=False), Verdict.BAD, Cause.ROUTER, "no relay"),
        (
            replace(AT_HOME, varies=True, has_relay=False),
            Verdict.BAD,
            Cause.SYMMETRIC_ROUTER,
            "maps each destination to another port, and the swarm has no relay",
        ),
        (
            replace(AT_HOME, own="192.0.2.7", has_relay=False),
            Verdict.BAD,
            Cause.FIREWALL,
            "a firewall, of this machine or its network, keeps its port closed",
        ),
        (
            replace(AT_HOME, trouble="it says no"),
            Verdict.BAD,
            Cause.NOT_INTRODUCED,
            "makes no introductions: it says no",
        ),
    ],
)
def test_whoever_is_not_reached_is_told_why_and_what_to_do(
    standing: ReachabilityFacts, verdict: Verdict, cause: Cause, text: str
) -> None:
    finding = reachability(standing)
    assert (finding.verdict, finding.cause) == (verdict, cause)
    assert text in finding.text
    assert finding.advice or verdict is not Verdict.BAD


def test_a_port_that_would_have_to_be_open_is_named() -> None:
    firewalled = replace(AT_HOME, own="192.0.2.7", has_relay=False)
    assert reachability(firewalled).advice == "open TCP port 7001 in the firewall"
    advice = reachability(replace(AT_HOME, has_relay=False)).advice
    assert advice.startswith("forward TCP port 7001 in the router and start with --port")
    assert "--no-relay" in advice
    assert "swarm-ft relay" in advice


# ---- a member that has just begun


@asynccontextmanager
async def member(
    swarm: Swarm, coordinator: str, *endpoints: str
) -> AsyncIterator[tuple[HomeTransport, str]]:
    """Yield a member's transport, and the endpoint of its front."""

    async def find() -> str:
        return coordinator

    grpc = GrpcTransport(GrpcOptions(credentials=swarm.member(Role.PEER)))
    transport = HomeTransport(grpc, find, SystemClock(), Random(1))
    server = await transport.serve("127.0.0.1", 0, {})
    transport.start(endpoints or (server.endpoint,))
    yield transport, server.endpoint
    await server.stop()


@asynccontextmanager
async def introducing(swarm: Swarm, *, has_relay: bool) -> AsyncIterator[str]:
    """A coordinator that introduces members."""
    introductions = Introductions(new_key, SystemClock())
    grpc = GrpcTransport(GrpcOptions(credentials=swarm.coordinator()))
    transport = FrontedTransport(grpc)
    server = await transport.serve("127.0.0.1", 0, introductions.handlers())
    transport.front.dial_back_from("127.0.0.1")
    if has_relay:
        probe = await transport.front.listen("127.0.0.1", 0)
        place = RelayPlace(endpoint=server.endpoint, probe_endpoint=probe)
        introductions.relays.set_own_relay(lambda: ConnectedRelay(place=place))
    yield server.endpoint
    await server.stop()


@pytest.mark.parametrize("has_relay", [True, False])
async def test_a_member_that_can_be_dialled_is_told_so(swarm: Swarm, has_relay: bool) -> None:
    async with (
        introducing(swarm, has_relay=has_relay) as coordinator,
        member(swarm, coordinator) as (transport, _),
    ):
        (found,) = [found async for found in examine_member(transport.reach, coordinator)]
    assert (found.verdict, found.text) == (Verdict.OK, "reach this machine directly")


async def test_a_member_whose_port_is_closed_is_told_so(swarm: Swarm) -> None:
    async with (
        introducing(swarm, has_relay=False) as coordinator,
        member(swarm, coordinator, "127.0.0.1:1") as (transport, _),
    ):
        (found,) = [found async for found in examine_member(transport.reach, coordinator)]
    assert (found.verdict, found.cause) == (Verdict.BAD, Cause.FIREWALL)
    assert found.text.endswith("and the swarm has no relay")
    assert found.advice == "open TCP port 1 in the firewall"


@pytest.mark.parametrize("answers", [True, False])
async def test_a_member_whom_nobody_introduces_is_told_so(
    swarm: Swarm, coordinator: str, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    monkeypatch.setattr(doctor, "LOOKED_S", 0.5)
    place = coordinator if answers else "127.0.0.1:1"
    async with member(swarm, place) as (transport, _):
        (found,) = [found async for found in examine_member(transport.reach, place)]
    assert (found.verdict, found.cause) == (Verdict.BAD, Cause.NOT_INTRODUCED)
    assert "the coordinator makes no introductions: " in found.text


def test_a_member_is_told_within_ten_seconds_whatever_does_not_answer() -> None:
    assert doctor.LOOKED_S + doctor.DIALLED_S < 10
