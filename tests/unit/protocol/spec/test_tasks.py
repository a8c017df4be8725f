"""Tasks' reading of rows, and their metrics against scikit-learn's values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_ft.protocol.spec.run_spec import MAX_LABELS, MAX_VOCAB_SIZE, TaskKind
from swarm_ft.protocol.spec.sample_rows import (
    CONTEXT,
    LABELLED,
    NO_LABEL,
    NO_TOKEN,
    SECOND,
    START,
    Words,
    counts_of,
    label_tokens,
    labels_in,
    pad_rows,
    rows_in,
    samples_in,
    targets_in,
    text_refusal,
    token_ids_of,
)
from swarm_ft.protocol.spec.tasks import CausalLm, Classification, sum_counts

VOCAB = 50
NAMES = ("a", "b", "c")
WHOLE = Classification(TaskKind.CLASSIFICATION, NAMES)
EACH = Classification(TaskKind.TOKEN_CLASSIFICATION, NAMES)
LENGTH = 6

IDS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=LENGTH)
SAMPLES = st.lists(st.tuples(IDS, st.integers(0, len(NAMES) - 1)), min_size=1, max_size=5)


def row(*words: int) -> Words:
    return np.array([words], dtype="<u4")


def word(token_id: int, label: int) -> int:
    return int(label_tokens([token_id], [label])[0])


def sample(ids: list[int], label: int) -> Words:
    labels = [*([NO_LABEL] * (len(ids) - 1)), label]
    return pad_rows(label_tokens(ids, labels), LENGTH)


@given(SAMPLES)
def test_a_class_stands_at_the_last_token_and_is_the_only_target(
    made: list[tuple[list[int], int]],
) -> None:
    rows = np.concatenate([sample(ids, label) for ids, label in made])
    assert WHOLE.refusal(rows, VOCAB) is None
    samples, counts = samples_in(rows), counts_of(rows)
    assert counts.num_targets == len(made)
    assert counts.lengths == tuple(len(ids) for ids, _ in made)
    for index, (ids, label) in enumerate(made):
        length = len(ids)
        assert samples.token_ids[index, :length].tolist() == ids
        assert samples.labels[index, length - 1] == label
        assert (np.delete(samples.labels[index], length - 1) == NO_LABEL).all()
        assert token_ids_of(rows[index]).tolist() == ids
        assert targets_in(rows)[index].tolist() == [at == length - 1 for at in range(LENGTH)]


@given(st.lists(st.tuples(st.integers(0, VOCAB - 1), st.integers(-1, 2)), min_size=1, max_size=6))
def test_each_token_may_have_a_class_the_first_too(made: list[tuple[int, int]]) -> None:
    ids, labels = ([one[place] for one in made] for place in (0, 1))
    labels = [NO_LABEL if label < 0 else label for label in labels]
    rows = pad_rows(label_tokens(ids, labels), LENGTH)
    has_one = any(label != NO_LABEL for label in labels)
    assert (EACH.refusal(rows, VOCAB) is None) == has_one
    assert samples_in(rows).labels[0].tolist() == labels
    assert samples_in(rows).token_ids[0].tolist() == ids
    assert counts_of(rows).num_targets == sum(label != NO_LABEL for label in labels)


def test_the_largest_id_with_the_largest_class_is_neither_text_nor_nothing() -> None:
    last = word(MAX_VOCAB_SIZE - 1, MAX_LABELS - 1)
    assert LABELLED <= last < CONTEXT < NO_TOKEN
    samples = samples_in(row(last))
    assert samples.token_ids.tolist() == [[MAX_VOCAB_SIZE - 1]]
    assert samples.labels.tolist() == [[MAX_LABELS - 1]]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((CONTEXT | 1, CONTEXT | 2, NO_TOKEN), "expected one class"),
        ((word(1, 0), word(2, 0), NO_TOKEN), "expected one class"),
        ((CONTEXT | 1, 2, NO_TOKEN), "expected one class"),
        ((CONTEXT | 1, word(2, 3), NO_TOKEN), "expected classes below 3"),
        ((CONTEXT | 1, word(VOCAB, 0), NO_TOKEN), "token id 50 is outside"),
        ((CONTEXT | VOCAB, word(1, 0), NO_TOKEN), "token id 50 is outside"),
        ((CONTEXT | LABELLED, word(1, 0), NO_TOKEN), "token id 1048576 is outside"),
        ((NO_TOKEN, NO_TOKEN, NO_TOKEN), "1 tokens or more, got 0"),
        ((NO_TOKEN, word(1, 0), NO_TOKEN), "without gaps"),
        ((CONTEXT | 1, START | 2, word(1, 0)), "expected one document a sample"),
    ],
)
def test_what_has_no_class_is_refused_and_named(words: tuple[int, ...], why: str) -> None:
    good = row(CONTEXT | 1, word(2, 1), NO_TOKEN)
    refused = WHOLE.refusal(np.concatenate([good, row(*words), good]), VOCAB)
    assert refused is not None
    assert refused[0] == 1
    assert why in refused[1]


def test_a_whole_sample_has_its_class_at_any_token() -> None:
    """transformers reads a decoder's class at the last token that is not its pad token."""
    rows = row(word(1, 0), CONTEXT | 2, NO_TOKEN)
    assert WHOLE.refusal(rows, VOCAB) is None
    assert samples_in(rows).labels.tolist() == [[0, NO_LABEL]]


def test_text_has_no_classes() -> None:
    refused = CausalLm().refusal(row(1, 2, word(3, 1)), VOCAB)
    assert refused == (0, "expected tokens without classes")
    assert CausalLm().refusal(row(1, 2, 3), VOCAB) is None
    assert text_refusal(row(1, 2, word(3, 1)), CONTEXT) is not None


@given(st.binary(min_size=12, max_size=120).map(lambda data: data[: len(data) // 12 * 12]))
def test_whatever_bytes_come_they_are_refused_or_have_classes(data: bytes) -> None:
    rows = rows_in(data, 3)
    for task in (WHOLE, EACH):
        if task.refusal(rows, VOCAB) is None:
            samples = samples_in(rows)
            assert (samples.lengths >= 1).all()
            assert (samples.token_ids % SECOND < VOCAB).all()
            assert ((samples.labels != NO_LABEL).sum(axis=1) >= 1).all()
            assert (samples.labels < len(NAMES)).all()


# ---- metrics


def counts(predictions: list[int], labels: list[int], num_classes: int) -> list[int]:
    classes = range(num_classes)
    right = [sum(a == b == k for a, b in zip(predictions, labels, strict=True)) for k in classes]
    return [*right, *map(predictions.count, classes), *map(labels.count, classes)]


# Values of scikit-learn 1.9.1: accuracy_score, matthews_corrcoef, f1_score (binary; macro of more).
KNOWN = [
    ([0, 1, 1, 0, 1, 1], [0, 1, 0, 0, 1, 0], 2, (4 / 6, 0.5, 2 / 3)),
    ([1, 1, 1, 1], [0, 1, 1, 1], 2, (0.75, 0.0, 6 / 7)),
    ([0, 0, 0], [1, 1, 1], 2, (0.0, 0.0, 0.0)),
    ([0, 1], [0, 1], 2, (1.0, 1.0, 1.0)),
    ([0, 0, 2, 2, 1, 2], [0, 1, 2, 2, 1, 0], 3, (4 / 6, 0.5222329678670935, 0.6555555555555556)),
    ([0, 0, 1, 1], [0, 0, 1, 0], 3, (0.75, 0.5773502691896258, 0.7333333333333334)),
]


@pytest.mark.parametrize(("predictions", "labels", "num_classes", "expected"), KNOWN)
def test_metrics_are_the_usual_ones(
    predictions: list[int],
    labels: list[int],
    num_classes: int,
    expected: tuple[float, float, float],
) -> None:
    task = Classification(TaskKind.CLASSIFICATION, NAMES[:num_classes])
    found = task.metrics(counts(predictions, labels, num_classes))
    assert list(found) == ["accuracy", "matthews_correlation", "f1"]
    assert tuple(found.values()) == pytest.approx(expected)


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=40))
def test_matthews_correlation_is_that_of_two_numbers(pairs: list[tuple[int, int]]) -> None:
    predictions, labels = ([pair[place] for pair in pairs] for place in (0, 1))
    task = Classification(TaskKind.CLASSIFICATION, NAMES[:2])
    found = task.metrics(counts(predictions, labels, 2))["matthews_correlation"]
    if len(set(predictions)) == len(set(labels)) == 2:
        assert found == pytest.approx(float(np.corrcoef(predictions, labels)[0, 1]))
    else:
        assert found == 0.0


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=2, max_size=20))
def test_counts_of_parts_sum_to_those_of_all(pairs: list[tuple[int, int]]) -> None:
    def of(part: list[tuple[int, int]]) -> list[int]:
        return counts([a for a, _ in part], [b for _, b in part], 3)

    assert sum_counts([of(pairs[:1]), (), of(pairs[1:])]) == tuple(of(pairs))
    assert sum_counts([]) == sum_counts([()]) == ()


# ---- two texts


@given(st.lists(st.tuples(st.integers(0, VOCAB - 1), st.booleans()), min_size=1, max_size=LENGTH))
def test_tokens_of_a_second_text_are_told_from_those_of_the_first(
    made: list[tuple[int, bool]],
) -> None:
    ids, are_second = ([one[place] for one in made] for place in (0, 1))
    labels = [*([NO_LABEL] * (len(ids) - 1)), 2]
    rows = pad_rows(label_tokens(ids, labels, are_second), LENGTH)
    assert WHOLE.refusal(rows, VOCAB) is None
    samples = samples_in(rows)
    assert (samples.token_ids[0] % SECOND).tolist() == ids == token_ids_of(rows[0]).tolist()
    assert (samples.token_ids[0] >= SECOND).tolist() == are_second
    assert samples.labels[0].tolist() == labels
    assert counts_of(rows) == counts_of(pad_rows(label_tokens(ids, labels), LENGTH))


def test_no_mark_of_a_word_is_another() -> None:
    last = int(label_tokens([MAX_VOCAB_SIZE - 1], [MAX_LABELS - 1], True)[0])
    assert SECOND | LABELLED <= last < CONTEXT
    assert labels_in(row(last)).tolist() == [[MAX_LABELS - 1]]
    read = int(label_tokens([MAX_VOCAB_SIZE - 1], [NO_LABEL], True)[0])
    assert CONTEXT | SECOND < read < NO_TOKEN
    assert samples_in(row(read, NO_TOKEN)).token_ids.tolist() == [[SECOND | MAX_VOCAB_SIZE - 1]]


@pytest.mark.parametrize("second", [SECOND | 2, CONTEXT | SECOND | 2])
def test_text_to_write_on_is_one(second: int) -> None:
    for vocab_size in (VOCAB, CONTEXT):
        refused = CausalLm().refusal(row(1, second, 3), vocab_size)
        assert refused == (0, "expected one text")


@pytest.mark.parametrize("task", [WHOLE, EACH])
def test_tokens_to_write_are_refused_among_classes(task: Classification) -> None:
    refused = task.refusal(row(1, 2, word(3, 1)), VOCAB)
    assert refused == (0, "expected tokens that have a class or are only read")
