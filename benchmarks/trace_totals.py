"""The distribution of time in a trace: each lane of each peer, and each way over a boundary.

    python -m benchmarks.trace_totals TRACE [--from-step N]

TRACE is what `--trace` wrote. Shares are of the time from each step's plan to its commit. A frame
is on its way from the moment its sender begins to send it until it is at its receiver, whole.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

Event = Mapping[str, Any]
STEP = "step"


@dataclass(frozen=True, kw_only=True)
class LaneTotal:
    """All slices of one name in one lane.

    Attributes:
        share: of the peer's steps; lanes overlap, so shares add up to anything.
        num_bytes: of frames without their headers.
    """

    peer: str
    lane: str
    name: str
    num_slices: int
    total_s: float
    share: float
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class WayTotal:
    """All frames that went over one boundary in one direction.

    Attributes:
        mean_s: that a frame was on its way.
        share: of the steps, in which at least one frame was on its way.
        num_bytes: without headers.
    """

    boundary: int
    direction: str
    num_frames: int
    mean_s: float
    share: float
    num_bytes: int


def ways(events: Iterable[Event], *, from_step: int = 0) -> list[WayTotal]:
    """Total the frames on their way between peers; leave out frames without both ends."""
    shown = [e for e in events if e["ph"] == "X" and e["args"]["step"] >= from_step]
    ends = {name: _by_frame(shown, name) for name in ("send", "receive")}
    found: dict[tuple[int, str], list[tuple[int, int, int]]] = {}
    for frame in ends["send"].keys() & ends["receive"].keys():
        sent, received = ends["send"][frame], ends["receive"][frame]
        way = found.setdefault(frame[:2], [])
        way.append((sent["ts"], received["ts"], sent["args"]["bytes"]))
    steps = [event for event in shown if event["name"] == STEP]
    steps_us = _sum_us(steps) / max(1, len({event["pid"] for event in steps}))
    return [
        WayTotal(
            boundary=boundary,
            direction=direction,
            num_frames=len(frames),
            mean_s=sum(end - begin for begin, end, _ in frames) / len(frames) / 1e6,
            share=_covered_us(frames) / steps_us if steps_us else 0.0,
            num_bytes=sum(size for _, _, size in frames),
        )
        for (boundary, direction), frames in sorted(found.items())
    ]


def _by_frame(slices: Iterable[Event], name: str) -> dict[tuple[Any, ...], Event]:
    """Index the slices of a name by boundary, direction, step, microbatch and sample."""
    key = ("boundary", "direction", "step", "microbatch", "sample")
    named = (event for event in slices if event["name"] == name)
    return {tuple(event["args"][part] for part in key): event for event in named}


def _covered_us(spans: Iterable[tuple[int, int, int]]) -> int:
    """Microseconds that lie in one of the spans at least."""
    covered = until = 0
    for begin, end, _ in sorted(spans):
        covered += max(0, end - max(begin, until))
        until = max(until, end)
    return covered


def totals(events: Iterable[Event], *, from_step: int = 0) -> list[LaneTotal]:
    """Total a trace's events; peers and lanes keep the order of the trace."""
    peers: dict[int, str] = {}
    lanes: dict[tuple[int, int], str] = {}
    slices: dict[tuple[int, int, str], list[Event]] = {}
    for event in events:
        pid, tid = event["pid"], event["tid"]
        if event["name"] == "process_name":
            peers[pid] = event["args"]["name"]
        elif event["name"] == "thread_name":
            lanes[pid, tid] = event["args"]["name"]
        elif event["ph"] == "X" and event["args"]["step"] >= from_step:
            slices.setdefault((pid, tid, event["name"]), []).append(event)
    steps_us = {pid: _sum_us(found) for (pid, _, name), found in slices.items() if name == STEP}
    return [
        LaneTotal(
            peer=peers[pid],
            lane=lanes[pid, tid],
            name=name,
            num_slices=len(found),
            total_s=_sum_us(found) / 1e6,
            share=_sum_us(found) / steps_us[pid] if steps_us.get(pid) else 0.0,
            num_bytes=sum(event["args"].get("bytes", 0) for event in found),
        )
        for (pid, tid, name), found in sorted(slices.items(), key=lambda item: item[0])
    ]


def _sum_us(slices: Iterable[Event]) -> int:
    return sum(event["dur"] for event in slices)


def read_events(path: Path) -> list[Event]:
    """Read a trace's events, without the last bracket too, as after a killed process."""
    text = path.read_text(encoding="utf-8").rstrip().rstrip(",")
    events: list[Event] = json.loads(text if text.endswith("]") else text + "]")
    return events


def way_table(found: Iterable[WayTotal]) -> Iterator[str]:
    """One table for all boundaries, line by line."""
    yield f"{'on the way':<46}{'':>9}{'share':>8}{'frames':>8}{'mean':>11}{'bytes':>13}"
    for way in found:
        name = f"boundary {way.boundary} {way.direction}"
        yield (
            f"  {name:<44}{'':>9}{way.share:>8.1%}{way.num_frames:>8}"
            f"{1000 * way.mean_s:>8.2f} ms{way.num_bytes:>13}"
        )


def tables(found: Iterable[LaneTotal]) -> Iterator[str]:
    """Format a table for each peer, line by line."""
    head = f"{'total':>9}{'share':>8}{'slices':>8}{'mean':>11}{'bytes':>13}"
    for peer, own in groupby(found, key=lambda total: total.peer):
        yield f"{peer:<46}{head}"
        for total in own:
            name, mean_ms = f"{total.lane}: {total.name}", 1000 * total.total_s / total.num_slices
            yield (
                f"  {name:<44}{total.total_s:>7.2f} s{total.share:>8.1%}{total.num_slices:>8}"
                f"{mean_ms:>8.2f} ms{total.num_bytes or '':>13}"
            )


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--from-step", type=int, default=0, help="leave out steps before it")
    arguments = parser.parse_args()
    events = read_events(arguments.trace)
    lanes = totals(events, from_step=arguments.from_step)
    lines = *tables(lanes), *way_table(ways(events, from_step=arguments.from_step))
    sys.stdout.writelines(f"{line}\n" for line in lines)


if __name__ == "__main__":
    main()
