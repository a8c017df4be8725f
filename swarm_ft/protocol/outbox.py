"""What was sent to one other side and is not acknowledged yet, over streams that break.

At most a window of it is on the way; after a reconnect all that is unacknowledged goes out again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
M = TypeVar("M")


class Outbox(Generic[K, M]):
    """Messages by key, oldest first. Each method that may free room returns what is to go out."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._is_up = False
        self._unacknowledged: dict[K, M] = {}
        self._waiting: deque[K] = deque()
        self._in_flight: set[K] = set()

    def __len__(self) -> int:
        return len(self._unacknowledged)

    def put(self, key: K, message: M) -> list[M]:
        """Keep a message until it is acknowledged."""
        self._unacknowledged[key] = message
        self._waiting.append(key)
        return self._due()

    def acknowledge(self, key: K) -> list[M]:
        """The other side has it; an acknowledgement of anything else changes nothing."""
        self._unacknowledged.pop(key, None)
        self._in_flight.discard(key)
        return self._due()

    def connected(self) -> list[M]:
        """A stream is up: what was on the way over the last one may be lost."""
        self._is_up = True
        self._in_flight.clear()
        self._waiting = deque(self._unacknowledged)
        return self._due()

    def disconnected(self) -> None:
        """The stream is gone; messages wait."""
        self._is_up = False

    def clear(self) -> None:
        """Forget all messages."""
        for held in (self._unacknowledged, self._waiting, self._in_flight):
            held.clear()

    def _due(self) -> list[M]:
        due: list[M] = []
        while self._is_up and self._waiting and len(self._in_flight) < self._window:
            key = self._waiting.popleft()
            if key in self._unacknowledged:
                self._in_flight.add(key)
                due.append(self._unacknowledged[key])
        return due
