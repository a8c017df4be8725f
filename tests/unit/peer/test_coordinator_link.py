"""The intervals at which a peer tries to join."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from swarm_ft.errors import Unavailable
from swarm_ft.identity.roles import COORDINATOR_NAME, Role
from swarm_ft.ids import PeerId
from swarm_ft.peer.coordinator_link import (
    ALIVE_EVERY_S,
    MAX_RECONNECT_S,
    MIN_RECONNECT_S,
    CoordinatorLink,
)
from swarm_ft.protocol.messages.control import PeerHello, StayIdle, ToPeer
from swarm_ft.transport.base import Channel, MessageStream
from swarm_ft.transport.methods import JOIN
from tests.doubles.clock import ManualClock
from tests.doubles.directory import Board, StaticDirectory
from tests.doubles.memory_transport import MemoryTransport


async def obey(_message: ToPeer) -> None:
    """No coordinator sends anything here."""


async def do_nothing(_: Channel) -> None:
    """Nothing."""


def hello() -> PeerHello:
    return PeerHello(peer_id=PeerId("a"), endpoint="a:1", layers=None, memory_bytes=1)


def link_to(
    directory: StaticDirectory, transport: MemoryTransport, seed: int = 0
) -> CoordinatorLink:
    """Return the link of a peer that does nothing."""
    return CoordinatorLink(
        directory,
        transport,
        rng=Random(seed),
        hello=hello,
        alive=list,
        handle=obey,
        while_connected=do_nothing,
    )


async def waits(seed: int, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the first eight waits of a peer whose coordinator is away."""
    waited: list[float] = []

    async def sleep(delay_s: float) -> None:
        waited.append(delay_s)
        if len(waited) == 8:
            raise asyncio.CancelledError

    monkeypatch.setattr("swarm_ft.peer.coordinator_link.asyncio.sleep", sleep)
    link = link_to(StaticDirectory(Board(), ManualClock()), MemoryTransport(), seed)
    with pytest.raises(asyncio.CancelledError):
        await link.stay_joined()
    return waited


async def test_a_trouble_that_was_over_and_comes_again_is_told_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    transport, num_calls, real_sleep = MemoryTransport(), 0, asyncio.sleep
    directory = StaticDirectory(Board(), ManualClock())

    async def join(stream: MessageStream[ToPeer, PeerHello]) -> None:
        nonlocal num_calls
        num_calls += 1
        await stream.receive()
        if num_calls != 2:
            await stream.send(StayIdle(reason="no run"))
        raise Unavailable("it restarts")

    async def sleep(delay_s: float) -> None:
        if delay_s == ALIVE_EVERY_S:
            await asyncio.Event().wait()
        if num_calls == 3:
            raise asyncio.CancelledError
        await real_sleep(0.0)

    monkeypatch.setattr("swarm_ft.peer.coordinator_link.asyncio.sleep", sleep)
    server = await transport.serve("127.0.0.1", 0, {JOIN: join})
    await directory.announce(Role.COORDINATOR, COORDINATOR_NAME, server.endpoint)
    with caplog.at_level("WARNING"), pytest.raises(asyncio.CancelledError):
        await link_to(directory, transport).stay_joined()
    assert len(caplog.records) == 2, "the second call met what the first one had met"
    await server.stop()


async def test_peers_try_less_and_less_often_and_not_in_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, other = [await waits(seed, monkeypatch) for seed in (0, 1)]
    for waited in (one, other):
        assert waited[0] <= MIN_RECONNECT_S
        assert all(MAX_RECONNECT_S / 2 <= wait <= MAX_RECONNECT_S for wait in waited[3:])
    assert all(a != b for a, b in zip(one, other, strict=True))
