"""Transfer of large files in chunks, fetched from all of their holders at once.

A download resumes where an earlier try ended. `protocol.machines.download` assigns chunks to
sources. The receiver checks each chunk before it writes it, so `NAME.partial` holds correct chunks
and gaps. No other record exists: a restart digests the file to find the chunks that it holds.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from swarm_ft.base import failpoints
from swarm_ft.base.log import get_logger
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

# ---- the side that offers a file; it needs no engine, only files and calls

PART_BYTES = 256 << 10
"""Bytes of a part: a link of 1 Mbps carries one in 2 s, so a silent source shows soon."""

BUSY_SHARE = 0.1
"""Share of the time that a saved state's transfer may use a link while training wants it."""
MAX_YIELD_S = 5.0
"""Seconds between two parts of a saved state, at most: a receiver drops a source that is silent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OfferedShard:
    """A file that other members may fetch; it does not change while it is offered.

    Attributes:
        path: Where the file lies.
        chunks: Digests of the file's chunks; the coordinator knows the digest of this list.
        readers: Names of the members that may fetch it, in a swarm with keys.
        proofs: Digest by peer that only a holder of the whole file can compute, see `proof_by`.
        files: Reader of the file's format.
    """

    path: Path
    chunks: ChunkList
    readers: frozenset[str] = frozenset()
    proofs: Mapping[PeerId, bytes] = field(default_factory=dict)
    files: LocalFiles = PLAIN


Offers = Mapping[ShardName, OfferedShard]
"""Offered shards of a peer by name; the peer changes this mapping."""


def offer(
    path: Path,
    name: ShardName,
    takers: Iterable[PeerId] = (),
    clients: Iterable[str] = (),
    files: LocalFiles = PLAIN,
) -> OfferedShard:
    """Read a shard once, and return it as an offer to takers and clients. Blocks.

    Args:
        path: Where the shard lies.
        name: Name of the shard.
        takers: Peers that have to prove that they fetched it.
        clients: Names of the clients whose result it is.
        files: Reader of the file's format.

    Raises:
        Unavailable: The shard cannot be read now.
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
    """Serve a call for a shard's list of chunks.

    Raises:
        NotFound: This peer does not offer the shard.
        NotAllowed: The caller is not one of its readers.
        MalformedMessage: The call has no request.
    """
    name = await stream.receive()
    if name is None:
        raise MalformedMessage(f"{stream.remote}: expected the name of a shard")
    await stream.send(offered_to(stream.caller, name, offers).chunks)


async def _never_busy() -> None:
    """Return at once: no other traffic wants the link."""


async def serve_chunks(
    stream: MessageStream[ChunkPart, FetchRequest],
    offers: Offers,
    quiet: Callable[[], Awaitable[None]] = _never_busy,
) -> None:
    """Serve a call for some chunks of a shard.

    Args:
        stream: Stream of the call.
        offers: Shards that this peer offers.
        quiet: Waits until the link has no more urgent traffic. Saved states give way to it.
            States for learners and results do not, because a process waits for them.

    Raises:
        NotFound: This peer does not offer the shard.
        NotAllowed: The caller is not one of its readers.
        MalformedMessage: The request names chunks that the shard does not have.
        Unavailable: The shard cannot be read now.
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
    """Send a part, then wait until the link is quiet or the transfer's share is BUSY_SHARE."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await stream.send(part)
    rest_s = (loop.time() - began_s) * (1 / BUSY_SHARE - 1)
    with suppress(TimeoutError):
        async with asyncio.timeout(min(rest_s, MAX_YIELD_S)):
            await quiet()


def offered_to(caller: Caller | None, name: ShardName, offers: Offers) -> OfferedShard:
    """Return the offered shard of a name, if the caller may fetch it.

    Raises:
        NotFound: This peer does not offer the shard.
        NotAllowed: The caller is not one of its readers.
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


# ---- the side that fetches a file

SILENCE_S = 10.0
"""Seconds without data after which a download drops a source."""

Parts = MessageStream[FetchRequest, ChunkPart]
OnFault = Callable[[PeerId, SwarmError], None]
"""Callback with each dropped source and its error; a `ProtocolError` means that the source lied."""


def log_fault(source: PeerId, error: SwarmError) -> None:
    """Log a dropped source; the default `OnFault`."""
    logger.warning("source %s: %s", source, error.message)


class Downloader:
    """Fetcher of shards, shared by all downloads of a process."""

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
        """Return the shard's chunks, from the first source whose list has the right digest.

        Args:
            name: Name of the shard.
            file: Its digest and its size, as the coordinator knows them.
            sources: Peers that should have it.

        Raises:
            Unavailable: No source has the list.
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
        """Write the shard to `path`, whole and checked, or keep the received chunks beside it.

        Args:
            name: Name of the shard.
            chunks: Digests of its chunks.
            sources: Peers that should have it; the download uses all of them at once.
            path: Path of the result. The download resumes from a file there or beside it, and
                replaces it. A later call with other sources resumes, too.

        Returns:
            Bytes that each source sent.

        Raises:
            Unavailable: All sources were dropped before the shard was whole, or the disk refuses.
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
                f"source is left; received chunks are kept, so retry when a source is back"
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
        """Fetch chunks from one source, until the shard is whole or the source is dropped."""
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
            # Another source may have sent it meanwhile, or may have taken over the rest.
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
            raise Unavailable(f"sent nothing for {self._silence_s:g} s") from None
        if part is None:
            raise Unavailable("ended the call before its last chunk")
        return part


class _Fetch:
    """State of one download under way."""

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
        """Write a chunk, if its digest is right.

        Raises:
            BadFrame: The digest is wrong.
            OSError: The disk refuses.
        """
        if not await asyncio.to_thread(self.chunks.holds, index, chunk):
            raise BadFrame(f"the bytes of chunk {index} are not those of its digest")
        await asyncio.to_thread(self._files.write_chunk, self._partial, index, chunk)
        self.brought[source] += len(chunk)
        self.plan.received(index)
        self._notify()

    def drop(self, source: PeerId) -> None:
        """Drop a source; its chunks go to the other sources."""
        self.plan.drop(source)
        self._notify()

    def _notify(self) -> None:
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()


def _prepare(path: Path, partial: Path, chunks: ChunkList, files: LocalFiles) -> list[int]:
    """Make the file as long as the shard; return the chunks that it holds already."""
    if path.exists() and not partial.exists():
        os.replace(path, partial)
    return files.make_room(partial, chunks)
