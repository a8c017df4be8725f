"""A clock that callers pass in: pure decisions receive `now`, and only shells hold a clock."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Source of monotonic seconds."""

    def now_s(self) -> float:
        """Return seconds since an arbitrary, fixed moment; the value never decreases."""


class SystemClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        """Return the seconds of `time.monotonic`."""
        return time.monotonic()
