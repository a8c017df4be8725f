"""Text formats read row by row (JSON, CSV, lines), and plain text as a whole.

The standard library reads them line by line, so that values stay as written and errors name the
line. (`datasets` turns text that looks like a date into a date, drops `NA` in a CSV, and reads
`007` as 7; see docs/how-to/prepare-data.md.)
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from swarm_ft.client.data.files import SPLIT_WORDS, TRAIN, DataSelection, Files, no_split
from swarm_ft.client.data.text_files import Lines, bad_dataset, read_file, reason
from swarm_ft.client.options import DataFormat, ReadOptions
from swarm_ft.errors import BadDataset

LONGEST_FIELD = 1 << 30
"""Longest field of a CSV, in characters; the standard library's default is 128 Ki."""
LONGEST_NAME = 64
"""Longest name of a column, in characters. A longer one is text: the first line holds no names."""
TEXT_COLUMN = "text"
"""Column of rows that have no columns of their own."""


class Row(NamedTuple):
    """A row of data.

    Attributes:
        values: Values by column.
        place: Location for errors: `dataset 'notes.jsonl', line 17`.
        done: Share of all data read up to this row, from 0 to 1; None if unknown.
        part: Part of the file that the row belongs to, for people; empty for the whole file.
    """

    values: Mapping[str, object]
    place: str
    done: float | None
    part: str = ""


# ---- plain text


def read_text(path: str, files: Files) -> str:
    """Return the text of UTF-8 files, joined by newlines.

    Raises:
        BadDataset: A file is unreadable or not UTF-8, or all are empty.
    """
    text = "\n".join(read_file(file) for file in files.paths)
    if not text.strip():
        raise bad_dataset(path, "expected text, found none; the data is empty")
    return text


# ---- rows


def file_rows(files: Files, options: ReadOptions) -> Iterator[Row]:
    """Yield the rows of all files.

    Raises:
        BadDataset: A file is unreadable, not UTF-8 or malformed; the message names the line.
    """
    before, total = 0, max(1, sum(map(_size_of, files.paths)))
    for path in files.paths:
        size = _size_of(path)
        try:
            for row in _READERS[files.format](path, options, files.inside):
                yield row._replace(done=(before + size * (row.done or 0.0)) / total)
        except OSError as exc:
            raise bad_dataset(path, f"cannot be read: {reason(exc)}") from exc
        before += size


def _size_of(path: Path) -> int:
    """Return a file's size in bytes; 0 for a missing one, whose reader reports the error."""
    return path.stat().st_size if path.exists() else 0


def _text_lines(path: Path, _options: ReadOptions, _inside: DataSelection) -> Iterator[Row]:
    lines = Lines(path)
    for line in lines:
        if line.strip():
            yield Row({TEXT_COLUMN: line.rstrip("\r\n")}, lines.place, lines.done)


# ---- JSON


def _object_of(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Make a JSON object; refuse duplicate keys, which Python's parser drops silently."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key {twice!a} stands twice in one object")
    return made


_DECODER = json.JSONDecoder(object_pairs_hook=_object_of)


def _json_lines(path: Path, _options: ReadOptions, _inside: DataSelection) -> Iterator[Row]:
    lines = Lines(path)
    for line in lines:
        if not line.strip():
            continue
        try:
            values = _DECODER.decode(line)
        except (ValueError, RecursionError) as exc:
            why = getattr(exc, "msg", str(exc))
            raise lines.error(
                f"expected a JSON object in one line ({why}); --data-format json reads objects "
                "over several lines"
            ) from exc
        if not isinstance(values, dict):
            hint = "; --data-format json reads an array" if isinstance(values, list) else ""
            raise lines.error(f"expected a JSON object, got {describe_type(values)}{hint}")
        yield Row(values, lines.place, lines.done)


def _json(path: Path, options: ReadOptions, inside: DataSelection) -> Iterator[Row]:
    """Yield rows of an object a line, or of a whole file: an array, objects, or a list in one."""
    if _has_object_a_line(path):
        if inside.split not in (None, TRAIN):
            raise no_split(path, inside)
        if options.field is not None:
            raise bad_dataset(
                path, f"--field {options.field}: expected one JSON object, got several"
            )
        yield from _json_lines(path, options, inside)
        return
    rows = _listed_rows(path, _json_values(path), options, inside)
    for number, values in enumerate(rows.values, 1):
        place = f"dataset '{path}', row {number}{rows.origin}"
        if not isinstance(values, dict):
            raise BadDataset(f"{place}: expected a JSON object, got {describe_type(values)}")
        yield Row(values, place, number / len(rows.values), part=rows.part)


def _has_object_a_line(path: Path) -> bool:
    """Return whether the first line is a JSON object and not the only line."""
    filled = (line for line in Lines(path) if line.strip())
    first = next(filled, "")
    try:
        return isinstance(json.loads(first), dict) and next(filled, None) is not None
    except (ValueError, RecursionError):
        return False


def _json_values(path: Path) -> list[object]:
    """Return all JSON values of a file, one after the other."""
    text = read_file(path).removeprefix("\ufeff")
    values, end = [], _SPACE.match(text, 0).end()  # type: ignore[union-attr]
    while end < len(text):
        try:
            value, end = _DECODER.raw_decode(text, end)
        except json.JSONDecodeError as exc:
            raise bad_dataset(path, f"line {exc.lineno}: expected JSON ({exc.msg})") from exc
        except (ValueError, RecursionError) as exc:
            raise bad_dataset(path, f"expected JSON ({exc})") from exc
        values.append(value)
        end = _SPACE.match(text, end).end()  # type: ignore[union-attr]
    return values


_SPACE = re.compile(r"\s*")
ROW_LISTS = frozenset(
    {"data", "dataset", "rows", "examples", "records", "items", "instances", "entries", "samples"}
)
"""Keys under which JSON objects hold the list of rows."""
_LISTS_IN_ROWS = frozenset(
    {"messages", "conversations", "conversation", "prompt", "completion", "chosen", "rejected"}
)
"""Keys of lists of objects within a row; an object that has one is a row itself."""


class _ListedRows(NamedTuple):
    """Values that become rows, and their origin in the file, for people."""

    values: Sequence[object]
    origin: str = ""

    @property
    def part(self) -> str:
        return f"rows{self.origin}" if self.origin else ""


def _listed_rows(
    path: Path, values: list[object], options: ReadOptions, inside: DataSelection
) -> _ListedRows:
    """Return the list of rows in a file's JSON values.

    Raises:
        BadDataset: There is no such list or split, or several lists match.
    """
    top = values[0] if len(values) == 1 else None
    field = options.field
    if field is not None:
        chosen = top.get(field) if isinstance(top, dict) else None
        if not isinstance(chosen, list):
            raise bad_dataset(
                path, f"--field {field}: expected one JSON object with a list '{field}'"
            )
        return _ListedRows(chosen, f" of '{field}'")
    lists = _lists_of_objects(top)
    splits = {name: SPLIT_WORDS[name] for name in lists if name in SPLIT_WORDS}
    if splits and len(splits) == len(lists):
        split = inside.choose(str(path), set(splits.values()))
        rows = [row for name in splits if splits[name] == split for row in lists[name]]
        return _ListedRows(rows, f" of split '{split}'")
    if inside.split not in (None, TRAIN):
        raise no_split(path, inside)
    if isinstance(top, list):
        return _ListedRows(top)
    if not lists or _LISTS_IN_ROWS & set(lists):
        return _ListedRows(values)
    if len(lists) == 1 and ROW_LISTS & set(lists):
        ((name, rows),) = lists.items()
        return _ListedRows(rows, f" of '{name}'")
    names = " or ".join(f"'{name}'" for name in lists)
    raise bad_dataset(
        path,
        f"expected a list of rows, got one object; rows may be in {names}: "
        f"--field {next(iter(lists))} reads them",
    )


def _lists_of_objects(value: object) -> dict[str, list[object]]:
    found = value.items() if isinstance(value, dict) else ()
    return {
        name: one
        for name, one in found
        if isinstance(one, list) and one and isinstance(one[0], dict)
    }


# ---- CSV


def _csv(
    path: Path, options: ReadOptions, _inside: DataSelection, delimiter: str = ","
) -> Iterator[Row]:
    csv.field_size_limit(LONGEST_FIELD)
    lines = Lines(path)
    excel, filled = _excel_delimiter(lines)
    delimiter = options.column_delimiter or excel or delimiter
    records = csv.reader(
        filled,
        delimiter=delimiter,
        quoting=csv.QUOTE_MINIMAL if options.quotes else csv.QUOTE_NONE,
        strict=True,
    )
    start = 1
    try:
        names = _column_names(lines, records, options, delimiter)
        start = lines.number + 1
        for record in records:
            if record:
                _check_record(lines, start, record, names, delimiter)
                yield Row(
                    dict(zip(names, record, strict=True)), lines.place_from(start), lines.done
                )
            start = lines.number + 1
    except csv.Error as exc:
        raise lines.error(_csv_refusal(str(exc), start, options), start) from exc


def _excel_delimiter(lines: Lines) -> tuple[str | None, Iterator[str]]:
    """Read the line `sep=;` that Excel writes first, if present.

    Returns:
        The delimiter, None without that line, and the remaining lines.
    """
    rest = iter(lines)
    first = next(rest, "")
    named = re.fullmatch(r"sep=([^\w\s\"]|\t)\r?\n", first)
    return (named[1], rest) if named else (None, chain([first] if first else [], rest))


def _check_record(
    lines: Lines, start: int, record: list[str], names: list[str], delimiter: str
) -> None:
    if len(record) != len(names):
        hint = _other_delimiter(record, delimiter)
        raise lines.error(f"expected {len(names)} columns, got {len(record)}{hint}", start)
    if delimiter == "\t" and lines.number > start and any(map(_holds_rows, record)):
        raise lines.error(
            "quotes enclose these lines and their tabs as one field; --no-quotes reads quotes as "
            "ordinary letters",
            start,
        )


def _holds_rows(field: str) -> bool:
    """Return whether a field of a TSV looks like several rows that quotes enclose by chance."""
    return "\t" in field and "\n" in field


def _csv_refusal(why: str, start: int, options: ReadOptions) -> str:
    if "new-line" in why:
        return (
            "a field without quotes contains a carriage return; put quotes around the field, "
            "or convert the file's line ends"
        )
    if not options.quotes:
        return why
    if "unexpected end" in why:
        why = f"a quote in line {start} or below is never closed"
    return f"{why}; --no-quotes reads quotes as ordinary letters"


_DELIMITER_OPTIONS = {
    "\t": "--data-format tsv",
    ";": "--delimiter ';'",
    ",": "--delimiter ','",
    "|": "--delimiter '|'",
}


def _other_delimiter(fields: list[str], delimiter: str) -> str:
    """Return a hint at the option that splits a line with one field; empty if none does."""
    options = [
        option
        for other, option in _DELIMITER_OPTIONS.items()
        if len(fields) == 1 and other != delimiter and other in fields[0]
    ]
    return f"; {options[0]} splits it" if options else ""


def _column_names(
    lines: Lines, records: Iterator[list[str]], options: ReadOptions, delimiter: str
) -> list[str]:
    """Return the names from the option or the first line, if that can hold names."""
    if options.column_names is not None:
        return options.column_names.split(",")
    names = next(records, [])
    if not names:
        raise lines.error("expected a line with the columns' names, found none")
    hint = _other_delimiter(names, delimiter)
    if hint:
        raise lines.error(f"expected the columns' names, got one, '{names[0][:200]}'{hint}")
    # The first name may be empty, because pandas writes its index so.
    for place, name in enumerate(names):
        is_number = name.strip().replace(".", "", 1).isdigit()
        if (not name and place) or is_number or len(name) > LONGEST_NAME or names.count(name) > 1:
            raise lines.error(
                f"expected the columns' names, got '{name[:LONGEST_NAME]}'; where the file has "
                "none, give them: --column-names A,B,..."
            )
    return names


def _tsv(path: Path, options: ReadOptions, _inside: DataSelection) -> Iterator[Row]:
    return _csv(path, options, _inside, "\t")


_READERS: Mapping[DataFormat, Callable[[Path, ReadOptions, DataSelection], Iterator[Row]]] = {
    DataFormat.LINES: _text_lines,
    DataFormat.JSONL: _json_lines,
    DataFormat.JSON: _json,
    DataFormat.CSV: _csv,
    DataFormat.TSV: _tsv,
}


def describe_type(value: object) -> str:
    """Return the type of a value, for people."""
    kinds = {str: "text", bool: "true or false", int: "a number", float: "a number"}
    kinds |= {list: "a list", dict: "an object", type(None): "nothing"}
    return kinds.get(type(value), f"a {type(value).__name__}")
