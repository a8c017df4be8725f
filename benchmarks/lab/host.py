"""One machine of a lab: where commands run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Host:
    """A network namespace with one address; without a name, this machine itself."""

    namespace: str
    address: str

    def command(self, *arguments: str) -> tuple[str, ...]:
        """A command as it is to be run to run there."""
        if not self.namespace:
            return arguments
        return "ip", "netns", "exec", self.namespace, *arguments

    @contextmanager
    def running(self, module: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """A Python module of this repository that runs there, with pipes, and ends with this."""
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


def ask(process: subprocess.Popen[str], question: str = "") -> str:
    """A line to a process that is `running`, if there is something to say, and the next of its own.

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
