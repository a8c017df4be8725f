"""Choice of a server's connections to drop when there are too many. Pure.

gRPC itself drops connections that finish no handshake or stay without a call, and refuses those
above a total (`grpc_options.server_arguments`). It does not distinguish addresses, so one of them
could take the whole total; this module prevents that.
"""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

MAX_PER_ADDRESS = 128
"""Connections of one address: more than a household or a laboratory behind one address needs."""
YOUNG_S = 1.0
"""Seconds during which a new connection may be a member with a handshake under way."""
IPV6_SITE_BITS = 64
"""Bits of an IPv6 address that identify a site; its owner has all addresses below."""


class Incoming(NamedTuple):
    """A connection that another process opened to this one.

    Attributes:
        host: Address of the other end, as the socket reports it.
        port: Port at the other end.
        since_s: Monotonic seconds at which the server first saw the connection.
        in_call: Whether a call is under way on it.
    """

    host: str
    port: int
    since_s: float
    in_call: bool


def address_of(host: str) -> str:
    """Return the key under which connections count together: an IPv4 address or an IPv6 site."""
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, IPV6_SITE_BITS), strict=False))
    return str(address)


def connections_to_drop(
    present: Iterable[Incoming], now_s: float, *, per_address: int, wanted: int
) -> list[Incoming]:
    """Return the connections to drop: those above an address's limit, then those above the total.

    Connections without a call go first, the oldest first: a member makes a call within a second. Of
    those with a call the newest go first.

    Args:
        present: All connections.
        now_s: Monotonic seconds.
        per_address: Connections that one address may have.
        wanted: Connections in all, so that new ones find room. For this limit the server drops
            neither connections with a call nor new ones.
    """
    by_address = defaultdict(list)
    for one in present:
        by_address[address_of(one.host)].append(one)
    admitted: list[Incoming] = []
    dropped: list[Incoming] = []
    for own in by_address.values():
        own.sort(key=_last_first)
        admitted += own[:per_address]
        dropped += own[per_address:]
    silent = [one for one in admitted if not one.in_call and one.since_s <= now_s - YOUNG_S]
    too_many = max(0, len(admitted) - wanted)
    return dropped + sorted(silent, key=lambda one: one.since_s)[:too_many]


def _last_first(one: Incoming) -> tuple[bool, float]:
    """Sort key of one address's connections; the last ones are dropped."""
    return not one.in_call, one.since_s if one.in_call else -one.since_s
