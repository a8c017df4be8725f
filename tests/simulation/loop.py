"""An asyncio event loop on virtual time, in which processes can be paused and killed.

Time stands still while code runs. It jumps to the next timer when nothing is ready, so an hour
takes as long as its events do. There is no I/O: nothing here opens a socket, a pipe or a thread.
What depends on memory addresses elsewhere (the order of sets of tasks) depends on numbers here.
"""

from __future__ import annotations

import asyncio
import heapq
from asyncio.events import Handle, TimerHandle
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from random import Random
from typing import Any, NoReturn, TypeVar

from tests.simulation.executor import Lanes

T = TypeVar("T")


class Deadlock(Exception):
    """Nothing is ready and no timer is set: what waits, waits for ever."""


class Process:
    """A process of the simulation: what its tasks, and theirs, belong to.

    A process that is not alive runs nothing any more, not even a `finally`: this is kill -9. One
    that is paused runs nothing now; what became ready meanwhile follows when it resumes, in order.

    Args:
        loop: where it runs.
        name: of the machine that it runs on.
    """

    def __init__(self, loop: VirtualLoop, name: str) -> None:
        self.name = name
        self.alive = True
        self.paused = False
        self.slowness = 1.0
        """What its computations' durations are multiplied by."""
        self.work = 1.0
        """So too, by how much there is to compute."""
        self.lanes: dict[object, Lanes] = {}
        self.context: Context = copy_context()
        self.context.run(_OWNER.set, self)
        self._loop = loop
        self._parked: deque[Handle] = deque()

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run `work` as a task of this process."""
        return self._loop.create_task(work, context=self.context)

    def kill(self) -> None:
        """End it between two of its instructions."""
        self.alive = False
        self._loop.bury(self)

    def pause(self) -> None:
        """SIGSTOP."""
        self.paused = True

    def resume(self) -> None:
        """SIGCONT."""
        self.paused = False
        self._loop.take_up(self._parked)
        self._parked = deque()

    def park(self, handle: Handle) -> None:
        """Keep what came up during a pause."""
        self._parked.append(handle)


_OWNER: ContextVar[Process | None] = ContextVar("owner", default=None)


def running_process() -> Process | None:
    """Return the process whose code runs now."""
    return _OWNER.get()


class NumberedFuture(asyncio.Future[T]):
    """A future whose hash is its number, so that sets of futures have one order everywhere."""

    def __init__(self, number: int, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self._number = number

    def __hash__(self) -> int:
        return self._number


class NumberedTask(asyncio.Task[T]):
    """A task whose hash is its number; see `NumberedFuture`."""

    def __init__(
        self,
        number: int,
        work: Coroutine[Any, Any, T],
        loop: asyncio.AbstractEventLoop,
        context: Context | None,
    ) -> None:
        self._number = number  # first: asyncio puts the task into a set of all tasks
        owner = (context or copy_context()).get(_OWNER)
        self.owner = owner
        """The process that it is a part of."""
        # A name of its own: asyncio counts tasks over the whole life of the interpreter.
        super().__init__(work, loop=loop, name=f"task-{number}", context=context)

    def __hash__(self) -> int:
        return self._number


class VirtualLoop(asyncio.BaseEventLoop):
    """See the module's docstring.

    Args:
        rng: draws how long each computation takes, and when in that time it has its effects.
        mean_compute_s: of a computation in an executor.
    """

    def __init__(self, rng: Random, *, mean_compute_s: float = 0.005) -> None:
        super().__init__()
        self.num_events = 0
        self._rng = rng
        self._mean_compute_s = mean_compute_s
        self._now_s = 0.0
        self._numbers = 0
        self._timers: list[tuple[float, int, TimerHandle]] = []
        self._ready: deque[Handle] = deque()
        self._generators: dict[int, Process | None] = {}
        self._graveyard: list[object] = []

    def number(self) -> int:
        """The next number; tasks, futures and timers share one sequence."""
        self._numbers += 1
        return self._numbers

    # ---- time

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now_s

    def call_at(  # type: ignore[override]  # typeshed ties callback and arguments
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> TimerHandle:
        """See `asyncio.loop.call_at`; timers of one moment fire in the order they were set."""
        timer = TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, self.number(), timer))
        return timer

    def _timer_handle_cancelled(self, handle: TimerHandle) -> None:
        """A cancelled timer is skipped when its time comes."""

    def take_up(self, handles: deque[Handle]) -> None:
        """Run these soon."""
        self._ready.extend(handles)

    def bury(self, process: Process) -> None:
        """Keep a killed process's tasks: freed, they would run their `finally` blocks."""
        tasks = asyncio.all_tasks(self)
        self._graveyard.append(process)
        self._graveyard += [t for t in tasks if isinstance(t, NumberedTask) and t.owner is process]

    def _run_once(self) -> None:
        if not self._ready and not self._stopping:  # type: ignore[attr-defined]
            self._advance()
        for _ in range(len(self._ready)):
            handle = self._ready.popleft()
            if handle._cancelled:
                continue
            owner = handle._context.get(_OWNER)  # type: ignore[attr-defined]
            if owner is not None and not owner.alive:
                continue
            if owner is not None and owner.paused:
                owner.park(handle)
                continue
            self.num_events += 1
            handle._run()

    def _advance(self) -> None:
        """Jump to the next timer and make ready all that are set to the same moment."""
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        if not self._timers:
            raise Deadlock(f"at {self._now_s:.3f} s nothing is ready and no timer is set")
        self._now_s = max(self._now_s, self._timers[0][0])
        while self._timers and self._timers[0][0] <= self._now_s:
            self._ready.append(heapq.heappop(self._timers)[2])

    def soon(self, turns: int, callback: Callable[[], object]) -> None:
        """Call back, for no process, after so many turns of the loop; time may stand still."""
        if turns:
            self.call_soon(self.soon, turns - 1, callback, context=Context())
        else:
            self.call_soon(callback, context=Context())

    # ---- futures

    def create_future(self) -> asyncio.Future[Any]:
        """See `asyncio.loop.create_future`."""
        return NumberedFuture(self.number(), self)

    def create_task(
        self,
        coro: Any,
        *,
        name: object = None,
        context: Context | None = None,
    ) -> asyncio.Task[Any]:
        """See `asyncio.loop.create_task`; tasks are named by their numbers."""
        return NumberedTask(self.number(), coro, self, context)

    # ---- threads

    def run_in_executor(  # type: ignore[override]
        self,
        executor: object,
        func: Callable[..., T],
        *args: Any,
    ) -> asyncio.Future[T]:
        """Run `func` in this thread, in virtual time as the executor's threads would.

        It takes a drawn time in one of as many lanes as the executor has threads, and has its
        effects at the beginning or at the end of it. As with threads, what is cancelled before it
        begins never runs; what has begun goes on.
        """
        owner = _OWNER.get()
        lanes = self._lanes(owner, executor)
        slowness = owner.slowness * owner.work if owner is not None else 1.0
        takes_s = self._rng.expovariate(1.0) * self._mean_compute_s * slowness
        at_end = self._rng.random() < 0.5
        return lanes.submit(self, lambda: func(*args), takes_s, at_end=at_end)

    def _lanes(self, owner: Process | None, executor: object) -> Lanes:
        lanes = owner.lanes if owner is not None else {}
        if executor not in lanes:
            lanes[executor] = Lanes(getattr(executor, "_max_workers", 4))
        return lanes[executor]

    # ---- generators

    def _asyncgen_firstiter_hook(self, agen: AsyncGenerator[Any, Any]) -> None:
        super()._asyncgen_firstiter_hook(agen)  # type: ignore[misc]
        self._generators[id(agen)] = _OWNER.get()

    def _asyncgen_finalizer_hook(self, agen: AsyncGenerator[Any, Any]) -> None:
        owner = self._generators.pop(id(agen), None)
        if owner is None or owner.alive:  # a killed process finalizes nothing
            super()._asyncgen_finalizer_hook(agen)  # type: ignore[misc]

    # ---- no I/O

    def _write_to_self(self) -> None:
        """Nothing waits in a system call that it must be woken from."""

    async def getaddrinfo(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: the simulation has no real network.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("real I/O inside a simulation")
