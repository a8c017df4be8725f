"""Substitutes for Linux' features: each runs here, with the feature taken away."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from swarm_ft.base import systems
from swarm_ft.base.systems import (
    free_memory_bytes,
    lock_file,
    reserve,
    socket_parent,
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


# ---- files

LACKING = [(), ("pwritev",)]
"""Missing functions of Linux, and of an older macOS."""


@pytest.mark.parametrize("names", LACKING, ids=["linux", "macos"])
def test_what_is_written_at_a_place_is_read_there(
    tmp_path: Path, lacks: Lacks, names: tuple[str, ...]
) -> None:
    lacks(os, *names)
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    write_all(file, [b"abc", b"", b"\r\n\x1a", bytes(10)], 5)
    write_all(file, [b"xy"], 6)
    assert os.pread(file, 4, 4) == b"\0axy"
    assert os.pread(file, 100, 8) == b"\r\n\x1a" + bytes(10)
    assert os.pread(file, 1, 100) == b""
    os.close(file)


@pytest.mark.parametrize("names", LACKING, ids=["linux", "macos"])
def test_threads_do_not_disturb_each_others_places(
    tmp_path: Path, lacks: Lacks, names: tuple[str, ...]
) -> None:
    lacks(os, *names)
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)

    def write_and_read(number: int) -> bool:
        mine = bytes([number]) * 64
        write_all(file, [mine], 64 * number)
        return os.pread(file, 64, 64 * number) == mine

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
    assert os.pread(file, 100, 0) == b"0123456789abcde"
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


def test_one_has_a_lock_and_others_have_it_later(tmp_path: Path) -> None:
    one, other = (os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT) for _ in range(2))
    assert lock_file(one)
    assert not lock_file(other)
    os.close(one)
    assert lock_file(other)
    os.close(other)


# ---- what a process may have


VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                                5000.
Pages active:                            200000.
Pages inactive:                            3000.
Pages speculative:                          500.
Pages wired down:                        100000.
"Translation faults":                 123456789.
"""


def unknown(_name: str) -> int:
    raise ValueError("unrecognized configuration name")


def test_macos_tells_its_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 0, VM_STAT)

    monkeypatch.setattr(os, "sysconf", unknown)
    monkeypatch.setattr(subprocess, "run", run)
    assert free_memory_bytes() == 8500 * 16384


def test_a_system_that_tells_nothing_is_one_of_unknown_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sysconf", unknown)
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
    [("darwin", [(6, 0x80, 8)]), ("plan9", [])],
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


def test_a_port_is_held_although_connections_linger_there() -> None:
    sock = _Options()
    systems.hold_port(sock)  # type: ignore[arg-type]
    assert sock.set == [(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)]


# ---- secrets in a command line

WORD = "swarm1KNiD7aJ4ghup2YUyAbDu8WP6PXoZo84MjH3JdoS2orsahzsvjuLVvze"
needs_proc = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="only Linux tells where the command line is"
)


def shown_command_line(script: str, *arguments: str) -> list[str]:
    """Return the command line that the system shows of a Python process after this script ran."""
    script += "\nprint(open('/proc/self/cmdline').read())"
    command = [sys.executable, "-c", script, *arguments]
    told = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return told.stdout.rstrip("\n").split("\0")[3:]


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
    hide = f"from swarm_ft.base.systems import hide_in_command_line; hide_in_command_line({WORD!r})"
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
