"""Timelines become a Chrome trace: rows without overlaps, one clock, flows, a file that opens."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from swarm_ft.client import trace as trace_module
from swarm_ft.client.trace import MAX_ROWS, Event, Rows, TraceEvents, TraceFile, open_trace
from swarm_ft.codec.spec import Direction
from swarm_ft.errors import BadOption
from swarm_ft.ids import Attempt, PeerId, RunId, StepNumber
from swarm_ft.protocol.messages.timeline import (
    ClockEstimate,
    PeerTimeline,
    SpanKind,
    Spans,
    StepTimeline,
)
from swarm_ft.protocol.spec.layers import LayerRange


def row(
    kind: SpanKind,
    begin_us: int,
    duration_us: int,
    *,
    sample: int | None = None,
    direction: int = 0,
    num_bytes: int = 0,
    microbatch: int | None = None,
) -> tuple[int, ...]:
    batch = 0 if microbatch is None else microbatch + 1
    name = (0, batch, 0 if sample is None else sample + 1, 4 if direction else 0, direction)
    return (kind, begin_us, duration_us, *name, num_bytes)


def timeline_of(
    rows: Sequence[tuple[int, ...]],
    *,
    peer: str = "peer-0",
    origin_us: int = 1_000,
    offset_us: int = 0,
    error_us: int = 7,
    num_dropped: int = 0,
) -> PeerTimeline:
    timeline = StepTimeline(
        run_id=RunId("run"),
        attempt=Attempt(1),
        step=StepNumber(0),
        origin_us=origin_us,
        clock=ClockEstimate(offset_us, error_us),
        spans=Spans(*zip(*rows, strict=True)),
        num_dropped=num_dropped,
    )
    return PeerTimeline(peer_id=PeerId(peer), layers=LayerRange(2, 4), timeline=timeline)


def events_of(*timelines: PeerTimeline) -> list[Event]:
    trace = TraceEvents()
    return [event for timeline in timelines for event in trace.add(timeline)]


def slices(events: Iterable[Event]) -> list[Event]:
    return [event for event in events if event["ph"] == "X"]


def names(events: Iterable[Event], kind: str) -> dict[tuple[int, int], str]:
    return {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["ph"] == "M" and event["name"] == kind
    }


def test_a_span_becomes_a_slice_that_says_what_it_is() -> None:
    (event,) = slices(events_of(timeline_of([row(SpanKind.BACKWARD, 50, 20, microbatch=3)])))
    assert (event["name"], event["ts"], event["dur"]) == ("backward", 1_050, 20)
    assert event["args"] == {"step": 0, "microbatch": 3}


def test_a_frame_says_whose_it_is_and_how_large() -> None:
    frame = row(SpanKind.SEND, 0, 9, sample=5, direction=1, num_bytes=321, microbatch=0)
    events = events_of(timeline_of([frame]))
    (event,) = slices(events)
    assert event["args"] == {
        "step": 0,
        "direction": "forward",
        "microbatch": 0,
        "sample": 5,
        "boundary": 4,
        "bytes": 321,
    }
    assert names(events, "thread_name")[event["pid"], event["tid"]] == "send forward"


def test_the_process_is_named_by_its_layers_and_the_step_tells_of_the_clock() -> None:
    events = events_of(timeline_of([row(SpanKind.STEP, 0, 9)], offset_us=-250, error_us=40))
    assert list(names(events, "process_name").values()) == ["layers 2-4 (peer-0)"]
    (step,) = slices(events)
    clock = {"clock_offset_us": -250, "clock_error_us": 40}
    assert step["args"] == {"step": 0, "attempt": 1, **clock}
    assert step["ts"] == 750
    (error,) = (event for event in events if event["ph"] == "C")
    assert (error["name"], error["args"], error["ts"]) == ("clock error", {"us": 40}, 750)


def test_peers_are_processes_of_their_own_on_one_clock() -> None:
    one = timeline_of([row(SpanKind.FORWARD, 0, 5)], peer="a", origin_us=100, offset_us=900)
    other = timeline_of([row(SpanKind.FORWARD, 0, 5)], peer="b", origin_us=5_000, offset_us=-3_000)
    first, second = slices(events_of(one, other))
    assert (first["ts"], second["ts"]) == (1_000, 2_000)
    assert first["pid"] != second["pid"]


def test_every_kind_has_a_place() -> None:
    rows = [row(kind, 10 * i, 5) for i, kind in enumerate(SpanKind)]
    events = events_of(timeline_of(rows))
    shown = [event for event in events if event["ph"] in "Xi"]
    assert len(shown) == len(SpanKind)
    lanes = names(events, "thread_name")
    assert all((event["pid"], event["tid"]) in lanes for event in shown)
    assert len(set(lanes.values())) == len(lanes)


def test_lanes_of_every_kind_and_direction_have_threads_of_their_own() -> None:
    kinds = [SpanKind.ENCODE, SpanKind.SEND, SpanKind.RECEIVE, SpanKind.DECODE]
    rows = [row(kind, 0, 5, sample=1, direction=way) for kind in kinds for way in Direction]
    rows += [row(kind, 0, 5) for kind in (SpanKind.STEP, SpanKind.WAIT_INPUT, SpanKind.REDUCE)]
    events = events_of(timeline_of(rows))
    assert len({event["tid"] for event in slices(events)}) == len(rows)


def test_what_happens_at_once_in_one_lane_lies_in_rows_of_its_own() -> None:
    rows = [row(SpanKind.ENCODE, begin, 10, direction=1, sample=begin) for begin in (0, 5, 10, 12)]
    events = events_of(timeline_of(rows))
    lanes = names(events, "thread_name")
    placed = [lanes[event["pid"], event["tid"]] for event in slices(events)]
    assert placed == ["encode forward", "encode forward 2", "encode forward", "encode forward 3"]


def test_a_better_estimate_of_the_clock_cuts_what_it_moves_back() -> None:
    work = row(SpanKind.FORWARD, 0, 100)
    first = timeline_of([work], origin_us=0, offset_us=50)
    second = timeline_of([work, row(SpanKind.FORWARD, 100, 10)], origin_us=100, offset_us=20)
    events = events_of(first, second)
    assert [(event["ts"], event["dur"]) for event in slices(events)] == [
        (50, 100),
        (150, 70),
        (220, 10),
    ]
    assert len({event["tid"] for event in slices(events)}) == 1


def test_rows_never_hold_slices_that_overlap_however_many_there_are() -> None:
    rows = Rows()
    ends: dict[int, int] = {}
    for number in range(3 * MAX_ROWS):
        placed = rows.place(number, number + 1_000, 0)
        if placed is not None:
            index, begin_us, end_us = placed
            assert begin_us >= ends.get(index, 0)
            ends[index] = end_us
    assert len(ends) == MAX_ROWS
    assert rows.place(2_000, 2_001, 0) == (0, 2_000, 2_001)


def test_a_frame_flows_from_its_sender_to_its_receiver() -> None:
    up = [row(SpanKind.ENCODE, 0, 9, sample=5, direction=1)]
    up += [row(SpanKind.SEND, 10, 9, sample=5, direction=1)]
    up += [row(SpanKind.ENCODE, 20, 9, sample=6, direction=1)]
    down = [row(SpanKind.RECEIVE, 30, 9, sample=5, direction=1)]
    down += [row(SpanKind.DECODE, 40, 9, sample=5, direction=1)]
    events = events_of(timeline_of(up, peer="up"), timeline_of(down, peer="down"))
    flows = [event for event in events if event["ph"] in "stf"]
    assert [event["ph"] for event in flows] == ["s", "t", "s", "t", "f"]
    same = {event["id"] for event in flows if event["ts"] != flows[2]["ts"]}
    assert len(same) == 1
    assert flows[2]["id"] not in same
    assert flows[-1]["bp"] == "e"
    for flow in flows:
        assert any(
            (event["pid"], event["tid"]) == (flow["pid"], flow["tid"])
            and event["ts"] <= flow["ts"] <= event["ts"] + event["dur"]
            for event in slices(events)
        )


def test_dropped_spans_are_told() -> None:
    events = events_of(timeline_of([row(SpanKind.FORWARD, 0, 5)], num_dropped=12))
    assert {"spans": 12} in [event["args"] for event in events if event["ph"] == "C"]


# ---- the file


def test_the_file_is_json_whenever_it_is_closed_and_nearly_so_before(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with TraceFile(path, pytest.fail) as trace:
        assert json.loads(path.read_text() + "]") == []
        trace.add(timeline_of([row(SpanKind.FORWARD, 0, 5)]))
        once = json.loads(path.read_text() + "]")
        trace.add(timeline_of([row(SpanKind.FORWARD, 10, 5)]))
    whole = json.loads(path.read_text())
    assert whole[: len(once)] == once
    assert len(slices(whole)) == 2


def test_the_file_is_closed_when_its_work_is_cancelled(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"

    def work() -> None:
        with TraceFile(path, pytest.fail) as trace:
            trace.add(timeline_of([row(SpanKind.FORWARD, 0, 5)]))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert len(slices(json.loads(path.read_text()))) == 1


def test_a_file_that_cannot_be_opened_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match=r"--trace .* cannot be written"):
        TraceFile(tmp_path / "missing" / "trace.json", pytest.fail).__enter__()


def test_a_full_disk_ends_the_trace_and_not_the_run() -> None:
    troubles: list[str] = []
    with TraceFile(Path("/dev/full"), troubles.append) as trace:
        trace.add(timeline_of([row(SpanKind.FORWARD, 0, 5)]))
    (trouble,) = troubles
    assert "--trace /dev/full: ends here: No space left" in trouble


def test_a_trace_that_is_too_long_to_open_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_module, "MAX_EVENTS", 20)
    path = tmp_path / "trace.json"
    troubles: list[str] = []
    with TraceFile(path, troubles.append) as trace:
        for begin_us in range(0, 1000, 10):
            trace.add(timeline_of([row(SpanKind.FORWARD, begin_us, 5)]))
    assert len(troubles) == 1
    assert "trace fewer steps" in troubles[0]
    assert 20 <= len(json.loads(path.read_text())) < 30


def test_without_a_path_there_is_no_trace() -> None:
    with open_trace(None, pytest.fail) as trace:
        assert trace is None
