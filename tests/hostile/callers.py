"""Every kind of caller that there is: what each has, and how it came by it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import timedelta
from enum import StrEnum

from swarm_ft.errors import RunFailed
from swarm_ft.identity.certificates import issue
from swarm_ft.identity.keys import name_of, new_key
from swarm_ft.identity.roles import COORDINATOR_NAME, Caller, Role
from swarm_ft.proto import coordinator_pb2 as pb
from swarm_ft.protocol.spec.version import PROTOCOL_VERSION
from tests.hostile.attacker import COORDINATOR, Identity, enrol, exchange, low_key, newcomer
from tests.hostile.victim import Victim
from tests.members import NOW, make_swarm

HEEDED_S = 30.0


class Kind(StrEnum):
    """The kind of a caller."""

    NOBODY = "nobody"
    """Speaks plaintext."""
    STRANGER = "stranger"
    """Has an authority of its own."""
    NEWCOMER = "newcomer"
    """Has an invitation that nobody used yet."""
    LATE_NEWCOMER = "late-newcomer"
    """Has one that is used up."""
    CLIENT = "client"
    """Owns no run that matters here."""
    OWNER = "owner"
    """Submitted the run."""
    OUTSIDER = "outsider"
    """A peer that the attempt does not name."""
    INSIDER = "insider"
    """A peer of the attempt that is no neighbour of the one that it calls."""
    NEIGHBOUR = "neighbour"
    REPLICA = "replica"
    IMPOSTOR = "impostor"
    """A peer that certified itself to be the coordinator."""
    RELAY = "relay"
    """Joins others' links, and hosts nothing."""
    REVOKED = "revoked"
    EXPIRED = "expired"
    COORDINATOR = "coordinator"
    """The coordinator's role calls nobody: whoever stole its key calls no peers with it."""


Callers = Mapping[Kind, Identity | None]


async def make_callers(victim: Victim, owner: Identity) -> Callers:
    """One of each, but for neighbours and the like: these are peers whose keys were stolen."""
    first, middle = victim.peers[0].identity, victim.peers[1].identity
    outsider = await victim.member(Role.PEER)
    return {
        Kind.NOBODY: None,
        Kind.STRANGER: _stranger(victim),
        Kind.NEWCOMER: newcomer(
            await victim.invite(Role.PEER), low_key(first.name), victim.certificate
        ),
        Kind.LATE_NEWCOMER: await _late(victim),
        Kind.CLIENT: await victim.member(Role.CLIENT),
        Kind.OWNER: owner,
        Kind.OUTSIDER: outsider,
        Kind.INSIDER: first,
        Kind.NEIGHBOUR: first,
        Kind.REPLICA: middle,
        Kind.IMPOSTOR: _impostor(outsider),
        Kind.RELAY: await victim.member(Role.RELAY),
        Kind.REVOKED: await _revoked(victim),
        Kind.EXPIRED: victim.certified(Role.PEER, age=timedelta(days=2)),
        Kind.COORDINATOR: victim.certified(Role.COORDINATOR),
    }


def _stranger(victim: Victim) -> Identity:
    other = make_swarm()
    key = low_key(victim.peers[0].target.name)
    holder = Caller(role=Role.PEER, name=name_of(key.public_key()), key=key.public_key())
    return Identity(key, issue(other.authority, other.key, holder, NOW), victim.certificate)


async def _late(victim: Victim) -> Identity:
    invite = await victim.invite(Role.PEER)
    _, other = await enrol(victim.coordinator, newcomer(invite, new_key(), victim.certificate))
    if other is None:
        raise RunFailed("who was invited was not let in")
    return newcomer(invite, new_key(), victim.certificate)


def _impostor(peer: Identity) -> Identity:
    key = new_key()
    holder = Caller(role=Role.COORDINATOR, name=COORDINATOR_NAME, key=key.public_key())
    return Identity(key, issue(peer.certificate, peer.key, holder, NOW), peer.authority)


async def _revoked(victim: Victim) -> Identity:
    """Known to the coordinator, and to all peers, as such."""
    revoked = await victim.member(Role.PEER)
    victim.revoke(revoked.name)
    status = pb.StatusRequest(protocol_version=PROTOCOL_VERSION)
    calls = [(victim.coordinator, COORDINATOR + "Status", status.SerializeToString())]
    calls += [(peer.target, "/swarm_ft.v1.Snapshots/ListChunks", b"") for peer in victim.peers]
    async with asyncio.timeout(HEEDED_S):
        for target, path, request in calls:
            while "revoked" not in (await exchange(target, path, revoked, request)).message:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    return revoked
