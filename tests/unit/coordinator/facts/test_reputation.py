"""Recent failures of a peer determine the length of its suspension."""

from hypothesis import given
from hypothesis import strategies as st

from swarm_ft.coordinator.facts.reasons import Reason, ReasonKind
from swarm_ft.coordinator.facts.reputation import (
    AMONG_ATTEMPTS,
    FIRST_REST_S,
    FORGOTTEN_AFTER_S,
    MAX_FAILURES,
    MAX_REST_S,
    Reputation,
)
from swarm_ft.ids import Attempt, RunId

RUN = RunId("run-1")
OH = Reason(kind=ReasonKind.PEER_ERROR, text="oh")


def failed(standing: Reputation, *attempts: int, now_s: float = 0.0) -> Reputation:
    for attempt in attempts:
        standing = standing.after_failure(RUN, Attempt(attempt), OH, now_s)
    return standing


def test_three_failures_of_ten_attempts_are_too_many() -> None:
    assert not failed(Reputation(), 1, 5).is_suspended(0.0)
    aside = failed(Reputation(), 1, 5, 10)
    assert aside.is_suspended(FIRST_REST_S - 1)
    assert not aside.is_suspended(FIRST_REST_S)
    assert not failed(Reputation(), 1, 5, AMONG_ATTEMPTS + 1).is_suspended(0.0)


def test_an_attempt_counts_once() -> None:
    assert not failed(Reputation(), 1, 1, 1, 1).is_suspended(0.0)


def test_one_other_peer_is_not_believed_however_often_it_says_so() -> None:
    standing = Reputation()
    for attempt in range(AMONG_ATTEMPTS):
        standing = standing.after_failure(RUN, Attempt(attempt), OH, 0.0, by="liar")
        assert not standing.is_suspended(0.0)
    assert standing.after_failure(RUN, Attempt(5), OH, 0.0, by="twin").is_suspended(0.0)
    assert failed(standing, 5).is_suspended(0.0)


def test_who_several_others_do_not_reach_is_aside_before_them() -> None:
    dead, honest = Reputation(), {"a": Reputation(), "b": Reputation()}
    for attempt in range(2):
        for name in honest:
            honest[name] = failed(honest[name], attempt)
            dead = dead.after_failure(RUN, Attempt(attempt), OH, 0.0, by=name)
    assert dead.is_suspended(0.0)
    assert not any(standing.is_suspended(0.0) for standing in honest.values())


def test_another_run_begins_anew() -> None:
    two = failed(Reputation(), 1, 2)
    assert not two.after_failure(RunId("run-2"), Attempt(3), OH, 0.0).is_suspended(0.0)


def test_rests_grow_to_a_limit_and_are_forgotten() -> None:
    now_s, rests, standing = 0.0, [], Reputation()
    for _ in range(6):
        standing = failed(standing, *range(MAX_FAILURES), now_s=now_s)
        rests.append(standing.aside_until_s - now_s)
        now_s = standing.aside_until_s
    assert rests == [30.0, 120.0, 480.0, 1920.0, MAX_REST_S, MAX_REST_S]
    standing = failed(standing, *range(MAX_FAILURES), now_s=now_s + FORGOTTEN_AFTER_S)
    assert standing.aside_until_s - now_s - FORGOTTEN_AFTER_S == FIRST_REST_S


@given(st.lists(st.tuples(st.integers(0, 50), st.floats(0, 1e4)), max_size=60))
def test_whatever_happens_little_is_kept_and_rests_are_bounded(
    failures: list[tuple[int, float]],
) -> None:
    standing, now_s = Reputation(), 0.0
    for attempt, seconds in failures:
        now_s += seconds
        standing = failed(standing, attempt, now_s=now_s)
        assert len(standing.failed_in) < MAX_FAILURES
        assert standing.aside_until_s <= now_s + MAX_REST_S
