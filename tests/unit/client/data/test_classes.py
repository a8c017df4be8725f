"""Rows with classes: columns, numbers of classes, and samples.

The tokenizer of these tests puts a token in front of a text, as its model expects.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import processors

from swarm_ft.client.data.dataset import Dataset
from swarm_ft.client.data.files import DataSelection
from swarm_ft.client.data.sources import classes_in, open_dataset
from swarm_ft.client.options import DataFormat, ReadOptions, Truncation
from swarm_ft.errors import BadDataset, BadOption
from swarm_ft.protocol.spec.run_spec import TaskKind
from swarm_ft.protocol.spec.sample_rows import NO_LABEL, SECOND, samples_in
from swarm_ft.protocol.spec.tasks import Classification
from tests.unit.client.data.conftest import Words

VOCAB = 64
WHOLE, EACH = TaskKind.CLASSIFICATION, TaskKind.TOKEN_CLASSIFICATION


def write(path: Path, rows: Iterable[object]) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def opened(
    path: str,
    words: Words,
    names: Sequence[str],
    kind: TaskKind = WHOLE,
    counted: Sequence[str] | None = None,
    **options: Any,
) -> Dataset:
    counted = names if counted is None else counted
    task, reading = Classification(kind, tuple(names)), ReadOptions(**options)
    return open_dataset(
        path, DataSelection(), reading, words(), task=task, counted_names=tuple(counted)
    )


def found_in(path: str, kind: TaskKind = WHOLE, **options: Any) -> tuple[str, ...]:
    return classes_in(path, DataSelection(), ReadOptions(**options), Classification(kind, ())).names


# ---- which classes there are


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["no", "yes", "no"], ("no", "yes")),
        ([1, 0, 1], ("0", "1")),
        ([10, 9, 2], ("2", "9", "10")),
        (["10", "9"], ("9", "10")),
        ([True, False], ("0", "1")),
        (["10", "a"], ("10", "a")),
    ],
)
def test_classes_are_all_that_the_data_has_sorted(
    tmp_path: Path, values: list[object], expected: tuple[str, ...]
) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "w1", "label": value} for value in values])
    assert found_in(path) == expected


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"text": "w1", "label": 0.5}, "line 2: expected 'label' to be a class.*got 0.5"),
        ({"text": "w1", "label": -1}, "line 2: expected 'label' to be a class.*got -1"),
        ({"text": "w1", "label": None}, "got nothing"),
        ({"text": "w1", "label": "a,b"}, "line 2: expected 'label' to be a class without a comma"),
        ({"text": "w1", "label": " "}, "expected 'label' to be a class"),
        ({"text": "w1"}, "expected a column 'label'; it has 'text'; --label-column names"),
        ({"body": "w1", "label": 1}, "expected a column 'text'; it has 'body', 'label'; --text-"),
    ],
)
def test_values_that_are_no_classes_are_refused_by_their_line(
    tmp_path: Path, row: object, why: str
) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "w1", "label": 1}, row])
    with pytest.raises(BadDataset, match=why):
        found_in(path)


def test_a_column_with_a_value_for_each_row_is_no_column_of_classes(tmp_path: Path) -> None:
    rows = [{"text": "w1", "label": number} for number in range(1100)]
    with pytest.raises(BadDataset, match=r"more than 1023 different values.*--label-column"):
        found_in(write(tmp_path / "a.jsonl", rows))


def test_text_without_columns_has_no_classes(tmp_path: Path, words: Words) -> None:
    path = tmp_path / "a.txt"
    path.write_text("w1 w2")
    for find in (found_in, lambda path: opened(path, words, "ab")):
        with pytest.raises(BadDataset, match="expected columns of text and classes, got"):
            find(str(path))


# ---- what becomes a sample


def test_each_text_is_a_sample_whose_class_is_at_its_last_token(
    tmp_path: Path, words: Words
) -> None:
    rows = [{"text": "w1 w2 w3", "label": "b"}, {"text": "w4", "label": "a"}]
    data = opened(write(tmp_path / "a.jsonl", rows), words, "ab")
    made = data.samples(4, VOCAB)
    samples = samples_in(np.array(made.tokens))
    assert samples.lengths.tolist() == [4, 2]
    assert [labels[labels >= 0].tolist() for labels in samples.labels] == [[1], [0]]
    assert samples.labels[0, 3] == samples.labels[0].max() == 1
    assert "2 documents, 2 samples of up to 4 tokens; classes a 50.0%, b 50.0%" in made.words
    assert "a document is 'text', its class is 'label'" in data.describe()[0]
    assert data.describe()[1].endswith("the first document: 'w1 w2 w3' is of class b")


def test_a_long_text_is_cut_and_keeps_its_class(tmp_path: Path, words: Words) -> None:
    rows = [{"text": "w1 w2 w3 w4 w5 w6", "label": 1}]
    data = opened(write(tmp_path / "a.jsonl", rows), words, "ab")
    samples = samples_in(np.array(data.samples(4, VOCAB).tokens))
    assert samples.lengths.tolist() == [4]
    assert samples.labels[0, 3] == 1


@pytest.mark.parametrize(
    ("value", "names", "counted", "number"),
    [
        ("b", "ab", "", 1),
        (1, "ab", "ab", 1),
        ("1", "ab", "ab", 1),
        (1, "ab", "ba", 0),
        (2, "123", "", 1),
        ("2", "123", "", 1),
        ("2", "123", "123", 1),
    ],
)
def test_a_class_is_told_by_name_or_else_by_number(
    tmp_path: Path, words: Words, value: object, names: str, counted: str, number: int
) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "w1 w2", "label": value}])
    data = opened(path, words, names, counted=counted)
    samples = samples_in(np.array(data.samples(4, VOCAB).tokens))
    assert samples.labels[0, 2] == number


@pytest.mark.parametrize(("value", "names"), [(0, "123"), ("1", "ab"), (7, "ab")])
def test_a_number_that_nobody_named_is_refused(
    tmp_path: Path, words: Words, value: object, names: str
) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "w1 w2", "label": value}])
    with pytest.raises(BadDataset, match=f"line 1: 'label' is '{value}', which is none of"):
        opened(path, words, names, counted="")


def test_a_row_without_its_class_is_refused_by_its_line(tmp_path: Path, words: Words) -> None:
    rows = [{"text": "w1 w2", "label": "a"}, {"text": "w1"}]
    data = opened(write(tmp_path / "a.jsonl", rows), words, "ab")
    with pytest.raises(BadDataset, match=r"line 2: expected 'label' to be.* got nothing"):
        data.samples(4, VOCAB)


def test_another_class_than_those_is_refused_by_its_line(tmp_path: Path, words: Words) -> None:
    rows = [{"text": "w1 w2", "label": "a"}, {"text": "w1", "label": "c"}]
    data = opened(write(tmp_path / "a.jsonl", rows), words, "ab")
    with pytest.raises(BadDataset, match=r"line 2: 'label' is 'c', which is none of .* a, b"):
        data.samples(4, VOCAB)


def test_columns_of_a_tsv_without_names_are_named(tmp_path: Path, words: Words) -> None:
    path = tmp_path / "in.tsv"
    path.write_text("gj\t1\t\tw1 w2\ngj\t0\t*\tw3\n")
    named: dict[str, Any] = {
        "column_names": "source,label,mark,sentence",
        "text_column": "sentence",
    }
    assert found_in(str(path), **named) == ("0", "1")
    data = opened(str(path), words, ["bad", "good"], **named)
    assert "not used: 'source', 'mark'" in data.describe()[0]
    samples = samples_in(np.array(data.samples(4, VOCAB).tokens))
    assert [labels.max() for labels in samples.labels] == [1, 0]


@pytest.mark.parametrize(
    "options",
    [
        {"packing": True},
        {"truncation": Truncation.DROP},
        {"separator": "|"},
        {"completion_only_loss": False},
    ],
)
def test_options_that_mean_nothing_for_classes_are_refused(
    tmp_path: Path, words: Words, options: dict[str, Any]
) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "w1", "label": "a"}])
    with pytest.raises(BadOption, match="has no effect"):
        opened(path, words, "ab", **options)


def test_a_column_of_classes_means_nothing_where_none_are_learned(
    tmp_path: Path, words: Words
) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "w1", "mark": "a"}])
    with pytest.raises(BadOption, match="--label-column: has no effect"):
        open_dataset(path, DataSelection(), ReadOptions(label_column="mark"), words())


def test_a_blank_text_is_left_out(tmp_path: Path, words: Words) -> None:
    rows = [{"text": text, "label": "a"} for text in ("w1", " ", "w2")]
    made = opened(write(tmp_path / "a.jsonl", rows), words, "ab").samples(4, VOCAB)
    assert len(made.tokens) == 2
    assert "1 document without text left out" in made.words


def test_texts_that_are_cut_are_counted(tmp_path: Path, words: Words) -> None:
    texts = ("w1 w2 w3 w4 w5", "w1 w2 w3", "w1", "w1 w2 w3 w4")
    rows = [{"text": text, "label": "a"} for text in texts]
    made = opened(write(tmp_path / "a.jsonl", rows), words, "ab").samples(4, VOCAB)
    line = "2 documents of more than 4 tokens truncated, losing 3 of 11 tokens"
    assert f"; {line} (--seq-length); " in made.words


def test_words_that_are_cut_are_counted(tmp_path: Path, words: Words) -> None:
    rows = [{"tokens": [f"w{i}" for i in range(6)], "ner_tags": [0] * 6}]
    path = write(tmp_path / "a.jsonl", rows)
    made = opened(path, words, "ab", kind=TaskKind.TOKEN_CLASSIFICATION).samples(4, VOCAB)
    assert "; 1 document of more than 4 tokens truncated, losing 3 of 7 tokens" in made.words


# ---- two texts


@pytest.mark.parametrize(
    ("columns", "options"),
    [
        (("sentence1", "sentence2"), {}),
        (("premise", "hypothesis"), {}),
        (("question", "sentence"), {}),
        (("question1", "question2"), {}),
        (("left", "right"), {"text_column": "left,right"}),
    ],
)
def test_a_class_may_be_of_two_texts(
    tmp_path: Path, words: Words, columns: tuple[str, str], options: dict[str, Any]
) -> None:
    rows = [{columns[0]: "w1 w2", columns[1]: "w3", "label": 1, "idx": 0}]
    path = write(tmp_path / "a.jsonl", [*rows, {**rows[0], "label": 0}])
    assert found_in(path, **options) == ("0", "1")
    data = opened(path, words, "ab", **options)
    line, first = data.describe()
    assert f"a document is '{columns[0]}' and '{columns[1]}', its class is 'label'; not" in line
    assert first.endswith("the first document: 'w1 w2' + 'w3' is of class b")
    samples = samples_in(np.array(data.samples(8, VOCAB).tokens))
    assert samples.token_ids[0].tolist() == [12, 1, 2, SECOND | 3]
    assert samples.labels[0].tolist() == [NO_LABEL, NO_LABEL, NO_LABEL, 1]


def test_two_long_texts_are_cut_the_longer_one_first(tmp_path: Path, words: Words) -> None:
    row = {"sentence1": "w1 w2 w3 w4 w5 w6", "sentence2": "w7", "label": "a"}
    data = opened(write(tmp_path / "a.jsonl", [row]), words, "ab")
    samples = samples_in(np.array(data.samples(4, VOCAB).tokens))
    assert samples.token_ids[0].tolist() == [12, 1, 2, SECOND | 7]
    assert samples.labels[0, 3] == 0


def test_samples_without_room_for_special_tokens_are_refused(tmp_path: Path, words: Words) -> None:
    tokenizer = words()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B <s>", special_tokens=[("<s>", 12)]
    )
    path = write(tmp_path / "a.jsonl", [{"sentence1": "w1", "sentence2": "w2", "label": "a"}])
    task = Classification(WHOLE, ("a", "b"))
    data = open_dataset(path, DataSelection(), ReadOptions(), tokenizer, task=task)
    with pytest.raises(BadOption, match="--seq-length 2: the tokenizer's own tokens"):
        data.samples(2, VOCAB)


def test_one_of_two_texts_may_be_empty(tmp_path: Path, words: Words) -> None:
    row = {"sentence1": "", "sentence2": "w7", "label": "a"}
    data = opened(write(tmp_path / "a.jsonl", [row]), words, "ab")
    samples = samples_in(np.array(data.samples(4, VOCAB).tokens))
    assert samples.token_ids.tolist() == [[12, SECOND | 7]]


@pytest.mark.parametrize(
    ("row", "options", "why"),
    [
        ({"sentence1": "w1", "label": 1}, {}, "expected a column 'text'; it has 'sentence1'"),
        ({"a": "w1", "label": 1}, {"text_column": "a,b"}, "expected a column 'b'; it has 'a'"),
        ({"sentence1": "w1", "sentence2": 3, "label": 1}, {}, "expected 'sentence2' to be text"),
    ],
)
def test_a_pair_without_its_second_text_is_refused(
    tmp_path: Path, words: Words, row: object, options: dict[str, Any], why: str
) -> None:
    path = write(tmp_path / "a.jsonl", [row])
    with pytest.raises(BadDataset, match=why):
        opened(path, words, ["0", "1"], **options)


def test_a_sentence_alone_is_a_text(tmp_path: Path, words: Words) -> None:
    path = write(tmp_path / "a.jsonl", [{"sentence": "w1", "label": 1}])
    assert "a document is 'sentence'" in opened(path, words, "ab").describe()[0]


# ---- classes of words


def test_each_word_has_its_class_at_its_first_token(tmp_path: Path, words: Words) -> None:
    rows = [{"tokens": ["w1", "w2 w3", "w4"], "ner_tags": [2, 0, 1]}]
    path = write(tmp_path / "a.jsonl", rows)
    assert found_in(path, EACH) == ("0", "1", "2")
    data = opened(path, words, "abc", EACH)
    samples = samples_in(np.array(data.samples(8, VOCAB).tokens))
    assert samples.labels.tolist() == [[-100, 2, 0, -100, 1]]
    assert "classes of its words are 'ner_tags'" in data.describe()[0]


def test_a_document_of_one_word_is_one_of_words(tmp_path: Path, words: Words) -> None:
    path = write(tmp_path / "a.jsonl", [{"tokens": ["w1 w2"], "tags": [1]}])
    samples = samples_in(np.array(opened(path, words, "abc", EACH).samples(8, VOCAB).tokens))
    assert samples.labels.tolist() == [[-100, 1, -100]]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"tokens": ["w1"], "tags": [0, 1]}, "lists of one length"),
        ({"tokens": ["w1"], "tags": 0}, "lists of one length, got a list and a number"),
        ({"tokens": [1], "tags": [0]}, "expected 'tokens' to be a list of words"),
        ({"tokens": "w1", "tags": 0}, "lists of one length, got text and a number"),
    ],
)
def test_words_without_their_classes_are_refused(
    tmp_path: Path, words: Words, row: object, why: str
) -> None:
    path = write(tmp_path / "a.jsonl", [row])
    with pytest.raises(BadDataset, match=why):
        opened(path, words, "abc", EACH, data_format=DataFormat.JSONL)


# ---- columns that change what a row means


def test_a_row_of_weight_0_is_left_out(tmp_path: Path, words: Words) -> None:
    rows = [{"text": "w1", "label": 0}, {"text": "w2", "label": 1, "weight": 0.0}]
    samples = opened(write(tmp_path / "a.jsonl", rows), words, ("0", "1")).samples(4, VOCAB)
    assert len(samples.tokens) == 1
    assert "1 sample without learned tokens left out" in samples.words
    rows[1]["weight"] = 0.5
    data = opened(write(tmp_path / "b.jsonl", rows), words, ("0", "1"))
    with pytest.raises(BadDataset, match="line 2: expected 'weight' to be 0 or 1"):
        data.samples(4, VOCAB)


def test_a_text_beside_an_image_is_refused(tmp_path: Path, words: Words) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "w1", "label": 0, "image": "a.png"}])
    with pytest.raises(BadDataset, match=r"line 1: 'image' holds media.*--remove-columns image "):
        opened(path, words, ("0", "1"))
    assert opened(path, words, ("0", "1"), remove_columns="image").describe()
