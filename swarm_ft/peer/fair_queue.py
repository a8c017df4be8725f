"""A fair queue for the compute thread of a peer that works for several runs. Pure.

A task runs to its end; each run's tasks keep their order. Tasks that other peers wait for precede
background tasks (gradients of weights, evaluations), across all runs. Among equal runs the one
comes next that has used least of the thread for its weight. An idle run saves up no claims for
later (start-time fair queueing, Goyal et al. 1996). A background task becomes urgent once its run
is MAX_LAG_S behind.

Runs with the same claim divide the claim's weight by their priorities: with more runs, or with
higher priorities, an owner gets no more of the thread. The weight of a run without a claim is its
priority.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from swarm_ft.ids import RunId
from swarm_ft.protocol.spec.priority import DEFAULT_PRIORITY, NO_CLAIM, Claim

T = TypeVar("T", bound=Hashable)

MAX_LAG_S = 1.0
"""Seconds, at the usual weight, by which a run's use may lag behind the run that comes first."""


@dataclass(slots=True)
class _Queue(Generic[T]):
    """A run's tasks, each with a flag for background work.

    Attributes:
        had_s: Seconds that the run's tasks took, divided by its weight.
        weight: Weight of the run.
        tasks: Tasks in order.
    """

    had_s: float
    weight: float = 1.0
    tasks: deque[tuple[T, bool]] = field(default_factory=deque)

    @property
    def only_fills(self) -> bool:
        """Whether the next task is background work."""
        return self.tasks[0][1]


class FairQueue(Generic[T]):
    """The fair queue; see the module. Tasks are distinct objects of the caller."""

    def __init__(self) -> None:
        self._queues: dict[RunId, _Queue[T]] = {}
        self._claims: dict[RunId, tuple[Claim, int]] = {}
        self._now_s = 0.0
        """Use of the run whose task began last, as of then."""

    def set_weight(self, run_id: RunId, priority: int, claim: Claim = NO_CLAIM) -> None:
        """Set a run's priority among the runs of its claim."""
        self._claims[run_id] = claim, priority
        self._queue(run_id)
        self._weigh_all()

    def _weigh_all(self) -> None:
        """Divide each claim's weight among its runs by their priorities."""
        totals: Counter[str] = Counter()
        for claim, priority in self._claims.values():
            totals[claim.name] += priority
        for run_id, (claim, priority) in self._claims.items():
            weight = priority / DEFAULT_PRIORITY
            if claim.name:
                weight = claim.weight * priority / totals[claim.name]
            self._queues[run_id].weight = weight

    def put(self, run_id: RunId, task: T, *, fills: bool = False) -> None:
        """Queue a task. `fills`: it is background work, which nobody waits for yet."""
        queue = self._queue(run_id)
        if not queue.tasks:
            queue.had_s = max(queue.had_s, self._now_s)
        queue.tasks.append((task, fills))

    def next(self) -> tuple[RunId, T] | None:
        """Remove and return the task that runs next, with its run; None if there is none."""
        waiting = {run: queue for run, queue in self._queues.items() if queue.tasks}
        if not waiting:
            return None
        urgent = (queue.had_s for queue in waiting.values() if not queue.only_fills)
        due_s = min(urgent, default=math.inf) - MAX_LAG_S

        def order(run: RunId) -> tuple[bool, float]:
            queue = waiting[run]
            return queue.only_fills and queue.had_s > due_s, queue.had_s

        run_id = min(waiting, key=order)
        queue = waiting[run_id]
        self._now_s = max(self._now_s, queue.had_s)
        return run_id, queue.tasks.popleft()[0]

    def add_usage(self, run_id: RunId, seconds: float) -> None:
        """Add the seconds of the run's task that has ended."""
        queue = self._queues.get(run_id)
        if queue is not None:
            queue.had_s += seconds / queue.weight

    def forget(self, run_id: RunId) -> None:
        """Remove a run and its tasks."""
        self._queues.pop(run_id, None)
        if self._claims.pop(run_id, None) is not None:
            self._weigh_all()

    def _queue(self, run_id: RunId) -> _Queue[T]:
        if run_id not in self._queues:
            self._queues[run_id] = _Queue(self._now_s)
        return self._queues[run_id]
