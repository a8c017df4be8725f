"""Distance of another clock, from round trips with made-up times."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_ft.protocol.messages.timeline import (
    DRIFT,
    NUM_KEPT,
    ClockEstimate,
    RemoteClock,
    RoundTrip,
)


def trip(sent_us: int, there_us: int, back_us: int, *, ahead_us: int = 0) -> RoundTrip:
    """Return a round trip with these delays, over clocks with this distance."""
    received_us = sent_us + there_us + back_us
    remote_us = sent_us + there_us + ahead_us
    return RoundTrip(sent_us=sent_us, remote_us=remote_us, received_us=received_us)


def clock_after(*trips: RoundTrip) -> RemoteClock:
    clock = RemoteClock()
    for one in trips:
        clock.add(one)
    return clock


def error_us(clock: RemoteClock, now_us: int) -> int:
    estimate = clock.estimate(now_us)
    assert estimate is not None
    return estimate.error_us


def test_nothing_is_known_before_the_first_answer() -> None:
    assert clock_after().estimate(5) is None


def test_even_ways_give_the_offset_and_half_of_the_trip_as_its_error() -> None:
    clock = clock_after(trip(1_000, 300, 300, ahead_us=7_000_000))
    assert clock.estimate(1_600) == ClockEstimate(7_000_000, 300)


def test_the_shortest_trip_is_believed() -> None:
    slow, quick = trip(0, 90_000, 10, ahead_us=500), trip(200_000, 20, 20, ahead_us=500)
    for clock in (clock_after(slow, quick), clock_after(quick, slow)):
        assert clock.estimate(200_040) == ClockEstimate(500, 20)


def test_an_old_short_trip_gives_way_to_a_later_one_that_is_a_little_longer() -> None:
    old, new = trip(0, 10, 10, ahead_us=0), trip(10_000_000, 50, 50, ahead_us=0)
    now_us = new.received_us
    assert error_us(clock_after(old), now_us) == 10 + round(DRIFT * now_us)
    assert error_us(clock_after(old, new), now_us) == 50


def test_an_answer_before_its_question_is_of_another_conversation() -> None:
    assert clock_after(RoundTrip(sent_us=10, remote_us=5, received_us=9)).estimate(20) is None


def test_only_the_last_trips_are_kept() -> None:
    first = trip(0, 1, 1)
    later = [trip(100 * i, 40, 40) for i in range(1, NUM_KEPT + 1)]
    assert error_us(clock_after(first, *later[1:]), 100 * NUM_KEPT) == 2
    assert error_us(clock_after(first, *later), 100 * NUM_KEPT + 80) == 40


delays = st.integers(0, 10**7)


@given(
    ahead_us=st.integers(-(10**12), 10**12),
    trips=st.lists(st.tuples(delays, delays, delays), min_size=1, max_size=9),
    drift=st.floats(-DRIFT / 2, DRIFT / 2),
)
def test_the_truth_lies_within_the_error_however_uneven_the_ways(
    ahead_us: int, trips: list[tuple[int, int, int]], drift: float
) -> None:
    """The other clock runs faster or slower, and leads by an offset when ours shows 0."""
    clock, now_us = RemoteClock(), 0
    for pause_us, there_us, back_us in trips:
        sent_us = now_us + pause_us
        read_us, now_us = sent_us + there_us, sent_us + there_us + back_us
        remote_us = read_us + ahead_us + round(drift * read_us)
        clock.add(RoundTrip(sent_us=sent_us, remote_us=remote_us, received_us=now_us))
    estimate = clock.estimate(now_us)
    assert estimate is not None
    truth_us = ahead_us + drift * now_us
    assert abs(estimate.offset_us - truth_us) <= estimate.error_us + 2, "but for rounding"


@pytest.mark.parametrize("sent_us", [0, 1, 10**15])
def test_times_stay_whole_and_exact(sent_us: int) -> None:
    clock = clock_after(trip(sent_us, 2, 1, ahead_us=10**12))
    assert clock.estimate(sent_us + 3) == ClockEstimate(10**12 + 1, 2)
