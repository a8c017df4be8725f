"""Policy that gives replicas to a waiting run, see `plan.allocation`. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from swarm_ft.coordinator.decide import attempts
from swarm_ft.coordinator.facts.events import Transition
from swarm_ft.coordinator.facts.reasons import Reason, ReasonKind
from swarm_ft.coordinator.facts.state import Run, SwarmState
from swarm_ft.coordinator.plan.allocation import allocate_members
from swarm_ft.coordinator.plan.membership import without_state
from swarm_ft.ids import PeerId


@dataclass(frozen=True, slots=True)
class GivePeers:
    """Continues without these replicas, which a waiting run gets."""

    peers: frozenset[PeerId]

    def apply(self, turn: Transition, run: Run) -> None:
        """End the attempt, and release the replicas."""
        released = [a.peer_id for a in run.attempt.assignments if a.peer_id in self.peers]
        for peer in released:
            run = without_state(run, peer)
        run = run.with_assignments(
            a for a in run.attempt.assignments if a.peer_id not in self.peers
        )
        reason = Reason(kind=ReasonKind.PEERS_GIVEN, peers=tuple(released))
        attempts.interrupt(turn, replace(run, detail=reason))
        for peer in released:
            attempts.release(turn, run, peer, ReasonKind.RELEASED_GIVEN)


def give_peers(state: SwarmState, run: Run, now_s: float) -> GivePeers | None:
    """Give the replicas that a waiting run can begin with."""
    peers = peers_to_give(state, run, now_s)
    return GivePeers(frozenset(peers)) if peers else None


def peers_to_give(state: SwarmState, run: Run, now_s: float) -> Collection[PeerId]:
    """Return replicas of the run that a waiting run gets now."""
    if run.has_all_steps:
        return ()
    return allocate_members(state, now_s).to_give.get(run.run_id, ())
