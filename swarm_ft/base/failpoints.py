"""Fail points: named places at which a fault test kills, stops, disconnects or blocks a process.

They do nothing unless the environment names a file: SWARM_FT_FAILPOINT=FILE. While that file holds
`FAULT POINT COUNT`, FAULT happens the COUNT-th time that the process reaches POINT. `kill` and
`stop` send SIGKILL and SIGSTOP, and `drop` shuts all TCP connections of the process. `hold` blocks
the process until the test removes FILE.reached, which holds the time in monotonic seconds. An order
takes effect once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

VARIABLE = "SWARM_FT_FAILPOINT"
"""Environment variable that names the file of orders."""
HOLD_AT_MOST_S, HOLD_POLL_S = 10.0, 0.002


class Failpoints:
    """Reader of one file of orders; see the module's docstring."""

    def __init__(self, orders: Path) -> None:
        self._orders = orders
        self._order = ""
        self._count = 0

    def reached(self, name: str) -> None:
        """Count an arrival at this point, and run the ordered fault once its count is reached."""
        order = self._read()
        if order != self._order:
            self._order, self._count = order, 0
        fault, _, point_and_count = order.partition(" ")
        point, _, count = point_and_count.partition(" ")
        if point != name:
            return
        self._count += 1
        if self._count >= int(count):
            self._run(fault)

    def _read(self) -> str:
        try:
            return self._orders.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return ""

    def _run(self, fault: str) -> None:
        self._orders.unlink()
        partial = self._orders.with_suffix(".partial")
        partial.write_text(str(time.monotonic()), encoding="utf-8")
        reached = partial.replace(reached_file(self._orders))
        FAULTS[fault](reached)


def reached_file(orders: Path) -> Path:
    """Return the path of the file that appears when a fault happens."""
    return orders.with_suffix(".reached")


def _drop_connections(_reached: Path) -> None:
    """Shut every TCP connection, like a router that restarts; listening sockets stay open."""
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # closed meanwhile, or not connected
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as duplicate:
                    _shut(duplicate)


def _shut(connection: socket.socket) -> None:
    if connection.family in (socket.AF_INET, socket.AF_INET6):
        connection.getpeername()
        connection.shutdown(socket.SHUT_RDWR)


def _hold(reached: Path) -> None:
    deadline_s = time.monotonic() + HOLD_AT_MOST_S
    while reached.exists() and time.monotonic() < deadline_s:
        time.sleep(HOLD_POLL_S)


FAULTS: Mapping[str, Callable[[Path], None]] = {
    "kill": lambda _reached: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda _reached: os.kill(os.getpid(), signal.SIGSTOP),
    "drop": _drop_connections,
    "hold": _hold,
}

_failpoints = Failpoints(Path(os.environ[VARIABLE])) if VARIABLE in os.environ else None


def reached(name: str) -> None:
    """Report that this process reached the fail point of this name."""
    if _failpoints is not None:
        _failpoints.reached(name)


def reached_meanwhile(name: str) -> None:
    """Report the fail point of this name as soon as the current task waits."""
    if _failpoints is not None:
        asyncio.get_running_loop().call_soon(_failpoints.reached, name)
