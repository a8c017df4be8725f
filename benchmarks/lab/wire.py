"""All delayed links of a lab, in one loop in a process of its own. Needs root and Linux.

    python -m benchmarks.lab.wire

A wire joins two network devices: what either sends, the other receives a constant time later.
Shaping is left to the devices' own queues. The process reads the wires from its input, a line
`NEAR FAR DELAY_S` each, makes both devices in the namespace in which it runs, and answers with an
empty line; they may then be moved elsewhere. It ends when its input does, so with its lab, however
that ends, and the devices go with it.
"""

from __future__ import annotations

import fcntl
import gc
import os
import select
import struct
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from math import inf

from benchmarks.lab.delay_line import DelayLine

MAX_TURN_S = 0.001
TURNS_PER_DELAY = 10
"""Waking up costs more than carrying a frame, so while there is much to carry, the loop turns at
most so often, and a frame leaves at the turn nearest its time."""
UNHURRIED_TURNS = 20
"""That many turns may follow each other at once, so that lone packets are carried to the point."""
MAX_FRAMES_PER_TURN = 256
"""Of one device, so that the others have their turn too."""

TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x2, 0x1000, 0x4000
OFFLOADS = 0x1 | 0x2 | 0x4
"""TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO6: as on a veth pair, TCP's segments of up to 64 KiB travel
whole and without checksums, and queues count them as the packets that they stand for."""
MAX_FRAME_BYTES = 10 + 14 + 65_536
"""virtio's header, Ethernet's, and the largest segment."""


class Wires:
    """The wires, and the loop that serves them."""

    def __init__(self) -> None:
        self._lines: dict[float, DelayLine] = {}
        self._routes: dict[int, tuple[int, DelayLine]] = {}
        self._turn_s = MAX_TURN_S

    def add(self, near: str, far: str, delay_s: float) -> None:
        """Make two devices, and serve them from now on."""
        line = self._lines.setdefault(delay_s, DelayLine(delay_s))
        one, other = open_tap(near), open_tap(far)
        self._routes |= {one: (other, line), other: (one, line)}
        self._turn_s = min(self._turn_s, delay_s / TURNS_PER_DELAY)

    def serve(self, orders: int) -> None:
        """Carry frames until the pipe `orders` ends."""
        turn_s = time.monotonic()
        while True:
            readable = self._wait(turn_s, orders)
            now_s = time.monotonic()
            turn_s = max(turn_s, now_s - UNHURRIED_TURNS * self._turn_s) + self._turn_s
            if orders in readable:
                readable.remove(orders)
                if not self._obey(os.read(orders, select.PIPE_BUF)):
                    return
            self._turn(readable, now_s)

    def _wait(self, turn_s: float, orders: int) -> list[int]:
        """Wait until `turn_s`, then until there is work; return the devices that have frames."""
        time.sleep(max(0.0, turn_s - time.monotonic()))
        due_s = min((line.next_s for line in self._lines.values()), default=inf)
        timeout_s = None if due_s == inf else max(0.0, due_s - time.monotonic())
        return select.select([orders, *self._routes], [], [], timeout_s)[0]

    def _turn(self, readable: Iterable[int], now_s: float) -> None:
        for source in readable:
            sink, line = self._routes[source]
            with suppress(BlockingIOError):
                for _ in range(MAX_FRAMES_PER_TURN):
                    line.push(sink, os.read(source, MAX_FRAME_BYTES), now_s)
        for line in self._lines.values():
            for sink, frame in line.pop_due(now_s + self._turn_s / 2):
                with suppress(OSError):  # a device that is down, as it is at first, takes none
                    os.write(sink, frame)

    def _obey(self, orders: bytes) -> bool:
        for order in orders.decode().splitlines():
            near, far, delay_s = order.split()
            self.add(near, far, float(delay_s))
            os.write(sys.stdout.fileno(), b"\n")
        return bool(orders)


def open_tap(name: str) -> int:
    """Open a new TAP device that lives until it is closed; each read or write is a frame."""
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    fcntl.ioctl(tap, TUNSETOFFLOAD, OFFLOADS)
    return tap


def main() -> None:
    """Ahead of all other processes, or the delay would be that of a busy processor."""
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    gc.disable()  # frames by the thousand, and no cycles
    Wires().serve(sys.stdin.fileno())


if __name__ == "__main__":
    main()
