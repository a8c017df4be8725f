"""A local swarm as child processes: started, watched, ended. Knows commands, not what they do."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from swarm_ft.errors import RunFailed

START_TIMEOUT_S = 60.0
ENDING_SIGNALS = (signal.SIGINT, signal.SIGINT, signal.SIGKILL)
"""Politely; then for those that keep a result for its client; then for good."""
STOP_TIMEOUT_S = 5.0
"""After each of them."""


@dataclass(frozen=True, slots=True)
class Child:
    """One running command of ours; those named ROLE.1, ROLE.2, ... stand in for each other."""

    name: str
    process: asyncio.subprocess.Process
    log_file: Path

    @property
    def role(self) -> str:
        """What the run needs at least one of."""
        return self.name.partition(".")[0]


class ProcessSwarm:
    """Commands of `swarm-ft` as children of this process, each with a log of its own.

    Args:
        log_dir: made if absent; one file a process.
        threads: CPU threads that each child computes with.
    """

    def __init__(self, log_dir: Path, *, threads: int = 1) -> None:
        self._log_dir = log_dir
        self._threads = threads
        self._children: list[Child] = []

    async def start_all(self, commands: Mapping[str, Sequence[str]]) -> None:
        """Start several commands side by side, by their names.

        Raises:
            RunFailed: one of them ended, or said nothing in time; the others may be up.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for name, arguments in commands.items():
                    group.create_task(self.start(name, arguments))
        except* RunFailed as failures:
            raise failures.exceptions[0] from None

    async def start(self, name: str, arguments: Sequence[str]) -> dict[str, object]:
        """Start `swarm-ft ARGUMENTS --json`; what it prints first, once it is up.

        Raises:
            RunFailed: it ended, or said nothing in time.
        """
        self._log_dir.mkdir(parents=True, exist_ok=True)
        log_file = self._log_dir / f"{name}.log"
        command = (sys.executable, "-m", "swarm_ft", *arguments, "--json")
        with log_file.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": str(self._threads)},
                # Ctrl-C in the terminal is for us; we then end the children in order.
                start_new_session=True,
            )
        child = Child(name, process, log_file)
        self._children.append(child)
        return await self._first_words(child)

    async def _first_words(self, child: Child) -> dict[str, object]:
        stdout = child.process.stdout
        if stdout is None:
            raise RunFailed(f"{child.name}: started without a pipe")
        try:
            line = await asyncio.wait_for(stdout.readline(), START_TIMEOUT_S)
        except TimeoutError:
            raise RunFailed(f"{child.name} did not come up; see {child.log_file}") from None
        if not line:
            await child.process.wait()
            raise RunFailed(f"{child.name} ended at once: {_last_line(child.log_file)}")
        words: dict[str, object] = json.loads(line)
        return words

    async def first_loss(self, on_end: Callable[[str], None]) -> None:
        """Wait until a child ends that no other can stand in for.

        Args:
            on_end: told in words of a child that ended and whose replicas go on.

        Raises:
            RunFailed: always; it says which and why.
        """
        waits = {asyncio.ensure_future(c.process.wait()): c for c in self._children}
        try:
            while True:
                done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for child in [waits.pop(wait) for wait in done]:
                    ended = f"{child.name} ended with {child.process.returncode}"
                    if child.role not in {other.role for other in waits.values()}:
                        raise RunFailed(f"{ended}: {_last_line(child.log_file)}")
                    on_end(f"{ended}; others host its layers, and the run goes on")
        finally:
            for wait in waits:
                wait.cancel()

    async def stop(self) -> None:
        """End all children, last started first: politely, and at last for good."""
        for number in ENDING_SIGNALS:
            alive = [child.process for child in self._children if child.process.returncode is None]
            for process in reversed(alive):
                process.send_signal(number)
            if alive:
                waits = [asyncio.ensure_future(process.wait()) for process in alive]
                await asyncio.wait(waits, timeout=STOP_TIMEOUT_S)

    def kill(self) -> None:
        """End all children at once."""
        for child in self._children:
            if child.process.returncode is None:
                child.process.kill()


def _last_line(log_file: Path) -> str:
    lines = log_file.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"{lines[-1]} (see {log_file})" if lines else f"see {log_file}"
