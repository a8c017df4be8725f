"""Results as Markdown tables: means and spreads over seeds, against the uncompressed runs."""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks.quality.configs import DEFAULT_EPOCHS, GROUPS, Config, configs_of
from benchmarks.quality.families import DEFAULT_FAMILY
from benchmarks.quality.train import RATES, Record


class Kind(NamedTuple):
    """The properties that comparable runs share; the defaults are those of older records.

    Attributes:
        family: of the model.
        trains: what of it does, in words.
        in_a_row: how many steps one after the other visit the same batch.
    """

    family: str = DEFAULT_FAMILY
    trains: str = "all"
    in_a_row: int = 1

    @staticmethod
    def of(record: Record) -> Kind:
        """Return the kind of a run."""
        return Kind()._replace(**{name: record[name] for name in Kind._fields if name in record})

    def __str__(self) -> str:
        lazily = f", a batch {self.in_a_row} times in a row" * (self.in_a_row > 1)
        return f"{self.family}, {self.trains}{lazily}"


_OLDEST = Kind()
Rows = dict[tuple[str, int], list[Record]]
"""Records of each (config, epochs), one a seed, at the task's rate."""


@dataclass(frozen=True, slots=True)
class Column:
    """A heading, and what of a finished record stands under it; None where it has no such thing."""

    heading: str
    of: Callable[[Record], float | None]
    form: str = ".2f"


def _last(name: str) -> Callable[[Record], float | None]:
    return lambda record: record["epochs"][-1][name]


def _least(name: str) -> Callable[[Record], float | None]:
    return lambda record: min(epoch[name] for epoch in record["epochs"])


def _direct(name: str) -> Callable[[Record], float | None]:
    return lambda record: record.get("direct", {}).get(name)


_BITS = [
    Column("bits forward", lambda record: record["bits_fw"]),
    Column("bits backward", lambda record: record["bits_bw"]),
]
_PERPLEXITY = [
    Column("uncompressed", _last("ppl")),
    Column("best epoch", _least("ppl")),
    Column("compressed", _last("ppl_compressed")),
    Column("direct", _direct("ppl")),
]
_CLASSES = [
    Column("accuracy", _last("accuracy"), ".4f"),
    Column("Matthews", _last("matthews"), ".3f"),
    Column("held-out loss", _last("held_out_loss"), ".4f"),
    Column("accuracy, compressed", _last("accuracy_compressed"), ".4f"),
    Column("Matthews, compressed", _last("matthews_compressed"), ".3f"),
    Column("train loss", _last("loss"), ".4f"),
]


def read_records(path: Path) -> list[Record]:
    """All finished runs in a results file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def rows_of(records: Iterable[Record], task: str, kind: Kind = _OLDEST) -> Rows:
    """Select a task's runs of a kind at its rate, by config; of a repeated run the last one."""
    runs = {}
    for record in records:
        if Kind.of(record) == kind and record["task"] == task and record["rate"] == RATES[task]:
            runs[record["config"], record["planned_epochs"], record["seed"]] = record
    rows: Rows = defaultdict(list)
    for (config, epochs, _), record in sorted(runs.items()):
        rows[config, epochs].append(record)
    return rows


def wanted(records: list[Record], group: str | None, configs: list[Config] | None) -> list[Config]:
    """Return the configs to show: the requested, else a group's, else all; each name once.

    Two configs may differ in a key codec that neither uses; runs are known by their names alone.
    """
    if configs is None and group is not None:
        configs = configs_of(GROUPS[group], DEFAULT_EPOCHS)
    if configs is None:
        texts = (f"{record['config']}:{record['planned_epochs']}" for record in records)
        configs = configs_of(" ".join(texts), DEFAULT_EPOCHS)
    return list({(str(config), config.epochs): config for config in configs}.values())


def print_tables(records: list[Record], group: str | None, configs: list[Config] | None) -> None:
    """Print the learning rates tried, then the runs, of all tasks or of a group's task."""
    for task in RATES:
        of_task = [record for record in records if record["task"] == task]
        if of_task and (group is None or (task == "cola") == (group == "cola")):
            for kind in dict.fromkeys(Kind.of(record) for record in of_task):
                alike = [record for record in of_task if Kind.of(record) == kind]
                if kind != _OLDEST:
                    _print_line(f"\n## {task}: {kind}")
                _print_rates(alike, task)
                _print_runs(rows_of(alike, task, kind), task, wanted(alike, group, configs))


def change(record: Record, rows: Rows) -> float | None:
    """Compare the final perplexity with the uncompressed run of the same seed, in percent."""
    for none in rows.get(("none", record["planned_epochs"]), []):
        if none["seed"] == record["seed"] and not none["diverged"] and "ppl" in none["start"]:
            return 100 * (record["epochs"][-1]["ppl"] / none["epochs"][-1]["ppl"] - 1)
    return None


def _print_rates(records: list[Record], task: str) -> None:
    name = "ppl" if task != "cola" else "held_out_loss"
    tried = [
        record
        for record in records
        if record["config"] == "none" and record["planned_epochs"] == DEFAULT_EPOCHS
    ]
    _print_line(f"\n### {task}: learning rates, uncompressed (used: {RATES[task]:g})\n")
    row(["rate", "seed", "start", "end", "change"], header=True)
    for record in sorted(tried, key=lambda r: (r["rate"], r["seed"])):
        start, end = record["start"][name], record["epochs"][-1][name]
        cells = [f"{record['rate']:g}", str(record["seed"]), f"{start:.2f}", f"{end:.2f}"]
        row([*cells, f"{100 * (end / start - 1):+.1f} %"])


def _print_runs(rows: Rows, task: str, configs: list[Config]) -> None:
    against = Column("vs none, %", lambda record: change(record, rows), "+.2f")
    scores = _CLASSES if task == "cola" else [_PERPLEXITY[0], against, *_PERPLEXITY[1:]]
    columns = [*scores, *_BITS]
    if any(config.dp for config in configs):
        columns.append(Column("bits between replicas", lambda record: record.get("bits_dp")))
    _print_line(f"\n### {task}: runs\n")
    row(["config", "epochs", "seeds", *(column.heading for column in columns)], header=True)
    for config in configs:
        runs = rows.get((str(config), config.epochs), [])
        finished = [run for run in runs if not run["diverged"]]
        if not runs:
            continue
        seeds = str(len(runs)) + f", {len(runs) - len(finished)} diverged" * (runs != finished)
        cells = [spread([column.of(run) for run in finished], column.form) for column in columns]
        row([f"`{config}`", str(config.epochs), seeds, *cells])


def spread(found: list[float | None], form: str) -> str:
    """Mean and standard deviation; a spread of less than the last digit is left out."""
    values = [value for value in found if value is not None]
    if not values:
        return "-"
    mean = f"{statistics.fmean(values):{form}}"
    if len(values) < 2 or statistics.stdev(values) < 0.005:
        return mean
    return f"{mean} ± {statistics.stdev(values):{form.removeprefix('+')}}"


def row(cells: list[str], header: bool = False) -> None:
    """Print a line of a Markdown table."""
    _print_line("| " + " | ".join(cells) + " |")
    if header:
        _print_line("|" + "---|" * len(cells))


def _print_line(line: str) -> None:
    sys.stdout.write(line + "\n")
