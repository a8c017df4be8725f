"""Which slot of a slab holds whose record, which are free, and who goes first. Pure."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from swarm_ft.buffers.index import samples_of
from swarm_ft.buffers.slab import Slab
from swarm_ft.buffers.visits import Visits

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
