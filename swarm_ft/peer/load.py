"""The load of this machine's processors, and the share of this process in it.

The kernel's count of threads that run or wait for a processor determines how long one of them
waits; the share of busy time does not. Threads of niced processes give way to others, so they count
by the weight that Linux gives them.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from swarm_ft.protocol.messages.capacity import Machine

LOADAVG, STAT, TASKS = Path("/proc/loadavg"), Path("/proc/stat"), Path("/proc/self/task")
SAMPLE_S = 0.5
MEMORY_S = 5.0
"""Seconds after which a sample weighs less by a factor of e."""
TELL_S = 3.0
"""Seconds between two reports, at least."""
NEWS = 0.15
"""Change of a value that is worth a report."""
NICED_WEIGHT = 0.11
"""Weight of a thread at niceness 10, from Linux's sched_prio_to_weight: 110 of 1024."""


class LoadMeter:
    """Averages of the load over the last seconds.

    Args:
        threads: Compute threads of this process; loads are in units of this many threads.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._means = (math.nan,) * 4
        self._reported = Machine()
        self._reported_s = -math.inf
        self._before = _Sample.take()

    def sample(self) -> None:
        """Add a sample of the present load."""
        before, now = self._before, _Sample.take()
        self._before, passed_s = now, max(1e-3, now.at_s - before.at_s)
        weight = 1 - math.exp(-passed_s / MEMORY_S)
        busy_s = now.busy_s - before.busy_s
        niced_share = (now.niced_s - before.niced_s) / busy_s if busy_s > 0 else 0.0
        values = (
            now.runnable * (1 - (1 - NICED_WEIGHT) * niced_share),
            busy_s / passed_s,
            (now.own_s - before.own_s) / passed_s,
            max(0.0, now.waited_s - before.waited_s) / passed_s,
        )
        demand, busy, uses, waits = (
            _average(known, value / self._threads, weight)
            for known, value in zip(self._means, values, strict=True)
        )
        self._means = demand, busy, uses, waits

    def take_report(self, machine: Machine) -> Machine | None:
        """Return the machine with its load, if the load changed enough for a report; else None."""
        reported = (
            self._reported.demand,
            self._reported.busy,
            self._reported.uses,
            self._reported.waits,
        )
        apart = max(abs(new - old) for new, old in zip(self._means, reported, strict=True))
        if not apart >= NEWS or time.monotonic() - self._reported_s < TELL_S:
            return None
        demand, busy, uses, waits = self._means
        self._reported = replace(machine, demand=demand, busy=busy, uses=uses, waits=waits)
        self._reported_s = time.monotonic()
        return self._reported


class _Sample(NamedTuple):
    """The kernel's counters at one moment.

    Attributes:
        at_s: Time of the sample.
        runnable: Threads of all programs that run or wait for a processor.
        busy_s: Seconds that processors worked since the machine started.
        niced_s: Seconds of `busy_s` for niced processes.
        own_s: Seconds that this process used.
        waited_s: Seconds that this process's threads waited for a processor.
    """

    at_s: float
    runnable: float
    busy_s: float
    niced_s: float
    own_s: float
    waited_s: float

    @classmethod
    def take(cls) -> _Sample:
        niced_s, busy_s = _worked_s()
        own_s = time.process_time()
        return cls(time.monotonic(), _runnable(), busy_s, niced_s, own_s, _waited_s())


def _average(known: float, new: float, weight: float) -> float:
    return new if math.isnan(known) else known + weight * (new - known)


def _runnable() -> float:
    """Return the number of threads that run or wait for a processor, without this one."""
    try:
        running = LOADAVG.read_text(encoding="ascii").split()[3].partition("/")[0]
        return max(0.0, float(running) - 1)
    except (OSError, IndexError, ValueError):
        getloadavg = getattr(os, "getloadavg", None)
        return getloadavg()[0] if getloadavg is not None else 0.0


def _worked_s() -> tuple[float, float]:
    """Return seconds that processors worked for niced processes, and in all."""
    try:
        fields = STAT.read_text(encoding="ascii").partition("\n")[0].split()[1:4]
        user, niced, system = (int(field) / os.sysconf("SC_CLK_TCK") for field in fields)
    except (OSError, ValueError):
        return 0.0, 0.0
    return niced, user + niced + system


def _waited_s() -> float:
    """Return seconds that this process's threads waited for a processor; 0 where not counted."""
    waited_ns = 0
    try:
        for task in TASKS.iterdir():
            with contextlib.suppress(OSError, IndexError, ValueError):  # it may be gone
                waited_ns += int((task / "schedstat").read_text(encoding="ascii").split()[1])
    except OSError:
        return 0.0
    return waited_ns / 1e9
