"""Rows of samples: what is put in comes out, targets are counted, and what is none is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_ft.protocol.spec.run_spec import MAX_VOCAB_SIZE
from swarm_ft.protocol.spec.sample_rows import (
    CONTEXT,
    NO_LABEL,
    NO_TOKEN,
    Words,
    counts_of,
    filled_up,
    rows_in,
    samples_in,
    targets_in,
    text_refusal,
    token_ids_of,
    words_of,
)

VOCAB = 50
TOKENS = st.tuples(st.integers(0, VOCAB - 1), st.booleans())
SAMPLES = st.lists(
    st.lists(TOKENS, min_size=2, max_size=9).filter(lambda made: any(t for _, t in made[1:])),
    min_size=1,
    max_size=6,
)
Made = list[list[tuple[int, bool]]]


def rows_of(made: Made, seq_length: int = 9) -> Words:
    words = [words_of(*map(list, zip(*sample, strict=True))) for sample in made]
    return np.concatenate([filled_up(one, seq_length) for one in words])


def row(*words: int) -> Words:
    return np.array([words], dtype="<u4")


@given(SAMPLES)
def test_what_is_put_in_comes_out_whatever_the_length(made: Made) -> None:
    rows = rows_of(made)
    assert text_refusal(rows, VOCAB) is None
    samples = samples_in(rows)
    longest = max(map(len, made))
    assert samples.token_ids.shape == samples.labels.shape == (len(made), longest)
    assert samples.lengths.tolist() == list(map(len, made))
    for index, sample in enumerate(made):
        ids = [token for token, _ in sample]
        assert samples.token_ids[index].tolist() == ids + [0] * (longest - len(ids))
        labels = [token if is_learned else NO_LABEL for token, is_learned in sample]
        assert samples.labels[index].tolist() == labels + [NO_LABEL] * (longest - len(ids))
        assert token_ids_of(rows[index]).tolist() == ids


@given(SAMPLES)
def test_targets_are_counted_as_a_loss_counts_them(made: Made) -> None:
    rows = rows_of(made)
    counts = counts_of(rows)
    labels = samples_in(rows).labels
    assert counts.num_targets == int((labels[:, 1:] != NO_LABEL).sum())
    assert counts.num_targets == sum(learned for sample in made for _, learned in sample[1:])
    assert counts.lengths == tuple(map(len, made))
    assert targets_in(rows).sum() == counts.num_targets


@given(SAMPLES)
def test_rows_travel_as_bytes(made: Made) -> None:
    rows = rows_of(made)
    assert np.array_equal(rows_in(rows.tobytes(), 9), rows)
    assert np.array_equal(rows_in([one.tobytes() for one in rows], 9), rows)


@given(st.lists(st.integers(0, MAX_VOCAB_SIZE - 1), min_size=2, max_size=9))
def test_plain_text_is_its_token_ids(ids: list[int]) -> None:
    assert words_of(ids).tolist() == ids
    assert counts_of(row(*ids)).num_targets == len(ids) - 1


def test_no_id_is_taken_for_something_else() -> None:
    assert MAX_VOCAB_SIZE - 1 | CONTEXT < NO_TOKEN
    assert words_of([MAX_VOCAB_SIZE - 1], is_target=False)[0] != NO_TOKEN


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((1, NO_TOKEN, 2, NO_TOKEN), "without gaps"),
        ((NO_TOKEN, 1, 2, 3), "without gaps"),
        ((NO_TOKEN,) * 4, "2 tokens or more, got 0"),
        ((1, NO_TOKEN, NO_TOKEN, NO_TOKEN), "2 tokens or more, got 1"),
        ((1, VOCAB, 2, 3), "token id 50 is outside the model's vocabulary of 50"),
        ((1, 2, CONTEXT | VOCAB, 3), "token id 50 is outside"),
        ((1, 2, NO_TOKEN - 1, 3), "token id 1073741822 is outside"),
        ((CONTEXT - 1, 2, 3, 4), "token id 1048575 is outside"),
        ((1, CONTEXT | 2, CONTEXT | 3, CONTEXT | 4), "all are only read"),
        ((1, CONTEXT | 2, NO_TOKEN, NO_TOKEN), "all are only read"),
    ],
)
def test_what_is_no_sample_is_refused_and_named(words: tuple[int, ...], why: str) -> None:
    good = row(1, 2, 3, NO_TOKEN)
    for place in range(3):
        rows = np.concatenate([good] * place + [row(*words)] + [good])
        refused = text_refusal(rows, VOCAB)
        assert refused is not None
        assert refused[0] == place
        assert why in refused[1]


@given(st.binary(min_size=16, max_size=160).map(lambda data: data[: len(data) // 16 * 16]))
def test_whatever_bytes_come_they_are_refused_or_are_samples(data: bytes) -> None:
    rows = rows_in(data, 4)
    if text_refusal(rows, VOCAB) is None:
        samples = samples_in(rows)
        assert (samples.lengths >= 2).all()
        assert (samples.token_ids >= 0).all()
        assert (samples.token_ids < VOCAB).all()
        assert (samples.labels[:, 1:] != NO_LABEL).any(axis=1).all()
