"""What lies at a path: files of one format and of one split. Looks into none but plain text."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from swarm_ft.client.data.holdout import Part
from swarm_ft.client.data.text_files import (
    COMPRESSED_SUFFIXES,
    HEAD_BYTES,
    head_of,
    reason,
    refused,
    uncompressed_name,
)
from swarm_ft.client.options import DataFormat

if TYPE_CHECKING:
    from swarm_ft.errors import BadDataset

FORMAT_OF = {
    ".txt": DataFormat.TEXT,
    ".jsonl": DataFormat.JSONL,
    ".ndjson": DataFormat.JSONL,
    ".json": DataFormat.JSON,
    ".csv": DataFormat.CSV,
    ".tsv": DataFormat.TSV,
    ".parquet": DataFormat.PARQUET,
    ".arrow": DataFormat.ARROW,
}
STORED = (DataFormat.PARQUET, DataFormat.ARROW)
"""Formats that are no text."""
DATA_NAMES = f"{', '.join(FORMAT_OF)}, or one of these with {', '.join(COMPRESSED_SUFFIXES)}"
ALSO_TEXT = ("", ".text", ".md")
"""Of a file that is named itself; in a directory they are no data."""
NO_DATA = ("dataset_info.json", "dataset_infos.json", "config.json")
"""Beside the data in directories that other tools write."""
TRAIN = "train"
SPLIT_WORDS = {
    "train": TRAIN,
    "training": TRAIN,
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
    "eval": "test",
    "evaluation": "test",
}
"""What a file's name says of its split; the same words as in the library `datasets`."""
_SHARD = re.compile(r"(?P<split>.+)-\d{5}-of-\d{5}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What is asked for.

    Attributes:
        split: its name; None takes the only one, or the first of `instead` that is there.
        instead: names of splits.
        format: None goes by the names of files.
        part: the documents that are used; None uses all.
    """

    split: str | None = None
    instead: tuple[str, ...] = (TRAIN,)
    format: DataFormat | None = None
    part: Part | None = None

    def choose(self, path: str, splits: Iterable[str]) -> str:
        """One of the splits that there are.

        Raises:
            BadDataset: it is not there, or it is not clear which one is meant.
        """
        names = list(splits)
        if self.split in names:
            return str(self.split)
        told = ", ".join(sorted(names))
        if self.split is not None:
            raise refused(path, f"has no split '{self.split}'; it has {told}")
        if len(names) == 1:
            return names[0]
        for name in self.instead:
            if name in names:
                return name
        raise refused(path, f"expected --split to be one of {told}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Files:
    """Files of one format, in order.

    Attributes:
        split: by their names; empty where these say nothing, and all were taken.
        inside: which split to take where one file holds several.
    """

    format: DataFormat
    paths: tuple[Path, ...]
    split: str = ""
    inside: Wanted = Wanted()


def find_files(path: str, wanted: Wanted) -> Files:
    """A file, or what a directory has of one format and split, sorted by name.

    Plain text is `.txt` files of the directory itself; of other formats, those below it too.

    Raises:
        BadDataset: there are none, of several formats, or of an unknown one; there is no such
            split; or what is called plain text has columns.
    """
    try:
        if Path(path).is_dir():
            found = _in_directory(Path(path), wanted)
        else:
            with Path(path).open("rb"):  # here, where all errors of paths are told
                kind = wanted.format or _format_of(Path(path))
            found = Files(format=kind, paths=(Path(path),), inside=wanted)
        if wanted.format is None and found.format is DataFormat.TEXT:
            for file in found.paths:
                check_plain(file)
    except FileNotFoundError as exc:
        raise _missing(path) from exc
    except OSError as exc:
        raise refused(path, f"cannot be read: {reason(exc)}") from exc
    for file in found.paths:
        _check_compression(file, found.format)
    has_splits = Path(path).is_dir() or found.format is DataFormat.JSON
    if not has_splits and wanted.split not in (None, TRAIN):
        raise no_split(path, wanted)
    return found


def check_place(path: str) -> None:
    """Check that data lies where its text can only be a path; no file is opened.

    Raises:
        BadDataset: nothing lies there.
    """
    place = Path(path)
    is_file = format_named(place) is not None or ("/" not in path and place.suffix)
    is_path = place.is_absolute() or path.startswith(".") or is_file
    if is_path and not place.exists():
        raise _missing(path)


def _missing(path: str) -> BadDataset:
    return refused(path, f"no such file or directory; expected {DATA_NAMES}, or a dataset's id")


def no_split(path: str | Path, wanted: Wanted) -> BadDataset:
    """Make the error for a split that a file without splits was asked for."""
    return refused(path, f"has no split '{wanted.split}'; one file is the split '{TRAIN}'")


def format_named(path: Path) -> DataFormat | None:
    """Return the format that a file's name tells, compressed or not."""
    return FORMAT_OF.get(uncompressed_name(path).suffix.lower())


def _format_of(path: Path) -> DataFormat:
    suffix = uncompressed_name(path).suffix.lower()
    if suffix in ALSO_TEXT:
        return DataFormat.TEXT
    if suffix not in FORMAT_OF:
        raise refused(
            path,
            f"unknown extension '{suffix}'; expected {DATA_NAMES}; --data-format says "
            "what it is, and --data-format text reads it as plain text",
        )
    return FORMAT_OF[suffix]


def _check_compression(path: Path, found: DataFormat) -> None:
    if found in STORED and path.suffix.lower() in COMPRESSED_SUFFIXES:
        raise refused(
            path, f"expected {found.value} that is compressed within, if at all; decompress it"
        )


# ---- directories


def _in_directory(directory: Path, wanted: Wanted) -> Files:
    by_format = _by_format(directory)
    if wanted.format is DataFormat.LINES:
        files = by_format.get(DataFormat.TEXT, [])
    elif wanted.format is not None:
        files = by_format.get(wanted.format, [])
    elif len(by_format) > 1:
        told = " and ".join(f"'{files[0].name}'" for files in by_format.values())
        raise refused(directory, f"has files of several formats, {told}; give --data-format")
    else:
        files = next(iter(by_format.values()), [])
    if not files:
        kind = f"{wanted.format.name.lower()} " if wanted.format else ""
        raise refused(
            directory,
            f"expected {kind}files in this directory, found none; data is {DATA_NAMES}",
        )
    _check_copies(directory, files)
    found = wanted.format or _format_of(files[0])
    if found is DataFormat.TEXT and wanted.split is None:
        return Files(format=found, paths=tuple(files))
    by_split = splits_of(directory, files)
    split = wanted.choose(str(directory), by_split)
    return Files(
        format=found,
        paths=tuple(by_split[split]),
        split=split if len(by_split) > 1 else "",
    )


def _by_format(directory: Path) -> dict[DataFormat, list[Path]]:
    found: dict[DataFormat, list[Path]] = {}
    for file in sorted(directory.rglob("*")):
        inside = file.relative_to(directory)
        plain, kind = uncompressed_name(file), format_named(file)
        is_hidden = any(part.startswith((".", "_")) for part in inside.parts)
        if kind is None or is_hidden or plain.name in NO_DATA or not file.is_file():
            continue
        if kind is DataFormat.TEXT and (len(inside.parts) > 1 or plain.suffix != ".txt"):
            continue
        found.setdefault(kind, []).append(file)
    return found


def _check_copies(directory: Path, files: Iterable[Path]) -> None:
    """Refuse a file beside its own compressed copy: its rows would count twice."""
    seen: dict[Path, Path] = {}
    for file in files:
        other = seen.setdefault(uncompressed_name(file), file)
        if other is not file:
            raise refused(
                directory, f"has '{other.name}' and '{file.name}', the same twice; remove one"
            )


def splits_of(directory: Path, files: Sequence[Path]) -> Mapping[str, list[Path]]:
    """Files by split, as their names and folders tell; what says nothing belongs to `train`."""
    found: dict[str, list[Path]] = {}
    for file in files:
        inside = file.relative_to(directory)
        names = (inside.name.partition(".")[0], *reversed(inside.parts[:-1]))
        split = next(filter(None, map(_split_in, names)), TRAIN)
        found.setdefault(split, []).append(file)
    return found


def _split_in(name: str) -> str:
    """The split that one name tells; empty if it tells none."""
    shard = _SHARD.fullmatch(name)
    words = re.split(r"[-._ 0-9]+", (shard["split"] if shard else name).lower())
    known = next((SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS), "")
    own = shard["split"] if shard and shard["split"] != "data" else ""
    return known or own


# ---- plain text that is none

SNIFFED_LINES = 50
FEWEST_LINES = 3
"""With the same number of columns each, before they are taken for a table."""


def check_plain(path: Path) -> None:
    """Refuse a file that is called plain text and is a table: its braces would be learnt.

    Raises:
        BadDataset: it looks like one; says which option reads it.
        OSError: it cannot be read.
    """
    head = head_of(path, HEAD_BYTES + 1)
    is_whole = len(head) <= HEAD_BYTES
    found = looks_like(head[:HEAD_BYTES].decode("utf-8", errors="replace"), is_whole)
    if found is not None:
        raise refused(
            path,
            f"looks like {found.value}, not plain text: --data-format {found.name.lower()} "
            "reads it, --data-format text learns it as it is",
        )


def looks_like(head: str, is_whole: bool = True) -> DataFormat | None:
    """The format of a file that begins with `head`; None if that is plain text."""
    head = head.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    lines = [line for line in head.split("\n") if line.strip()]
    if not is_whole:
        lines.pop()
    lines = lines[:SNIFFED_LINES]
    if not lines:
        return None
    if all(map(_is_object, lines)):
        return DataFormat.JSONL
    if re.match(r"\s*\[\s*\{\s*\"", head) or re.match(r"\s*\{\s*\"[^\"\n]*\"\s*:", head):
        return DataFormat.JSON
    if len(lines) < FEWEST_LINES:
        return None
    if len({line.count("\t") for line in lines}) == 1 and "\t" in lines[0].strip():
        return DataFormat.TSV
    return DataFormat.CSV if _is_csv(lines) else None


def _is_object(line: str) -> bool:
    try:
        return line.lstrip().startswith("{") and isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _is_csv(lines: Sequence[str]) -> bool:
    """Whether all rows have as many fields, as a table's have and prose has by chance.

    Where spaces follow commas, as in prose, the first row has to name columns.
    """
    rows = list(_csv_rows(lines))
    if _is_table(rows) and not any(field.startswith(" ") for row in rows for field in row):
        return True
    padded = list(_csv_rows(lines, skipinitialspace=True))
    return any(map(_is_table, (rows, padded))) and _names_columns(rows[0])


def _is_table(rows: Sequence[Sequence[str]]) -> bool:
    widths = {len(row) for row in rows}
    return len(rows) >= FEWEST_LINES and len(widths) == 1 and widths != {1}


def _names_columns(header: Sequence[str]) -> bool:
    """Whether these are different identifiers, a word each."""
    names = [re.sub(r"[-.]", "_", field.strip()) for field in header]
    is_sentence = header[1].startswith(" ") and len({n[:1].isupper() for n in names}) > 1
    return all(map(str.isidentifier, names)) and len(set(names)) == len(names) and not is_sentence


def _csv_rows(lines: Sequence[str], *, skipinitialspace: bool = False) -> Iterator[list[str]]:
    ended = (f"{line}\n" for line in lines)
    try:
        yield from csv.reader(ended, strict=True, skipinitialspace=skipinitialspace)
    except csv.Error:
        return  # the last quote may be closed below
