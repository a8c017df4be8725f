"""One file of slots of one size: how a record lies on disk, and whether it is still whole.

A page that names run and spec, then slots of whole pages, so that to write one nothing has to be
read. A slot is a head and a payload that may be shorter; the head holds checksums of both. Files
are read and written, never mapped: a mapped file that somebody truncates kills the process that
reads it.

Where they are sealed, a slot has the sealed digest and payload in the payload's place, good for
this key and version alone, and the head, which is plain, has no digest.
"""

from __future__ import annotations

import os
import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from swarm_ft.buffers.memory import Visits
from swarm_ft.buffers.records import BufferKey, BufferRecord, End, samples_of
from swarm_ft.ids import BlockIndex, RunId, SampleId
from swarm_ft.private_files import FILE_MODE, make_private
from swarm_ft.protocol.spec.digest import DIGEST_BYTES
from swarm_ft.protocol.spec.run_spec import MAX_SAMPLES
from swarm_ft.sealing import SEAL_BYTES, Sealer
from swarm_ft.systems import binary_flags, read_at, write_all

# ---- the checksum of what lies on disk: XXH3 of 128 bits
#
# It finds bits that flipped and writes that were torn, at the speed of memory; it is no defence
# against somebody who means to deceive. Who could write to these files could replace the peer.

CHECKSUM_BYTES = 16


def checksum_of(data: bytes, seed: int = 0) -> bytes:
    """16 bytes; other threads run meanwhile where `data` is long."""
    return xxhash.xxh3_128_digest(data, seed)


# ---- which slot of a slab holds whose record, which are free, and who goes first

_FREE = -1
_BATCH = 1024
"""So many slots are put in order at a time; all of them would take milliseconds."""


class Victim(NamedTuple):
    """A slot whose record may go, and when that is needed next."""

    slot: int
    version: int
    visit: int


class SlotTable:
    """One slab's slots.

    Args:
        number: the table's name in the index.

    Attributes:
        num_slots: that are in use, free or being written.
        is_retired: its file is gone; what is still being written goes nowhere.
    """

    def __init__(self, slab: Slab, num_slots: int, *, number: int) -> None:
        self.slab = slab
        self.number = number
        self.num_slots = num_slots
        self.is_retired = False
        self._code = np.full(num_slots, _FREE, np.int64)
        self._version = np.zeros(num_slots, np.int64)
        self._free: list[int] = []
        self._victims: deque[Victim] = deque()
        self._ordered_at: int | None = None

    @property
    def num_bytes(self) -> int:
        """Of the slots."""
        return self.num_slots * self.slab.slot_bytes

    def code(self, slot: int) -> int:
        """Whose record it holds, as `Index.code_of` says it; negative if none."""
        return int(self._code[slot])

    def version(self, slot: int) -> int:
        """Of the record in it."""
        return int(self._version[slot])

    def codes(self) -> list[int]:
        """Of all records in the slab."""
        return [int(code) for code in self._code[self._code != _FREE]]

    def fill(self, slot: int, code: int, version: int) -> None:
        """It holds this record now."""
        self._code[slot], self._version[slot] = code, version

    def free(self, slot: int) -> None:
        """It may be written over."""
        self._code[slot] = _FREE
        self._free.append(slot)

    def free_all_empty(self) -> None:
        """After a scan: what holds nothing is free, the first slots being used first."""
        self._free = np.flatnonzero(self._code == _FREE)[::-1].tolist()

    @property
    def num_free(self) -> int:
        """Slots that may be written over."""
        return len(self._free)

    def take_free(self) -> int | None:
        """A slot to write to."""
        return self._free.pop() if self._free else None

    def grow(self) -> int:
        """A new slot at the end, to write to."""
        if self.num_slots == len(self._code):
            more = max(64, self.num_slots // 2)
            self._code = np.append(self._code, np.full(more, _FREE, np.int64))
            self._version = np.append(self._version, np.zeros(more, np.int64))
        self.num_slots += 1
        return self.num_slots - 1

    def give_back(self, slot: int) -> None:
        """A slot could not be written: the file may not have become longer."""
        if slot == self.num_slots - 1:
            self.num_slots -= 1
        else:
            self.free(slot)

    def needed_last(self, visits: Visits, step: int) -> Victim | None:
        """The slot whose record is needed last, as of after this step."""
        for _ in range(2):
            if self._ordered_at != step or not self._victims:
                self._order(visits, step)
            while self._victims:
                victim = self._victims[0]
                if self._code[victim.slot] != _FREE and self.version(victim.slot) == victim.version:
                    return victim
                self._victims.popleft()
        return None

    def _order(self, visits: Visits, step: int) -> None:
        used = np.flatnonzero(self._code != _FREE)
        needed = visits.next_visits(samples_of(self._code[used]), step)
        if len(used) > _BATCH:
            last = np.argpartition(needed, len(needed) - _BATCH)[-_BATCH:]
            used, needed = used[last], needed[last]
        order = np.argsort(-needed, kind="stable")
        columns = used[order], self._version[used[order]], needed[order]
        rows = zip(*(column.tolist() for column in columns), strict=True)
        self._victims = deque(Victim(*row) for row in rows)
        self._ordered_at = step


PAGE_BYTES = 4096
_MAGIC = b"swarmbuf"
_FORMAT, _SEALED_FORMAT = 3, 4
_FILE = struct.Struct("<8s I I 16s")
"""Magic, format, most payload bytes, digest of the spec; the run's id and a checksum follow."""
_HEAD = struct.Struct("<8s Q Q I I I I I 16s 16s")
"""Magic, version, sample, boundary, end, tokens, channels, bytes of the payload as it lies there,
digest and checksum of that."""
_HEAD_BYTES = _HEAD.size + CHECKSUM_BYTES
_ENDS = frozenset(int(end) for end in End)


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose records a file holds: checksums are of it too, so no others pass for them.

    Attributes:
        sealer: encrypts digests and payloads; None leaves them as they are.
    """

    run_id: RunId
    identity: bytes
    sealer: Sealer | None = None

    @property
    def seed(self) -> int:
        """Of the checksums of heads."""
        return int.from_bytes(checksum_of(self.identity + self.run_id.encode())[:8], "little")

    def stored_bytes(self, payload_bytes: int) -> int:
        """Of a payload as it lies in a slot."""
        return payload_bytes + (DIGEST_BYTES + SEAL_BYTES if self.sealer else 0)

    def slot_bytes(self, payload_bytes: int) -> int:
        """What a record takes on disk."""
        pages = -(-(_HEAD_BYTES + self.stored_bytes(payload_bytes)) // PAGE_BYTES)
        return pages * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class SlotHead:
    """What a slot says of the record in it."""

    key: BufferKey
    version: int
    tokens: int
    channels: int
    stored_bytes: int
    digest: bytes
    payload_sum: bytes


@dataclass(frozen=True, slots=True)
class Broken:
    """A slot that does not hold what it should."""

    reason: str


def run_of(path: Path) -> RunId | None:
    """The run whose records a file holds, as its first page says; None if it is no such file."""
    try:
        with path.open("rb") as file:
            page = file.read(PAGE_BYTES)
        if checksum_of(page[:-CHECKSUM_BYTES]) != page[-CHECKSUM_BYTES:]:
            return None
        return RunId(page[_FILE.size : -CHECKSUM_BYTES].rstrip(b"\0").decode())
    except (OSError, UnicodeDecodeError):
        return None


class SlabError(Exception):
    """A file that cannot go on as it is: foreign, damaged in its first page, or deleted."""


class Slab:
    """See the module's docstring. Slots are numbered from 0; reads and writes may run in threads.

    Args:
        path: the file; made if it is not there.

    Raises:
        SlabError: the file is not one of this owner and size.
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path, payload_bytes: int, owner: Owner) -> None:
        self.path = path
        self.payload_bytes = payload_bytes
        self._owner, self._seed = owner, owner.seed
        self.slot_bytes = owner.slot_bytes(payload_bytes)
        self._stored_bytes = owner.stored_bytes(payload_bytes)
        self._file = os.open(path, binary_flags(os.O_RDWR | os.O_CREAT), FILE_MODE)
        try:
            make_private(path)
            self._check_first_page()
        except BaseException:
            os.close(self._file)
            raise

    def _check_first_page(self) -> None:
        expected = self._first_page()
        found = read_at(self._file, PAGE_BYTES, 0)
        if not found:
            write_all(self._file, [expected], 0)
        elif found != expected:
            raise SlabError("its first page is not that of this run, spec and size")

    def _first_page(self) -> bytes:
        kind = _SEALED_FORMAT if self._owner.sealer else _FORMAT
        fields = _FILE.pack(_MAGIC, kind, self.payload_bytes, self._owner.identity)
        text = fields + self._owner.run_id.encode()
        page = text.ljust(PAGE_BYTES - CHECKSUM_BYTES, b"\0")
        return page + checksum_of(page)

    @property
    def num_slots(self) -> int:
        """Whole slots in the file as it is now."""
        return max(0, os.fstat(self._file).st_size - PAGE_BYTES) // self.slot_bytes

    @property
    def is_deleted(self) -> bool:
        """Whether nothing names the file any more."""
        return os.fstat(self._file).st_nlink == 0

    def truncate(self, num_slots: int) -> None:
        """Cut off all slots from this one on."""
        os.ftruncate(self._file, PAGE_BYTES + num_slots * self.slot_bytes)

    def scan(self) -> Iterator[tuple[int, SlotHead]]:
        """All slots whose heads are whole; payloads are not read."""
        for slot in range(self.num_slots):
            head = self._parse(read_at(self._file, _HEAD_BYTES, self._offset(slot)))
            if head is not None:
                yield slot, head

    def write(self, slot: int, key: BufferKey, version: int, record: BufferRecord) -> None:
        """Put a record into a slot; its payload is of `payload_bytes` at most.

        Raises:
            SlabError: the file was deleted.
            OSError: the disk does not take it; what is in the slot is unknown then.
        """
        if self.is_deleted:
            raise SlabError("the file was deleted")
        digest, stored = record.digest, record.payload
        if self._owner.sealer is not None:
            stored = self._owner.sealer.seal(digest + stored, _place(key, version))
            digest = bytes(DIGEST_BYTES)
        head = self._head(key, version, replace(record, digest=digest, payload=stored))
        padding = bytes(self.slot_bytes - len(head) - len(stored))
        write_all(self._file, [head, stored, padding], self._offset(slot))

    def read(self, slot: int, key: BufferKey, version: int) -> BufferRecord | Broken:
        """The record that was written there, bit for bit, or what is wrong with it."""
        offset = self._offset(slot)
        try:
            head = self._parse(read_at(self._file, _HEAD_BYTES, offset))
            most = head.stored_bytes if head is not None else 0
            stored = read_at(self._file, min(most, self._stored_bytes), offset + _HEAD_BYTES)
        except OSError as error:
            return Broken(f"cannot be read: {error}")
        if head is None:
            return Broken("the slot's head is torn, altered or gone")
        if (head.key, head.version) != (key, version):
            return Broken("the slot holds another record")
        if checksum_of(stored) != head.payload_sum:
            return Broken("the payload is torn, altered or cut off")
        if self._owner.sealer is None:
            return BufferRecord(head.digest, head.tokens, head.channels, stored)
        try:
            opened = self._owner.sealer.open(stored, _place(key, version))
        except ValueError as error:
            return Broken(str(error))
        digest, payload = opened[:DIGEST_BYTES], opened[DIGEST_BYTES:]
        return BufferRecord(digest, head.tokens, head.channels, payload)

    def close(self) -> None:
        """Close the file; nothing reads or writes it any more."""
        os.close(self._file)

    def _offset(self, slot: int) -> int:
        return PAGE_BYTES + slot * self.slot_bytes

    def _head(self, key: BufferKey, version: int, record: BufferRecord) -> bytes:
        numbers = version, key.sample, key.boundary, key.end, record.tokens, record.channels
        payload = record.payload
        fields = _HEAD.pack(_MAGIC, *numbers, len(payload), record.digest, checksum_of(payload))
        return fields + checksum_of(fields, self._seed)

    def _parse(self, data: bytes) -> SlotHead | None:
        fields = data[: _HEAD.size]
        if len(data) < _HEAD_BYTES or checksum_of(fields, self._seed) != data[_HEAD.size :]:
            return None
        unpacked = _HEAD.unpack(fields)
        magic, version, sample, boundary, end, *rest = unpacked
        if magic != _MAGIC or end not in _ENDS or sample >= MAX_SAMPLES:
            return None
        key = BufferKey(self._owner.run_id, BlockIndex(boundary), End(end), SampleId(sample))
        return SlotHead(key, version, *rest)


def _place(key: BufferKey, version: int) -> bytes:
    """For which a record is sealed."""
    return struct.pack("<Q I I Q", key.sample, key.boundary, key.end, version)
