"""The verdict on a day: deeds without reports, or with differing ones, are named."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.day.observed import Observed, Sample
from benchmarks.day.script import REPORTED_AS, SCRIPT, VOLUNTEERS, Act
from benchmarks.day.verdict import Deed, as_markdown, counts_in_words, problems, unlike
from swarm_ft.protocol.messages.events import EventKind

PEER = "a" * 32
WORDS = "words"


def event(serial: int, kind: str, unix_s: float, peer: str | None = PEER) -> dict[str, Any]:
    return {"serial": serial, "kind": kind, "unix_s": unix_s, "peer": peer, "words": WORDS}


def deed(act: Act, unix_s: float) -> Deed:
    return Deed(unix_s, unix_s + 1, "ada", PEER, act, (3, 4))


@pytest.fixture
def deeds() -> list[Deed]:
    return [deed(Act.COMES, 10.0), deed(Act.PAUSES, 20.0), deed(Act.LEAVES, 30.0)]


@pytest.fixture
def seen() -> Observed:
    documents = [
        event(1, "peer-joined", 11.0),
        event(2, "peer-paused", 21.0),
        event(3, "peer-leaving", 31.0),
        event(4, "peer-left", 32.0),
    ]
    samples = [
        Sample(12.0, {PEER: ""}),
        Sample(22.0, {PEER: "paused: its volunteer asked for it"}),
        Sample(33.0, {}),
    ]
    return Observed(
        events_by_serial={one["serial"]: one for one in documents},
        page_events=list(documents),
        page=list(samples),
        status=list(samples),
        counts={one["kind"]: 1 for one in documents} | {"went-back": 0},
    )


def test_a_day_that_was_told_has_no_problems(deeds: list[Deed], seen: Observed) -> None:
    assert list(problems(deeds, seen)) == []


@pytest.mark.parametrize("serial", [1, 2, 3, 4])
def test_what_is_not_in_the_events_is_named(deeds: list[Deed], seen: Observed, serial: int) -> None:
    kind = seen.events_by_serial.pop(serial)["kind"]
    found = list(problems(deeds, seen))
    assert any(f"no {kind} in events" in one for one in found)
    assert f"{kind}: 1 in the metrics, 0 in events" in found


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_what_is_not_on_the_page_is_named(deeds: list[Deed], seen: Observed, place: int) -> None:
    lost = seen.page_events.pop(place)
    found = list(problems(deeds, seen))
    assert any(f"no {lost['kind']} in the page" in one for one in found)
    assert f"event {lost['serial']}, {lost['kind']}: not on the page" in found


@pytest.mark.parametrize(("place", "verb"), [(0, "comes"), (1, "pauses"), (2, "leaves")])
def test_what_status_does_not_show_is_named(
    deeds: list[Deed], seen: Observed, place: int, verb: str
) -> None:
    seen.status[place] = Sample(seen.status[place].unix_s, {"other": "", PEER: ""})
    if verb == "comes":
        seen.status = [Sample(one.unix_s, {}) for one in seen.status]
    assert f"ada {verb}: status does not show it" in list(problems(deeds, seen))


def test_an_event_of_before_tells_nothing_of_what_is_done_now(seen: Observed) -> None:
    again = deed(Act.COMES, 25.0)
    assert "ada comes: no peer-joined in events" in list(problems([again], seen))


def test_a_run_that_went_back_is_named(deeds: list[Deed], seen: Observed) -> None:
    back = event(5, "went-back", 34.0)
    seen.events_by_serial[5] = back
    seen.page_events.append(back)
    seen.counts["went-back"] = 1
    assert list(problems(deeds, seen)) == [f"went-back: {WORDS}"]


def test_reports_that_differ_are_named() -> None:
    quiet = {"ann": {"losses": [1.0], "evaluations": [], "went_back": []}}
    assert list(unlike(quiet, {"ann": quiet["ann"]})) == []
    other = {"losses": [1.0 + 2**-52], "evaluations": [], "went_back": []}
    assert list(unlike(quiet, {"ann": other})) == ["ann's losses are not those of the quiet run"]
    assert "went back" in next(unlike(quiet, {"ann": {**quiet["ann"], "went_back": [1]}}))


def test_the_table_has_a_row_a_deed_and_names_for_peers(deeds: list[Deed], seen: Observed) -> None:
    seen.events_by_serial[1]["words"] = f"peer {PEER} joined"
    lines = as_markdown(deeds, seen, ("ann", "ben"), 5.0).splitlines()
    assert lines[2] == (
        "| 0:05 | 3 | 4 | ada comes: `swarm-ft serve-stage` | `1 peer-joined` peer ada joined |"
    )
    assert len(lines) == 2 + len(deeds)
    assert counts_in_words(seen).startswith("4 events: 1 peer-joined, ")


def test_the_script_is_in_order_and_of_kinds_that_there_are() -> None:
    parts = [cue.part for cue in SCRIPT]
    assert parts == sorted(parts)
    assert {cue.act for cue in SCRIPT} == set(Act)
    assert {cue.machine for cue in SCRIPT} >= set(VOLUNTEERS)
    kinds = {kind for reported in REPORTED_AS.values() for kind in reported}
    assert kinds <= {kind.label for kind in EventKind}
