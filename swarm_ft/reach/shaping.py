"""How fast bytes may pass this machine's link, and how many did: what a volunteer lends of it.

All that goes between members passes a `Joint`, and each direction of it one `Gate`, which all
joints share. The conversation with the coordinator and the DHT, a few kilobytes a step, do not.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from swarm_ft.protocol.machines.rate import Bucket

BURST_S = 0.1
"""So much of a rate may pass at once after a pause."""
CHUNK_S = 0.05
"""So much of it at a time, so that several streams take turns."""
MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 1448, 1 << 16
"""A packet's; what a pipe holds."""
RECEIVED_AHEAD_S = 0.25
"""So much may wait in the kernel to be read; more would have come over the link all the same."""


class Gate:
    """Lets bytes of one direction pass, not faster than a rate. Threads may share it.

    Args:
        bytes_per_s: in the long run; infinite: as fast as they come.
        now_s: monotonic seconds.
        sleep: waits so many of them.
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
        """That are to be asked for at a time, at most."""
        if self.bytes_per_s == math.inf:
            return MAX_CHUNK_BYTES
        return int(min(max(CHUNK_S * self.bytes_per_s, MIN_CHUNK_BYTES), MAX_CHUNK_BYTES))

    def wait(self, num_bytes: int) -> None:
        """Until these may pass; they count as passed then. Blocks."""
        with self._lock:
            self.passed_bytes += num_bytes
            wait_s = self._bucket.take(num_bytes, self._now_s())
        if wait_s > 0:
            self._sleep(wait_s)


@dataclass(frozen=True, slots=True)
class Shape:
    """Both directions of a link, as this machine sees them."""

    up: Gate = field(default_factory=Gate)
    down: Gate = field(default_factory=Gate)

    @property
    def passed_bytes(self) -> int:
        """Both ways, since it was made."""
        return self.up.passed_bytes + self.down.passed_bytes

    @property
    def receive_buffer_bytes(self) -> int | None:
        """That the kernel may hold of what comes in; None: as it likes."""
        if self.down.bytes_per_s == math.inf:
            return None
        return max(4 * MIN_CHUNK_BYTES, int(RECEIVED_AHEAD_S * self.down.bytes_per_s))
