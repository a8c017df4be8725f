"""Processes of a part on this machine: started with an argument list, controlled by lines of JSON.

They belong to the part's own process group, so that what ends the part ends them.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).parents[2]
LOOK_S = 0.2
LOG_CHARS = 600


class Processes:
    """Use it in a `with`: at its end they are gone."""

    def __init__(self) -> None:
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._unread: dict[str, bytes] = {}

    def __enter__(self) -> Self:
        self._logs = tempfile.TemporaryDirectory(prefix="gpu-logs-")
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for process in self._running.values():
            process.kill()
        for process in self._running.values():
            process.communicate()
        self._logs.cleanup()

    def start(self, name: str, module: str, arguments: Sequence[str]) -> None:
        """Start `python -m MODULE ARGUMENTS`."""
        environment: Mapping[str, str] = {**os.environ, "OMP_NUM_THREADS": "1"}
        with self._log(name).open("wb") as log:
            self._running[name] = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                bufsize=0,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        self._unread[name] = b""

    def send(self, name: str, words: Mapping[str, object]) -> None:
        """Write a line of JSON to its standard input."""
        pipe = self._running[name].stdin
        if pipe is not None:
            pipe.write(json.dumps(words).encode() + b"\n")

    def receive(self, name: str, timeout_s: float) -> dict[str, Any]:
        """Read the next line of JSON that it prints.

        Raises:
            RuntimeError: one of all processes ended before.
            TimeoutError: it printed none in time.
        """
        output, end_s = self._running[name].stdout, time.monotonic() + timeout_s
        if output is None:
            raise ValueError(f"{name} has no output to read")
        while b"\n" not in self._unread[name]:
            self.check_all_run()
            if time.monotonic() > end_s:
                raise TimeoutError(f"{name} said nothing in {timeout_s:.0f} s: {self.tail(name)}")
            if select.select([output], [], [], LOOK_S)[0]:
                self._unread[name] += os.read(output.fileno(), 1 << 16)
        line, _, self._unread[name] = self._unread[name].partition(b"\n")
        words: dict[str, Any] = json.loads(line)
        return words

    def check_all_run(self) -> None:
        """See whether they do.

        Raises:
            RuntimeError: one ended.
        """
        for name, process in self._running.items():
            if process.poll() is not None:
                raise RuntimeError(f"{name} ended with {process.returncode}: {self.tail(name)}")

    def tail(self, name: str) -> str:
        """Return the end of its standard error."""
        text = self._log(name).read_text(encoding="utf-8", errors="replace")
        return text[-LOG_CHARS:].strip()

    def _log(self, name: str) -> Path:
        return Path(self._logs.name) / f"{name}.log"


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody has now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
