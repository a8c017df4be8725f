"""What the tests of commands share: a command line in this process, or processes of their own."""

import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Protocol

import pytest

import swarm_ft
from benchmarks.lab.host import THIS_MACHINE, Host
from swarm_ft.client.demo_input import DemoInput

PACKAGE_DIR = str(Path(swarm_ft.__file__).parents[1])
START_TIMEOUT_S = 60
MARK = "SWARM_FT_TEST"
"""An environment variable that all processes of a test have, and their children with them."""


STARTS = ("looking for the run", "reading the model and the data", "starting ")


def error_lines(err: str) -> list[str]:
    """Lines of standard error but the one that a command shows before its libraries load."""
    first, *lines = err.splitlines() or [""]
    return lines if first.startswith(STARTS) else [first, *lines]


class Spawned:
    """One `swarm-ft` process; its standard error is read line by line as it comes."""

    def __init__(
        self, arguments: Iterable[object], cwd: Path, env: dict[str, str], host: Host
    ) -> None:
        self.process = subprocess.Popen(
            host.command(sys.executable, "-m", "swarm_ft", *map(str, arguments)),
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._changed = threading.Condition()
        self._lines: dict[str, list[str | None]] = {"out": [], "err": []}
        self._readers = [
            threading.Thread(target=self._read, args=(name, pipe), daemon=True)
            for name, pipe in (("out", self.process.stdout), ("err", self.process.stderr))
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, name: str, pipe: IO[str]) -> None:
        for line in pipe:
            with self._changed:
                self._lines[name].append(line.rstrip("\n"))
                self._changed.notify_all()
        pipe.close()
        with self._changed:
            self._lines[name].append(None)
            self._changed.notify_all()

    def _said(self, name: str) -> list[str]:
        return [line for line in self._lines[name] if line is not None]

    @property
    def out(self) -> list[str]:
        return self._said("out")

    @property
    def err(self) -> list[str]:
        return self._said("err")

    def wait_for(self, name: str, text: str, timeout_s: float = START_TIMEOUT_S) -> str:
        """The first line of `out` or `err` that has `text` in it."""

        def found() -> str | None:
            return next((line for line in self._said(name) if text in line), None)

        with self._changed:
            is_there = self._changed.wait_for(
                lambda: found() is not None or None in self._lines[name], timeout_s
            )
            line = found()
        assert line is not None, f"no {text!r} ({is_there=}) in {self.out} {self.err}"
        return line

    def first_words(self) -> dict[str, Any]:
        words: dict[str, Any] = json.loads(self.wait_for("out", "{"))
        return words

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def ends(self, timeout_s: float = START_TIMEOUT_S) -> int:
        """Its exit code, once it and all its output have ended."""
        code = self.process.wait(timeout_s)
        for reader in self._readers:
            reader.join(10)
        return code

    def interrupted(self, timeout_s: float = 15) -> int:
        self.signal(signal.SIGINT)
        return self.ends(timeout_s)


class Shell:
    """Starts commands, and ends what is left of them.

    Args:
        cwd: where they work, and keep what they keep.
        host: where they run.
    """

    def __init__(self, cwd: Path, host: Host = THIS_MACHINE) -> None:
        self.cwd = cwd
        self.host = host
        self.models = next((p for p in cwd.parents if p.name.startswith("pytest-")), cwd)
        self.mark = uuid.uuid4().hex
        self.env = {
            **os.environ,
            MARK: self.mark,
            # Also where the package is not installed, but only lies on this process's path.
            "PYTHONPATH": os.pathsep.join((PACKAGE_DIR, os.environ.get("PYTHONPATH", ""))),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(cwd / "hf"),
            "XDG_CACHE_HOME": str(cwd / "cache"),
        }
        self._spawned: list[Spawned] = []
        self._others: list[Shell] = []

    def spawn(self, *arguments: object) -> Spawned:
        if arguments[0] == "serve-stage":
            # All that tests make lies there, the models of jobs too.
            arguments = (*arguments, "--models", self.models)
        spawned = Spawned(arguments, self.cwd, self.env, self.host)
        self._spawned.append(spawned)
        return spawned

    def up(self, *arguments: object) -> Spawned:
        """A command that serves, once it is up."""
        spawned = self.spawn(*arguments, "--json")
        spawned.first_words()
        return spawned

    def invited(self, *options: object) -> str:
        """The word of a new invitation."""
        made = self.spawn("invite", "--json", *options)
        assert made.ends() == 0, made.err
        word: str = made.first_words()["invite"]
        return word

    def closes(self, other: "Shell") -> None:
        """With it, another user's one."""
        self._others.append(other)

    def close(self) -> None:
        for other in self._others:
            other.close()
        for spawned in self._spawned:
            if spawned.process.poll() is None:
                spawned.process.kill()
            spawned.ends()

    def alive(self) -> dict[int, str]:
        """Command lines, by pid, of all processes that this shell's commands started and left."""
        found: dict[int, str] = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                if f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes():
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    if command:  # a zombie has none
                        found[int(entry.name)] = command
            except OSError:
                continue
        return found

    def kill(self, words: str) -> None:
        """Kill the one process whose command line has these words in it."""
        (pid,) = (pid for pid, command in self.alive().items() if words in command)
        os.kill(pid, signal.SIGKILL)

    def all_gone(self, timeout_s: float = 5) -> bool:
        """Whether nothing is alive, now or soon: daemons end a moment after their masters."""
        deadline = time.monotonic() + timeout_s
        while self.alive() and time.monotonic() < deadline:
            threading.Event().wait(0.1)
        return not self.alive()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@pytest.fixture(scope="session", autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One key for all clients of the tests, in this process or another; not this user's own."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
            patch.setenv(name, str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    made = Shell(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="module")
def module_shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    made = Shell(tmp_path_factory.mktemp("shell"))
    yield made
    made.close()


class Result:
    """What a command of this process came to."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code = code
        self.out = out
        self.err = err


class RunHere(Protocol):
    """See `run_here`."""

    def __call__(self, *arguments: object) -> Result: ...


@pytest.fixture
def run_here(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> RunHere:
    """`run_here("demo", "--steps", 3)`: the command in this process, with an empty standard input.

    pytest's own standard input raises an `OSError` when a command reads it.
    """
    from swarm_ft.cli.main import run

    monkeypatch.setattr("sys.stdin", io.StringIO())

    def call(*arguments: object) -> Result:
        capfd.readouterr()
        code = run([str(argument) for argument in arguments])
        return Result(code, *capfd.readouterr())

    return call


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> DemoInput:
    """A three-layer GPT-2-type model with its tokenizer, and text."""
    from swarm_ft.client.demo_input import write_demo_input

    return write_demo_input(
        tmp_path_factory.mktemp("sample"), seed=1, num_layers=3, hidden_size=32, vocab_size=300
    )
