"""Network namespaces by name: what is there, and how they go. Needs root and Linux."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

FOLDER = Path("/run/netns")
"""Where `ip netns` keeps them."""
CLONE_NEWNET = 0x40000000
LIBC = ctypes.CDLL(None, use_errno=True)


def run(*command: str, text: str | None = None) -> str:
    """Run a command and return its output; `text` is its input, or None for this process's.

    Raises:
        OSError: it failed.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False, input=text)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def configure(name: str, *words: str) -> None:
    """Run several `ip` commands in a namespace, one after another.

    Raises:
        OSError: one failed; those before it are done.
    """
    try:
        run("ip", "-n", name, "-batch", "-", text="\n".join(words))
    except OSError as error:
        raise OSError(f"{error}\nof\n" + "\n".join(words)) from error


def namespaces() -> list[str]:
    """List the names of all network namespaces."""
    return [line.split()[0] for line in run("ip", "netns", "list").splitlines()]


def enter(name: str) -> None:
    """Move the calling thread there, for good.

    Raises:
        OSError: there is none of that name, or this is not root.
    """
    with (FOLDER / name).open("rb") as namespace:
        if LIBC.setns(namespace.fileno(), CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, f"cannot enter {name}: {os.strerror(number)}")


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
