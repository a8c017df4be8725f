"""The doctor beside a front of its own, over loopback; beside real routers: tests/integration."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from swarm_ft.identity.invites import Invite
from swarm_ft.identity.keys import fingerprint_of, new_key
from swarm_ft.reach.doctor import Verdict, examine_way
from swarm_ft.reach.sockets import ask_front, is_dialled_back
from swarm_ft.reach.transport import FrontedTransport
from swarm_ft.transport.grpc_options import GrpcOptions
from swarm_ft.transport.grpc_transport import GrpcTransport
from tests.members import Swarm, make_swarm


@pytest.fixture
def swarm() -> Swarm:
    return make_swarm()


@pytest.fixture
async def coordinator(swarm: Swarm) -> AsyncIterator[str]:
    """Its front, which has another port."""
    options = GrpcOptions(credentials=swarm.coordinator())
    transport = FrontedTransport(GrpcTransport(options))
    server = await transport.serve("127.0.0.1", 0, {})
    await transport.front.listen("127.0.0.1", 0)
    yield server.endpoint
    await server.stop()


def invite_to(swarm: Swarm, *addresses: str) -> Invite:
    return Invite(
        fingerprint=fingerprint_of(swarm.key.public_key()),
        number=bytes(4),
        secret=bytes(10),
        addresses=addresses,
    )


async def findings(invite: Invite) -> dict[str, tuple[Verdict, str]]:
    return {found.about: (found.verdict, found.says) async for found in examine_way(invite)}


async def test_a_front_tells_where_it_sees_whom_and_what_time_it_is(coordinator: str) -> None:
    says = await ask_front(coordinator)
    assert says.address.startswith("127.0.0.1:")
    assert says.other_port
    assert abs(says.unix_s - time.time()) < 60


async def test_a_front_dials_back_whoever_asks(coordinator: str) -> None:
    assert await is_dialled_back(coordinator, int(coordinator.rpartition(":")[2]))
    assert not await is_dialled_back(coordinator, 1)


async def test_on_one_machine_all_is_well(swarm: Swarm, coordinator: str) -> None:
    found = await findings(invite_to(swarm, coordinator))
    assert list(found) == ["coordinator", "swarm", "clock", "router", "others"]
    assert {verdict for verdict, _ in found.values()} == {Verdict.OK}
    assert found["router"][1] == "none in the way, seen as 127.0.0.1"
    assert found["others"][1] == "reach this machine: direct"


async def test_who_does_not_answer_is_named_and_the_next_one_asked(
    swarm: Swarm, coordinator: str
) -> None:
    (unreached,) = [found async for found in examine_way(invite_to(swarm, "127.0.0.1:1"))]
    assert (unreached.about, unreached.verdict) == ("coordinator", Verdict.BAD)
    assert unreached.says == "127.0.0.1:1: Connection refused"
    assert unreached.advice
    found = await findings(invite_to(swarm, "127.0.0.1:1", coordinator))
    assert found["coordinator"][0] is Verdict.OK


async def test_another_swarms_coordinator_is_told(swarm: Swarm, coordinator: str) -> None:
    key = new_key()
    invite = replace(invite_to(swarm, coordinator), fingerprint=fingerprint_of(key.public_key()))
    verdict, says = (await findings(invite))["swarm"]
    assert verdict is Verdict.BAD
    assert "not the coordinator that this invitation is of" in says
