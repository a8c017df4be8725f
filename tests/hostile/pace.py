"""The processor time of an attack, and a process that takes as much and sends nothing.

An attacker has a machine of its own elsewhere. Here it shares the cores with the honest run, so its
own work slows the run as well: a silent process that is as busy shows by how much.

    python -m tests.hostile.pace SHARE
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

SLICE_S = 0.01
"""A busy process works for its share of this time, and sleeps for the rest."""
NICE = 19
"""An attacker gives way to the swarm, whose cores it shares."""


def cpu_s(pid: int) -> float:
    """Processor time of a process until now, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def burn(cpu_share: float, is_over: Callable[[], bool] = lambda: False) -> None:
    """Take this share of one core until it is over."""
    began_s, used_s = time.monotonic(), time.process_time()
    while not is_over():
        wanted_s = cpu_share * (time.monotonic() - began_s)
        while time.process_time() - used_s < wanted_s and not is_over():
            pass
        time.sleep(SLICE_S * max(0.0, 1 - cpu_share))


if __name__ == "__main__":
    os.nice(NICE)
    print("busy", flush=True)  # noqa: T201 - its parent waits for that
    burn(min(1.0, float(sys.argv[1])))
