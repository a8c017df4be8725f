"""How a process becomes a member of a swarm with an invitation, and stays one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar

from swarm_ft.errors import NotAllowed, SwarmError, Unavailable
from swarm_ft.identity.certificates import Certificate, caller_of, from_der, key_name, renewal_due
from swarm_ft.identity.invites import Invite
from swarm_ft.identity.keys import PrivateKey
from swarm_ft.identity.pinning import authority_at
from swarm_ft.identity.roles import COORDINATOR_NAME
from swarm_ft.log import get_logger
from swarm_ft.protocol.messages.enrolment import Enrolled, EnrolRequest
from swarm_ft.protocol.spec.member_name import default_name
from swarm_ft.transport.base import Channel, call
from swarm_ft.transport.credentials import Credentials
from swarm_ft.transport.grpc_options import GrpcOptions
from swarm_ft.transport.grpc_transport import GrpcTransport
from swarm_ft.transport.methods import ENROL

logger = get_logger(__name__)

TIMEOUT_S = 15.0
RETRY_S = 60.0
TRIES = 2
PAUSE_S = 1.0
"""Between two rounds of asking a coordinator that is there for the first time."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Membership:
    """What a member knows of its swarm.

    Attributes:
        name: its own, of its key.
        credentials: for all its links.
        coordinator: where that was, `host:port`.
        initial_peers: of the swarm's DHT.
        dht_prefix: of the swarm's records there.
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
        BadInvite: it is used up, expired or revoked, or another swarm answers there.
        NotAllowed: the key was revoked.
        Unavailable: no address answers.
    """
    return await _at_first(invite, lambda address: _enrol_at(address, invite, key, chosen_name))


async def as_newcomer(
    invite: Invite, key: PrivateKey, work: Callable[[Channel], Awaitable[T]]
) -> T:
    """What comes of work over a channel to the coordinator; the invitation is not used up.

    Raises:
        BadInvite: another swarm answers there.
        Unavailable: no address answers.
    """

    async def work_at(address: str) -> T:
        newcomer = await _newcomer_at(address, invite, key)
        async with _channel(address, newcomer) as channel:
            return await work(channel)

    return await _at_first(invite, work_at)


async def _at_first(invite: Invite, attempt: Callable[[str], Awaitable[T]]) -> T:
    """What comes of it at the first of the invitation's addresses that answers, asked twice."""
    trouble: list[str] = []
    for number, address in enumerate(invite.addresses * TRIES):
        if number == len(invite.addresses):  # a busy coordinator may hang up on whoever waits long
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


async def enrol_again(credentials: Credentials, key: PrivateKey, coordinator: str) -> Enrolled:
    """Have a member's certificate renewed, and be told anew where the swarm's DHT is.

    Args:
        credentials: that links show; they show the new certificate from now on.
        key: this process's own.
        coordinator: where that is, `host:port`.

    Raises:
        NotAllowed: the key was revoked.
        Unavailable: the coordinator does not answer.
    """
    enrolled = await _certified(coordinator, credentials)
    credentials.renew(_checked(enrolled, credentials.authority, key))
    return enrolled


async def stay_enrolled(
    credentials: Credentials, key: PrivateKey, find: Callable[[], Awaitable[str]]
) -> None:
    """Renew the certificate before it ends, again and again, until cancelled.

    Args:
        credentials: that links show.
        key: this process's own.
        find: where the coordinator is now, `host:port`.
    """
    while True:
        rest_s = (renewal_due(credentials.certificate) - datetime.now(UTC)).total_seconds()
        await asyncio.sleep(max(rest_s, 0.0))
        try:
            await enrol_again(credentials, key, await find())
        except SwarmError as error:
            logger.warning("certificate not renewed: %s; trying on", error.message)
            await asyncio.sleep(RETRY_S)
