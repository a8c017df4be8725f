from swarm_ft.base.clock import Clock
from tests.doubles.clock import ManualClock


def test_it_starts_at_zero_and_stands_still() -> None:
    clock: Clock = ManualClock()
    assert [clock.now_s() for _ in range(3)] == [0.0, 0.0, 0.0]


def test_it_advances_by_what_it_is_told() -> None:
    clock = ManualClock()
    clock.advance(1.5)
    clock.advance(0.0)
    clock.advance(2.0)
    assert clock.now_s() == 3.5


def test_two_clocks_know_nothing_of_each_other() -> None:
    one, other = ManualClock(), ManualClock()
    one.advance(1.0)
    assert other.now_s() == 0.0
