"""How much there is to do for this machine's processors, and what of it is this process's own.

The kernel's count of threads that run or wait for a processor says how long one of them waits; the
share of time that processors are busy does not. Threads of niced processes give way to others,
so they count by the weight that Linux gives them.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import replace
from pathlib import Path

from swarm_ft.protocol.messages.capacity import Machine

LOADAVG, STAT = Path("/proc/loadavg"), Path("/proc/stat")
SAMPLE_S = 0.5
MEMORY_S = 8.0
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
        self._demand = self._uses = math.nan
        self._told = Machine()
        self._told_s = -math.inf
        self._sampled = (time.monotonic(), time.process_time(), *_ticks())

    def sample(self) -> None:
        """Look at the machine."""
        at_s, own_s, niced, busy = self._sampled
        self._sampled = now_s, used_s, niced_now, busy_now = (
            time.monotonic(),
            time.process_time(),
            *_ticks(),
        )
        weight = 1 - math.exp(-(now_s - at_s) / MEMORY_S)
        niced_share = (niced_now - niced) / (busy_now - busy) if busy_now > busy else 0.0
        demand = _runnable() * (1 - (1 - NICED_WEIGHT) * niced_share)
        uses = (used_s - own_s) / max(1e-3, now_s - at_s)
        self._demand = _mixed(self._demand, demand / self._threads, weight)
        self._uses = _mixed(self._uses, uses / self._threads, weight)

    def news(self, machine: Machine) -> Machine | None:
        """Return the machine with its load, if that is worth a report."""
        if math.isnan(self._demand):
            return None
        apart = max(
            abs(self._demand - self._told.demand),
            abs(self._uses - self._told.uses),
        )
        if time.monotonic() - self._told_s < TELL_S or apart < NEWS:
            return None
        self._told, self._told_s = self.measured(machine), time.monotonic()
        return self._told

    def measured(self, machine: Machine) -> Machine:
        """Return the machine with its load, as far as it was sampled."""
        if math.isnan(self._demand):
            return machine
        return replace(machine, demand=self._demand, uses=self._uses)


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


def _ticks() -> tuple[int, int]:
    """Return ticks of niced processes, and of all work, since the machine started."""
    try:
        fields = STAT.read_text(encoding="ascii").partition("\n")[0].split()[1:4]
        user, niced, system = map(int, fields)
    except (OSError, ValueError):
        return 0, 0
    return niced, user + niced + system
