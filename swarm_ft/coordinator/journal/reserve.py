"""Room on the disk that is kept for runs under way: a file that is deleted when they need it.

Whoever else fills the disk, commits go on for as long as that lasts, and no job is taken in
meanwhile. With a disk that has room again comes the file.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from swarm_ft.log import get_logger
from swarm_ft.private_files import open_private
from swarm_ft.systems import reserve

logger = get_logger(__name__)

RESERVE_BYTES = 64 << 20
"""A commit is a few kilobytes, so this is tens of thousands of them."""


class Reserve:
    """The file at `path`, of `num_bytes`; of 0 there is none, and nothing is kept."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        self._path = path
        self._num_bytes = num_bytes
        self.hold()

    def hold(self) -> bool:
        """Whether the room is kept; it is from now on, if there is as much."""
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
        """Let runs under way have the room; whether there was any."""
        try:
            self._path.unlink()
        except OSError:
            return False
        logger.warning("%s: the disk is full, its reserve is in use; make room", self._path)
        return True
