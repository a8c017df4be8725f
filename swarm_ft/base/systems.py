"""Differences between Linux and macOS, and substitutes for what a system lacks.

Each function tries Linux' own way first. It tests for the feature, and not for the system's name,
so that tests can run the other ways here (docs/reference/systems.md lists them).
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import math
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import tty
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

# ---- the event loop, and how a user stops a process


def run_loop(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine on uvloop, which needs less processor time than asyncio's own loop."""
    import uvloop  # which takes a while

    uvloop.run(work)


def new_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop of the same kind as `run_loop`'s, for a thread to run."""
    import uvloop

    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


STOP_SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
"""Signals that end a process politely: Ctrl-C, TERM, and a closed terminal."""


@contextmanager
def keys_pressed(on_key: Callable[[str], object]) -> Iterator[None]:
    r"""Call `on_key` in the running loop with each key, while the context lasts.

    A key is the text that the terminal sends for it: a character, or `\x1b[A` for an arrow. Without
    a terminal on standard input `on_key` receives nothing.
    """
    if not sys.stdin.isatty():
        yield
        return
    file = sys.stdin.fileno()
    before = termios.tcgetattr(file)
    loop = asyncio.get_running_loop()

    def read() -> None:
        for key in _KEY.findall(os.read(file, 64).decode(errors="ignore")):
            on_key(key)

    tty.setcbreak(file)
    loop.add_reader(file, read)
    try:
        yield
    finally:
        loop.remove_reader(file)
        termios.tcsetattr(file, termios.TCSADRAIN, before)


_KEY = re.compile(r"\x1b\[[0-9;]*.|.", re.DOTALL)


def resident_bytes() -> int | None:
    """Return the bytes of memory that this process uses now; None if the system reports none."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def hide_in_command_line(secret: str) -> bool:
    """Overwrite a secret in the command line that the system shows for this process.

    Other users of the machine can read that line (`ps`, /proc/PID/cmdline). Python's own `sys.argv`
    keeps the secret.

    Returns:
        Whether the secret was there and is gone. Only Linux reports where the command line lies.
    """
    data = secret.encode(errors="surrogateescape")
    try:
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        start, end = (int(fields[number - 3]) for number in _ARGUMENTS_FIELDS)
    except (OSError, ValueError, IndexError):
        return False
    if not data or not 0 < start < end:
        return False
    found = -1
    line = ctypes.string_at(start, end - start)
    while (found := line.find(data, found + 1)) >= 0:
        ctypes.memset(start + found, ord("x"), len(data))
    return data in line


_ARGUMENTS_FIELDS = (48, 49)
"""Fields of /proc/PID/stat, from 1, with the arguments' begin and end in memory (proc(5))."""


# ---- files


def write_all(file: int, parts: Iterable[bytes], offset: int) -> None:
    """Write the parts one after the other, in as few calls as the system needs.

    Raises:
        OSError: The disk refuses.
    """
    views = [memoryview(part) for part in parts if part]
    while views:
        written = _write_some(file, views, offset)
        offset += written
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if views and written:
            views[0] = views[0][written:]


def _write_some(file: int, views: list[memoryview], offset: int) -> int:
    if hasattr(os, "pwritev"):
        return os.pwritev(file, views, offset)
    return os.pwrite(file, views[0], offset)


def sync_data(file: int) -> None:
    """Wait until a file's bytes survive a power cut.

    Raises:
        OSError: The disk refuses.
    """
    sync = getattr(os, "fdatasync", os.fsync)
    sync(file)


def reserve(file: IO[bytes], num_bytes: int) -> None:
    """Allocate disk space for a file's first `num_bytes` bytes.

    Raises:
        OSError: The disk has no room for them.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, num_bytes)
        return
    missing = num_bytes - file.seek(0, os.SEEK_END)
    chunk = bytes(1 << 20)
    while missing > 0:
        missing -= file.write(chunk[:missing])
    file.flush()


def lock_file(file: int) -> bool:
    """Lock a file against all other processes, as long as this process keeps it open.

    Returns:
        Whether this process got the lock; False while another process has it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# ---- limits of this process and resources of this machine


def raise_open_files(at_most: int) -> int:
    """Raise this process's limit of open files up to `at_most`; return it, -1 without a limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = at_most if hard == resource.RLIM_INFINITY else min(hard, at_most)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # a system that does not: the limit stays as it was
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return int(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def free_memory_bytes() -> int | None:
    """Return the bytes of memory that are free for all processes; None if unknown."""
    for ask in (_by_sysconf, _by_vm_stat):
        with suppress(ValueError, OSError, subprocess.SubprocessError):
            return ask()
    return None


def _by_sysconf() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _by_vm_stat() -> int:
    """Return macOS' free pages, with those that it would release at once, in bytes."""
    run = subprocess.run(["vm_stat"], capture_output=True, text=True, timeout=5, check=True)
    page = re.search(r"page size of (\d+) bytes", run.stdout)
    counts = re.findall(r"^Pages (?:free|inactive|speculative): +(\d+)", run.stdout, re.MULTILINE)
    if page is None or not counts:
        raise ValueError("vm_stat: expected a page size and counts of pages")
    return int(page[1]) * sum(map(int, counts))


CGROUP_FILES = ("memory.max", "memory/memory.limit_in_bytes")
"""Files with a container's memory limit, of version 2 of control groups and of version 1."""


def total_memory_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the bytes of memory of this machine or its container; None if unknown."""
    total = machine_memory_bytes()
    limits = (_limit_in(cgroup / name) for name in CGROUP_FILES)
    return None if total is None else min([total, *(one for one in limits if one is not None)])


def machine_memory_bytes() -> int | None:
    """Return the bytes of memory of this machine, outside any container; None if unknown."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


def _limit_in(file: Path) -> int | None:
    try:
        text = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return int(text) if text.isdigit() else None


def core_count() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def disk_bytes(folder: Path) -> int:
    """Return the bytes of a folder's file system; the folder need not exist yet.

    Raises:
        OSError: The system does not report it.
    """
    folder = folder.absolute()
    place = next(one for one in (folder, *folder.parents) if one.exists())
    return shutil.disk_usage(place).total


# ---- sockets

_TCP_RXT_CONNDROPTIME = 0x80
"""TCP option of macOS, in seconds; Python has no name for it."""


def drop_after(sock: socket.socket, silent_s: float) -> None:
    """End a TCP connection, where supported, once sent data stays unacknowledged for `silent_s`."""
    with suppress(OSError):
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silent_s * 1000))
        elif sys.platform == "darwin":
            sock.setsockopt(socket.IPPROTO_TCP, _TCP_RXT_CONNDROPTIME, math.ceil(silent_s))


def hold_port(listener: socket.socket) -> None:
    """Reserve a listener's port for this process, despite connections that linger there.

    Call this before `bind`.
    """
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


MAX_SOCKET_PATH_BYTES = 103
"""Bytes of a socket's path that every system accepts; Linux accepts 107."""
_LINK_BYTES = len("swarm-ft-12345678/at/")


def socket_parent(name_bytes: int) -> Path:
    """Return the folder of temporary sockets: the usual one, or /tmp if a path gets too long.

    The usual folder of macOS has 49 letters.
    """
    usual = Path(tempfile.gettempdir())
    if len(os.fsencode(usual)) + 1 + name_bytes <= MAX_SOCKET_PATH_BYTES:
        return usual
    return Path("/tmp")


@contextmanager
def short_socket_path(path: Path) -> Iterator[Path]:
    """Yield a path to this socket that is short enough to bind or connect.

    Systems take about 100 bytes. A longer path is replaced by one through a temporary link to the
    socket's folder, which is removed at the end; the socket itself stays where `path` leads.

    Raises:
        OSError: The link cannot be made.
    """
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
        yield path
        return
    parent = socket_parent(_LINK_BYTES + len(os.fsencode(path.name)))
    with tempfile.TemporaryDirectory(prefix="swarm-ft-", dir=parent) as folder:
        link = Path(folder, "at")
        link.symlink_to(path.parent.absolute(), target_is_directory=True)
        yield link / path.name
