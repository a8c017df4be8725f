"""Limits on rates of actions and bytes: decisions on time that callers pass in."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

from swarm_ft.errors import Busy

Key = TypeVar("Key")

MAX_KEYS = 4096
"""Keys in memory; a new one replaces the least recently used.

A caller with so many addresses does not need our memory to return.
"""


class Rate(Generic[Key]):
    """Limit on actions per second for each key, with bursts.

    Each key has a bucket of `burst` tokens, which fills at `per_s`; each action costs one.

    Args:
        per_s: Actions per second in the long run.
        burst: Actions at once, after a pause.
        max_keys: Keys in memory.
    """

    def __init__(self, *, per_s: float, burst: int, max_keys: int = MAX_KEYS) -> None:
        self._per_s = per_s
        self._burst = burst
        self._max_keys = max_keys
        self._buckets: OrderedDict[Key, tuple[float, float]] = OrderedDict()

    def wait_s(self, key: Key, now_s: float) -> float:
        """Take a token of this key; return 0, or the seconds until there is one."""
        tokens, since_s = self._buckets.pop(key, (float(self._burst), now_s))
        tokens = min(self._burst, tokens + max(0.0, now_s - since_s) * self._per_s)
        is_taken = tokens >= 1
        self._buckets[key] = (tokens - is_taken, now_s)
        if len(self._buckets) > self._max_keys:
            self._buckets.popitem(last=False)
        return 0.0 if is_taken else (1 - tokens) / self._per_s

    def check(self, key: Key, now_s: float, what: str) -> None:
        """Take a token of this key.

        Args:
            key: Key of the caller.
            now_s: Monotonic seconds.
            what: Name of the action, for the error.

        Raises:
            Busy: The key has no token; the message has the seconds until it has one.
        """
        wait_s = self.wait_s(key, now_s)
        if wait_s > 0:
            raise Busy(
                f"{what} too often: expected at most {self._burst} at once and {self._per_s:g} a "
                f"second; try again in {wait_s:.2f} s"
            )


class Bucket:
    """Limit on bytes per second, with bursts.

    A caller may take more than there is, and waits until it is there; later callers wait behind it.
    So in any T seconds at most `per_s * T + burst` pass.

    Args:
        per_s: Bytes per second in the long run.
        burst: Bytes at once, after a pause.
    """

    def __init__(self, *, per_s: float, burst: float) -> None:
        self._per_s = per_s
        self._burst = burst
        self._tokens = burst
        self._since_s: float | None = None

    def take(self, count: int, now_s: float) -> float:
        """Take `count` bytes; return the seconds to wait before they pass."""
        if self._per_s == math.inf:
            return 0.0
        since_s = now_s if self._since_s is None else self._since_s
        filled = self._tokens + max(0.0, now_s - since_s) * self._per_s
        self._tokens, self._since_s = min(self._burst, filled) - count, now_s
        return max(0.0, -self._tokens / self._per_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Floor:
    """Least rate at which something has to arrive.

    Attributes:
        bytes_per_s: Bytes per second in the long run.
        grace_s: Seconds of tolerated delay.
        begun_s: Monotonic seconds of the begin.
    """

    bytes_per_s: float
    grace_s: float
    begun_s: float

    def deadline_s(self, num_bytes: int) -> float:
        """Return the monotonic seconds by which something has to follow after `num_bytes`."""
        return self.begun_s + self.grace_s + num_bytes / self.bytes_per_s
