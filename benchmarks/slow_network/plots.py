"""Throughput against bandwidth, of the results that `--json` wrote.

    python -m benchmarks.slow_network.plots RESULT.json ... --out throughput.png

Of each system and bandwidth the last result counts. Needs matplotlib.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot

from benchmarks.slow_network.results import BATCH_SIZE, Row, is_comparable, read_rows

Points = dict[float, Row]
"""Of one system, by bandwidth in Mbps."""


def by_system(rows: Iterable[Row]) -> dict[str, Points]:
    """Comparable rows without a delay and of whole batches, by system and bandwidth, slow first."""
    systems: dict[str, Points] = {}
    for row in filter(is_comparable, rows):
        if row["delay_ms"] == 0 and row["batch_size"] == BATCH_SIZE:
            systems.setdefault(row["system"], {})[row["up_mbps"]] = row
    return {name: dict(sorted(points.items())) for name, points in systems.items()}


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
