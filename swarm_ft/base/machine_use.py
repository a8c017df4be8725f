"""Other use of this machine: battery power, programs on its GPU, a person at its keyboard.

Each function returns a bool, or raises `CannotTell` on a system that does not provide the answer.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

POWER_SUPPLIES = Path("/sys/class/power_supply")
TERMINALS = Path("/dev/pts")
IDLE_AFTER_S = 300.0
"""Seconds without input after which nobody counts as using the machine."""
BUSY_PERCENT = 10
"""Percent of a GPU from which on another program counts as using it."""
ASK_S = 5.0
"""Seconds until a system tool's call fails."""


class CannotTell(Exception):
    """This system cannot answer the question; the message names the reason."""


def on_battery(supplies: Path = POWER_SUPPLIES) -> bool:
    """Whether this machine runs on battery power.

    Raises:
        CannotTell: The system reports no battery.
    """
    kinds = {path: _line(path / "type") for path in _entries(supplies)}
    mains = [path for path, kind in kinds.items() if kind in {"Mains", "USB"}]
    batteries = [path for path, kind in kinds.items() if kind == "Battery"]
    if not batteries:
        raise CannotTell(f"{supplies} lists no battery")
    if any(_line(path / "online") == "1" for path in mains):
        return False
    return bool(mains) or any(_line(path / "status") == "Discharging" for path in batteries)


def gpu_busy(own_pid: int | None = None) -> bool:
    """Whether another program than this one uses an NVIDIA GPU.

    Raises:
        CannotTell: `nvidia-smi` is missing or fails.
    """
    if shutil.which("nvidia-smi") is None:
        raise CannotTell("nvidia-smi is not installed; only NVIDIA's GPUs can be checked")
    return is_used_by_others(_output_of("nvidia-smi", "pmon", "-c", "1", "-s", "u"), own_pid)


def is_used_by_others(pmon: str, own_pid: int | None = None) -> bool:
    """Whether the output of `nvidia-smi pmon -s u` shows use of a GPU by another process.

    Args:
        pmon: Output of the tool: one row per process with GPU, process id, kind and percents.
        own_pid: Process id to ignore; None: this process.
    """
    own = str(os.getpid() if own_pid is None else own_pid)
    rows = (line.split() for line in pmon.splitlines() if not line.startswith("#"))
    others = (row for row in rows if len(row) > 3 and row[1] not in {"-", own})
    return any(row[3].isdigit() and int(row[3]) >= BUSY_PERCENT for row in others)


def user_active(terminals: Path = TERMINALS, now_s: float | None = None) -> bool:
    """Whether somebody used this machine's keyboard or mouse within `IDLE_AFTER_S`.

    Raises:
        CannotTell: The system has neither logind nor terminals.
    """
    if shutil.which("loginctl") is not None and Path("/run/systemd/seats").is_dir():
        idle_hints = _output_of("loginctl", "show-session", "--property=IdleHint")
        if "IdleHint=" in idle_hints:
            return "IdleHint=no" in idle_hints
    typed_s = [path.stat().st_atime for path in _entries(terminals) if path.name.isdigit()]
    if not typed_s and not terminals.is_dir():
        raise CannotTell("this system has neither systemd-logind nor /dev/pts")
    now_s = time.time() if now_s is None else now_s
    return any(now_s - seconds < IDLE_AFTER_S for seconds in typed_s)


def _output_of(*command: str) -> str:
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise CannotTell(f"{command[0]} does not answer: {error}") from error
    return run.stdout


def _entries(folder: Path) -> Iterator[Path]:
    try:
        yield from sorted(folder.iterdir())
    except OSError:
        return


def _line(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
