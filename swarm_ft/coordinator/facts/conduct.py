"""How peers did in one run, and what speaks against the run itself. Values only.

A failure has two possible causes: the peer, or the run that it worked for. The coordinator counts
it against the pair of them first, see `decide.blame`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from swarm_ft.coordinator.facts.reasons import Reason
from swarm_ft.coordinator.facts.standing import MAX_FAILURES, Standing
from swarm_ft.ids import Attempt, PeerId, StepNumber


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A peer's failure whose cause is open until the run gets past the step.

    Attributes:
        step: the first uncommitted step when it happened.
        attempt: in which it happened.
        reason: of the failure; it names the run.
        by: the peer that reported it; empty for the peer itself.
        is_doubt: whether the peer reported that the step is not finite.
        is_alone: whether no replica could do its part: all others had to begin anew for it.
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
        standing: counts them; while it rests, this run goes on without the peer.
        open_failures: the newest of those for which nobody knows the cause yet.
    """

    standing: Standing = field(default_factory=Standing)
    open_failures: tuple[Failure, ...] = ()

    def with_failure(self, failure: Failure) -> Conduct:
        """Add a failure to the open ones; keep as many as can suspend a peer."""
        return replace(self, open_failures=(*self.open_failures, failure)[-MAX_FAILURES:])

    def settled(self, step: int) -> Conduct:
        """Drop open failures of this step and earlier ones."""
        staying = tuple(one for one in self.open_failures if one.step > step)
        return replace(self, open_failures=staying)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trouble:
    """Failures that the run itself may have caused, since it last got past their step.

    Attributes:
        step: the latest step in which one happened.
        peers: that reported one.
        count: of all of them.
    """

    step: int = 0
    peers: frozenset[PeerId] = frozenset()
    count: int = 0

    def with_failure(self, step: int, peer_id: PeerId) -> Trouble:
        """Count one more."""
        return Trouble(
            step=max(self.step, step), peers=self.peers | {peer_id}, count=self.count + 1
        )
