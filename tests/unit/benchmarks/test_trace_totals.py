"""Totals of a trace are the sums of its slices."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.trace_totals import read_events, tables, totals, way_table, ways

Event = dict[str, Any]
"""Of a trace."""


def named(kind: str, name: str, pid: int = 1, tid: int = 1) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def shown(name: str, dur: int, *, pid: int = 1, tid: int = 1, step: int = 0, **args: Any) -> Event:
    args = {"step": step, **args}
    return {"ph": "X", "name": name, "ts": 0, "dur": dur, "pid": pid, "tid": tid, "args": args}


EVENTS = [
    named("process_name", "layers 0-2 (a)"),
    named("thread_name", "step"),
    named("thread_name", "compute", tid=2),
    named("thread_name", "send forward", tid=3),
    shown("step", 1_000_000, step=0),
    shown("step", 500_000, step=1),
    shown("forward", 200_000, tid=2, step=0),
    shown("forward", 100_000, tid=2, step=1),
    shown("send", 10_000, tid=3, step=1, bytes=77),
    {"ph": "C", "name": "clock error", "ts": 0, "pid": 1, "tid": 1, "args": {"us": 9}},
]


def test_slices_of_a_name_are_added_up_and_shared_out_over_the_steps() -> None:
    step, forward, send = totals(EVENTS)
    assert (step.lane, step.total_s, step.share) == ("step", 1.5, 1.0)
    assert (forward.peer, forward.lane, forward.name) == ("layers 0-2 (a)", "compute", "forward")
    assert forward.num_slices == 2
    assert forward.total_s == pytest.approx(0.3)
    assert forward.share == pytest.approx(0.2)
    assert (send.num_slices, send.num_bytes) == (1, 77)


def test_first_steps_can_be_left_out() -> None:
    _, forward, _ = totals(EVENTS, from_step=1)
    assert forward.num_slices == 1
    assert forward.share == pytest.approx(0.2)


def test_a_file_that_was_not_closed_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    whole = json.dumps(EVENTS)
    for text in (whole, whole[:-1], whole[:-1] + ",\n"):
        path.write_text(text)
        assert read_events(path) == EVENTS


def on_its_way(sample: int, sent_us: int, received_us: int, **args: Any) -> list[Event]:
    args = {"boundary": 4, "direction": "forward", "microbatch": 0, "sample": sample, **args}
    send = {**shown("send", 1, pid=1, tid=3, bytes=10, **args), "ts": sent_us}
    receive = {**shown("receive", 1, pid=2, tid=3, bytes=10, **args), "ts": received_us}
    return [send, receive]


def test_frames_on_their_way_are_counted_and_what_they_cover() -> None:
    steps = [shown("step", 1000, pid=pid) for pid in (1, 2)]
    together = on_its_way(0, 100, 300) + on_its_way(1, 100, 400)
    alone = on_its_way(2, 600, 700)
    other = on_its_way(0, 0, 1000, boundary=2)
    lost = on_its_way(3, 0, 900)[:1]
    first, second = ways([*steps, *together, *alone, *other, *lost])
    assert (first.boundary, first.num_frames, first.share) == (2, 1, 1.0)
    assert (second.boundary, second.direction, second.num_frames) == (4, "forward", 3)
    assert second.mean_s == pytest.approx((200 + 300 + 100) / 3 / 1e6)
    assert second.share == pytest.approx(0.4)
    assert second.num_bytes == 30
    assert len(list(way_table([first, second]))) == 3


def test_tables_tell_the_same() -> None:
    head, *lines = tables(totals(EVENTS))
    assert head.startswith("layers 0-2 (a)")
    assert lines[1].split() == ["compute:", "forward", "0.30", "s", "20.0%", "2", "150.00", "ms"]
