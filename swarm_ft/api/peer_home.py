"""The home of a peer on this machine: a directory with its key or name, and its buffers."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated

from swarm_ft.base.private_files import make_private, open_private, private_folder
from swarm_ft.base.systems import lock_file
from swarm_ft.errors import BadOption
from swarm_ft.protocol.spec.bounds import Range
from swarm_ft.protocol.spec.options import Option, Size, check

KEY_FILE, LOCK_FILE = "key.pem", "lock"
CACHES = {
    "buffers": "buffers of samples; a run that goes on sends them again",
    "work": "states and results under way",
    "kept": "backups of others' stages; runs that go on lose them",
    "models": "models from the hub",
}
"""Descriptions of the folders in a peer's home that hold no key, by name."""
MAX_NAMELESS_PEERS = 64
"""Maximum number of one user's peers without a name on one machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferOptions:
    """Options for a peer's sample buffers: memory, disk, place and lifetime."""

    memory_bytes: Annotated[
        int,
        Size(),
        Option(
            "Memory for sample buffers (--fw aq...). The peer evicts those first that it needs "
            "last.",
            name="buffer-memory",
        ),
    ] = 2 << 30
    disk_bytes: Annotated[
        int,
        Size(),
        Option(
            "Disk for sample buffers; with 0 none are on disk, and a restart loses them.",
            name="buffer-disk",
        ),
    ] = 50 << 30
    directory: Annotated[
        Path | None,
        Option(
            "Directory for sample buffers, a separate one per peer.",
            name="buffer-dir",
            metavar="DIR",
            default="under ~/.cache/swarm-ft",
        ),
    ] = None
    keep_days: Annotated[
        int,
        Range(1),
        Option(
            "Days without a write after which the peer deletes a run's buffers, unless the "
            "coordinator reports earlier that the run is over.",
            name="buffer-days",
        ),
    ] = 7

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True)
class PeerHome:
    """A directory that this process has locked.

    Attributes:
        path: Path of the directory.
        lock: Open lock file, which keeps other processes out.
    """

    path: Path
    lock: IO[bytes]

    def close(self) -> None:
        """Release the lock."""
        self.lock.close()

    def name(self, drawn: str) -> str:
        """Return the name that an earlier start stored here, or store and return `drawn`."""
        file = self.path / "peer-id"
        if file.exists():
            make_private(file)
            return file.read_text(encoding="utf-8").strip()
        with open_private(file, "wb") as new:
            new.write(f"{drawn}\n".encode())
        return drawn


def work_folder(home: PeerHome | None) -> tempfile.TemporaryDirectory[str]:
    """Create a folder for states and results, and delete those that a killed peer left.

    Without a home it is an ordinary temporary directory, which a killed process leaves behind.
    """
    parent = private_folder(home.path / "work") if home else None
    for left in parent.iterdir() if parent else ():
        shutil.rmtree(left, ignore_errors=True)
    return tempfile.TemporaryDirectory(prefix="swarm-ft-", dir=parent, ignore_cleanup_errors=True)


def claim_home(name: str | None, directory: Path | None) -> PeerHome:
    """Lock a home for a peer: the directory, or that of its name, or the first free one.

    So a peer without a name finds its files again after a restart.

    Raises:
        BadOption: Another peer uses the home, or it cannot be created.
    """
    path = directory or homes()
    try:
        for candidate in _candidates(name, directory):
            home = lock_home(candidate)
            if home is not None:
                return home
    except OSError as error:
        raise BadOption(
            f"--buffer-dir {path}: {error.strerror}; choose a writable directory, or use no disk, "
            "with --buffer-disk 0"
        ) from error
    raise BadOption(f"--buffer-dir {path}: another peer uses it; choose a directory of its own")


def _candidates(name: str | None, directory: Path | None) -> Iterator[Path]:
    if directory is not None:
        yield directory
    elif name is not None:
        yield homes() / name
    else:
        yield from (homes() / str(number) for number in range(MAX_NAMELESS_PEERS))


def cache_folder() -> Path:
    """Return the folder of this user's caches."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return Path(cache) if cache else Path.home() / ".cache"


def homes() -> Path:
    """Return the default folder of peers' homes."""
    return cache_folder() / "swarm-ft" / "peers"


def lock_home(path: Path) -> PeerHome | None:
    """Lock a home for this process; return None if another process has locked it.

    Raises:
        OSError: The folder cannot be written to.
    """
    private_folder(path)
    lock = open_private(path / LOCK_FILE, "ab")
    if not lock_file(lock.fileno()):
        lock.close()
        return None
    return PeerHome(path, lock)
