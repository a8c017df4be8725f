"""A peer's store of others' snapshots: fetched, passed on, found again, deleted; real files."""

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
from swarm_ft.net.transfer import Downloader, serve_chunk_list, serve_chunks
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

    keeper: SnapshotKeeper
    sent: asyncio.Queue[FromPeer]
    folder: Path

    async def receive(self) -> FromPeer:
        return await asyncio.wait_for(self.sent.get(), 20.0)

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
        sent: asyncio.Queue[FromPeer] = asyncio.Queue()
        folder = tmp_path / name
        keeper = SnapshotKeeper(
            name,
            KeeperStorage(directory=folder, max_bytes=max_bytes),
            downloader=Downloader(directory, transport),
            say=sent.put_nowait,
        )
        keeper.load_existing(unix_s)
        handlers: dict[Method[Any, Any], Handler] = {
            FETCH_CHUNKS: partial(serve_chunks, offers=keeper.offers),
            LIST_CHUNKS: partial(serve_chunk_list, offers=keeper.offers),
        }
        server = await transport.serve(name, 0, handlers)
        await directory.announce(Role.PEER, name, server.endpoint)
        closing.extend((keeper.close, server.stop))
        return Home(keeper, sent, folder)

    yield make
    for close in closing:
        await close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_ft.peer.snapshot_keeper.RETRY_S", 0.0)


async def saved_by(home: Home, tmp_path: Path, data: bytes = DATA) -> ShardFile:
    source = tmp_path / "just-written"
    source.write_bytes(data)
    file = await home.keeper.put(NAME, source)
    assert not source.exists()
    return file


async def kept_from(saver: Home, other: Home, file: ShardFile) -> FromPeer:
    """Let one peer keep a shard of another and return its report."""
    saver.keeper.offer_to(GiveShard(name=NAME, takers=(OTHER,)))
    other.keeper.start_fetch(KeepShard(name=NAME, file=file, sources=(SAVER,)))
    return await other.receive()


async def test_what_one_saved_another_keeps_and_gives_back(
    make_home: MakeHome, tmp_path: Path
) -> None:
    saver, other = await make_home(SAVER), await make_home(OTHER)
    file = await saved_by(saver, tmp_path)
    shard = KeptShard(name=NAME, digest=file.digest)
    assert await kept_from(saver, other, file) == ShardKept(shard)
    assert saver.keeper.shards == other.keeper.shards == (shard,)
    assert [path.read_bytes() for path in (*saver.files, *other.files)] == [DATA] * 2
    await saver.keeper.forget(RUN)
    assert saver.files == []
    other.keeper.offer_to(GiveShard(name=NAME, takers=(SAVER,)))
    stage = SavedStage(
        layers=NAME.layers,
        digest=file.digest,
        total_bytes=file.total_bytes,
        keepers=(SAVER, OTHER),
    )
    path = await saver.keeper.fetch(NAME, stage, tmp_path)
    assert path.read_bytes() == DATA
    assert not saver.keeper.has_file(path)
    own = await other.keeper.fetch(NAME, stage, tmp_path)
    assert other.keeper.has_file(own)
    with pytest.raises(Unavailable):
        await other.keeper.fetch(NAME, replace(stage, digest=b"x" * 16, keepers=(OTHER,)), tmp_path)


async def test_who_has_it_already_says_so_and_fetches_nothing(
    make_home: MakeHome, tmp_path: Path
) -> None:
    saver, other = await make_home(SAVER), await make_home(OTHER)
    file = await saved_by(saver, tmp_path)
    first = await kept_from(saver, other, file)
    await saver.keeper.forget(RUN)  # nobody could give it any more
    other.keeper.start_fetch(KeepShard(name=NAME, file=file, sources=(SAVER,)))
    assert await other.receive() == first


async def test_a_step_that_was_done_again_takes_the_place_of_the_first(
    make_home: MakeHome, tmp_path: Path
) -> None:
    saver, other = await make_home(SAVER), await make_home(OTHER)
    await kept_from(saver, other, await saved_by(saver, tmp_path, b"void"))
    file = await saved_by(saver, tmp_path)
    reply = await kept_from(saver, other, file)
    assert reply == ShardKept(KeptShard(name=NAME, digest=file.digest))
    assert [path.read_bytes() for path in (*saver.files, *other.files)] == [DATA] * 2


@pytest.mark.parametrize("lends", ["too little", "nothing"])
async def test_no_more_is_kept_than_is_lent(
    make_home: MakeHome, tmp_path: Path, lends: str
) -> None:
    saver = await make_home(SAVER, max_bytes=0)
    other = await make_home(OTHER, max_bytes=len(DATA) - 1 if lends == "too little" else 0)
    file = await saved_by(saver, tmp_path)  # its own does not count
    reply = await kept_from(saver, other, file)
    assert isinstance(reply, ShardLost)
    assert reply.reason == f"this peer has no room for {len(DATA)} bytes (--keep-disk)"
    assert other.files == []


async def test_who_gets_it_from_nobody_says_so(make_home: MakeHome, tmp_path: Path) -> None:
    saver, other = await make_home(SAVER), await make_home(OTHER)
    file = await saved_by(saver, tmp_path)
    other.keeper.start_fetch(
        KeepShard(name=NAME, file=file, sources=(SAVER,))
    )  # which got no message
    reply = await other.receive()
    assert isinstance(reply, ShardLost)
    assert reply.shard == KeptShard(name=NAME, digest=file.digest)


async def test_a_start_finds_what_an_earlier_one_left_but_nothing_old_or_torn(
    make_home: MakeHome, tmp_path: Path
) -> None:
    first = await make_home(OTHER)
    file = await saved_by(first, tmp_path)
    await first.keeper.close()
    (path,) = first.files
    (path.parent / f"{path.name}.partial").write_bytes(b"torn")
    (path.parent / "step-00000009-layers-3-1-00112233445566778899aabbccddeeff.shard").touch()
    again = await make_home(OTHER)
    assert again.keeper.shards == (KeptShard(name=NAME, digest=file.digest),)
    assert again.files == [path]
    late = await make_home(OTHER, unix_s=path.stat().st_mtime + 8 * 86400.0)
    assert late.keeper.shards == ()
    assert late.files == []


async def test_what_was_altered_on_the_disk_is_not_given_and_told(
    make_home: MakeHome, tmp_path: Path
) -> None:
    first = await make_home(SAVER)
    file = await saved_by(first, tmp_path)
    (path,) = first.files
    path.write_bytes(bytes([DATA[0] ^ 1]) + DATA[1:])
    again = await make_home(SAVER)
    again.keeper.offer_to(GiveShard(name=NAME, takers=(OTHER,)))
    reply = await again.receive()
    assert reply == ShardLost(
        shard=KeptShard(name=NAME, digest=file.digest), reason="its bytes have changed"
    )
    assert again.keeper.shards == ()
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
        await home.keeper.put(name, source)
    await home.keeper.drop(DropShards(run_id=RUN, but=(StepNumber(4),)))
    assert {shard.name for shard in home.keeper.shards} == set(names[1:])
    assert all(path.is_relative_to(home.folder) for path in home.files)
    await home.keeper.forget(RunId(".."))
    assert {shard.name for shard in home.keeper.shards} == {names[1]}
    assert len(home.files) == 1


async def test_a_peer_without_a_place_keeps_nothing(tmp_path: Path) -> None:
    directory = StaticDirectory(Board(), ManualClock())
    sent: list[FromPeer] = []
    keeper = SnapshotKeeper(
        OTHER,
        KeeperStorage(max_bytes=ROOM),
        downloader=Downloader(directory, MemoryTransport()),
        say=sent.append,
    )
    keeper.load_existing(0.0)
    assert keeper.capacity_bytes == 0
    with pytest.raises(Unavailable, match="keeps no snapshots"):
        await saved_by(Home(keeper, asyncio.Queue(), tmp_path), tmp_path)
    await keeper.forget(RUN)


@pytest.mark.parametrize("name", ["..", "\N{OCTOPUS}" * 16, "%" * 64, "run-1"])
async def test_no_name_of_a_run_becomes_a_path(
    make_home: MakeHome, tmp_path: Path, name: str
) -> None:
    home = await make_home(SAVER)
    shard = replace(NAME, run_id=RunId(name))
    source = tmp_path / "just-written"
    source.write_bytes(DATA)
    await home.keeper.put(shard, source)
    (path,) = home.files
    assert path.relative_to(home.folder).parts[0] == file_stem(name)
    again = await make_home(SAVER)
    assert [shard_record.name for shard_record in again.keeper.shards] == [shard]
    await again.keeper.forget(RunId(name))
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
    assert [shard_record.name for shard_record in again.keeper.shards] == [NAME]


async def test_the_last_shard_of_a_run_takes_the_runs_name_with_it(
    make_home: MakeHome, tmp_path: Path
) -> None:
    home = await make_home(SAVER)
    await saved_by(home, tmp_path)
    await home.keeper.drop(DropShards(run_id=RUN, but=(NAME.step,)))
    assert len(home.files) == 1
    await home.keeper.drop(DropShards(run_id=RUN, but=()))
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
    assert again.keeper.shards == ()
    assert list(again.folder.iterdir()) == []
