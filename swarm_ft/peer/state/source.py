"""A stage's state passes from peer to peer, and to and from the run's snapshots. Knows files.

What sources offer is named by its digest; the coordinator passes on which, so that a source that
lies is found out. So it is with snapshots, whose digests the coordinator keeps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence, Set
from functools import partial
from pathlib import Path
from typing import TypeVar

from swarm_ft import failpoints
from swarm_ft.errors import BadSnapshot, Unavailable
from swarm_ft.ids import PeerId
from swarm_ft.peer.context import PeerContext
from swarm_ft.private_files import private_folder
from swarm_ft.protocol.messages.control import SavedStage
from swarm_ft.protocol.messages.shard import ShardName
from swarm_ft.snapshots.shard import ShardContents, read_shard, write_shard
from swarm_ft.snapshots.store import SnapshotStore
from swarm_ft.transfer.download import Downloader
from swarm_ft.transfer.source import OfferedShard, offer

R = TypeVar("R")


class Handover:
    """This peer's part, as source or as newcomer.

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
        self._offers = context.offers
        self._offered: set[ShardName] = set()

    def find(self, name: ShardName) -> OfferedShard | None:
        """The state of that name, if it is offered."""
        return self._offers.get(name) if name in self._offered else None

    async def offer(self, name: ShardName, contents: ShardContents) -> OfferedShard:
        """Save a state, and give it to whoever asks, until `close`.

        Raises:
            Unavailable: the disk does not take it (now).
        """
        path = await self._write(self._folder, name, contents)
        try:
            offered = self._offers[name] = await asyncio.to_thread(offer, path)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        self._offered.add(name)
        return offered

    async def fetch(
        self, name: ShardName, digest: bytes, sources: Sequence[PeerId]
    ) -> tuple[ShardContents, int]:
        """The state of that name from all sources at once, and the bytes that they sent.

        Args:
            name: of the shard.
            digest: as the coordinator knows it.
            sources: who offer it.

        Raises:
            Unavailable: no source, or not enough of them, gave what has the digest.
            BadSnapshot: it has the digest and is no such shard.
        """
        path = self._folder / f"handed-{name.run_id}-{name.layers}.safetensors"
        try:
            chunks = await self._downloader.list_chunks(name, digest, sources)
            brought = await self._downloader.download(name, chunks, sources, path)
            contents = await asyncio.to_thread(read_shard, path, name, self._spec_digest)
            return contents, sum(brought.values())
        finally:
            path.unlink(missing_ok=True)  # what was read stays mapped until it is let go of

    async def save(self, name: ShardName, contents: ShardContents) -> SavedStage:
        """Put a state into the run's snapshots. Cancelled, it waits for what is being written.

        Raises:
            Unavailable: this peer was not told where, or the place does not take it (now).
        """
        store = self._store()
        failpoints.reached_meanwhile("saving")
        # Beside it the same state may be offered to newcomers, without what is this peer's alone.
        folder = self._folder / "saved"
        private_folder(folder)
        path = await self._write(folder, name, contents)
        try:
            return await _to_end(partial(store.put_shard, name, path), lambda _entry: None)
        finally:
            path.unlink(missing_ok=True)  # it was moved, unless that failed

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
        for name in self._offered - but:
            self._offered.remove(name)
            self._offers.pop(name).path.unlink(missing_ok=True)

    async def _write(self, folder: Path, name: ShardName, contents: ShardContents) -> Path:
        """Write a state down; cancelled, it leaves no file."""
        write = partial(write_shard, folder, name, self._spec_digest, contents)
        return await _to_end(write, Path.unlink)

    def _store(self) -> SnapshotStore:
        if self._snapshots is None:
            raise Unavailable(
                "this peer was not told where snapshots lie; start it with --snapshots URL"
            )
        return self._snapshots


async def _to_end(function: Callable[[], R], undo: Callable[[R], object]) -> R:
    """What the function returns, called in a thread; cancelled, this waits for it and undoes it."""
    work = asyncio.ensure_future(asyncio.to_thread(function))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait((work,))
        if work.exception() is None:
            undo(work.result())
        raise
