"""A member's own place, as its own kernel and resolver know it: addresses, router, names."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable

from swarm_ft.log import get_logger
from swarm_ft.protocol.messages.meeting import MAX_ENDPOINTS
from swarm_ft.protocol.spec.addresses import Vantage, is_socket_address
from swarm_ft.protocol.spec.bounds import host_of
from swarm_ft.reach.portmap import default_gateway
from swarm_ft.transport.grpc_options import IPV4_IN_IPV6, format_endpoint

logger = get_logger(__name__)

NAME_S = 2.0
"""How long the resolver may take for one name."""


async def vantage_towards(coordinator: str) -> Vantage:
    """The place of this machine, seen from the coordinator. No packet but the resolver's is sent.

    Args:
        coordinator: `host:port`.

    Returns:
        A vantage without addresses if there is no route there: then only public ones are dialled.
    """
    for endpoint in await addresses_of(coordinator):
        host, port = host_of(endpoint), int(endpoint.rpartition(":")[2])
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as sock:
                sock.connect((host, port))
                own = str(sock.getsockname()[0])
        except OSError:
            continue
        return Vantage(own=own, coordinator=host, gateway=default_gateway())
    return Vantage()


async def resolved(endpoints: Iterable[str]) -> tuple[str, ...]:
    """The IP addresses of this member's own endpoints, which the coordinator accepts alone."""
    found = [address for endpoint in endpoints for address in await _told(endpoint)]
    return tuple(dict.fromkeys(found))[:MAX_ENDPOINTS]


async def _told(endpoint: str) -> list[str]:
    found = [address for address in await addresses_of(endpoint) if is_socket_address(address)]
    if not found:
        logger.warning("%s: no usable address; other members cannot dial it", endpoint)
    return found


async def addresses_of(endpoint: str) -> list[str]:
    """All addresses of `host:port`, as `host:port` each; none if the resolver knows none."""
    host, _, port = endpoint.rpartition(":")
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(NAME_S):
            found = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, TimeoutError, ValueError):  # UnicodeError is a ValueError
        return []
    hosts = (str(address[0]).removeprefix(IPV4_IN_IPV6) for *_, address in found)
    return [format_endpoint(host, int(port)) for host in hosts]
