"""Memory of peers that share one machine: together they count for no more than it has. Pure.

A peer lends a part of the memory that was free when it started, so several peers on one machine
may lend the same memory. The machine's memory is divided among them: peers that offer little get
what they offer, and the others get equal parts of the rest. A stage that a peer hosts stays with
it; only later placements count less memory.

Two peers share a machine if both know its key, and call from the same address. Only programs on a
machine know its key, so no stranger can take a part of its memory, see `PeerHello.machine_key`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from swarm_ft.coordinator.facts.state import SwarmState
from swarm_ft.ids import PeerId
from swarm_ft.protocol.messages.control import MemoryShare, PeerHello

SITE_CHARS = 16
"""Letters of a machine's name."""


def site_of(hello: PeerHello, address: str) -> str:
    """Return the name that peers on one machine share; empty if the peer does not report one.

    The name is a digest, so neither the key nor the address is recorded.

    Args:
        hello: The peer's hello.
        address: Address from which the peer calls, as the coordinator sees it.
    """
    is_known = bool(hello.machine_key and hello.machine_memory_bytes)
    if not is_known:
        return ""
    return hashlib.sha256(f"{hello.machine_key} at {address}".encode()).hexdigest()[:SITE_CHARS]


def divide_memory(
    state: SwarmState, site: str
) -> tuple[SwarmState, list[tuple[PeerId, MemoryShare]]]:
    """Divide the memory of a machine among its members.

    Args:
        state: State after a member of the machine joined or left.
        site: Name of the machine; empty: unknown, and nothing changes.

    Returns:
        The state after the division, and the members whose memory counts differently now, each with
        its message. A new member counted with all that it offers.
    """
    members = [one for one in state.members.values() if one.site == site] if site else []
    total_bytes = max((one.hello.machine_memory_bytes for one in members), default=0)
    notices = []
    shares = fair_shares([one.offered_bytes for one in members], total_bytes)
    for member, share_bytes in zip(members, shares, strict=True):
        if share_bytes != member.hello.memory_bytes:
            hello = replace(member.hello, memory_bytes=share_bytes)
            state = state.with_member(replace(member, hello=hello))
            share = MemoryShare(memory_bytes=share_bytes, num_peers=len(members))
            notices.append((hello.peer_id, share))
    return state, notices


def fair_shares(offers: Sequence[int], total: int) -> list[int]:
    """Return a part of the total for each offer: what it offers, or an equal part of the rest."""
    shares, left = [0] * len(offers), total
    rising = sorted(range(len(offers)), key=offers.__getitem__)
    for num_before, at in enumerate(rising):
        shares[at] = min(offers[at], left // (len(offers) - num_before))
        left -= shares[at]
    return shares
