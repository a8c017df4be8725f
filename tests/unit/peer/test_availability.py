"""The times at which a volunteer's machine may work."""

from datetime import date, time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_ft.errors import BadOption
from swarm_ft.peer.availability import (
    Availability,
    Hours,
    MonthlyUse,
    Observations,
    PauseWhen,
    parse_hours,
    pause_reason,
)

NOON = time(12, 0)


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("22-7", [time(22, 0), time(0, 0), time(6, 59)], [time(7, 0), NOON, time(21, 59)]),
        ("9-17", [time(9, 0), time(16, 59)], [time(17, 0), time(8, 59), time(0, 0)]),
        ("22:30-6:45", [time(22, 30), time(6, 44)], [time(22, 29), time(6, 45)]),
        ("18-24", [time(18, 0), time(23, 59)], [time(0, 0), time(17, 59)]),
        ("0-24", [time(0, 0), NOON, time(23, 59)], []),
    ],
)
def test_hours_may_go_over_midnight(text: str, inside: list[time], outside: list[time]) -> None:
    hours = parse_hours(text)
    assert all(map(hours.covers, inside))
    assert not any(map(hours.covers, outside))


@pytest.mark.parametrize(
    "text", ["", "22", "22-", "25-7", "7-7", "24-0", "7:60-9", "7-9-11", "a-b"]
)
def test_what_is_no_hours_is_told_what_is(text: str) -> None:
    with pytest.raises(BadOption, match=r"expected START-STOP of a day, for example 22-7"):
        parse_hours(text)


@given(st.integers(0, 1439), st.integers(1, 1439), st.times())
def test_hours_and_those_between_them_make_a_day(start: int, length: int, now: time) -> None:
    stop = (start + length) % 1440
    assert Hours(start, stop).covers(now) != Hours(stop, start).covers(now)


def test_what_a_volunteer_asks_for_comes_first_and_each_case_has_words() -> None:
    manners = Availability(hours=parse_hours("22-7"), pause_when=tuple(PauseWhen))
    all_of_it = Observations(
        local=NOON, conditions=tuple(PauseWhen), is_requested=True, used_up="used up"
    )
    assert pause_reason(manners, all_of_it) == "its volunteer asked for it"
    assert pause_reason(manners, Observations(local=NOON, used_up="used up")) == "used up"
    assert (
        pause_reason(manners, Observations(local=NOON))
        == "outside of its hours (22:00-7:00); it works again at 22:00"
    )
    night = time(23, 0)
    assert pause_reason(manners, Observations(local=night)) == ""
    for case in PauseWhen:
        assert (
            pause_reason(manners, Observations(local=night, conditions=[case])) == case.description
        )
    assert pause_reason(Availability(), Observations(local=night, conditions=list(PauseWhen))) == ""


def test_a_month_counts_until_the_next_begins() -> None:
    use = MonthlyUse().after(date(2026, 11, 3), 6 * 10**8).after(date(2026, 11, 30), 5 * 10**8)
    assert use == MonthlyUse(month="2026-11", num_bytes=11 * 10**8)
    assert use.used_up(1.0) == "the 1 GB of 2026-11 are used up; it works again next month"
    assert use.used_up(1.2) == ""
    assert use.after(date(2026, 12, 1), 0).used_up(1.0) == ""
