"""Ports of a router: a test gateway on loopback; a real one in tests/unit/benchmarks."""

from __future__ import annotations

import asyncio
import ipaddress
import struct
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import ClassVar, cast

import pytest

from swarm_ft.base.clock import SystemClock
from swarm_ft.reach import portmap
from swarm_ft.reach.portmap import default_gateway, map_port, request_mapping, router_address
from swarm_ft.reach.transport import HomeTransport
from tests.members import OneMember

OUTSIDE = "192.0.2.7"


class Gateway(asyncio.DatagramProtocol):
    """A gateway with NAT-PMP; result 2 is "not authorised"."""

    def __init__(self) -> None:
        self.lifetimes: list[int] = []
        self.enough = asyncio.Event()
        self.result = 0
        self.silent = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        if self.silent:
            self.silent -= 1
            return
        if data[1] == 0:
            answer = struct.pack(">BBHL", 0, 128, 0, 77) + ipaddress.IPv4Address(OUTSIDE).packed
        else:
            _, _, _, inner, _, lifetime_s = struct.unpack(">BBHHHL", data)
            self.lifetimes.append(lifetime_s)
            if len(self.lifetimes) == 3:
                self.enough.set()
            answer = struct.pack(">BBHLHHL", 0, 130, self.result, 77, inner, 4321, lifetime_s)
        self._transport.sendto(answer, addr)


@pytest.fixture
async def gateway(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Gateway]:
    loop = asyncio.get_running_loop()
    transport, made = await loop.create_datagram_endpoint(Gateway, local_addr=("127.0.0.1", 0))
    monkeypatch.setattr(portmap, "NAT_PMP_PORT", transport.get_extra_info("sockname")[1])
    monkeypatch.setattr(portmap, "FIRST_WAIT_S", 0.05)
    yield made
    transport.close()


async def test_a_port_is_mapped_as_long_as_it_is_wanted(gateway: Gateway) -> None:
    async with map_port(7001, "127.0.0.1") as endpoint:
        assert endpoint == f"{OUTSIDE}:4321"
    assert gateway.lifetimes == [portmap.LIFETIME_S, 0]


class UPnP:
    """A router like that of `miniupnpc`."""

    mapped: ClassVar[set[int]] = set()
    lanaddr = "192.168.1.2"

    def discover(self) -> int:
        return 1

    def selectigd(self) -> None: ...

    def addportmapping(self, port: int, _kind: str, _host: str, inner: int, *_: str) -> None:
        assert port == inner
        self.mapped.add(port)

    def deleteportmapping(self, port: int, _kind: str) -> None:
        self.mapped.remove(port)

    def externalipaddress(self) -> str:
        return OUTSIDE


async def test_a_port_that_upnp_mapped_is_let_go_of(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "miniupnpc", SimpleNamespace(UPnP=UPnP, __spec__=object()))
    gateway.result = 2  # it does not do it by NAT-PMP
    async with map_port(7001, "127.0.0.1") as endpoint:
        assert endpoint == f"{OUTSIDE}:7001"
        assert UPnP.mapped == {7001}
    assert not UPnP.mapped
    assert 0 not in gateway.lifetimes, "what it did not map it is not asked to forget"


async def test_a_member_that_ends_leaves_no_port_mapped(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def find() -> str:
        return "127.0.0.1:1"

    monkeypatch.setattr(portmap, "default_gateway", lambda: "127.0.0.1")
    transport = HomeTransport(OneMember(), find, SystemClock(), Random(1))
    server = await transport.serve("127.0.0.1", 0, {})
    transport.start((f"192.168.1.2:{server.endpoint.rpartition(':')[2]}",))
    await transport.reach.has_mapping_answer.wait()
    await server.stop()
    assert gateway.lifetimes == [portmap.LIFETIME_S, 0]


async def test_a_question_that_was_lost_is_asked_again(gateway: Gateway) -> None:
    gateway.silent = 2
    assert (await request_mapping("127.0.0.1", 7001)).endpoint == f"{OUTSIDE}:4321"


async def test_a_mapping_is_renewed_before_it_ends(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(portmap, "RENEWED_AT", 0.0)
    async with map_port(7001, "127.0.0.1"):
        await gateway.enough.wait()


async def test_a_router_that_maps_none_is_no_trouble(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(_port: int | None) -> str:
        raise portmap.Refused("no")

    monkeypatch.setattr(portmap, "_ask_upnp", refuses)
    gateway.result = 2
    async with map_port(7001, "127.0.0.1") as endpoint:
        assert endpoint is None


async def test_a_router_tells_its_address_and_maps_nothing_for_it(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await router_address("127.0.0.1") == OUTSIDE
    assert not gateway.lifetimes
    gateway.silent = 100
    monkeypatch.setattr(portmap, "TRIES", 1)
    monkeypatch.setattr(portmap, "_ask_upnp", lambda port: f"192.0.2.8 for {port}")
    assert await router_address("127.0.0.1") == "192.0.2.8 for None"


def test_the_router_is_that_of_the_default_route(tmp_path: Path) -> None:
    routes = tmp_path / "route"
    routes.write_text(
        "Iface\tDestination\tGateway\tFlags\neth0\t00000000\t0101A8C0\t0003\n", encoding="ascii"
    )
    assert default_gateway(routes) == "192.168.1.1"
    routes.write_text("Iface\tDestination\tGateway\tFlags\n", encoding="ascii")
    assert default_gateway(routes) is None
    assert default_gateway(tmp_path / "missing") is None
