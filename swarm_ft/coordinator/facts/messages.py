"""Messages to peers that hold a reason. The service renders the reason when it sends them."""

from __future__ import annotations

from dataclasses import dataclass

from swarm_ft.coordinator.facts.reasons import Reason
from swarm_ft.ids import RunId
from swarm_ft.protocol.messages.control import ToPeer


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """A `ReleaseStage` whose reason may be about another run."""

    run_id: RunId
    reason: Reason | None
    is_over: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Idle:
    """A `StayIdle` with a reason."""

    reason: Reason


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """A `LeaveProgress` with a reason.

    Attributes:
        seconds: Expected duration of the wait; 0 if unknown.
    """

    may_go: bool
    reason: Reason | None = None
    seconds: float = 0.0


Message = ToPeer | Release | Idle | Progress
