"""Reputation of a peer: repeated failures suspend it, each time for longer."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from swarm_ft.coordinator.facts.reasons import Reason, ReasonKind
from swarm_ft.ids import Attempt, RunId

MAX_FAILURES = 3
AMONG_ATTEMPTS = 10
"""A run's newest attempts among which `MAX_FAILURES` failures suspend a peer."""
FIRST_REST_S = 30.0
MAX_REST_S = 3600.0
REST_FACTOR = 4.0
"""Growth of the suspension of a peer that fails again after an earlier one."""
FORGOTTEN_AFTER_S = 6 * 3600.0
"""Seconds without a suspension after which a peer's suspensions are forgotten."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reputation:
    """A peer's recent failures.

    Attributes:
        failed_in: Attempts in which it failed since its last suspension, with the peer that
            reported it; empty if it did itself.
        times_aside: Number of recent suspensions.
        aside_until_s: Monotonic seconds before which no run is assigned to it.
        reason: Reason of its suspension, or of its last failure.
    """

    failed_in: tuple[tuple[RunId, Attempt, str], ...] = ()
    times_aside: int = 0
    aside_until_s: float = -math.inf
    reason: Reason | None = None

    def is_suspended(self, now_s: float) -> bool:
        """Whether the peer is suspended now."""
        return now_s < self.aside_until_s

    @property
    def suspension_s(self) -> float:
        """Seconds of its last suspension."""
        return min(FIRST_REST_S * REST_FACTOR ** (self.times_aside - 1), MAX_REST_S)

    @property
    def suspension(self) -> Reason:
        """Reason that a suspended peer and its runs have."""
        cause = () if self.reason is None else (self.reason,)
        return Reason(kind=ReasonKind.PEER_SUSPENDED, amount=self.suspension_s, parts=cause)

    def after_failure(
        self, run_id: RunId, attempt: Attempt, reason: Reason, now_s: float, *, by: str = ""
    ) -> Reputation:
        """Count one more failure; several in one attempt count once.

        Args:
            run_id: Run in which it failed.
            attempt: Attempt in which it failed.
            reason: Reason of the failure.
            now_s: Monotonic seconds.
            by: Other peer that reports it; empty if the peer does itself. Reports of a single other
                peer never suspend it.
        """
        recent = {one for one in self.failed_in if one[0] == run_id} | {(run_id, attempt, by)}
        failed_in = tuple(sorted(one for one in recent if one[1] > attempt - AMONG_ATTEMPTS))
        reporters = {reporter for _, _, reporter in failed_in}
        if len(failed_in) < MAX_FAILURES or ("" not in reporters and len(reporters) == 1):
            return replace(self, failed_in=failed_in, reason=reason)
        failures = Reason(kind=ReasonKind.FAILED_TOO_OFTEN, amount=MAX_FAILURES, parts=(reason,))
        return self.suspend(failures, now_s)

    def suspend(self, reason: Reason, now_s: float) -> Reputation:
        """Suspend the peer from now on, for longer than the last time."""
        is_forgotten = now_s - self.aside_until_s >= FORGOTTEN_AFTER_S
        times = 0 if is_forgotten else self.times_aside
        resting = Reputation(times_aside=times + 1, reason=reason)
        return replace(resting, aside_until_s=now_s + resting.suspension_s)
