"""Where a peer keeps what is to outlive it on this machine: its key or name, and its buffers."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated

from swarm_ft.errors import BadOption
from swarm_ft.private_files import make_private, open_private, private_folder
from swarm_ft.protocol.spec.bounds import Range
from swarm_ft.protocol.spec.options import Option, Size, check
from swarm_ft.systems import lock_file

KEY_FILE, LOCK_FILE = "key.pem", "lock"
CACHES = {
    "buffers": "buffers of samples; a run that goes on sends them again",
    "work": "states and results under way",
    "kept": "backups of others' stages; runs that go on lose them",
    "models": "models from the hub",
}
"""Folders in a peer's home that hold no key, with their contents for people."""
MAX_NAMELESS_PEERS = 64
"""Of one user on one machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferOptions:
    """What a peer lends to samples' buffers, and where."""

    memory_bytes: Annotated[
        int,
        Size(),
        Option(
            "Memory for sample buffers (--fw aq...). The peer evicts those first that it needs "
            "last.",
            name="buffer-memory",
            default="2GiB",
        ),
    ] = 2 << 30
    disk_bytes: Annotated[
        int,
        Size(),
        Option(
            "Disk for sample buffers; with 0 none are on disk, and a restart loses them.",
            name="buffer-disk",
            default="50GiB",
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
    """A directory that belongs to this process as long as it lives.

    Attributes:
        lock: keeps others out while it is open.
    """

    path: Path
    lock: IO[bytes]

    def close(self) -> None:
        """Leave it to others."""
        self.lock.close()

    def name(self, drawn: str) -> str:
        """The name that an earlier start drew and left here; without one, `drawn`, left here."""
        file = self.path / "peer-id"
        if file.exists():
            make_private(file)
            return file.read_text(encoding="utf-8").strip()
        with open_private(file, "wb") as new:
            new.write(f"{drawn}\n".encode())
        return drawn


def work_folder(home: PeerHome | None) -> tempfile.TemporaryDirectory[str]:
    """For states and results on their way; what a start that was killed left of them is deleted.

    Without a home it is wherever temporary files are, and a killed process leaves it there.
    """
    parent = private_folder(home.path / "work") if home else None
    for left in parent.iterdir() if parent else ():
        shutil.rmtree(left, ignore_errors=True)
    return tempfile.TemporaryDirectory(prefix="swarm-ft-", dir=parent, ignore_cleanup_errors=True)


def claim_home(name: str | None, directory: Path | None) -> PeerHome:
    """A home for a peer: the named directory, one by its name, or the first that is free.

    A peer without a name that is started again so finds what it left.

    Raises:
        BadOption: others use it, or it cannot be made.
    """
    path = directory or homes()
    try:
        for candidate in _candidates(name, directory):
            home = lock_home(candidate)
            if home is not None:
                return home
    except OSError as error:
        raise BadOption(
            f"--buffer-dir {path}: {error.strerror}; name a directory that can be written to, or "
            "keep no buffers on disk, with --buffer-disk 0"
        ) from error
    raise BadOption(f"--buffer-dir {path}: another peer uses it; each needs one of its own")


def _candidates(name: str | None, directory: Path | None) -> Iterator[Path]:
    if directory is not None:
        yield directory
    elif name is not None:
        yield homes() / name
    else:
        yield from (homes() / str(number) for number in range(MAX_NAMELESS_PEERS))


def cache_folder() -> Path:
    """Where this user's programs keep what they could do without."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return Path(cache) if cache else Path.home() / ".cache"


def homes() -> Path:
    """Where peers' homes are, if they were told no other place."""
    return cache_folder() / "swarm-ft" / "peers"


def lock_home(path: Path) -> PeerHome | None:
    """Make a home the caller's; None if another process has it.

    Raises:
        OSError: the folder cannot be written to.
    """
    private_folder(path)
    lock = open_private(path / LOCK_FILE, "ab")
    if not lock_file(lock.fileno()):
        lock.close()
        return None
    return PeerHome(path, lock)
