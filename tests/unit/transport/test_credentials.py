"""Access over real gRPC and TLS: members, strangers, revoked members."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from itertools import product
from typing import Any

import pytest

from swarm_ft.errors import NotAllowed, SwarmError, Unavailable
from swarm_ft.identity.certificates import issue
from swarm_ft.identity.invites import invitation_certificate
from swarm_ft.identity.keys import name_of, new_key
from swarm_ft.identity.roles import COORDINATOR_NAME, Caller, Role
from swarm_ft.protocol.messages.client import StatusRequest, SwarmStatus
from swarm_ft.protocol.messages.enrolment import Enrolled, EnrolRequest
from swarm_ft.transport import methods
from swarm_ft.transport.base import Handler, MessageStream, Method, call
from swarm_ft.transport.credentials import Credentials
from swarm_ft.transport.grpc_options import GrpcOptions
from swarm_ft.transport.grpc_transport import GrpcTransport
from swarm_ft.transport.methods import ENROL, STATUS
from swarm_ft.transport.rules import RULES, check_name, check_rule
from tests.members import NOW, Swarm, make_swarm

TIMEOUT_S = 5.0


@pytest.fixture
def swarm() -> Swarm:
    return make_swarm()


class Served:
    """A server that records its callers."""

    def __init__(self) -> None:
        self.callers: list[Caller | None] = []

    async def status(self, stream: MessageStream[SwarmStatus, StatusRequest]) -> None:
        await stream.receive()
        self.callers.append(stream.caller)
        await stream.send(SwarmStatus(members=(), runs=()))

    async def enrol(self, stream: MessageStream[Enrolled, EnrolRequest]) -> None:
        await stream.receive()
        self.callers.append(stream.caller)
        await stream.send(Enrolled(certificate=b"x", initial_peers=(), dht_prefix="x"))


@asynccontextmanager
async def serving(credentials: Credentials | None) -> AsyncIterator[tuple[Served, str]]:
    served = Served()
    transport = GrpcTransport(GrpcOptions(credentials=credentials))
    handlers: dict[Method[Any, Any], Handler] = {STATUS: served.status, ENROL: served.enrol}
    server = await transport.serve("127.0.0.1", 0, handlers)
    try:
        yield served, server.endpoint
    finally:
        await server.stop()


async def call_once(
    credentials: Credentials | None, endpoint: str, name: str, method: str = "status"
) -> None:
    channel = GrpcTransport(GrpcOptions(credentials=credentials)).connect(endpoint, name)
    try:
        if method == "status":
            await call(channel, STATUS, StatusRequest(), TIMEOUT_S)
        else:
            await call(channel, ENROL, EnrolRequest(), TIMEOUT_S)
    finally:
        await channel.close()


async def refusal(
    credentials: Credentials | None, endpoint: str, name: str, method: str = "status"
) -> SwarmError:
    with pytest.raises(SwarmError) as caught:
        await call_once(credentials, endpoint, name, method)
    return caught.value


def name(credentials: Credentials) -> str:
    return name_of(credentials.certificate.public_key())  # type: ignore[arg-type]


async def test_members_know_each_other(swarm: Swarm) -> None:
    one, other = swarm.member(), swarm.member()
    async with serving(one) as (served, endpoint):
        await call_once(other, endpoint, name(one))
        (caller,) = served.callers
        assert caller is not None
        assert (caller.role, caller.name) == (Role.PEER, name(other))


async def test_another_member_is_not_who_was_dialled(swarm: Swarm) -> None:
    one, other = swarm.member(), swarm.member()
    async with serving(one) as (served, endpoint):
        for expected in (name(other), COORDINATOR_NAME, ""):
            error = await refusal(other, endpoint, expected)
            assert isinstance(error, Unavailable)
            assert f"{endpoint}: it answers with another member's certificate" in error.message
        assert not served.callers


async def test_strangers_get_through_to_nobody(swarm: Swarm) -> None:
    member, stranger = swarm.member(), make_swarm().member()
    for server, client in product((member, stranger), repeat=2):
        if server is not client:
            async with serving(server) as (served, endpoint):
                error = await refusal(client, endpoint, name(server))
                assert isinstance(error, Unavailable)
                assert "it belongs to another swarm" in error.message
                assert not served.callers


async def test_plaintext_gets_through_to_nobody_and_nobody_to_plaintext(swarm: Swarm) -> None:
    member = swarm.member()
    async with serving(member) as (served, endpoint):
        assert isinstance(await refusal(None, endpoint, name(member)), Unavailable)
        assert not served.callers
    async with serving(None) as (served, endpoint):
        assert isinstance(await refusal(member, endpoint, COORDINATOR_NAME), Unavailable)
        assert not served.callers


async def test_a_certificate_that_has_ended_is_of_no_use(swarm: Swarm) -> None:
    ended = swarm.member(now=NOW - timedelta(days=2))
    member = swarm.member()
    async with serving(member) as (served, endpoint):
        assert isinstance(await refusal(ended, endpoint, name(member)), Unavailable)
        assert not served.callers
    async with serving(ended) as (served, endpoint):
        assert isinstance(await refusal(member, endpoint, name(ended)), Unavailable)


async def test_a_channel_shows_the_renewed_certificate_in_its_next_call(swarm: Swarm) -> None:
    server, client = swarm.member(), swarm.member()
    async with serving(server) as (_, endpoint):
        channel = GrpcTransport(GrpcOptions(credentials=client)).connect(endpoint, name(server))
        try:
            await call(channel, STATUS, StatusRequest(), TIMEOUT_S)
            ends_s = client.certificate.not_valid_after_utc.timestamp()
            server.validity.unix_s = lambda: ends_s + 1.0
            with pytest.raises(Unavailable, match="its certificate has expired"):
                await call(channel, STATUS, StatusRequest(), TIMEOUT_S)
            key = client.certificate.public_key()
            holder = Caller(role=Role.PEER, name=name(client), key=key)  # type: ignore[arg-type]
            later = NOW + timedelta(minutes=10)
            client.renew(issue(swarm.authority, swarm.key, holder, later))
            await call(channel, STATUS, StatusRequest(), TIMEOUT_S)
        finally:
            await channel.close()


async def test_a_server_that_renews_its_certificate_serves_on(swarm: Swarm) -> None:
    server, client = swarm.member(now=NOW - timedelta(days=2)), swarm.member()
    fresh = swarm.member()
    async with serving(server) as (_, endpoint):
        assert isinstance(await refusal(client, endpoint, name(server)), Unavailable)
        key = server.certificate.public_key()
        holder = Caller(role=Role.PEER, name=name(server), key=key)  # type: ignore[arg-type]
        server.renew(issue(swarm.authority, swarm.key, holder, NOW))
        await call_once(client, endpoint, name(server))
        await call_once(fresh, endpoint, name(server))


async def test_many_who_come_at_once_are_all_served(swarm: Swarm) -> None:
    """A server names its certificates to gRPC once, not in each handshake."""
    server, client = swarm.member(), swarm.member()
    async with serving(server) as (served, endpoint):
        await asyncio.gather(*(call_once(client, endpoint, name(server)) for _ in range(64)))
        assert len(served.callers) == 64


async def test_who_is_revoked_is_told(swarm: Swarm) -> None:
    server, client = swarm.member(), swarm.member()
    async with serving(server) as (served, endpoint):
        await call_once(client, endpoint, name(server))
        server.revoke([name(client)])
        error = await refusal(client, endpoint, name(server))
        assert isinstance(error, NotAllowed)
        assert "was revoked" in error.message
        assert len(served.callers) == 1


async def test_who_was_invited_may_enrol_and_nothing_else(swarm: Swarm) -> None:
    key, own = new_key(), new_key()
    invitation = invitation_certificate(key, "invite-1", NOW)
    shown = issue(
        invitation, key, Caller(role=Role.NEWCOMER, name="invite-1", key=own.public_key()), NOW
    )
    newcomer = Credentials(own, shown, swarm.authority)
    async with serving(swarm.coordinator((invitation,))) as (served, endpoint):
        await call_once(newcomer, endpoint, COORDINATOR_NAME, "enrol")
        (caller,) = served.callers
        assert caller == Caller(role=Role.NEWCOMER, name="invite-1", key=own.public_key())
        error = await refusal(newcomer, endpoint, COORDINATOR_NAME)
        assert isinstance(error, NotAllowed)
        assert "newcomer invite-1" in error.message
    async with serving(swarm.coordinator()) as (served, endpoint):
        error = await refusal(newcomer, endpoint, COORDINATOR_NAME, "enrol")
        assert isinstance(error, Unavailable)
    member = swarm.member()
    async with serving(member) as (served, endpoint):
        assert isinstance(await refusal(newcomer, endpoint, name(member)), Unavailable)
        assert not served.callers


# ---- the table of rules

ALL_METHODS = [value for value in vars(methods).values() if isinstance(value, Method)]


def test_every_method_has_its_rule() -> None:
    assert {method.path for method in ALL_METHODS} == RULES.keys()


@pytest.mark.parametrize("method", ALL_METHODS, ids=str)
@pytest.mark.parametrize("role", list(Role))
def test_each_cell_of_the_table(method: Method[object, object], role: Role, swarm: Swarm) -> None:
    caller = Caller(role=role, name="somebody", key=swarm.key.public_key())
    if role in RULES[method.path]:
        check_rule(method, caller)
    else:
        with pytest.raises(NotAllowed):
            check_rule(method, caller)


def test_a_coordinator_calls_nobody() -> None:
    assert not any(Role.COORDINATOR in allowed for allowed in RULES.values())


def test_a_peer_is_who_its_certificate_says(swarm: Swarm) -> None:
    caller = Caller(role=Role.PEER, name="somebody", key=swarm.key.public_key())
    check_name(caller, "somebody")
    check_name(None, "anybody")
    with pytest.raises(NotAllowed, match="expected its key's name"):
        check_name(caller, "somebody else")
