"""Outcomes for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence

from swarm_ft.testing.fault_matrix.trial import Outcome

_HEAD = (
    "| who | phase | fault | detection s | recovery s | losses differ by | |\n" + "|---" * 7 + "|"
)


def as_line(outcome: Outcome) -> str:
    """One outcome for a terminal."""
    times = f"{_seconds(outcome.detection_s):>6} {_seconds(outcome.recovery_s):>6}"
    return f"{outcome.cell!s:36} {times}  {outcome.difference:.0e}  {outcome.problem or 'ok'}"


def as_markdown(outcomes: Sequence[Outcome]) -> str:
    """All of them as a table."""
    return "\n".join((_HEAD, *map(_row, outcomes)))


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
