"""What the page and the metrics are made of, asked of the coordinator, and not too often."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from swarm_ft.clock import Clock
from swarm_ft.ids import RunId
from swarm_ft.protocol.messages.client import (
    MAX_PAGE_RUNS,
    Evaluated,
    StatusRequest,
    StepCommitted,
    SwarmStatus,
)
from swarm_ft.protocol.messages.events import EventKind, EventsRequest, SwarmEvent

FRESH_S = 0.5
"""What is known is asked anew after so long: many who ask cost no more than one."""


class Source(Protocol):
    """A coordinator, as far as the page has business with it."""

    @property
    def is_ready(self) -> bool:
        """Whether it plans and commits."""
        ...

    @property
    def event_counts(self) -> Mapping[EventKind, int]:
        """How much happened, by its kind."""
        ...

    def status(self, page: StatusRequest = ...) -> SwarmStatus:
        """A page of what is known."""
        ...

    def happened(self, request: EventsRequest) -> AsyncGenerator[SwarmEvent, None]:
        """What happened."""
        ...

    def cancel(self, run_id: RunId) -> None:
        """End a run."""
        ...

    def pause(self, run_id: RunId) -> None:
        """Plan no step after the one under way."""
        ...

    def resume(self, run_id: RunId) -> None:
        """Go on with a run that was paused."""
        ...

    def change_rate(self, run_id: RunId, learning_rate: float) -> None:
        """Train with another peak learning rate from the next step on."""
        ...

    def change_codecs(self, run_id: RunId, forward: str = "", backward: str = "") -> None:
        """Have frames go by other codecs from the next step on; empty: as it is."""
        ...

    def losses(self, run_id: RunId, first: int, max_points: int) -> list[StepCommitted | Evaluated]:
        """Of a run, steps from `first` on and evaluations, evenly chosen if there are many."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Documents:
    """What is told, as JSON: the same as the commands print with `--json`.

    Attributes:
        status: as `swarm-ft status` does.
        event: as `swarm-ft events` does.
        row: as `swarm-ft losses` does.
    """

    status: Callable[[SwarmStatus], dict[str, Any]]
    event: Callable[[SwarmEvent], dict[str, Any]]
    row: Callable[[StepCommitted | Evaluated], dict[str, Any]]


class Facts:
    """Everything that is known just now: the first members, and the newest runs.

    Args:
        source: who knows.
        clock: the time.
    """

    def __init__(self, source: Source, clock: Clock) -> None:
        self._source = source
        self._clock = clock
        self._known: SwarmStatus | None = None
        self._asked_s = 0.0

    def status(self) -> SwarmStatus:
        """As of now, or a moment ago."""
        now_s = self._clock.now_s()
        if self._known is None or now_s - self._asked_s >= FRESH_S:
            self._known, self._asked_s = self._ask(), now_s
        return self._known

    def _ask(self) -> SwarmStatus:
        found = self._source.status(StatusRequest())
        if found.num_runs <= MAX_PAGE_RUNS:
            return found
        newest = StatusRequest(first_run=found.num_runs - MAX_PAGE_RUNS)
        last = self._source.status(newest)
        names = {one.member_id: one for one in (*found.names, *last.names)}
        return replace(found, runs=last.runs, names=tuple(names.values()))
