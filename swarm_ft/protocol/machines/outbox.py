"""Messages to one other side until they are acknowledged, over streams that break.

At most a window of them is in flight; after a reconnect all unacknowledged ones go out again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
M = TypeVar("M")


class Outbox(Generic[K, M]):
    """Messages by key, oldest first; methods that may free room return the messages to send."""

    def __init__(self) -> None:
        self._window = 0
        self._unacknowledged: dict[K, M] = {}
        self._waiting: deque[K] = deque()
        self._in_flight: set[K] = set()

    def __len__(self) -> int:
        return len(self._unacknowledged)

    def find(self, key: K) -> M | None:
        """Return an unacknowledged message, if there is one."""
        return self._unacknowledged.get(key)

    def put(self, key: K, message: M) -> list[M]:
        """Store a message until it is acknowledged."""
        self._unacknowledged[key] = message
        self._waiting.append(key)
        return self._due()

    def acknowledge(self, key: K) -> list[M]:
        """Record an acknowledgement; one for another message changes nothing."""
        self.withdraw(key)
        return self._due()

    def withdraw(self, key: K) -> None:
        """Stop sending a message."""
        self._unacknowledged.pop(key, None)
        self._in_flight.discard(key)

    def connected(self, window: int) -> list[M]:
        """Restart on a new stream, since messages in flight may be lost.

        Args:
            window: Messages that may be in flight.
        """
        self._window = window
        self._in_flight.clear()
        self._waiting = deque(self._unacknowledged)
        return self._due()

    def disconnected(self) -> None:
        """Record that the stream is gone; messages wait."""
        self._window = 0

    def clear(self) -> None:
        """Forget all messages."""
        for messages in (self._unacknowledged, self._waiting, self._in_flight):
            messages.clear()

    def _due(self) -> list[M]:
        due: list[M] = []
        while self._waiting and len(self._in_flight) < self._window:
            key = self._waiting.popleft()
            if key in self._unacknowledged and key not in self._in_flight:
                self._in_flight.add(key)
                due.append(self._unacknowledged[key])
        return due
