"""`python -m benchmarks.quality.adapters FILE`: bytes of adapters, as tables of a report.

The tables are in benchmarks/reports/quality.md.

FILE has records of `python -m benchmarks.quality --group adapters`, by `--task lm` and by
`--task lora` with several `--set`s. Runs nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from benchmarks.quality.table import Rows, change, read_records, row, spread
from benchmarks.quality.train import Record

NEAR_LOSSLESS = "aq4/q8@fp16"
"""Whose changes are told: its buffers are the values within a few thousandths."""
Kind = tuple[str, float, int]
"""What trains, the learning rate, and for how many epochs."""
_ORDER = ("none", NEAR_LOSSLESS)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser("python -m benchmarks.quality.adapters", description=__doc__)
    parser.add_argument("file", type=Path)
    records = read_records(parser.parse_args().file)
    kinds: dict[Kind, list[Record]] = defaultdict(list)
    for record in records:
        if not record["diverged"]:
            kind = record["trains"], record["rate"], record["planned_epochs"]
            kinds[kind].append(record)
    _print(_changes(kinds))
    _print(_losses(kinds))


def _changes(kinds: dict[Kind, list[Record]]) -> Iterable[list[str]]:
    """Yield a row for each kind: how large changes between visits are, in how many directions."""
    yield [
        "what trains",
        "rate",
        "epochs",
        "change at the 2nd visit",
        "at the last",
        "directions, 2nd",
        "last",
    ]
    for (trains, rate, epochs), records in kinds.items():
        found = [record["epochs"] for record in records if record["config"] == NEAR_LOSSLESS]
        if found:
            later = [[run[number]["changes"] for run in found] for number in (1, -1)]
            sizes = [_each(runs, 0, "{:.1%}") for runs in later]
            yield [
                trains,
                f"{rate:g}",
                str(epochs),
                *sizes,
                *(_each(runs, 1, "{:.0f}") for runs in later),
            ]


def _each(runs: list[list[tuple[float, int]]], field: int, form: str) -> str:
    """Mean over seeds, of one boundary after the other."""
    cuts = zip(*runs, strict=True)
    return " / ".join(form.format(statistics.fmean(cut[field] for cut in each)) for each in cuts)


def _losses(kinds: dict[Kind, list[Record]]) -> Iterable[list[str]]:
    """Yield a row for each kind: final perplexity, and the difference that each config makes."""
    configs = sorted({r["config"] for runs in kinds.values() for r in runs}, key=_place)
    yield [
        "what trains",
        "rate",
        "epochs",
        "start",
        "`none`",
        *(f"`{config}`" for config in configs[1:]),
    ]
    for (trains, rate, epochs), records in kinds.items():
        rows: Rows = defaultdict(list)
        for record in records:
            rows[record["config"], record["planned_epochs"]].append(record)
        plain = [record for record in records if record["config"] == "none"]
        start = statistics.fmean(record["start"]["ppl"] for record in plain)
        end = spread([record["epochs"][-1]["ppl"] for record in plain], ".2f")
        yield [
            trains,
            f"{rate:g}",
            str(epochs),
            f"{start:.0f}",
            end,
            *(_against(one, rows) for one in configs[1:]),
        ]


def _against(config: str, rows: Rows) -> str:
    """Compare the final perplexity with the uncompressed run of the same seed."""
    runs = [record for (name, _), found in rows.items() if name == config for record in found]
    if not runs:
        return "-"
    return f"{spread([change(record, rows) for record in runs], '+.2f')} %"


def _place(config: str) -> tuple[int, str]:
    return (_ORDER.index(config) if config in _ORDER else len(_ORDER), config)


def _print(rows: Iterable[list[str]]) -> None:
    for number, cells in enumerate(rows):
        row(cells, header=number == 0)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
