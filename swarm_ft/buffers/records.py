"""What a buffer store holds, where each record is, and what it tells. Pure.

Arrays by sample, since there may be a hundred thousand of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from swarm_ft.ids import BlockIndex, RunId, SampleId

# ---- what a buffer store holds and tells: keys, records, limits, counts


class End(IntEnum):
    """What this peer's end of the boundary keeps of a sample."""

    SENT = 1
    """The buffer that it sends changes against."""
    RECEIVED = 2
    """The buffer that it receives changes against."""
    RESIDUAL = 3
    """What it still owes of the gradients that it sent; nobody else has it."""


class BufferKey(NamedTuple):
    """Names a buffer on this peer."""

    run_id: RunId
    boundary: BlockIndex
    end: End
    sample: SampleId


@dataclass(frozen=True, slots=True)
class BufferRecord:
    """A buffer in its stored form.

    Attributes:
        digest: of the buffer; both ends compare it in every delta frame.
        tokens: rows of the tensor.
        channels: columns of the tensor.
        payload: the values, as `codec.pack_buffer` writes them.
    """

    digest: bytes
    tokens: int
    channels: int
    payload: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferLimits:
    """How much a store may take; None is no bound.

    Attributes:
        memory_bytes: payloads of committed records in memory. What the open step staged, and what
            the last one committed and is still on its way to disk, is in flight and not counted.
        disk_bytes: all files below the store's directory, other runs' among them.
    """

    memory_bytes: int | None = None
    disk_bytes: int | None = None


# ---- where each record is: arrays by sample, since there may be a hundred thousand of them

Samples = npt.NDArray[np.int64]
NOWHERE = -1
_SAMPLE_BITS = 32


class ShelfName(NamedTuple):
    """A key without its sample."""

    run_id: RunId
    boundary: BlockIndex
    end: End


class _Shelf:
    """All samples of one end of a boundary: 9 bytes each."""

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
    def held(self) -> npt.NDArray[np.bool_]:
        return self.in_memory | np.not_equal(self.place, NOWHERE, dtype=np.bool_)


class Index:
    """Of each key, whether it is in memory, and its place on disk, a number of the disk tier's."""

    def __init__(self) -> None:
        self._shelves: dict[ShelfName, _Shelf] = {}
        self._by_number: list[_Shelf] = []
        self.num_held = 0

    def place(self, key: BufferKey) -> int:
        """Its place on disk, or `NOWHERE`."""
        shelf = self._shelves.get(ShelfName(*key[:3]))
        if shelf is None or key.sample >= len(shelf.place):
            return NOWHERE
        return int(shelf.place[key.sample])

    def set_place(self, key: BufferKey, place: int) -> None:
        """It is there now, and only there."""
        shelf = self._shelf(key)
        was = shelf.holds(key.sample)
        shelf.place[key.sample] = place
        self.num_held += shelf.holds(key.sample) - was

    def set_in_memory(self, key: BufferKey, value: bool) -> None:
        """It is in memory now, or no longer."""
        shelf = self._shelf(key)
        was = shelf.holds(key.sample)
        shelf.in_memory[key.sample] = value
        self.num_held += shelf.holds(key.sample) - was

    def holds(self, key: BufferKey) -> bool:
        """Whether it is anywhere."""
        shelf = self._shelves.get(ShelfName(*key[:3]))
        return shelf is not None and key.sample < len(shelf.place) and shelf.holds(key.sample)

    def shelves(self) -> list[ShelfName]:
        """All there ever were."""
        return [shelf.name for shelf in self._by_number]

    def samples(self, name: ShelfName) -> Samples:
        """Of which there is a record, rising."""
        shelf = self._shelves.get(name)
        return np.flatnonzero(shelf.held) if shelf else np.empty(0, np.int64)

    def num_samples(self, names: Iterable[ShelfName]) -> int:
        """Of which there is a record on any of these shelves."""
        held = [self._shelves[name].held for name in names]
        union = np.zeros(max(map(len, held), default=0), np.bool_)
        for some in held:
            union[: len(some)] |= some
        return int(np.count_nonzero(union))

    def keys(self) -> Iterator[BufferKey]:
        """Of all records that are anywhere."""
        for shelf in list(self._by_number):
            for sample in np.flatnonzero(shelf.held).tolist():
                yield BufferKey(*shelf.name, SampleId(sample))

    def code_of(self, key: BufferKey) -> int:
        """The key as a number, 0 or more; its lowest bits are the sample."""
        return self._shelf(key).number << _SAMPLE_BITS | key.sample

    def key_of(self, code: int) -> BufferKey:
        """The key that `code_of` gave the number for."""
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
    """The samples of many codes."""
    return codes & ((1 << _SAMPLE_BITS) - 1)
