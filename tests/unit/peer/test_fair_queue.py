"""Several runs at one peer take turns."""

from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from swarm_ft.ids import RunId
from swarm_ft.peer.fair_queue import MAX_LAG_S, FairQueue
from swarm_ft.protocol.spec.priority import Claim

A, B, C = RunId("a"), RunId("b"), RunId("c")


def order_of(turns: FairQueue[str], seconds: dict[RunId, float]) -> list[str]:
    """All that waits, as it runs."""
    done = []
    while (found := turns.next()) is not None:
        run_id, task = found
        turns.add_usage(run_id, seconds.get(run_id, 0.1))
        done.append(task)
    return done


def test_one_runs_tasks_go_as_they_came() -> None:
    turns: FairQueue[str] = FairQueue()
    for number in range(6):
        turns.put(A, f"a{number}", fills=number % 2 == 0)
    assert order_of(turns, {}) == [f"a{number}" for number in range(6)]
    assert turns.next() is None


def test_two_runs_take_turns_by_the_time_that_their_tasks_take() -> None:
    turns: FairQueue[str] = FairQueue()
    for number in range(8):
        turns.put(A, f"a{number}")
        turns.put(B, f"b{number}")
    done = order_of(turns, {A: 0.3, B: 0.1})
    first = done[: done.index("a2")]
    assert sum(name[0] == "b" for name in first) >= 5, done


def test_a_run_of_twice_the_priority_has_twice_the_time() -> None:
    turns: FairQueue[str] = FairQueue()
    turns.set_weight(A, 6)
    turns.set_weight(B, 3)
    for number in range(12):
        turns.put(A, f"a{number}")
        turns.put(B, f"b{number}")
    first = order_of(turns, {A: 0.1, B: 0.1})[:9]
    assert sum(name[0] == "a" for name in first) == 6


def test_runs_of_one_claim_share_its_weight() -> None:
    """Two runs of the highest priority have together what the one run of another claim has."""
    turns: FairQueue[str] = FairQueue()
    turns.set_weight(A, 9, Claim("one", 1))
    turns.set_weight(C, 9, Claim("one", 1))
    turns.set_weight(B, 1, Claim("other", 1))
    for number in range(12):
        for run, name in ((A, "a"), (B, "b"), (C, "c")):
            turns.put(run, f"{name}{number}")
    first = order_of(turns, {A: 0.1, B: 0.1, C: 0.1})[:16]
    assert [sum(name[0] == letter for name in first) for letter in "abc"] == [4, 8, 4]


def test_a_claim_of_twice_the_weight_has_twice_the_time_also_once_a_run_of_it_is_over() -> None:
    turns: FairQueue[str] = FairQueue()
    turns.set_weight(A, 1, Claim("one", 2))
    turns.set_weight(C, 9, Claim("one", 2))
    turns.set_weight(B, 9, Claim("other", 1))
    turns.forget(C)
    for number in range(12):
        turns.put(A, f"a{number}")
        turns.put(B, f"b{number}")
    first = order_of(turns, {A: 0.1, B: 0.1})[:9]
    assert sum(name[0] == "a" for name in first) == 6


def test_what_others_wait_for_comes_before_what_only_fills_time() -> None:
    turns: FairQueue[str] = FairQueue()
    turns.put(A, "weights", fills=True)
    turns.put(B, "backward")
    turns.put(B, "weights of b", fills=True)
    assert order_of(turns, {}) == ["backward", "weights", "weights of b"]


def test_what_fills_time_is_due_once_its_run_is_far_behind() -> None:
    turns: FairQueue[str] = FairQueue()
    turns.put(A, "weights", fills=True)
    for number in range(9):
        turns.put(B, f"b{number}")
    done = order_of(turns, {B: MAX_LAG_S / 3})
    assert done.index("weights") == 3


def test_who_had_nothing_to_do_is_owed_nothing() -> None:
    turns: FairQueue[str] = FairQueue()
    for number in range(50):
        turns.put(A, f"early{number}")
    order_of(turns, {A: 1.0})
    for number in range(4):
        turns.put(A, f"a{number}")
        turns.put(B, f"b{number}")
    done = order_of(turns, {A: 1.0, B: 1.0})
    longest = max(len(list(group)) for _, group in groupby(done, key=lambda name: name[0]))
    assert longest <= 2, done


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.booleans(), st.floats(0.001, 2.0)),
        min_size=1,
        max_size=60,
    )
)
def test_every_task_runs_once_and_each_runs_own_in_order(
    requests: list[tuple[str, bool, float]],
) -> None:
    turns: FairQueue[int] = FairQueue()
    for number, (run, fills, _) in enumerate(requests):
        turns.put(RunId(run), number, fills=fills)
    done = []
    while (found := turns.next()) is not None:
        run_id, number = found
        assert requests[number][0] == run_id
        turns.add_usage(run_id, requests[number][2])
        done.append(number)
    assert sorted(done) == list(range(len(requests)))
    for run in "abc":
        own = [number for number in done if requests[number][0] == run]
        assert own == sorted(own)
