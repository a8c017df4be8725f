"""Ports of a router: a gateway of our own on loopback; a real one in tests/unit/benchmarks."""

from __future__ import annotations

import asyncio
import ipaddress
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest

from swarm_ft.reach import portmap
from swarm_ft.reach.portmap import ask_nat_pmp, default_gateway, mapped, router_address

OUTSIDE = "192.0.2.7"


class Gateway(asyncio.DatagramProtocol):
    """Speaks NAT-PMP; result 2 is "not authorised"."""

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
    async with mapped(7001, "127.0.0.1") as endpoint:
        assert endpoint == f"{OUTSIDE}:4321"
    assert gateway.lifetimes == [portmap.LIFETIME_S, 0]


async def test_a_question_that_was_lost_is_asked_again(gateway: Gateway) -> None:
    gateway.silent = 2
    assert (await ask_nat_pmp("127.0.0.1", 7001)).endpoint == f"{OUTSIDE}:4321"


async def test_a_mapping_is_renewed_before_it_ends(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(portmap, "RENEWED_AT", 0.0)
    async with mapped(7001, "127.0.0.1"):
        await gateway.enough.wait()


async def test_a_router_that_maps_none_is_no_trouble(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(_port: int | None) -> str:
        raise portmap.Refused("no")

    monkeypatch.setattr(portmap, "_ask_upnp", refuses)
    gateway.result = 2
    async with mapped(7001, "127.0.0.1") as endpoint:
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
