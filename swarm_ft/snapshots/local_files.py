"""Files on this machine's disk for runs: written whole, read by chunks; sealed or plain.

A sealed file has a header and chunks of CHUNK_BYTES. Each chunk is sealed for its number, so that
it can be read and written alone. The header marks the file as sealed, so a process with the key
reads both kinds.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from swarm_ft.base.private_files import atomic_write, open_private
from swarm_ft.base.sealing import SEAL_BYTES, Sealer
from swarm_ft.digest import KeyedDigest
from swarm_ft.errors import BadSnapshot
from swarm_ft.protocol.messages.shard import CHUNK_BYTES, ChunkList, list_chunks

_HEAD = b"swarm-ft sealed\x01"


class LocalFiles:
    """Reader and writer of local files; see the module's docstring. It blocks: use it in a thread.

    Args:
        sealer: Sealer that opens sealed files; None opens none.
        seals: Whether written files are sealed, too.
    """

    def __init__(self, sealer: Sealer | None = None, *, seals: bool = False) -> None:
        if seals and sealer is None:
            raise ValueError("sealer: expected a sealer for seals=True, got none")
        self._sealer = sealer
        self._sealing = sealer if seals else None

    @property
    def seals(self) -> bool:
        """Whether written files are sealed."""
        return self._sealing is not None

    # ---- whole files

    def write(self, path: Path, data: bytes) -> None:
        """Write a file, whole and private, and replace the file at its path.

        Raises:
            OSError: The file cannot be written.
        """
        self.write_pieces(path, [data])

    def write_pieces(self, path: Path, pieces: Iterable[bytes]) -> None:
        """Write a file like `write`, from pieces; only a piece and a chunk are in memory at once.

        Raises:
            OSError: The file cannot be written.
        """
        with atomic_write(path) as partial, open_private(partial, "wb") as file:
            if self._sealing is None:
                file.writelines(pieces)
                return
            file.write(_HEAD)
            for index, chunk in enumerate(_in_chunks(pieces)):
                file.write(self._sealing.seal(chunk, _place(index)))

    def read(self, path: Path) -> bytes:
        """Return the plain bytes of a file.

        Raises:
            BadSnapshot: The file is sealed with another key, or was altered.
            OSError: The file cannot be read.
        """
        return b"".join(self._plain(path)) if _is_sealed(path) else path.read_bytes()

    def can_be_mapped(self, path: Path) -> bool:
        """Whether `reading` can open the file; a sealed one needs a file in memory, as on Linux.

        Raises:
            OSError: The file cannot be read.
        """
        return hasattr(os, "memfd_create") or not _is_sealed(path)

    @contextmanager
    def open_plain(self, path: Path) -> Iterator[Path]:
        """Yield the path of a file with the plain bytes, valid in the context (mapped: longer).

        The plain bytes of a sealed file lie in memory, under no name that others could open.

        Raises:
            BadSnapshot: The file is sealed with another key, or was altered.
            OSError: The file cannot be read.
        """
        if not _is_sealed(path):
            yield path
            return
        with open(os.memfd_create("swarm-ft"), "r+b") as memory:
            for chunk in self._plain(path):
                memory.write(chunk)
            memory.flush()
            yield Path(f"/proc/self/fd/{memory.fileno()}")

    def _plain(self, path: Path) -> Iterator[bytes]:
        if self._sealer is None:
            raise BadSnapshot(f"{path}: it is encrypted, and this process has no key for it")
        try:
            yield from _opened(path, self._sealer)
        except ValueError as error:
            raise BadSnapshot(f"{path}: {error}") from None

    def list_chunks(self, path: Path, *digests_too: KeyedDigest) -> ChunkList:
        """Read a file of this process once, and digest its plain bytes, also into `digests_too`.

        Raises:
            OSError: The file cannot be read, or was altered.
        """
        if self._sealing is None:
            return chunks_of(path, *digests_too)
        try:
            return list_chunks(_opened(path, self._sealing), *digests_too)
        except ValueError as error:
            raise OSError(f"{path}: {error}") from None

    # ---- chunk by chunk

    def read_chunk(self, path: Path, index: int) -> bytes:
        """Return a chunk of a file of this process; shorter or empty at the file's end.

        Raises:
            OSError: The file cannot be read, or was altered.
        """
        with path.open("rb") as file:
            try:
                return self._read(file, index)
            except ValueError as error:
                raise OSError(f"{path}, chunk {index}: {error}") from None

    def make_room(self, path: Path, chunks: ChunkList) -> list[int]:
        """Make a file as long as these chunks need; return the numbers of the chunks that it holds.

        Raises:
            OSError: The disk refuses.
        """
        total_bytes = chunks.total_bytes
        if self.seals:
            total_bytes += len(_HEAD) + len(chunks) * SEAL_BYTES
        with open_private(path, "a+b") as file:
            if self.seals and not file.tell():
                file.write(_HEAD)
            file.truncate(total_bytes)
            return [i for i in range(len(chunks)) if self._holds(file, chunks, i)]

    def write_chunk(self, path: Path, index: int, chunk: bytes | bytearray) -> None:
        """Write a chunk into a file with room for it.

        Raises:
            OSError: The chunk cannot be written.
        """
        data = chunk if self._sealing is None else self._sealing.seal(chunk, _place(index))
        # Each write has its own file object: one that outlives its caller reaches no other file.
        with path.open("r+b") as file:
            file.seek(self._offset(index))
            file.write(data)

    def _read(self, file: IO[bytes], index: int) -> bytes:
        file.seek(self._offset(index))
        if self._sealing is None:
            return file.read(CHUNK_BYTES)
        return self._sealing.open(file.read(CHUNK_BYTES + SEAL_BYTES), _place(index))

    def _holds(self, file: IO[bytes], chunks: ChunkList, index: int) -> bool:
        try:
            return chunks.holds(index, self._read(file, index))
        except ValueError:
            return False  # a gap does not open with any key

    def _offset(self, index: int) -> int:
        if self._sealing is None:
            return index * CHUNK_BYTES
        return len(_HEAD) + index * (CHUNK_BYTES + SEAL_BYTES)


PLAIN = LocalFiles()
"""Reader and writer of plain files, for processes that seal nothing."""


def chunks_of(path: Path, *digests_too: KeyedDigest) -> ChunkList:
    """Read a local file once without opening a seal, and digest it, also into `digests_too`.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        return list_chunks(iter(lambda: file.read(CHUNK_BYTES), b""), *digests_too)


def _in_chunks(pieces: Iterable[bytes]) -> Iterator[bytearray]:
    chunk = bytearray()
    for piece in pieces:
        rest = memoryview(piece)
        while rest:
            room = CHUNK_BYTES - len(chunk)
            chunk += rest[:room]
            rest = rest[room:]
            if len(chunk) == CHUNK_BYTES:
                yield chunk
                chunk = bytearray()
    if chunk:
        yield chunk


def _is_sealed(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_HEAD)) == _HEAD


def _opened(path: Path, sealer: Sealer) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(len(_HEAD))
        sealed = iter(lambda: file.read(CHUNK_BYTES + SEAL_BYTES), b"")
        for index, chunk in enumerate(sealed):
            yield sealer.open(chunk, _place(index))


def _place(index: int) -> bytes:
    return b"chunk" + index.to_bytes(8, "little")
