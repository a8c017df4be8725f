"""Whether this machine's TCP forgets, in a pause, what a path carries. Reads one file of Linux.

A stage sends little while it waits for others, and the kernel then halves its window for every
timeout; the first frames after it take several round trips each. gRPC's probes (`WARM_IDLE_S`)
help for some seconds, not for longer pauses, as they fill no window.
"""

from __future__ import annotations

from pathlib import Path

SETTING = "net.ipv4.tcp_slow_start_after_idle"
ADVICE = f"links with a delay are faster after: sudo sysctl -w {SETTING}=0"


def restarts_after_idle(root: Path = Path("/proc/sys")) -> bool:
    """Whether it does; False where that is not known, as on other systems than Linux."""
    try:
        return int((root / SETTING.replace(".", "/")).read_text(encoding="ascii")) != 0
    except (OSError, ValueError):
        return False
