"""Throughput against bandwidth, of the results that `--json` wrote.

    python -m benchmarks.slow_network.plots RESULT.json ... --out throughput.png

Of each system and bandwidth the last result counts. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot

Row = Mapping[str, Any]
Points = dict[float, Row]
"""Of one system, by bandwidth in Mbps."""
SHAPE = {"stages": 8, "replicas": 1, "links": "pair", "delay_ms": 0.0, "batch_size": 32}
"""Of the rows that are drawn."""


def read_rows(paths: Iterable[Path]) -> list[Row]:
    """All rows of these documents, in order."""
    documents = (json.loads(path.read_text(encoding="utf-8")) for path in paths)
    return [row for document in documents for row in document["rows"]]


def by_system(rows: Iterable[Row]) -> dict[str, Points]:
    """Rows of SHAPE on equal links, by system and bandwidth, slow links first."""
    systems: dict[str, Points] = {}
    for row in rows:
        if all(row[name] == value for name, value in SHAPE.items()) and _is_even(row):
            systems.setdefault(row["system"], {})[row["up_mbps"]] = row
    return {name: dict(sorted(points.items())) for name, points in systems.items()}


def _is_even(row: Row) -> bool:
    return row["up_mbps"] is not None and row["up_mbps"] == row["down_mbps"]


def draw(systems: Mapping[str, Points], path: Path) -> None:
    """A line for each system, with its limit dashed where it has one."""
    figure, axes = pyplot.subplots(figsize=(10, 6), layout="constrained")
    ours_first = sorted(systems.items(), key=lambda item: not item[0].startswith("swarm-ft"))
    for name, points in ours_first:
        style = {"marker": "o"} if name.startswith("swarm-ft") else {"marker": "s", "alpha": 0.8}
        speeds = [row["samples_per_s"] for row in points.values()]
        (line,) = axes.plot(list(points), speeds, label=name, **style)
        limits = {mbps: row["limit_per_s"] for mbps, row in points.items() if row["limit_per_s"]}
        if name.startswith("swarm-ft"):
            axes.plot(list(limits), list(limits.values()), "--", color=line.get_color(), lw=0.8)
    axes.set(
        xscale="log",
        xlabel="bandwidth of each link, Mbps",
        ylabel="samples a second",
        title="gpt2-xl-v100: 8 stages, batch 32 (dashed: the limit of what is sent)",
    )
    axes.set_ylim(bottom=0)
    ticks = sorted({mbps for points in systems.values() for mbps in points})
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=Path("throughput.png"))
    options = parser.parse_args()
    draw(by_system(read_rows(options.results)), options.out)


if __name__ == "__main__":
    main()
