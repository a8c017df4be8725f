"""Commands of `swarm-ft` as child processes that can be ordered to fail at a point."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from swarm_ft.base.failpoints import VARIABLE, reached_file
from swarm_ft.errors import RunFailed
from tests.fault_matrix.timeline import Timeline

START_TIMEOUT_S = 90.0
POLL_S = 0.01


class Command:
    """One running `swarm-ft ARGUMENTS`; its log is kept, and known line by line."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log_dir: Path) -> None:
        self.name = name
        self.log: Timeline[str] = Timeline()
        self._process = process
        self._orders = log_dir / f"{name}.failpoint"
        self._reading = asyncio.create_task(self._read(log_dir / f"{name}.log"))

    @classmethod
    async def start(cls, name: str, arguments: Sequence[str], log_dir: Path) -> Command:
        """Start it, and do not wait for its first words."""
        orders = log_dir / f"{name}.failpoint"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "swarm_ft", *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "XDG_STATE_HOME": str(log_dir),
                VARIABLE: str(orders),
            },
            start_new_session=True,
        )
        return cls(name, process, log_dir)

    async def _read(self, log_file: Path) -> None:
        if self._process.stderr is None:
            raise RunFailed(f"{self.name}: started without a pipe")
        with log_file.open("wb", buffering=0) as log:
            async for line in self._process.stderr:
                log.write(line)
                self.log.add(line.decode(errors="replace").rstrip())

    async def first_words(self) -> dict[str, object]:
        """Return its first document of JSON, which it prints once it is up.

        Raises:
            RunFailed: it ended, or printed nothing in time.
        """
        if self._process.stdout is None:
            raise RunFailed(f"{self.name}: started without a pipe")
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), START_TIMEOUT_S)
        except TimeoutError:
            raise RunFailed(f"{self.name} did not come up in {START_TIMEOUT_S:.0f} s") from None
        if not line:
            raise RunFailed(f"{self.name} ended at once; its log tells why")
        words: dict[str, object] = json.loads(line)
        return words

    @property
    def is_alive(self) -> bool:
        """Whether it was not seen to end."""
        return self._process.returncode is None

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    async def ended(self) -> int:
        """Its exit code, once it and its log have ended."""
        code = await self._process.wait()
        await self._reading
        return code

    # ---- faults

    def order(self, fault: str, point: str, count: int) -> None:
        """Meet a fault at the count-th time that it reaches a point, counted from now."""
        reached_file(self._orders).unlink(missing_ok=True)
        partial = self._orders.with_suffix(".order")
        partial.write_text(f"{fault} {point} {count}", encoding="utf-8")
        partial.replace(self._orders)

    async def obeyed(self) -> float:
        """Wait until it meets the ordered fault; return that moment in monotonic seconds."""
        reached = reached_file(self._orders)
        while not reached.exists():  # noqa: ASYNC110 - another process makes the file
            await asyncio.sleep(POLL_S)
        return float(reached.read_text(encoding="utf-8"))

    def release(self) -> None:
        """Let it go on from where it was ordered to hold; forget an order that was not met."""
        self._orders.unlink(missing_ok=True)
        reached_file(self._orders).unlink(missing_ok=True)

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if it is alive."""
        if self.is_alive:
            self._process.send_signal(number)

    async def kill(self) -> None:
        """End it for good, frozen or not."""
        self.send(signal.SIGKILL)
        await self.ended()
