"""Network namespaces by name: what is there, and how they go. Needs root and Linux."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from contextlib import suppress
from pathlib import Path


def run(*command: str) -> str:
    """What a command prints.

    Raises:
        OSError: it failed.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def namespaces() -> list[str]:
    """The names of all that are there."""
    return [line.split()[0] for line in run("ip", "netns", "list").splitlines()]


def remove_namespaces(prefix: str) -> None:
    """Remove those whose names begin so, with all processes in them."""
    for name in namespaces():
        if name.startswith(prefix):
            with suppress(OSError):  # somebody else removed it
                _remove(name)


def remove_leftovers(family: str) -> None:
    """Remove those named `family`, a process id, `-` and more, whose process is gone."""
    for owner in {m[1] for name in namespaces() if (m := re.match(rf"{family}(\d+)-", name))}:
        if not Path(f"/proc/{owner}").exists():
            remove_namespaces(f"{family}{owner}-")


def _remove(name: str) -> None:
    for pid in run("ip", "netns", "pids", name).split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    run("ip", "netns", "del", name)
