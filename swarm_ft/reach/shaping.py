"""Rates and counts of bytes over this machine's link, as a volunteer lends it.

All traffic between members passes a `Joint`, and in each direction one `Gate`, which all joints
share. The stream to the coordinator and the DHT, a few kilobytes a step, pass none.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from swarm_ft.protocol.machines.rate import Bucket

BURST_S = 0.1
"""Seconds of a rate that may pass at once after a pause."""
CHUNK_S = 0.05
"""Seconds of a rate that pass at a time, so that several streams take turns."""
MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 1448, 1 << 16
"""Bytes of a packet, and of a pipe."""
RECEIVED_AHEAD_S = 0.25
"""Seconds of a rate that may wait in the kernel unread; more would cross the link anyway."""


class Gate:
    """Limiter of one direction's bytes to a rate; threads may share it.

    Args:
        bytes_per_s: Bytes per second in the long run; infinite: no limit.
        now_s: Returns monotonic seconds.
        sleep: Waits a number of seconds.
    """

    def __init__(
        self,
        bytes_per_s: float = math.inf,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.bytes_per_s = bytes_per_s
        self._bucket = Bucket(per_s=bytes_per_s, burst=BURST_S * bytes_per_s)
        self._now_s, self._sleep = now_s, sleep
        self._lock = threading.Lock()
        self.passed_bytes = 0

    @property
    def chunk_bytes(self) -> int:
        """Bytes to read at a time, at most."""
        if self.bytes_per_s == math.inf:
            return MAX_CHUNK_BYTES
        return int(min(max(CHUNK_S * self.bytes_per_s, MIN_CHUNK_BYTES), MAX_CHUNK_BYTES))

    def wait(self, num_bytes: int) -> None:
        """Count these bytes as passed, and block until they may pass."""
        with self._lock:
            self.passed_bytes += num_bytes
            wait_s = self._bucket.take(num_bytes, self._now_s())
        if wait_s > 0:
            self._sleep(wait_s)


@dataclass(frozen=True, slots=True)
class Shape:
    """Gates of both directions of this machine's link."""

    up: Gate = field(default_factory=Gate)
    down: Gate = field(default_factory=Gate)

    @property
    def passed_bytes(self) -> int:
        """Bytes that passed, both ways, since the start."""
        return self.up.passed_bytes + self.down.passed_bytes

    @property
    def receive_buffer_bytes(self) -> int | None:
        """Bytes that the kernel may hold unread; None: the kernel's default."""
        if self.down.bytes_per_s == math.inf:
            return None
        return max(4 * MIN_CHUNK_BYTES, int(RECEIVED_AHEAD_S * self.down.bytes_per_s))
