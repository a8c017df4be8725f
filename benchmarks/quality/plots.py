"""Two plots of the results: perplexity against epochs, and against bits a value."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import matplotlib as mpl

from benchmarks.quality.configs import Config
from benchmarks.quality.table import Rows, change, rows_of, wanted
from benchmarks.quality.train import Record

mpl.use("Agg")

from matplotlib import pyplot

_FAMILIES = ("pubaq", "pubq", "aqtop", "aqc", "aq", "qc", "q", "hq", "top", "none")


def draw(
    records: list[Record], group: str | None, configs: list[Config] | None, folder: Path
) -> None:
    """Write `epochs.png` and `bits.png` of the language-model runs into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = rows_of(records, "lm")
    shown = [c for c in wanted(records, group, configs) if _finished(rows, c)]
    for name, plot in (("epochs", _plot_epochs), ("bits", _plot_bits)):
        figure, axes = pyplot.subplots(figsize=(9, 6), layout="constrained")
        plot(axes, rows, shown)
        figure.savefig(folder / f"{name}.png", dpi=110)
        pyplot.close(figure)


def _plot_epochs(axes: Any, rows: Rows, configs: list[Config]) -> None:  # noqa: ANN401
    """A line a config: mean perplexity over seeds after each epoch, uncompressed inference."""
    colours = pyplot.get_cmap("turbo").resampled(max(2, len(configs)))
    for number, config in enumerate(configs):
        curves = [[epoch["ppl"] for epoch in run["epochs"]] for run in _finished(rows, config)]
        means = [statistics.fmean(values) for values in zip(*curves, strict=True)]
        style = {"color": "black", "linewidth": 2.5} if str(config) == "none" else {}
        style = style or {"color": colours(number), "linestyle": "--" if number % 2 else "-"}
        axes.plot(range(1, len(means) + 1), means, marker=".", label=str(config), **style)
    axes.set(xlabel="epoch", ylabel="held-out perplexity", yscale="log")
    axes.legend(fontsize=6, ncols=2)


def _plot_bits(axes: Any, rows: Rows, configs: list[Config]) -> None:  # noqa: ANN401
    """A point a config: what it costs against what it loses."""
    for number, family in enumerate(_FAMILIES):
        points = [_point(config, rows) for config in configs if _family(config) == family != "none"]
        points = [point for point in points if point is not None]
        if not points:
            continue
        bits, losses, _ = zip(*points, strict=True)
        axes.scatter(bits, losses, color=f"C{number}", label=family)
        for x, y, name in points:
            axes.annotate(name, (x, y), fontsize=6, xytext=(3, 3), textcoords="offset points")
    axes.axhline(0, color="black", linewidth=0.8)
    axes.axhline(1, color="grey", linewidth=0.8, linestyle="--")
    axes.set_yscale("symlog", linthresh=1)
    axes.margins(x=0.15, y=0.1)  # room for names
    axes.set(
        xlabel="bits a value over the whole run, mean of both directions",
        ylabel="final perplexity against uncompressed, %",
    )
    axes.legend()


def _point(config: Config, rows: Rows) -> tuple[float, float, str] | None:
    runs = _finished(rows, config)
    losses = [loss for run in runs if (loss := change(run, rows)) is not None]
    if not losses:
        return None
    bits = [(run["bits_fw"] + run["bits_bw"]) / 2 for run in runs]
    return statistics.fmean(bits), statistics.fmean(losses), str(config)


def _finished(rows: Rows, config: Config) -> list[Record]:
    runs = rows.get((str(config), config.epochs), [])
    return [run for run in runs if not run["diverged"]]


def _family(config: Config) -> str:
    """By the forward codec; by the backward one where forward sends all."""
    text = config.bw if config.fw == "none" else config.fw
    return next(family for family in _FAMILIES if text.startswith(family))
