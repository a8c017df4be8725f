"""Which of a server's connections are too many. Pure.

gRPC itself drops connections that finish no handshake or have no call for a while, and refuses
those above a number in all (`grpc_options.server_arguments`). What it cannot do is tell addresses
apart, so one of them could have all there are; that is decided here.
"""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

MAX_PER_ADDRESS = 128
"""More machines than a household has, or a laboratory behind one address."""
YOUNG_S = 1.0
"""What is younger may be a member whose handshake is under way."""
IPV6_SITE_BITS = 64
"""Whoever has one IPv6 address has all that begin alike."""


class Incoming(NamedTuple):
    """A connection that somebody opened to this process.

    Attributes:
        host: from where, as the socket says it.
        port: at the other end.
        since_s: when it was first seen.
        in_call: whether a call is under way on it.
    """

    host: str
    port: int
    since_s: float
    in_call: bool


def address_of(host: str) -> str:
    """Whose connections are counted together: an IPv4 address, or an IPv6 site."""
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, IPV6_SITE_BITS), strict=False))
    return str(address)


def surplus(
    present: Iterable[Incoming], now_s: float, *, per_address: int, wanted: int
) -> list[Incoming]:
    """Connections to drop: what an address has too many, then what leaves no room for members.

    Those without a call go first, the oldest before the others: who means it has a call within a
    second. Of those with a call the newest go, since the others were there before.

    Args:
        present: all that there are.
        now_s: monotonic seconds.
        per_address: how many one address may have.
        wanted: how many there should be at most, so that the next ones find room. For its sake
            nobody is dropped who has a call or came just now.
    """
    by_address = defaultdict(list)
    for one in present:
        by_address[address_of(one.host)].append(one)
    kept: list[Incoming] = []
    dropped: list[Incoming] = []
    for own in by_address.values():
        own.sort(key=_last_first)
        kept += own[:per_address]
        dropped += own[per_address:]
    silent = [one for one in kept if not one.in_call and one.since_s <= now_s - YOUNG_S]
    too_many = max(0, len(kept) - wanted)
    return dropped + sorted(silent, key=lambda one: one.since_s)[:too_many]


def _last_first(one: Incoming) -> tuple[bool, float]:
    """Where it stands among those of its address; the last ones are dropped."""
    return not one.in_call, one.since_s if one.in_call else -one.since_s
