"""The honest client beside the attacks: run after run of one job, each as a quiet one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Self

from swarm_ft.client.swarm import SwarmClient
from swarm_ft.discovery.directory import Directory
from swarm_ft.errors import RunFailed
from swarm_ft.ids import RunId
from swarm_ft.protocol.messages.client import RunPhase, RunStatus, StepCommitted
from swarm_ft.transport.credentials import Credentials
from swarm_ft.transport.grpc_options import GrpcOptions
from swarm_ft.transport.grpc_transport import GrpcTransport
from tests.hostile.attacker import Identity
from tests.hostile.job import Job

GRACE_S = 120.0
"""How long a run may stand still before it counts as stopped: machines are busy."""
POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a run: its losses, and its weights, file by file."""

    losses: tuple[float, ...]
    weights: tuple[bytes, ...]


class HonestClient:
    """See the module's docstring; begin with `open`, then all attacks, then `concluded`.

    Args:
        owner: the honest client's key and certificate.
        job: that it submits, again and again.
        num_peers: that have to be there first.
        work_dir: for results.
    """

    def __init__(
        self, directory: Directory, owner: Identity, job: Job, num_peers: int, work_dir: Path
    ) -> None:
        own = Credentials(owner.key, owner.certificate, owner.authority)
        self.owner = owner
        self.directory = directory
        self.job = job
        self.client = SwarmClient(directory, GrpcTransport(GrpcOptions(credentials=own)))
        self.num_runs = 0
        self.quiet: Result | None = None
        self.status: RunStatus | None = None
        self._num_peers = num_peers
        self._work_dir = work_dir
        self._commit_times_s: list[float] = []
        self._first_commit = 0
        self._changed = asyncio.Condition()
        self._lock = asyncio.Lock()
        self._at_rest = asyncio.Event()
        self._is_to_end = False
        self._task: asyncio.Task[None] | None = None

    @property
    def run_id(self) -> str:
        """The newest run's name."""
        if self.status is None:
            raise RunFailed("no run has begun")
        return self.status.run_id

    async def open(self) -> Self:
        """The quiet run, to its end; then all others begin."""
        async with asyncio.timeout(GRACE_S):
            while len((await self.client.status()).members) < self._num_peers:  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
            self.quiet = await self._run()
        self._task = asyncio.create_task(self._run_on())
        await self.commits(1)
        return self

    async def concluded(self) -> int:
        """Wait for the last run's end; return the number of runs, all equal to the quiet one.

        Raises:
            RunFailed: one did not.
        """
        self._is_to_end = True
        if self._task is not None:
            await self._task
        return self.num_runs

    def check_alive(self) -> None:
        """Refuse to go on once a run came out wrong.

        Raises:
            RunFailed: the text has the difference.
        """
        if self._task is not None and self._task.done():
            raise RunFailed(f"the run beside the attacks: {self._task.exception()!r}")

    async def close(self) -> None:
        """Leave it at that."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    # ---- requests of attacks

    async def commits(self, count: int) -> None:
        """Wait until so many more steps count.

        Raises:
            RunFailed: a run came out wrong, or stands still.
        """
        least = len(self._commit_times_s) + count
        await self._reached(lambda: len(self._commit_times_s), least)

    async def another_run(self) -> None:
        """Wait until a run that has not begun yet has committed a step; raises as `commits`."""
        await self._reached(lambda: self._first_commit, self.num_begun + 1)

    def longest_pause_s(self, since_s: float) -> float:
        """The longest time between two commits after a moment, in seconds.

        Args:
            since_s: monotonic seconds.
        """
        times_s = [since_s, *(at_s for at_s in self._commit_times_s if at_s > since_s)]
        return max((b - a for a, b in pairwise([*times_s, time.monotonic()])), default=0.0)

    def commits_between(self, since_s: float, until_s: float) -> int:
        """Count the steps that were committed between two moments of the monotonic clock."""
        return sum(since_s < at_s <= until_s for at_s in self._commit_times_s)

    @asynccontextmanager
    async def finished(self) -> AsyncIterator[RunStatus]:
        """A run that is over, whose result lies at its peers as long as the context lasts."""
        async with self._lock:
            await self._unless_over(self._at_rest.wait())
            if self.status is None:
                raise RunFailed("no run has begun")
            yield self.status
            self._at_rest.clear()

    @property
    def num_begun(self) -> int:
        """Runs of which a step is committed, or will be next."""
        return self.num_runs + 1

    # ---- run after run

    async def _run_on(self) -> None:
        while not self._is_to_end:
            result = await self._run()
            if result != self.quiet:
                raise RunFailed(f"run {self.run_id} differs from the quiet one: {result}")

    async def _run(self) -> Result:
        submitted = await self.client.submit(self.job.spec, self.job.samples)
        self.status, losses = submitted, dict[int, float]()
        watching = self.client.watch(submitted.run_id, lambda _trouble: None)
        async with aclosing(watching) as events:
            async for event in events:
                if isinstance(event, StepCommitted):
                    losses[event.step] = event.loss
                    await self._note_commit()
                elif isinstance(event, RunStatus):
                    self.status = event
        if self.status.phase is not RunPhase.FINISHED:
            raise RunFailed(f"run {self.run_id}: {self.status.phase.name} {self.status.detail}")
        weights = await self.fetched(self.status)
        await self._rest()
        await self.client.acknowledge_result(RunId(self.run_id))
        self.num_runs += 1
        return Result(tuple(losses[step] for step in sorted(losses)), weights)

    async def _rest(self) -> None:
        """Hand the result to those that wait for one."""
        while self._lock.locked():
            self._at_rest.set()
            await asyncio.sleep(POLL_S)
        self._at_rest.clear()

    async def fetched(self, status: RunStatus) -> tuple[bytes, ...]:
        """The result, once its peers give it, stage by stage."""
        folder = self._work_dir / f"result-{self.num_runs}"
        folder.mkdir(exist_ok=True)
        paths = await self.client.fetch_result(status, folder, lambda _trouble: None)
        if paths is None:
            raise RunFailed(f"run {status.run_id}: its result is lost")
        return tuple(path.read_bytes() for path in paths)

    async def _note_commit(self) -> None:
        async with self._changed:
            self._commit_times_s.append(time.monotonic())
            self._first_commit = self.num_begun
            self._changed.notify_all()

    async def _reached(self, value: object, least: int) -> None:
        async def wait() -> None:
            async with self._changed:
                await self._changed.wait_for(lambda: callable(value) and value() >= least)

        await self._unless_over(wait())

    async def _unless_over(self, waiting: object) -> None:
        task = asyncio.ensure_future(waiting)  # type: ignore[call-overload]
        others = {self._task} if self._task is not None else set()
        try:
            done, _ = await asyncio.wait(
                {task, *others}, timeout=GRACE_S, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            task.cancel()
        if self._task is not None and self._task in done:
            self._task.result()
            raise RunFailed("there is no run beside the attacks any more")
        if task not in done:
            raise RunFailed(f"the run beside the attacks stood still for {GRACE_S:.0f} s")
