"""Why a machine can, or cannot, join a swarm: what is in its way, and what to do about it.

Each question is asked by itself, so that one that has no answer hides no other. Nothing is used up:
an invitation is read, and not shown.
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
from swarm_ft.reach.sockets import FrontSays, ask_front, is_dialled_back, outside_address

LOOKED_S, DIALLED_S = 5.0, 4.0
"""How long a member that just began waits to know its router, and then to be dialled."""
MAX_OFFSET_S, MAX_JOIN_OFFSET_S = 60.0, 3600.0
"""Of clocks: certificates begin an hour in the past; logs are hard to read before."""
ANYWHERE = ("2001:4860:4860::8888", 53)
RELAY = (
    "for one: the coordinator without --no-relay, or 'swarm-ft relay' on a machine with a public "
    "address"
)


class Verdict(StrEnum):
    """What an answer means for joining."""

    OK = "ok"
    NOTE = "note"
    """Works, and would work better otherwise."""
    BAD = "bad"
    """This machine cannot join like that."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One answer.

    Attributes:
        about: a word for what was asked.
        says: what was found.
        advice: what to do; empty if nothing.
        cause: a word for why others cannot reach this machine; for programs.
    """

    about: str
    verdict: Verdict
    says: str
    advice: str = ""
    cause: str = ""


async def examine_way(invite: Invite) -> AsyncIterator[Finding]:
    """Whether the swarm of this invitation is reached from here, and how this machine is."""
    answers = await asyncio.gather(*map(_front_at, invite.addresses))
    fronts = {a: front for a, front in answers if isinstance(front, FrontSays)}
    for address, answer in answers:
        if not isinstance(answer, FrontSays):
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
    standing = Standing(seen=seen, own=front.own_host, is_open=is_open, varies=varies)
    yield _router(standing)
    if standing.is_behind_router and not is_open:
        yield await _mapping(front)
    yield ipv6(own_ipv6(), invite.addresses, fronts, standing)
    yield _relay(front)
    yield reached(standing)


async def examine_member(reach: Reach, coordinator: str) -> AsyncIterator[Finding]:
    """How others reach a member that serves now, and what is in the way; in 10 s at most.

    Args:
        reach: its part in introductions, which has begun.
        coordinator: where that is.
    """
    front: FrontSays | None = None
    with suppress(TimeoutError):
        async with asyncio.timeout(LOOKED_S):
            with suppress(OSError, SwarmError):
                front = await ask_front(coordinator)
            await reach.joined.wait()
            await reach.knows_mapping.wait()
            await reach.has_asked_router.wait()
    if front is not None and (clock := _clock(front)).verdict is not Verdict.OK:
        yield clock
    ports = {int(endpoint.rpartition(":")[2]) for endpoint in reach.reachable.endpoints}
    yield reached(
        Standing(
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


async def _front_at(address: str) -> tuple[str, FrontSays | Exception]:
    try:
        return address, await ask_front(address)
    except (OSError, TimeoutError, SwarmError) as error:
        return address, error


def _unreached(address: str, error: Exception, others: Sequence[str]) -> Finding:
    """One of the invitation's addresses does not answer; `others` do."""
    reason = str(error) or "no answer"
    if isinstance(error, OSError) and error.errno:
        reason = os.strerror(error.errno)
    says = f"{address}: {reason}"
    if others:
        return Finding("coordinator", Verdict.NOTE, says, f"{others[0]} answers, which is enough")
    return Finding(
        "coordinator",
        Verdict.BAD,
        says,
        "ask the swarm's owner whether it runs, and at this address; some networks let out "
        "connections to few ports only",
    )


async def _swarm(address: str, invite: Invite) -> Finding:
    host, _, port = address.rpartition(":")
    try:
        await asyncio.to_thread(authority_at, host.strip("[]"), int(port), invite.fingerprint)
    except SwarmError as error:
        return Finding("swarm", Verdict.BAD, error.message, "ask for a new invitation")
    return Finding("swarm", Verdict.OK, "the one that this invitation is of")


def _clock(front: FrontSays) -> Finding:
    offset_s = time.time() - front.took_s / 2 - front.unix_s
    says = f"{abs(offset_s):.1f} s {'ahead of' if offset_s > 0 else 'behind'} the coordinator's"
    if abs(offset_s) >= MAX_JOIN_OFFSET_S:
        return Finding("clock", Verdict.BAD, says, "set this machine's clock, or the coordinator's")
    if abs(offset_s) >= MAX_OFFSET_S:
        return Finding("clock", Verdict.NOTE, says, "set this machine's clock")
    return Finding("clock", Verdict.OK, says)


async def _varies(address: str, front: FrontSays) -> bool | None:
    """Whether the router gives each destination another port; None if that cannot be found out."""
    if not front.other_port:
        return None
    other = f"{address.rpartition(':')[0]}:{front.other_port}"
    try:
        one, port = await outside_address(address)
        return one != (await outside_address(other, port=port))[0]
    except (OSError, TimeoutError, SwarmError):
        return None


async def _is_open(address: str, front: FrontSays) -> bool | None:
    """Ask the coordinator to dial a port of this machine that nobody forwarded."""
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


def _version(front: FrontSays) -> Finding:
    if front.version == PROTOCOL_VERSION:
        says = f"swarm-ft {described_version()} speaks the coordinator's, {PROTOCOL_VERSION}"
        return Finding("version", Verdict.OK, says)
    older = "this machine" if front.version > PROTOCOL_VERSION else "the coordinator"
    return Finding(
        "version",
        Verdict.BAD,
        f"swarm-ft {described_version()} speaks protocol version {PROTOCOL_VERSION}, the "
        f"coordinator {front.version}",
        f"update {older}: {UPDATE}",
    )


async def _mapping(front: FrontSays) -> Finding:
    """Whether the router maps ports for those who ask, and is the last one on the way."""
    outside = await router_address()
    if outside is None:
        miniupnpc = "" if importlib.util.find_spec("miniupnpc") else ", and pip install miniupnpc"
        return Finding(
            "mapping",
            Verdict.NOTE,
            "the router maps no ports, as far as was found out",
            f"switch on NAT-PMP or UPnP in its settings{miniupnpc}: others can dial in then",
        )
    if outside == host_of(front.address):
        return Finding("mapping", Verdict.OK, "the router maps ports: a peer is given one")
    return Finding(
        "mapping",
        Verdict.NOTE,
        f"the router's own address is {outside}, and not the one that is seen: the provider has "
        "another router (CGNAT), and a port that this one maps leads nowhere",
        "ask the provider for IPv6, or for an address of your own",
    )


def own_ipv6() -> str | None:
    """The address from which this machine would speak to the whole internet; None: it has none.

    No packet is sent to find out.
    """
    with suppress(OSError), socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as asker:
        asker.connect(ANYWHERE)
        own = ipaddress.IPv6Address(asker.getsockname()[0])
        return str(own) if own.is_global else None
    return None


def ipv6(
    own: str | None, addresses: Collection[str], fronts: Collection[str], standing: Standing
) -> Finding:
    """Whether others can reach this machine by IPv6, where no router changes ports.

    Args:
        own: its address.
        addresses: of the coordinator.
        fronts: those of them that answer.
        standing: how others reach it otherwise.
    """
    if any(map(_is_ipv6, fronts)):
        return Finding("ipv6", Verdict.OK, f"{own or 'this machine'} reaches the coordinator's")
    verdict = Verdict.OK if standing.is_open else Verdict.NOTE  # it is not needed
    if own is None:
        advice = (
            "" if standing.is_open else "ask the provider for it: no router hands out ports there"
        )
        return Finding("ipv6", verdict, "this machine has none", advice)
    if any(map(_is_ipv6, addresses)):
        advice = "" if standing.is_open else "see what firewalls of this network do with IPv6"
        return Finding("ipv6", verdict, f"{own} does not reach the coordinator's", advice)
    advice = "the swarm's owner may name the coordinator's in the invitation, if it has one"
    says = f"{own} is not used: the invitation names no such address of the coordinator"
    return Finding("ipv6", verdict, says, "" if standing.is_open else advice)


def _is_ipv6(endpoint: str) -> bool:
    return endpoint.startswith("[")


def _relay(front: FrontSays) -> Finding:
    """Whether there is one for sure: a coordinator that is none has no second port."""
    if front.other_port:
        return Finding("relay", Verdict.OK, "beside the coordinator")
    says = "none beside the coordinator; who joins is told of others"
    return Finding("relay", Verdict.NOTE, says, f"if there is none, ask the swarm's owner {RELAY}")


# ---- how others reach a machine, decided from what is known of it


class Cause(StrEnum):
    """Why not everybody reaches a machine; the words are for programs."""

    NONE = ""
    NOT_INTRODUCED = "not-introduced"
    """The coordinator makes no introductions."""
    FIREWALL = "firewall"
    """No router is between, and its port is closed all the same."""
    ROUTER = "router"
    """A router lets nobody in, but what it lets out can be punched through."""
    SYMMETRIC_ROUTER = "symmetric-router"
    """A router that gives each destination another port."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """What decides how others reach a machine.

    Attributes:
        seen: host at which the coordinator sees it; empty: it did not say.
        own: host from which it asked.
        port: of its front; 0: any that nobody forwarded.
        is_open: whether the coordinator can dial it there; None: it dials no such address.
        varies: its router gives each destination another port; None: nobody knows.
        has_relay: the swarm has one; None: nobody knows.
        trouble: why the coordinator introduces nobody to it; None: it would.
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
        """Whether it is seen at another address than its own, as far as is known."""
        return not self.seen or self.seen != self.own

    @property
    def cause(self) -> Cause:
        """Why not everybody can dial it."""
        if self.trouble is not None:
            return Cause.NOT_INTRODUCED
        if self.is_open or (self.is_open is None and not self.is_behind_router):
            return Cause.NONE
        if not self.is_behind_router:
            return Cause.FIREWALL
        return Cause.SYMMETRIC_ROUTER if self.varies else Cause.ROUTER


_IN_THE_WAY = {
    Cause.FIREWALL: "a firewall, of this machine or its network, keeps its port closed",
    Cause.ROUTER: "its router lets nobody in",
    Cause.SYMMETRIC_ROUTER: "its router lets nobody in, and gives each destination another port",
}


def reached(standing: Standing) -> Finding:
    """Which ways lead to a machine. BAD: nobody else's router lets them meet it."""
    cause = standing.cause
    if standing.trouble is not None:
        says = f"cannot reach this machine: the coordinator introduces nobody: {standing.trouble}"
        advice = "it tries on; 'swarm-ft doctor' with the invitation looks closer"
        return Finding("others", Verdict.BAD, says, advice, cause)
    if standing.is_open:
        return Finding("others", Verdict.OK, "reach this machine directly")
    if cause is Cause.NONE:
        says = f"the coordinator does not test private addresses such as {standing.seen}"
        return Finding("others", Verdict.NOTE, says)
    if standing.has_relay is False:
        says = f"behind routers cannot reach this machine: {_IN_THE_WAY[cause]}, and the swarm has "
        return Finding("others", Verdict.BAD, f"{says}no relay", _opening(standing, cause), cause)
    if standing.varies:
        says = f"behind a router reach it: {Way.RELAYED}; public ones: {Way.REVERSE}"
        return Finding("others", Verdict.NOTE, says, "", cause)
    says = f"reach this machine: {Way.PUNCHED}, where their routers allow it"
    if cause is Cause.FIREWALL:
        says = f"{says}, as {_IN_THE_WAY[cause]}"
        return Finding("others", Verdict.NOTE, says, _opening(standing, cause), cause)
    return Finding("others", Verdict.OK, says, "", cause)


def _opening(standing: Standing, cause: Cause) -> str:
    """What would let others in."""
    port = f"TCP port {standing.port}" if standing.port else "a TCP port, named with --port,"
    if cause is Cause.FIREWALL:
        return f"open {port} in the firewall"
    return (
        f"forward {port} in the router and start with --port and --announce; or ask the swarm's "
        f"owner {RELAY}"
    )


def _router(standing: Standing) -> Finding:
    seen = f"seen as {standing.seen}"
    if not standing.is_behind_router or standing.is_open:
        return Finding("router", Verdict.OK, f"none in the way, {seen}")
    if standing.varies is None:
        return Finding(
            "router",
            Verdict.NOTE,
            f"{seen}; its kind is not known, as the coordinator shows no other port",
        )
    if standing.varies:
        return Finding(
            "router",
            Verdict.NOTE,
            f"{seen}, with another port for each destination: it cannot be punched through",
            "where it can be had: IPv6, or a forwarded port with --port and --announce",
        )
    return Finding("router", Verdict.OK, f"{seen}, with one port for all destinations")
