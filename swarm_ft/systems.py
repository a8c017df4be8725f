"""What Linux, macOS and Windows do not have in common, and what serves where it is missing.

Linux' own way comes first in each function. It is asked for when it is needed, and not by the
system's name, so that tests run the other ways here (docs/reference/systems.md says which).
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, ModuleType
from typing import IO, Any

# ---- the event loop, and how a process is asked to stop


def run_loop(work: Coroutine[Any, Any, None]) -> None:
    """Run on uvloop, or on asyncio's own loop, which takes more of a processor."""
    uvloop = _module("uvloop")
    if uvloop is None:
        asyncio.run(work)
    else:
        uvloop.run(work)


def new_loop() -> asyncio.AbstractEventLoop:
    """A loop of the same kind, for a thread to run."""
    uvloop = _module("uvloop")
    loop: asyncio.AbstractEventLoop
    loop = asyncio.new_event_loop() if uvloop is None else uvloop.new_event_loop()
    return loop


def stop_signals() -> tuple[signal.Signals, ...]:
    """Ctrl-C, the polite kill, and a terminal that was closed, as far as the system has them."""
    names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")
    return tuple(getattr(signal, name) for name in names if hasattr(signal, name))


def on_signal(number: signal.Signals, call: Callable[[], object]) -> None:
    """Call this in the running loop, whenever the signal comes; nothing else follows from it.

    For the main thread.
    """
    loop = asyncio.get_running_loop()

    def tell(_number: int, _frame: FrameType | None) -> None:
        with suppress(RuntimeError):  # the loop is closed by now
            loop.call_soon_threadsafe(call)

    try:
        loop.add_signal_handler(number, call)
    except NotImplementedError:  # Windows' loops
        signal.signal(number, tell)


@contextmanager
def keys_pressed(on_key: Callable[[str], object]) -> Iterator[None]:
    r"""Call `on_key` in the running loop with each key, while the context lasts.

    A key is what the terminal sends for it: a character, or `\x1b[A` for an arrow. Where standard
    input is no terminal, or the system has no such terminals, nothing is heard.
    """
    termios, tty = _module("termios"), _module("tty")
    if termios is None or tty is None or not sys.stdin.isatty():
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
    """Memory that this process takes now; None where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def hide_in_command_line(secret: str) -> bool:
    """Overwrite a secret in what the system shows as this process's command line.

    Other users of the machine read that (`ps`, /proc/PID/cmdline). Python's own `sys.argv` keeps
    the secret.

    Returns:
        Whether it was there and is gone. Only Linux tells where the command line is.
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
"""Of /proc/PID/stat, counted from 1: where the arguments begin and end in memory (proc(5))."""


# ---- files

_no_pread = threading.Lock()
"""For files whose one position all threads share."""


def binary_flags(flags: int) -> int:
    """What `os.open` is to be given for a file of bytes. No child inherits it."""
    return flags | getattr(os, "O_BINARY", 0)


def read_at(file: int, num_bytes: int, offset: int) -> bytes:
    """Up to so many bytes from this place on; other threads may read and write meanwhile.

    Raises:
        OSError: the disk refuses.
    """
    if hasattr(os, "pread"):
        return os.pread(file, num_bytes, offset)
    with _no_pread:
        os.lseek(file, offset, os.SEEK_SET)
        return os.read(file, num_bytes)


def write_all(file: int, parts: Iterable[bytes], offset: int) -> None:
    """Write the parts one after the other, in as few calls as the system needs.

    Raises:
        OSError: the disk refuses.
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
    if hasattr(os, "pwrite"):
        return os.pwrite(file, views[0], offset)
    with _no_pread:
        os.lseek(file, offset, os.SEEK_SET)
        return os.write(file, views[0])


def sync_data(file: int) -> None:
    """Wait until a file's bytes would outlive a power cut.

    Raises:
        OSError: the disk refuses.
    """
    sync = getattr(os, "fdatasync", os.fsync)
    sync(file)


def reserve(file: IO[bytes], num_bytes: int) -> None:
    """Take so many bytes of the disk for a file, which lie there from now on.

    Raises:
        OSError: the disk has not as many.
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
    """Keep all other processes out of what this file stands for, as long as it is open.

    Returns:
        Whether it could be had: it cannot, while another has it.
    """
    fcntl = _module("fcntl")
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:  # Windows
            msvcrt: Any = importlib.import_module("msvcrt")
            os.lseek(file, 0, os.SEEK_SET)
            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
    except (BlockingIOError, PermissionError):
        return False
    return True


# ---- what this process may have

NO_LIMIT_FILES = 2048
"""Where a system sets no limit that can be asked for: as many as Windows' C library opens."""


def raise_open_files(at_most: int) -> int:
    """Let this process open as many files as the system lets it; the number, -1: without limit."""
    resource = _module("resource")
    if resource is None:
        return min(at_most, NO_LIMIT_FILES)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = at_most if hard == resource.RLIM_INFINITY else min(hard, at_most)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # a system that does not: the limit stays as it was
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return int(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def free_memory_bytes() -> int | None:
    """Of this machine, for all its processes, now; None where nobody tells."""
    for ask in (_by_sysconf, _by_vm_stat, _by_windows):
        with suppress(AttributeError, ValueError, OSError, subprocess.SubprocessError):
            return ask()
    return None


def _by_sysconf() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _by_vm_stat() -> int:
    """On macOS: of pages that are free, and of those that it would give away at once."""
    run = subprocess.run(["vm_stat"], capture_output=True, text=True, timeout=5, check=True)
    page = re.search(r"page size of (\d+) bytes", run.stdout)
    counts = re.findall(r"^Pages (?:free|inactive|speculative): +(\d+)", run.stdout, re.MULTILINE)
    if page is None or not counts:
        raise ValueError("vm_stat tells something else")
    return int(page[1]) * sum(map(int, counts))


CGROUP_FILES = ("memory.max", "memory/memory.limit_in_bytes")
"""The limits of a container: of version 2 of control groups, and of version 1."""


def total_memory_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the memory that this machine has in all, or its container; None: unknown."""
    found = [limit for name in CGROUP_FILES if (limit := _limit_in(cgroup / name)) is not None]
    for ask in (_total_by_sysconf, _total_by_windows):
        with suppress(AttributeError, ValueError, OSError):
            found.append(ask())
            break
    else:
        return None
    return min(found)


def _limit_in(file: Path) -> int | None:
    try:
        text = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return int(text) if text.isdigit() else None


def _total_by_sysconf() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def core_count() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def disk_bytes(folder: Path) -> int:
    """Return the size of a folder's file system; the folder need not be there yet.

    Raises:
        OSError: the system does not say.
    """
    folder = folder.absolute()
    place = next(one for one in (folder, *folder.parents) if one.exists())
    return shutil.disk_usage(place).total


class _MemoryStatus(ctypes.Structure):
    """Windows' MEMORYSTATUSEX."""

    _fields_ = (
        ("length", ctypes.c_uint32),
        ("load", ctypes.c_uint32),
        ("total", ctypes.c_uint64),
        ("available", ctypes.c_uint64),
        ("others", ctypes.c_uint64 * 5),
    )


def _by_windows() -> int:
    return int(_windows_memory().available)


def _total_by_windows() -> int:
    return int(_windows_memory().total)


def _windows_memory() -> _MemoryStatus:
    status = _MemoryStatus(length=ctypes.sizeof(_MemoryStatus))
    libraries: Any = getattr(ctypes, "windll", None)
    if not libraries.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
        raise OSError("GlobalMemoryStatusEx")
    return status


# ---- sockets

_SILENT_FOR = {"darwin": 0x80, "win32": 5}
"""Options of TCP in seconds that Python has no names for: TCP_RXT_CONNDROPTIME, TCP_MAXRT."""


def drop_after(sock: socket.socket, silent_s: float) -> None:
    """End a connection of TCP when what was sent is not acknowledged for so long, where it can."""
    with suppress(OSError):
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silent_s * 1000))
        elif sys.platform in _SILENT_FOR:
            sock.setsockopt(socket.IPPROTO_TCP, _SILENT_FOR[sys.platform], math.ceil(silent_s))


def hold_port(listener: socket.socket) -> None:
    """Before it is bound: nobody else may listen there, and connections that linger do not count.

    Windows means something else by the option that says the latter: that others may listen, too.
    """
    if hasattr(socket, "SO_EXCLUSIVEADDRUSE"):
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
    else:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


HAS_SOCKET_PATHS = hasattr(socket, "AF_UNIX")
"""Sockets of the file system. On Windows Python has none, nor its gRPC (grpc/grpc#35880)."""
MAX_SOCKET_PATH_BYTES = 103
"""What every system takes; Linux takes 107."""


def socket_parent(name_bytes: int) -> Path:
    """Where temporary sockets are; /tmp where that of temporary files leaves too little for a name.

    macOS' is 49 letters long.
    """
    usual = Path(tempfile.gettempdir())
    if len(os.fsencode(usual)) + 1 + name_bytes <= MAX_SOCKET_PATH_BYTES:
        return usual
    return Path("/tmp")


def _module(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
