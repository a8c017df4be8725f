"""Signed records in a DHT that strangers write to as well. Real nodes."""

import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hivemind.dht.crypto import DHTRecord
from hivemind.dht.node import DHTNode
from hivemind.utils import MSGPackSerializer

from swarm_ft.discovery.dht import (
    MAX_SIGNED_LIFETIME_S,
    DhtDirectory,
    DhtOptions,
    RecordRules,
)
from swarm_ft.identity.keys import new_key
from swarm_ft.identity.records import Signer
from swarm_ft.identity.roles import COORDINATOR_NAME, Role

pytestmark = pytest.mark.timeout(60)

AUTHORITY, MEMBER, STRANGER = (Signer(new_key()) for _ in range(3))


@asynccontextmanager
async def opened(signer: Signer | None = None, **options: Any) -> AsyncIterator[DhtDirectory]:
    made = DhtOptions(signer=signer, authority=AUTHORITY.name if signer else None, **options)
    directory = await DhtDirectory.open(made)
    try:
        yield directory
    finally:
        await directory.close()


async def test_members_find_the_coordinator_and_each_other() -> None:
    async with (
        opened(AUTHORITY) as coordinator,
        opened(MEMBER, initial_peers=coordinator.addresses, client_mode=True) as member,
    ):
        await coordinator.announce(Role.COORDINATOR, COORDINATOR_NAME, "127.0.0.1:7000")
        await member.announce(Role.PEER, MEMBER.name, "127.0.0.1:7001")
        assert await member.find(Role.COORDINATOR) == {COORDINATOR_NAME: "127.0.0.1:7000"}
        assert await coordinator.find(Role.PEER) == {MEMBER.name: "127.0.0.1:7001"}
        await coordinator.announce(Role.COORDINATOR, COORDINATOR_NAME, "127.0.0.1:7002")
        assert await member.find(Role.COORDINATOR) == {COORDINATOR_NAME: "127.0.0.1:7002"}
        await member.withdraw(Role.PEER, MEMBER.name)
        assert await coordinator.find(Role.PEER) == {}


async def test_other_coordinators_and_unsigned_records_count_for_nothing() -> None:
    async with (
        opened(AUTHORITY) as coordinator,
        opened(STRANGER, initial_peers=coordinator.addresses, client_mode=True) as other,
        opened(initial_peers=coordinator.addresses, client_mode=True) as plain,
    ):
        await plain.announce(Role.COORDINATOR, COORDINATOR_NAME, "127.0.0.1:6666")
        await plain.announce(Role.PEER, "peer-1", "127.0.0.1:6666")
        await other.announce(Role.COORDINATOR, COORDINATOR_NAME, "127.0.0.1:6666")
        assert await coordinator.find(Role.COORDINATOR) == {}
        assert await coordinator.find(Role.PEER) == {}
        await coordinator.announce(Role.COORDINATOR, COORDINATOR_NAME, "127.0.0.1:7000")
        assert await coordinator.find(Role.COORDINATOR) == {COORDINATOR_NAME: "127.0.0.1:7000"}


async def test_nobody_puts_a_record_over_anothers() -> None:
    """The later of two values counts, so the DHT must not store a foreign one at all."""
    async with opened(AUTHORITY) as coordinator:
        await coordinator.announce(Role.COORDINATOR, COORDINATOR_NAME, "127.0.0.1:7000")
        stranger = await DHTNode.create(initial_peers=list(coordinator.addresses))
        try:
            later = round(time.time()) + 100
            old = AUTHORITY.signed(Role.COORDINATOR, "127.0.0.1:7000", later - 90)
            for value in (
                "127.0.0.1:6666",
                "",
                old,
                STRANGER.signed(Role.COORDINATOR, "127.0.0.1:6666", later),
            ):
                key = "swarm-ft.coordinator"
                await stranger.store(key, value, later, subkey=AUTHORITY.name)
                found = await coordinator.find(Role.COORDINATOR)
                assert found == {COORDINATOR_NAME: "127.0.0.1:7000"}
        finally:
            await stranger.shutdown()


# ---- what a node stores for others


def record(signer: Signer, value: str, expires_s: float) -> DHTRecord:
    name, packed = MSGPackSerializer.dumps(signer.name), MSGPackSerializer.dumps(value)
    return DHTRecord(b"key", name, packed, expires_s)


@pytest.mark.parametrize("role", [Role.PEER, Role.COORDINATOR])
def test_a_keys_own_word_is_stored(role: Role) -> None:
    soon = round(time.time()) + 60
    assert RecordRules().validate(record(MEMBER, MEMBER.signed(role, "host:1", soon), soon))
    assert RecordRules().validate(record(MEMBER, MEMBER.signed(role, "", soon), soon))


@pytest.mark.parametrize("expires_s", [math.nan, math.inf, -math.inf])
def test_no_time_is_no_time(expires_s: float) -> None:
    signed = MEMBER.signed(Role.PEER, "host:1", 0)
    assert not RecordRules().validate(record(MEMBER, signed, expires_s))


def test_nothing_else_is_stored_under_a_keys_name() -> None:
    soon, late = round(time.time()) + 60, round(time.time() + MAX_SIGNED_LIFETIME_S) + 60
    signed = MEMBER.signed(Role.PEER, "host:1", soon)
    for hostile in (
        record(MEMBER, "host:1", soon),
        record(MEMBER, "", soon),
        record(MEMBER, signed, soon + 5),
        record(STRANGER, signed, soon),
        record(MEMBER, MEMBER.signed(Role.PEER, "host:1", late), late),
        record(MEMBER, MEMBER.signed(Role.CLIENT, "host:1", soon), soon),
    ):
        assert not RecordRules().validate(hostile)
