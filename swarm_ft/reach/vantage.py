"""A member's place in the network, from its kernel and resolver: addresses, router, names."""

from __future__ import annotations

import socket
from collections.abc import Iterable

from swarm_ft.base.log import get_logger
from swarm_ft.protocol.messages.meeting import MAX_ENDPOINTS
from swarm_ft.protocol.spec.addresses import Vantage, is_socket_address
from swarm_ft.protocol.spec.bounds import host_of
from swarm_ft.reach.portmap import default_gateway
from swarm_ft.transport.grpc_options import addresses_of

logger = get_logger(__name__)


async def vantage_towards(coordinator: str) -> Vantage:
    """Return this machine's place, as seen from the coordinator; only the resolver sends packets.

    Args:
        coordinator: Endpoint of the coordinator, `host:port`.

    Returns:
        A vantage without addresses if there is no route: then only public ones are dialled.
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


async def resolve_endpoints(endpoints: Iterable[str]) -> tuple[str, ...]:
    """Return the IP addresses of this member's own endpoints; the coordinator accepts no names."""
    found = [address for endpoint in endpoints for address in await _usable(endpoint)]
    return tuple(dict.fromkeys(found))[:MAX_ENDPOINTS]


async def _usable(endpoint: str) -> list[str]:
    found = [address for address in await addresses_of(endpoint) if is_socket_address(address)]
    if not found:
        logger.warning("%s: no usable address; other members cannot dial it", endpoint)
    return found
