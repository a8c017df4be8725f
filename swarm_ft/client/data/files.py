"""Data files at a path, of one format and one split. Looks into plain text files only."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from swarm_ft.client.data.holdout import DatasetPart
from swarm_ft.client.data.text_files import (
    COMPRESSED_SUFFIXES,
    HEAD_BYTES,
    bad_dataset,
    head_of,
    reason,
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
"""Formats that are not text."""
DATA_NAMES = f"{', '.join(FORMAT_OF)}, or one of these with {', '.join(COMPRESSED_SUFFIXES)}"
ALSO_TEXT = ("", ".text", ".md")
"""Suffixes of plain text for a file that is named directly; a directory's data has none of them."""
NO_DATA = ("dataset_info.json", "dataset_infos.json", "config.json")
"""Files without data that other tools write into dataset directories."""
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
"""Splits by words in file names, as in the library `datasets`."""
_SHARD = re.compile(r"(?P<split>.+)-\d{5}-of-\d{5}")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSelection:
    """Selection of data at a path.

    Attributes:
        split: Name of the split; None for the only one or the first present one of `instead`.
        preferred_splits: Names of splits in order of preference.
        format: Format of files; None goes by their names.
        part: Training or held-out part of the documents; None for all.
    """

    split: str | None = None
    preferred_splits: tuple[str, ...] = (TRAIN,)
    format: DataFormat | None = None
    part: DatasetPart | None = None

    def choose(self, path: str, splits: Iterable[str]) -> str:
        """Return the name of the split to use.

        Raises:
            BadDataset: The split is missing, or several splits match.
        """
        names = list(splits)
        if self.split in names:
            return str(self.split)
        known = ", ".join(sorted(names))
        if self.split is not None:
            raise bad_dataset(path, f"has no split '{self.split}'; it has {known}")
        if len(names) == 1:
            return names[0]
        for name in self.preferred_splits:
            if name in names:
                return name
        raise bad_dataset(path, f"expected --split to be one of {known}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Files:
    """Files of one format, in order.

    Attributes:
        format: Format of the files.
        paths: Paths of the files.
        split: Split by the files' names; empty if the names determine none and all were taken.
        inside: Selection within a file that holds several splits.
    """

    format: DataFormat
    paths: tuple[Path, ...]
    split: str = ""
    inside: DataSelection = DataSelection()


def find_files(path: str, selection: DataSelection) -> Files:
    """Return a file, or the files of a directory of one format and split, sorted by name.

    Plain text is found in the directory itself, other formats in its subdirectories as well.

    Raises:
        BadDataset: There are no files, several formats, an unknown format, no such split, or a
            table
            that is named like plain text.
    """
    try:
        if Path(path).is_dir():
            found = _in_directory(Path(path), selection)
        else:
            with Path(path).open("rb"):  # errors of the path become one line below
                kind = selection.format or _format_of(Path(path))
            found = Files(format=kind, paths=(Path(path),), inside=selection)
        if selection.format is None and found.format is DataFormat.TEXT:
            for file in found.paths:
                check_plain(file)
    except FileNotFoundError as exc:
        raise _missing(path) from exc
    except OSError as exc:
        raise bad_dataset(path, f"cannot be read: {reason(exc)}") from exc
    for file in found.paths:
        _check_compression(file, found.format)
    has_splits = Path(path).is_dir() or found.format is DataFormat.JSON
    if not has_splits and selection.split not in (None, TRAIN):
        raise no_split(path, selection)
    return found


def check_place(path: str) -> None:
    """Check that data exists if its path cannot be a hub id; opens no file.

    Raises:
        BadDataset: The path does not exist.
    """
    place = Path(path)
    is_file = format_named(place) is not None or ("/" not in path and place.suffix)
    is_path = place.is_absolute() or path.startswith(".") or is_file
    if is_path and not place.exists():
        raise _missing(path)


def _missing(path: str) -> BadDataset:
    return bad_dataset(path, f"no such file or directory; expected {DATA_NAMES}, or a dataset's id")


def no_split(path: str | Path, wanted: DataSelection) -> BadDataset:
    """Return the error for a named split of a file without splits."""
    return bad_dataset(path, f"has no split '{wanted.split}'; one file is the split '{TRAIN}'")


def format_named(path: Path) -> DataFormat | None:
    """Return the format of a file by its name, compressed or not; None if unknown."""
    return FORMAT_OF.get(uncompressed_name(path).suffix.lower())


def _format_of(path: Path) -> DataFormat:
    suffix = uncompressed_name(path).suffix.lower()
    if suffix in ALSO_TEXT:
        return DataFormat.TEXT
    if suffix not in FORMAT_OF:
        raise bad_dataset(
            path,
            f"unknown extension '{suffix}'; expected {DATA_NAMES}; --data-format sets the "
            "format, and --data-format text reads it as plain text",
        )
    return FORMAT_OF[suffix]


def _check_compression(path: Path, found: DataFormat) -> None:
    if found in STORED and path.suffix.lower() in COMPRESSED_SUFFIXES:
        raise bad_dataset(
            path, f"expected {found.value} without outer compression; decompress the file"
        )


# ---- directories


def _in_directory(directory: Path, wanted: DataSelection) -> Files:
    by_format = _by_format(directory)
    if wanted.format is DataFormat.LINES:
        files = by_format.get(DataFormat.TEXT, [])
    elif wanted.format is not None:
        files = by_format.get(wanted.format, [])
    elif len(by_format) > 1:
        names = " and ".join(f"'{files[0].name}'" for files in by_format.values())
        raise bad_dataset(directory, f"has files of several formats, {names}; give --data-format")
    else:
        files = next(iter(by_format.values()), [])
    if not files:
        kind = f"{wanted.format.name.lower()} " if wanted.format else ""
        raise bad_dataset(
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
    """Refuse a file next to its own compressed copy, whose rows would count twice."""
    seen: dict[Path, Path] = {}
    for file in files:
        other = seen.setdefault(uncompressed_name(file), file)
        if other is not file:
            raise bad_dataset(
                directory, f"has both '{other.name}' and '{file.name}'; remove one of these copies"
            )


def splits_of(directory: Path, files: Sequence[Path]) -> Mapping[str, list[Path]]:
    """Return files by split, as their names and folders show; other files belong to `train`."""
    found: dict[str, list[Path]] = {}
    for file in files:
        inside = file.relative_to(directory)
        names = (inside.name.partition(".")[0], *reversed(inside.parts[:-1]))
        split = next(filter(None, map(_split_in, names)), TRAIN)
        found.setdefault(split, []).append(file)
    return found


def _split_in(name: str) -> str:
    """Return the split that a name shows; empty for none."""
    shard = _SHARD.fullmatch(name)
    words = re.split(r"[-._ 0-9]+", (shard["split"] if shard else name).lower())
    known = next((SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS), "")
    own = shard["split"] if shard and shard["split"] != "data" else ""
    return known or own


# ---- plain text that is none

SNIFFED_LINES = 50
FEWEST_LINES = 3
"""Minimum number of lines with equal numbers of columns that make a table."""


def check_plain(path: Path) -> None:
    """Refuse a table that is named like plain text, because the model would learn its punctuation.

    Raises:
        BadDataset: The file looks like a table; the message names the option that reads it.
        OSError: The file cannot be read.
    """
    head = head_of(path, HEAD_BYTES + 1)
    is_whole = len(head) <= HEAD_BYTES
    found = looks_like(head[:HEAD_BYTES].decode("utf-8", errors="replace"), is_whole)
    if found is not None:
        raise bad_dataset(
            path,
            f"looks like {found.value}, not plain text: --data-format {found.name.lower()} "
            "reads it, --data-format text learns it as it is",
        )


def looks_like(head: str, is_whole: bool = True) -> DataFormat | None:
    """Return the format of a file that begins with `head`; None for plain text."""
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
    """Whether all rows have equally many fields, as in a table; prose has so only by chance.

    If spaces follow commas, as in prose, the first row must also look like column names.
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
    """Whether these are different identifiers of one word each."""
    names = [re.sub(r"[-.]", "_", field.strip()) for field in header]
    is_sentence = header[1].startswith(" ") and len({n[:1].isupper() for n in names}) > 1
    return all(map(str.isidentifier, names)) and len(set(names)) == len(names) and not is_sentence


def _csv_rows(lines: Sequence[str], *, skipinitialspace: bool = False) -> Iterator[list[str]]:
    ended = (f"{line}\n" for line in lines)
    try:
        yield from csv.reader(ended, strict=True, skipinitialspace=skipinitialspace)
    except csv.Error:
        return  # the last quote may be closed in a later line
