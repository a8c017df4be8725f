"""Two plots of the results: loss against epochs, and bits a value against perplexity."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl

from benchmarks.quality.configs import Config
from benchmarks.quality.table import Rows, change, rows_of, wanted
from benchmarks.quality.train import Record

mpl.use("Agg")

from matplotlib import pyplot
from matplotlib.text import Text
from matplotlib.transforms import Bbox

_FAMILIES = ("pubaq", "pubq", "aqtop", "aqc", "aq", "qc", "q", "hq", "top", "none")
_PANELS = {
    "changes": ("aq", "aqc"),
    "direct": ("q", "qc", "hq"),
    "published quantiser": ("pubaq", "pubq"),
    "TopK": ("top", "aqtop"),
}
_CLOSE, _BELOW = 2.5, 0.7
"""Percent: what is labelled in the close-up, and room under zero."""
_OFFSETS = [
    (x, y) for ys in ((4, -12, 16, -24), (28, -36, 40, -48)) for x in (4, -45, -90) for y in ys
]
"""Of a name from its point, in dots, by preference."""


class Point(NamedTuple):
    """The bits and losses of a config, means over seeds; `spread` is the loss's."""

    bits: float
    loss: float
    spread: float
    name: str
    family: str


def draw(
    records: list[Record], group: str | None, configs: list[Config] | None, folder: Path
) -> None:
    """Write `epochs.png` and `bits.png` of the language-model runs into `folder`.

    Shown are `configs`, else those of the group, else those of the main table.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = rows_of(records, "lm")
    shown = [c for c in wanted(records, group or "main", configs) if _finished(rows, c)]
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 9), layout="constrained")
    _plot_epochs(axes.flat, rows, shown)
    _save(figure, folder / "epochs.png")
    figure, axes = pyplot.subplots(1, 2, figsize=(15, 7.5), width_ratios=(1, 2))
    figure.subplots_adjust(left=0.05, right=0.99, bottom=0.08, top=0.95, wspace=0.12)
    _plot_bits(axes, [point for config in shown if (point := point_of(config, rows))])
    _save(figure, folder / "bits.png")


def _save(figure: Any, path: Path) -> None:  # noqa: ANN401
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _plot_epochs(panels: Iterable[Any], rows: Rows, configs: list[Config]) -> None:
    """Plot a panel for each kind of codec, with a line a config: the mean over seeds."""
    for axes, (title, families) in zip(panels, _PANELS.items(), strict=True):
        members = [config for config in configs if _family(config) in families]
        colours = pyplot.get_cmap("turbo").resampled(len(members) + 2)
        for number, config in enumerate(members, 1):
            _plot_curve(axes, rows, config, color=colours(number), marker=".")
        for config in configs:
            if str(config) == "none":
                _plot_curve(axes, rows, config, color="black", linestyle="--", linewidth=2)
        axes.set(title=title, xlabel="epoch", ylabel="held-out loss, nats a token")
        axes.margins(y=0.25)
        axes.legend(fontsize=8, ncols=2, loc="upper right")


def _plot_curve(axes: Any, rows: Rows, config: Config, **style: Any) -> None:  # noqa: ANN401
    curves = [[epoch["ppl"] for epoch in run["epochs"]] for run in _finished(rows, config)]
    means = [statistics.fmean(map(math.log, at)) for at in zip(*curves, strict=True)]
    axes.plot(range(1, len(means) + 1), means, label=str(config), **style)


def _plot_bits(panels: Iterable[Any], points: list[Point]) -> None:
    """Plot a point a config: all of them on the left, those that lose little on the right."""
    whole, close = panels
    for axes in (whole, close):
        for number, family in enumerate(_FAMILIES):
            some = [point for point in points if point.family == family != "none"]
            _scatter(axes, some, f"C{number}", family)
        axes.axhline(0, color="black", linewidth=0.8)
        axes.axhline(1, color="grey", linewidth=0.8, linestyle="--")
        axes.set(
            xlabel="bits a value over the whole run, mean of both directions",
            ylabel="final perplexity against uncompressed, %",
        )
        axes.legend(loc="upper right")
    whole.set_yscale("symlog", linthresh=1)
    whole.set(xlim=(0, 12), ylim=(-_BELOW, 2e4), title="all")
    near = [point for point in points if abs(point.loss) < _CLOSE]
    close.set(ylim=(-_BELOW, _CLOSE), xlim=(1, 8.5), title=f"up to {_CLOSE} %")
    _label(whole, [point for point in points if point not in near and point.family != "none"])
    _label(close, [point for point in near if point.family != "none"])


def _scatter(axes: Any, points: list[Point], colour: str, label: str) -> None:  # noqa: ANN401
    if points:
        bits, losses, spreads = zip(*(point[:3] for point in points), strict=True)
        axes.errorbar(bits, losses, spreads, fmt="none", ecolor=colour, alpha=0.35)
        axes.scatter(bits, losses, color=colour, label=label, zorder=3)


def _label(axes: Any, points: list[Point]) -> None:  # noqa: ANN401
    """Names beside their points, where none covers another name or a point."""
    axes.figure.canvas.draw()
    renderer = axes.figure.canvas.get_renderer()
    taken = [Bbox.from_bounds(x - 4, y - 4, 8, 8) for x, y in _places(axes, points)]
    for point in sorted(points):
        text = axes.annotate(
            point.name,
            (point.bits, point.loss),
            xytext=_OFFSETS[0],
            fontsize=9,
            textcoords="offset points",
            arrowprops={"arrowstyle": "-", "color": "grey", "linewidth": 0.5},
        )
        for offset in _OFFSETS:
            text.set_position(offset)
            text.update_positions(renderer)
            box = Text.get_window_extent(text)  # without the line to its point
            inside = axes.bbox.containsx(box.x0) and axes.bbox.containsx(box.x1)
            if inside and box.count_overlaps(taken) == 0:
                break
        taken.append(box)


def _places(axes: Any, points: list[Point]) -> Iterator[tuple[float, float]]:  # noqa: ANN401
    for point in points:
        yield axes.transData.transform((point.bits, point.loss))


def bits_both_ways(run: Record) -> float:
    """Mean of both directions, a value."""
    return float(run["bits_fw"] + run["bits_bw"]) / 2


def point_of(
    config: Config, rows: Rows, bits_of: Callable[[Record], float] = bits_both_ways
) -> Point | None:
    """Return the point of a config; None without a run that ended beside an uncompressed one."""
    runs = _finished(rows, config)
    losses = [loss for run in runs if (loss := change(run, rows)) is not None]
    if not losses:
        return None
    bits = statistics.fmean(map(bits_of, runs))
    spread = statistics.stdev(losses) if len(losses) > 1 else 0.0
    return Point(bits, statistics.fmean(losses), spread, str(config), _family(config))


def _finished(rows: Rows, config: Config) -> list[Record]:
    runs = rows.get((str(config), config.epochs), [])
    return [run for run in runs if not run["diverged"]]


def _family(config: Config) -> str:
    """Return the family of the forward codec, or of the backward one if there is none."""
    text = config.bw if config.fw == "none" else config.fw
    return next(family for family in _FAMILIES if text.startswith(family))
