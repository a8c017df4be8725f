"""Rows of samples: content, counts of targets, and refusals."""

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
    SECOND,
    START,
    Counts,
    Words,
    counts_of,
    counts_of_all,
    join_documents,
    pad_rows,
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
    return np.concatenate([pad_rows(one, seq_length) for one in words])


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
        ((START | 1, 2, 3, 4), "a document in front of a further one"),
        ((1, START | 2, START | 3, START | 4), "all are only read"),
        ((1, 2, NO_TOKEN, START | 3), "without gaps"),
        ((1, 2, START | VOCAB, 4), "token id 50 is outside"),
        ((1, 2, START | SECOND | 3, 4), "token id 536870915 is outside"),
        ((1, CONTEXT | 2, START | 3, CONTEXT | 4), "all are only read"),
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


@given(SAMPLES)
def test_documents_that_share_a_sample_come_out_as_each_of_them_alone(made: Made) -> None:
    documents = [words_of(*map(list, zip(*one, strict=True))) for one in made]
    packed = pad_rows(join_documents(documents), 9 * len(made))
    alone = np.concatenate([pad_rows(one, 9) for one in documents])
    assert text_refusal(packed, VOCAB) is None
    assert np.array_equal(token_ids_of(packed[0]), np.concatenate(list(map(token_ids_of, alone))))
    counts, of_alone = counts_of(packed), counts_of(alone)
    assert counts.num_targets == of_alone.num_targets
    assert counts.lengths == (sum(of_alone.lengths),)
    assert counts.documents == ((of_alone.lengths,) if len(made) > 1 else ())
    samples, first = samples_in(packed), 0
    for of_one, length in zip(samples_in(alone).labels, of_alone.lengths, strict=True):
        part = slice(first, first + length)
        assert samples.labels[0, part][1:].tolist() == of_one[1:length].tolist()
        # The token in front of it belongs to another document.
        assert first == 0 or samples.labels[0, first] == NO_LABEL
        first += length


def test_counts_of_parts_are_those_of_all() -> None:
    packed = pad_rows(join_documents([words_of([1, 2]), words_of([3, 4, 5])]), 6)
    rows = np.concatenate([row(1, 2, 3, 4, 5, 6), packed, row(1, 2, 3, 4, 5, NO_TOKEN)])
    whole = Counts(5 + 3 + 4, (6, 5, 5), ((), (2, 3), ()))
    assert counts_of(rows) == whole
    assert counts_of_all([counts_of(rows[:1]), counts_of(rows[1:])]) == whole
    assert counts_of_all([counts_of(rows[:1])] * 2) == Counts(10, (6, 6))


@given(st.binary(min_size=16, max_size=160).map(lambda data: data[: len(data) // 16 * 16]))
def test_whatever_bytes_come_they_are_refused_or_are_samples(data: bytes) -> None:
    rows = rows_in(data, 4)
    if text_refusal(rows, VOCAB) is None:
        samples = samples_in(rows)
        assert (samples.lengths >= 2).all()
        assert (samples.token_ids >= 0).all()
        assert (samples.token_ids < VOCAB).all()
        assert (samples.labels[:, 1:] != NO_LABEL).any(axis=1).all()
        _check_documents(counts_of(rows))


def _check_documents(counts: Counts) -> None:
    for length, documents in zip(counts.lengths, counts.documents, strict=False):
        assert not documents or (sum(documents) == length and min(documents) >= 1)


WORD = st.builds(
    lambda token, mark: np.uint32(NO_TOKEN if mark == NO_TOKEN else token | mark),
    st.integers(0, VOCAB - 1),
    st.sampled_from([0, 0, CONTEXT, START, NO_TOKEN]),
)


@given(st.lists(WORD, min_size=6, max_size=6))
def test_marks_in_any_place_are_refused_or_part_documents(words: list[np.uint32]) -> None:
    """Random bytes hardly ever hold a mark in its place."""
    rows = np.array([words], dtype="<u4")
    if text_refusal(rows, VOCAB) is None:
        counts = counts_of(rows)
        _check_documents(counts)
        starts = [place for place, word in enumerate(words) if word & START == START]
        starts = [place for place in starts if words[place] != NO_TOKEN]
        assert sum(map(len, counts.documents)) == (len(starts) + 1 if starts else 0)
