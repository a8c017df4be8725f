"""Files too large to say in a message: given in chunks, fetched from all who have them at once.

A download goes on where an earlier try ended. `protocol.machines.download` decides who brings what.
What comes is checked chunk by chunk before it is written, so that `NAME.partial` holds right chunks
and gaps: nothing else is noted down, and who starts again finds what is there by digesting it.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from swarm_ft import failpoints
from swarm_ft.discovery.directory import Directory
from swarm_ft.errors import (
    BadFrame,
    MalformedMessage,
    NotAllowed,
    NotFound,
    SwarmError,
    Unavailable,
)
from swarm_ft.identity.roles import Caller, Role
from swarm_ft.ids import PeerId
from swarm_ft.log import get_logger
from swarm_ft.protocol.machines.download import DownloadPlan
from swarm_ft.protocol.messages.shard import (
    ChunkList,
    ChunkPart,
    FetchRequest,
    ShardFile,
    ShardName,
    proof_by,
)
from swarm_ft.snapshots.local_files import PLAIN, LocalFiles
from swarm_ft.transport.base import Channel, MessageStream, Transport, call
from swarm_ft.transport.methods import FETCH_CHUNKS, LIST_CHUNKS

logger = get_logger(__name__)

# ---- who has a file gives it: no engine, files and calls alone

PART_BYTES = 256 << 10
"""Small enough that a link of 1 Mbps brings one every other second: silence tells soon."""

BUSY_SHARE = 0.1
"""Of the time that a saved state may take of links while what is trained with wants them."""
MAX_YIELD_S = 5.0
"""Between two of its parts: who fetches it would take a longer silence for a source's end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OfferedShard:
    """A file that others may have; it does not change while it is offered.

    Attributes:
        chunks: of the file; the list's digest is what the coordinator is told.
        readers: names of those who may fetch it, where members have names.
        proofs: what peers that fetch it can tell once they have it, see `proof_by`.
        files: by which it was written.
    """

    path: Path
    chunks: ChunkList
    readers: frozenset[str] = frozenset()
    proofs: Mapping[PeerId, bytes] = field(default_factory=dict)
    files: LocalFiles = PLAIN


Offers = Mapping[ShardName, OfferedShard]
"""What a peer offers, by name; it changes meanwhile."""


def offer(
    path: Path,
    name: ShardName,
    takers: Iterable[PeerId] = (),
    clients: Iterable[str] = (),
    files: LocalFiles = PLAIN,
) -> OfferedShard:
    """Read a shard once, to offer it to takers and clients. Blocks.

    Args:
        path: where it lies.
        name: of the shard.
        takers: peers that are to show that they took it.
        clients: whose result it is.
        files: by which it was written.

    Raises:
        Unavailable: it cannot be read (now).
    """
    proofs = {peer: proof_by(peer, name) for peer in takers}
    try:
        chunks = files.list_chunks(path, *proofs.values())
        shown = {peer: proof.digest() for peer, proof in proofs.items()}
        readers = frozenset((*shown, *clients))
        return OfferedShard(path=path, chunks=chunks, readers=readers, proofs=shown, files=files)
    except OSError as error:
        raise Unavailable(f"{path} cannot be read: {error}") from error


async def serve_chunk_list(stream: MessageStream[ChunkList, ShardName], offers: Offers) -> None:
    """Somebody asks for a shard's list of chunks.

    Raises:
        NotFound: no such shard is offered here.
        NotAllowed: it is for others.
        MalformedMessage: it asks for nothing that could be one.
    """
    name = await stream.receive()
    if name is None:
        raise MalformedMessage(f"{stream.remote}: expected the name of a shard")
    await stream.send(offered_to(stream.caller, name, offers).chunks)


async def _never_busy() -> None:
    """Nothing else wants the link."""


async def serve_chunks(
    stream: MessageStream[ChunkPart, FetchRequest],
    offers: Offers,
    quiet: Callable[[], Awaitable[None]] = _never_busy,
) -> None:
    """Somebody fetches some chunks of a shard.

    Args:
        stream: of the call.
        offers: what there is.
        quiet: waits until nothing more urgent is to be sent. Saved states give way to it; those
            of newcomers and results do not, for somebody waits for them.

    Raises:
        NotFound: no such shard is offered here.
        NotAllowed: it is for others.
        MalformedMessage: it asks for chunks that the shard does not have.
        Unavailable: the shard cannot be read (now).
    """
    request = await stream.receive()
    if request is None:
        raise MalformedMessage(f"{stream.remote}: expected a request for chunks")
    name, wanted = request.name, request.chunks
    offered = offered_to(stream.caller, name, offers)
    if wanted.stop > len(offered.chunks):
        raise MalformedMessage(
            f"{stream.remote}: expected chunks below {len(offered.chunks)} of {name}, got "
            f"{wanted.start} to {wanted.stop - 1}"
        )
    for index in wanted:
        chunk = await asyncio.to_thread(_read, offered, index)
        for start in range(0, len(chunk), PART_BYTES):
            failpoints.reached("handing-over")
            part = ChunkPart(chunk=index, data=chunk[start : start + PART_BYTES])
            if name.is_saved:
                await _send_giving_way(stream, part, quiet)
            else:
                await stream.send(part)


async def _send_giving_way(
    stream: MessageStream[ChunkPart, FetchRequest],
    part: ChunkPart,
    quiet: Callable[[], Awaitable[None]],
) -> None:
    """Send it, and rest until the link is free, or as long as makes it BUSY_SHARE of the time."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await stream.send(part)
    rest_s = (loop.time() - began_s) * (1 / BUSY_SHARE - 1)
    with suppress(TimeoutError):
        async with asyncio.timeout(min(rest_s, MAX_YIELD_S)):
            await quiet()


def offered_to(caller: Caller | None, name: ShardName, offers: Offers) -> OfferedShard:
    """What is offered by a name, if it is for who asks.

    Raises:
        NotFound: no such shard is offered here.
        NotAllowed: it is for others.
    """
    offered = offers.get(name)
    if offered is None:
        raise NotFound(f"{name}: this peer does not offer it (any more)")
    if caller is not None and caller.name not in offered.readers:
        raise NotAllowed(f"{name}: it is not for {caller}")
    return offered


def _read(offered: OfferedShard, index: int) -> bytes:
    try:
        return offered.files.read_chunk(offered.path, index)
    except OSError as error:
        raise Unavailable(f"the shard cannot be read: {error.strerror}") from error


# ---- who wants it fetches it

SILENCE_S = 10.0
"""A source that says nothing for so long is dropped."""

Parts = MessageStream[FetchRequest, ChunkPart]
OnFault = Callable[[PeerId, SwarmError], None]
"""Told of each source that was dropped, and why; a `ProtocolError` means that it lied."""


def log_fault(source: PeerId, error: SwarmError) -> None:
    """The `OnFault` that only tells people."""
    logger.warning("source %s: %s", source, error.message)


class Downloader:
    """What all downloads of a process share."""

    def __init__(
        self,
        directory: Directory,
        transport: Transport,
        *,
        on_fault: OnFault = log_fault,
        silence_s: float = SILENCE_S,
        files: LocalFiles = PLAIN,
    ) -> None:
        self._directory = directory
        self._transport = transport
        self._on_fault = on_fault
        self._silence_s = silence_s
        self._files = files

    async def list_chunks(
        self, name: ShardName, file: ShardFile, sources: Iterable[PeerId]
    ) -> ChunkList:
        """The shard's chunks, from the first source whose list has the digest.

        Args:
            name: of the shard.
            file: its digest and its size, as the coordinator knows them.
            sources: who are said to have it.

        Raises:
            Unavailable: none has it.
        """
        for source in sources:
            try:
                return await self._list_of(source, name, file)
            except SwarmError as error:
                self._on_fault(source, error)
        raise Unavailable(f"{name}: no source has a list of its chunks with the right digest")

    async def download(
        self, name: ShardName, chunks: ChunkList, sources: Sequence[PeerId], path: Path
    ) -> dict[PeerId, int]:
        """Write the shard to `path`, whole and checked, or keep what came beside it.

        Args:
            name: of the shard.
            chunks: of which it consists.
            sources: who are said to have it; all are asked at once.
            path: what lies there is gone on from, or replaced; called again, with other sources
                too, it goes on.

        Returns:
            The bytes that each source brought.

        Raises:
            Unavailable: all were dropped before all was there, or the disk does not take it.
        """
        partial = path.with_name(f"{path.name}.partial")
        try:
            present = await asyncio.to_thread(_prepare, path, partial, chunks, self._files)
            plan = DownloadPlan(len(chunks), sources, present=present)
            fetch = _Fetch(name, chunks, partial, plan, self._files)
            await self._run(fetch, sources)
            if fetch.plan.is_complete:
                os.replace(partial, path)
        except OSError as error:
            raise Unavailable(f"{partial} cannot be written: {error}") from error
        if not fetch.plan.is_complete:
            raise Unavailable(
                f"{name}: {fetch.plan.num_missing} of {len(chunks)} chunks are missing, and no "
                f"source is left; what came is kept, try again when one is back"
            )
        return dict(fetch.brought)

    async def _connected(self, source: PeerId) -> Channel:
        found = await self._directory.find(Role.PEER)
        return self._transport.connect(found.get(source, ""), source)

    async def _list_of(self, source: PeerId, name: ShardName, file: ShardFile) -> ChunkList:
        channel = await self._connected(source)
        try:
            chunks = await call(channel, LIST_CHUNKS, name, self._silence_s)
        finally:
            await channel.close()
        if chunks.file != file:
            raise BadFrame(
                f"{name}: expected a list of the chunks of {file}, got one of {chunks.file}"
            )
        return chunks

    async def _run(self, fetch: _Fetch, sources: Sequence[PeerId]) -> None:
        pending = {asyncio.create_task(self._draw(fetch, source)) for source in sources}
        try:
            while pending and not fetch.plan.is_complete:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    async def _draw(self, fetch: _Fetch, source: PeerId) -> None:
        """Let one source bring what it can, until all is here or it is dropped."""
        try:
            channel = await self._connected(source)
            try:
                await self._draw_over(channel, fetch, source)
            finally:
                await channel.close()
        except SwarmError as error:
            fetch.drop(source)
            self._on_fault(source, error)

    async def _draw_over(self, channel: Channel, fetch: _Fetch, source: PeerId) -> None:
        while not fetch.plan.is_complete:
            wanted = fetch.plan.next_range(source)
            if not wanted:
                await fetch.changed.wait()
                continue
            stream = channel.open(FETCH_CHUNKS)
            try:
                request = FetchRequest(
                    name=fetch.name, first_chunk=wanted.start, num_chunks=len(wanted)
                )
                await stream.send(request)
                await stream.finish()
                await self._take(stream, fetch, source, wanted)
            finally:
                await stream.cancel()

    async def _take(self, stream: Parts, fetch: _Fetch, source: PeerId, wanted: range) -> None:
        for index in wanted:
            # Another one may have brought it by now, or have taken over the rest.
            if not fetch.plan.wants(source, index):
                return
            chunk = await self._receive_chunk(stream, fetch, index)
            await fetch.keep(source, index, chunk)
            failpoints.reached("joining")

    async def _receive_chunk(self, stream: Parts, fetch: _Fetch, index: int) -> bytearray:
        size, chunk = fetch.chunks.size_of(index), bytearray()
        while len(chunk) < size:
            part = await self._next_part(stream)
            if part.chunk != index or not 0 < len(part.data) <= size - len(chunk):
                raise BadFrame(
                    f"expected up to {size - len(chunk)} bytes more of chunk {index}, got "
                    f"{len(part.data)} of chunk {part.chunk}"
                )
            chunk += part.data
        return chunk

    async def _next_part(self, stream: Parts) -> ChunkPart:
        try:
            async with asyncio.timeout(self._silence_s):
                part = await stream.receive()
        except TimeoutError:
            raise Unavailable(f"said nothing for {self._silence_s:g} s") from None
        if part is None:
            raise Unavailable("ended the call before its last chunk")
        return part


class _Fetch:
    """One download under way."""

    def __init__(
        self,
        name: ShardName,
        chunks: ChunkList,
        partial: Path,
        plan: DownloadPlan,
        files: LocalFiles,
    ) -> None:
        self.name = name
        self.chunks = chunks
        self.plan = plan
        self.brought: Counter[PeerId] = Counter()
        self.changed = asyncio.Event()
        self._partial = partial
        self._files = files

    async def keep(self, source: PeerId, index: int, chunk: bytearray) -> None:
        """Write a chunk down, if it is what it should be.

        Raises:
            BadFrame: it is not.
            OSError: the disk does not take it.
        """
        if not await asyncio.to_thread(self.chunks.holds, index, chunk):
            raise BadFrame(f"the bytes of chunk {index} are not those of its digest")
        await asyncio.to_thread(self._files.write_chunk, self._partial, index, chunk)
        self.brought[source] += len(chunk)
        self.plan.received(index)
        self._tell()

    def drop(self, source: PeerId) -> None:
        """Its chunks are for the others now."""
        self.plan.drop(source)
        self._tell()

    def _tell(self) -> None:
        told, self.changed = self.changed, asyncio.Event()
        told.set()


def _prepare(path: Path, partial: Path, chunks: ChunkList, files: LocalFiles) -> list[int]:
    """Make the file as long as it will be; the chunks that it holds already."""
    if path.exists() and not partial.exists():
        os.replace(path, partial)
    return files.make_room(partial, chunks)
