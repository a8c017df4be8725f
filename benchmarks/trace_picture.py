"""One step of a trace as a picture: what each peer computes, and what is on its way between them.

    python -m benchmarks.trace_picture TRACE --step N --out FILE.png

TRACE is what `--trace` wrote. Needs matplotlib.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl

from benchmarks.trace_totals import STEP, Event, read_events

mpl.use("Agg")

from matplotlib import pyplot
from matplotlib.patches import Patch

COLOURS = {
    "forward": "#4878cf",
    "backward": "#ee854a",
    "forward + loss + backward": "#956cb4",
    "weights": "#8cc68c",
    "gradient": "#d5bb67",
    "optimizer": "#555555",
}
"""Of slices of the compute lane."""
WAYS = {"forward": "#2b4a8b", "backward": "#b04a10"}
"""Of frames between peers."""
HEIGHT = 0.62
"""Of a peer's bar, of the room that it has."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A slice of compute; seconds from the step's begin."""

    row: int
    name: str
    begin_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class Way:
    """A frame from row to row; seconds from the step's begin."""

    rows: tuple[int, int]
    direction: str
    begin_s: float
    end_s: float


class StepPicture:
    """A picture of one step, with peers from top to bottom by their layers.

    Args:
        events: of a trace.
        step: its number.

    Raises:
        ValueError: the trace has no such step.
    """

    def __init__(self, events: Iterable[Event], step: int) -> None:
        events = list(events)
        self._slices = [e for e in events if e["ph"] == "X" and e["args"]["step"] == step]
        begins = [event["ts"] for event in self._slices if event["name"] == STEP]
        if not begins:
            raise ValueError(f"expected a trace with step {step}, got one without")
        self._zero_us = min(begins)
        order = {e["pid"]: e["args"]["sort_index"] for e in events if _sorts_process(e)}
        names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
        self._rows = {pid: row for row, pid in enumerate(sorted(names, key=order.__getitem__))}
        self.peers = [names[pid] for pid in self._rows]

    def bars(self) -> Iterator[Bar]:
        """All compute."""
        for event in self._slices:
            if event["name"] in COLOURS:
                yield Bar(row=self._rows[event["pid"]], name=event["name"], **self._time(event))

    def ways(self) -> Iterator[Way]:
        """All frames whose both ends are in the trace."""
        key = ("boundary", "direction", "microbatch", "sample")
        sent = {tuple(e["args"][k] for k in key): e for e in self._slices if e["name"] == "send"}
        for event in self._slices:
            frame = tuple(event["args"].get(name) for name in key)
            if event["name"] == "receive" and frame in sent:
                begin, end = self._time(sent[frame]), self._time(event)
                yield Way(
                    rows=(self._rows[sent[frame]["pid"]], self._rows[event["pid"]]),
                    direction=event["args"]["direction"],
                    begin_s=begin["begin_s"],
                    end_s=end["begin_s"],
                )

    def _time(self, event: Event) -> dict[str, float]:
        begin_s = (event["ts"] - self._zero_us) / 1e6
        return {"begin_s": begin_s, "end_s": begin_s + event["dur"] / 1e6}


def _sorts_process(event: Event) -> bool:
    return event["name"] == "process_sort_index"


def draw(picture: StepPicture, path: Path, title: str) -> None:
    """Write the picture as a PNG."""
    figure, axes = pyplot.subplots(
        figsize=(15, 1.2 + 0.62 * len(picture.peers)), layout="constrained"
    )
    for way in picture.ways():
        _draw_way(axes, way)
    for bar in picture.bars():
        axes.barh(
            bar.row,
            bar.end_s - bar.begin_s,
            left=bar.begin_s,
            height=HEIGHT,
            color=COLOURS[bar.name],
            edgecolor="white",
            linewidth=0.4,
            zorder=2,
        )
    axes.set_yticks(range(len(picture.peers)), picture.peers)
    axes.invert_yaxis()
    axes.set(xlabel="seconds", title=title)
    axes.margins(x=0.005)
    patches = [Patch(color=colour, label=name) for name, colour in COLOURS.items()]
    figure.legend(handles=patches, ncols=len(patches), fontsize=8, loc="outside lower center")
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _draw_way(axes: Any, way: Way) -> None:  # noqa: ANN401
    down = 1 if way.rows[1] > way.rows[0] else -1
    ends = way.rows[0] + down * HEIGHT / 2, way.rows[1] - down * HEIGHT / 2
    colour = WAYS[way.direction]
    axes.plot((way.begin_s, way.end_s), ends, color=colour, linewidth=0.6, zorder=1)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--step", type=int, default=1)
    parser.add_argument("--title", default="")
    parser.add_argument("--out", type=Path, default=Path("step.png"))
    options = parser.parse_args()
    draw(StepPicture(read_events(options.trace), options.step), options.out, options.title)


if __name__ == "__main__":
    main()
