"""Why a machine can, or cannot, join a swarm: what is in its way, and what to do about it.

Each question is asked by itself, so that one that has no answer hides no other. Nothing is used up:
an invitation is read, and not shown.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import dataclass
from enum import StrEnum

from swarm_ft.errors import SwarmError
from swarm_ft.identity.invites import Invite
from swarm_ft.identity.pinning import authority_at
from swarm_ft.protocol.messages.meeting import Way
from swarm_ft.reach.sockets import FrontSays, ask_front, is_dialled_back, outside_address

MAX_OFFSET_S, MAX_JOIN_OFFSET_S = 60.0, 3600.0
"""Of clocks: certificates begin an hour in the past; logs are hard to read before."""


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
    """

    about: str
    verdict: Verdict
    says: str
    advice: str = ""


async def examine_way(invite: Invite) -> AsyncIterator[Finding]:
    """Whether the swarm of this invitation is reached from here, and how this machine is."""
    address, front = None, None
    for address in invite.addresses:
        try:
            front = await ask_front(address)
            break
        except (OSError, TimeoutError, SwarmError) as error:
            yield _unreached(address, error)
    if address is None or front is None:
        return
    round_trip_ms = front.took_s * 1000
    yield Finding("coordinator", Verdict.OK, f"{address} answers in {round_trip_ms:.0f} ms")
    yield await _swarm(address, invite)
    yield _clock(front)
    varies = await _varies(address, front)
    is_open = await _is_open(address, front)
    yield _router(front, is_open=is_open, varies=varies)
    yield _reached(is_open=is_open, varies=varies)


def _unreached(address: str, error: Exception) -> Finding:
    reason = str(error) or "no answer"
    if isinstance(error, OSError) and error.errno:
        reason = os.strerror(error.errno)
    return Finding(
        "coordinator",
        Verdict.BAD,
        f"{address}: {reason}",
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


async def _is_open(address: str, front: FrontSays) -> bool:
    """Whether the coordinator can dial a port of this machine that nobody forwarded."""
    family = socket.AF_INET6 if front.address.startswith("[") else socket.AF_INET
    with closing(socket.create_server(("", 0), family=family)) as listener:
        try:
            return await is_dialled_back(address, listener.getsockname()[1])
        except (OSError, TimeoutError):
            return False


def _router(front: FrontSays, *, is_open: bool, varies: bool | None) -> Finding:
    seen = f"seen as {front.address.rpartition(':')[0]}"
    if is_open:
        return Finding("router", Verdict.OK, f"none in the way, {seen}")
    if varies is None:
        return Finding(
            "router",
            Verdict.NOTE,
            f"{seen}; its kind is not known, as the coordinator shows no other port",
        )
    if varies:
        return Finding(
            "router",
            Verdict.NOTE,
            f"{seen}, with another port for each destination: it cannot be punched through",
            "where it can be had: IPv6, or a forwarded port with --port and --announce",
        )
    return Finding("router", Verdict.OK, f"{seen}, with one port for all destinations")


def _reached(*, is_open: bool, varies: bool | None) -> Finding:
    if is_open:
        return Finding("others", Verdict.OK, f"reach this machine: {Way.DIRECT}")
    if varies:
        return Finding(
            "others",
            Verdict.NOTE,
            f"behind a router reach it: {Way.RELAYED}; public ones: {Way.REVERSE}",
        )
    return Finding(
        "others", Verdict.OK, f"reach this machine: {Way.PUNCHED}, where their routers allow it"
    )
