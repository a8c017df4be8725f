"""Throughput against bandwidth, of the results that `--json` wrote.

    python -m benchmarks.slow_network.plots RESULT.json ... --out throughput.png

Draws the systems of `LINES` alone; of each system and bandwidth the last result counts. Needs
matplotlib.
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
"""Results of one system by bandwidth in Mbps."""
UNDER_ONE_BIT = "swarm-ft aqk0.6~aqk1.2/q0.7+z+last~q0.6+z+last@qk0.45"
LINES = {
    UNDER_ONE_BIT: "swarm-ft, under 1 bit a value",
    "swarm-ft aq2+z~aq1+z/q1.5+z@q3+z": "swarm-ft, 2 bits a value",
    "swarm-ft aq4/q8@fp16": "AQ-SGD's published 4 and 8 bits, run by swarm-ft",
    "torch Interleaved1F1B bfloat16, receives ahead": "PyTorch's best pipeline, bfloat16",
}
"""Label of each system that is drawn, fastest first."""
LIMIT = "limit: no software is faster with as few bytes"


def by_system(rows: Iterable[Row]) -> dict[str, Points]:
    """Return comparable rows without a delay and of whole batches, by system and bandwidth."""
    systems: dict[str, Points] = {}
    for row in filter(is_comparable, rows):
        if row["delay_ms"] == 0 and row["batch_size"] == BATCH_SIZE:
            systems.setdefault(row["system"], {})[row["up_mbps"]] = row
    return {name: dict(sorted(points.items())) for name, points in systems.items()}


def draw(systems: Mapping[str, Points], path: Path) -> None:
    """Draw a line for each system of `LINES`, and the limit of the one with the fewest bytes."""
    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    limits = {mbps: row["limit_per_s"] for mbps, row in systems.get(UNDER_ONE_BIT, {}).items()}
    axes.plot(list(limits), list(limits.values()), "k--", lw=1, label=LIMIT)
    for name, label in LINES.items():
        speeds = {mbps: row["samples_per_s"] for mbps, row in systems.get(name, {}).items()}
        axes.plot(list(speeds), list(speeds.values()), marker="o", lw=2, label=label)
    axes.set(
        xscale="log",
        xlabel="bandwidth of each link, Mbps",
        ylabel="samples a second",
        title="Training with GPT-2 XL's shape: 8 stages, batch 32",
    )
    axes.set_ylim(bottom=0)
    ticks = sorted({mbps for name in LINES for mbps in systems.get(name, {})})
    axes.set_xticks(ticks, [f"{tick:,g}" for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=Path("throughput.png"))
    options = parser.parse_args()
    draw(by_system(read_rows(options.results)), options.out)


if __name__ == "__main__":
    main()
