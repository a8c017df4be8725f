"""Commands of `swarm-ft` as processes, each with a log and a home of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO, Any

START_S, END_S = 120.0, 180.0
MAX_LINE_BYTES = 1 << 24
HOMES = ("HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")
SETTINGS = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

Document = dict[str, Any]


class Command:
    """A running command; its output is read on demand, its log is a file.

    Args:
        name: of its log.
        process: with its output in a pipe.
    """

    def __init__(self, name: str, process: Process) -> None:
        self.name = name
        self._process = process

    @classmethod
    async def start(cls, name: str, home: Path, *words: object) -> Command:
        """Start `swarm-ft WORDS` in this home."""
        with _log(home, name) as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "swarm_ft", *map(str, words)),
                cwd=home,
                env={**os.environ, **dict.fromkeys(HOMES, str(home)), **SETTINGS},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=PIPE,
                stderr=log,
                limit=MAX_LINE_BYTES,
                start_new_session=True,
            )
        return cls(name, process)

    async def documents(self) -> AsyncIterator[Document]:
        """Yield the documents that it prints with `--json`, one a line, until it ends."""
        if self._process.stdout is not None:
            async for line in self._process.stdout:
                if line.startswith(b"{"):
                    yield json.loads(line)

    async def first_words(self) -> Document:
        """Return the first document that it prints.

        Raises:
            SystemExit: it ended, or printed nothing in time.
        """
        async with asyncio.timeout(START_S):
            async for words in self.documents():
                return words
        raise SystemExit(f"{self.name} ended at once; its log tells why")

    @property
    def is_alive(self) -> bool:
        """Whether it was not seen to end."""
        return self._process.returncode is None

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if it is alive."""
        if self.is_alive:
            self._process.send_signal(number)

    async def ends(self, timeout_s: float = END_S) -> list[Document]:
        """Wait for its end and return the documents that it printed until then.

        Raises:
            SystemExit: it did not end well.
        """
        async with asyncio.timeout(timeout_s):
            documents = [document async for document in self.documents()]
            code = await self._process.wait()
        if code:
            raise SystemExit(f"{self.name} ended with exit code {code}; its log tells why")
        return documents

    async def leaves(self) -> list[Document]:
        """Send Ctrl-C and return the documents that it prints then."""
        self.send(signal.SIGINT)
        return await self.ends()

    async def kill(self) -> None:
        """End it for good."""
        self.send(signal.SIGKILL)
        await self._process.wait()


def _log(home: Path, name: str) -> IO[bytes]:
    home.mkdir(parents=True, exist_ok=True)
    return (home / f"{name}.log").open("ab")


async def run_command(name: str, home: Path, *words: object) -> list[Document]:
    """Run a command with `--json` to its end and return the documents that it printed."""
    return await (await Command.start(name, home, *words, "--json")).ends()
