"""Whether an address can be listened on, in one clear line. It knows sockets, no transport."""

from __future__ import annotations

import asyncio
import errno
import os
import socket

from swarm_ft.errors import BadOption, PortInUse, SwarmError


def format_endpoint(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def check_address(host: str, port: int) -> None:
    """Bind the address and let go of it again, since gRPC's own refusal gives no reason.

    Raises:
        PortInUse: the port is taken.
        BadOption: the host does not resolve to this machine, or the port is not allowed.
    """
    if not 0 <= port <= 65535:
        raise BadOption(f"port {port}: expected 0 to 65535, where 0 is any free port")
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            # As gRPC does: connections that linger after a restart do not count as taken.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        raise refusal(host, port, error) from None


def refusal(host: str, port: int, error: Exception) -> SwarmError:
    """The error to raise when `host:port` cannot be bound."""
    where = f"cannot listen on {format_endpoint(host, port)}"
    if isinstance(error, OSError) and error.errno != errno.EADDRINUSE:
        return BadOption(f"{where}: {error.strerror or os.strerror(error.errno or 0)}")
    return PortInUse(f"{where}: the port is taken; choose another, or 0 for any free one")
