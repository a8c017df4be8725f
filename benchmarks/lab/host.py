"""One machine of a lab: where commands run."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

from benchmarks.lab.namespaces import enter

ROOT = Path(__file__).parents[2]
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Host:
    """A network namespace with an address; without a name, this machine itself.

    Attributes:
        ipv6: its other address; empty: it has none.
    """

    namespace: str
    address: str
    ipv6: str = ""

    def command(self, *arguments: str) -> tuple[str, ...]:
        """Return a command line that runs the command on this host."""
        if not self.namespace:
            return arguments
        return "ip", "netns", "exec", self.namespace, *arguments

    @contextmanager
    def running(self, module: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """Run a Python module of this repository here, with pipes, until the context ends."""
        process = subprocess.Popen(
            self.command(sys.executable, "-m", module, *arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            # Ctrl-C is for who runs it, and what talks to it may still need it.
            start_new_session=True,
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()

    @asynccontextmanager
    async def process(self, *command: str) -> AsyncIterator[Process]:
        """Run a command on this host, with pipes; the context's end kills it and its children."""
        process = await asyncio.create_subprocess_exec(
            *self.command(*command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.communicate()

    def call(
        self,
        function: Callable[Arguments, Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Result:
        """Call a function in a new thread on this host and return its result.

        Its sockets stay there whoever uses them later. So do threads that it starts, but not those
        that a library has already (gRPC): that takes a process.
        """

        def called_there() -> Result:
            if self.namespace:
                enter(self.namespace)
            return function(*args, **kwargs)

        thread = ThreadPoolExecutor(1)
        try:
            return thread.submit(called_there).result()
        finally:
            thread.shutdown(wait=False)


def exchange(process: subprocess.Popen[str], question: str = "") -> str:
    """Send a line to a process that is `running`, unless it is empty, and read its next line.

    Raises:
        RuntimeError: it ended instead; it has printed why.
    """
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("a process without pipes can tell nothing")
    if question:
        process.stdin.write(f"{question}\n")
        process.stdin.flush()
    answer = process.stdout.readline()
    if not answer:
        raise RuntimeError(f"it ended instead of answering {question!r}; it has printed why")
    return answer.strip()


THIS_MACHINE = Host("", "127.0.0.1")
