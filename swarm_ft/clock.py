"""Time, as something that is passed in. Decisions get `now`; only shells hold a clock."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Source of monotonic seconds."""

    def now_s(self) -> float:
        """Seconds since an arbitrary, fixed moment; never goes back."""


class SystemClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        """Seconds of `time.monotonic`."""
        return time.monotonic()
