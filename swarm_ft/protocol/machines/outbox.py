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

    def __init__(self) -> None:
        self._window = 0
        self._unacknowledged: dict[K, M] = {}
        self._waiting: deque[K] = deque()
        self._in_flight: set[K] = set()

    def __len__(self) -> int:
        return len(self._unacknowledged)

    def find(self, key: K) -> M | None:
        """A message that is not acknowledged."""
        return self._unacknowledged.get(key)

    def put(self, key: K, message: M) -> list[M]:
        """Keep a message until it is acknowledged."""
        self._unacknowledged[key] = message
        self._waiting.append(key)
        return self._due()

    def acknowledge(self, key: K) -> list[M]:
        """The other side has it; an acknowledgement of anything else changes nothing."""
        self.withdraw(key)
        return self._due()

    def withdraw(self, key: K) -> None:
        """Do not send it, or not again."""
        self._unacknowledged.pop(key, None)
        self._in_flight.discard(key)

    def connected(self, window: int) -> list[M]:
        """A stream is up: what was on the way over the last one may be lost.

        Args:
            window: messages that may be on the way.
        """
        self._window = window
        self._in_flight.clear()
        self._waiting = deque(self._unacknowledged)
        return self._due()

    def disconnected(self) -> None:
        """The stream is gone; messages wait."""
        self._window = 0

    def clear(self) -> None:
        """Forget all messages."""
        for held in (self._unacknowledged, self._waiting, self._in_flight):
            held.clear()

    def _due(self) -> list[M]:
        due: list[M] = []
        while self._waiting and len(self._in_flight) < self._window:
            key = self._waiting.popleft()
            if key in self._unacknowledged and key not in self._in_flight:
                self._in_flight.add(key)
                due.append(self._unacknowledged[key])
        return due
