"""A peer that gets slow in the middle of a step is relieved in that step, if it has replicas. Pure.

It tells how far it is every few seconds. What counts is its own past: a peer that was always slow
has little to do, see `routes`.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from swarm_ft.coordinator import attempts
from swarm_ft.coordinator.speeds import longest_s
from swarm_ft.coordinator.state import Run
from swarm_ft.coordinator.turn import Turn
from swarm_ft.ids import PeerId
from swarm_ft.protocol.peer_messages import PeerAlive
from swarm_ft.protocol.pipeline import PARTS
from swarm_ft.protocol.status import RunPhase

MEASURED_AT_LEAST = 3
"""Steps before a peer's speed is known well enough."""


def heard(turn: Turn, run: Run, peer_id: PeerId, alive: PeerAlive) -> None:
    """A peer told how far it is; its share is divided anew if the others would wait for long."""
    is_current = (alive.attempt, alive.step) == (run.attempt, run.committed_steps)
    if run.phase is not RunPhase.TRAINING or not is_current:
        return
    seconds = _seconds_each(run, peer_id, alive)
    if seconds is None:
        return
    usual = run.seconds[peer_id]
    known = MappingProxyType({**run.seconds, peer_id: (*usual, seconds)})
    detail = (
        f"peer {peer_id} got slow: {seconds:.1f} s a microbatch, {longest_s(usual):.1f} s at most "
        f"before; its share is divided anew"
    )
    attempts.interrupt(turn, replace(run, seconds=known, detail=detail))


def _seconds_each(run: Run, peer_id: PeerId, alive: PeerAlive) -> float | None:
    """Seconds a microbatch takes the peer now, if that holds the step up.

    It does if what it has not begun yet will take it longer than its whole share ever did.
    """
    usual = run.seconds.get(peer_id, ())
    place = next(((i, s) for i, s in enumerate(run.computing) if peer_id in s.peers), None)
    if place is None:
        return None  # it listens
    index, stage = place
    if len(stage.peers) == 1 or len(usual) < MEASURED_AT_LEAST or not alive.parts_begun:
        return None
    seconds = alive.compute_s / alive.parts_begun * PARTS
    share = run.share(index, stage.peers.index(peer_id))
    remaining = share - -(-alive.parts_begun // PARTS)
    is_slow = remaining > 0 and remaining * seconds > share * longest_s(usual)
    return seconds if is_slow else None
