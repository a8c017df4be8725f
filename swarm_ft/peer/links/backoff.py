"""How long to wait before somebody is called again. No clock, and no chance but the one given."""

from __future__ import annotations

from random import Random

MIN_BACKOFF_S, MAX_BACKOFF_S = 0.1, 2.0


class Backoff:
    """Waits between tries: each about twice as long as the last, and no two callers in step.

    A wait is drawn from the upper half of what it may be at most ("equal jitter": M. Brooker,
    Exponential Backoff And Jitter, 2015).
    """

    def __init__(self, rng: Random, *, min_s: float, max_s: float) -> None:
        self._rng = rng
        self._min_s, self._max_s = min_s, max_s
        self._next_s = min_s

    def reset(self) -> None:
        """A try succeeded."""
        self._next_s = self._min_s

    def draw_s(self) -> float:
        """How long to wait before the next try, in seconds."""
        at_most_s, self._next_s = self._next_s, min(2 * self._next_s, self._max_s)
        return self._rng.uniform(at_most_s / 2, at_most_s)
