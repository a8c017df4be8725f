"""Messages to peers that hold a reason. The shell puts the reason into words when it sends them."""

from __future__ import annotations

from dataclasses import dataclass

from swarm_ft.coordinator.facts.reasons import Reason
from swarm_ft.ids import RunId
from swarm_ft.protocol.messages.control import ToPeer


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """See `ReleaseStage`; the reason may be about another run."""

    run_id: RunId
    reason: Reason | None
    is_over: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Idle:
    """See `StayIdle`."""

    reason: Reason


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """See `LeaveProgress`.

    Attributes:
        seconds: about how long it takes; 0 if unknown.
    """

    may_go: bool
    reason: Reason | None = None
    seconds: float = 0.0


Message = ToPeer | Release | Idle | Progress
