"""A shard comes from sources that die, lie and fall silent, over real gRPC links."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path, PosixPath
from typing import Any

import pytest

from swarm_ft.base import failpoints
from swarm_ft.errors import (
    BadFrame,
    MalformedMessage,
    NotFound,
    ProtocolError,
    SwarmError,
    Unavailable,
)
from swarm_ft.identity.roles import Role
from swarm_ft.ids import PeerId, RunId, StepNumber
from swarm_ft.net.transfer import (
    PART_BYTES,
    Downloader,
    OfferedShard,
    offer,
    serve_chunk_list,
    serve_chunks,
)
from swarm_ft.protocol.messages.shard import (
    CHUNK_BYTES,
    ChunkList,
    ChunkPart,
    FetchRequest,
    ShardFile,
    ShardName,
)
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.transport.base import Channel, Handler, MessageStream, Method, Server, call
from swarm_ft.transport.grpc_transport import GrpcTransport
from swarm_ft.transport.methods import FETCH_CHUNKS, LIST_CHUNKS
from tests.doubles.clock import ManualClock
from tests.doubles.directory import Board, StaticDirectory

pytestmark = pytest.mark.timeout(60)

NAME = ShardName(run_id=RunId("run-1"), step=StepNumber(42), layers=LayerRange(0, 12))
NUM_CHUNKS = 7
A, B, C = PeerId("a"), PeerId("b"), PeerId("c")
ALTERED = 5
MISSING_FILE = ShardFile(digest=bytes(16), total_bytes=1)
"""A file that no source has."""


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> OfferedShard:
    """A file of six and a half chunks, each unlike the others."""
    path = tmp_path_factory.mktemp("shard") / "shard.safetensors"
    chunk = bytes(range(256)) * (CHUNK_BYTES // 256)
    data = b"".join(bytes([i]) + chunk[1:] for i in range(NUM_CHUNKS))
    path.write_bytes(data[: -CHUNK_BYTES // 2])
    return offer(path, NAME)


@pytest.fixture
def directory() -> StaticDirectory:
    return StaticDirectory(Board(), ManualClock())


class Source:
    """A peer that offers a shard, and records the requested chunks."""

    def __init__(self, offered: OfferedShard | None) -> None:
        self.offers = {NAME: offered} if offered is not None else {}
        self.requests: list[int] = []
        self.server: Server | None = None

    async def on_list(self, stream: MessageStream[ChunkList, ShardName]) -> None:
        await serve_chunk_list(stream, self.offers)

    async def on_fetch(self, stream: MessageStream[ChunkPart, FetchRequest]) -> None:
        await serve_chunks(Counted(stream, self), self.offers)

    async def on_part(self, part: ChunkPart) -> ChunkPart | None:
        """Hook before each part goes out; its result goes out instead."""


class Counted:
    """A stream whose parts the source sees before they are sent."""

    def __init__(self, stream: MessageStream[ChunkPart, FetchRequest], source: Source) -> None:
        self._stream = stream
        self._source = source
        self.remote = stream.remote
        self.caller = stream.caller

    async def receive(self) -> FetchRequest | None:
        return await self._stream.receive()

    async def send(self, part: ChunkPart) -> None:
        if part.chunk not in self._source.requests:
            self._source.requests.append(part.chunk)
        await self._stream.send(await self._source.on_part(part) or part)

    async def finish(self) -> None:
        await self._stream.finish()

    async def cancel(self) -> None:
        await self._stream.cancel()


class Mortal(Source):
    """A source whose process is gone after a number of parts."""

    def __init__(self, offered: OfferedShard | None, parts: int) -> None:
        super().__init__(offered)
        self.parts = parts
        self.stopping: asyncio.Task[None] | None = None

    async def on_part(self, part: ChunkPart) -> None:
        self.parts -= 1
        if self.parts < 0:
            assert self.server is not None
            self.stopping = self.stopping or asyncio.create_task(self.server.stop())
            await asyncio.Event().wait()  # until the server has cut this call off


class Gated(Source):
    """A source that sends a number of parts, then nothing until it is released."""

    def __init__(self, offered: OfferedShard | None, parts: int) -> None:
        super().__init__(offered)
        self.parts = parts
        self.reached = asyncio.Event()
        self.gate = asyncio.Event()

    async def on_part(self, part: ChunkPart) -> None:
        self.parts -= 1
        if self.parts < 0:
            self.reached.set()
            await self.gate.wait()


class Liar(Source):
    """A source with a true list, and every chunk with one bit turned."""

    async def on_part(self, part: ChunkPart) -> ChunkPart:
        return replace(part, data=bytes([part.data[0] ^ 1]) + part.data[1:])


class Babbler(Source):
    """Answers every request with the same part."""

    def __init__(self, offered: OfferedShard | None, part: ChunkPart) -> None:
        super().__init__(offered)
        self.part = part

    async def on_fetch(self, stream: MessageStream[ChunkPart, FetchRequest]) -> None:
        await stream.receive()
        await stream.send(self.part)


class Quitter(Source):
    """Ends every call at once, cleanly."""

    async def on_fetch(self, stream: MessageStream[ChunkPart, FetchRequest]) -> None:
        await stream.receive()


@asynccontextmanager
async def serving(directory: StaticDirectory, **sources: Source) -> AsyncIterator[None]:
    servers: list[Server] = []
    for name, source in sources.items():
        handlers: dict[Method[Any, Any], Handler] = {
            LIST_CHUNKS: source.on_list,
            FETCH_CHUNKS: source.on_fetch,
        }
        server = await GrpcTransport().serve("127.0.0.1", 0, handlers)
        source.server = server
        servers.append(server)
        await directory.announce(Role.PEER, PeerId(name), server.endpoint)
    try:
        yield
    finally:
        for one in servers:
            await one.stop()


def entries(folder: Path) -> list[Path]:
    return list(folder.iterdir())


class Newcomer:
    """A downloader that records the sources that it dropped."""

    def __init__(self, directory: StaticDirectory, silence_s: float = 30.0) -> None:
        self.faults: dict[PeerId, SwarmError] = {}
        self.dropped: asyncio.Queue[PeerId] = asyncio.Queue()
        self.downloader = Downloader(
            directory, GrpcTransport(), on_fault=self.on_fault, silence_s=silence_s
        )

    def on_fault(self, source: PeerId, error: SwarmError) -> None:
        self.faults[source] = error
        self.dropped.put_nowait(source)

    async def take(
        self, shard: OfferedShard, sources: Sequence[PeerId], path: Path
    ) -> dict[PeerId, int]:
        return await self.downloader.download(NAME, shard.chunks, sources, path)


async def test_a_shard_comes_from_all_sources_at_once(
    directory: StaticDirectory, shard: OfferedShard, tmp_path: Path
) -> None:
    newcomer, sources = Newcomer(directory), {"a": Source(shard), "b": Source(shard)}
    path = tmp_path / "taken"
    async with serving(directory, **sources):
        chunks = await newcomer.downloader.list_chunks(NAME, shard.chunks.file, [A, B])
        assert chunks == shard.chunks
        brought = await newcomer.take(shard, [A, B], path)
    assert path.read_bytes() == shard.path.read_bytes()
    assert brought.keys() == {A, B}
    assert sum(brought.values()) >= shard.chunks.total_bytes
    assert newcomer.faults == {}
    assert entries(tmp_path) == [path]


async def test_one_dies_half_way_one_lies_and_the_rest_comes_from_the_third(
    directory: StaticDirectory, shard: OfferedShard, tmp_path: Path
) -> None:
    newcomer = Newcomer(directory)
    mortal, gated = Mortal(shard, parts=20), Gated(shard, parts=3)
    path = tmp_path / "taken"
    async with serving(directory, a=mortal, b=Liar(shard), c=gated):
        taking = asyncio.create_task(newcomer.take(shard, [A, B, C], path))
        await gated.reached.wait()
        assert {await newcomer.dropped.get() for _ in range(2)} == {A, B}
        gated.gate.set()
        brought = await taking
        assert mortal.stopping is not None
        await mortal.stopping
    assert path.read_bytes() == shard.path.read_bytes()
    assert isinstance(newcomer.faults[A], Unavailable)
    assert isinstance(newcomer.faults[B], ProtocolError)
    assert "not those of its digest" in newcomer.faults[B].message
    assert B not in brought
    assert brought[A] == CHUNK_BYTES


async def test_a_restarted_newcomer_asks_only_for_what_is_missing(
    directory: StaticDirectory, shard: OfferedShard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: asyncio.Queue[str] = asyncio.Queue()

    def reached(name: str) -> None:
        if name == "joining":
            written.put_nowait(name)

    monkeypatch.setattr(failpoints, "reached", reached)
    source, other, path = Gated(shard, parts=16 * 3 + 5), Source(shard), tmp_path / "taken"
    async with serving(directory, a=source, b=other):
        taking = asyncio.create_task(Newcomer(directory).take(shard, [A], path))
        for _ in range(3):
            await written.get()
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        assert not path.exists()
        brought = await Newcomer(directory).take(shard, [B], path)
    assert path.read_bytes() == shard.path.read_bytes()
    assert other.requests == [3, 4, 5, 6]
    assert brought == {B: shard.chunks.total_bytes - 3 * CHUNK_BYTES}


async def test_a_download_that_was_complete_is_checked_and_not_fetched_again(
    directory: StaticDirectory, shard: OfferedShard, tmp_path: Path
) -> None:
    path = tmp_path / "taken"
    path.write_bytes(shard.path.read_bytes())
    assert await Newcomer(directory).take(shard, [], path) == {}
    assert path.read_bytes() == shard.path.read_bytes()


async def test_a_spoiled_chunk_on_the_own_disk_is_fetched_again(
    directory: StaticDirectory, shard: OfferedShard, tmp_path: Path
) -> None:
    data = bytearray(shard.path.read_bytes())
    data[ALTERED * CHUNK_BYTES + 77] ^= 4
    (tmp_path / "taken.partial").write_bytes(data + b"of an earlier, longer shard")
    source = Source(shard)
    async with serving(directory, a=source):
        await Newcomer(directory).take(shard, [A], tmp_path / "taken")
    assert source.requests == [ALTERED]
    assert (tmp_path / "taken").read_bytes() == shard.path.read_bytes()


async def test_a_silent_sources_chunks_come_from_another_one(
    directory: StaticDirectory, shard: OfferedShard, tmp_path: Path
) -> None:
    """No deadline is involved: a source without other work takes them over."""
    silent, source = Gated(shard, parts=0), Source(shard)
    newcomer, path = Newcomer(directory), tmp_path / "taken"
    async with serving(directory, a=silent, b=source):
        brought = await newcomer.take(shard, [A, B], path)
    assert path.read_bytes() == shard.path.read_bytes()
    assert brought.keys() == {B}
    assert newcomer.faults == {}


async def test_a_silent_source_alone_is_dropped_after_a_while(
    directory: StaticDirectory, shard: OfferedShard, tmp_path: Path
) -> None:
    newcomer = Newcomer(directory, silence_s=0.2)
    async with serving(directory, a=Gated(shard, parts=1)):
        with pytest.raises(Unavailable, match="7 of 7 chunks are missing, and no source is left"):
            await newcomer.take(shard, [A], tmp_path / "taken")
    assert newcomer.faults[A].message == "sent nothing for 0.2 s"


async def test_what_came_before_the_last_source_died_is_kept(
    directory: StaticDirectory, shard: OfferedShard, tmp_path: Path
) -> None:
    newcomer, path = Newcomer(directory), tmp_path / "taken"
    async with serving(directory, a=Mortal(shard, parts=16 + 3)):
        with pytest.raises(Unavailable, match="6 of 7 chunks are missing"):
            await newcomer.take(shard, [A], path)
    again = Source(shard)
    async with serving(directory, a=again):
        await newcomer.take(shard, [A], path)
    assert again.requests == [1, 2, 3, 4, 5, 6]
    assert path.read_bytes() == shard.path.read_bytes()


BABBLE: dict[str, tuple[ChunkPart, type[ProtocolError]]] = {
    "another chunk": (ChunkPart(chunk=6, data=b"x"), BadFrame),
    "nothing": (ChunkPart(chunk=0, data=b""), BadFrame),
    # The transport refuses it unread: a message is smaller than a chunk.
    "too much": (ChunkPart(chunk=0, data=bytes(CHUNK_BYTES + 1)), MalformedMessage),
}


@pytest.mark.parametrize(("part", "error"), BABBLE.values(), ids=BABBLE)
async def test_a_source_that_sends_what_was_not_asked_for_is_a_liar(
    directory: StaticDirectory,
    shard: OfferedShard,
    tmp_path: Path,
    part: ChunkPart,
    error: type[ProtocolError],
) -> None:
    newcomer = Newcomer(directory)
    async with serving(directory, a=Babbler(shard, part)):
        with pytest.raises(Unavailable):
            await newcomer.take(shard, [A], tmp_path / "taken")
    assert isinstance(newcomer.faults[A], error)


async def test_sources_that_have_nothing_or_are_not_there_are_dropped(
    directory: StaticDirectory, shard: OfferedShard, tmp_path: Path
) -> None:
    newcomer = Newcomer(directory)
    async with serving(directory, a=Source(None), b=Quitter(shard)):
        with pytest.raises(Unavailable, match="7 of 7"):
            await newcomer.take(shard, [A, B, C], tmp_path / "taken")
    assert {source: type(error) for source, error in newcomer.faults.items()} == {
        A: NotFound,
        B: Unavailable,
        C: Unavailable,
    }


async def test_the_list_comes_from_the_first_source_whose_list_has_the_digest(
    directory: StaticDirectory, shard: OfferedShard
) -> None:
    chunks = shard.chunks
    forged = ChunkList(total_bytes=chunks.total_bytes, digests=(bytes(16), *chunks.digests[1:]))
    shorter = ChunkList(total_bytes=chunks.total_bytes - 1, digests=chunks.digests)
    liars = [Source(OfferedShard(path=shard.path, chunks=lie)) for lie in (forged, shorter)]
    newcomer = Newcomer(directory)
    async with serving(directory, a=liars[0], b=liars[1], c=Source(shard)):
        listed = await newcomer.downloader.list_chunks(NAME, chunks.file, [A, B, C])
        assert listed == chunks
        assert newcomer.faults.keys() == {A, B}
        assert all(isinstance(error, ProtocolError) for error in newcomer.faults.values())
        with pytest.raises(Unavailable, match="no source has a list"):
            await newcomer.downloader.list_chunks(NAME, MISSING_FILE, [A, B, C])
        longer = replace(chunks.file, total_bytes=chunks.total_bytes + 1)
        with pytest.raises(Unavailable, match="no source has a list"):
            await newcomer.downloader.list_chunks(NAME, longer, [C])


async def test_a_disk_that_does_not_take_it_is_no_sources_fault(
    directory: StaticDirectory, shard: OfferedShard, tmp_path: Path
) -> None:
    newcomer = Newcomer(directory)
    async with serving(directory, a=Source(shard)):
        with pytest.raises(Unavailable, match="cannot be written"):
            await newcomer.take(shard, [A], tmp_path / "no such folder" / "taken")
    assert newcomer.faults == {}


async def test_an_empty_file_is_a_shard_without_chunks(
    directory: StaticDirectory, tmp_path: Path
) -> None:
    (tmp_path / "empty").write_bytes(b"")
    shard = offer(tmp_path / "empty", NAME)
    assert await Newcomer(directory).take(shard, [], tmp_path / "taken") == {}
    assert (tmp_path / "taken").read_bytes() == b""


# ---- the source's side


@asynccontextmanager
async def a_channel(source: Source) -> AsyncIterator[Channel]:
    handlers: dict[Method[Any, Any], Handler] = {
        LIST_CHUNKS: source.on_list,
        FETCH_CHUNKS: source.on_fetch,
    }
    server = await GrpcTransport().serve("127.0.0.1", 0, handlers)
    channel = GrpcTransport().connect(server.endpoint)
    try:
        yield channel
    finally:
        await channel.close()
        await server.stop()


async def test_parts_are_small_and_in_order(shard: OfferedShard) -> None:
    async with a_channel(Source(shard)) as channel:
        stream = channel.open(FETCH_CHUNKS)
        await stream.send(FetchRequest(name=NAME, first_chunk=5, num_chunks=2))
        await stream.finish()
        parts = []
        while (part := await stream.receive()) is not None:
            parts.append(part)
    assert {len(part.data) for part in parts} == {PART_BYTES}
    assert [part.chunk for part in parts] == [5] * 16 + [6] * 8
    whole = b"".join(part.data for part in parts)
    assert whole == shard.path.read_bytes()[5 * CHUNK_BYTES :]


OUTSIDE = {
    "chunks that it does not have": FetchRequest(name=NAME, first_chunk=6, num_chunks=2),
    "no chunks": FetchRequest(name=NAME, first_chunk=1, num_chunks=0),
    "endless chunks": FetchRequest(name=NAME, first_chunk=0xFFFFFFFF, num_chunks=0xFFFFFFFF),
    "a run that is a path": FetchRequest(
        name=replace(NAME, run_id=RunId("../x")), first_chunk=0, num_chunks=1
    ),
}


@pytest.mark.parametrize("request_", OUTSIDE.values(), ids=OUTSIDE)
async def test_requests_for_what_cannot_be_are_refused(
    shard: OfferedShard, request_: FetchRequest
) -> None:
    async with a_channel(Source(shard)) as channel:
        stream = channel.open(FETCH_CHUNKS)
        await stream.send(request_)
        await stream.finish()
        with pytest.raises(MalformedMessage):
            await stream.receive()


async def test_a_file_that_is_gone_is_told_without_its_path(
    shard: OfferedShard, tmp_path: Path
) -> None:
    missing = OfferedShard(path=tmp_path / "gone", chunks=shard.chunks)
    async with a_channel(Source(missing)) as channel:
        stream = channel.open(FETCH_CHUNKS)
        await stream.send(FetchRequest(name=NAME, first_chunk=0, num_chunks=1))
        with pytest.raises(Unavailable) as caught:
            await stream.receive()
    assert str(tmp_path) not in caught.value.message
    with pytest.raises(Unavailable, match="cannot be read"):
        offer(tmp_path / "gone", NAME)


async def test_a_list_that_is_none_is_a_lie(
    directory: StaticDirectory, shard: OfferedShard
) -> None:
    lie = ChunkList(total_bytes=1, digests=(bytes(17),))
    newcomer = Newcomer(directory)
    async with serving(directory, a=Source(OfferedShard(path=shard.path, chunks=lie))):
        with pytest.raises(Unavailable):
            await newcomer.downloader.list_chunks(NAME, MISSING_FILE, [A])
    assert isinstance(newcomer.faults[A], MalformedMessage)


async def test_a_list_arrives_as_it_was_sent(shard: OfferedShard) -> None:
    async with a_channel(Source(shard)) as channel:
        reply = await call(channel, LIST_CHUNKS, NAME, timeout_s=10.0)
    assert reply == shard.chunks


# ---- beside the event loop


class Patient(PosixPath):
    """A path whose files open only after the event loop has run something else."""

    loop: asyncio.AbstractEventLoop
    num_opened = 0

    def open(self, *args: Any, **kwargs: Any) -> Any:
        has_run = threading.Event()
        self.loop.call_soon_threadsafe(has_run.set)
        if not has_run.wait(timeout=10):
            raise AssertionError("the event loop stands still while a file is opened")
        Patient.num_opened += 1
        return super().open(*args, **kwargs)


async def test_no_file_is_read_or_written_on_the_event_loop(
    directory: StaticDirectory, shard: OfferedShard, tmp_path: Path
) -> None:
    Patient.loop, Patient.num_opened = asyncio.get_running_loop(), 0
    slow = OfferedShard(path=Patient(shard.path), chunks=shard.chunks)
    async with serving(directory, a=Source(slow)):
        await Newcomer(directory).take(shard, [A], Patient(tmp_path / "taken"))
    assert (tmp_path / "taken").read_bytes() == shard.path.read_bytes()
    assert Patient.num_opened == 2 * NUM_CHUNKS, "chunks given, chunks taken"


# ---- saved states give way


class Collected:
    """Parts of a call that requests the first chunk."""

    remote, caller = "somebody", None

    def __init__(self, name: ShardName) -> None:
        self._name = name
        self.parts: list[ChunkPart] = []

    async def receive(self) -> FetchRequest:
        return FetchRequest(name=self._name, first_chunk=0, num_chunks=1)

    async def send(self, part: ChunkPart) -> None:
        self.parts.append(part)

    async def finish(self) -> None: ...

    async def cancel(self) -> None: ...


SAVED = replace(NAME, is_saved=True)
NUM_PARTS = CHUNK_BYTES // PART_BYTES


async def test_a_saved_state_goes_while_nothing_else_wants_the_link(
    shard: OfferedShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm_ft.net.transfer.BUSY_SHARE", 1e-9)
    is_requested, is_quiet, call = asyncio.Event(), asyncio.Event(), Collected(SAVED)

    async def quiet() -> None:
        is_requested.set()
        await is_quiet.wait()

    serving = asyncio.create_task(serve_chunks(call, {SAVED: shard}, quiet))
    await is_requested.wait()
    assert len(call.parts) == 1
    is_quiet.set()
    await serving
    assert len(call.parts) == NUM_PARTS


async def test_it_goes_slowly_where_the_link_is_never_free(
    shard: OfferedShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm_ft.net.transfer.MAX_YIELD_S", 0.001)
    call, num_requests = Collected(SAVED), 0

    async def busy() -> None:
        nonlocal num_requests
        num_requests += 1
        await asyncio.Event().wait()

    await serve_chunks(call, {SAVED: shard}, busy)
    assert len(call.parts) == num_requests == NUM_PARTS


async def test_what_somebody_waits_for_gives_way_to_nothing(shard: OfferedShard) -> None:
    call = Collected(NAME)

    async def quiet() -> None:
        pytest.fail("it is not asked")

    await serve_chunks(call, {NAME: shard}, quiet)
    assert len(call.parts) == NUM_PARTS
