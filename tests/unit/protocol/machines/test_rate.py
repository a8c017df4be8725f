"""Token buckets and floors, on a clock that the tests pass in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_ft.errors import Busy
from swarm_ft.protocol.machines.rate import Floor, Rate

steps_s = st.lists(st.floats(0.0, 3.0), max_size=60)


@given(steps_s, st.integers(1, 5), st.sampled_from([0.5, 1.0, 4.0]))
def test_no_span_of_time_has_more_than_a_burst_and_what_flows_in_it(
    gaps_s: list[float], burst: int, per_s: float
) -> None:
    rate: Rate[str] = Rate(per_s=per_s, burst=burst)
    now_s, taken = 0.0, []
    for gap_s in gaps_s:
        now_s += gap_s
        if rate.wait_s("a", now_s) == 0:
            taken.append(now_s)
    for first, begin_s in enumerate(taken):
        for last, end_s in enumerate(taken[first:]):
            assert last + 1 <= burst + (end_s - begin_s) * per_s + 1e-6


@given(steps_s, st.integers(1, 5))
def test_who_waits_as_long_as_told_is_served(gaps_s: list[float], burst: int) -> None:
    rate: Rate[str] = Rate(per_s=2.0, burst=burst)
    now_s = 0.0
    for gap_s in gaps_s:
        now_s += gap_s
        wait_s = rate.wait_s("a", now_s)
        if wait_s > 0:
            now_s += wait_s + 1e-6
            assert rate.wait_s("a", now_s) == 0


def test_one_key_takes_nothing_from_another_and_the_memory_of_keys_is_bounded() -> None:
    rate: Rate[int] = Rate(per_s=1.0, burst=1, max_keys=2)
    assert rate.wait_s(1, 0.0) == rate.wait_s(2, 0.0) == 0.0
    assert rate.wait_s(1, 0.0) == 1.0
    assert rate.wait_s(3, 0.0) == 0.0  # 2 is forgotten, which was seen longest ago
    assert rate.wait_s(1, 0.0) == 1.0
    assert rate.wait_s(2, 0.0) == 0.0


def test_a_clock_that_goes_back_gives_nothing() -> None:
    rate: Rate[str] = Rate(per_s=1.0, burst=1)
    assert rate.wait_s("a", 10.0) == 0.0
    assert rate.wait_s("a", 5.0) == 1.0


def test_a_refusal_tells_the_rate_and_the_time_to_wait() -> None:
    rate: Rate[str] = Rate(per_s=4.0, burst=1)
    rate.check("a", 0.0, "peer a joins")
    words = (
        r"peer a joins too often: expected at most 1 at once and 4 a second; try again in 0\.25 s"
    )
    with pytest.raises(Busy, match=words):
        rate.check("a", 0.0, "peer a joins")


def test_what_comes_as_fast_as_it_must_may_go_on() -> None:
    floor = Floor(bytes_per_s=100.0, grace_s=5.0, begun_s=1.0)
    assert floor.deadline_s(0) == 6.0
    assert floor.deadline_s(1000) == 16.0
