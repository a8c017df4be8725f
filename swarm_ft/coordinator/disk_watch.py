"""Free space on the coordinator's disk, checked at intervals and reported when it changes."""

from __future__ import annotations

import math
from collections.abc import Callable

from swarm_ft.coordinator.facts.events import EmitEvent
from swarm_ft.coordinator.facts.reasons import Reason, ReasonKind
from swarm_ft.protocol.messages.events import EventKind

CHECK_EVERY_S = 2.0
LOW = 2.0
"""Multiple of the reserve for current runs below which the disk is low."""
FREE_AGAIN = 2.5
"""Multiple above which the disk has room again; larger, so that not each job causes an event."""


class DiskWatch:
    """A watch of one disk's free space.

    Args:
        free_bytes: Function that measures it; None where the system does not report it.
        reserved_bytes: Bytes that jobs must leave for current runs.

    Attributes:
        low: Reason why the disk is low; None while it has room.
    """

    def __init__(self, free_bytes: Callable[[], int | None], reserved_bytes: int) -> None:
        self.low: Reason | None = None
        self._free_bytes = free_bytes
        self._reserved_bytes = reserved_bytes
        self._due_s = -math.inf

    def look(self, now_s: float) -> EmitEvent | None:
        """Measure if it is due, and return the event of a change."""
        if now_s < self._due_s:
            return None
        self._due_s = now_s + CHECK_EVERY_S
        free, was_low = self._free_bytes(), self.low is not None
        if free is None:
            return None
        if free >= (FREE_AGAIN if was_low else LOW) * self._reserved_bytes:
            self.low = None
            room = Reason(kind=ReasonKind.DISK_FREE, amount=free)
            return EmitEvent(kind=EventKind.DISK_FREE, reason=room) if was_low else None
        self.low = Reason(kind=ReasonKind.DISK_LOW, amount=free, limit=self._reserved_bytes)
        return None if was_low else EmitEvent(kind=EventKind.DISK_LOW, reason=self.low)
