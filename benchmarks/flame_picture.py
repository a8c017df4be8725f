"""Flame graphs of a process, one above the other, as one picture.

    py-spy record --pid PID -r 100 -d 40 --nonblocking --threads --format raw --output RAW
    python -m benchmarks.flame_picture BEFORE.raw AFTER.raw --out FILE.png

Threads of one pool are one; Python's own threading and asyncio are left out. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot

_THREAD = re.compile(r"thread \(\d+\): (?P<name>.*?)([-_]\d+)?( \(.*\))?$")
_FRAME = re.compile(r"(?P<name>.+) \((?P<file>[^()]*)\)$")
_LEFT_OUT = re.compile(r"^(threading|asyncio/|concurrent/|runpy|<frozen|selectors)")
COLOURS = ("#f4a259", "#f6bd60", "#f28f5b", "#f7cf8b", "#ee7b4b")
HEIGHT = 0.94
LABEL_SHARE = 0.0047
"""Of the width, that a letter takes."""


@dataclass
class Call:
    """A function and what it called, with samples that were taken in either."""

    samples: int = 0
    calls: dict[str, Call] = field(default_factory=dict)

    def add(self, stack: Iterable[str], samples: int) -> None:
        """Count a stack, outermost function first."""
        self.samples += samples
        call = self
        for name in stack:
            call = call.calls.setdefault(name, Call())
            call.samples += samples

    @property
    def depth(self) -> int:
        """The depth of the deepest stack."""
        return max((1 + call.depth for call in self.calls.values()), default=0)


@dataclass(frozen=True, kw_only=True)
class Box:
    """A function's box; `left` and `width` are shares of all samples."""

    name: str
    depth: int
    left: float
    width: float


def read_stacks(lines: Iterable[str]) -> Call:
    """Read the `raw` output of py-spy: stacks with `;` between frames, then a count."""
    root = Call()
    for line in lines:
        stack, _, samples = line.rpartition(" ")
        root.add(_names(stack), int(samples))
    return root


def _names(stack: str) -> Iterator[str]:
    thread, *frames = stack.split(";")
    match = _THREAD.match(thread)
    yield match["name"] if match else thread
    for frame in frames:
        found = _FRAME.match(frame)
        if found is None:
            yield frame
        elif not _LEFT_OUT.match(found["file"]):
            yield found["name"]


def boxes(root: Call) -> Iterator[Box]:
    """All functions, the busiest first beside each other."""
    yield from _boxes(root, 0, 0.0, root.samples)


def _boxes(call: Call, depth: int, left: float, total: int) -> Iterator[Box]:
    for name, child in sorted(call.calls.items(), key=lambda item: -item[1].samples):
        width = child.samples / total
        yield Box(name=name, depth=depth, left=left, width=width)
        yield from _boxes(child, depth + 1, left, total)
        left += width


def draw(graphs: dict[str, Call], path: Path) -> None:
    """Write graphs by title, one above the other, as a PNG."""
    depths = [max(1, graph.depth) for graph in graphs.values()]
    figure, all_axes = pyplot.subplots(
        len(graphs),
        squeeze=False,
        figsize=(15, sum(0.22 * depth + 0.7 for depth in depths)),
        height_ratios=depths,
        layout="constrained",
    )
    for axes, (title, graph) in zip(all_axes[:, 0], graphs.items(), strict=True):
        _draw_graph(axes, graph)
        axes.set(title=f"{title} ({graph.samples} samples)", xlim=(0, 1), yticks=[])
        axes.set_ylim(max(1, graph.depth), 0)
        axes.set_xticks([share / 10 for share in range(11)], [f"{10 * n} %" for n in range(11)])
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def _draw_graph(axes: Any, graph: Call) -> None:  # noqa: ANN401
    for number, box in enumerate(boxes(graph)):
        axes.barh(
            box.depth + 0.5,
            box.width,
            left=box.left,
            height=HEIGHT,
            color=COLOURS[number % len(COLOURS)],
            edgecolor="white",
            linewidth=0.3,
        )
        letters = int(box.width / LABEL_SHARE)
        if letters > 3:
            label = box.name if len(box.name) <= letters else box.name[: letters - 1] + "."
            axes.text(box.left + 0.001, box.depth + 0.5, label, fontsize=7, va="center")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("raw", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=Path("flame.png"))
    options = parser.parse_args()
    graphs = {path.stem: read_stacks(path.read_text().splitlines()) for path in options.raw}
    draw(graphs, options.out)


if __name__ == "__main__":
    main()
