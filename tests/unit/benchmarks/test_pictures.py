"""Pictures show the measured figures; needs matplotlib, which the project does not."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from benchmarks.flame_picture import Box, boxes, read_stacks
from benchmarks.flame_picture import draw as draw_flames
from benchmarks.slow_network.plots import LINES, UNDER_ONE_BIT, by_system, draw
from benchmarks.slow_network.results import read_rows
from benchmarks.trace_picture import Bar, StepPicture, Way
from benchmarks.trace_picture import draw as draw_step
from tests.unit.benchmarks.result_rows import row

Event = dict[str, Any]
"""Of a trace."""


def event(name: str, pid: int, ts: int, dur: int, **args: Any) -> Event:
    return {"ph": "X", "name": name, "pid": pid, "ts": ts, "dur": dur, "args": {"step": 1, **args}}


def peer(pid: int, name: str, order: int) -> Iterator[Event]:
    for kind, args in (("name", {"name": name}), ("sort_index", {"sort_index": order})):
        yield {"ph": "M", "name": f"process_{kind}", "pid": pid, "args": args}


FRAME = {"boundary": 2, "direction": "forward", "microbatch": 0, "sample": 7}
EVENTS = [
    *peer(1, "layers 2-4", 2),
    *peer(2, "layers 0-2", 0),
    event("step", 2, 1_000_000, 900_000),
    event("forward", 2, 1_000_000, 250_000, microbatch=0),
    event("send", 2, 1_300_000, 10, **FRAME),
    event("receive", 1, 1_500_000, 10, **FRAME),
    event("send", 2, 1_400_000, 10, **(FRAME | {"sample": 8})),
]


def test_a_step_is_drawn_from_its_beginning_with_peers_by_layers(tmp_path: Path) -> None:
    picture = StepPicture(EVENTS, 1)
    assert picture.peers == ["layers 0-2", "layers 2-4"]
    assert list(picture.bars()) == [Bar(row=0, name="forward", begin_s=0.0, end_s=0.25)]
    assert list(picture.ways()) == [Way(rows=(0, 1), direction="forward", begin_s=0.3, end_s=0.5)]
    draw_step(picture, tmp_path / "step.png", "one step")
    assert (tmp_path / "step.png").stat().st_size > 1000


def test_a_step_that_is_not_there_is_said() -> None:
    with pytest.raises(ValueError, match="expected a trace with step 3"):
        StepPicture(EVENTS, 3)


def test_the_last_result_of_each_bandwidth_counts_and_other_work_is_left_out(
    tmp_path: Path,
) -> None:
    ours, torch = "swarm-ft aq4/q8@fp16", "torch GPipe float32"
    rows = [
        row(ours, 100.0, 1.0),
        row(ours, 10.0, 2.0),
        row(ours, 100.0, 4.0),
        row(torch, 100.0, 0.6, limit_per_s=None),
        row(ours, 50.0, 9.0, stages=4),
        row(ours, 50.0, 9.0, delay_ms=50.0),
        row(ours, 50.0, 9.0, up_mbps=20.0),
        row(ours, None, 9.0),
    ]
    path = tmp_path / "result.json"
    path.write_text(json.dumps({"rows": rows}))
    systems = by_system(read_rows([path]))
    speeds = {
        name: {mbps: found["samples_per_s"] for mbps, found in points.items()}
        for name, points in systems.items()
    }
    assert speeds == {ours: {10.0: 2.0, 100.0: 4.0}, torch: {100.0: 0.6}}
    assert list(speeds[ours]) == [10.0, 100.0]
    draw(systems, tmp_path / "throughput.png")
    assert (tmp_path / "throughput.png").stat().st_size > 1000


RESULTS = Path(__file__).parents[3] / "benchmarks/reports/performance/results.json"


def test_no_line_of_the_picture_is_above_its_limit() -> None:
    systems = by_system(read_rows([RESULTS]))
    assert set(LINES) <= set(systems)
    fewest = systems[UNDER_ONE_BIT]
    for name in LINES:
        for mbps, found in systems[name].items():
            assert found["samples_per_s"] <= found["limit_per_s"]
            if mbps in fewest:
                assert found["samples_per_s"] <= fewest[mbps]["limit_per_s"]


STACKS = """\
thread (7): codec_1;Thread.run (threading.py:982);encode (a/b.py:3);pack (a/b.py:9) 3
thread (8): codec_0;Thread.run (threading.py:982);encode (a/b.py:5) 1
thread (2): MainThread;<module> (x.py:1);idle 4
thread (9): codec_0;_worker (concurrent/futures/thread.py:83);decode (a/b.py:50) 2
"""


def test_stacks_of_a_pools_threads_are_one_and_the_busiest_come_first(tmp_path: Path) -> None:
    root = read_stacks(STACKS.splitlines())
    assert list(boxes(root)) == [
        Box(name="codec", depth=0, left=0.0, width=0.6),
        Box(name="encode", depth=1, left=0.0, width=0.4),
        Box(name="pack", depth=2, left=0.0, width=0.3),
        Box(name="decode", depth=1, left=0.4, width=0.2),
        Box(name="MainThread", depth=0, left=0.6, width=0.4),
        Box(name="<module>", depth=1, left=0.6, width=0.4),
        Box(name="idle", depth=2, left=0.6, width=0.4),
    ]
    draw_flames({"one": root, "none": read_stacks([])}, tmp_path / "flame.png")
    assert (tmp_path / "flame.png").stat().st_size > 1000
