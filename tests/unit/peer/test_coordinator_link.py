"""How often a peer tries to join."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from swarm_ft.ids import PeerId
from swarm_ft.peer.coordinator_link import MAX_RECONNECT_S, MIN_RECONNECT_S, CoordinatorLink
from swarm_ft.protocol.messages.control import PeerAlive, PeerHello, ToPeer
from swarm_ft.transport.base import Channel
from tests.doubles.clock import ManualClock
from tests.doubles.directory import Board, StaticDirectory
from tests.doubles.memory_transport import MemoryTransport


async def obey(_message: ToPeer) -> None:
    """Nothing is said here."""


async def beside(_: Channel) -> None:
    """Nothing."""


def hello() -> PeerHello:
    return PeerHello(peer_id=PeerId("a"), endpoint="a:1", layers=None, memory_bytes=1)


async def waits(seed: int, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Of a peer whose coordinator is away, the first eight."""
    waited: list[float] = []

    async def sleep(delay_s: float) -> None:
        waited.append(delay_s)
        if len(waited) == 8:
            raise asyncio.CancelledError

    monkeypatch.setattr("swarm_ft.peer.coordinator_link.asyncio.sleep", sleep)
    link = CoordinatorLink(
        StaticDirectory(Board(), ManualClock()),
        MemoryTransport(),
        rng=Random(seed),
        hello=hello,
        alive=lambda: [PeerAlive()],
        obey=obey,
        beside=beside,
    )
    with pytest.raises(asyncio.CancelledError):
        await link.stay_joined()
    return waited


async def test_peers_try_less_and_less_often_and_not_in_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, other = [await waits(seed, monkeypatch) for seed in (0, 1)]
    for waited in (one, other):
        assert waited[0] <= MIN_RECONNECT_S
        assert all(MAX_RECONNECT_S / 2 <= wait <= MAX_RECONNECT_S for wait in waited[3:])
    assert all(a != b for a, b in zip(one, other, strict=True))
