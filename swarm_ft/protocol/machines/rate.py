"""How often somebody may do something, and how slowly: decisions about time that is passed in."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

from swarm_ft.errors import Busy

Key = TypeVar("Key")

MAX_KEYS = 4096
"""That are remembered; of more the one that was seen longest ago is forgotten. Where keys are
addresses, whoever has so many needs no memory of ours to come again."""


class Rate(Generic[Key]):
    """So many a second for each key, and some at once.

    Each key has a bucket of `burst` tokens, which fills at `per_s`; whatever is done takes one.

    Args:
        per_s: how often, in the long run.
        burst: how often at once, after a pause.
        max_keys: how many are remembered.
    """

    def __init__(self, *, per_s: float, burst: int, max_keys: int = MAX_KEYS) -> None:
        self._per_s = per_s
        self._burst = burst
        self._max_keys = max_keys
        self._buckets: OrderedDict[Key, tuple[float, float]] = OrderedDict()

    def wait_s(self, key: Key, now_s: float) -> float:
        """Take a token of this key; 0 if there was one, else how long until there is."""
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
            key: whose.
            now_s: monotonic seconds.
            what: too often done, in words.

        Raises:
            Busy: there is none; says when there is.
        """
        wait_s = self.wait_s(key, now_s)
        if wait_s > 0:
            raise Busy(
                f"{what} too often: {self._burst} at once and {self._per_s:g} a second are taken; "
                f"try again in {wait_s:.2f} s"
            )


class Bucket:
    """So many bytes a second in the long run, and some at once.

    What is taken may be more than is there: whoever takes it waits until it is, and those who come
    later wait behind. So in any time of T seconds at most `per_s * T + burst` pass.

    Args:
        per_s: how many.
        burst: at once, after a pause.
    """

    def __init__(self, *, per_s: float, burst: float) -> None:
        self._per_s = per_s
        self._burst = burst
        self._tokens = burst
        self._since_s: float | None = None

    def take(self, count: int, now_s: float) -> float:
        """Take so many; how long to wait before they pass, in seconds."""
        if self._per_s == math.inf:
            return 0.0
        since_s = now_s if self._since_s is None else self._since_s
        filled = self._tokens + max(0.0, now_s - since_s) * self._per_s
        self._tokens, self._since_s = min(self._burst, filled) - count, now_s
        return max(0.0, -self._tokens / self._per_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Floor:
    """The least speed at which something has to arrive.

    Attributes:
        bytes_per_s: in the long run.
        grace_s: that it may be late.
        begun_s: when it began, monotonic.
    """

    bytes_per_s: float
    grace_s: float
    begun_s: float

    def deadline_s(self, num_bytes: int) -> float:
        """Until when something has to follow after so many bytes, monotonic."""
        return self.begun_s + self.grace_s + num_bytes / self.bytes_per_s
