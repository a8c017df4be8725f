"""Source of the page's and the metrics' data: the coordinator's status, at a limited rate."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from swarm_ft.base.clock import Clock
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
"""Seconds for which a status is reused, so that many readers cost no more than one."""


class StatusSource(Protocol):
    """A coordinator, as far as the page needs it."""

    @property
    def is_ready(self) -> bool:
        """Whether the coordinator plans and commits steps."""
        ...

    @property
    def event_counts(self) -> Mapping[EventKind, int]:
        """Number of events by kind."""
        ...

    def status(self, page: StatusRequest = ...) -> SwarmStatus:
        """Return a page of the swarm's status."""
        ...

    def events(self, request: EventsRequest) -> AsyncGenerator[SwarmEvent, None]:
        """Yield events from the requested serial number on."""
        ...

    def cancel(self, run_id: RunId) -> None:
        """Cancel a run."""
        ...

    def pause(self, run_id: RunId) -> None:
        """Pause a run after the step under way."""
        ...

    def resume(self, run_id: RunId) -> None:
        """Resume a paused run."""
        ...

    def change_rate(self, run_id: RunId, learning_rate: float) -> None:
        """Change the peak learning rate from the next step on."""
        ...

    def change_codecs(self, run_id: RunId, forward: str = "", backward: str = "") -> None:
        """Change the codecs of frames from the next step on; an empty codec stays as it is."""
        ...

    def losses(self, run_id: RunId, first: int, max_points: int) -> list[StepCommitted | Evaluated]:
        """Return a run's steps from `first` on and its evaluations, thinned above the limit."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Documents:
    """Converters to JSON documents, equal to those of the commands' `--json`.

    Attributes:
        status: Document of `swarm-ft status`.
        event: Document of `swarm-ft events`.
        row: Document of `swarm-ft losses`.
    """

    status: Callable[[SwarmStatus], dict[str, Any]]
    event: Callable[[SwarmEvent], dict[str, Any]]
    row: Callable[[StepCommitted | Evaluated], dict[str, Any]]


class StatusCache:
    """Recent status of the swarm: its first members and its newest runs.

    Args:
        source: The coordinator.
        clock: Source of the time.
    """

    def __init__(self, source: StatusSource, clock: Clock) -> None:
        self._source = source
        self._clock = clock
        self._known: SwarmStatus | None = None
        self._read_s = 0.0

    def status(self) -> SwarmStatus:
        """Return the status, at most `FRESH_S` old."""
        now_s = self._clock.now_s()
        if self._known is None or now_s - self._read_s >= FRESH_S:
            self._known, self._read_s = self._read(), now_s
        return self._known

    def _read(self) -> SwarmStatus:
        found = self._source.status(StatusRequest())
        if found.num_runs <= MAX_PAGE_RUNS:
            return found
        newest = StatusRequest(first_run=found.num_runs - MAX_PAGE_RUNS)
        last = self._source.status(newest)
        names = {one.member_id: one for one in (*found.names, *last.names)}
        return replace(found, runs=last.runs, names=tuple(names.values()))
