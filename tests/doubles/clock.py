"""A clock that stands still until it is told."""

from __future__ import annotations


class ManualClock:
    """See `Clock`; starts at 0."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now_s(self) -> float:
        """Seconds that were passed to `advance` so far."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._now_s += seconds
