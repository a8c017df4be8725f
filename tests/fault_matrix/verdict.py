"""The verdict on a run with a fault: it must end as a quiet one. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

from swarm_ft.client.report import ProgressState
from swarm_ft.protocol.messages.client import RunEvent, StepCommitted
from tests.fault_matrix.cells import Cell, Fault, Role

RTOL = 1e-4
"""Losses of runs whose gradients are summed in another order, in float32, differ by less."""
DETECTION_S = {Fault.KILL: 3.0, Fault.DROP: 3.0, Fault.STOP: 10.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """A run as its watcher saw it.

    Attributes:
        events: in the order in which they came.
        quiet: the losses that it should have.
        detection_s: until the fault was known of; None where nobody has to know.
    """

    cell: Cell
    events: Sequence[RunEvent]
    quiet: Sequence[float]
    detection_s: float | None


def losses_of(events: Iterable[RunEvent]) -> tuple[float, ...]:
    """Return the losses of the steps that count in the end, as a client has them."""
    steps = (event for event in events if isinstance(event, StepCommitted))
    return reduce(ProgressState.with_event, steps, ProgressState(num_steps=0)).losses


def relative_difference(observed: Observed) -> float:
    """The largest, of the steps that count in the end."""
    losses = losses_of(observed.events)
    pairs = zip(losses, observed.quiet, strict=False)
    differences = [abs(loss - quiet) / abs(quiet) for loss, quiet in pairs]
    # `max` would pass over a NaN.
    return max(differences, default=0.0) if all(map(math.isfinite, differences)) else math.nan


def problems_of(observed: Observed) -> str:
    """Return the problems as a text; empty if there is none."""
    return "; ".join(_problems(observed))


def _problems(observed: Observed) -> Iterator[str]:
    counted = len(losses_of(observed.events))
    if counted != len(observed.quiet):
        yield f"{counted} steps count, not {len(observed.quiet)}"
    difference = relative_difference(observed)
    if not difference <= RTOL:
        yield f"losses differ by {difference:.1e}"
    limit_s = DETECTION_S[observed.cell.fault]
    if observed.detection_s is not None and observed.detection_s > limit_s:
        yield f"detected after {observed.detection_s:.1f} s, not {limit_s:.0f} s"
    yield from _repetitions(observed)


def _repetitions(observed: Observed) -> Iterator[str]:
    """Steps that were committed again; a watcher of a new coordinator receives them again."""
    if observed.cell.role is Role.LONE and observed.cell.fault is Fault.KILL:
        return  # the run goes back
    losses: dict[int, float] = {}
    is_reported_again = observed.cell.role is Role.COORDINATOR
    for event in observed.events:
        if not isinstance(event, StepCommitted):
            continue
        is_new = event.step not in losses
        if losses.setdefault(event.step, event.loss) != event.loss:
            yield f"step {event.step} was committed twice, with different losses"
        elif not is_new and not is_reported_again:
            yield f"step {event.step} was committed twice"
