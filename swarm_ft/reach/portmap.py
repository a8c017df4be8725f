"""Port mapping at the router: NAT-PMP (RFC 6886), or UPnP.

NAT-PMP needs two small requests to the gateway. UPnP needs the package `miniupnpc`. Behind a second
router (a carrier's) the mapped address reaches nobody; the coordinator passes only those addresses
on at which it sees a member.
"""

from __future__ import annotations

import asyncio
import importlib.util
import ipaddress
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from swarm_ft.base.log import get_logger

logger = get_logger(__name__)

NAT_PMP_PORT = 5351
LIFETIME_S = 3600
RENEWED_AT = 0.5
FIRST_WAIT_S, TRIES = 0.25, 4
"""Seconds until the first retry, and tries, as in RFC 6886 3.1 without its patience of a minute."""
UPNP_DISCOVERY_MS = 1500
_MAP_TCP = 2
_ANSWER = 128
"""Value added to a request's number in its answer."""


@dataclass(frozen=True, slots=True)
class Mapping:
    """A port of the router that leads to this machine.

    Attributes:
        endpoint: Endpoint outside, `host:port`.
        lifetime_s: Seconds until the router forgets the mapping.
        undo: Removes the mapping now; OSError if the router does not answer.
    """

    endpoint: str
    lifetime_s: float
    undo: Callable[[], Awaitable[object]]


class Refused(OSError):
    """The router maps no port."""


@asynccontextmanager
async def map_port(port: int, gateway: str | None = None) -> AsyncIterator[str | None]:
    """Map a port of the router to one of this machine, as long as the context lasts.

    Args:
        port: TCP port of this machine.
        gateway: Address of the router; None: the one of the default route.

    Yields:
        The endpoint outside, `host:port`; None if the router maps none.
    """
    gateway = gateway or default_gateway()
    mapping = await _first_mapping(port, gateway)
    if mapping is None:
        yield None
        return
    logger.info("the router leads %s here", mapping.endpoint)
    renewing = asyncio.create_task(_renew(port, gateway, mapping))
    try:
        yield mapping.endpoint
    finally:
        renewing.cancel()
        await asyncio.gather(renewing, return_exceptions=True)
        with suppress(OSError):
            await mapping.undo()


async def router_address(gateway: str | None = None) -> str | None:
    """Return the router's outside address; None if it maps no ports. Maps none itself."""
    gateway = gateway or default_gateway()
    if gateway is not None:
        with suppress(OSError):
            return await _nat_pmp_address(gateway)
    with suppress(OSError):
        return await asyncio.to_thread(_ask_upnp, None)
    return None


async def _first_mapping(port: int, gateway: str | None) -> Mapping | None:
    if gateway is not None:
        with suppress(OSError):
            return await request_mapping(gateway, port)
    with suppress(OSError):
        host = await asyncio.to_thread(_ask_upnp, port)
        undo = partial(asyncio.to_thread, _forget_upnp, port)
        return Mapping(f"{host}:{port}", LIFETIME_S, undo)
    return None


async def _renew(port: int, gateway: str | None, mapping: Mapping) -> None:
    while True:
        await asyncio.sleep(mapping.lifetime_s * RENEWED_AT)
        found = await _first_mapping(port, gateway)
        if found is None or found.endpoint != mapping.endpoint:
            logger.warning("the router does not lead %s here any more", mapping.endpoint)
        mapping = found or mapping


# ---- NAT-PMP


async def request_mapping(gateway: str, port: int, lifetime_s: int = LIFETIME_S) -> Mapping:
    """Map a port, or remove the mapping with a lifetime of 0.

    Raises:
        OSError: The router has no NAT-PMP, or refuses.
    """
    host = await _nat_pmp_address(gateway)
    question = struct.pack(">BBHHHL", 0, _MAP_TCP, 0, port, port if lifetime_s else 0, lifetime_s)
    answer = await _ask(gateway, question, answer_bytes=16)
    outside, granted_s = struct.unpack(">HL", answer[10:16])
    undo = partial(request_mapping, gateway, port, lifetime_s=0)
    return Mapping(f"{host}:{outside}", granted_s, undo)


async def _nat_pmp_address(gateway: str) -> str:
    answer = await _ask(gateway, bytes(2), answer_bytes=12)
    return str(ipaddress.IPv4Address(answer[8:12]))


async def _ask(gateway: str, question: bytes, answer_bytes: int) -> bytes:
    """Send a request, repeat it with longer waits, and return the answer."""
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        sock.connect((gateway, NAT_PMP_PORT))
        for attempt in range(TRIES):
            await loop.sock_sendall(sock, question)
            with suppress(TimeoutError):
                async with asyncio.timeout(FIRST_WAIT_S * 2**attempt):
                    return _checked(await loop.sock_recv(sock, 64), question, answer_bytes)
    raise Refused(f"{gateway} does not answer NAT-PMP")


def _checked(answer: bytes, question: bytes, answer_bytes: int) -> bytes:
    if len(answer) < answer_bytes or answer[1] != question[1] + _ANSWER:
        raise Refused("the router sends another answer than expected")
    (result,) = struct.unpack(">H", answer[2:4])
    if result:
        raise Refused(f"the router maps no port: NAT-PMP result {result}")
    return answer


def default_gateway(routes: Path = Path("/proc/net/route")) -> str | None:
    """Return the router of Linux' default route; None if unknown."""
    try:
        lines = routes.read_text(encoding="ascii").splitlines()[1:]
    except OSError:
        return None
    for fields in (line.split() for line in lines):
        if len(fields) > 2 and fields[1] == "00000000" and fields[2] != "00000000":
            return str(ipaddress.IPv4Address(int(fields[2], 16).to_bytes(4, "little")))
    return None


# ---- UPnP


def _ask_upnp(port: int | None) -> str:
    """Return the router's outside address; with a port, map it first."""
    with _upnp_router() as router:
        if port is not None:
            router.addportmapping(port, "TCP", router.lanaddr, port, "swarm-ft", "")
        return str(router.externalipaddress())


def _forget_upnp(port: int) -> None:
    with _upnp_router() as router:
        router.deleteportmapping(port, "TCP")


@contextmanager
def _upnp_router() -> Iterator[Any]:
    """Yield the router that answers.

    Raises:
        Refused: There is none, or it refuses.
    """
    if importlib.util.find_spec("miniupnpc") is None:
        raise Refused("miniupnpc is not installed")
    import miniupnpc

    router = miniupnpc.UPnP()
    router.discoverdelay = UPNP_DISCOVERY_MS
    try:
        if not router.discover():
            raise Refused("no router answers UPnP")
        router.selectigd()
        yield router
    except Refused:
        raise
    except Exception as error:  # noqa: BLE001 - its errors have no class in common
        raise Refused(f"UPnP: {error}") from None
