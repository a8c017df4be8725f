"""Records of a buffer store, and an index of where each record is. Pure.

The index consists of arrays by sample, because there may be a hundred thousand samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from swarm_ft.ids import BlockIndex, RunId, SampleId

# ---- keys, records and limits


class End(IntEnum):
    """The kinds of records that a peer stores for a sample at its end of a boundary."""

    SENT = 1
    """The buffer against which this peer encodes changes."""
    RECEIVED = 2
    """The buffer against which this peer decodes changes."""
    RESIDUAL = 3
    """The compression error of gradients that this peer sent; no other peer has it."""


class BufferKey(NamedTuple):
    """Identity of a buffer on this peer."""

    run_id: RunId
    boundary: BlockIndex
    end: End
    sample: SampleId


@dataclass(frozen=True, slots=True)
class BufferRecord:
    """A buffer in its stored form.

    Attributes:
        digest: Digest of the buffer; both ends compare it in every delta frame.
        tokens: Rows of the tensor.
        channels: Columns of the tensor.
        payload: Values, as `codec.pack_buffer` encodes them.
    """

    digest: bytes
    tokens: int
    channels: int
    payload: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferLimits:
    """Limits of a store; None: no limit.

    Attributes:
        memory_bytes: Bytes of committed payloads in memory. Records of the open step, and those of
            the last step that are not on disk yet, are in flight and do not count.
        disk_bytes: Bytes of all files in the store's directory, other runs' included.
    """

    memory_bytes: int | None = None
    disk_bytes: int | None = None


# ---- the index: arrays by sample

Samples = npt.NDArray[np.int64]
NOWHERE = -1
_SAMPLE_BITS = 32


class ShelfName(NamedTuple):
    """A key without its sample."""

    run_id: RunId
    boundary: BlockIndex
    end: End


class _Shelf:
    """Arrays over all samples of one end of a boundary; 9 bytes a sample."""

    def __init__(self, name: ShelfName, number: int) -> None:
        self.name = name
        self.number = number
        self.place = np.full(64, NOWHERE, np.int64)
        self.in_memory = np.zeros(64, np.bool_)

    def reach(self, sample: int) -> None:
        old = len(self.place)
        if sample >= old:
            more = max(sample + 1, old + old // 2) - old
            self.place = np.append(self.place, np.full(more, NOWHERE, np.int64))
            self.in_memory = np.append(self.in_memory, np.zeros(more, np.bool_))

    def holds(self, sample: int) -> bool:
        return bool(self.in_memory[sample]) or int(self.place[sample]) != NOWHERE

    @property
    def present(self) -> npt.NDArray[np.bool_]:
        return self.in_memory | np.not_equal(self.place, NOWHERE, dtype=np.bool_)


class Index:
    """Index of all records: whether each is in memory, and its place number on disk."""

    def __init__(self) -> None:
        self._shelves: dict[ShelfName, _Shelf] = {}
        self._by_number: list[_Shelf] = []
        self.num_records = 0

    def place(self, key: BufferKey) -> int:
        """Return the place number of a record on disk, or `NOWHERE`."""
        shelf = self._shelves.get(ShelfName(*key[:3]))
        if shelf is None or key.sample >= len(shelf.place):
            return NOWHERE
        return int(shelf.place[key.sample])

    def set_place(self, key: BufferKey, place: int) -> None:
        """Set the place number of a record on disk; `NOWHERE` removes it."""
        shelf = self._shelf(key)
        was = shelf.holds(key.sample)
        shelf.place[key.sample] = place
        self.num_records += shelf.holds(key.sample) - was

    def set_in_memory(self, key: BufferKey, value: bool) -> None:
        """Set whether a record is in memory."""
        shelf = self._shelf(key)
        was = shelf.holds(key.sample)
        shelf.in_memory[key.sample] = value
        self.num_records += shelf.holds(key.sample) - was

    def holds(self, key: BufferKey) -> bool:
        """Whether a record is in memory or on disk."""
        shelf = self._shelves.get(ShelfName(*key[:3]))
        return shelf is not None and key.sample < len(shelf.place) and shelf.holds(key.sample)

    def shelves(self) -> list[ShelfName]:
        """Return the names of all shelves, empty ones included."""
        return [shelf.name for shelf in self._by_number]

    def samples(self, name: ShelfName) -> Samples:
        """Return the samples that have a record on a shelf, rising; int64 [n]."""
        shelf = self._shelves.get(name)
        return np.flatnonzero(shelf.present) if shelf else np.empty(0, np.int64)

    def num_samples(self, names: Iterable[ShelfName]) -> int:
        """Return the number of samples that have a record on any of these shelves."""
        present = [self._shelves[name].present for name in names]
        union = np.zeros(max(map(len, present), default=0), np.bool_)
        for some in present:
            union[: len(some)] |= some
        return int(np.count_nonzero(union))

    def keys(self) -> Iterator[BufferKey]:
        """Yield the keys of all records in memory or on disk."""
        for shelf in list(self._by_number):
            for sample in np.flatnonzero(shelf.present).tolist():
                yield BufferKey(*shelf.name, SampleId(sample))

    def code_of(self, key: BufferKey) -> int:
        """Encode a key as a number of at least 0, whose lowest bits are the sample."""
        return self._shelf(key).number << _SAMPLE_BITS | key.sample

    def key_of(self, code: int) -> BufferKey:
        """Decode a number of `code_of`."""
        name = self._by_number[code >> _SAMPLE_BITS].name
        return BufferKey(*name, SampleId(code & (1 << _SAMPLE_BITS) - 1))

    def _shelf(self, key: BufferKey) -> _Shelf:
        name = ShelfName(*key[:3])
        if name not in self._shelves:
            self._shelves[name] = _Shelf(name, len(self._by_number))
            self._by_number.append(self._shelves[name])
        shelf = self._shelves[name]
        shelf.reach(key.sample)
        return shelf


def samples_of(codes: npt.NDArray[np.int64]) -> Samples:
    """Return the samples of encoded keys; int64 [n]."""
    return codes & ((1 << _SAMPLE_BITS) - 1)
