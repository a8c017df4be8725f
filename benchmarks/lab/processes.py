"""Python modules run on the hosts of a lab, which report in lines of JSON."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.lab.host import Host

ROOT = Path(__file__).parents[2]
LOOK_S = 0.5
"""How often a process that waits for another's words looks whether all still run."""
LOG_CHARS = 8000


@dataclass(frozen=True)
class _Running:
    process: subprocess.Popen[bytes]
    log: Path


class LabProcesses:
    """Use it in a `with`: at its end they are gone, with all that they started.

    Their standard input stays open meanwhile and ends with this process: whoever reads it needs no
    other word to leave.
    """

    def __init__(self) -> None:
        self._running: dict[str, _Running] = {}

    def __enter__(self) -> Self:
        self._logs = tempfile.TemporaryDirectory(prefix="lab-logs-")
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for running in self._running.values():
            with suppress(ProcessLookupError):
                os.killpg(running.process.pid, signal.SIGKILL)
            running.process.communicate()
        self._logs.cleanup()

    def start(self, name: str, host: Host, module: str, *arguments: str) -> None:
        """Start `python -m MODULE ARGUMENTS` on a host, with one thread for each of its tasks."""
        command = host.command(sys.executable, "-m", module, *arguments)
        path = Path(self._logs.name) / f"{name}.log"
        with path.open("wb") as log:
            process = subprocess.Popen(
                command,
                bufsize=0,  # so that `select` sees every line
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self._running[name] = _Running(process, path)

    def request(self, name: str, timeout_s: float) -> dict[str, Any]:
        """Write an empty line to a process; the next line of JSON that it prints.

        Raises:
            RuntimeError: one of all processes ended before.
            TimeoutError: it printed none in time.
        """
        words = self._running[name].process.stdin
        if words is not None:
            words.write(b"\n")
        return self.read(name, timeout_s)

    def read(self, name: str, timeout_s: float) -> dict[str, Any]:
        """Read the next line of JSON that a process prints.

        Raises:
            RuntimeError: one of all processes ended before.
            TimeoutError: it printed none in time.
        """
        output = self._running[name].process.stdout
        if output is None:
            raise ValueError(f"{name} has no output to read")
        deadline = time.monotonic() + timeout_s
        while not select.select([output], [], [], LOOK_S)[0]:
            self._check_all_run()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name} said nothing in {timeout_s} s:\n{self._log(name)}")
        line = output.readline()
        if not line:
            raise RuntimeError(f"{name} ended:\n{self._log(name)}")
        words: dict[str, Any] = json.loads(line)
        return words

    def _check_all_run(self) -> None:
        for name, running in self._running.items():
            code = running.process.poll()
            if code is not None:
                raise RuntimeError(f"{name} ended with {code}:\n{self._log(name)}")

    def _log(self, name: str) -> str:
        return self._running[name].log.read_text(encoding="utf-8", errors="replace")[-LOG_CHARS:]
