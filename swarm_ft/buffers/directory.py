"""The directory of a peer's buffers: one folder a run, one process at a time."""

from __future__ import annotations

import fcntl
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from swarm_ft.buffers.slab import Owner
from swarm_ft.errors import BadOption
from swarm_ft.log import get_logger
from swarm_ft.protocol.digest import digest_of

logger = get_logger(__name__)

_RUN_PREFIX = "run-"


@dataclass(frozen=True, slots=True)
class OtherRun:
    """Files that some other run, or a run of another spec, left here."""

    path: Path
    num_bytes: int

    def remove(self) -> None:
        """Delete them, as far as the system lets us."""
        logger.info("%s: deleted, %d bytes of another run's buffers", self.path, self.num_bytes)
        shutil.rmtree(self.path, ignore_errors=True)


class BufferDirectory:
    """The directory while this process has it.

    Attributes:
        own: the folder of this run and spec; made when the first record is written.
        others: what other runs left, the oldest last.

    Raises:
        BadOption: it cannot be used, or another process uses it.
    """

    def __init__(self, path: Path, owner: Owner) -> None:
        name = digest_of(owner.run_id.encode(), owner.identity).hex()
        self.own = path / f"{_RUN_PREFIX}{name}"
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise BadOption(f"buffers in {path}: the directory cannot be used: {error}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.others = self._find_others(path)
        except BlockingIOError as error:
            os.close(self._lock)
            raise BadOption(
                f"buffers in {path}: another process uses this directory; give each its own"
            ) from error
        except OSError as error:
            os.close(self._lock)
            raise BadOption(f"buffers in {path}: the directory cannot be used: {error}") from error

    def _find_others(self, path: Path) -> list[OtherRun]:
        folders = [p for p in path.glob(f"{_RUN_PREFIX}*") if p.is_dir() and p != self.own]
        folders.sort(key=lambda p: p.stat().st_mtime, reverse=True)
        found = [OtherRun(p, sum(f.stat().st_size for f in p.iterdir())) for p in folders]
        for other in found:
            logger.info("%s: another run's buffers, not used; they go first", other.path)
        return found

    @property
    def other_bytes(self) -> int:
        """Of all that other runs left."""
        return sum(other.num_bytes for other in self.others)

    def slab_path(self, payload_bytes: int) -> Path:
        """The file of records of one size."""
        return self.own / f"{payload_bytes}.slab"

    def slab_sizes(self) -> list[int]:
        """Payload bytes of the files that are here."""
        names = [p.stem for p in self.own.glob("*.slab")]
        return sorted(int(name) for name in names if name.isdecimal())

    def forget(self) -> None:
        """Delete this run's files."""
        shutil.rmtree(self.own, ignore_errors=True)

    def close(self) -> None:
        """Let another process have it."""
        os.close(self._lock)
