"""A machine's disk: the journal in a real SQLite file, which outlives the process that wrote it.

A killed process closes nothing. Its commits are in the file and its write-ahead log, and both are
copied as they are. SQLite then recovers from them as after a crash.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from swarm_ft.coordinator.facts.events import Record
from swarm_ft.coordinator.facts.state import Run
from swarm_ft.coordinator.journal.journal import Journal
from swarm_ft.coordinator.journal.tokens import NewTokenFile, TokenFiles
from swarm_ft.errors import JournalError
from swarm_ft.ids import RunId
from swarm_ft.protocol.spec.run_spec import RunSpec


class Disk:
    """A folder that can be full.

    Args:
        root: an existing folder for this machine alone.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.is_full = False
        self._generation = 0

    @property
    def journal(self) -> Path:
        """The journal's file."""
        folder = self.root / f"journal-{self._generation}"
        folder.mkdir(exist_ok=True)
        return folder / "journal.db"

    def reopen(self) -> None:
        """A process of before may have been killed: go on with the files as they lie there now."""
        old = self.journal
        self._generation += 1
        # Not -shm: it is an index of the log, which SQLite makes again.
        but = shutil.ignore_patterns("*-shm")
        shutil.copytree(old.parent, self.journal.parent, ignore=but, dirs_exist_ok=True)

    def check(self) -> None:
        """Check that there is room.

        Raises:
            OSError: there is none.
        """
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")


class _DiskTokens(TokenFiles):
    """Token files on a disk that may be full."""

    def __init__(self, disk: Disk, folder: Path) -> None:
        super().__init__(folder)
        self._disk = disk

    def begin(self, run_id: RunId, spec: RunSpec) -> NewTokenFile:
        """See `TokenFiles.begin`."""
        if self._disk.is_full:
            raise JournalError(f"tokens in {self.folder}: no space left on device")
        return super().begin(run_id, spec)


class DiskJournal(Journal):
    """A journal on a disk that may be full; a refused transaction leaves nothing.

    Args:
        disk: where it lies.
        on_write: called with the changes that became durable.
    """

    def __init__(self, disk: Disk, on_write: Callable[[Sequence[Record]], None]) -> None:
        super().__init__(str(disk.journal))
        self.tokens = _DiskTokens(disk, self.tokens.folder)
        self._disk = disk
        self._on_write = on_write

    def write(self, records: Iterable[Record]) -> None:
        """See `Journal.write`."""
        listed = list(records)
        if listed:
            self._check()
        super().write(listed)
        self._on_write(listed)

    def write_run(self, run: Run, data_digest: bytes) -> None:
        """See `Journal.write_run`."""
        self._check()
        super().write_run(run, data_digest)

    def _check(self) -> None:
        if self._disk.is_full:
            raise JournalError(f"journal {self._disk.journal}: database or disk is full")
