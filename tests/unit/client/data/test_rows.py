"""Rows of JSON, CSV and lines have the file's values and their location."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_ft.client.data.files import Files
from swarm_ft.client.data.rows import Row, file_rows
from swarm_ft.client.options import DataFormat, ReadOptions
from swarm_ft.errors import BadDataset


def rows_of(directory: Path, kind: DataFormat, *contents: bytes | str, **options: Any) -> list[Row]:
    paths = []
    for number, content in enumerate(contents):
        paths.append(directory / f"{number}.data")
        paths[-1].write_bytes(content.encode() if isinstance(content, str) else content)
    return list(file_rows(Files(format=kind, paths=tuple(paths)), ReadOptions(**options)))


def values_of(*arguments: Any, **options: Any) -> list[dict[str, object]]:
    return [dict(row.values) for row in rows_of(*arguments, **options)]


def test_json_lines_are_rows_with_their_place(tmp_path: Path) -> None:
    first, second, third = rows_of(
        tmp_path, DataFormat.JSONL, '\ufeff{"text": "a"}\n\n{"text": "b"}\r\n', '{"text": "c"}'
    )
    assert [dict(row.values) for row in (first, second, third)] == [
        {"text": "a"},
        {"text": "b"},
        {"text": "c"},
    ]
    assert second.place == f"dataset '{tmp_path / '0.data'}', line 3"
    assert third.place == f"dataset '{tmp_path / '1.data'}', line 1"
    shares = [row.done for row in (first, second, third)]
    assert shares == sorted(shares, key=lambda share: share or 0.0)
    assert shares[-1] == 1.0


def test_nothing_is_made_of_values(tmp_path: Path) -> None:
    """Text that looks like a date, a number or a missing value stays text."""
    json_row = {"a": "2020-01-01", "b": "NA", "c": "007", "d": None}
    assert values_of(tmp_path, DataFormat.JSONL, json.dumps(json_row)) == [json_row]
    row = {"a": "2020-01-01", "b": "NA", "c": "007", "d": ""}
    assert values_of(tmp_path, DataFormat.CSV, "a,b,c,d\n2020-01-01,NA,007,\n") == [row]


@pytest.mark.parametrize("text", ['[{"a": 1}, {"a": 2}]', '\n[\n{"a": 1},\n{"a": 2}\n]\n'])
def test_json_is_an_array_of_rows(tmp_path: Path, text: str) -> None:
    assert values_of(tmp_path, DataFormat.JSON, text) == [{"a": 1}, {"a": 2}]


def test_json_with_an_object_a_line_is_read_as_such(tmp_path: Path) -> None:
    assert values_of(tmp_path, DataFormat.JSON, '{"a": 1}\n{"a": 2}\n') == [{"a": 1}, {"a": 2}]


def test_lines_are_documents_and_blank_ones_are_none(tmp_path: Path) -> None:
    assert values_of(tmp_path, DataFormat.LINES, " one \r\n\n \ntwo") == [
        {"text": " one "},
        {"text": "two"},
    ]


@given(
    st.lists(
        st.tuples(*[st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\0"))])
        .map(lambda fields: ("x", *fields))
        .map(list),
        min_size=1,
    ),
    st.sampled_from([(DataFormat.CSV, ","), (DataFormat.TSV, "\t")]),
)
def test_what_a_writer_writes_is_read(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[str]], kind: tuple[DataFormat, str]
) -> None:
    path = tmp_path_factory.mktemp("csv")
    if kind[1] == "\t":  # in a TSV, quotes around tabs and line ends are refused
        rows = [[field.replace("\t", " ") for field in row] for row in rows]
    with (path / "made").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter=kind[1]).writerows([["a", "b"], *rows])
    made = (path / "made").read_bytes()
    assert values_of(path, kind[0], made) == [dict(zip("ab", row, strict=True)) for row in rows]


def test_columns_may_be_named_and_quotes_be_letters(tmp_path: Path) -> None:
    text = '1\t"Shut\tup\n2\tHe said "no"\t.\n'
    assert values_of(tmp_path, DataFormat.TSV, text, column_names="n,a,b", quotes=False) == [
        {"n": "1", "a": '"Shut', "b": "up"},
        {"n": "2", "a": 'He said "no"', "b": "."},
    ]


def test_the_index_that_pandas_writes_is_a_column(tmp_path: Path) -> None:
    assert values_of(tmp_path, DataFormat.CSV, ",text\n0,a\n") == [{"": "0", "text": "a"}]


@pytest.mark.parametrize(
    ("kind", "content", "message"),
    [
        (DataFormat.JSONL, '{"a": 1}\n{"a": \n', "line 2: expected a JSON object in one line"),
        (DataFormat.JSONL, '{"a": 1}\n[1]\n', "line 2: expected a JSON object, got a list"),
        (DataFormat.JSONL, b'{"a": "x"}\n{"a": "\xfc"}\n', "line 2: expected UTF-8"),
        (DataFormat.JSONL, '{"a": 1}'.encode("utf-16"), "line 1: expected UTF-8"),
        (DataFormat.JSONL, "[" * 200_000, "line 1: expected a JSON object in one line"),
        (DataFormat.JSON, '[{"a": 1},\n{"a": }]', "line 2: expected JSON"),
        (DataFormat.JSON, '[{"a": 1}, "b"]', "row 2: expected a JSON object, got text"),
        (DataFormat.JSON, b'[{"a": "\xfc"}]', "line 1: expected UTF-8"),
        (DataFormat.JSON, b'[{"a": 1},\n{"a": "\xfc"}]', "expected UTF-8 text"),
        (DataFormat.CSV, "", "line 0: expected a line with the columns' names, found none"),
        (DataFormat.CSV, "a,b\n1,2\n1,2,3\n", "line 3: expected 2 columns, got 3"),
        (DataFormat.CSV, 'a,b\n1,"x" y\n', "line 2: .*--no-quotes"),
        (DataFormat.CSV, 'a,b\n1,"x\n', "line 2: .*--no-quotes"),
        (DataFormat.CSV, "a,a\n", "line 1: expected the columns' names, got 'a'.*--column-names"),
        (DataFormat.CSV, "a,1.5\n", "names, got '1.5'"),
        (DataFormat.TSV, "gj04\t*\t\tx\n", "names, got ''"),
        (DataFormat.TSV, f"a\t{'long ' * 20}\n", "names, got 'long"),
        (DataFormat.CSV, b"a,b\n1,\xfc\n", "line 2: expected UTF-8"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(
    tmp_path: Path, kind: DataFormat, content: bytes | str, message: str
) -> None:
    with pytest.raises(BadDataset, match=message) as raised:
        rows_of(tmp_path, kind, content)
    assert "\n" not in raised.value.message


def test_a_file_that_goes_away_is_told(tmp_path: Path) -> None:
    (tmp_path / "a").write_text('{"a": 1}\n')
    rows = file_rows(Files(format=DataFormat.JSONL, paths=(tmp_path / "a",)), ReadOptions())
    (tmp_path / "a").unlink()
    with pytest.raises(BadDataset, match="cannot be read: No such file"):
        list(rows)
