"""CPU time of the processes of a lab, from /proc."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_s(pids: Iterable[int]) -> float:
    """Seconds that these processes and their descendants computed until now; those alive."""
    parents = _parents()
    wanted = set(pids)
    total = 0
    for pid in parents:
        ancestor: int | None = pid
        while ancestor is not None and ancestor not in wanted:
            ancestor = parents.get(ancestor)
        if ancestor is not None:
            total += _ticks(pid)
    return total / _TICKS_PER_S


def _parents() -> dict[int, int]:
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    fields = {pid: _fields(pid) for pid in pids}
    return {pid: int(found[1]) for pid, found in fields.items() if found}


def _ticks(pid: int) -> int:
    fields = _fields(pid)
    return int(fields[11]) + int(fields[12]) if fields else 0


def _fields(pid: int) -> list[str]:
    """Of /proc/PID/stat, those behind the command's name; none if the process is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return []
    return text.rpartition(")")[2].split()
