"""Results that wait for their clients: a part that nobody has any more is made again.

A finished run whose result lost a part goes back to its newest snapshot, or the beginning, unless
another run trains: that one is not disturbed, and meanwhile who has the part may yet come back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from swarm_ft.coordinator import attempts
from swarm_ft.coordinator.membership import lost_parts
from swarm_ft.coordinator.state import Run
from swarm_ft.coordinator.turn import Turn
from swarm_ft.ids import NO_ATTEMPT, PeerId
from swarm_ft.protocol.layers import LayerRange
from swarm_ft.protocol.status import RunPhase

TO_BE_FETCHED = "the result can be fetched"


def holder_gone(turn: Turn, peer_id: PeerId, *, away_since_s: float) -> None:
    """A peer went away; what it has of results may be gone with it."""
    for run in _finished(turn):
        if peer_id in run.peers:
            away = {**run.away_since_s, peer_id: away_since_s}
            turn.keep(replace(run, away_since_s=MappingProxyType(away)))


def look_after(turn: Turn) -> None:
    """See whether results are still there; make those again that are not, one at a time."""
    for run in _finished(turn):
        lost = lost_parts(turn.state, run, turn.now_s)
        active = turn.state.active_run
        if lost and (active is None or not active.stages):
            _make_again(turn, run, lost, active)
        elif lost and active:
            _tell(turn, run, f"{_in_words(lost)}; it is made again after run {active.run_id}")
        else:
            _tell(turn, run, TO_BE_FETCHED)


def _finished(turn: Turn) -> list[Run]:
    return [run for run in turn.state.runs.values() if run.phase is RunPhase.FINISHED]


def _make_again(turn: Turn, run: Run, lost: Sequence[LayerRange], active: Run | None) -> None:
    """Go back, now or, where another run is begun, as soon as that is over."""
    step = run.snapshot.step if run.snapshot else 0
    detail = f"{_in_words(lost)}; the run goes back to step {step}"
    phase = RunPhase.WAITING
    if active is not None and active.attempt != NO_ATTEMPT:
        phase, detail = RunPhase.QUEUED, f"{detail} after run {active.run_id}"
    elif active is not None:
        turn.put(replace(active, phase=RunPhase.QUEUED, detail=""))
    attempts.go_back(turn, replace(run, phase=phase, detail=detail))


def _tell(turn: Turn, run: Run, detail: str) -> None:
    if run.detail != detail:
        turn.put(replace(run, detail=detail))


def _in_words(lost: Sequence[LayerRange]) -> str:
    return f"the result of layers {', '.join(map(str, lost))} is lost"
