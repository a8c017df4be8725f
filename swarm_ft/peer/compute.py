"""The compute thread, in which all engines of a peer run, and each run's handle to it.

`turns` decides whose task is next; `Compute` runs it in the thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from swarm_ft.base.clock import Clock
from swarm_ft.ids import RunId
from swarm_ft.peer.fair_queue import FairQueue
from swarm_ft.protocol.spec.priority import Claim

R = TypeVar("R")


@dataclass(eq=False, slots=True)
class _Task:
    """A queued task and the future of its result."""

    work: Callable[[], Any]
    put_s: float
    result: asyncio.Future[Any] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Compute:
    """The compute thread and its queue; see the module.

    Args:
        clock: Clock that times the tasks.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, "compute")
        self._turns: FairQueue[_Task] = FairQueue()
        self._is_busy = False
        self._waited_s: dict[RunId, float] = {}
        self._waiting: dict[RunId, list[_Task]] = {}

    def handle_for(self, run_id: RunId) -> ComputeHandle:
        """Return a run's handle to the compute thread."""
        return ComputeHandle(self, run_id)

    def close(self) -> None:
        """Wait until the task under way ends; tasks in the queue are cancelled. Blocks."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def set_weight(self, run_id: RunId, priority: int, claim: Claim) -> None:
        """Set a run's priority among the runs of its claim, see `Turns.weigh`."""
        self._turns.set_weight(run_id, priority, claim)

    def forget(self, run_id: RunId) -> None:
        """Remove a run, and cancel its tasks that wait."""
        self._turns.forget(run_id)
        self._waited_s.pop(run_id, None)
        for task in self._waiting.pop(run_id, ()):
            task.result.cancel()

    async def run(self, run_id: RunId, work: Callable[[], R], *, fills: bool) -> R:
        """Run `work` when its turn comes and return its result.

        If cancelled before, it never runs.
        """
        task = _Task(work, self._clock.now_s())
        self._waiting.setdefault(run_id, []).append(task)
        self._turns.put(run_id, task, fills=fills)
        self._go_on()
        result: R = await task.result
        return result

    def waited_s(self, run_id: RunId) -> float:
        """Return the seconds that the run's tasks have waited for their turns so far."""
        now_s = self._clock.now_s()
        waiting_s = sum(now_s - task.put_s for task in self._waiting.get(run_id, ()))
        return self._waited_s.get(run_id, 0.0) + waiting_s

    def _go_on(self) -> None:
        while not self._is_busy and (found := self._turns.next()) is not None:
            self._begin(*found)

    def _begin(self, run_id: RunId, task: _Task) -> None:
        now_s = self._clock.now_s()
        self._waiting[run_id].remove(task)
        self._waited_s[run_id] = self._waited_s.get(run_id, 0.0) + now_s - task.put_s
        if not self._waiting[run_id]:
            del self._waiting[run_id]
        if task.result.cancelled():
            return
        self._is_busy = True
        job = asyncio.get_running_loop().run_in_executor(self._thread, task.work)
        job.add_done_callback(partial(self._ended, run_id, task, now_s))

    def _ended(self, run_id: RunId, task: _Task, began_s: float, job: asyncio.Future[Any]) -> None:
        self._is_busy = False
        self._turns.add_usage(run_id, self._clock.now_s() - began_s)
        if job.cancelled():
            task.result.cancel()
        elif (error := job.exception()) is not None:
            if not task.result.done():
                task.result.set_exception(error)
        elif not task.result.done():
            task.result.set_result(job.result())
        self._go_on()


@dataclass(frozen=True, slots=True)
class ComputeHandle:
    """A run's handle to the compute thread.

    Attributes:
        is_background: Whether its tasks are background work, which nobody waits for yet.
    """

    compute: Compute
    run_id: RunId
    is_background: bool = False

    async def run(self, work: Callable[[], R]) -> R:
        """Run `work` in the compute thread and return its result; see `Compute.run`."""
        return await self.compute.run(self.run_id, work, fills=self.is_background)

    @property
    def waited_s(self) -> float:
        """Seconds that the run's tasks have waited for their turns so far."""
        return self.compute.waited_s(self.run_id)

    @property
    def background(self) -> ComputeHandle:
        """Handle of the same run for background work."""
        return ComputeHandle(self.compute, self.run_id, is_background=True)
