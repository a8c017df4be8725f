"""Enrolment: a process joins a swarm with an invitation, and renews its certificate."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar

from swarm_ft.base.log import get_logger
from swarm_ft.errors import NotAllowed, SwarmError, Unavailable
from swarm_ft.identity.certificates import Certificate, caller_of, from_der, key_name, renewal_due
from swarm_ft.identity.invites import Invite
from swarm_ft.identity.keys import PrivateKey
from swarm_ft.identity.pinning import authority_at
from swarm_ft.identity.roles import COORDINATOR_NAME
from swarm_ft.protocol.messages.enrolment import Enrolled, EnrolRequest
from swarm_ft.protocol.spec.member_name import default_name
from swarm_ft.transport.base import Channel, call
from swarm_ft.transport.credentials import Credentials
from swarm_ft.transport.grpc_options import GrpcOptions
from swarm_ft.transport.grpc_transport import GrpcTransport
from swarm_ft.transport.methods import ENROL

logger = get_logger(__name__)

TIMEOUT_S = 15.0
"""Seconds until an enrolment call fails."""
RETRY_S = 60.0
"""Seconds between two tries to renew a certificate."""
TRIES = 2
"""Rounds over the invitation's addresses before enrolment fails."""
PAUSE_S = 1.0
"""Seconds between two rounds over the invitation's addresses."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Membership:
    """Facts that a member has about its swarm.

    Attributes:
        name: The member's id, derived from its key.
        credentials: Credentials of all links of this process.
        coordinator: Address at which the coordinator answered, `host:port`.
        initial_peers: Multiaddrs of nodes of the swarm's DHT.
        dht_prefix: Prefix of the swarm's keys in the DHT.
        shown_name: This member's name for people.
    """

    name: str
    credentials: Credentials
    coordinator: str
    initial_peers: tuple[str, ...]
    dht_prefix: str
    shown_name: str = ""


async def enrol(invite: Invite, key: PrivateKey, chosen_name: str = "") -> Membership:
    """Have a key certified, at the first of the invitation's addresses that answers.

    Args:
        invite: The invitation.
        key: The key, which this process has.
        chosen_name: The name for people that this member chose. Empty leaves an earlier choice.

    Raises:
        BadInvite: The invitation is used up, expired or revoked, or another swarm answers.
        NotAllowed: The key was revoked.
        Unavailable: No address answers.
    """
    return await _at_first(invite, lambda address: _enrol_at(address, invite, key, chosen_name))


async def call_as_newcomer(
    invite: Invite, key: PrivateKey, work: Callable[[Channel], Awaitable[T]]
) -> T:
    """Return the result of `work` over a channel to the coordinator, without using the invitation.

    Raises:
        BadInvite: Another swarm answers.
        Unavailable: No address answers.
    """

    async def work_at(address: str) -> T:
        newcomer = await _newcomer_at(address, invite, key)
        async with _channel(address, newcomer) as channel:
            return await work(channel)

    return await _at_first(invite, work_at)


async def _at_first(invite: Invite, attempt: Callable[[str], Awaitable[T]]) -> T:
    trouble: list[str] = []
    for number, address in enumerate(invite.addresses * TRIES):
        if number == len(invite.addresses):  # a busy coordinator may drop slow handshakes
            await asyncio.sleep(PAUSE_S)
        try:
            return await attempt(address)
        except Unavailable as error:
            trouble.append(error.message)
    raise Unavailable(f"no coordinator: {'; '.join(trouble[-len(invite.addresses) :])}")


async def _newcomer_at(address: str, invite: Invite, key: PrivateKey) -> Credentials:
    host, _, port = address.rpartition(":")
    authority = await asyncio.to_thread(
        authority_at, host.strip("[]"), int(port), invite.fingerprint
    )
    shown = invite.newcomer_certificate(key.public_key(), datetime.now(UTC))
    return Credentials(key, shown, authority)


async def _enrol_at(address: str, invite: Invite, key: PrivateKey, chosen_name: str) -> Membership:
    newcomer = await _newcomer_at(address, invite, key)
    enrolled = await _certified(address, newcomer, chosen_name)
    certificate = _checked(enrolled, newcomer.authority, key)
    name = key_name(certificate)
    return Membership(
        name=name,
        shown_name=enrolled.name or default_name(name),
        credentials=Credentials(key, certificate, newcomer.authority),
        coordinator=address,
        initial_peers=enrolled.initial_peers,
        dht_prefix=enrolled.dht_prefix,
    )


async def _certified(address: str, credentials: Credentials, chosen_name: str = "") -> Enrolled:
    async with _channel(address, credentials) as channel:
        return await call(channel, ENROL, EnrolRequest(name=chosen_name), TIMEOUT_S)


@asynccontextmanager
async def _channel(address: str, credentials: Credentials) -> AsyncIterator[Channel]:
    channel = GrpcTransport(GrpcOptions(credentials=credentials)).connect(address, COORDINATOR_NAME)
    try:
        yield channel
    finally:
        await channel.close()


def _checked(enrolled: Enrolled, authority: Certificate, key: PrivateKey) -> Certificate:
    certificate = from_der(enrolled.certificate)
    if caller_of(certificate, authority).key != key.public_key():
        raise NotAllowed("the coordinator certified another key than this process has")
    return certificate


async def renew_enrolment(credentials: Credentials, key: PrivateKey, coordinator: str) -> Enrolled:
    """Renew a member's certificate, and return the reply with the addresses of the DHT.

    Args:
        credentials: Credentials of the links; they show the new certificate from now on.
        key: Private key of this process.
        coordinator: Address of the coordinator, `host:port`.

    Raises:
        NotAllowed: The key was revoked.
        Unavailable: The coordinator does not answer.
    """
    enrolled = await _certified(coordinator, credentials)
    credentials.renew(_checked(enrolled, credentials.authority, key))
    return enrolled


async def keep_enrolled(
    credentials: Credentials, key: PrivateKey, find: Callable[[], Awaitable[str]]
) -> None:
    """Renew the certificate each time before it expires, until cancelled.

    Args:
        credentials: Credentials of the links.
        key: Private key of this process.
        find: Returns the coordinator's current address, `host:port`.
    """
    while True:
        rest_s = (renewal_due(credentials.certificate) - datetime.now(UTC)).total_seconds()
        await asyncio.sleep(max(rest_s, 0.0))
        try:
            await renew_enrolment(credentials, key, await find())
        except SwarmError as error:
            logger.warning("certificate not renewed: %s; retrying", error.message)
            await asyncio.sleep(RETRY_S)
