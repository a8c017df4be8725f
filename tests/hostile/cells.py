"""What the suite is made of: cells with names, what came of each, and the verdict. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch

from swarm_ft.errors import BadOption


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What came of a cell.

    Attributes:
        problem: what did not hold; empty if all did.
        awaits: the protection that is not there yet, without which it cannot hold; empty if it
            must hold today.
    """

    cell: str
    problem: str = ""
    awaits: str = ""
    seconds: float = 0.0

    @property
    def is_red(self) -> bool:
        """Whether something broke that must hold."""
        return bool(self.problem) and not self.awaits

    @property
    def holds_already(self) -> bool:
        """Whether it holds although it need not yet: from now on it should have to."""
        return bool(self.awaits) and not self.problem

    @property
    def word(self) -> str:
        """In one word."""
        if self.awaits:
            return "holds already" if self.holds_already else "awaited"
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
    """For people, as it happens."""
    why = outcome.problem or outcome.awaits
    return f"{outcome.seconds:5.1f} s  {outcome.word:<13}  {outcome.cell}  {why}".rstrip()


def as_dict(outcome: Outcome) -> dict[str, object]:
    """For `--json`."""
    return {
        "cell": outcome.cell,
        "holds": not outcome.problem,
        "problem": outcome.problem,
        "awaits": outcome.awaits,
        "seconds": round(outcome.seconds, 2),
    }


def verdict(outcomes: Sequence[Outcome]) -> str:
    """The last line: of a long output often nothing else is kept."""
    red = [outcome.cell for outcome in outcomes if outcome.is_red]
    awaited = [outcome.cell for outcome in outcomes if outcome.awaits and outcome.problem]
    already = [outcome.cell for outcome in outcomes if outcome.holds_already]
    parts = [f"hostile: {len(outcomes) - len(red) - len(awaited)} of {len(outcomes)} cells hold"]
    parts += [f"awaited: {', '.join(awaited)}"] if awaited else []
    parts += [f"hold already, make them strict: {', '.join(already)}"] if already else []
    parts += [f"BROKEN: {', '.join(red)}"] if red else []
    return "; ".join(parts)
