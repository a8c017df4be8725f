"""Diagnosis of a machine's way into a swarm: obstacles, and advice for each.

Each check runs by itself, so that a failed one hides no other. The checks read the invitation
without using it up, and never print it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import ipaddress
import os
import socket
import time
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from enum import StrEnum

from swarm_ft.build import UPDATE, described_version
from swarm_ft.errors import SwarmError
from swarm_ft.identity.invites import Invite
from swarm_ft.identity.pinning import authority_at
from swarm_ft.protocol.messages.meeting import Way
from swarm_ft.protocol.spec.bounds import host_of
from swarm_ft.protocol.spec.version import PROTOCOL_VERSION
from swarm_ft.reach.meet import Reach
from swarm_ft.reach.portmap import router_address
from swarm_ft.reach.sockets import FrontReply, is_dialled_back, outside_address, query_front

LOOKED_S, DIALLED_S = 5.0, 4.0
"""Seconds that a new member may take to know its router, and then to be dialled."""
MAX_OFFSET_S, MAX_JOIN_OFFSET_S = 60.0, 3600.0
"""Seconds by which clocks may differ: certificates begin an hour in the past, and logs get unclear.
"""
ANYWHERE = ("2001:4860:4860::8888", 53)
RELAY = (
    "for one: the coordinator without --no-relay, or 'swarm-ft relay' on a machine with a public "
    "address"
)


class Verdict(StrEnum):
    """Meaning of a finding for joining."""

    OK = "ok"
    NOTE = "note"
    """The check passed, and the machine would work better otherwise."""
    BAD = "bad"
    """This machine cannot join in its present state."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check.

    Attributes:
        about: One word for the checked thing.
        verdict: Meaning for joining.
        text: Text of the result.
        advice: Text of the remedy; empty without one.
        cause: Word for programs: the reason why others cannot reach this machine.
    """

    about: str
    verdict: Verdict
    text: str
    advice: str = ""
    cause: str = ""


async def examine_way(invite: Invite) -> AsyncIterator[Finding]:
    """Check whether this machine reaches an invitation's swarm, and how others reach it."""
    answers = await asyncio.gather(*map(_front_at, invite.addresses))
    fronts = {a: front for a, front in answers if isinstance(front, FrontReply)}
    for address, answer in answers:
        if not isinstance(answer, FrontReply):
            yield _unreached(address, answer, others=list(fronts))
    if not fronts:
        return
    address, front = next(iter(fronts.items()))
    round_trip_ms = front.took_s * 1000
    yield Finding("coordinator", Verdict.OK, f"{address} answers in {round_trip_ms:.0f} ms")
    yield await _swarm(address, invite)
    yield _clock(front)
    yield _version(front)
    is_open, varies = await asyncio.gather(_is_open(address, front), _varies(address, front))
    seen = host_of(front.address)
    standing = ReachabilityFacts(seen=seen, own=front.own_host, is_open=is_open, varies=varies)
    yield _router(standing)
    if standing.is_behind_router and not is_open:
        yield await _mapping(front)
    yield ipv6(own_ipv6(), invite.addresses, fronts, standing)
    yield _relay(front)
    yield reachability(standing)


async def examine_member(reach: Reach, coordinator: str) -> AsyncIterator[Finding]:
    """Check how others reach a serving member, within 10 s.

    Args:
        reach: The member's part in introductions, which has begun.
        coordinator: Address of the coordinator, `host:port`.
    """
    front: FrontReply | None = None
    with suppress(TimeoutError):
        async with asyncio.timeout(LOOKED_S):
            with suppress(OSError, SwarmError):
                front = await query_front(coordinator)
            await reach.joined.wait()
            await reach.knows_mapping.wait()
            await reach.has_mapping_answer.wait()
    if front is not None and (clock := _clock(front)).verdict is not Verdict.OK:
        yield clock
    ports = {int(endpoint.rpartition(":")[2]) for endpoint in reach.reachable.endpoints}
    yield reachability(
        ReachabilityFacts(
            seen=host_of(front.address) if front else "",
            own=front.own_host if front else "",
            port=max(ports, default=0),
            is_open=_any_open(
                await asyncio.gather(*(_is_dialled(coordinator, port) for port in ports))
            ),
            varies=reach.reachable.mapping_varies if reach.knows_mapping.is_set() else None,
            has_relay=bool(reach.relays),
            trouble=None if reach.joined.is_set() else reach.trouble or "it has not answered yet",
        )
    )


async def _front_at(address: str) -> tuple[str, FrontReply | Exception]:
    try:
        return address, await query_front(address)
    except (OSError, TimeoutError, SwarmError) as error:
        return address, error


def _unreached(address: str, error: Exception, others: Sequence[str]) -> Finding:
    """Return the finding for one of the invitation's addresses without an answer."""
    reason = str(error) or "no answer"
    if isinstance(error, OSError) and error.errno:
        reason = os.strerror(error.errno)
    says = f"{address}: {reason}"
    if others:
        advice = f"none needed: {others[0]} answers"
        return Finding("coordinator", Verdict.NOTE, says, advice)
    return Finding(
        "coordinator",
        Verdict.BAD,
        says,
        "ask the swarm's owner whether it runs at this address; some networks allow outgoing "
        "connections to few ports only",
    )


async def _swarm(address: str, invite: Invite) -> Finding:
    host, _, port = address.rpartition(":")
    try:
        await asyncio.to_thread(authority_at, host.strip("[]"), int(port), invite.fingerprint)
    except SwarmError as error:
        return Finding("swarm", Verdict.BAD, error.message, "ask for a new invitation")
    return Finding("swarm", Verdict.OK, "the coordinator belongs to this invitation's swarm")


def _clock(front: FrontReply) -> Finding:
    offset_s = time.time() - front.took_s / 2 - front.unix_s
    says = f"{abs(offset_s):.1f} s {'ahead of' if offset_s > 0 else 'behind'} the coordinator's"
    if abs(offset_s) >= MAX_JOIN_OFFSET_S:
        return Finding("clock", Verdict.BAD, says, "set this machine's clock, or the coordinator's")
    if abs(offset_s) >= MAX_OFFSET_S:
        return Finding("clock", Verdict.NOTE, says, "set this machine's clock")
    return Finding("clock", Verdict.OK, says)


async def _varies(address: str, front: FrontReply) -> bool | None:
    """Return whether the router maps each destination to another port; None if unknown."""
    if not front.other_port:
        return None
    other = f"{address.rpartition(':')[0]}:{front.other_port}"
    try:
        one, port = await outside_address(address)
        return one != (await outside_address(other, port=port))[0]
    except (OSError, TimeoutError, SwarmError):
        return None


async def _is_open(address: str, front: FrontReply) -> bool | None:
    """Request that the coordinator dials a port of this machine that nobody forwarded."""
    family = socket.AF_INET6 if front.address.startswith("[") else socket.AF_INET
    with closing(socket.create_server(("", 0), family=family)) as listener:
        return await _is_dialled(address, listener.getsockname()[1])


def _any_open(answers: Collection[bool | None]) -> bool | None:
    """Combine findings on ports; None if none is open, and one was not tried."""
    return True if True in answers else None if None in answers else False


async def _is_dialled(address: str, port: int) -> bool | None:
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(DIALLED_S):
            return await is_dialled_back(address, port)
    return False


def _version(front: FrontReply) -> Finding:
    if front.version == PROTOCOL_VERSION:
        says = f"swarm-ft {described_version()}, protocol {PROTOCOL_VERSION} like the coordinator"
        return Finding("version", Verdict.OK, says)
    older = "this machine" if front.version > PROTOCOL_VERSION else "the coordinator"
    return Finding(
        "version",
        Verdict.BAD,
        f"swarm-ft {described_version()} has protocol version {PROTOCOL_VERSION}, the "
        f"coordinator {front.version}",
        f"update {older}: {UPDATE}",
    )


async def _mapping(front: FrontReply) -> Finding:
    """Return the finding on port mapping: whether the router maps ports, and is the last one."""
    outside = await router_address()
    if outside is None:
        miniupnpc = "" if importlib.util.find_spec("miniupnpc") else ", and pip install miniupnpc"
        return Finding(
            "mapping",
            Verdict.NOTE,
            "the router maps no ports, as far as swarm-ft can find out",
            f"enable NAT-PMP or UPnP in its settings{miniupnpc}, so that others can dial in",
        )
    if outside == host_of(front.address):
        return Finding("mapping", Verdict.OK, "the router maps ports, and gives a peer one")
    return Finding(
        "mapping",
        Verdict.NOTE,
        f"the router's own address is {outside}, and others see another one: the provider has a "
        "second router (CGNAT), so a port that this one maps leads nowhere",
        "ask the provider for IPv6, or for an address of your own",
    )


def own_ipv6() -> str | None:
    """Return the machine's global IPv6 address; None if it has none. Sends no packet."""
    with suppress(OSError), socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as asker:
        asker.connect(ANYWHERE)
        own = ipaddress.IPv6Address(asker.getsockname()[0])
        return str(own) if own.is_global else None
    return None


def ipv6(
    own: str | None,
    addresses: Collection[str],
    fronts: Collection[str],
    standing: ReachabilityFacts,
) -> Finding:
    """Return the finding on IPv6: whether others reach this machine without port mapping.

    Args:
        own: IPv6 address of this machine; None without one.
        addresses: Addresses of the coordinator.
        fronts: Those of the addresses that answer.
        standing: How others reach the machine otherwise.
    """
    if any(map(_is_ipv6, fronts)):
        text = f"{own or 'this machine'} reaches the coordinator over IPv6"
        return Finding("ipv6", Verdict.OK, text)
    verdict = Verdict.OK if standing.is_open else Verdict.NOTE  # it is not needed
    if own is None:
        advice = (
            "" if standing.is_open else "ask the provider for IPv6, which needs no port mapping"
        )
        return Finding("ipv6", verdict, "this machine has no IPv6 address", advice)
    if any(map(_is_ipv6, addresses)):
        advice = "" if standing.is_open else "check this network's firewalls for IPv6"
        text = f"{own} does not reach the coordinator over IPv6"
        return Finding("ipv6", verdict, text, advice)
    advice = "ask the swarm's owner to name an IPv6 address of the coordinator in the invitation"
    says = f"{own} is not used: the invitation names no IPv6 address of the coordinator"
    return Finding("ipv6", verdict, says, "" if standing.is_open else advice)


def _is_ipv6(endpoint: str) -> bool:
    return endpoint.startswith("[")


def _relay(front: FrontReply) -> Finding:
    """Return the finding on relays; a coordinator without a second port is no relay itself."""
    if front.other_port:
        return Finding("relay", Verdict.OK, "the coordinator is a relay")
    says = "the coordinator is no relay; a member learns of other relays when it joins"
    return Finding("relay", Verdict.NOTE, says, f"if there is none, ask the swarm's owner {RELAY}")


# ---- verdict on how others reach a machine, from the known facts


class Cause(StrEnum):
    """Reason why not everybody reaches a machine; the values are for programs."""

    NONE = ""
    NOT_INTRODUCED = "not-introduced"
    """The coordinator makes no introductions."""
    FIREWALL = "firewall"
    """The machine is behind no router, and its port is closed."""
    ROUTER = "router"
    """A router refuses incoming connections; hole punching can pass it."""
    SYMMETRIC_ROUTER = "symmetric-router"
    """A router maps each destination to another port."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReachabilityFacts:
    """Facts that decide how others reach a machine.

    Attributes:
        seen: Host at which the coordinator sees the machine; empty: unknown.
        own: Host of the machine's own socket.
        port: Port of its front; 0: any port that nobody forwarded.
        is_open: Whether the coordinator can dial it; None: it dials no such address.
        varies: Whether its router maps each destination to another port; None: unknown.
        has_relay: Whether the swarm has a relay; None: unknown.
        trouble: Why the coordinator makes no introductions to it; None: it does.
    """

    seen: str
    own: str
    port: int = 0
    is_open: bool | None
    varies: bool | None
    has_relay: bool | None = None
    trouble: str | None = None

    @property
    def is_behind_router(self) -> bool:
        """Whether others see it at another address than its own, as far as known."""
        return not self.seen or self.seen != self.own

    @property
    def cause(self) -> Cause:
        """Reason why not everybody can dial the machine."""
        if self.trouble is not None:
            return Cause.NOT_INTRODUCED
        if self.is_open or (self.is_open is None and not self.is_behind_router):
            return Cause.NONE
        if not self.is_behind_router:
            return Cause.FIREWALL
        return Cause.SYMMETRIC_ROUTER if self.varies else Cause.ROUTER


_OBSTACLES = {
    Cause.FIREWALL: "a firewall, of this machine or its network, keeps its port closed",
    Cause.ROUTER: "its router refuses incoming connections",
    Cause.SYMMETRIC_ROUTER: (
        "its router refuses incoming connections, and maps each destination to another port"
    ),
}


def reachability(standing: ReachabilityFacts) -> Finding:
    """Return the finding on how others reach a machine; BAD: members behind routers cannot."""
    cause = standing.cause
    if standing.trouble is not None:
        says = (
            f"cannot reach this machine: the coordinator makes no introductions: {standing.trouble}"
        )
        advice = "it retries; 'swarm-ft doctor' with the invitation checks more"
        return Finding("others", Verdict.BAD, says, advice, cause)
    if standing.is_open:
        return Finding("others", Verdict.OK, "reach this machine directly")
    if cause is Cause.NONE:
        says = (
            "may reach this machine: the coordinator does not test private addresses such as "
            f"{standing.seen}"
        )
        return Finding("others", Verdict.NOTE, says)
    if standing.has_relay is False:
        says = (
            f"behind routers cannot reach this machine: {_OBSTACLES[cause]}, and the swarm has no "
            "relay"
        )
        return Finding("others", Verdict.BAD, says, _opening(standing, cause), cause)
    if standing.varies:
        says = (
            "behind a router reach this machine through a relay; it dials the others itself "
            f"({Way.RELAYED}, {Way.REVERSE})"
        )
        return Finding("others", Verdict.NOTE, says, "", cause)
    says = f"reach this machine by hole punching ({Way.PUNCHED}), where their routers allow it"
    if cause is Cause.FIREWALL:
        says = f"{says}: {_OBSTACLES[cause]}"
        return Finding("others", Verdict.NOTE, says, _opening(standing, cause), cause)
    return Finding("others", Verdict.OK, says, "", cause)


def _opening(standing: ReachabilityFacts, cause: Cause) -> str:
    port = f"TCP port {standing.port}" if standing.port else "a TCP port, named with --port,"
    if cause is Cause.FIREWALL:
        return f"open {port} in the firewall"
    return (
        f"forward {port} in the router and start with --port and --announce; or ask the swarm's "
        f"owner {RELAY}"
    )


def _router(standing: ReachabilityFacts) -> Finding:
    seen = f"seen as {standing.seen}"
    if not standing.is_behind_router or standing.is_open:
        return Finding("router", Verdict.OK, f"no router in the way, {seen}")
    if standing.varies is None:
        return Finding(
            "router",
            Verdict.NOTE,
            f"{seen}; its kind is unknown, as the coordinator has no second port to compare",
        )
    if standing.varies:
        return Finding(
            "router",
            Verdict.NOTE,
            f"{seen}, with another port for each destination: hole punching cannot pass it",
            "use IPv6, or a forwarded port with --port and --announce, where possible",
        )
    return Finding("router", Verdict.OK, f"{seen}, with one port for all destinations")
