"""Outcomes for people and for programs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from tests.fault_matrix.cells import Fault, Role
from tests.fault_matrix.trial import Outcome

_SUMMARY_HEAD = (
    "| who | fault | cells | in order | detection s, at most | recovery s, at most "
    "| losses differ by, at most |\n" + "|---" * 7 + "|"
)
_HEAD = (
    "| who | phase | fault | detection s | recovery s | losses differ by | |\n" + "|---" * 7 + "|"
)


def as_line(outcome: Outcome) -> str:
    """One outcome for a terminal."""
    times = f"{_seconds(outcome.detection_s):>6} {_seconds(outcome.recovery_s):>6}"
    return f"{outcome.cell!s:36} {times}  {outcome.difference:.0e}  {outcome.problem or 'ok'}"


def as_markdown(outcomes: Sequence[Outcome]) -> str:
    """A table of roles and faults, and one of all outcomes."""
    by_kind = sorted(outcomes, key=lambda o: (list(Role).index(o.cell.role), o.cell.fault))
    groups = groupby(by_kind, key=lambda o: (o.cell.role, o.cell.fault))
    summary = [_summary_row(role, fault, list(group)) for (role, fault), group in groups]
    return "\n".join((_SUMMARY_HEAD, *summary, "", _HEAD, *map(_row, outcomes)))


def as_dict(outcome: Outcome) -> dict[str, object]:
    """One outcome for programs; times in seconds."""
    has_losses = outcome.difference == outcome.difference
    return {
        "role": outcome.cell.role,
        "phase": outcome.cell.phase,
        "fault": outcome.cell.fault,
        "detection_s": outcome.detection_s,
        "recovery_s": outcome.recovery_s,
        "losses_differ_by": outcome.difference if has_losses else None,
        "problem": outcome.problem,
    }


def _summary_row(role: Role, fault: Fault, outcomes: Sequence[Outcome]) -> str:
    columns = (
        *(role, fault, str(len(outcomes)), str(sum(not o.problem for o in outcomes))),
        _seconds(_largest(o.detection_s for o in outcomes)),
        _seconds(_largest(o.recovery_s for o in outcomes)),
        f"{max(o.difference for o in outcomes):.0e}",
    )
    return "| " + " | ".join(columns) + " |"


def _largest(seconds: Iterable[float | None]) -> float | None:
    return max((s for s in seconds if s is not None), default=None)


def _row(outcome: Outcome) -> str:
    cell = outcome.cell
    columns = (
        *(cell.role, cell.phase, cell.fault),
        *(_seconds(outcome.detection_s), _seconds(outcome.recovery_s)),
        *(f"{outcome.difference:.0e}", outcome.problem or "ok"),
    )
    return "| " + " | ".join(columns) + " |"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f}"
