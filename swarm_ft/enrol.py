"""How a process becomes a member of a swarm with an invitation, and stays one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from swarm_ft.errors import NotAllowed, SwarmError, Unavailable
from swarm_ft.identity.certificates import (
    COORDINATOR_NAME,
    Certificate,
    caller_of,
    from_der,
    key_name,
    renewal_due,
)
from swarm_ft.identity.invites import Invite
from swarm_ft.identity.keys import PrivateKey
from swarm_ft.identity.pinning import authority_at
from swarm_ft.log import get_logger
from swarm_ft.protocol.messages.enrolment import Enrolled, EnrolRequest
from swarm_ft.transport.base import call
from swarm_ft.transport.credentials import Credentials
from swarm_ft.transport.grpc_options import GrpcOptions
from swarm_ft.transport.grpc_transport import GrpcTransport
from swarm_ft.transport.methods import ENROL

logger = get_logger(__name__)

TIMEOUT_S = 15.0
RETRY_S = 60.0
NEWS_S, NEWS_EVERY_S = 3.0, 0.3
"""How soon a coordinator surely knows of an invitation: it looks for new ones once a second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Membership:
    """What a member knows of its swarm.

    Attributes:
        name: its own, of its key.
        credentials: for all its links.
        coordinator: where that was, `host:port`.
        initial_peers: of the swarm's DHT.
        dht_prefix: of the swarm's records there.
    """

    name: str
    credentials: Credentials
    coordinator: str
    initial_peers: tuple[str, ...]
    dht_prefix: str


async def enrol(invite: Invite, key: PrivateKey) -> Membership:
    """Have a key certified, at the first of the invitation's addresses that answers.

    Raises:
        BadInvite: it is used up, expired or revoked, or another swarm answers there.
        NotAllowed: the key was revoked.
        Unavailable: no address answers.
    """
    trouble: list[str] = []
    for address in invite.addresses:
        try:
            return await _enrol_at(address, invite, key)
        except Unavailable as error:
            trouble.append(error.message)
    raise Unavailable(f"no coordinator: {'; '.join(trouble)}")


async def _enrol_at(address: str, invite: Invite, key: PrivateKey) -> Membership:
    host, _, port = address.rpartition(":")
    authority = await asyncio.to_thread(
        authority_at, host.strip("[]"), int(port), invite.fingerprint
    )
    shown = invite.newcomer_certificate(key.public_key(), datetime.now(UTC))
    newcomer = Credentials(key, shown, authority)
    enrolled = await _welcomed(address, newcomer)
    certificate = _checked(enrolled, authority, key)
    return Membership(
        name=key_name(certificate),
        credentials=Credentials(key, certificate, authority),
        coordinator=address,
        initial_peers=enrolled.initial_peers,
        dht_prefix=enrolled.dht_prefix,
    )


async def _welcomed(address: str, newcomer: Credentials) -> Enrolled:
    """An invitation that was made just now may not be known there yet; TLS is refused till then."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + NEWS_S
    while True:
        try:
            return await _certified(address, newcomer)
        except Unavailable:
            if loop.time() >= until_s:
                raise
        await asyncio.sleep(NEWS_EVERY_S)


async def _certified(address: str, credentials: Credentials) -> Enrolled:
    channel = GrpcTransport(GrpcOptions(credentials=credentials)).connect(address, COORDINATOR_NAME)
    try:
        return await call(channel, ENROL, EnrolRequest(), TIMEOUT_S)
    finally:
        await channel.close()


def _checked(enrolled: Enrolled, authority: Certificate, key: PrivateKey) -> Certificate:
    certificate = from_der(enrolled.certificate)
    if caller_of(certificate, authority).key != key.public_key():
        raise NotAllowed("the coordinator certified another key than this process has")
    return certificate


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
            enrolled = await _certified(await find(), credentials)
            credentials.renew(_checked(enrolled, credentials.authority, key))
        except SwarmError as error:
            logger.warning("certificate not renewed: %s; trying on", error.message)
            await asyncio.sleep(RETRY_S)
