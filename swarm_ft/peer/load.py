"""How much there is to do for this machine's processors, and what of it is this process's own.

The kernel's count of threads that run or wait for a processor says how long one of them waits; the
share of time that processors are busy does not. Threads of niced processes give way to others,
so they count by the weight that Linux gives them.
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
"""Older samples weigh less by e."""
TELL_S = 3.0
"""From one report to the next, at least."""
NEWS = 0.15
"""By which a value has to differ from the one that was reported."""
NICED_WEIGHT = 0.11
"""Of a thread at niceness 10, to one at 0 (sched_prio_to_weight of Linux: 110 of 1024)."""


class LoadMeter:
    """Averages of the last seconds.

    Args:
        threads: with which this process computes: all is in units of such peers.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._means = (math.nan,) * 4
        self._told = Machine()
        self._told_s = -math.inf
        self._before = _Sample.taken()

    def sample(self) -> None:
        """Look at the machine."""
        before, now = self._before, _Sample.taken()
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
            _mixed(known, value / self._threads, weight)
            for known, value in zip(self._means, values, strict=True)
        )
        self._means = demand, busy, uses, waits

    def news(self, machine: Machine) -> Machine | None:
        """Return the machine with its load, if that is worth a report."""
        told = self._told.demand, self._told.busy, self._told.uses, self._told.waits
        apart = max(abs(new - old) for new, old in zip(self._means, told, strict=True))
        if not apart >= NEWS or time.monotonic() - self._told_s < TELL_S:
            return None
        demand, busy, uses, waits = self._means
        self._told = replace(machine, demand=demand, busy=busy, uses=uses, waits=waits)
        self._told_s = time.monotonic()
        return self._told


class _Sample(NamedTuple):
    """What the kernel counts.

    Attributes:
        at_s: when.
        runnable: threads of all programs that run or wait for a processor.
        busy_s: that processors worked since the machine started.
        niced_s: of that, for niced processes.
        own_s: that this process had of them.
        waited_s: that its threads waited for one.
    """

    at_s: float
    runnable: float
    busy_s: float
    niced_s: float
    own_s: float
    waited_s: float

    @classmethod
    def taken(cls) -> _Sample:
        niced_s, busy_s = _worked_s()
        own_s = time.process_time()
        return cls(time.monotonic(), _runnable(), busy_s, niced_s, own_s, _waited_s())


def _mixed(known: float, new: float, weight: float) -> float:
    return new if math.isnan(known) else known + weight * (new - known)


def _runnable() -> float:
    """Count threads that run or wait for a processor, this one left out."""
    try:
        running = LOADAVG.read_text(encoding="ascii").split()[3].partition("/")[0]
        return max(0.0, float(running) - 1)
    except (OSError, IndexError, ValueError):
        getloadavg = getattr(os, "getloadavg", None)
        return getloadavg()[0] if getloadavg is not None else 0.0


def _worked_s() -> tuple[float, float]:
    """Return seconds that processors worked for niced processes, and for all."""
    try:
        fields = STAT.read_text(encoding="ascii").partition("\n")[0].split()[1:4]
        user, niced, system = (int(field) / os.sysconf("SC_CLK_TCK") for field in fields)
    except (OSError, ValueError):
        return 0.0, 0.0
    return niced, user + niced + system


def _waited_s() -> float:
    """Return seconds that this process's threads waited for a processor; 0 where nobody counts."""
    waited_ns = 0
    try:
        for task in TASKS.iterdir():
            with contextlib.suppress(OSError, IndexError, ValueError):  # it may be gone
                waited_ns += int((task / "schedstat").read_text(encoding="ascii").split()[1])
    except OSError:
        return 0.0
    return waited_ns / 1e9
