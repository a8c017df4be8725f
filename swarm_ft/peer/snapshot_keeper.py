"""Encrypted snapshots that this peer keeps for other stages, and cannot read.

Snapshots of its own stage lie here too. A folder is named by the digest of a run's name, and has a
file with that name. A snapshot's file name contains the step, the layers and the digest, so that a
restarted peer finds it. The peer that fetches a file checks every chunk.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote

from swarm_ft.base.log import get_logger
from swarm_ft.base.private_files import private_folder
from swarm_ft.digest import file_stem
from swarm_ft.errors import SwarmError, Unavailable
from swarm_ft.ids import PeerId, RunId, StepNumber
from swarm_ft.net.transfer import Downloader, OfferedShard
from swarm_ft.protocol.messages.control import (
    MAX_KEPT_SHARDS,
    DropShards,
    FromPeer,
    GiveShard,
    KeepShard,
    SavedStage,
    ShardKept,
    ShardLost,
)
from swarm_ft.protocol.messages.shard import ChunkList, KeptShard, ShardFile, ShardName
from swarm_ft.protocol.spec.bounds import Name
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.snapshots.local_files import chunks_of

logger = get_logger(__name__)

T = TypeVar("T")

TRIES, RETRY_S = 5, 2.0
"""Tries and waits of a fetch: the source may learn a little later that this peer may fetch."""
_RUN_FILE = "run-id"
"""File in each folder with the name of the run, in UTF-8."""
_FILE = re.compile(r"step-([0-9]{1,10})-layers-([0-9]{1,4})-([0-9]{1,4})-([0-9a-f]{32})\.shard")


@dataclass(frozen=True, kw_only=True, slots=True)
class KeeperStorage:
    """The disk space that a peer lends for snapshots of other stages.

    Attributes:
        directory: Directory of this peer alone; None keeps no snapshots.
        max_bytes: Limit of the snapshots of other stages.
        keep_s: Seconds after which a snapshot is deleted, even if its run was not reported as over.
    """

    directory: Path | None = None
    max_bytes: int = 0
    keep_s: float = 7 * 86400.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _StoredFile:
    """A file that is here. Its chunks are known once it was received or offered."""

    path: Path
    file: ShardFile
    is_own: bool = False
    chunks: ChunkList | None = None


class SnapshotKeeper:
    """Snapshots that this peer keeps; see the module.

    Args:
        peer_id: Id of this peer.
        place: Directory and limits.
        downloader: Fetches snapshots from other peers.
        say: Sends a message to the coordinator.

    Attributes:
        offers: Snapshots that other peers may fetch here.
    """

    def __init__(
        self,
        peer_id: PeerId,
        place: KeeperStorage,
        *,
        downloader: Downloader,
        say: Callable[[FromPeer], None],
    ) -> None:
        self.offers: dict[ShardName, OfferedShard] = {}
        self._peer_id = peer_id
        self._downloader = downloader
        self._send = say
        self._place = place
        self._files: dict[ShardName, _StoredFile] = {}
        self._putting: Counter[RunId] = Counter()
        self._readers: dict[ShardName, frozenset[str]] = {}
        self._fetches: dict[ShardName, asyncio.Task[None]] = {}
        self._offering: set[asyncio.Task[None]] = set()

    # ---- inventory

    def load_existing(self, unix_s: float) -> None:
        """Find the snapshots of an earlier start, and delete files of no use. Blocks.

        Args:
            unix_s: The present time.
        """
        if self._place.directory is None:
            return
        with suppress(OSError):
            for folder in sorted(private_folder(self._place.directory).iterdir()):
                self._find_in(folder, unix_s)

    def _find_in(self, folder: Path, unix_s: float) -> None:
        run_id, num_found = _run_of(folder), 0
        for path in sorted(folder.glob("*")):
            shard, found = _shard_of(run_id, path), path.stat()
            if shard is not None and found.st_mtime >= unix_s - self._place.keep_s:
                file = ShardFile(digest=shard.digest, total_bytes=found.st_size)
                self._files[shard.name] = _StoredFile(path=path, file=file)
                num_found += 1
            elif path.name != _RUN_FILE:
                path.unlink()
        if not num_found:
            shutil.rmtree(folder, ignore_errors=True)

    @property
    def capacity_bytes(self) -> int:
        """Bytes that this peer lends for other stages."""
        return self._place.max_bytes if self._place.directory is not None else 0

    @property
    def shards(self) -> tuple[KeptShard, ...]:
        """Snapshots that are here, the newest steps first."""
        newest = sorted(self._files, key=lambda name: -name.step)[:MAX_KEPT_SHARDS]
        return tuple(KeptShard(name=n, digest=self._files[n].file.digest) for n in newest)

    async def put(self, name: ShardName, source: Path) -> ShardFile:
        """Move a snapshot of this peer's own stage here.

        Raises:
            Unavailable: The disk refuses the file (now), or this peer keeps no snapshots.
        """
        self._putting[name.run_id] += 1
        try:
            chunks = await asyncio.to_thread(chunks_of, source)
            path = self._path(KeptShard(name=name, digest=chunks.digest()))
            await asyncio.to_thread(_make_folder, path.parent, name.run_id)
            await asyncio.to_thread(_move, source, path)
        except OSError as error:
            raise Unavailable(f"{name} cannot be kept here: {error}") from error
        finally:
            self._putting -= Counter([name.run_id])
        self._register(name, _StoredFile(path=path, file=chunks.file, is_own=True, chunks=chunks))
        return chunks.file

    async def fetch(self, name: ShardName, stage: SavedStage, folder: Path) -> Path:
        """Return a saved stage as a checked file: the one kept here, or one fetched into `folder`.

        Raises:
            Unavailable: No peer provides it (now).
        """
        own = self._files.get(name)
        if own is not None and own.file == stage.file and await self._is_intact(name, own):
            return own.path
        path = folder / f"taken-{file_stem(name.run_id)}-{name.step}-{name.layers}"
        sources = tuple(peer for peer in stage.keepers if peer != self._peer_id)
        await _retry(lambda: self._download(name, stage.file, sources, path))
        return path

    def has_file(self, path: Path) -> bool:
        """Whether a file belongs to a stored snapshot."""
        return any(stored.path == path for stored in self._files.values())

    # ---- messages of the coordinator

    def start_fetch(self, request: KeepShard) -> None:
        """Begin to fetch a stage of others, and report the success or the failure."""
        name, shard = request.name, KeptShard(name=request.name, digest=request.file.digest)
        present = self._files.get(name)
        if present is not None and present.file == request.file:
            self._send(ShardKept(shard))
            return
        if name in self._fetches:
            self._fetches[name].cancel()
        task = self._fetches[name] = asyncio.create_task(self._fetch_file(request, shard))
        task.add_done_callback(lambda done: self._on_fetched(name, done))

    def offer_to(self, request: GiveShard) -> None:
        """Offer a snapshot to more peers."""
        name = request.name
        self._readers[name] = self._readers.get(name, frozenset()) | frozenset(request.takers)
        task = asyncio.create_task(self._offer(name))
        self._offering.add(task)
        task.add_done_callback(self._offering.discard)

    async def drop(self, request: DropShards) -> None:
        """Delete a run's snapshots except those of some steps; transfers under way continue."""
        for name in [n for n in self._files if n.run_id == request.run_id]:
            if name.step not in request.but:
                await self._delete(name)
        self._remove_if_empty(request.run_id)

    async def forget(self, run_id: RunId) -> None:
        """Delete all files of a run."""
        for name in [name for name in self._fetches if name.run_id == run_id]:
            self._fetches[name].cancel()
        await self.drop(DropShards(run_id=run_id, but=()))
        if self._place.directory is not None:
            await asyncio.to_thread(shutil.rmtree, self._folder(run_id), ignore_errors=True)

    async def close(self) -> None:
        """Cancel all transfers and offers; files stay."""
        ending = (*self._fetches.values(), *self._offering)
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)

    # ---- one file

    async def _fetch_file(self, request: KeepShard, shard: KeptShard) -> None:
        try:
            self._check_room(request)
            path = self._path(shard)
            await asyncio.to_thread(_make_folder, path.parent, request.name.run_id)
            fetch = lambda: self._download(request.name, request.file, request.sources, path)  # noqa: E731
            chunks = await _retry(fetch)
        except (SwarmError, OSError) as error:
            reason = error.message if isinstance(error, SwarmError) else str(error)
            logger.warning("%s: not stored: %s", request.name, reason)
            self._send(ShardLost(shard=shard, reason=reason))
            return
        self._register(request.name, _StoredFile(path=path, file=request.file, chunks=chunks))
        self._send(ShardKept(shard))

    def _on_fetched(self, name: ShardName, task: asyncio.Task[None]) -> None:
        if self._fetches.get(name) is task:
            del self._fetches[name]
            self._remove_if_empty(name.run_id)

    def _check_room(self, request: KeepShard) -> None:
        others = (stored.file.total_bytes for stored in self._files.values() if not stored.is_own)
        if sum(others) + request.file.total_bytes > self.capacity_bytes:
            raise Unavailable(
                f"this peer has no room for {request.file.total_bytes} bytes (--keep-disk)"
            )

    async def _download(
        self, name: ShardName, file: ShardFile, sources: tuple[PeerId, ...], path: Path
    ) -> ChunkList:
        chunks = await self._downloader.list_chunks(name, file, sources)
        await self._downloader.download(name, chunks, sources, path)
        return chunks

    async def _offer(self, name: ShardName) -> None:
        stored = self._files.get(name)
        if stored is None or not await self._is_intact(name, stored):
            return
        stored = self._files[name]
        if stored.chunks is not None:
            readers = self._readers[name]
            self.offers[name] = OfferedShard(
                path=stored.path, chunks=stored.chunks, readers=readers
            )

    async def _is_intact(self, name: ShardName, stored: _StoredFile) -> bool:
        """Whether a file has the content of its name; otherwise delete and report it."""
        if stored.chunks is not None:
            return True
        try:
            chunks = await asyncio.to_thread(chunks_of, stored.path)
        except OSError as error:
            reason = str(error)
        else:
            reason = "" if chunks.file == stored.file else "its bytes have changed"
        if self._files.get(name) is not stored:
            return False  # the file was replaced or deleted meanwhile
        if reason:
            await self._delete(name)
            shard = KeptShard(name=name, digest=stored.file.digest)
            self._send(ShardLost(shard=shard, reason=reason))
            return False
        self._files[name] = replace(stored, chunks=chunks)
        return True

    def _register(self, name: ShardName, stored: _StoredFile) -> None:
        """Register a file in place of one with the same name: its step was trained again."""
        before = self._files.get(name)
        if before is not None and before.path != stored.path:
            before.path.unlink(missing_ok=True)
        self.offers.pop(name, None)
        self._files[name] = stored

    async def _delete(self, name: ShardName) -> None:
        self.offers.pop(name, None)
        self._readers.pop(name, None)
        stored = self._files.pop(name, None)
        if stored is not None:
            await asyncio.to_thread(stored.path.unlink, missing_ok=True)

    def _remove_if_empty(self, run_id: RunId) -> None:
        """Delete a run's folder, with the run's name, if no snapshot is there or expected."""
        names = (*self._files, *self._fetches)
        is_used = run_id in self._putting or any(name.run_id == run_id for name in names)
        if self._place.directory is None or is_used:
            return
        with suppress(OSError):
            (self._folder(run_id) / _RUN_FILE).unlink(missing_ok=True)
            self._folder(run_id).rmdir()

    def _folder(self, run_id: RunId) -> Path:
        if self._place.directory is None:
            raise Unavailable("this peer keeps no snapshots (--keep-disk)")
        return self._place.directory / file_stem(run_id)

    def _path(self, shard: KeptShard) -> Path:
        name = shard.name
        file = f"step-{name.step:08}-layers-{name.layers}-{shard.digest.hex()}.shard"
        return self._folder(name.run_id) / file


async def _retry(do: Callable[[], Awaitable[T]]) -> T:
    for _ in range(TRIES - 1):
        with suppress(Unavailable):
            return await do()
        await asyncio.sleep(RETRY_S)
    return await do()


def _make_folder(folder: Path, run_id: RunId) -> None:
    private_folder(folder)
    (folder / _RUN_FILE).write_text(run_id, encoding="utf-8")


def _move(source: Path, path: Path) -> None:
    os.replace(shutil.move(source, path.with_name(f"{path.name}.partial")), path)


def _run_of(folder: Path) -> RunId | None:
    """Return the run of a folder; None if it has none.

    Folders of earlier versions have no file with the run's name; they have its quoted name.
    """
    if folder.name.startswith("run-"):
        run_id = unquote(folder.name.removeprefix("run-"))
        return RunId(run_id) if Name().refusal(run_id) is None else None
    try:
        run_id = (folder / _RUN_FILE).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
    return RunId(run_id) if file_stem(run_id) == folder.name else None


def _shard_of(run_id: RunId | None, path: Path) -> KeptShard | None:
    """Return the shard that a file's name stands for; None for other files."""
    match = _FILE.fullmatch(path.name)
    if match is None or run_id is None:
        return None
    try:
        name = ShardName(
            run_id=run_id,
            step=StepNumber(int(match[1])),
            layers=LayerRange(int(match[2]), int(match[3])),
            is_saved=True,
        )
    except SwarmError:
        return None
    return KeptShard(name=name, digest=bytes.fromhex(match[4]))
