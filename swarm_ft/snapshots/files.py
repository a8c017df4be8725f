"""Files below one fsspec url, without knowledge of snapshots.

On a local file system only the owner can read the files, unless the folder's group may write to it:
then peers of several users share it, and new files have the folder's rights.

A write on a local file system is whole or absent. Elsewhere the service decides; object stores show
a file once its upload is complete.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from swarm_ft.base.private_files import flush_to_disk, private_folder
from swarm_ft.errors import BadOption, Unavailable
from swarm_ft.protocol.messages.shard import CHUNK_BYTES, ChunkList, list_chunks


class StoredFiles:
    """Files below a url; paths are relative to the url, with slashes."""

    def __init__(self, url: str) -> None:
        """Parse the url, without a connection.

        Raises:
            BadOption: fsspec knows no such url, or lacks the package that serves it.
        """
        self.url = url
        try:
            self._fs, self._root = url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise BadOption(f"snapshots at '{url}': {error}") from error
        self.is_local = isinstance(self._fs, LocalFileSystem)

    def local_path(self, path: str) -> Path:
        """Return the local path of a file; call this only if `is_local`."""
        return Path(self._full(path))

    def move_in(self, source: Path, path: str) -> None:
        """Move a local file to `path`, and replace the file there.

        Raises:
            Unavailable: The file cannot be written now.
        """
        with self._as_unavailable(f"{path} cannot be written"):
            self._make_folder(path)
            if self.is_local:
                _move(source, self.local_path(path))
            else:
                self._fs.put_file(str(source), self._full(path))
                source.unlink()

    def write(self, path: str, data: bytes) -> None:
        """Write a small file, and replace the file at its path.

        Raises:
            Unavailable: The file cannot be written now.
        """
        with self._as_unavailable(f"{path} cannot be written"):
            self._make_folder(path)
            if self.is_local:
                target = self.local_path(path)
                source = target.with_name(f"{target.name}.new")
                source.write_bytes(data)
                _move(source, target)
            else:
                self._fs.pipe_file(self._full(path), data)

    def read(self, path: str, max_bytes: int) -> bytes | None:
        """Return a file's first `max_bytes` bytes; None if there is no file.

        Raises:
            Unavailable: The file cannot be read now.
        """
        with self._as_unavailable(f"{path} cannot be read"):
            try:
                with self._fs.open(self._full(path), "rb") as file:
                    return bytes(file.read(max_bytes))
            except FileNotFoundError:
                return None

    def copy_out(self, path: str, target: Path) -> None:
        """Copy a file to a local path.

        Raises:
            Unavailable: The file cannot be read now.
        """
        with self._as_unavailable(f"{path} cannot be read"):
            self._fs.get_file(self._full(path), str(target))

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the bytes of each file in a folder by name; empty if there is no folder.

        Raises:
            Unavailable: The folder cannot be read now.
        """
        entries = self._entries(folder)
        return {_name(entry): int(entry["size"]) for entry in entries if entry["type"] == "file"}

    def folders(self, folder: str) -> list[str]:
        """Return the names of the folders in a folder; empty if there is no folder.

        Raises:
            Unavailable: The folder cannot be read now.
        """
        return [_name(entry) for entry in self._entries(folder) if entry["type"] == "directory"]

    def chunks(self, path: str) -> ChunkList:
        """Read a file once, and return the digests of its chunks.

        Raises:
            Unavailable: The file is missing, or cannot be read now.
        """
        with (
            self._as_unavailable(f"{path} cannot be read"),
            self._fs.open(self._full(path), "rb") as file,
        ):
            return list_chunks(iter(lambda: file.read(CHUNK_BYTES), b""))

    def remove(self, path: str) -> None:
        """Remove a file, if it exists.

        Raises:
            Unavailable: The file cannot be removed now.
        """
        with self._as_unavailable(f"{path} cannot be removed"):
            try:
                self._fs.rm_file(self._full(path))
            except FileNotFoundError:
                return

    def remove_folder(self, folder: str) -> None:
        """Remove a folder with its content, if it exists.

        Raises:
            Unavailable: The folder cannot be removed now.
        """
        with self._as_unavailable(f"{folder} cannot be removed"):
            try:
                self._fs.rm(self._full(folder), recursive=True)
            except FileNotFoundError:
                return

    def _entries(self, folder: str) -> list[dict[str, str]]:
        with self._as_unavailable(f"{folder} cannot be read"):
            self._fs.invalidate_cache()  # other processes write to this folder too
            try:
                entries: list[dict[str, str]] = self._fs.ls(self._full(folder), detail=True)
            except FileNotFoundError:
                return []
            return entries

    def _make_folder(self, path: str) -> None:
        if self.is_local:
            self._make_local_folder(self.local_path(path).parent)
        else:
            self._fs.makedirs(self._full(path).rpartition("/")[0], exist_ok=True)

    def _make_local_folder(self, folder: Path) -> None:
        root = Path(self._root)
        if not (root.is_dir() and root.stat().st_mode & stat.S_IWGRP):
            private_folder(root)
        mode = stat.S_IMODE(root.stat().st_mode)
        for level in (*reversed(folder.parents), folder):
            if level.is_relative_to(root) and not level.is_dir():
                level.mkdir(exist_ok=True)
                level.chmod(mode)

    def _full(self, path: str) -> str:
        return f"{self._root.rstrip('/')}/{path}"

    @contextmanager
    def _as_unavailable(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise Unavailable(f"snapshots at '{self.url}': {what}: {error}") from error


def _name(entry: dict[str, str]) -> str:
    return entry["name"].rstrip("/").rpartition("/")[2]


def _move(source: Path, target: Path) -> None:
    """Rename `source` into place once its bytes are on the disk, also from another disk."""
    partial = target.with_name(f"{target.name}.partial")
    shutil.move(source, partial)
    # safetensors writes with the owner's rights alone; users of a shared folder need to read it.
    partial.chmod(target.parent.stat().st_mode & 0o666)
    flush_to_disk(partial)
    os.replace(partial, target)
    flush_to_disk(target.parent)
