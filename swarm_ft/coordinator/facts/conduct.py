"""Failures of peers in one run, and failures that the run itself may have caused. Values only.

A failure has two possible causes: the peer, or its run. The coordinator first counts it against the
pair of them, see `decide.blame`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from swarm_ft.coordinator.facts.reasons import Reason
from swarm_ft.coordinator.facts.reputation import MAX_FAILURES, Reputation
from swarm_ft.ids import Attempt, PeerId, StepNumber


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A peer's failure whose cause is open until the run gets past the step.

    Attributes:
        step: First uncommitted step at the time of the failure.
        attempt: Attempt in which the peer failed.
        reason: Reason of the failure; it names the run.
        by: Peer that reported it; empty for the failing peer itself.
        is_doubt: Whether the peer reported a step that is not finite.
        is_alone: Whether no replica could do its part, so that all other peers had to restart.
    """

    step: StepNumber
    attempt: Attempt
    reason: Reason
    by: str = ""
    is_doubt: bool = False
    is_alone: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Conduct:
    """A peer's failures in one run.

    Attributes:
        standing: Reputation in this run; while it is suspended, the run continues without the peer.
        open_failures: Newest failures whose cause is unknown.
    """

    standing: Reputation = field(default_factory=Reputation)
    open_failures: tuple[Failure, ...] = ()

    def with_failure(self, failure: Failure) -> Conduct:
        """Add an open failure; keep as many as can suspend a peer."""
        return replace(self, open_failures=(*self.open_failures, failure)[-MAX_FAILURES:])

    def settled(self, step: int) -> Conduct:
        """Drop open failures of this step and earlier ones."""
        staying = tuple(one for one in self.open_failures if one.step > step)
        return replace(self, open_failures=staying)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trouble:
    """Failures that the run itself may have caused, since it last got past their step.

    Attributes:
        step: Latest step with such a failure.
        peers: Peers that reported one.
        count: Number of these failures.
    """

    step: int = 0
    peers: frozenset[PeerId] = frozenset()
    count: int = 0

    def with_failure(self, step: int, peer_id: PeerId) -> Trouble:
        """Count one more failure."""
        return Trouble(
            step=max(self.step, step), peers=self.peers | {peer_id}, count=self.count + 1
        )
