"""A client fetches a run's result from peers that die, send wrong files or disagree."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from swarm_ft.client.swarm import SwarmClient
from swarm_ft.errors import Unavailable
from swarm_ft.identity.roles import Role
from swarm_ft.ids import PeerId, RunId, StepNumber
from swarm_ft.net.transfer import (
    PART_BYTES,
    OfferedShard,
    offer,
    serve_chunk_list,
    serve_chunks,
)
from swarm_ft.protocol.messages.client import RunPhase, RunStatus, StageResult
from swarm_ft.protocol.messages.control import StageAssignment
from swarm_ft.protocol.messages.shard import CHUNK_BYTES, ChunkPart, FetchRequest, ShardName
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.transport.base import Handler, MessageStream, Method, Server, Transport
from swarm_ft.transport.methods import FETCH_CHUNKS, LIST_CHUNKS
from tests.doubles.clock import ManualClock
from tests.doubles.directory import Board, StaticDirectory
from tests.doubles.faults import FaultyTransport
from tests.doubles.memory_transport import MemoryTransport
from tests.specs import run_spec

RUN, STEPS = RunId("run"), StepNumber(7)
FIRST, LAST = LayerRange(0, 2), LayerRange(2, 4)
PARTS = CHUNK_BYTES // PART_BYTES
"""Messages in which a chunk comes."""


def name_of(layers: LayerRange) -> ShardName:
    return ShardName(run_id=RUN, step=STEPS, layers=layers, is_result=True)


def written(path: Path, num_chunks: int, mark: int) -> OfferedShard:
    """Write a file of so many different chunks less one byte."""
    chunks = (bytes([mark, i]) * (CHUNK_BYTES // 2) for i in range(num_chunks))
    path.write_bytes(b"".join(chunks)[:-1])
    return offer(path, name_of(FIRST))


class Noted:
    """Call for chunks that records which chunks were sent or begun."""

    def __init__(self, inner: MessageStream[ChunkPart, FetchRequest], requests: list[int]) -> None:
        self._inner = inner
        self._requests = requests
        self.remote = inner.remote
        self.caller = inner.caller

    async def receive(self) -> FetchRequest | None:
        return await self._inner.receive()

    async def send(self, message: ChunkPart) -> None:
        if message.chunk not in self._requests:
            self._requests.append(message.chunk)
        await self._inner.send(message)

    async def finish(self) -> None:
        await self._inner.finish()

    async def cancel(self) -> None:
        await self._inner.cancel()


class Swarm:
    """Peers with results, their directory, and the coordinator's view of them."""

    def __init__(self) -> None:
        self.inner = MemoryTransport()
        self.directory = StaticDirectory(Board(), ManualClock())
        self.stages: list[StageAssignment] = []
        self.results: list[StageResult] = []
        self.servers: dict[str, Server] = {}
        self.requests: dict[str, list[int]] = {}

    async def add(
        self, peer: str, layers: LayerRange, offered: OfferedShard, *, lies: bool = False
    ) -> None:
        """Add a peer with a file; a hostile one sends another file under its name."""
        served = offered
        if lies:
            data = bytearray(offered.path.read_bytes())
            data[100] ^= 1
            altered = offered.path.with_name(f"{peer}-altered")
            altered.write_bytes(data)
            served = OfferedShard(path=altered, chunks=offered.chunks)
        offers = {name_of(layers): served}
        requests = self.requests[peer] = []

        async def on_fetch(stream: MessageStream[ChunkPart, FetchRequest]) -> None:
            await serve_chunks(Noted(stream, requests), offers)

        handlers: dict[Method[Any, Any], Handler] = {
            LIST_CHUNKS: partial(serve_chunk_list, offers=offers),
            FETCH_CHUNKS: on_fetch,
        }
        server = self.servers[peer] = await self.inner.serve(peer, 1, handlers)
        await self.directory.announce(Role.PEER, peer, server.endpoint)
        self.stages.append(StageAssignment(peer_id=PeerId(peer), layers=layers))
        self.results.append(StageResult(peer_id=PeerId(peer), file=offered.chunks.file))

    def status(self, *, is_current: bool = True) -> RunStatus:
        return RunStatus(
            run_id=RUN,
            phase=RunPhase.FINISHED,
            detail="",
            committed_steps=STEPS,
            spec=run_spec(),
            assignments=tuple(self.stages),
            results=tuple(self.results) if is_current else (),
        )

    def client(self, transport: Transport | None = None) -> SwarmClient:
        return SwarmClient(self.directory, transport or self.inner)


@pytest.fixture
async def swarm() -> AsyncIterator[Swarm]:
    made = Swarm()
    yield made
    for server in made.servers.values():
        await server.stop()


async def test_every_stage_comes_from_all_of_its_replicas(swarm: Swarm, tmp_path: Path) -> None:
    first, last = written(tmp_path / "first", 6, 1), written(tmp_path / "last", 1, 2)
    await swarm.add("a", FIRST, first)
    await swarm.add("b", FIRST, first)
    await swarm.add("c", LAST, last)
    (tmp_path / "out").mkdir()
    paths = await swarm.client().fetch_shards(swarm.status(), tmp_path / "out")
    assert [path.read_bytes() for path in paths] == [
        shard.path.read_bytes() for shard in (first, last)
    ]
    assert swarm.requests["a"]
    assert swarm.requests["b"]
    assert set(swarm.requests["a"] + swarm.requests["b"]) == set(range(6))
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in paths}


async def test_a_replica_that_is_lost_in_the_middle_is_gone_around(
    swarm: Swarm, tmp_path: Path
) -> None:
    shard = written(tmp_path / "first", 6, 1)
    for peer in ("a", "b"):
        await swarm.add(peer, FIRST, shard)
    faulty = FaultyTransport(swarm.inner, cut_receives={FETCH_CHUNKS: [PARTS // 2]})
    (path,) = await swarm.client(faulty).fetch_shards(swarm.status(), tmp_path)
    assert faulty.num_cuts == 1
    assert path.read_bytes() == shard.path.read_bytes()


async def test_who_gives_other_bytes_than_it_told_is_gone_around(
    swarm: Swarm, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shard = written(tmp_path / "first", 3, 1)
    await swarm.add("a", FIRST, shard, lies=True)
    with pytest.raises(Unavailable, match="layers 0-2: 3 of 3 chunks are missing"):
        await swarm.client().fetch_shards(swarm.status(), tmp_path)
    assert "peer a: the bytes of chunk 0 are not those of its digest" in caplog.text
    await swarm.add("b", FIRST, shard)
    (path,) = await swarm.client().fetch_shards(swarm.status(), tmp_path)
    assert path.read_bytes() == shard.path.read_bytes()


async def test_a_client_that_is_started_again_fetches_what_is_missing(
    swarm: Swarm, tmp_path: Path
) -> None:
    first, last = written(tmp_path / "first", 1, 1), written(tmp_path / "last", 5, 2)
    await swarm.add("a", FIRST, first)
    await swarm.add("b", LAST, last)
    faulty = FaultyTransport(swarm.inner, cut_receives={FETCH_CHUNKS: [PARTS + 2 * PARTS + 3]})
    with pytest.raises(Unavailable, match="layers 2-4: 3 of 5 chunks are missing"):
        await swarm.client(faulty).fetch_shards(swarm.status(), tmp_path)
    for requests in swarm.requests.values():
        requests.clear()
    paths = await swarm.client().fetch_shards(swarm.status(), tmp_path)
    assert swarm.requests == {"a": [], "b": [2, 3, 4]}
    assert [path.read_bytes() for path in paths] == [
        shard.path.read_bytes() for shard in (first, last)
    ]


async def test_of_replicas_that_disagree_the_most_are_asked_and_then_the_others(
    swarm: Swarm, tmp_path: Path
) -> None:
    odd, common = written(tmp_path / "odd", 2, 1), written(tmp_path / "common", 2, 2)
    await swarm.add("a", FIRST, odd)
    await swarm.add("b", FIRST, common)
    await swarm.add("c", FIRST, common)
    (path,) = await swarm.client().fetch_shards(swarm.status(), tmp_path)
    assert path.read_bytes() == common.path.read_bytes()
    path.unlink()
    for peer in ("b", "c"):
        await swarm.directory.withdraw(Role.PEER, peer)
    (path,) = await swarm.client().fetch_shards(swarm.status(), tmp_path)
    assert path.read_bytes() == odd.path.read_bytes()


async def test_without_a_digest_to_check_it_against_nothing_is_fetched(
    swarm: Swarm, tmp_path: Path
) -> None:
    """After a restart the coordinator has no digests until peers report them."""
    await swarm.add("a", FIRST, written(tmp_path / "first", 1, 1))
    with pytest.raises(Unavailable, match="layers 0-2 of the result: peer a does not answer"):
        await swarm.client().fetch_shards(swarm.status(is_current=False), tmp_path)
    assert swarm.requests == {"a": []}


@pytest.mark.parametrize("changes", [{"total_bytes": 1}, {"digest": bytes(16)}])
async def test_of_who_gives_another_file_than_was_told_nothing_is_written(
    swarm: Swarm, tmp_path: Path, changes: dict[str, Any]
) -> None:
    shard = written(tmp_path / "given", 2, 1)
    await swarm.add("a", FIRST, shard)
    file = replace(shard.chunks.file, **changes)
    swarm.results = [StageResult(peer_id=PeerId("a"), file=file)]
    (tmp_path / "taken").mkdir()
    with pytest.raises(Unavailable, match="layers 0-2 of the result"):
        await swarm.client().fetch_shards(swarm.status(), tmp_path / "taken")
    assert not list((tmp_path / "taken").iterdir())
    assert swarm.requests == {"a": []}


async def test_a_disk_that_is_full_is_told_as_what_it_is(swarm: Swarm, tmp_path: Path) -> None:
    await swarm.add("a", FIRST, written(tmp_path / "first", 1, 1))
    with pytest.raises(Unavailable, match="cannot be written"):
        await swarm.client().fetch_shards(swarm.status(), tmp_path / "no such folder")
