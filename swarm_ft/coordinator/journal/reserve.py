"""Disk space reserved for current runs: a file that is deleted when they need it.

If other programs fill the disk, commits go on as long as the reserve lasts, and no new job is
accepted. The file is created again when the disk has room.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from swarm_ft.base.log import get_logger
from swarm_ft.base.private_files import open_private
from swarm_ft.base.systems import reserve

logger = get_logger(__name__)

RESERVE_BYTES = 64 << 20
"""Bytes of the reserve. A commit has a few kilobytes, so this is tens of thousands of them."""


class Reserve:
    """A file at `path` with `num_bytes`; with 0 bytes there is no file and no reserve."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        self._path = path
        self._num_bytes = num_bytes
        self.ensure()

    def ensure(self) -> bool:
        """Create the file if the disk has the room; return whether it is there."""
        if not self._num_bytes:
            return True
        try:
            with open_private(self._path, "ab") as file:
                reserve(file, self._num_bytes)
        except OSError as error:
            logger.warning(
                "%s: %d bytes cannot be reserved: %s", self._path, self._num_bytes, error
            )
            with suppress(OSError):
                self._path.unlink()
            return False
        return True

    def release(self) -> bool:
        """Delete the file, so that current runs have its room; return whether it existed."""
        try:
            self._path.unlink()
        except OSError:
            return False
        logger.warning("%s: the disk is full, the reserve is in use; free some space", self._path)
        return True
