"""The disk tier: where records lie on disk, and which go when there is no room.

It decides; the writing and reading of payloads is `Slab`'s, and happens elsewhere. A new version
of a record is written beside the old one, whose slot is free only then: whatever tears a write,
the old version stays whole.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from swarm_ft.buffers.memory import Visits
from swarm_ft.buffers.records import NOWHERE, BufferKey, End, Index
from swarm_ft.buffers.slab import PAGE_BYTES, Owner, Slab, SlabError, SlotTable, run_of
from swarm_ft.errors import BadOption
from swarm_ft.ids import BlockIndex, RunId
from swarm_ft.log import get_logger
from swarm_ft.private_files import private_folder
from swarm_ft.protocol.spec.digest import digest_of
from swarm_ft.systems import binary_flags, lock_file

# ---- the directory of a peer's buffers: one folder a run, one process at a time

logger = get_logger(__name__)

_RUN_PREFIX = "run-"


@dataclass(frozen=True, slots=True)
class OtherRun:
    """Files that some other run, or a run of another spec, left here."""

    path: Path
    num_bytes: int

    def run(self) -> None:
        """Delete them, for room, as far as the system lets us."""
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
            private_folder(path)
            self._lock = os.open(path / "lock", binary_flags(os.O_RDWR | os.O_CREAT), 0o600)
            try:
                if not lock_file(self._lock):
                    raise BadOption(
                        f"buffers in {path}: another process uses this directory; give each its own"
                    )
                self.others = self._find_others(path)
            except BaseException:
                os.close(self._lock)
                raise
        except OSError as error:
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
        """The file of records of at most this size."""
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


def runs_in(path: Path) -> dict[Path, RunId]:
    """Folders of runs in a directory, and whose they are; those of which it cannot be told not.

    Raises:
        OSError: the directory cannot be read.
    """
    found: dict[Path, RunId] = {}
    for folder in path.glob(f"{_RUN_PREFIX}*"):
        runs = (run_of(slab) for slab in folder.glob("*.slab"))
        run_id = next((run for run in runs if run is not None), None)
        if run_id is not None:
            found[folder] = run_id
    return found


def folders_older_than(path: Path, unix_s: float) -> list[Path]:
    """Folders of runs in a directory in which nothing was written since.

    Raises:
        OSError: the directory cannot be read.
    """
    folders = [folder for folder in path.glob(f"{_RUN_PREFIX}*") if folder.is_dir()]
    return [f for f in folders if max(p.stat().st_mtime for p in (f, *f.iterdir())) < unix_s]


_SLOT_BITS = 40
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_WRITES_UNTIL_GROWING_AGAIN = 256
EXACT_SIZES = 16
"""Of records that have a file each: samples have many lengths perhaps, and a process few files."""
"""On a full disk the files stay as long as they are for so many writes; then it is tried again."""


@dataclass(frozen=True, slots=True)
class Place:
    """A slot with a version of a record in it, or that is to have it."""

    table: SlotTable
    slot: int
    version: int

    @property
    def slab(self) -> Slab:
        """Its file."""
        return self.table.slab


class DiskTier:
    """See the module's docstring.

    Args:
        quota_bytes: of all files in the directory; None is no bound.
        index: where it notes the places of records.

    Attributes:
        next_version: greater than that of all records here.
        evicted: keys whose records went, not told yet.
    """

    def __init__(
        self,
        directory: BufferDirectory,
        owner: Owner,
        quota_bytes: int | None,
        *,
        visits: Visits,
        index: Index,
    ) -> None:
        self._directory, self._owner, self._quota_bytes = directory, owner, quota_bytes
        self._visits, self._index = visits, index
        self._tables: list[SlotTable] = []
        self._by_size: dict[int, SlotTable] = {}
        self._bytes: Counter[BlockIndex] = Counter()
        self._told: set[str] = set()
        self._writes_without_growing = 0
        self.next_version = 1
        self.evicted: list[BufferKey] = []
        for payload_bytes in directory.slab_sizes():
            self._open(payload_bytes)
        while directory.others and not self._may_grow(0):
            directory.others[-1].run()
            self.removed(directory.others[-1])

    # ---- where things are

    def find(self, key: BufferKey) -> Place | None:
        """Where the record is, if it is here."""
        number = self._index.place(key)
        if number == NOWHERE:
            return None
        table, slot = self._table_of(number)
        return Place(table, slot, table.version(slot))

    def bytes_of(self, boundary: BlockIndex) -> int:
        """Of the slots with a boundary's records."""
        return self._bytes[boundary]

    def drop(self, key: BufferKey) -> None:
        """The record is no longer here."""
        number = self._index.place(key)
        if number != NOWHERE:
            table, slot = self._table_of(number)
            table.free(slot)
            self._unplace(key, table)

    # ---- writing

    def begin_write(
        self, key: BufferKey, version: int, payload_bytes: int, visit: int, step: int
    ) -> Place | OtherRun | None:
        """A slot for a record; or what has to be removed first; or None: it is not worth one.

        Args:
            visit: when the record is needed next. What is needed later than that may go for it.
            step: the last committed one.
        """
        payload_bytes = self._slab_size(payload_bytes)
        table = self._by_size.get(payload_bytes)
        if table is None:
            if not self._may_grow(PAGE_BYTES + 2 * self._owner.slot_bytes(payload_bytes)):
                return self._directory.others[-1] if self._directory.others else None
            table = self._open(payload_bytes)
        if table is None:
            return None
        # One slot stays free for new versions of what is here, or a full disk would take none.
        spare = 0 if self._has_version_in(table, key) else 1
        slot: int | None
        if table.num_free > spare:
            slot = table.take_free()
        elif self._may_grow((1 + spare - table.num_free) * table.slab.slot_bytes):
            slot = table.grow()
        elif self._directory.others:
            return self._directory.others[-1]
        else:
            slot = self._evict_from(table, visit, step)
        if slot is None:
            return None
        return Place(table, slot, version)

    def finish_write(self, place: Place, key: BufferKey) -> bool:
        """The record is in its slot; False if its file was given up meanwhile."""
        if place.table.is_retired:
            return False
        self.drop(key)
        self._place(key, place.table, place.slot, place.version)
        return True

    def abandon(self, place: Place) -> None:
        """What was written is not wanted any more."""
        if not place.table.is_retired:
            place.table.free(place.slot)

    def failed(self, place: Place, error: OSError | SlabError) -> list[BufferKey]:
        """A write went wrong; the records that are gone for it."""
        if place.table.is_retired:
            return []
        if isinstance(error, SlabError):
            return self._give_up(place.table, error)
        if error.errno in _FULL:
            self._writes_without_growing = _WRITES_UNTIL_GROWING_AGAIN
        self._tell_once(
            f"{place.slab.path}: {error}; buffers that are not written stay in memory while there "
            "is room, others cost key frames"
        )
        place.table.give_back(place.slot)
        return []

    def removed(self, other: OtherRun) -> None:
        """Another run's files are gone."""
        if other in self._directory.others:
            self._directory.others.remove(other)

    # ---- the whole

    @property
    def num_bytes(self) -> int:
        """Of all files, other runs' among them."""
        return self._own_bytes + self._directory.other_bytes

    @property
    def _own_bytes(self) -> int:
        return sum(PAGE_BYTES + t.num_bytes for t in self._tables if not t.is_retired)

    def tell_broken(self, place: Place, reason: str) -> None:
        """A record was not what had been written."""
        self._tell_once(f"{place.slab.path}: {reason}; it costs a key frame, more of them too")

    def close(self) -> None:
        """Close all files; nothing reads or writes them any more."""
        for table in self._tables:
            table.slab.close()
        self._directory.close()

    def forget(self) -> None:
        """Delete this run's files."""
        for table in self._tables:
            self._retire(table)
        self._directory.forget()

    def _slab_size(self, payload_bytes: int) -> int:
        """Of the file for such a record: its own size while these are few, else a shared one.

        Of those there are eight from a number to twice the number.
        """
        if payload_bytes in self._by_size or len(self._by_size) < EXACT_SIZES:
            return payload_bytes
        step = 1 << max(0, (payload_bytes - 1).bit_length() - 4)
        return -(-payload_bytes // step) * step

    def _open(self, payload_bytes: int) -> SlotTable | None:
        """Open a file of slots, or begin one; None if that cannot be."""
        path = self._directory.slab_path(payload_bytes)
        try:
            private_folder(path.parent)
            try:
                slab = Slab(path, payload_bytes, self._owner)
            except SlabError as error:
                self._tell_once(f"{path}: {error}; it begins anew, which costs key frames")
                path.unlink()
                slab = Slab(path, payload_bytes, self._owner)
            table = SlotTable(slab, self._cut(slab), number=len(self._tables))
            self._tables.append(table)
            self._by_size[payload_bytes] = table
            self._take_up(table)
        except OSError as error:
            self._tell_once(f"{path}: {error}; buffers stay in memory only")
            return None
        return table

    def _cut(self, slab: Slab) -> int:
        """Make a file fit the quota; its slots."""
        num_slots = slab.num_slots
        if self._quota_bytes is not None:
            room = self._quota_bytes - self._own_bytes - PAGE_BYTES
            num_slots = min(num_slots, max(0, room // slab.slot_bytes))
        slab.truncate(num_slots)
        return num_slots

    def _take_up(self, table: SlotTable) -> None:
        """Find what an earlier process left: of each record the newest version.

        Not residuals: what is owed is true of the very state of the process that owed it.
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

    def _may_grow(self, more_bytes: int) -> bool:
        if self._writes_without_growing:
            self._writes_without_growing -= 1
            return False
        return self._quota_bytes is None or self.num_bytes + more_bytes <= self._quota_bytes

    def _evict_from(self, table: SlotTable, visit: int, step: int) -> int | None:
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

    def _give_up(self, table: SlotTable, error: SlabError) -> list[BufferKey]:
        """Go on without a file that is gone; a new one is begun when something is to be written."""
        gone = [self._index.key_of(code) for code in table.codes()]
        logger.warning(
            "%s: %s; %d buffers are gone and cost key frames", table.slab.path, error, len(gone)
        )
        for key in gone:
            self._unplace(key, table)
        self._retire(table)
        return gone

    def _retire(self, table: SlotTable) -> None:
        # Not closed yet: reads of it may be under way, and the system gives file numbers anew.
        if not table.is_retired:
            table.is_retired = True
            table.slab.truncate(0)
            del self._by_size[table.slab.payload_bytes]

    def _place(self, key: BufferKey, table: SlotTable, slot: int, version: int) -> None:
        table.fill(slot, self._index.code_of(key), version)
        self._index.set_place(key, table.number << _SLOT_BITS | slot)
        self._bytes[key.boundary] += table.slab.slot_bytes

    def _unplace(self, key: BufferKey, table: SlotTable) -> None:
        self._index.set_place(key, NOWHERE)
        self._bytes[key.boundary] -= table.slab.slot_bytes

    def _table_of(self, number: int) -> tuple[SlotTable, int]:
        return self._tables[number >> _SLOT_BITS], number & (1 << _SLOT_BITS) - 1

    def _tell_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            logger.warning("%s", text)
