"""Totals of a trace add up what its slices say."""

import json

import pytest

from benchmarks.trace_totals import read_events, tables, totals


def named(kind, name, pid=1, tid=1):
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def shown(name, dur, *, pid=1, tid=1, step=0, **args):
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


def test_slices_of_a_name_are_added_up_and_shared_out_over_the_steps():
    step, forward, send = totals(EVENTS)
    assert (step.lane, step.total_s, step.share) == ("step", 1.5, 1.0)
    assert (forward.peer, forward.lane, forward.name) == ("layers 0-2 (a)", "compute", "forward")
    assert (forward.num_slices, forward.total_s) == (2, pytest.approx(0.3))
    assert forward.share == pytest.approx(0.2)
    assert (send.num_slices, send.num_bytes) == (1, 77)


def test_first_steps_can_be_left_out():
    _, forward, _ = totals(EVENTS, from_step=1)
    assert (forward.num_slices, forward.share) == (1, pytest.approx(0.2))


def test_a_file_that_was_not_closed_is_read(tmp_path):
    path = tmp_path / "trace.json"
    whole = json.dumps(EVENTS)
    for text in (whole, whole[:-1], whole[:-1] + ",\n"):
        path.write_text(text)
        assert read_events(path) == EVENTS


def test_tables_tell_the_same():
    head, *lines = tables(totals(EVENTS))
    assert head.startswith("layers 0-2 (a)")
    assert lines[1].split() == ["compute:", "forward", "0.30", "s", "20.0%", "2", "150.00", "ms"]
