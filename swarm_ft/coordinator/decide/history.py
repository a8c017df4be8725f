"""Expiry of results that nobody fetches, and of runs that are over. Pure."""

from __future__ import annotations

import math
from dataclasses import replace

from swarm_ft.coordinator.decide import attempts
from swarm_ft.coordinator.facts.events import Transition
from swarm_ft.coordinator.facts.reasons import Reason, ReasonKind
from swarm_ft.protocol.messages.client import RunPhase

MAX_RUNS_OVER = 256
"""Collected, cancelled and failed runs that are remembered; older submissions are dropped."""


def expire_results(turn: Transition) -> None:
    """End runs whose result nobody fetched for too long, so that peers may delete it.

    The time counts from the run's end, or from the coordinator's start.
    """
    result_s = turn.state.result_s
    for run in tuple(turn.state.runs.values()):
        since_s = run.finished_since_s
        if run.phase is not RunPhase.FINISHED:
            if since_s != math.inf:  # its result was lost, and is made again
                turn.set_run(replace(run, finished_since_s=math.inf))
        elif since_s == math.inf:
            turn.set_run(replace(run, finished_since_s=turn.now_s))
        elif turn.now_s - since_s >= result_s:
            expired = Reason(kind=ReasonKind.RESULT_EXPIRED, amount=result_s)
            attempts.end(turn, run, RunPhase.FAILED, expired)


def forget(turn: Transition) -> None:
    """Remove the oldest runs that are over."""
    over = [run for run in turn.state.runs.values() if run.phase > RunPhase.FINISHED]
    for run in over[:-MAX_RUNS_OVER]:
        turn.forget(run.run_id)
