"""A stage's state passes from peer to peer, and to and from the run's snapshots. Knows files.

What donors offer is named by its digest; the coordinator passes on which, so that a donor that
lies is found out. So it is with snapshots, whose digests the coordinator keeps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from swarm_ft import failpoints
from swarm_ft.errors import BadSnapshot, MalformedMessage, NotFound, Unavailable
from swarm_ft.ids import PeerId
from swarm_ft.peer.context import PeerContext
from swarm_ft.peer.state.download import Downloader
from swarm_ft.proto import snapshot_pb2 as pb
from swarm_ft.protocol.messages.control import SavedStage
from swarm_ft.protocol.messages.shard import CHUNK_BYTES, ChunkList, ShardName
from swarm_ft.protocol.wire.shard_wire import chunks_to_wire, fetch_from_wire, shard_from_wire
from swarm_ft.snapshots.files import chunks_of
from swarm_ft.snapshots.shard import ShardContents, read_shard, write_shard
from swarm_ft.snapshots.store import SnapshotStore
from swarm_ft.transport.base import MessageStream

# ---- gives the shards that this peer holds to newcomers

PART_BYTES = 256 << 10
"""Small enough that a link of 1 Mbps brings one every other second: silence tells soon."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OfferedShard:
    """A file that newcomers may have; it does not change while it is offered.

    Attributes:
        chunks: of the file; its digest is what the coordinator is told.
    """

    path: Path
    chunks: ChunkList


Offers = Callable[[ShardName], OfferedShard | None]
"""The shard of that name, if this peer offers it."""


def offer(path: Path) -> OfferedShard:
    """Read a shard once, to offer it. Blocks.

    Raises:
        Unavailable: it cannot be read (now).
    """
    try:
        return OfferedShard(path=path, chunks=chunks_of(path))
    except OSError as error:
        raise Unavailable(f"{path} cannot be read: {error}") from error


async def serve_chunk_list(
    stream: MessageStream[pb.ChunkList, pb.ShardName], offers: Offers
) -> None:
    """A newcomer asks for a shard's list of chunks.

    Raises:
        NotFound: no such shard is offered here.
        MalformedMessage: it asks for nothing that could be one.
    """
    request = await stream.receive()
    if request is None:
        raise MalformedMessage(f"{stream.remote}: expected the name of a shard")
    offered = _found(offers, shard_from_wire(request))
    await stream.send(chunks_to_wire(offered.chunks))


async def serve_chunks(
    stream: MessageStream[pb.ChunkPart, pb.FetchRequest], offers: Offers
) -> None:
    """A newcomer fetches some chunks of a shard.

    Raises:
        NotFound: no such shard is offered here.
        MalformedMessage: it asks for chunks that the shard does not have.
        Unavailable: the shard cannot be read (now).
    """
    request = await stream.receive()
    if request is None:
        raise MalformedMessage(f"{stream.remote}: expected a request for chunks")
    name, wanted = fetch_from_wire(request)
    offered = _found(offers, name)
    if wanted.stop > len(offered.chunks):
        raise MalformedMessage(
            f"{stream.remote}: expected chunks below {len(offered.chunks)} of {name}, got "
            f"{wanted.start} to {wanted.stop - 1}"
        )
    for index in wanted:
        chunk = await asyncio.to_thread(_read, offered.path, index)
        for start in range(0, len(chunk), PART_BYTES):
            failpoints.reached("handing-over")
            await stream.send(pb.ChunkPart(chunk=index, data=chunk[start : start + PART_BYTES]))


def _found(offers: Offers, name: ShardName) -> OfferedShard:
    offered = offers(name)
    if offered is None:
        raise NotFound(f"{name}: this peer does not offer it (any more)")
    return offered


def _read(path: Path, index: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(index * CHUNK_BYTES)
            return file.read(CHUNK_BYTES)
    except OSError as error:
        raise Unavailable(f"the shard cannot be read: {error.strerror}") from error


class Handover:
    """This peer's part, as donor or as newcomer.

    Args:
        folder: for files that lie there only meanwhile.
        snapshots: where the run's snapshots lie; None if this peer was not told.
    """

    def __init__(
        self,
        context: PeerContext,
        folder: Path,
        spec_digest: bytes,
        snapshots: SnapshotStore | None,
    ) -> None:
        self._downloader = Downloader(context.directory, context.transport)
        self._folder = folder
        self._spec_digest = spec_digest
        self._snapshots = snapshots
        self._offered: dict[ShardName, OfferedShard] = {}

    def find(self, name: ShardName) -> OfferedShard | None:
        """The shard of that name, if it is offered."""
        return self._offered.get(name)

    async def offer(self, name: ShardName, contents: ShardContents) -> OfferedShard:
        """Save a state, and give it to whoever asks, until `close`.

        Raises:
            Unavailable: the disk does not take it (now).
        """
        path = await asyncio.to_thread(write_shard, self._folder, name, self._spec_digest, contents)
        offered = self._offered[name] = await asyncio.to_thread(offer, path)
        return offered

    async def fetch(
        self, name: ShardName, digest: bytes, donors: Sequence[PeerId]
    ) -> tuple[ShardContents, int]:
        """The state of that name from all donors at once, and the bytes that they sent.

        Args:
            name: of the shard.
            digest: as the coordinator knows it.
            donors: who offer it.

        Raises:
            Unavailable: no donor, or not enough of them, gave what has the digest.
            BadSnapshot: it has the digest and is no such shard.
        """
        path = self._folder / f"handed-{name.run_id}-{name.layers}.safetensors"
        try:
            chunks = await self._downloader.list_chunks(name, digest, donors)
            brought = await self._downloader.download(name, chunks, donors, path)
            contents = await asyncio.to_thread(read_shard, path, name, self._spec_digest)
            return contents, sum(brought.values())
        finally:
            path.unlink(missing_ok=True)  # what was read stays mapped until it is let go of

    async def save(self, name: ShardName, contents: ShardContents) -> SavedStage:
        """Put a state into the run's snapshots.

        Raises:
            Unavailable: this peer was not told where, or the place does not take it (now).
        """
        store = self._store()
        failpoints.reached_meanwhile("saving")
        # Beside it the same state may be offered to newcomers, without what is this peer's alone.
        folder = self._folder / "saved"
        folder.mkdir(exist_ok=True)
        path = await asyncio.to_thread(write_shard, folder, name, self._spec_digest, contents)
        return await asyncio.to_thread(store.put_shard, name, path)

    async def read(self, name: ShardName, digest: bytes) -> ShardContents:
        """A state from the run's snapshots.

        Raises:
            Unavailable: this peer was not told where they are, or the place does not answer.
            BadSnapshot: there is none with this digest, or it was altered.
        """
        store = self._store()
        found = await asyncio.to_thread(store.list_snapshots, name.run_id, self._spec_digest)
        manifest = next((manifest for manifest in found if manifest.step == name.step), None)
        if manifest is None or manifest.shard(name.layers).digest != digest:
            raise BadSnapshot(
                f"{name}: the snapshots here have no such state; start this peer with the same "
                f"--snapshots as the coordinator"
            )
        path = await asyncio.to_thread(store.fetch_shard, manifest, name.layers, self._folder)
        return await asyncio.to_thread(read_shard, path, name, self._spec_digest)

    def close(self, *, but: Set[ShardName] = frozenset()) -> None:
        """Offer nothing any more, or nothing but these."""
        for name in self._offered.keys() - but:
            self._offered.pop(name).path.unlink(missing_ok=True)

    def _store(self) -> SnapshotStore:
        if self._snapshots is None:
            raise Unavailable(
                "this peer was not told where snapshots lie; start it with --snapshots URL"
            )
        return self._snapshots
