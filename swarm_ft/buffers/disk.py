"""The disk tier: finds, places and evicts records on disk.

A run has a folder with several slabs. A slab is a file of slots of one size, and its `SlotTable`
knows which slots are free. The tier decides where records are; `Slab` reads and writes payloads,
outside of the store's lock. A new version of a record goes to another slot than the old one, which
is free only once the write has succeeded. A torn write therefore leaves the old version whole.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from swarm_ft.base.log import get_logger
from swarm_ft.base.private_files import private_folder
from swarm_ft.base.systems import lock_file
from swarm_ft.buffers.memory import Visits
from swarm_ft.buffers.records import NOWHERE, BufferKey, End, Index
from swarm_ft.buffers.slab import PAGE_BYTES, Slab, SlabError, SlabIdentity, SlotTable, run_of
from swarm_ft.digest import digest_of
from swarm_ft.errors import BadOption
from swarm_ft.ids import BlockIndex, RunId

# ---- the directory of a peer's buffers: one folder a run, one process at a time

logger = get_logger(__name__)

_RUN_PREFIX = "run-"


@dataclass(frozen=True, slots=True)
class DeleteJob:
    """Deletion of a folder with buffers of another run, or of this run with another spec.

    Attributes:
        path: Folder of the other run.
        num_bytes: Bytes of its files.
    """

    path: Path
    num_bytes: int

    def run(self) -> None:
        """Delete the folder to make room; errors of the file system are ignored."""
        logger.info("%s: deleted %d bytes of another run's buffers", self.path, self.num_bytes)
        shutil.rmtree(self.path, ignore_errors=True)


class BufferDirectory:
    """The directory of a peer's buffers, locked by this process.

    Attributes:
        own: Folder of this run and spec. The first record that is written creates it.
        others: One job for each folder of another run, to delete it if space is needed; the oldest
            folder is last.

    Raises:
        BadOption: The directory cannot be used, or another process uses it.
    """

    def __init__(self, path: Path, owner: SlabIdentity) -> None:
        name = digest_of(owner.run_id.encode(), owner.identity).hex()
        self.own = path / f"{_RUN_PREFIX}{name}"
        try:
            private_folder(path)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                if not lock_file(self._lock):
                    raise BadOption(
                        f"buffers in {path}: another process uses this directory; give each its own"
                    )
                self.others = self._find_others(path)
            except BaseException:
                os.close(self._lock)  # nobody could call `close`
                raise
        except OSError as error:
            raise BadOption(f"buffers in {path}: the directory cannot be used: {error}") from error

    def _find_others(self, path: Path) -> list[DeleteJob]:
        folders = [p for p in path.glob(f"{_RUN_PREFIX}*") if p.is_dir() and p != self.own]
        folders.sort(key=lambda p: p.stat().st_mtime, reverse=True)
        found = [DeleteJob(p, sum(f.stat().st_size for f in p.iterdir())) for p in folders]
        for other in found:
            logger.info("%s: buffers of another run; deleted first if space is needed", other.path)
        return found

    @property
    def other_bytes(self) -> int:
        """Bytes of all files of other runs."""
        return sum(other.num_bytes for other in self.others)

    def slab_path(self, payload_bytes: int) -> Path:
        """Return the path of the file for records of at most `payload_bytes`."""
        return self.own / f"{payload_bytes}.slab"

    def slab_sizes(self) -> list[int]:
        """Return the payload bytes of the slab files in this run's folder, rising."""
        names = [p.stem for p in self.own.glob("*.slab")]
        return sorted(int(name) for name in names if name.isdecimal())

    def forget(self) -> None:
        """Delete this run's files."""
        shutil.rmtree(self.own, ignore_errors=True)

    def close(self) -> None:
        """Release the lock, so that another process can use the directory."""
        os.close(self._lock)


def find_runs(path: Path) -> dict[Path, RunId]:
    """Return the folders of runs in a directory, with the run of each.

    A folder whose slab files do not name a run is left out.

    Raises:
        OSError: The directory cannot be read.
    """
    found: dict[Path, RunId] = {}
    for folder in path.glob(f"{_RUN_PREFIX}*"):
        runs = (run_of(slab) for slab in folder.glob("*.slab"))
        run_id = next((run for run in runs if run is not None), None)
        if run_id is not None:
            found[folder] = run_id
    return found


def folders_older_than(path: Path, unix_s: float) -> list[Path]:
    """Return the folders of runs in which nothing was written since `unix_s`.

    Raises:
        OSError: The directory cannot be read.
    """
    folders = [folder for folder in path.glob(f"{_RUN_PREFIX}*") if folder.is_dir()]
    return [f for f in folders if max(p.stat().st_mtime for p in (f, *f.iterdir())) < unix_s]


# ---- the tier

_SLOT_BITS = 40
"""Bits of a slot's number in the index, which joins it with the number of the slot's table."""
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of a write to a full disk, or beyond the user's share of it."""
_WRITES_UNTIL_GROWING_AGAIN = 256
"""Writes until the tier tries again to extend files, after the disk was full."""
EXACT_SIZES = 16
"""Number of payload sizes that get a file of their own; other sizes share files.

Samples may have many lengths, and a process may open few files.
"""


@dataclass(frozen=True, slots=True)
class Place:
    """A slot that holds, or will hold, one version of a record."""

    table: SlotTable
    slot: int
    version: int

    @property
    def slab(self) -> Slab:
        """File of the slot."""
        return self.table.slab


class DiskTier:
    """The disk tier of one run's buffers; see the module.

    Args:
        quota_bytes: Limit of all files in the directory, other runs' included; None: no limit.
        visits: Order in which samples are needed.
        index: Index in which the tier stores the place of each record.

    Attributes:
        next_version: A version number above those of all records on disk.
        evicted: Keys of evicted records that the caller has not collected yet.
    """

    def __init__(
        self,
        directory: BufferDirectory,
        owner: SlabIdentity,
        quota_bytes: int | None,
        *,
        visits: Visits,
        index: Index,
    ) -> None:
        self._directory, self._owner, self._quota_bytes = directory, owner, quota_bytes
        self._visits, self._index = visits, index
        self._tables: list[SlotTable] = []  # retired ones stay, since the index has their numbers
        self._by_size: dict[int, SlotTable] = {}  # by payload bytes; without retired tables
        self._bytes: Counter[BlockIndex] = Counter()
        self._warnings: set[str] = set()
        self._writes_without_growing = 0
        self.next_version = 1
        self.evicted: list[BufferKey] = []
        for payload_bytes in directory.slab_sizes():
            self._open(payload_bytes)
        self._delete_others_over_quota()

    def _delete_others_over_quota(self) -> None:
        """Delete the oldest folders of other runs until all files fit the quota."""
        while (oldest := self._oldest_other) is not None and not self._has_room_for(0):
            oldest.run()
            self.on_folder_removed(oldest)

    # ---- where things are

    def find(self, key: BufferKey) -> Place | None:
        """Return the place of a record, or None if it is not on disk."""
        number = self._index.place(key)
        if number == NOWHERE:
            return None
        table, slot = self._table_of(number)
        return Place(table, slot, table.version(slot))

    def bytes_of(self, boundary: BlockIndex) -> int:
        """Return the bytes of the slots that hold records of a boundary."""
        return self._bytes[boundary]

    def drop(self, key: BufferKey) -> None:
        """Remove a record and free its slot."""
        number = self._index.place(key)
        if number != NOWHERE:
            table, slot = self._table_of(number)
            table.free(slot)
            self._unplace(key, table)

    # ---- writing

    def begin_write(
        self, key: BufferKey, version: int, payload_bytes: int, visit: int, step: int
    ) -> Place | DeleteJob | None:
        """Reserve a slot for a record.

        The slot is free, or at the end of a file that may grow, or that of an evicted record.

        Args:
            key: Key of the record.
            version: Version number of the record.
            payload_bytes: Size of the payload.
            visit: Step that needs the record next; a record that is needed later may be evicted for
                it.
            step: Last committed step.

        Returns:
            The reserved slot; or a folder of another run to delete first, after which the caller
            tries again; or None if all records on disk are needed earlier than this one, or the
            file cannot be opened.
        """
        table = self._table_for(self._slab_size(payload_bytes))
        if not isinstance(table, SlotTable):
            return table
        # A record on disk is replaced through a second slot. Without a spare slot a full disk
        # would accept no new version. A new record therefore leaves one slot free.
        num_spare = 0 if self._has_version_in(table, key) else 1
        slot: int | None
        if table.num_free > num_spare:
            slot = table.take_free()
        elif self._try_to_grow((1 + num_spare - table.num_free) * table.slab.slot_bytes):
            slot = table.grow()
        elif self._oldest_other is not None:
            return self._oldest_other
        else:
            slot = self._evict_from(table, visit, step)
        return Place(table, slot, version) if slot is not None else None

    def _table_for(self, payload_bytes: int) -> SlotTable | DeleteJob | None:
        """Return the table with slots of this size, created if necessary.

        Returns:
            The table; or a folder of another run to delete first; or None if there is no room, or
            the file cannot be opened.
        """
        if payload_bytes in self._by_size:
            return self._by_size[payload_bytes]
        if self._try_to_grow(PAGE_BYTES + 2 * self._owner.slot_bytes(payload_bytes)):
            return self._open(payload_bytes)
        return self._oldest_other

    @property
    def _oldest_other(self) -> DeleteJob | None:
        others = self._directory.others
        return others[-1] if others else None

    def finish_write(self, place: Place, key: BufferKey) -> bool:
        """Register a record whose write succeeded.

        Returns:
            Whether the slot counts: False if its file was retired meanwhile.
        """
        if place.table.is_retired:
            return False
        self.drop(key)
        self._place(key, place.table, place.slot, place.version)
        return True

    def discard_write(self, place: Place) -> None:
        """Free the slot of a write whose record is out of date by now."""
        if not place.table.is_retired:
            place.table.free(place.slot)

    def on_write_failed(self, place: Place, error: OSError | SlabError) -> list[BufferKey]:
        """Handle a failed write; return the keys of records that were lost with their file.

        After a `SlabError` the whole file is lost. After an error of the system only this record is
        not on disk, and its slot is released.
        """
        if place.table.is_retired:
            return []
        if isinstance(error, SlabError):
            return self._lose_file(place.table, error)
        if error.errno in _FULL:
            self._writes_without_growing = _WRITES_UNTIL_GROWING_AGAIN
        self._warn_once(
            f"{place.slab.path}: {error}; unwritten buffers stay in memory if they fit, the other "
            "samples are sent again as key frames"
        )
        place.table.give_back(place.slot)
        return []

    def on_folder_removed(self, job: DeleteJob) -> None:
        """Register that another run's folder was deleted."""
        if job in self._directory.others:
            self._directory.others.remove(job)

    # ---- the whole

    @property
    def num_bytes(self) -> int:
        """Bytes of all files in the directory, other runs' included."""
        return self._own_bytes + self._directory.other_bytes

    @property
    def _own_bytes(self) -> int:
        return sum(PAGE_BYTES + t.num_bytes for t in self._tables if not t.is_retired)

    def warn_damaged(self, place: Place, reason: str) -> None:
        """Log once that a record on disk is damaged."""
        self._warn_once(f"{place.slab.path}: {reason}; its sample is sent again as a key frame")

    def close(self) -> None:
        """Close all files and release the directory; no read or write may be under way."""
        for table in self._tables:
            table.slab.close()
        self._directory.close()

    def forget(self) -> None:
        """Delete this run's files."""
        for table in self._tables:
            self._retire(table)
        self._directory.forget()

    def _slab_size(self, payload_bytes: int) -> int:
        """Return the payload size of the file for a record.

        The first `EXACT_SIZES` sizes have a file each. Any further size is rounded up, so that
        there are at most eight files for sizes between a power of two and the next.
        """
        if payload_bytes in self._by_size or len(self._by_size) < EXACT_SIZES:
            return payload_bytes
        power_of_two_above = 1 << (payload_bytes - 1).bit_length()
        unit = max(1, power_of_two_above // 16)
        return -(-payload_bytes // unit) * unit  # division that rounds up

    def _open(self, payload_bytes: int) -> SlotTable | None:
        """Open or create a file of slots; return None if that fails."""
        path = self._directory.slab_path(payload_bytes)
        try:
            private_folder(path.parent)
            try:
                slab = Slab(path, payload_bytes, self._owner)
            except SlabError as error:
                self._warn_once(f"{path}: {error}; an empty file replaces it")
                path.unlink()
                slab = Slab(path, payload_bytes, self._owner)
            table = SlotTable(slab, self._fit_to_quota(slab), number=len(self._tables))
            self._tables.append(table)
            self._by_size[payload_bytes] = table
            self._index_records(table)
        except OSError as error:
            self._warn_once(f"{path}: {error}; buffers stay in memory only")
            return None
        return table

    def _fit_to_quota(self, slab: Slab) -> int:
        """Truncate a file to the quota; return its number of slots."""
        num_slots = slab.num_slots
        if self._quota_bytes is not None:
            room = self._quota_bytes - self._own_bytes - PAGE_BYTES
            num_slots = min(num_slots, max(0, room // slab.slot_bytes))
        slab.truncate(num_slots)
        return num_slots

    def _index_records(self, table: SlotTable) -> None:
        """Index the newest version of each record that an earlier process wrote.

        Residuals are left out: a residual is valid only together with the state of the process that
        made it.
        """
        for slot, head in table.slab.scan():
            self.next_version = max(self.next_version, head.version + 1)
            found = self.find(head.key)
            if head.key.end is End.RESIDUAL or (found and found.version > head.version):
                continue
            if found is not None:
                self.drop(head.key)
            self._place(head.key, table, slot, head.version)
        table.free_all_empty()

    def _has_room_for(self, num_bytes: int) -> bool:
        """Whether the quota allows this many bytes more."""
        return self._quota_bytes is None or self.num_bytes + num_bytes <= self._quota_bytes

    def _try_to_grow(self, num_bytes: int) -> bool:
        """Return whether the files may grow by this many bytes now.

        While the disk is assumed to be full the answer is no, and each call counts as a try.
        """
        if self._writes_without_growing:
            self._writes_without_growing -= 1
            return False
        return self._has_room_for(num_bytes)

    def _evict_from(self, table: SlotTable, visit: int, step: int) -> int | None:
        """Evict the record that is needed last, if it is needed after `visit`; return its slot."""
        victim = table.needed_last(self._visits, step)
        if victim is None or victim.visit <= visit:
            return None
        key = self._index.key_of(table.code(victim.slot))
        self.drop(key)
        self.evicted.append(key)
        return table.take_free()

    def _has_version_in(self, table: SlotTable, key: BufferKey) -> bool:
        found = self.find(key)
        return found is not None and found.table is table

    def _lose_file(self, table: SlotTable, error: SlabError) -> list[BufferKey]:
        """Retire a file that was deleted or damaged; the next write creates a new one."""
        gone = [self._index.key_of(code) for code in table.codes()]
        logger.warning(
            "%s: %s; %d buffers are lost, their samples are sent again as key frames",
            table.slab.path,
            error,
            len(gone),
        )
        for key in gone:
            self._unplace(key, table)
        self._retire(table)
        return gone

    def _retire(self, table: SlotTable) -> None:
        # The file stays open: reads of it may be under way, and the system reuses file numbers.
        if not table.is_retired:
            table.is_retired = True
            table.slab.truncate(0)
            del self._by_size[table.slab.payload_bytes]

    def _place(self, key: BufferKey, table: SlotTable, slot: int, version: int) -> None:
        """Register the slot of a record in its table and in the index."""
        table.fill(slot, self._index.code_of(key), version)
        self._index.set_place(key, table.number << _SLOT_BITS | slot)
        self._bytes[key.boundary] += table.slab.slot_bytes

    def _unplace(self, key: BufferKey, table: SlotTable) -> None:
        self._index.set_place(key, NOWHERE)
        self._bytes[key.boundary] -= table.slab.slot_bytes

    def _table_of(self, number: int) -> tuple[SlotTable, int]:
        """Return the table and slot that a number of the index stands for."""
        return self._tables[number >> _SLOT_BITS], number & (1 << _SLOT_BITS) - 1

    def _warn_once(self, text: str) -> None:
        if text not in self._warnings:
            self._warnings.add(text)
            logger.warning("%s", text)
