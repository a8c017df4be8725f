"""Selection of files, and tables that are named like plain text."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_ft.client.data.files import DataSelection, find_files, looks_like, splits_of
from swarm_ft.client.options import DataFormat
from swarm_ft.errors import BadDataset


def lay(directory: Path, *names: str) -> Path:
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text("x")
    return directory


def found(directory: Path, **wanted: object) -> list[str]:
    files = find_files(str(directory), DataSelection(**wanted))  # type: ignore[arg-type]
    return [str(path.relative_to(directory)) for path in files.paths]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.jsonl", DataFormat.JSONL),
        ("a.ndjson", DataFormat.JSONL),
        ("a.JSON", DataFormat.JSON),
        ("a.csv", DataFormat.CSV),
        ("a.tsv", DataFormat.TSV),
        ("a.parquet", DataFormat.PARQUET),
        ("a.arrow", DataFormat.ARROW),
        ("a.txt", DataFormat.TEXT),
        ("README.md", DataFormat.TEXT),
        ("notes", DataFormat.TEXT),
    ],
)
def test_a_files_name_tells_its_format(tmp_path: Path, name: str, expected: DataFormat) -> None:
    lay(tmp_path, name)
    assert find_files(str(tmp_path / name), DataSelection()).format is expected


def test_an_option_wins_over_the_name(tmp_path: Path) -> None:
    lay(tmp_path, "a.dat")
    wanted = DataSelection(format=DataFormat.TSV)
    assert find_files(str(tmp_path / "a.dat"), wanted).format is DataFormat.TSV


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (["a.jsonl", "b/c.jsonl"], {"train": ["a.jsonl", "b/c.jsonl"]}),
        (
            ["train.jsonl", "dev.jsonl", "my-test-1.jsonl"],
            {"train": ["train.jsonl"], "validation": ["dev.jsonl"], "test": ["my-test-1.jsonl"]},
        ),
        (
            ["data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl"],
            {"train": ["data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl"]},
        ),
        (
            ["train/a.jsonl", "validation/a.jsonl"],
            {"train": ["train/a.jsonl"], "validation": ["validation/a.jsonl"]},
        ),
        (["data/sft_a-00000-of-00001.jsonl"], {"sft_a": ["data/sft_a-00000-of-00001.jsonl"]}),
        (["data-00000-of-00001.jsonl"], {"train": ["data-00000-of-00001.jsonl"]}),
        (["contest.jsonl", "latest.jsonl"], {"train": ["contest.jsonl", "latest.jsonl"]}),
    ],
)
def test_names_and_folders_tell_splits(names: list[str], splits: dict[str, list[str]]) -> None:
    top = Path("top")
    found_splits = splits_of(top, [top / name for name in names])
    assert {
        split: [str(p.relative_to(top)) for p in paths] for split, paths in found_splits.items()
    } == (splits)


def test_of_a_directory_one_split_is_taken(tmp_path: Path) -> None:
    lay(tmp_path, "train.csv", "test.csv", "dataset_info.json", ".hidden.json", "README.md")
    assert found(tmp_path) == ["train.csv"]
    assert found(tmp_path, split="test") == ["test.csv"]
    assert found(tmp_path, preferred_splits=("validation", "test")) == ["test.csv"]
    with pytest.raises(BadDataset, match="no split 'validation'; it has test, train"):
        found(tmp_path, split="validation")


def test_a_split_that_nobody_chose_is_asked_for(tmp_path: Path) -> None:
    lay(tmp_path, "dev.csv", "test.csv")
    with pytest.raises(BadDataset, match="expected --split to be one of test, validation"):
        found(tmp_path)


def test_texts_have_splits_only_if_one_is_asked_for(tmp_path: Path) -> None:
    lay(tmp_path, "notes.txt", "test.txt")
    assert found(tmp_path) == ["notes.txt", "test.txt"]
    assert found(tmp_path, split="test") == ["test.txt"]


def test_several_formats_in_a_directory_are_not_mixed(tmp_path: Path) -> None:
    lay(tmp_path, "a.jsonl", "b.parquet", "c.txt")
    with pytest.raises(BadDataset, match=r"'a\.jsonl' and 'b\.parquet' and 'c\.txt'.*--data-form"):
        found(tmp_path)
    assert found(tmp_path, format=DataFormat.PARQUET) == ["b.parquet"]
    assert found(tmp_path, format=DataFormat.LINES) == ["c.txt"]


@pytest.mark.parametrize("names", [(), ("a.pdf",), (".a.txt",), ("README.md",)])
def test_a_directory_without_data_is_refused(tmp_path: Path, names: tuple[str, ...]) -> None:
    lay(tmp_path, *names)
    with pytest.raises(BadDataset, match=r"in this directory, found none.*\.txt"):
        found(tmp_path)


def test_what_is_not_there_and_what_is_unknown_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadDataset, match="no such file or directory"):
        find_files(str(tmp_path / "absent.txt"), DataSelection())
    lay(tmp_path, "a.pdf", "a.csv")
    with pytest.raises(BadDataset, match=r"unknown extension '\.pdf'.*--data-format text"):
        find_files(str(tmp_path / "a.pdf"), DataSelection())
    with pytest.raises(BadDataset, match="no split 'test'; one file is the split 'train'"):
        find_files(str(tmp_path / "a.csv"), DataSelection(split="test"))


# ---- what looks like a table

TABLES = {
    DataFormat.JSONL: '{"text": "a"}\n{"text": "b"}\n',
    DataFormat.JSON: '[\n  {"text": "a"},\n  {"text": "b"}\n]\n',
    DataFormat.TSV: "gj04\t1\t\tThe sailors rode.\ngj04\t0\t*\tRope the, it.\ncj99\t1\t\tIf so.\n",
    DataFormat.CSV: 'text,label\n"Well, yes.",1\nNo.,0\n',
}


@pytest.mark.parametrize("table", TABLES, ids=str)
def test_a_table_is_known_by_its_look(tmp_path: Path, table: DataFormat) -> None:
    (tmp_path / "a.txt").write_text(TABLES[table])
    option = f"--data-format {table.name.lower()} reads it"
    for path in (tmp_path / "a.txt", tmp_path):
        with pytest.raises(BadDataset, match=option):
            find_files(str(path), DataSelection())
    as_text = DataSelection(format=DataFormat.TEXT)
    assert find_files(str(tmp_path / "a.txt"), as_text).format is DataFormat.TEXT


def test_a_large_file_is_judged_by_its_whole_lines(tmp_path: Path) -> None:
    row = json.dumps({"text": "a" * 10_000})
    assert looks_like(f"{row}\n{row[:5000]}", is_whole=False) is DataFormat.JSONL
    (tmp_path / "a.txt").write_text(f"{row}\n" * 20)
    with pytest.raises(BadDataset, match="JSON lines"):
        find_files(str(tmp_path / "a.txt"), DataSelection())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n\n",
        "One line.",
        "Yes, sir.\nNo, sir.\nWell, sir.\nSo, sir.\n",
        "To be, or not\nto be: that,\nis the question.\n",
        "= Title =\n\n A paragraph , with words .\n",
        "def f(x):\n\treturn x\n\n\ndef g(y):\n\treturn y\n",
        "{not json}\n{nor this}\n",
        "[see below]\n[1] a source\n",
        "a,b\nc,d\n",
        "\n".join(f"Chapter {n}" for n in range(9)),
    ],
)
def test_prose_and_code_are_plain_text(text: str) -> None:
    assert looks_like(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "prompt,completion\nHow far is it?, a mile\nAnd back?, another mile\n",
        "prompt, completion\nHow far is it?, a mile\nAnd back?, another mile\n",
        'prompt, completion\nHow far?, "a mile, or two"\nAnd back?, "more, in the dark"\n',
        'prompt,completion\nHow far?," a mile"\nAnd back?," another"\n',
        "id,Name, city\n1,Anna, Rome\n2,Bert, Oslo\n",
        "Name, Age\nAnna, 31\nBert, 29\n",
        "user-id, t.start\n7, 0.5\n8, 1.5\n",
        "prénom,âge\nZoé, 31\nLéo, 29\n",
    ],
)
def test_a_table_with_spaces_after_its_commas_is_known_by_its_header(text: str) -> None:
    assert looks_like(text) is DataFormat.CSV


@pytest.mark.parametrize(
    "text",
    [
        "The kettle sang, the window shook,\nThe clock, forgotten, struck again,\n"
        "And nobody, that night, would look\nFor what was falling, snow or rain.\n",
        "Down, down the stair\nUp, up the hill\nOut, out to where\nIt all lies still, still\n",
        "Down, below the mill\nBetween the reeds, the boat\nWas lying, white and still\n",
        "Dear Anna, thank you\nThe parcel came, at last\nYours, Bert\n",
        "Hello, world\nI write to you, and hope\nThat you are well, as we are\n",
        "milk, two bottles\nbread, a loaf\neggs, a dozen\n",
        "milk, eggs, flour\nbutter, salt\nsugar, almonds, cream, a lemon\n",
        "Monday, 3 May\nTuesday, 4 May\nWednesday, 5 May\n",
        " The lock , built in 1810 , \n was closed , then filled , \n by the town , in parts , \n",
    ],
)
def test_verse_letters_and_lists_are_plain_text(text: str) -> None:
    assert looks_like(text) is None


@given(st.lists(st.dictionaries(st.text(), st.text() | st.integers(), min_size=1), min_size=1))
def test_all_json_lines_are_known(rows: list[dict[str, object]]) -> None:
    assert looks_like("".join(f"{json.dumps(row)}\n" for row in rows)) is DataFormat.JSONL


@given(
    st.lists(st.tuples(st.integers(), st.text("abc,.\"'", min_size=1)), min_size=3),
)
def test_all_csv_of_a_writer_is_known(rows: list[tuple[int, str]]) -> None:
    file = io.StringIO()
    csv.writer(file).writerows(rows)
    assert looks_like(file.getvalue()) is DataFormat.CSV
