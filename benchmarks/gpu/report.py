"""The results of all parts so far: a JSON file and a table, complete after every row. Pure.

A row is a flat mapping. Its `table` is the name of one of a part's tables; all else are its
columns, in the order in which they first came.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

Value = str | int | float | bool | None | Sequence["Value"]
Row = Mapping[str, Value]
MAX_CELL_CHARS = 60
DONE, CUT_OFF, FAILED, RUNNING = "done", "cut off", "failed", "running"


@dataclass
class PartReport:
    """The results of a part.

    Attributes:
        how: how it ended, or that it did not yet.
        why: in words, if it is not done.
    """

    name: str
    title: str
    how: str = RUNNING
    why: str = ""
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)

    @property
    def wrong(self) -> int:
        """Checks that did not come out as they should."""
        counts = (row.get("wrong", 0) for row in self.rows)
        return sum(count for count in counts if isinstance(count, int))


@dataclass
class Report:
    """The results of a command.

    Attributes:
        machine: what it ran on, by name.
        parts: in the order in which they ran.
    """

    machine: dict[str, Value]
    parts: list[PartReport] = field(default_factory=list)

    def to_json(self) -> str:
        """All of it."""
        parts = [vars(part) for part in self.parts]
        return json.dumps({"machine": self.machine, "parts": parts}, indent=1) + "\n"

    def to_text(self) -> str:
        """Format for people, in plain characters."""
        return "\n".join(self._lines()) + "\n"

    def write(self, path: Path) -> None:
        """Write the JSON to `path` and the table beside it, each atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        for suffix, text in ((path.suffix, self.to_json()), (".txt", self.to_text())):
            partial = path.with_suffix(".partial")
            partial.write_text(text, encoding="utf-8")
            partial.replace(path.with_suffix(suffix))

    def _lines(self) -> Iterator[str]:
        for name, value in self.machine.items():
            yield f"{name}: {_cell(value, limit=None)}"
        for part in self.parts:
            why = f": {part.why}" if part.why else ""
            yield ""
            how = f"{part.how} after {part.seconds:.0f} s{why}"
            wrong = f", {part.wrong} WRONG" if part.wrong else ""
            yield f"== {part.name}: {part.title} ({how}{wrong})"
            for name, rows in tables_of(part.rows).items():
                yield ""
                if name:
                    yield f"-- {name}"
                yield from table_lines(rows)


def tables_of(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by their table, tables in the order in which they first came."""
    tables: dict[str, list[Row]] = {}
    for row in rows:
        cells = {name: value for name, value in row.items() if name != "table"}
        tables.setdefault(str(row.get("table", "")), []).append(cells)
    return tables


def table_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Format a table in aligned columns: numbers to the right, all else to the left.

    What is long is cut, but for the last column.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    limits = [MAX_CELL_CHARS] * (len(names) - 1) + [None]
    columns = [
        [name, *(_cell(row.get(name), limit) for row in rows)]
        for name, limit in zip(names, limits, strict=True)
    ]
    widths = [max(map(len, column)) for column in columns]
    right = [_are_numbers([row.get(name) for row in rows]) for name in names]
    for cells in zip(*columns, strict=True):
        padded = (
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(cells, widths, right, strict=True)
        )
        yield "  ".join(padded).rstrip()


def ratio(of: float | None, to: float | None) -> float | None:
    """`of` beside `to`; None where either is not known, or there is nothing to divide by."""
    return None if of is None or not to else of / to


def _are_numbers(values: Sequence[Value]) -> bool:
    return all(value is None or isinstance(value, int | float) for value in values)


def _cell(value: Value, limit: int | None = MAX_CELL_CHARS) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    if isinstance(value, str) or not isinstance(value, Sequence):
        text = " ".join(str(value).split())
    else:
        text = ", ".join(map(_cell, value))
    return text if limit is None or len(text) <= limit else text[: limit - 1] + "…"
