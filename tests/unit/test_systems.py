"""Substitutes for Linux' features: each runs here, with the feature taken away."""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from swarm_ft import private_files, systems
from swarm_ft.systems import (
    free_memory_bytes,
    lock_file,
    on_signal,
    read_at,
    reserve,
    run_loop,
    socket_parent,
    stop_signals,
    sync_data,
    write_all,
)

Lacks = Callable[..., None]


@pytest.fixture
def lacks(monkeypatch: pytest.MonkeyPatch) -> Lacks:
    """Take names of a module away, or whole modules."""

    def take(holder: object, *names: str) -> None:
        for name in names:
            monkeypatch.delattr(holder, name, raising=False)

    return take


@pytest.fixture
def without_modules(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def take(*names: str) -> None:
        for name in names:
            monkeypatch.setitem(sys.modules, name, None)

    return take


# ---- files

LACKING = [(), ("pwritev",), ("pwritev", "pwrite", "pread")]
"""Missing functions of Linux, of an older macOS, and of Windows."""


@pytest.mark.parametrize("names", LACKING, ids=["linux", "macos", "windows"])
def test_what_is_written_at_a_place_is_read_there(
    tmp_path: Path, lacks: Lacks, names: tuple[str, ...]
) -> None:
    lacks(os, *names)
    file = os.open(tmp_path / "file", systems.binary_flags(os.O_RDWR | os.O_CREAT))
    write_all(file, [b"abc", b"", b"\r\n\x1a", bytes(10)], 5)
    write_all(file, [b"xy"], 6)
    assert read_at(file, 4, 4) == b"\0axy"
    assert read_at(file, 100, 8) == b"\r\n\x1a" + bytes(10)
    assert read_at(file, 1, 100) == b""
    os.close(file)


@pytest.mark.parametrize("names", LACKING, ids=["linux", "macos", "windows"])
def test_threads_do_not_disturb_each_others_places(
    tmp_path: Path, lacks: Lacks, names: tuple[str, ...]
) -> None:
    lacks(os, *names)
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)

    def write_and_read(number: int) -> bool:
        mine = bytes([number]) * 64
        write_all(file, [mine], 64 * number)
        return read_at(file, 64, 64 * number) == mine

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(write_and_read, range(200)))
    os.close(file)


def test_a_short_write_goes_on_where_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking_write = os.pwrite
    monkeypatch.delattr(os, "pwritev")
    monkeypatch.setattr(os, "pwrite", lambda f, data, at: lacking_write(f, data[:3], at))
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    write_all(file, [b"0123456789", b"abcde"], 0)
    assert read_at(file, 100, 0) == b"0123456789abcde"
    os.close(file)


@pytest.mark.parametrize("names", [(), ("posix_fallocate",)], ids=["linux", "others"])
def test_room_on_the_disk_is_taken(tmp_path: Path, lacks: Lacks, names: tuple[str, ...]) -> None:
    lacks(os, *names)
    path = tmp_path / "reserve"
    for _ in range(2):
        with path.open("ab") as file:
            reserve(file, 3_000_001)
    assert path.stat().st_size == 3_000_001
    assert path.stat().st_blocks * 512 >= 3_000_001


def test_data_are_synced_without_fdatasync(tmp_path: Path, lacks: Lacks) -> None:
    lacks(os, "fdatasync")
    with (tmp_path / "file").open("wb") as file:
        file.write(b"data")
        file.flush()
        sync_data(file.fileno())


class _Msvcrt(SimpleNamespace):
    """Windows' locks of one byte each, until the file is closed."""

    LK_NBLCK = 2

    def locking(self, file: int, mode: int, num_bytes: int) -> None:
        import fcntl

        assert (mode, num_bytes, os.lseek(file, 0, os.SEEK_CUR)) == (self.LK_NBLCK, 1, 0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PermissionError(13, "Permission denied") from None


@pytest.mark.parametrize("has_fcntl", [True, False], ids=["fcntl", "msvcrt"])
def test_one_has_a_lock_and_others_have_it_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_fcntl: bool
) -> None:
    if not has_fcntl:
        found = importlib.import_module
        windows = {"fcntl": None, "msvcrt": _Msvcrt()}

        def import_module(name: str) -> object:
            if name in windows and windows[name] is None:
                raise ImportError(name)
            return windows.get(name) or found(name)

        lookup = SimpleNamespace(import_module=import_module)
        monkeypatch.setattr("swarm_ft.systems.importlib", lookup)
    one, other = (os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT) for _ in range(2))
    assert lock_file(one)
    assert not lock_file(other)
    os.close(one)
    assert lock_file(other)
    os.close(other)


def test_files_are_kept_where_there_are_no_modes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: Lacks
) -> None:
    monkeypatch.setattr(private_files, "HAS_MODES", False)
    lacks(os, "fchmod", "geteuid")
    folder = private_files.private_folder(tmp_path / "folder")
    with (
        private_files.atomic_write(folder / "file") as partial,
        private_files.open_private(partial, "wb") as file,
    ):
        file.write(b"data")
    private_files.flush_to_disk(folder / "file")
    private_files.flush_to_disk(folder)
    assert (folder / "file").read_bytes() == b"data"


# ---- the loop and its signals


def test_without_uvloop_work_runs_on_asyncios_loop(without_modules: Callable[..., None]) -> None:
    ran: list[str] = []

    async def work() -> None:
        ran.append(type(asyncio.get_running_loop()).__module__.partition(".")[0])

    run_loop(work())
    without_modules("uvloop")
    run_loop(work())
    assert ran == ["uvloop", "asyncio"]


@pytest.mark.parametrize("has_handlers", [True, False], ids=["posix", "windows"])
def test_a_signal_calls_what_it_should_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, has_handlers: bool
) -> None:
    def refuse(*_: object) -> None:
        raise NotImplementedError

    if not has_handlers:
        monkeypatch.setattr(asyncio.SelectorEventLoop, "add_signal_handler", refuse)
    before = signal.getsignal(signal.SIGTERM)

    async def work() -> None:
        has_come = asyncio.Event()
        on_signal(signal.SIGTERM, has_come.set)
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
            await has_come.wait()
            has_come.clear()

    try:
        asyncio.run(work())
        signal.getsignal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_signal_that_comes_when_the_loop_is_gone_does_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(asyncio.SelectorEventLoop, "add_signal_handler", refuse)
    before = signal.getsignal(signal.SIGTERM)

    async def work() -> None:
        on_signal(signal.SIGTERM, pytest.fail)

    try:
        asyncio.run(work())
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_signals_that_a_system_lacks_are_not_waited_for(lacks: Lacks) -> None:
    assert signal.SIGHUP in stop_signals()
    lacks(signal, "SIGHUP")
    assert stop_signals() == (signal.SIGINT, signal.SIGTERM)


# ---- what a process may have


def test_without_limits_that_can_be_asked_for_some_files_are_counted_on(
    without_modules: Callable[..., None],
) -> None:
    without_modules("resource")
    assert systems.raise_open_files(1 << 16) == systems.NO_LIMIT_FILES
    assert systems.raise_open_files(100) == 100


VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                                5000.
Pages active:                            200000.
Pages inactive:                            3000.
Pages speculative:                          500.
Pages wired down:                        100000.
"Translation faults":                 123456789.
"""


def test_macos_tells_its_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_name: str) -> int:
        raise ValueError("unrecognized configuration name")

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 0, VM_STAT)

    monkeypatch.setattr(os, "sysconf", unknown)
    monkeypatch.setattr(subprocess, "run", run)
    assert free_memory_bytes() == 8500 * 16384


def test_windows_tells_its_free_memory(monkeypatch: pytest.MonkeyPatch, lacks: Lacks) -> None:
    def fill_status(pointer: object) -> int:
        status = pointer._obj  # type: ignore[attr-defined]  # noqa: SLF001  # ctypes' own word
        assert status.length == 64
        status.available = 7 << 30
        return 1

    lacks(os, "sysconf")
    kernel32 = SimpleNamespace(GlobalMemoryStatusEx=fill_status)
    windll = SimpleNamespace(kernel32=kernel32)
    monkeypatch.setattr(ctypes, "windll", windll, raising=False)
    monkeypatch.setattr(subprocess, "run", _no_such_command)
    assert free_memory_bytes() == 7 << 30


def test_a_system_that_tells_nothing_is_one_of_unknown_memory(
    monkeypatch: pytest.MonkeyPatch, lacks: Lacks
) -> None:
    lacks(os, "sysconf")
    monkeypatch.setattr(subprocess, "run", _no_such_command)
    assert free_memory_bytes() is None


def _no_such_command(*_: object, **__: object) -> None:
    raise FileNotFoundError


def test_this_system_tells_its_free_memory() -> None:
    free = free_memory_bytes()
    assert free is not None
    assert 1 << 20 < free < 1 << 50


def test_sockets_are_where_their_names_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: "/var/folders/zz/" + 32 * "z" + "/T")
    assert socket_parent(40) != Path("/tmp")
    assert socket_parent(70) == Path("/tmp")


class _Options:
    """A socket that records its options."""

    def __init__(self) -> None:
        self.set: list[tuple[int, int, int]] = []

    def setsockopt(self, level: int, name: int, value: int) -> None:
        self.set.append((level, name, value))


@pytest.mark.parametrize(
    ("platform", "options"),
    [("darwin", [(6, 0x80, 8)]), ("win32", [(6, 5, 8)]), ("plan9", [])],
)
def test_dead_links_are_noticed_without_linux_option(
    monkeypatch: pytest.MonkeyPatch,
    lacks: Lacks,
    platform: str,
    options: list[tuple[int, int, int]],
) -> None:
    lacks(socket, "TCP_USER_TIMEOUT")
    monkeypatch.setattr(sys, "platform", platform)
    sock = _Options()
    systems.drop_after(sock, 7.5)  # type: ignore[arg-type]
    assert sock.set == options


def test_linux_drops_a_silent_link_in_time() -> None:
    with socket.socket() as sock:
        systems.drop_after(sock, 7.5)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 7500


@pytest.mark.parametrize("is_windows", [False, True])
def test_nobody_else_listens_at_a_port(monkeypatch: pytest.MonkeyPatch, is_windows: bool) -> None:
    if is_windows:
        monkeypatch.setattr(socket, "SO_EXCLUSIVEADDRUSE", -5, raising=False)
    sock = _Options()
    systems.hold_port(sock)  # type: ignore[arg-type]
    assert sock.set == [(socket.SOL_SOCKET, -5 if is_windows else socket.SO_REUSEADDR, 1)]


# ---- secrets in a command line

WORD = "swarm1KNiD7aJ4ghup2YUyAbDu8WP6PXoZo84MjH3JdoS2orsahzsvjuLVvze"
needs_proc = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="only Linux tells where the command line is"
)


def shown_command_line(script: str, *arguments: str) -> list[str]:
    """Return the command line that the system shows of a Python process after this script ran."""
    script += "\nprint(open('/proc/self/cmdline').read())"
    command = [sys.executable, "-c", script, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return result.stdout.rstrip("\n").split("\0")[3:]


@needs_proc
@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (("serve-stage", WORD), ["serve-stage", "x" * len(WORD)]),
        (("status", f"--invite={WORD}", "-v"), ["status", f"--invite={'x' * len(WORD)}", "-v"]),
        (("a", WORD, WORD), ["a", "x" * len(WORD), "x" * len(WORD)]),
        (("serve-stage", "@file"), ["serve-stage", "@file"]),
    ],
)
def test_a_secret_is_overwritten_in_the_command_line(
    arguments: tuple[str, ...], shown: list[str]
) -> None:
    hide = f"from swarm_ft.systems import hide_in_command_line; hide_in_command_line({WORD!r})"
    assert shown_command_line(hide, *arguments)[: len(shown)] == shown


@needs_proc
def test_the_command_overwrites_invitations_before_anything_else() -> None:
    script = (
        "import sys\nfrom swarm_ft.cli import main\n"
        "main.run = lambda: print(end='') or 0\n"
        "try: main.main()\nexcept SystemExit: pass\n"
        f"assert sys.argv[2] == {WORD!r}"
    )
    shown = shown_command_line(script, "serve-stage", WORD, "--invite", WORD)
    assert shown[:4] == ["serve-stage", "x" * len(WORD), "--invite", "x" * len(WORD)]


def test_what_is_in_no_command_line_is_not_hidden() -> None:
    assert not systems.hide_in_command_line("swarm1-that-nobody-typed-anywhere")
    assert not systems.hide_in_command_line("")
