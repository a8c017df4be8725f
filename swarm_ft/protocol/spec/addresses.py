"""Rules for addresses that one member may make another machine dial. Pure.

The coordinator applies these rules before it sends an address to a member, and the member applies
them again before it dials. A name is never dialled: the sender could point it anywhere later.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Annotated

from swarm_ft.protocol.spec.bounds import (
    MAX_ID_BYTES,
    PRIVATE_NETWORKS,
    Bound,
    host_of,
    is_endpoint,
)

FIRST_UNPRIVILEGED_PORT = 1024
"""Ports from which on private addresses may be dialled: services of a house listen below."""
HOUSE_BITS = {4: 24, 6: 64}
"""Length of the prefix that the machines of one house share, by IP version."""
MAX_HOUSE_ENDPOINTS = 2
"""Private addresses of one member that another one tries: one by cable, one by radio."""

_LOOPBACK = tuple(map(ipaddress.ip_network, ("127.0.0.0/8", "::1/128")))
_SHARED = ipaddress.ip_network("100.64.0.0/10")
"""Addresses of RFC 6598, which carriers and overlay networks assign; they mean nothing elsewhere.
"""
_UNUSABLE = tuple(
    map(
        ipaddress.ip_network,
        (
            "0.0.0.0/8",
            "169.254.0.0/16",
            "224.0.0.0/3",  # multicast, reserved, broadcast
            "::/8",  # unspecified, IPv4-mapped and IPv4-compatible addresses
            "64:ff9b::/96",  # the next four hold an IPv4 address as well
            "64:ff9b:1::/48",
            "2001::/32",
            "2002::/16",
            "fe80::/9",  # link-local and site-local, which need a zone
            "ff00::/8",
        ),
    )
)


class Scope(Enum):
    """Places from which an address means the same machine."""

    LOOPBACK = "loopback"
    PRIVATE = "private"
    PUBLIC = "public"


def scope_of(host: str) -> Scope | None:
    """Return the scope of an address; None for a name, or for no address of one TCP endpoint."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    if any(address in network for network in _LOOPBACK):
        return Scope.LOOPBACK
    if any(address in network for network in _UNUSABLE):
        return None
    is_private = any(address in network for network in (*PRIVATE_NETWORKS, _SHARED))
    return Scope.PRIVATE if is_private else Scope.PUBLIC


def may_dial(own: str, host: str) -> bool:
    """Whether a machine at `own` may be sent to `host`.

    Public addresses mean the same machine everywhere. A private address means the same machine only
    within one network, and a loopback address only on one machine. So both ends must be seen there.

    Args:
        own: Address of the machine that dials, as the process that sends it there sees it.
        host: Address that it dials.
    """
    match scope_of(host):
        case Scope.PUBLIC:
            return True
        case Scope.PRIVATE:
            return scope_of(own) in {Scope.PRIVATE, Scope.LOOPBACK}
        case Scope.LOOPBACK:
            return scope_of(own) is Scope.LOOPBACK
        case None:
            return False


def may_dial_endpoint(own: str, endpoint: str) -> bool:
    """Whether `may_dial` holds, and the port is not privileged outside of public networks."""
    host, port = host_of(endpoint), port_of(endpoint)
    is_public = scope_of(host) is Scope.PUBLIC
    return may_dial(own, host) and (is_public or port >= FIRST_UNPRIVILEGED_PORT)


def port_of(endpoint: str) -> int:
    """Return the port of `host:port`."""
    return int(endpoint.rpartition(":")[2])


def is_same_site(one: str, other: str) -> bool:
    """Whether two public addresses belong to one customer: equal, or of one IPv6 /64.

    A machine replaces its IPv6 address every day (RFC 8981), so a new connection may come from
    another address than an older call. Other addresses must be equal.
    """
    try:
        a, b = ipaddress.ip_address(one), ipaddress.ip_address(other)
    except ValueError:
        return False
    is_public_ipv6 = a.version == 6 and scope_of(one) is scope_of(other) is Scope.PUBLIC
    return a == b or (is_public_ipv6 and _is_one_house(a, b))


def _is_one_house(
    one: ipaddress.IPv4Address | ipaddress.IPv6Address,
    other: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> bool:
    if one.version != other.version:
        return False
    shift = one.max_prefixlen - HOUSE_BITS[one.version]
    return int(one) >> shift == int(other) >> shift


@dataclass(frozen=True, kw_only=True, slots=True)
class Vantage:
    """A member's own place, as its own kernel knows it.

    Attributes:
        own: Address from which it reaches the coordinator.
        coordinator: Address at which it reaches the coordinator.
        gateway: Address of its router; None if unknown.
    """

    own: str = ""
    coordinator: str = ""
    gateway: str | None = None

    def may_dial(self, endpoint: str) -> bool:
        """Whether the coordinator may send this member to an endpoint, by the other's address.

        A private address is fine where the coordinator itself has one, or in this member's own part
        of its network: the member may reach the coordinator by a public address there.
        """
        return may_dial_endpoint(self.coordinator, endpoint) or self.is_in_house(endpoint)

    def is_in_house(self, endpoint: str) -> bool:
        """Whether this is a machine of the member's own house, other than it and its router."""
        host = host_of(endpoint)
        if scope_of(host) is not Scope.PRIVATE or scope_of(self.own) is not Scope.PRIVATE:
            return False
        own, address = ipaddress.ip_address(self.own), ipaddress.ip_address(host)
        is_other = host not in {self.own, self.gateway}
        is_open_port = port_of(endpoint) >= FIRST_UNPRIVILEGED_PORT
        return is_other and is_open_port and _is_one_house(own, address)


def endpoints_seen(own: str, theirs: str, endpoints: Iterable[str]) -> tuple[str, ...]:
    """Return a member's endpoints at the address where the coordinator sees that member.

    Args:
        own: Address at which the coordinator sees the member that will dial.
        theirs: Address at which it sees the other member.
        endpoints: Endpoints that the other member announced.
    """
    return tuple(
        endpoint
        for endpoint in endpoints
        if host_of(endpoint) == theirs and may_dial_endpoint(own, endpoint)
    )


def endpoints_in_house(own: str, theirs: str, endpoints: Iterable[str]) -> tuple[str, ...]:
    """Return a member's private endpoints, if both members have the same public address.

    They have one port, that of the member's front, and there are `MAX_HOUSE_ENDPOINTS` at most. A
    carrier shares one address among houses, so the member that dials checks them again
    (`Vantage.is_in_house`).

    Args:
        own: Address at which the coordinator sees the member that will dial.
        theirs: Address at which it sees the other member.
        endpoints: Endpoints that the other member announced.
    """
    if own != theirs or scope_of(own) is not Scope.PUBLIC:
        return ()
    private = [
        endpoint
        for endpoint in endpoints
        if scope_of(host_of(endpoint)) is Scope.PRIVATE
        and port_of(endpoint) >= FIRST_UNPRIVILEGED_PORT
    ]
    of_front = [endpoint for endpoint in private if port_of(endpoint) == port_of(private[0])]
    return tuple(of_front[:MAX_HOUSE_ENDPOINTS])


# ---- an address in a message


def is_socket_address(text: str) -> bool:
    """Whether a text is `host:port` of an IP address, in the form that Python prints."""
    host = host_of(text)
    if not is_endpoint(text) or scope_of(host) is None:
        return False
    return str(ipaddress.ip_address(host)) == host and ("[" in text) == (":" in host)


@dataclass(frozen=True, slots=True)
class IpAndPort(Bound):
    """Bound on a text: `host:port` of an IP address, see `is_socket_address`."""

    def refusal(self, value: object) -> str | None:
        """See `Bound`."""
        if isinstance(value, str) and is_socket_address(value):
            return None
        return (
            f"expected the IP address of one machine and a port, got {ascii(value)[:MAX_ID_BYTES]}"
        )


SocketAddress = Annotated[str, IpAndPort()]
