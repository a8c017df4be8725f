"""Files on this disk, whole or by chunks, plain or sealed, return what was written."""

from pathlib import Path

import pytest

from swarm_ft.base.sealing import Sealer, new_key
from swarm_ft.errors import BadSnapshot
from swarm_ft.protocol.messages.shard import CHUNK_BYTES, ChunkList, list_chunks
from swarm_ft.snapshots.local_files import PLAIN, LocalFiles, chunks_of

SECRET = b"nobody else's business"
DATA = SECRET + bytes(range(251)) * (CHUNK_BYTES // 250)
KEY = new_key()
SEALED = LocalFiles(Sealer(KEY, "files"), seals=True)
both = pytest.mark.parametrize("files", [PLAIN, SEALED], ids=["plain", "sealed"])


def chunks_in_memory(data: bytes) -> list[bytes]:
    return [data[i : i + CHUNK_BYTES] for i in range(0, len(data), CHUNK_BYTES)]


def listed(data: bytes = DATA) -> ChunkList:
    return list_chunks(chunks_in_memory(data))


@both
@pytest.mark.parametrize("data", [b"", b"x", bytes(CHUNK_BYTES), DATA], ids=len)
def test_a_file_is_read_as_it_was_written(tmp_path: Path, files: LocalFiles, data: bytes) -> None:
    path = tmp_path / "file"
    files.write(path, data)
    with files.open_plain(path) as plain:
        assert plain.read_bytes() == data
    assert files.read(path) == data
    assert files.list_chunks(path) == listed(data)
    assert [files.read_chunk(path, i) for i in range(len(listed(data)))] == chunks_in_memory(data)
    assert path.stat().st_mode & 0o077 == 0


def test_what_is_sealed_cannot_be_read_on_the_disk(tmp_path: Path) -> None:
    SEALED.write(tmp_path / "file", DATA)
    assert SECRET not in (tmp_path / "file").read_bytes()
    PLAIN.write(tmp_path / "file", DATA)
    assert SECRET in (tmp_path / "file").read_bytes()


@both
def test_chunks_come_in_any_order_and_are_found_again(tmp_path: Path, files: LocalFiles) -> None:
    path, chunks = tmp_path / "file", listed()
    assert files.make_room(path, chunks) == []
    files.write_chunk(path, 1, bytearray(DATA[CHUNK_BYTES:]))
    assert files.make_room(path, chunks) == [1]
    files.write_chunk(path, 0, DATA[:CHUNK_BYTES])
    assert files.make_room(path, chunks) == [0, 1]
    with files.open_plain(path) as plain:
        assert plain.read_bytes() == DATA


def test_who_has_the_key_reads_both_kinds(tmp_path: Path) -> None:
    reader = LocalFiles(Sealer(KEY, "files"))
    assert not reader.seals
    for writer in (PLAIN, SEALED):
        writer.write(tmp_path / "file", DATA)
        with reader.open_plain(tmp_path / "file") as plain:
            assert plain.read_bytes() == DATA


@pytest.mark.parametrize("reader", [PLAIN, LocalFiles(Sealer(new_key(), "files"), seals=True)])
def test_who_has_it_not_reads_nothing(tmp_path: Path, reader: LocalFiles) -> None:
    path = tmp_path / "file"
    SEALED.write(path, DATA)
    with pytest.raises(BadSnapshot, match=r"encrypted|not sealed here"), reader.open_plain(path):
        pass
    with pytest.raises(BadSnapshot, match=r"encrypted|not sealed here"):
        reader.read(path)


@pytest.mark.parametrize("place", [20, CHUNK_BYTES + 100, -1])
def test_what_was_altered_is_noticed(tmp_path: Path, place: int) -> None:
    path = tmp_path / "file"
    SEALED.write(path, DATA)
    spoiled = bytearray(path.read_bytes())
    spoiled[place] ^= 1
    path.write_bytes(spoiled)
    with pytest.raises(BadSnapshot, match="not sealed here"), SEALED.open_plain(path):
        pass
    with pytest.raises(OSError, match="not sealed here"):
        SEALED.list_chunks(path)
    with pytest.raises(OSError, match="not sealed here"):
        SEALED.read_chunk(path, 0 if place == 20 else 1)


def test_a_snapshots_digest_is_of_the_file_as_it_lies_there(tmp_path: Path) -> None:
    SEALED.write(tmp_path / "file", DATA)
    assert chunks_of(tmp_path / "file") != SEALED.list_chunks(tmp_path / "file")
