"""Whose task a peer's one compute thread takes next, of those of several runs. Pure.

A task runs to its end; each run's tasks go in the order in which they came. What others wait for
goes before what fills time (gradients of weights, evaluations), in whatever run. Of runs that are
alike in that, the one comes next that had least of the thread for its weight; who had nothing to
do meanwhile is owed nothing for it (start-time fair queueing, Goyal et al. 1996). What fills time
is due all the same once its run is MAX_LAG_S behind.

Runs of one claim share its weight, by their priorities: more runs, or higher priorities, give an
owner no more of the thread. A run without a claim has its priority for a weight.
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
"""Of the usual weight: by so much less a run had of the thread than the one that comes first."""


@dataclass(slots=True)
class _Queue(Generic[T]):
    """One run's tasks, and whether each only fills time.

    Attributes:
        had_s: seconds that its tasks took, by its weight.
    """

    had_s: float
    weight: float = 1.0
    tasks: deque[tuple[T, bool]] = field(default_factory=deque)

    @property
    def only_fills(self) -> bool:
        """Whether what comes next does."""
        return self.tasks[0][1]


class Turns(Generic[T]):
    """See the module's docstring. Tasks are the caller's, each of them another one."""

    def __init__(self) -> None:
        self._queues: dict[RunId, _Queue[T]] = {}
        self._claims: dict[RunId, tuple[Claim, int]] = {}
        self._now_s = 0.0
        """What the run whose task began last had by then."""

    def weigh(self, run_id: RunId, priority: int, claim: Claim = NO_CLAIM) -> None:
        """Give a run this priority among the runs of its claim from now on."""
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
        """A task wants to run; `fills`: nobody waits for it yet."""
        queue = self._queue(run_id)
        if not queue.tasks:
            queue.had_s = max(queue.had_s, self._now_s)
        queue.tasks.append((task, fills))

    def next(self) -> tuple[RunId, T] | None:
        """The task that begins now, and whose it is; None if nobody has one."""
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

    def took(self, run_id: RunId, seconds: float) -> None:
        """The task that began last has ended."""
        queue = self._queues.get(run_id)
        if queue is not None:
            queue.had_s += seconds / queue.weight

    def forget(self, run_id: RunId) -> None:
        """The run is over here."""
        self._queues.pop(run_id, None)
        if self._claims.pop(run_id, None) is not None:
            self._weigh_all()

    def _queue(self, run_id: RunId) -> _Queue[T]:
        if run_id not in self._queues:
            self._queues[run_id] = _Queue(self._now_s)
        return self._queues[run_id]
