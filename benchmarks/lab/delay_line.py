"""The order in which frames leave. It reads no clock and moves no frame."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from math import inf

MAX_HELD_BYTES = 256 << 20
"""200 ms of 10 Gbps."""


class DelayLine:
    """Frames that leave a constant time after they came, and so in their order.

    Attributes:
        next_s: when the next frame leaves; infinite: none is held.
    """

    def __init__(self, delay_s: float, max_held_bytes: int = MAX_HELD_BYTES) -> None:
        self._delay_s = delay_s
        self._room_bytes = max_held_bytes
        self._frames: deque[tuple[float, int, bytes]] = deque()
        self.next_s = inf

    def push(self, sink: int, frame: bytes, now_s: float) -> bool:
        """Hold a frame for `sink` that came at `now_s`; False: dropped, as too much is held."""
        if len(frame) > self._room_bytes:
            return False
        self._room_bytes -= len(frame)
        self._frames.append((now_s + self._delay_s, sink, frame))
        self.next_s = self._frames[0][0]
        return True

    def pop_due(self, now_s: float) -> Iterator[tuple[int, bytes]]:
        """Frames whose time has come and their sinks, oldest first; they are held no more."""
        while self.next_s <= now_s:
            _, sink, frame = self._frames.popleft()
            self._room_bytes += len(frame)
            self.next_s = self._frames[0][0] if self._frames else inf
            yield sink, frame
