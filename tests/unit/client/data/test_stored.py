"""Parquet, Arrow and saved datasets give the rows of the JSON lines that they were made of.

Sources of the kinds: huggingface/trl#3597 and #6259, PrimeIntellect-ai/prime-rl#885,
NovaSky-AI/SkyRL#1675 and LLaMA-Factory's `glaive_toolcall_en_demo.json` (keys that a table fills up
with null); huggingface/datasets#2457, optimum#197, transformers#2487, #13298 and #15474 (names of
classes, and models with another order of them).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Json, List, Value
from pyarrow import parquet

from swarm_ft.client.data.files import DataSelection, find_files
from swarm_ft.client.data.sources import classes_in, open_dataset
from swarm_ft.client.data.stored import saved_rows, stored_rows
from swarm_ft.client.options import ReadOptions
from swarm_ft.errors import BadDataset
from swarm_ft.protocol.spec.run_spec import TaskKind
from swarm_ft.protocol.spec.sample_rows import NO_LABEL, labels_in
from swarm_ft.protocol.spec.tasks import Classification
from tests.unit.client.data.conftest import Words

NLI = ("entailment", "neutral", "contradiction")
TAGS = ("O", "B-PER", "I-PER")
PAIRS = Features(
    {"premise": Value("string"), "hypothesis": Value("string"), "label": ClassLabel(names=NLI)}
)
NER = Features({"tokens": List(Value("string")), "ner_tags": List(ClassLabel(names=TAGS))})


def as_parquet(data: Dataset, directory: Path) -> Path:
    data.to_parquet(directory / "a.parquet")
    return directory / "a.parquet"


def as_arrow(data: Dataset, directory: Path) -> Path:
    data.save_to_disk(directory / "saved")
    (directory / "arrow").mkdir()
    (file,) = (directory / "saved").glob("*.arrow")
    return file.rename(directory / "arrow" / "a.arrow")


def as_saved(data: Dataset, directory: Path) -> Path:
    data.save_to_disk(directory / "saved")
    return directory / "saved"


def as_saved_splits(data: Dataset, directory: Path) -> Path:
    DatasetDict({"train": data, "test": data}).save_to_disk(directory / "saved")
    return directory / "saved"


STORE = (as_parquet, as_arrow, as_saved, as_saved_splits)
Store = Callable[[Dataset, Path], Path]


def rows_at(path: Path) -> list[dict[str, object]]:
    if path.is_dir():
        found = saved_rows(str(path), DataSelection())
    else:
        found = stored_rows(str(path), find_files(str(path), DataSelection()))
    return [dict(row.values) for row in found.rows]


def names_at(path: Path, kind: TaskKind = TaskKind.CLASSIFICATION, **options: Any) -> object:
    return classes_in(
        str(path), DataSelection(), ReadOptions(**options), Classification(kind, ())
    ).names


def call(**arguments: object) -> dict[str, object]:
    function = {"function": {"name": "f", "arguments": arguments}}
    return {
        "messages": [
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": "", "tool_calls": [function]},
        ]
    }


# ---- keys that a table fills up


@pytest.mark.parametrize("store", STORE)
def test_objects_have_the_keys_that_they_were_written_with(tmp_path: Path, store: Store) -> None:
    written = [
        call(city="Oslo") | {"id": 1},
        call(sum="2+2", how={"digits": 3}) | {"id": None},
        call() | {"id": 2},
        call(how={"unit": "m"}, many=[{"a": 1}, {"b": 2}]) | {"id": 3},
    ]
    assert rows_at(store(Dataset.from_list(written), tmp_path)) == written


def test_the_first_rows_of_a_table_have_no_keys_of_later_ones(tmp_path: Path) -> None:
    filled = [call(city="Oslo", sum=None), call(city=None, sum="2+2")]
    path = tmp_path / "calls.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(filled), path)
    assert rows_at(path) == [call(city="Oslo"), call(sum="2+2")]


def test_json_in_a_column_keeps_its_nulls(tmp_path: Path) -> None:
    tools = [{"name": "f", "default": None}]
    features = Features({"text": Value("string"), "tools": Json(), "more": Value("string")})
    row = {"text": "w1", "tools": tools, "more": json.dumps(tools)}
    data = Dataset.from_dict({name: [value] for name, value in row.items()}, features=features)
    assert rows_at(as_parquet(data, tmp_path)) == [row]


# ---- names of classes


@pytest.mark.parametrize("store", STORE)
def test_class_labels_are_names_in_their_order(tmp_path: Path, words: Words, store: Store) -> None:
    rows = {"premise": ["w1", "w2"], "hypothesis": ["w3", "w4"], "label": [2, 0]}
    path = store(Dataset.from_dict(rows, features=PAIRS), tmp_path)
    assert [row["label"] for row in rows_at(path)] == ["contradiction", "entailment"]
    assert names_at(path) == NLI
    other_order = ("contradiction", "neutral", "entailment")
    task = Classification(TaskKind.CLASSIFICATION, other_order)
    data = open_dataset(str(path), DataSelection(), ReadOptions(), words(), task=task)
    labels = labels_in(data.samples(8, 64).tokens)
    assert labels[labels != NO_LABEL].tolist() == [0, 2]


@pytest.mark.parametrize("store", STORE)
def test_class_labels_of_words_are_names(tmp_path: Path, words: Words, store: Store) -> None:
    rows = {"tokens": [["w1", "w2"]], "ner_tags": [[0, 1]]}
    path = store(Dataset.from_dict(rows, features=NER), tmp_path)
    kind = TaskKind.TOKEN_CLASSIFICATION
    assert rows_at(path) == [{"tokens": ["w1", "w2"], "ner_tags": ["O", "B-PER"]}]
    assert names_at(path, kind) == TAGS
    task = Classification(kind, ("I-PER", "B-PER", "O"))
    data = open_dataset(str(path), DataSelection(), ReadOptions(), words(), task=task)
    labels = labels_in(data.samples(8, 64).tokens)
    assert labels[labels != NO_LABEL].tolist() == [2, 1]


def test_any_column_may_hold_class_labels(tmp_path: Path) -> None:
    features = Features({"text": Value("string"), "stars": ClassLabel(names=["1", "2", "3"])})
    rows = {"text": ["w1", "w2"], "stars": [0, 2]}
    path = as_parquet(Dataset.from_dict(rows, features=features), tmp_path)
    assert [row["stars"] for row in rows_at(path)] == ["1", "3"]
    assert names_at(path, label_column="stars") == ("1", "2", "3")


@pytest.mark.parametrize("label", [-1, None])
def test_a_row_without_its_class_is_refused(
    tmp_path: Path, words: Words, label: int | None
) -> None:
    features = Features({"text": Value("string"), "label": ClassLabel(names=["a", "b"])})
    data = Dataset.from_dict({"text": ["w1", "w2"], "label": [0, label]}, features=features)
    path = str(as_parquet(data, tmp_path))
    task = Classification(TaskKind.CLASSIFICATION, ("a", "b"))
    opened = open_dataset(path, DataSelection(), ReadOptions(), words(), task=task)
    with pytest.raises(BadDataset, match="row 2: expected 'label' to be a class"):
        opened.samples(4, 64)


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
@pytest.mark.parametrize("others", [("b", "a"), None])
def test_files_that_name_classes_otherwise_are_refused(
    tmp_path: Path, suffix: str, others: tuple[str, str] | None
) -> None:
    for number, names in enumerate((("a", "b"), others)):
        label = ClassLabel(names=list(names)) if names else Value("int64")
        features = Features({"text": Value("string"), "label": label})
        data = Dataset.from_dict({"text": ["w1"], "label": [0]}, features=features)
        stored = (as_parquet if suffix == "parquet" else as_arrow)(data, tmp_path / str(number))
        (tmp_path / "all").mkdir(exist_ok=True)
        stored.rename(tmp_path / "all" / f"{number}.{suffix}")
    with pytest.raises(
        BadDataset, match=rf"'1\.{suffix}' and '0\.{suffix}' name their classes diff"
    ):
        names_at(tmp_path / "all")


def test_strings_and_categories_are_names_already(tmp_path: Path) -> None:
    table = pyarrow.table(
        {"text": ["w1", "w2"], "label": pyarrow.array(["b", "a"]).dictionary_encode()}
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    assert names_at(tmp_path / "a.parquet") == ("a", "b")


def test_a_table_without_names_has_numbers(tmp_path: Path) -> None:
    parquet.write_table(
        pyarrow.table({"text": ["w1", "w2"], "label": [1, 0]}), tmp_path / "a.parquet"
    )
    assert names_at(tmp_path / "a.parquet") == ("0", "1")


# ---- a card beside the data, as in a clone of a dataset's repository

CARD = """---
license: mit
dataset_info:
  features:
  - name: text
    dtype: string
  - name: label
    dtype:
      class_label:
        names:
          '0': neg
          '1': pos
---
# A dataset
"""


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", "text,label\nw1,1\nw2,0\n"),
        ("a.jsonl", '{"text": "w1", "label": 1}\n{"text": "w2", "label": 0}\n'),
        ("a.jsonl", '{"text": "w1", "label": "pos"}\n{"text": "w2", "label": 0}\n'),
    ],
)
def test_a_card_names_the_classes_of_files(
    tmp_path: Path, words: Words, name: str, content: str
) -> None:
    (tmp_path / "README.md").write_text(CARD)
    (tmp_path / name).write_text(content)
    assert names_at(tmp_path) == ("neg", "pos")
    task = Classification(TaskKind.CLASSIFICATION, ("pos", "neg"))
    data = open_dataset(str(tmp_path), DataSelection(), ReadOptions(), words(), task=task)
    labels = labels_in(data.samples(8, 64).tokens)
    assert labels[labels != NO_LABEL].tolist() == [0, 1]


def test_a_card_names_classes_of_parquet_that_does_not(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(CARD)
    table = pyarrow.table({"text": ["w1", "w2"], "label": [1, 0]})
    parquet.write_table(table, tmp_path / "a.parquet")
    assert names_at(tmp_path) == ("neg", "pos")


@pytest.mark.parametrize(
    "card", ["# class_label\n", "---\nclass_label: [\n---\n", CARD.replace("label\n", "other\n")]
)
def test_a_card_that_names_no_classes_of_the_column_changes_nothing(
    tmp_path: Path, card: str
) -> None:
    (tmp_path / "README.md").write_text(card)
    (tmp_path / "a.csv").write_text("text,label\nw1,1\nw2,0\n")
    assert names_at(tmp_path) == ("0", "1")
