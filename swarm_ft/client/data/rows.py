"""Files that people write and read, row by row: JSON, CSV, lines; and plain text as a whole.

Line by line and by the standard library, so that a row is what the file says and an error names
its line. (`datasets` makes dates of text that looks like one, nothing of `NA` in a CSV, and 7 of
`007`; docs/data.md.)
"""

from __future__ import annotations

import codecs
import csv
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from swarm_ft.client.data.files import Files, reason, refused
from swarm_ft.client.options import DataFormat, ReadOptions
from swarm_ft.errors import BadDataset

LONGEST_FIELD = 1 << 30
"""Of a CSV, in characters; the standard library's own bound is 128 Ki."""
LONGEST_NAME = 64
"""Of a column. A longer one is a text: the file's first line holds no names."""
TEXT_COLUMN = "text"
"""Of rows that have no columns of their own."""


class Row(NamedTuple):
    """One row.

    Attributes:
        values: by column.
        place: where it stands, for errors: `dataset 'notes.jsonl', line 17`.
        done: how much of all data was read with it, from 0 to 1; None if that is not known.
    """

    values: Mapping[str, object]
    place: str
    done: float | None


# ---- plain text


def read_text(path: str, files: Files) -> str:
    """UTF-8 files as they are, joined by newlines.

    Raises:
        BadDataset: one is unreadable, not UTF-8, or there is no text in them, at `path`.
    """
    text = "\n".join(read_file(file) for file in files.paths)
    if not text.strip():
        raise refused(path, "expected text, found none; the data is empty")
    return text


def read_file(path: Path) -> str:
    """One UTF-8 file as it is.

    Raises:
        BadDataset: it is missing, unreadable or not UTF-8.
    """
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as exc:
        raise refused(path, f"cannot be read: {reason(exc)}") from exc
    except UnicodeDecodeError as exc:
        raise refused(
            path,
            f"expected UTF-8 text, got another encoding at byte {exc.start} ({exc.reason}); "
            "convert the file to UTF-8",
        ) from exc


# ---- rows


def file_rows(files: Files, options: ReadOptions) -> Iterator[Row]:
    """The rows of all files.

    Raises:
        BadDataset: a file cannot be read, is not UTF-8, or not what its format says; names the
            line.
    """
    before, total = 0, max(1, sum(map(_size_of, files.paths)))
    for path in files.paths:
        size = _size_of(path)
        try:
            for row in _READERS[files.format](path, options):
                yield row._replace(done=(before + size * (row.done or 0.0)) / total)
        except OSError as exc:
            raise refused(path, f"cannot be read: {reason(exc)}") from exc
        before += size


def _size_of(path: Path) -> int:
    """Bytes; whoever opens the file tells why it cannot be read."""
    return path.stat().st_size if path.exists() else 0


class _Lines:
    """The lines of a UTF-8 file, and how far it was read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._size = max(1, _size_of(path))
        self._num_bytes = 0
        self.number = 0

    @property
    def done(self) -> float:
        return self._num_bytes / self._size

    @property
    def place(self) -> str:
        return f"dataset '{self._path}', line {self.number}"

    def __iter__(self) -> Iterator[str]:
        with self._path.open("rb") as file:
            for self.number, line in enumerate(file, 1):
                self._num_bytes += len(line)
                # A mark that Windows puts in front.
                letters = line.removeprefix(codecs.BOM_UTF8) if self.number == 1 else line
                try:
                    yield letters.decode("utf-8")
                except UnicodeDecodeError as exc:
                    raise self.refused(
                        f"expected UTF-8, got another encoding ({exc.reason}); convert the file"
                    ) from exc

    def refused(self, why: str) -> BadDataset:
        return BadDataset(f"{self.place}: {why}")


def _text_lines(path: Path, _options: ReadOptions) -> Iterator[Row]:
    lines = _Lines(path)
    for line in lines:
        if line.strip():
            yield Row({TEXT_COLUMN: line.rstrip("\r\n")}, lines.place, lines.done)


def _json_lines(path: Path, _options: ReadOptions) -> Iterator[Row]:
    lines = _Lines(path)
    for line in lines:
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as exc:
            why = getattr(exc, "msg", str(exc))
            raise lines.refused(f"expected a JSON object in one line ({why})") from exc
        if not isinstance(values, dict):
            raise lines.refused(f"expected a JSON object, got {kind_of(values)}")
        yield Row(values, lines.place, lines.done)


def _json(path: Path, options: ReadOptions) -> Iterator[Row]:
    """An array of objects, read as a whole; or, as many call it JSON too, an object a line."""
    with path.open("rb") as file:
        is_array = file.read(1 << 12).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
    if not is_array:
        yield from _json_lines(path, options)
        return
    try:
        rows = json.loads(read_file(path).removeprefix("\ufeff"))
    except json.JSONDecodeError as exc:
        raise refused(path, f"line {exc.lineno}: expected JSON ({exc.msg})") from exc
    except RecursionError as exc:
        raise refused(path, f"expected an array of JSON objects ({exc})") from exc
    for number, values in enumerate(rows, 1):
        place = f"dataset '{path}', row {number}"
        if not isinstance(values, dict):
            raise BadDataset(f"{place}: expected a JSON object, got {kind_of(values)}")
        yield Row(values, place, number / len(rows))


def _csv(path: Path, options: ReadOptions, delimiter: str = ",") -> Iterator[Row]:
    csv.field_size_limit(LONGEST_FIELD)
    lines = _Lines(path)
    records = csv.reader(
        lines,
        delimiter=delimiter,
        quoting=csv.QUOTE_MINIMAL if options.quotes else csv.QUOTE_NONE,
        strict=True,
    )
    try:
        names = _column_names(lines, records, options)
        for record in records:
            if not record:
                continue
            if len(record) != len(names):
                raise lines.refused(f"expected {len(names)} columns, got {len(record)}")
            yield Row(dict(zip(names, record, strict=True)), lines.place, lines.done)
    except csv.Error as exc:
        raise lines.refused(
            f"{exc}; --no-quotes reads quotes as letters like others"
            if options.quotes
            else f"{exc}"
        ) from exc


def _column_names(lines: _Lines, records: Iterator[list[str]], options: ReadOptions) -> list[str]:
    """As given, or the first line, if these can be names."""
    if options.column_names is not None:
        return options.column_names.split(",")
    names = next(records, [])
    if not names:
        raise lines.refused("expected a line with the columns' names, found none")
    # The first one may be empty: so pandas calls its index.
    for place, name in enumerate(names):
        is_number = name.strip().replace(".", "", 1).isdigit()
        if (not name and place) or is_number or len(name) > LONGEST_NAME or names.count(name) > 1:
            raise lines.refused(
                f"expected the columns' names, got '{name[:LONGEST_NAME]}'; where the file has "
                "none, give them: --column-names A,B,..."
            )
    return names


def _tsv(path: Path, options: ReadOptions) -> Iterator[Row]:
    return _csv(path, options, "\t")


_READERS: Mapping[DataFormat, Callable[[Path, ReadOptions], Iterator[Row]]] = {
    DataFormat.LINES: _text_lines,
    DataFormat.JSONL: _json_lines,
    DataFormat.JSON: _json,
    DataFormat.CSV: _csv,
    DataFormat.TSV: _tsv,
}


def kind_of(value: object) -> str:
    """What a value is, in words."""
    kinds = {str: "text", bool: "true or false", int: "a number", float: "a number"}
    kinds |= {list: "a list", dict: "an object", type(None): "nothing"}
    return kinds.get(type(value), f"a {type(value).__name__}")
