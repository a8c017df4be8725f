"""What a peer keeps of others' snapshots: fetched, given on, found again, deleted; real files."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from swarm_ft.digest import file_stem
from swarm_ft.errors import Unavailable
from swarm_ft.identity.roles import Role
from swarm_ft.ids import PeerId, RunId, StepNumber
from swarm_ft.peer.snapshot_keeper import KeeperStorage, SnapshotKeeper
from swarm_ft.protocol.messages.control import (
    DropShards,
    FromPeer,
    GiveShard,
    KeepShard,
    SavedStage,
    ShardKept,
    ShardLost,
)
from swarm_ft.protocol.messages.shard import CHUNK_BYTES, KeptShard, ShardFile, ShardName
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.transfer import Downloader, serve_chunk_list, serve_chunks
from swarm_ft.transport.base import Handler, Method
from swarm_ft.transport.methods import FETCH_CHUNKS, LIST_CHUNKS
from tests.doubles.clock import ManualClock
from tests.doubles.directory import Board, StaticDirectory
from tests.doubles.memory_transport import MemoryTransport

RUN = RunId("run of 100%")
NAME = ShardName(run_id=RUN, step=StepNumber(4), layers=LayerRange(0, 3), is_saved=True)
DATA = os.urandom(CHUNK_BYTES + 1000)
ROOM = 2 * len(DATA)
SAVER, OTHER = PeerId("saver"), PeerId("other")


@dataclass
class Home:
    """A peer as far as it keeps snapshots."""

    kept: SnapshotKeeper
    said: asyncio.Queue[FromPeer]
    folder: Path

    async def hears(self) -> FromPeer:
        return await asyncio.wait_for(self.said.get(), 20.0)

    @property
    def files(self) -> list[Path]:
        """All files but those that name the run of a folder."""
        found = (path for path in self.folder.rglob("*") if path.is_file())
        return sorted(path for path in found if path.name != "run-id")


MakeHome: TypeAlias = Callable[..., Awaitable[Home]]


@pytest.fixture
async def make_home(tmp_path: Path) -> AsyncIterator[MakeHome]:
    transport, directory = MemoryTransport(), StaticDirectory(Board(), ManualClock())
    closing: list[Callable[[], Awaitable[None]]] = []

    async def make(name: PeerId, *, max_bytes: int = ROOM, unix_s: float = 0.0) -> Home:
        said: asyncio.Queue[FromPeer] = asyncio.Queue()
        folder = tmp_path / name
        kept = SnapshotKeeper(
            name,
            KeeperStorage(directory=folder, max_bytes=max_bytes),
            downloader=Downloader(directory, transport),
            say=said.put_nowait,
        )
        kept.load_existing(unix_s)
        handlers: dict[Method[Any, Any], Handler] = {
            FETCH_CHUNKS: partial(serve_chunks, offers=kept.offers),
            LIST_CHUNKS: partial(serve_chunk_list, offers=kept.offers),
        }
        server = await transport.serve(name, 0, handlers)
        await directory.announce(Role.PEER, name, server.endpoint)
        closing.extend((kept.close, server.stop))
        return Home(kept, said, folder)

    yield make
    for close in closing:
        await close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_ft.peer.snapshot_keeper.RETRY_S", 0.0)


async def saved_by(home: Home, tmp_path: Path, data: bytes = DATA) -> ShardFile:
    source = tmp_path / "just-written"
    source.write_bytes(data)
    file = await home.kept.put(NAME, source)
    assert not source.exists()
    return file


async def kept_from(saver: Home, other: Home, file: ShardFile) -> FromPeer:
    """What the other says once it was asked to keep what the saver has."""
    saver.kept.offer_to(GiveShard(name=NAME, takers=(OTHER,)))
    other.kept.start_fetch(KeepShard(name=NAME, file=file, sources=(SAVER,)))
    return await other.hears()


async def test_what_one_saved_another_keeps_and_gives_back(
    make_home: MakeHome, tmp_path: Path
) -> None:
    saver, other = await make_home(SAVER), await make_home(OTHER)
    file = await saved_by(saver, tmp_path)
    shard = KeptShard(name=NAME, digest=file.digest)
    assert await kept_from(saver, other, file) == ShardKept(shard)
    assert saver.kept.shards == other.kept.shards == (shard,)
    assert [path.read_bytes() for path in (*saver.files, *other.files)] == [DATA] * 2
    await saver.kept.forget(RUN)
    assert saver.files == []
    other.kept.offer_to(GiveShard(name=NAME, takers=(SAVER,)))
    stage = SavedStage(
        layers=NAME.layers,
        digest=file.digest,
        total_bytes=file.total_bytes,
        keepers=(SAVER, OTHER),
    )
    path = await saver.kept.fetch(NAME, stage, tmp_path)
    assert path.read_bytes() == DATA
    assert not saver.kept.has_file(path)
    own = await other.kept.fetch(NAME, stage, tmp_path)
    assert other.kept.has_file(own)
    with pytest.raises(Unavailable):
        await other.kept.fetch(NAME, replace(stage, digest=b"x" * 16, keepers=(OTHER,)), tmp_path)


async def test_who_has_it_already_says_so_and_fetches_nothing(
    make_home: MakeHome, tmp_path: Path
) -> None:
    saver, other = await make_home(SAVER), await make_home(OTHER)
    file = await saved_by(saver, tmp_path)
    first = await kept_from(saver, other, file)
    await saver.kept.forget(RUN)  # nobody could give it any more
    other.kept.start_fetch(KeepShard(name=NAME, file=file, sources=(SAVER,)))
    assert await other.hears() == first


async def test_a_step_that_was_done_again_takes_the_place_of_the_first(
    make_home: MakeHome, tmp_path: Path
) -> None:
    saver, other = await make_home(SAVER), await make_home(OTHER)
    await kept_from(saver, other, await saved_by(saver, tmp_path, b"void"))
    file = await saved_by(saver, tmp_path)
    said = await kept_from(saver, other, file)
    assert said == ShardKept(KeptShard(name=NAME, digest=file.digest))
    assert [path.read_bytes() for path in (*saver.files, *other.files)] == [DATA] * 2


@pytest.mark.parametrize("lends", ["too little", "nothing"])
async def test_no_more_is_kept_than_is_lent(
    make_home: MakeHome, tmp_path: Path, lends: str
) -> None:
    saver = await make_home(SAVER, max_bytes=0)
    other = await make_home(OTHER, max_bytes=len(DATA) - 1 if lends == "too little" else 0)
    file = await saved_by(saver, tmp_path)  # its own does not count
    said = await kept_from(saver, other, file)
    assert isinstance(said, ShardLost)
    assert said.reason == f"this peer has no room for {len(DATA)} bytes (--keep-disk)"
    assert other.files == []


async def test_who_gets_it_from_nobody_says_so(make_home: MakeHome, tmp_path: Path) -> None:
    saver, other = await make_home(SAVER), await make_home(OTHER)
    file = await saved_by(saver, tmp_path)
    other.kept.start_fetch(KeepShard(name=NAME, file=file, sources=(SAVER,)))  # which was not told
    said = await other.hears()
    assert isinstance(said, ShardLost)
    assert said.shard == KeptShard(name=NAME, digest=file.digest)


async def test_a_start_finds_what_an_earlier_one_left_but_nothing_old_or_torn(
    make_home: MakeHome, tmp_path: Path
) -> None:
    first = await make_home(OTHER)
    file = await saved_by(first, tmp_path)
    await first.kept.close()
    (path,) = first.files
    (path.parent / f"{path.name}.partial").write_bytes(b"torn")
    (path.parent / "step-00000009-layers-3-1-00112233445566778899aabbccddeeff.shard").touch()
    again = await make_home(OTHER)
    assert again.kept.shards == (KeptShard(name=NAME, digest=file.digest),)
    assert again.files == [path]
    late = await make_home(OTHER, unix_s=path.stat().st_mtime + 8 * 86400.0)
    assert late.kept.shards == ()
    assert late.files == []


async def test_what_was_altered_on_the_disk_is_not_given_and_told(
    make_home: MakeHome, tmp_path: Path
) -> None:
    first = await make_home(SAVER)
    file = await saved_by(first, tmp_path)
    (path,) = first.files
    path.write_bytes(bytes([DATA[0] ^ 1]) + DATA[1:])
    again = await make_home(SAVER)
    again.kept.offer_to(GiveShard(name=NAME, takers=(OTHER,)))
    said = await again.hears()
    assert said == ShardLost(
        shard=KeptShard(name=NAME, digest=file.digest), reason="its bytes have changed"
    )
    assert again.kept.shards == ()
    assert again.files == []


async def test_of_a_run_those_steps_stay_that_are_named(
    make_home: MakeHome, tmp_path: Path
) -> None:
    home = await make_home(SAVER)
    names = [
        replace(NAME, run_id=run, step=StepNumber(step))
        for run in (RUN, RunId(".."))
        for step in (2, 4)
    ]
    for name in names:
        source = tmp_path / "just-written"
        source.write_bytes(str(name).encode())
        await home.kept.put(name, source)
    await home.kept.drop(DropShards(run_id=RUN, but=(StepNumber(4),)))
    assert {shard.name for shard in home.kept.shards} == set(names[1:])
    assert all(path.is_relative_to(home.folder) for path in home.files)
    await home.kept.forget(RunId(".."))
    assert {shard.name for shard in home.kept.shards} == {names[1]}
    assert len(home.files) == 1


async def test_a_peer_without_a_place_keeps_nothing(tmp_path: Path) -> None:
    directory = StaticDirectory(Board(), ManualClock())
    said: list[FromPeer] = []
    kept = SnapshotKeeper(
        OTHER,
        KeeperStorage(max_bytes=ROOM),
        downloader=Downloader(directory, MemoryTransport()),
        say=said.append,
    )
    kept.load_existing(0.0)
    assert kept.capacity_bytes == 0
    with pytest.raises(Unavailable, match="keeps no snapshots"):
        await saved_by(Home(kept, asyncio.Queue(), tmp_path), tmp_path)
    await kept.forget(RUN)


@pytest.mark.parametrize("name", ["..", "\N{OCTOPUS}" * 16, "%" * 64, "run-1"])
async def test_no_name_of_a_run_becomes_a_path(
    make_home: MakeHome, tmp_path: Path, name: str
) -> None:
    home = await make_home(SAVER)
    shard = replace(NAME, run_id=RunId(name))
    source = tmp_path / "just-written"
    source.write_bytes(DATA)
    await home.kept.put(shard, source)
    (path,) = home.files
    assert path.relative_to(home.folder).parts[0] == file_stem(name)
    again = await make_home(SAVER)
    assert [kept.name for kept in again.kept.shards] == [shard]
    await again.kept.forget(RunId(name))
    assert list(home.folder.iterdir()) == []


async def test_a_start_finds_what_an_earlier_version_left(
    make_home: MakeHome, tmp_path: Path
) -> None:
    first = await make_home(SAVER)
    await saved_by(first, tmp_path)
    (path,) = first.files
    (path.parent / "run-id").unlink()
    path.parent.rename(first.folder / "run-run%20of%20100%25")
    again = await make_home(SAVER)
    assert [kept.name for kept in again.kept.shards] == [NAME]


async def test_the_last_shard_of_a_run_takes_the_runs_name_with_it(
    make_home: MakeHome, tmp_path: Path
) -> None:
    home = await make_home(SAVER)
    await saved_by(home, tmp_path)
    await home.kept.drop(DropShards(run_id=RUN, but=(NAME.step,)))
    assert len(home.files) == 1
    await home.kept.drop(DropShards(run_id=RUN, but=()))
    assert list(home.folder.iterdir()) == []
    await saved_by(home, tmp_path)
    assert len(home.files) == 1


async def test_a_folder_of_no_run_is_deleted_at_the_start(
    make_home: MakeHome, tmp_path: Path
) -> None:
    first = await make_home(SAVER)
    await saved_by(first, tmp_path)
    (path,) = first.files
    (path.parent / "run-id").write_text("another run")
    again = await make_home(SAVER)
    assert again.kept.shards == ()
    assert list(again.folder.iterdir()) == []
