"""`python -m benchmarks.quality.adapters FILE`: what adapters send, as tables of docs/quality.md.

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

from benchmarks.quality.table import read_records
from benchmarks.quality.train import Record

NEAR_LOSSLESS = "aq4/q8@fp16"
"""Whose changes are told: its buffers are the values within a few thousandths."""
Kind = tuple[str, float]
"""What trains, and the learning rate."""
_ORDER = ("none", NEAR_LOSSLESS)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser("python -m benchmarks.quality.adapters", description=__doc__)
    parser.add_argument("file", type=Path)
    records = read_records(parser.parse_args().file)
    kinds: dict[Kind, list[Record]] = defaultdict(list)
    for record in records:
        if not record["diverged"]:
            kinds[record["trains"], record["rate"]].append(record)
    _print(_changes(kinds))
    _print(_losses(kinds))


def _changes(kinds: dict[Kind, list[Record]]) -> Iterable[list[str]]:
    """A row for each kind: how large changes are between visits, and in how many directions."""
    yield [
        "what trains",
        "rate",
        "change at the 2nd visit",
        "at the last",
        "directions, 2nd",
        "last",
    ]
    for (trains, rate), records in kinds.items():
        found = [record["epochs"] for record in records if record["config"] == NEAR_LOSSLESS]
        if found:
            later = [[run[number]["changes"] for run in found] for number in (1, -1)]
            sizes = [_each(runs, 0, "{:.1%}") for runs in later]
            yield [trains, f"{rate:g}", *sizes, *(_each(runs, 1, "{:.0f}") for runs in later)]


def _each(runs: list[list[tuple[float, int]]], field: int, form: str) -> str:
    """Mean over seeds, of one boundary after the other."""
    cuts = zip(*runs, strict=True)
    return " / ".join(form.format(statistics.fmean(cut[field] for cut in each)) for each in cuts)


def _losses(kinds: dict[Kind, list[Record]]) -> Iterable[list[str]]:
    """A row for each kind: final perplexity, and what each config adds to it."""
    configs = sorted({r["config"] for runs in kinds.values() for r in runs}, key=_place)
    yield ["what trains", "rate", "start", "`none`", *(f"`{config}`" for config in configs[1:])]
    for (trains, rate), records in kinds.items():
        by_config: dict[str, dict[int, Record]] = defaultdict(dict)
        for record in records:
            by_config[record["config"]][record["seed"]] = record
        plain = by_config["none"]
        ends = [_end(record) for record in plain.values()]
        start = statistics.fmean(record["start"]["ppl"] for record in plain.values())
        cells = [_against(by_config[config], plain) for config in configs[1:]]
        yield [trains, f"{rate:g}", f"{start:.0f}", _spread(ends, ""), *cells]


def _against(runs: dict[int, Record], plain: dict[int, Record]) -> str:
    """Final perplexity against the uncompressed run of the same seed, and bits a value."""
    both = [seed for seed in runs if seed in plain]
    if not both:
        return ""
    changes = [100 * (_end(runs[seed]) / _end(plain[seed]) - 1) for seed in both]
    return f"{_spread(changes, '+')} %"


def _end(record: Record) -> float:
    perplexity: float = record["epochs"][-1]["ppl"]
    return perplexity


def _place(config: str) -> tuple[int, str]:
    return (_ORDER.index(config) if config in _ORDER else len(_ORDER), config)


def _spread(values: list[float], sign: str) -> str:
    mean = f"{statistics.fmean(values):{sign}.2f}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.2f}"


def _print(rows: Iterable[list[str]]) -> None:
    for number, cells in enumerate(rows):
        sys.stdout.write("| " + " | ".join(cells) + " |\n")
        if number == 0:
            sys.stdout.write("|" + "---|" * len(cells) + "\n")
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
