"""A file of slots of one size: writes, reads and verifies records on disk.

The first page names run and spec. Slots of whole pages follow, so that a write reads nothing. A
slot is a head and a payload, which may be shorter than the slot; the head has checksums of both.
Files are read and written, never mapped: a truncated mapped file kills the process that reads it.

With encryption, the payload's place holds the sealed digest and payload, valid for this key and
version alone. The head is not encrypted and has no digest then.
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

from swarm_ft.base.private_files import FILE_MODE, make_private
from swarm_ft.base.sealing import SEAL_BYTES, Sealer
from swarm_ft.base.systems import write_all
from swarm_ft.buffers.memory import Visits
from swarm_ft.buffers.records import BufferKey, BufferRecord, End, samples_of
from swarm_ft.digest import DIGEST_BYTES
from swarm_ft.ids import BlockIndex, RunId, SampleId
from swarm_ft.protocol.spec.run_spec import MAX_SAMPLES

# ---- the checksum of records on disk: XXH3 of 128 bits
#
# It finds flipped bits and torn writes at the speed of memory. It is no defence against an
# attacker: an attacker who can write these files can also replace the peer.

CHECKSUM_BYTES = 16


def checksum_of(data: bytes, seed: int = 0) -> bytes:
    """Return the checksum of `data`, 16 bytes; long inputs release the interpreter's lock."""
    return xxhash.xxh3_128_digest(data, seed)


# ---- the slots of a slab: owners, free slots, order of eviction

_FREE = -1
_BATCH = 1024
"""Slots that are sorted at a time; sorting all of them would take milliseconds."""


class Victim(NamedTuple):
    """A slot whose record may be evicted, with the step that needs it next."""

    slot: int
    version: int
    visit: int


class SlotTable:
    """The slots of one slab.

    Args:
        slab: File of the slots.
        num_slots: Slots in the file at first.
        number: Number of the table in the index.

    Attributes:
        num_slots: Slots in use, free or being written.
        is_retired: Whether the file is gone; writes under way are discarded.
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
        """Bytes of all slots."""
        return self.num_slots * self.slab.slot_bytes

    def code(self, slot: int) -> int:
        """Return the key code of the record in a slot, see `Index.code_of`; negative: empty."""
        return int(self._code[slot])

    def version(self, slot: int) -> int:
        """Return the version of the record in a slot."""
        return int(self._version[slot])

    def codes(self) -> list[int]:
        """Return the key codes of all records in the slab."""
        return [int(code) for code in self._code[self._code != _FREE]]

    def fill(self, slot: int, code: int, version: int) -> None:
        """Set the record of a slot."""
        self._code[slot], self._version[slot] = code, version

    def free(self, slot: int) -> None:
        """Mark a slot as free."""
        self._code[slot] = _FREE
        self._free.append(slot)

    def free_all_empty(self) -> None:
        """Mark all empty slots as free, after a scan; the first slots are used first."""
        self._free = np.flatnonzero(self._code == _FREE)[::-1].tolist()

    @property
    def num_free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    def take_free(self) -> int | None:
        """Take a free slot; return None if there is none."""
        return self._free.pop() if self._free else None

    def grow(self) -> int:
        """Add a slot at the end of the file and return it."""
        if self.num_slots == len(self._code):
            more = max(64, self.num_slots // 2)
            self._code = np.append(self._code, np.full(more, _FREE, np.int64))
            self._version = np.append(self._version, np.zeros(more, np.int64))
        self.num_slots += 1
        return self.num_slots - 1

    def give_back(self, slot: int) -> None:
        """Release a slot whose write failed, possibly before the file grew."""
        if slot == self.num_slots - 1:
            self.num_slots -= 1
        else:
            self.free(slot)

    def needed_last(self, visits: Visits, step: int) -> Victim | None:
        """Return the slot whose record is needed last after `step`; None if all slots are empty."""
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
"""Magic, format, largest payload in bytes, digest of the spec; run id and checksum follow."""
_HEAD = struct.Struct("<8s Q Q I I I I I 16s 16s")
"""Magic, version, sample, boundary, end, tokens, channels, stored bytes of the payload, digest of
the buffer, checksum of the stored payload.
"""
_HEAD_BYTES = _HEAD.size + CHECKSUM_BYTES
_ENDS = frozenset(int(end) for end in End)


@dataclass(frozen=True, slots=True)
class SlabIdentity:
    """The run and spec of a file. Checksums depend on them, so that foreign records are refused.

    Attributes:
        run_id: Run of the records.
        identity: Digest of the run's spec, 16 bytes.
        sealer: Encrypts digests and payloads; None stores them in plain.
    """

    run_id: RunId
    identity: bytes
    sealer: Sealer | None = None

    @property
    def seed(self) -> int:
        """Seed of the checksums of heads."""
        return int.from_bytes(checksum_of(self.identity + self.run_id.encode())[:8], "little")

    def stored_bytes(self, payload_bytes: int) -> int:
        """Return the bytes of a payload as it is stored in a slot."""
        return payload_bytes + (DIGEST_BYTES + SEAL_BYTES if self.sealer else 0)

    def slot_bytes(self, payload_bytes: int) -> int:
        """Return the bytes of a slot for a payload, in whole pages."""
        pages = -(-(_HEAD_BYTES + self.stored_bytes(payload_bytes)) // PAGE_BYTES)
        return pages * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class SlotHead:
    """Fields of a slot's head."""

    key: BufferKey
    version: int
    tokens: int
    channels: int
    stored_bytes: int
    digest: bytes
    payload_sum: bytes


@dataclass(frozen=True, slots=True)
class Broken:
    """Result of a read from a damaged slot."""

    reason: str


def run_of(path: Path) -> RunId | None:
    """Return the run that a file's first page names; None if it is no slab file."""
    try:
        with path.open("rb") as file:
            page = file.read(PAGE_BYTES)
        if checksum_of(page[:-CHECKSUM_BYTES]) != page[-CHECKSUM_BYTES:]:
            return None
        return RunId(page[_FILE.size : -CHECKSUM_BYTES].rstrip(b"\0").decode())
    except (OSError, UnicodeDecodeError):
        return None


class SlabError(Exception):
    """A file that cannot be used: foreign, damaged in its first page, or deleted."""


class Slab:
    """A file of slots, numbered from 0; threads may read and write it. See the module.

    Args:
        path: Path of the file, which is created if missing.
        payload_bytes: Size of the largest payload.
        owner: Run and spec of the records.

    Raises:
        SlabError: The file has another owner or another size of slots.
        OSError: The file cannot be opened.
    """

    def __init__(self, path: Path, payload_bytes: int, owner: SlabIdentity) -> None:
        self.path = path
        self.payload_bytes = payload_bytes
        self._owner, self._seed = owner, owner.seed
        self.slot_bytes = owner.slot_bytes(payload_bytes)
        self._stored_bytes = owner.stored_bytes(payload_bytes)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, FILE_MODE)
        try:
            make_private(path)
            self._check_first_page()
        except BaseException:
            os.close(self._file)
            raise

    def _check_first_page(self) -> None:
        expected = self._first_page()
        found = os.pread(self._file, PAGE_BYTES, 0)
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
        """Number of whole slots in the file now."""
        return max(0, os.fstat(self._file).st_size - PAGE_BYTES) // self.slot_bytes

    @property
    def is_deleted(self) -> bool:
        """Whether the file has no name in the file system any more."""
        return os.fstat(self._file).st_nlink == 0

    def truncate(self, num_slots: int) -> None:
        """Truncate the file to `num_slots` slots."""
        os.ftruncate(self._file, PAGE_BYTES + num_slots * self.slot_bytes)

    def scan(self) -> Iterator[tuple[int, SlotHead]]:
        """Yield all slots whose heads are intact; payloads are not read."""
        for slot in range(self.num_slots):
            head = self._parse(os.pread(self._file, _HEAD_BYTES, self._offset(slot)))
            if head is not None:
                yield slot, head

    def write(self, slot: int, key: BufferKey, version: int, record: BufferRecord) -> None:
        """Write a record, whose payload has at most `payload_bytes`, to a slot.

        Raises:
            SlabError: The file was deleted.
            OSError: The write failed; the content of the slot is undefined then.
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
        """Read and verify a record; return `Broken` with a reason if it is not intact."""
        offset = self._offset(slot)
        try:
            head = self._parse(os.pread(self._file, _HEAD_BYTES, offset))
            most = head.stored_bytes if head is not None else 0
            stored = os.pread(self._file, min(most, self._stored_bytes), offset + _HEAD_BYTES)
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
        """Close the file; no read or write may be under way."""
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
    """Return the bytes that bind a sealed record to its key and version."""
    return struct.pack("<Q I I Q", key.sample, key.boundary, key.end, version)
