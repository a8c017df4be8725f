"""Held-out documents of the training data."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_ft.client.data.holdout import DatasetPart


def parts(size: float, num_rows: int, seed: int = 42) -> tuple[list[int], list[int]]:
    held_out, others = (
        list(
            DatasetPart(size=size, seed=seed, is_held_out=one).select_rows(
                range(num_rows), num_rows
            )
        )
        for one in (True, False)
    )
    return held_out, others


@given(st.floats(0.001, 0.999), st.integers(0, 300), st.integers(0, 1 << 62))
def test_a_share_is_held_out_and_the_others_train(share: float, num_rows: int, seed: int) -> None:
    held_out, others = parts(share, num_rows, seed)
    assert sorted(held_out + others) == list(range(num_rows))
    assert abs(len(held_out) - share * num_rows) <= 1
    assert parts(share, num_rows, seed) == (held_out, others)


def test_another_seed_draws_others() -> None:
    assert parts(0.1, 1000, 1)[0] != parts(0.1, 1000, 2)[0]
    assert len(parts(0.1, 1000)[0]) == 100
    # not at the same place of each ten, by which rows that alternate would all be of one kind
    assert len({row % 10 for row in parts(0.1, 1000)[0]}) == 10


@pytest.mark.parametrize("size", [1, 7, 99])
def test_a_number_of_documents_is_held_out(size: int) -> None:
    held_out, others = parts(size, 100)
    assert len(held_out) == size
    assert sorted(held_out + others) == list(range(100))
    assert (held_out, others) == parts(size, 100)


def test_of_a_text_the_last_lines_are_held_out() -> None:
    text = "".join(f"line {n}\n" for n in range(20))
    held_out, train = (DatasetPart(size=0.1, seed=1, is_held_out=one) for one in (True, False))
    assert train.select_text(text) + held_out.select_text(text) == text
    assert held_out.select_text(text) == "line 18\nline 19\n"
    assert (train.select_text("abcdefghij"), held_out.select_text("abcdefghij")) == (
        "abcdefghi",
        "j",
    )
    with pytest.raises(ValueError, match="below 1"):
        DatasetPart(size=3, seed=1, is_held_out=True).select_text(text)
