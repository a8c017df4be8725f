"""Connected relays, and the choice of one: the decision, and real calls of rpc Relay."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from swarm_ft.base.clock import SystemClock
from swarm_ft.coordinator import relays
from swarm_ft.coordinator.meetings import Introductions
from swarm_ft.coordinator.relays import ConnectedRelay, nearest
from swarm_ft.errors import MalformedMessage, NotAllowed, SwarmError, Unavailable
from swarm_ft.identity.certificates import key_name
from swarm_ft.identity.keys import key_der, new_key, public_key
from swarm_ft.identity.roles import COORDINATOR_NAME, Role
from swarm_ft.protocol.messages.meeting import (
    FromRelay,
    RelayCarries,
    RelayHello,
    RelayPlace,
    RelayWelcome,
)
from swarm_ft.transport.base import MessageStream
from swarm_ft.transport.credentials import Credentials
from swarm_ft.transport.grpc_options import GrpcOptions
from swarm_ft.transport.grpc_transport import GrpcTransport
from swarm_ft.transport.methods import RELAY
from tests.members import make_swarm

SWARM = make_swarm()
KEY = new_key()
HELLO = RelayHello(endpoint="127.0.0.1:7100", probe_endpoint="127.0.0.1:7101")
Stream = MessageStream[FromRelay, RelayWelcome]


def relaying(host: str, *, is_full: bool = False) -> ConnectedRelay:
    place = RelayPlace(endpoint=f"{host}:1", probe_endpoint=f"{host}:2")
    return ConnectedRelay(name=host, place=place, carries=RelayCarries(is_full=is_full))


OWN, NEAR, FAR = (relaying(host) for host in ("own", "near", "far"))


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ({"own:1": 0.05, "near:1": 0.02}, {"own:1": 0.05, "near:1": 0.07}, "near:1"),
        ({"own:1": 0.05, "near:1": 0.02}, {"own:1": 0.05, "near:1": 0.09}, "own:1"),
        # Who has not measured yet leaves it to the other; where nobody has, to the coordinator's.
        (None, {"own:1": 0.05, "far:1": 0.04}, "far:1"),
        (None, None, "own:1"),
        # What one does not reach is of no use, however near it is to the other.
        ({"far:1": 0.3}, {"own:1": 0.01, "near:1": 0.01, "far:1": 0.3}, "far:1"),
        # A relay that only one reaches is tried before one that nobody does.
        ({"near:1": 0.3}, {}, "near:1"),
        ({}, {}, "own:1"),
    ],
)
def test_the_relay_with_the_least_way_for_both_is_taken(
    one: dict[str, float] | None, other: dict[str, float] | None, expected: str
) -> None:
    for pair in ((one, other), (other, one)):
        place = nearest((OWN, NEAR, FAR), *pair)
        assert place is not None
        assert place.endpoint == expected


def test_a_relay_without_room_is_taken_where_there_is_no_other() -> None:
    full = relaying("near", is_full=True)
    distances = {"near:1": 0.01, "far:1": 0.2}
    assert nearest((full, FAR), distances, distances) == FAR.place
    assert nearest((full,), distances, distances) == full.place
    assert nearest((), distances, distances) is None


# ---- the conversation


@dataclass
class Hub:
    """A coordinator with relays that counts their changes."""

    endpoint: str
    introductions: Introductions
    changes: asyncio.Queue[tuple[str, ...]] = field(default_factory=asyncio.Queue)

    @asynccontextmanager
    async def call(self, credentials: Credentials) -> AsyncIterator[Stream]:
        transport = GrpcTransport(GrpcOptions(credentials=credentials))
        channel = transport.connect(self.endpoint, COORDINATOR_NAME)
        try:
            stream = channel.open(RELAY)
            yield stream
        finally:
            await channel.close()


@pytest.fixture
async def hub() -> AsyncIterator[Hub]:
    introductions = Introductions(lambda: KEY, SystemClock())
    transport = GrpcTransport(GrpcOptions(credentials=SWARM.coordinator()))
    server = await transport.serve("127.0.0.1", 0, introductions.handlers())
    hub = Hub(server.endpoint, introductions)
    roll = introductions.relays
    roll.on_change(lambda: hub.changes.put_nowait(tuple(r.name for r in roll.present)))
    yield hub
    await server.stop()


async def welcome(stream: Stream, hello: RelayHello = HELLO) -> RelayWelcome:
    found = await answer_to(stream, hello)
    assert found is not None
    return found


async def refusal(hub: Hub, credentials: Credentials, message: FromRelay) -> SwarmError:
    async with hub.call(credentials) as stream:
        with pytest.raises(SwarmError) as caught:
            await answer_to(stream, message)
        return caught.value


async def answer_to(stream: Stream, message: FromRelay) -> RelayWelcome | None:
    await stream.send(message)
    return await stream.receive()


async def test_a_relay_is_one_from_its_first_word_to_its_last(hub: Hub) -> None:
    credentials = SWARM.member(Role.RELAY)
    name = key_name(credentials.certificate)
    async with hub.call(credentials) as stream:
        welcomed = await welcome(stream)
        assert public_key(welcomed.ticket_key) == KEY.public_key()
        assert welcomed.endpoint == HELLO.endpoint
        assert hub.introductions.relays.present == (), "it may not have the key yet"
        await stream.send(RelayCarries(links=3, relayed_bytes=4))
        assert await hub.changes.get() == (name,)
        (status,) = hub.introductions.relays.statuses
        assert (status.name, status.endpoint, status.links) == (name, HELLO.endpoint, 3)
    assert await hub.changes.get() == ()


async def test_a_relay_that_is_silent_is_gone(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relays, "SILENT_S", 0.05)
    async with hub.call(SWARM.member(Role.RELAY)) as stream:
        await welcome(stream)
        with pytest.raises(Unavailable, match="was silent"):
            await stream.receive()


async def test_who_is_no_relay_is_none(hub: Hub) -> None:
    for role in (Role.PEER, Role.CLIENT):
        error = await refusal(hub, SWARM.member(role), HELLO)
        assert isinstance(error, NotAllowed)
        assert "expected a call by a relay" in error.message
    assert isinstance(
        await refusal(hub, SWARM.member(Role.RELAY), RelayCarries()), MalformedMessage
    )


async def test_the_newest_call_of_a_relay_counts(hub: Hub) -> None:
    credentials = SWARM.member(Role.RELAY)
    async with hub.call(credentials) as older:
        await welcome(older)
        await older.send(RelayCarries())
        await hub.changes.get()
        other_hello = RelayHello(endpoint="127.0.0.1:9", probe_endpoint="127.0.0.1:10")
        assert "is connected already" in (await refusal(hub, credentials, other_hello)).message
        async with hub.call(credentials) as newer:
            await welcome(newer)
            await older.send(RelayCarries())
            with pytest.raises(Unavailable, match="opened a new stream"):
                await older.receive()
            await newer.send(RelayCarries())
            assert len(hub.introductions.relays.present) == 1


async def test_a_relay_whose_key_is_revoked_is_none_any_more(hub: Hub) -> None:
    credentials = SWARM.member(Role.RELAY)
    name = key_name(credentials.certificate)
    async with hub.call(credentials) as stream:
        await welcome(stream)
        await stream.send(RelayCarries())
        await hub.changes.get()
        hub.introductions.relays.revoke(frozenset({name}))
        assert await hub.changes.get() == ()
        with pytest.raises(NotAllowed, match="was revoked"):
            await answer_to(stream, RelayCarries())


@pytest.mark.parametrize(
    ("endpoint", "host", "expected"),
    [
        ("192.0.2.7:1", "192.0.2.7", "192.0.2.7:1"),
        # A machine that knows its private address alone, behind a forwarded port.
        ("10.1.2.3:1", "192.0.2.7", "192.0.2.7:1"),
        # The coordinator's own network, from where nothing public is seen.
        ("192.0.2.7:1", "10.1.2.3", "192.0.2.7:1"),
        ("192.0.2.7:1", "127.0.0.1", "192.0.2.7:1"),
        ("198.51.100.1:1", "192.0.2.7", None),
        ("127.0.0.1:1", "192.0.2.7", None),
        ("nowhere.invalid:1", "192.0.2.7", None),
    ],
)
async def test_a_relay_has_nobody_else_dialled(
    endpoint: str, host: str, expected: str | None
) -> None:
    if expected is not None:
        assert await relays.relay_endpoint(endpoint, host) == expected
        return
    with pytest.raises(NotAllowed, match="--announce"):
        await relays.relay_endpoint(endpoint, host)


def test_what_is_no_key_is_told_so() -> None:
    assert public_key(key_der(KEY.public_key())) == KEY.public_key()
    with pytest.raises(MalformedMessage, match="expected a public key"):
        public_key(b"no key")
