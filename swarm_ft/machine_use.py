"""What else this machine is at: its battery, its GPU, whoever sits at it.

Each question is answered with yes, no, or why this system cannot tell.
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
"""Nobody is at a machine at which nothing was typed for so long."""
BUSY_PERCENT = 10
"""Of a GPU, that another program takes at least if it is in use."""
ASK_S = 5.0
"""How long a system's tool may take to answer."""


class CannotTell(Exception):
    """This system does not say, and why."""


def on_battery(supplies: Path = POWER_SUPPLIES) -> bool:
    """Whether no mains feed this machine.

    Raises:
        CannotTell: the system tells of no battery.
    """
    kinds = {path: _line(path / "type") for path in _entries(supplies)}
    mains = [path for path, kind in kinds.items() if kind in {"Mains", "USB"}]
    batteries = [path for path, kind in kinds.items() if kind == "Battery"]
    if not batteries:
        raise CannotTell(f"{supplies} tells of no battery")
    if any(_line(path / "online") == "1" for path in mains):
        return False
    return bool(mains) or any(_line(path / "status") == "Discharging" for path in batteries)


def gpu_busy(own_pid: int | None = None) -> bool:
    """Whether another program than this one uses an NVIDIA GPU.

    Raises:
        CannotTell: `nvidia-smi` is not there, or does not say who uses it.
    """
    if shutil.which("nvidia-smi") is None:
        raise CannotTell("nvidia-smi is not installed: only NVIDIA's GPUs are known")
    return is_used_by_others(_asked("nvidia-smi", "pmon", "-c", "1", "-s", "u"), own_pid)


def is_used_by_others(pmon: str, own_pid: int | None = None) -> bool:
    """What `nvidia-smi pmon -s u` says: whether another process computes or draws.

    Args:
        pmon: its output: GPU, process, kind, and percents of its use.
        own_pid: this process; None: the one that asks.
    """
    own = str(os.getpid() if own_pid is None else own_pid)
    rows = (line.split() for line in pmon.splitlines() if not line.startswith("#"))
    others = (row for row in rows if len(row) > 3 and row[1] not in {"-", own})
    return any(row[3].isdigit() and int(row[3]) >= BUSY_PERCENT for row in others)


def user_active(terminals: Path = TERMINALS, now_s: float | None = None) -> bool:
    """Whether something was typed or moved at this machine in the last minutes.

    Raises:
        CannotTell: there is neither logind nor a terminal.
    """
    if shutil.which("loginctl") is not None and Path("/run/systemd/seats").is_dir():
        said = _asked("loginctl", "show-session", "--property=IdleHint")
        if "IdleHint=" in said:
            return "IdleHint=no" in said
    typed_s = [path.stat().st_atime for path in _entries(terminals) if path.name.isdigit()]
    if not typed_s and not terminals.is_dir():
        raise CannotTell("neither systemd-logind nor /dev/pts is there to ask")
    now_s = time.time() if now_s is None else now_s
    return any(now_s - seconds < IDLE_AFTER_S for seconds in typed_s)


def _asked(*command: str) -> str:
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise CannotTell(f"{command[0]} does not answer: {error}") from error
    return answer.stdout


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
