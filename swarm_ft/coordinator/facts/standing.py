"""How a peer did of late: who fails again and again is set aside, each time for longer."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from swarm_ft.coordinator.facts.reasons import Reason, ReasonKind
from swarm_ft.ids import Attempt, RunId

MAX_FAILURES = 3
AMONG_ATTEMPTS = 10
"""So many failures among so many attempts of a run are too many."""
FIRST_REST_S = 30.0
MAX_REST_S = 3600.0
REST_FACTOR = 4.0
"""A peer that was set aside before, and fails again, is set aside for so many times as long."""
FORGOTTEN_AFTER_S = 6 * 3600.0
"""A peer that was well for so long begins anew."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """A peer's failures, whatever runs they were in.

    Attributes:
        failed_in: attempts in which it failed since it was set aside last, and who said so; empty
            where it did itself.
        times_aside: how often it was, of late.
        aside_until_s: monotonic seconds; no run is given to it before.
        reason: of its suspension, or its last failure.
    """

    failed_in: tuple[tuple[RunId, Attempt, str], ...] = ()
    times_aside: int = 0
    aside_until_s: float = -math.inf
    reason: Reason | None = None

    def is_aside(self, now_s: float) -> bool:
        """Whether it has to rest."""
        return now_s < self.aside_until_s

    @property
    def rest_s(self) -> float:
        """How long it was set aside for the last time."""
        return min(FIRST_REST_S * REST_FACTOR ** (self.times_aside - 1), MAX_REST_S)

    @property
    def suspension(self) -> Reason:
        """The reason that a suspended peer and its runs have."""
        cause = () if self.reason is None else (self.reason,)
        return Reason(kind=ReasonKind.PEER_SUSPENDED, amount=self.rest_s, parts=cause)

    def after_failure(
        self, run_id: RunId, attempt: Attempt, reason: Reason, now_s: float, *, by: str = ""
    ) -> Standing:
        """What one more failure makes of it; several in one attempt count once.

        Args:
            run_id: of the run.
            attempt: in which it failed.
            reason: of the failure.
            now_s: monotonic seconds.
            by: the other peer that says so; empty if it does itself. One other alone is not
                believed, however often it says so.
        """
        recent = {one for one in self.failed_in if one[0] == run_id} | {(run_id, attempt, by)}
        failed_in = tuple(sorted(one for one in recent if one[1] > attempt - AMONG_ATTEMPTS))
        sayers = {sayer for _, _, sayer in failed_in}
        if len(failed_in) < MAX_FAILURES or ("" not in sayers and len(sayers) == 1):
            return replace(self, failed_in=failed_in, reason=reason)
        failures = Reason(kind=ReasonKind.FAILED_TOO_OFTEN, amount=MAX_FAILURES, parts=(reason,))
        return self.set_aside(failures, now_s)

    def set_aside(self, reason: Reason, now_s: float) -> Standing:
        """It rests from now on, for longer than the last time."""
        is_forgotten = now_s - self.aside_until_s >= FORGOTTEN_AFTER_S
        times = 0 if is_forgotten else self.times_aside
        resting = Standing(times_aside=times + 1, reason=reason)
        return replace(resting, aside_until_s=now_s + resting.rest_s)
