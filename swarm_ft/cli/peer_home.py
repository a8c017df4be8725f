"""Where a peer keeps what is to outlive it on this machine: its name and its buffers."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from swarm_ft.errors import BadOption

MAX_NAMELESS_PEERS = 64
"""Of one user on one machine."""


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
            return file.read_text(encoding="utf-8").strip()
        file.write_text(f"{drawn}\n", encoding="utf-8")
        return drawn


def claim_home(name: str | None, directory: Path | None) -> PeerHome:
    """A home for a peer: the named directory, one by its name, or the first that is free.

    A peer without a name that is started again so finds what it left.

    Raises:
        BadOption: others use it, or it cannot be made.
    """
    path = directory or _homes()
    try:
        for candidate in _candidates(name, directory):
            lock = _locked(candidate)
            if lock is not None:
                return PeerHome(candidate, lock)
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
        yield _homes() / name
    else:
        yield from (_homes() / str(number) for number in range(MAX_NAMELESS_PEERS))


def _homes() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "swarm-ft" / "peers"


def _locked(path: Path) -> IO[bytes] | None:
    """The directory's lock; None if another process has it."""
    path.mkdir(parents=True, exist_ok=True)
    lock = (path / "lock").open("ab")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return lock
