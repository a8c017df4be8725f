"""`python -m benchmarks.quality.asked FILE...`: runs with a quality limit, and their losses.

The files have records of `python -m benchmarks.quality --configs none,quality0.01/q1.5+z`, by any
tasks, `--set`s and `--rates`. Runs nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from pathlib import Path

from benchmarks.quality.configs import parse_config
from benchmarks.quality.table import read_records, row
from benchmarks.quality.train import Record

Kind = tuple[str, str, float, int, str]
"""Task, what trains, the learning rate, epochs, and the config."""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser("python -m benchmarks.quality.asked", description=__doc__)
    parser.add_argument("files", type=Path, nargs="+")
    files = parser.parse_args().files
    print_within_limit([record for path in files for record in read_records(path)])


def print_within_limit(records: list[Record]) -> None:
    """Print a row for each kind of run, and how many runs of a config stay within its limit."""
    plain = {_place(record): record for record in records if record["config"] == "none"}
    kinds: dict[Kind, list[Record]] = defaultdict(list)
    for record in records:
        if _limit(record) and _place(record) in plain:
            kinds[_kind(record)].append(record)
    row(["what trains", "rate", "epochs", "config", "lost, %, by seed", "bits", "within"], True)
    within: dict[str, list[bool]] = defaultdict(list)
    for kind, found in kinds.items():
        lost = [_lost(record, plain[_place(record)]) for record in found]
        is_within_list = [each <= _limit(record) for each, record in zip(lost, found, strict=True)]
        by_seed = ", ".join(f"{100 * each:+.2f}" for each in lost)
        row([*_words(kind), by_seed, _bits(found), _of(is_within_list)])
        within[kind[-1]] += is_within_list
    for config, is_within_list in within.items():
        sys.stdout.write(f"\n`{config}`: {_of(is_within_list)} within what was asked.\n")


def _of(is_within: list[bool]) -> str:
    return f"{sum(is_within)} of {len(is_within)}"


def _kind(record: Record) -> Kind:
    trains, epochs = record["trains"], record["planned_epochs"]
    return record["task"], trains, record["rate"], epochs, record["config"]


def _words(kind: Kind) -> list[str]:
    task, trains, rate, epochs, config = kind
    return [f"{trains} (`{task}`)", f"{rate:g}", str(epochs), f"`{config}`"]


def _limit(record: Record) -> float:
    return parse_config(record["config"]).quality


def _place(record: Record) -> tuple[object, ...]:
    """Return the fields that a run shares with the uncompressed run beside it."""
    return tuple(record[name] for name in ("task", "regime", "planned_epochs", "seed", "rate"))


def _lost(record: Record, plain: Record) -> float:
    """Share of the perplexity."""
    if record["diverged"]:
        return float("inf")
    return float(record["epochs"][-1]["ppl"] / plain["epochs"][-1]["ppl"]) - 1


def _bits(found: list[Record]) -> str:
    """Forward and backward, means over seeds."""
    ways = [[run[name] for run in found] for name in ("bits_fw", "bits_bw")]
    return " + ".join(f"{statistics.fmean(way):.2f}" for way in ways)


if __name__ == "__main__":
    main()
