"""Files that only their owner can read, that are written whole, and that survive a power cut."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

FILE_MODE = 0o600
FOLDER_MODE = 0o700


def private_folder(path: Path) -> Path:
    """Create a folder and its parents, or make an existing one private; see `make_private`.

    Raises:
        OSError: The folder cannot be created.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=FOLDER_MODE, exist_ok=True)
    make_private(path)
    return path


def make_private(path: Path) -> None:
    """Remove other users' rights to a file or folder that this user owns.

    A shared folder with the sticky bit, like /tmp, stays as it is.

    Raises:
        OSError: The path does not exist.
    """
    found = path.stat()
    is_ours = found.st_uid == os.geteuid() and not found.st_mode & stat.S_ISVTX
    if is_ours and found.st_mode & 0o077:
        path.chmod(found.st_mode & 0o700)


def open_private(path: Path, mode: str) -> IO[bytes]:
    """Open a file like `path.open(mode)`, in binary, readable by its owner alone from the start.

    Raises:
        OSError: The file cannot be opened.
    """
    file: IO[bytes] = open(path, mode, opener=_opener)  # noqa: SIM115  # the caller closes it
    os.fchmod(file.fileno(), FILE_MODE)
    return file


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Write a file whole and private, or not at all.

    Yields:
        A path beside `path` to write to; the end of the block renames it, and an error removes it.

    Raises:
        OSError: The file cannot be renamed.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        yield partial
        make_private(partial)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def flush_to_disk(path: Path) -> None:
    """Wait until a file's bytes, or a folder's entries, survive a power cut.

    Raises:
        OSError: The disk refuses.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags, FILE_MODE)
