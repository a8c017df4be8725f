"""The parts of the suite: named cells, their outcomes, and the verdict. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch

from swarm_ft.errors import BadOption


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The outcome of a cell.

    Attributes:
        problem: what did not hold; empty if all did.
    """

    cell: str
    problem: str = ""
    seconds: float = 0.0

    @property
    def word(self) -> str:
        """Return the verdict in one word."""
        return "BROKEN" if self.problem else "holds"


def chosen(names: Sequence[str], patterns: Iterable[str]) -> tuple[str, ...]:
    """Cells that match one of the patterns, `Cancel:*` for example; all without any.

    Raises:
        BadOption: a pattern matches none.
    """
    patterns = tuple(patterns)
    for pattern in patterns:
        if not any(fnmatch(name, pattern) for name in names):
            raise BadOption(f"--cells {pattern}: no such cell; for example {names[0]}")
    return tuple(n for n in names if not patterns or any(fnmatch(n, p) for p in patterns))


def as_line(outcome: Outcome) -> str:
    """Format for people, as it happens."""
    return (
        f"{outcome.seconds:5.1f} s  {outcome.word:<6}  {outcome.cell}  {outcome.problem}".rstrip()
    )


def as_dict(outcome: Outcome) -> dict[str, object]:
    """Return the document for `--json`."""
    return {
        "cell": outcome.cell,
        "holds": not outcome.problem,
        "problem": outcome.problem,
        "seconds": round(outcome.seconds, 2),
    }


def verdict(outcomes: Sequence[Outcome]) -> str:
    """The last line: of a long output often nothing else is kept."""
    broken = [f"{one.cell} ({' '.join(one.problem.split())})" for one in outcomes if one.problem]
    holding = f"hostile: {len(outcomes) - len(broken)} of {len(outcomes)} cells hold"
    return f"{holding}; BROKEN: {'; '.join(broken)}" if broken else holding
