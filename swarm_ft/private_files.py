"""Files that their owner alone may read, whatever the umask; that are whole; that stay."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

FILE_MODE = 0o600
FOLDER_MODE = 0o700
HAS_MODES = hasattr(os, "geteuid") and hasattr(os, "fchmod")
"""Windows has none: what is below a user's folder is that user's by what the folder hands down."""


def private_folder(path: Path) -> Path:
    """Make a folder, with those above it, or take one that is there; see `make_private`.

    Raises:
        OSError: it cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=FOLDER_MODE, exist_ok=True)
    make_private(path)
    return path


def make_private(path: Path) -> None:
    """Take the rights of others to a file or folder of ours away, if they have any.

    A folder like /tmp, in which all may make files and nobody may touch another's, stays as it is.

    Raises:
        OSError: it is not there.
    """
    if not HAS_MODES:
        return
    found = path.stat()
    is_ours = found.st_uid == os.geteuid() and not found.st_mode & stat.S_ISVTX
    if is_ours and found.st_mode & 0o077:
        path.chmod(found.st_mode & 0o700)


def open_private(path: Path, mode: str) -> IO[bytes]:
    """`path.open(mode)`, in binary; the file is its owner's alone from its first byte on.

    Raises:
        OSError: as `open` does.
    """
    file: IO[bytes] = open(path, mode, opener=_opener)  # noqa: SIM115  # the caller closes it
    if HAS_MODES:
        os.fchmod(file.fileno(), FILE_MODE)
    return file


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Where to write what is to be at `path`: it is there whole, and private, or not at all.

    Yields:
        A name beside it; nothing is left there if the block fails.

    Raises:
        OSError: it cannot be renamed.
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
    """Wait until a file's bytes, or a folder's entries, would outlive a power cut.

    Raises:
        OSError: the disk refuses.
    """
    if not HAS_MODES and path.is_dir():
        return  # Windows opens no folders, and flushes nothing that is open for reading alone
    descriptor = os.open(path, os.O_RDONLY if HAS_MODES else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags, FILE_MODE)
