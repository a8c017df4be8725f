"""The run at fault when a decision raises. Pure.

`decide` raises only by a bug. One run's odd state must not stop the runs beside it, so the
coordinator fails that run and goes on. A bug that no single run explains is not contained.
"""

from __future__ import annotations

from swarm_ft.coordinator.decide.machine import decide
from swarm_ft.coordinator.facts.events import Effect, Event, PeerSaid
from swarm_ft.coordinator.facts.state import SwarmState
from swarm_ft.ids import RunId


def run_at_fault(state: SwarmState, event: Event, now_s: float) -> RunId | None:
    """Return the run without which the event does not raise; None if there is none.

    A message about a run that its sender does not serve implicates only the sender.

    Args:
        state: State before the event.
        event: Event for which `decide` raised.
        now_s: Monotonic seconds.
    """
    named = run_of(event)
    run = state.runs.get(named) if named is not None else None
    if isinstance(event, PeerSaid) and run is not None and event.peer_id not in run.peers:
        return None
    going = [run_id for run_id, run in state.runs.items() if not run.phase.is_over]
    first = [named] if run is not None and named is not None else []
    for run_id in dict.fromkeys([*first, *going]):
        if not _raises(state.without_run(run_id), event, now_s):
            return run_id
    return None


def run_of(thing: Event | Effect) -> RunId | None:
    """Return the run that an event or an effect is about; None if there is none, or several."""
    for holder in (thing, getattr(thing, "message", None), getattr(thing, "run", None)):
        holder = getattr(holder, "name", holder)  # a shard's name has the run
        run_id = getattr(holder, "run_id", None)
        if run_id is not None:
            return RunId(run_id)
    return None


def _raises(state: SwarmState, event: Event, now_s: float) -> bool:
    try:
        decide(state, event, now_s)
    except Exception:  # noqa: BLE001 - any error answers the question
        return True
    return False
