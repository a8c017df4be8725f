"""`python -m benchmarks.quality.rate_loss FILE... --png FILE`: what bits of activations cost.

The files have records of `python -m benchmarks.quality`, each with its own uncompressed runs. Drawn
are language models whose gradients go uncompressed: bits a value of their activations, over whole
runs, against what the final perplexity loses. Runs nothing.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib import pyplot

from benchmarks.quality.configs import DEFAULT_EPOCHS, parse_config
from benchmarks.quality.plots import Point, point_of
from benchmarks.quality.table import Rows, read_records, rows_of

FAMILIES = {
    ".*%": "what hardly moved is not sent: tokens (%t), samples (%s)",
    "aqk": "along learned directions, at a constant quality: aqkS",
    "aq": "by channel, at a constant rate: aqB+z",
}
"""By a pattern of a codec's beginning; the first that fits. What is reused lies on no line."""
MOST_BITS, MOST_LOST = 4.0, 5.0


def main() -> None:
    """Draw."""
    parser = argparse.ArgumentParser("python -m benchmarks.quality.rate_loss", description=__doc__)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--png", type=Path, default=Path("rate-loss.png"))
    options = parser.parse_args()
    found = [point for path in options.files for point in points(rows_of(read_records(path), "lm"))]
    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    for family, title in FAMILIES.items():
        draw(axes, title, sorted(point for point in found if family_of(point.name) == family))
    axes.axhline(0, color="black", linewidth=0.8)
    axes.axhline(1, color="grey", linewidth=0.8, linestyle="--")
    axes.set(
        xlabel="bits a value of activations over the whole run, gradients uncompressed",
        ylabel="final perplexity against uncompressed, %",
        xlim=(0, MOST_BITS),
    )
    axes.legend()
    figure.savefig(options.png, dpi=100)


def points(rows: Rows) -> Iterator[Point]:
    """Yield the points of configs that compress only activations."""
    for name, epochs in rows:
        config = parse_config(name)
        if epochs != DEFAULT_EPOCHS or config.bw != "none" or config.fw == "none":
            continue
        point = point_of(config, rows, lambda run: run["bits_fw"])
        if point is not None and point.bits < MOST_BITS and point.loss < MOST_LOST:
            yield point._replace(name=config.fw + f"%{config.reuse}" * bool(config.reuse))


def family_of(codec: str) -> str:
    """Return the family that a codec is drawn with, or an empty text."""
    return next((family for family in FAMILIES if re.match(family, codec)), "")


def draw(axes: Any, title: str, shown: list[Point]) -> None:  # noqa: ANN401 - pyplot has no types
    """Draw a line, the fewest bits first."""
    if not shown:
        return
    bits, losses, spreads = zip(*(point[:3] for point in shown), strict=True)
    line = "none" if "%" in title else "solid"
    axes.errorbar(bits, losses, spreads, marker="o", capsize=3, label=title, linestyle=line)
    for point in shown:
        axes.annotate(point.name, point[:2], xytext=(5, 5), textcoords="offset points", fontsize=9)


if __name__ == "__main__":
    main()
