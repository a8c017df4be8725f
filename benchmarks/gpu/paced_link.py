"""A link of loopback that passes bytes at a rate, for machines without `tc`; needs no package.

    python -m benchmarks.gpu.paced_link HOST:PORT

Prints `{"port": N}`: what connects to that port gets to HOST:PORT. Reads lines `{"mbps": X}`: how
fast each direction passes from now on, 0 for as fast as it comes, which it does at first. Each
connection has both directions of a link for itself, as two neighbours have.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import sys
import threading
import time

CHUNK_BYTES, LEAST_CHUNK_BYTES = 1 << 16, 1448
CHUNK_S = 0.005
"""So much of a rate passes at a time."""
SLACK_S = 0.001
"""Sleeps that are shorter are put off."""
MOST_LATE_S = 0.25
"""That sleeps may take too long, and be made up for."""
BUFFER_BYTES = 256 << 10
"""That the kernel holds in front of a link: a home router's queue, not megabytes."""
LOOPBACK = "127.0.0.1"


class Rate:
    """The rate of all directions of a link.

    Attributes:
        bytes_per_s: 0 for as fast as they come.
    """

    def __init__(self) -> None:
        self.bytes_per_s = 0.0

    def set_mbps(self, mbps: float) -> None:
        """Set the rate from now on."""
        self.bytes_per_s = mbps * 1e6 / 8

    @property
    def chunk_bytes(self) -> int:
        """That are to pass at a time."""
        if not self.bytes_per_s:
            return CHUNK_BYTES
        return int(min(max(CHUNK_S * self.bytes_per_s, LEAST_CHUNK_BYTES), CHUNK_BYTES))


class Pace:
    """The time at which the next bytes of one direction may pass; the caller passes the clock."""

    def __init__(self, rate: Rate) -> None:
        self._rate = rate
        self._free_s = 0.0

    def wait_s(self, num_bytes: int, now_s: float, *, was_idle: bool) -> float:
        """Seconds that these have to wait, which then count as passed; 0 or less: none.

        Args:
            was_idle: there was nothing to pass before they came. Else a sleep that took too long
                is made up for.
        """
        if not self._rate.bytes_per_s:
            return 0.0
        earliest_s = now_s if was_idle else now_s - MOST_LATE_S
        self._free_s = max(self._free_s, earliest_s) + num_bytes / self._rate.bytes_per_s
        return self._free_s - now_s


def passed_on(source: socket.socket, to: socket.socket, rate: Rate) -> None:
    """Pass what comes in one direction until it ends."""
    pace, buffer = Pace(rate), bytearray(CHUNK_BYTES)
    view = memoryview(buffer)
    with contextlib.suppress(OSError):
        while True:
            was_idle = not select.select([source], [], [], 0)[0]
            if not (size := source.recv_into(view, rate.chunk_bytes)):
                break
            wait_s = pace.wait_s(size, time.monotonic(), was_idle=was_idle)
            if wait_s > SLACK_S:
                time.sleep(wait_s)
            to.sendall(view[:size])
    for end in (source, to):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def accepted(listener: socket.socket, place: str, rate: Rate) -> None:
    """Join each connection that comes with one to `place`."""
    host, _, port = place.rpartition(":")
    while True:
        incoming, _ = listener.accept()
        try:
            outgoing = socket.create_connection((host, int(port)))
        except OSError:
            incoming.close()
            continue
        for end in (incoming, outgoing):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for pair in ((incoming, outgoing), (outgoing, incoming)):
            threading.Thread(target=passed_on, args=(*pair, rate), daemon=True).start()


def main() -> None:
    """Pass bytes until standard input ends."""
    rate, place = Rate(), sys.argv[1]
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)  # its connections', too
    listener.bind((LOOPBACK, 0))
    listener.listen()
    threading.Thread(target=accepted, args=(listener, place, rate), daemon=True).start()
    sys.stdout.write(json.dumps({"port": listener.getsockname()[1]}) + "\n")
    sys.stdout.flush()
    for line in sys.stdin:
        rate.set_mbps(json.loads(line)["mbps"])


if __name__ == "__main__":
    main()
