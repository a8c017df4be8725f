"""What follows from hearing nothing: of a peer, or, for the coordinator, of anything at all. Pure.

A coordinator that stood still (a laptop that slept, a process that was stopped, a clock that
jumped ahead) heard nobody, and that says nothing about anybody: such time does not count.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from swarm_ft.coordinator.membership import SILENT_S
from swarm_ft.coordinator.state import Run, SwarmState
from swarm_ft.coordinator.turn import Turn

STALLED_S = 2.0
"""Time passes in `Tick`s, a few a second; after a longer gap the coordinator itself stood still."""
NOTICED_S = SILENT_S / 2
"""A peer that says nothing for so long is told of; it may yet be given up."""


def after_gap(state: SwarmState, now_s: float) -> SwarmState:
    """The state as an event finds it: without the time in which the coordinator stood still."""
    gap_s = now_s - state.seen_at_s
    state = replace(state, seen_at_s=now_s)
    return _postponed(state, gap_s) if gap_s >= STALLED_S else state


def _postponed(state: SwarmState, gap_s: float) -> SwarmState:
    members = {
        name: replace(m, heard_at_s=m.heard_at_s + gap_s, joined_at_s=m.joined_at_s + gap_s)
        for name, m in state.members.items()
    }
    runs = {run_id: _run_postponed(run, gap_s) for run_id, run in state.runs.items()}
    return replace(state, members=MappingProxyType(members), runs=MappingProxyType(runs))


def _run_postponed(run: Run, gap_s: float) -> Run:
    away = {peer: since_s + gap_s for peer, since_s in run.away_since_s.items()}
    return replace(
        run,
        away_since_s=MappingProxyType(away),
        gather_until_s=run.gather_until_s + gap_s,
        not_before_s=run.not_before_s + gap_s,
    )


def tell(turn: Turn) -> None:
    """Let those who watch the run see whom it hears nothing of, as long as that is so."""
    run = turn.state.active_run
    if run is None:
        return
    notice = _notice(turn, run) if run.phase.is_working else ""
    if notice != run.notice:
        run = replace(run, notice=notice)
        turn.keep(run)
        turn.publish(run.run_id, run.status)


def _notice(turn: Turn, run: Run) -> str:
    members = turn.state.members
    return "; ".join(
        f"peer {stage.peer_id} (layers {stage.layers}) has said nothing for {NOTICED_S:.0f} s"
        for stage in run.stages
        if stage.peer_id in members and turn.now_s - members[stage.peer_id].heard_at_s >= NOTICED_S
    )
