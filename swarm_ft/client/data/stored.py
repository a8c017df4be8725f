"""Data that the library `datasets` reads: Parquet, Arrow, saved datasets, and the hub.

Only this module imports the library, and only on demand, because the import takes most of a second.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from yaml import YAMLError

from swarm_ft.client.data.files import STORED, DataSelection, Files, check_place, format_named
from swarm_ft.client.data.rows import Row
from swarm_ft.client.data.text_files import bad_dataset, check_library
from swarm_ft.client.options import DataFormat

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_LIBRARY = "datasets"
_SAVED, _ON_HUB = "saved datasets", "datasets on the hub (no such file is here)"
SAVED_FILES = ("state.json", "dataset_dict.json")
"""Files of which `save_to_disk` writes one into a directory."""


def is_saved(path: str) -> bool:
    """Whether `save_to_disk` wrote this directory."""
    return any(Path(path, name).is_file() for name in SAVED_FILES)


def may_be_on_hub(path: str) -> bool:
    """Whether this could be the id of a dataset on the hub and is not a path."""
    return (
        not Path(path).exists()
        and format_named(Path(path)) is None
        and bool(_HUB_ID.fullmatch(path))
    )


def check_data(path: str) -> None:
    """Check the place of data, and that the library for it is installed; open no file.

    Raises:
        BadDataset: Nothing lies there, or the extra `client` is missing and this data needs it.
    """
    check_place(path)
    kind = format_named(Path(path))
    if is_saved(path):
        check_library(path, _LIBRARY, _SAVED)
    elif may_be_on_hub(path):
        check_library(path, _LIBRARY, _ON_HUB)
    elif kind in STORED:
        check_library(path, _LIBRARY, kind.value)


class StoredRows(NamedTuple):
    """Rows of stored data, with its metadata.

    Attributes:
        rows: The rows.
        split: Chosen split; empty if there is only one.
        class_names: Names of classes, for columns of classes or of lists of classes.
    """

    rows: Iterator[Row]
    split: str = ""
    class_names: Mapping[str, tuple[str, ...]] = {}


def saved_rows(path: str, wanted: DataSelection) -> StoredRows:
    """Open one split of a dataset that `save_to_disk` wrote.

    Raises:
        BadDataset: The dataset cannot be read or has no such split; also raised by the rows.
    """
    datasets = _library(path, _SAVED)
    with _refusing(path, datasets):
        found = datasets.load_from_disk(path)
    split, chosen = _chosen(path, found, wanted)
    return _stored(path, chosen, len(chosen), split)


def hub_rows(path: str, subset: str | None, wanted: DataSelection) -> StoredRows:
    """Open one split of a dataset on the hub, streaming its rows.

    Raises:
        BadDataset: See `saved_rows`.
    """
    datasets = _library(path, _ON_HUB)
    with _refusing(path, datasets, "no such file or directory here, and not read from the hub: "):
        found = datasets.load_dataset(path, subset, streaming=True)
    split, chosen = _chosen(path, found, wanted)
    info = (chosen.info.splits or {}).get(split)
    return _stored(path, chosen, info.num_examples if info else None, split)


def stored_rows(path: str, files: Files) -> StoredRows:
    """Open Parquet or Arrow files.

    Raises:
        BadDataset: A file is truncated, has another format, or other class names than the first
            one;
            also raised by the rows.
    """
    datasets = _library(path, files.format.value)
    names = [str(file.absolute()) for file in files.paths]
    # `datasets` locks its cache although streaming does not use it. The usual cache may belong to
    # another user or be read-only.
    with _refusing(path, datasets), TemporaryDirectory(prefix="swarm-ft-") as cache:
        total = _num_parquet_rows(files.paths) if files.format is DataFormat.PARQUET else None
        found = datasets.load_dataset(
            files.format.name.lower(),
            data_files=names,
            split="train",
            streaming=True,
            cache_dir=cache,
        )
        _check_class_names(path, files, datasets)
    return _stored(path, found, total)


def _check_class_names(path: str, files: Files, datasets: Any) -> None:  # noqa: ANN401
    """Refuse files with different class names; `datasets` would apply the first file's."""
    found = [_class_names(_features_of(file, files.format, datasets)) for file in files.paths]
    for file, names in zip(files.paths, found, strict=True):
        if names != found[0]:
            raise bad_dataset(
                path,
                f"'{file.name}' and '{files.paths[0].name}' name their classes differently: "
                f"{dict(names) or 'not at all'}, and {dict(found[0]) or 'not at all'}; use the "
                "same names in both, or store names as text",
            )


def _features_of(file: Path, kind: DataFormat, datasets: Any) -> Mapping[str, Any]:  # noqa: ANN401
    """Return the types of a file's columns from its schema's metadata."""
    import pyarrow
    from pyarrow import parquet

    if kind is DataFormat.PARQUET:
        schema = parquet.read_schema(file)
    else:
        with pyarrow.memory_map(str(file)) as source:
            try:
                schema = pyarrow.ipc.open_stream(source).schema
            except pyarrow.ArrowInvalid:
                schema = pyarrow.ipc.open_file(source).schema
    features: Mapping[str, Any] = datasets.Features.from_arrow_schema(schema)
    return features


CARDS = {"README.md": "class_label", "dataset_infos.json": "ClassLabel"}
"""Files beside data that may declare its classes, with a word that such a declaration contains."""


def card_class_names(directory: str) -> Mapping[str, tuple[str, ...]]:
    """Return class names by column, as a dataset's card beside the data declares them.

    A card that is unreadable or has several configurations declares none.

    Raises:
        BadDataset: A card may name classes, and the library that reads it is missing.
    """
    if not any(_holds(Path(directory, name), word) for name, word in CARDS.items()):
        return {}
    _library(directory, "the names of classes in the card beside this data")
    from datasets.info import DatasetInfosDict

    try:
        infos = DatasetInfosDict.from_directory(directory)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, YAMLError):
        return {}
    found = list(infos.values())
    return _class_names(found[0].features or {}) if len(found) == 1 else {}


def _holds(file: Path, word: str) -> bool:
    try:
        return word in file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def named_rows(rows: Iterator[Row], names: Mapping[str, tuple[str, ...]]) -> Iterator[Row]:
    """Yield rows with numbers of classes, also as text, replaced by their names."""
    for row in rows:
        named = {
            column: _class_named(row.values[column], of_column)
            for column, of_column in names.items()
            if column in row.values
        }
        yield row._replace(values={**row.values, **named})


def _class_named(value: object, names: tuple[str, ...]) -> object:
    if isinstance(value, list):
        return [_class_named(one, names) for one in value]
    if value in names or isinstance(value, bool):
        return value
    is_text = isinstance(value, str) and value.isdecimal()
    return _named(names, int(str(value)) if is_text else value)


def _library(path: str, data: str) -> Any:  # noqa: ANN401
    """Import `datasets` to read data; see `check_library`."""
    check_library(path, _LIBRARY, data)
    import datasets

    # Errors are reported as one line, and other progress bars would interleave with ours.
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.disable_progress_bars()
    return datasets


def _chosen(path: str, found: Any, wanted: DataSelection) -> tuple[str, Any]:  # noqa: ANN401
    """Return one split of a dataset; a dataset without splits is `train`."""
    by_split: Mapping[str, Any] = found if isinstance(found, Mapping) else {"train": found}
    split = wanted.choose(path, by_split)
    return split if len(by_split) > 1 else "", by_split[split]


def _num_parquet_rows(paths: Iterable[Path]) -> int:
    """Return the number of rows from metadata; fails early for a truncated file."""
    from pyarrow import parquet

    return sum(parquet.read_metadata(path).num_rows for path in paths)


def _stored(path: str, dataset: Any, total: int | None, split: str = "") -> StoredRows:  # noqa: ANN401
    features = dataset.features or {}
    return StoredRows(_rows(path, dataset, features, total), split, _class_names(features))


def _rows(
    path: str,
    dataset: Iterable[Mapping[str, object]],
    features: Mapping[str, Any],
    total: int | None,
) -> Iterator[Row]:
    import datasets

    readers = {name: _reader_of(feature) for name, feature in features.items()}
    with _refusing(path, datasets):
        for number, values in enumerate(dataset, 1):
            done = number / total if total else None
            written = {name: readers.get(name, _without_nulls)(one) for name, one in values.items()}
            yield Row(written, f"dataset '{path}', row {number}", done)


def _class_names(features: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return class names by column, for `ClassLabel` and lists of it."""
    from datasets import ClassLabel

    elements = {name: _element_of(feature) or feature for name, feature in features.items()}
    return {
        name: tuple(one.names)
        for name, one in elements.items()
        if isinstance(one, ClassLabel) and one.names
    }


def _element_of(feature: Any) -> Any:  # noqa: ANN401
    """Return the type of a list's elements; None for other types."""
    from datasets import LargeList, List

    if isinstance(feature, list):
        return feature[0]
    return feature.feature if isinstance(feature, List | LargeList) else None


def _reader_of(feature: Any) -> Callable[[Any], object]:  # noqa: ANN401
    """Return the function that restores a value as it was in JSON lines.

    Classes become names. A table gives all objects of a column the same keys, with null for missing
    ones; these keys are dropped, as in TRL. `Json` columns stay unchanged.
    """
    from datasets import ClassLabel

    element = _element_of(feature)
    if isinstance(feature, ClassLabel):
        return partial(_named, tuple(feature.names or ()))
    if isinstance(feature, Mapping):
        readers = {key: _reader_of(one) for key, one in feature.items()}
        return lambda value: (
            value and {key: readers[key](one) for key, one in value.items() if one is not None}
        )
    if element is not None:
        read = _reader_of(element)
        return _unchanged if read is _unchanged else lambda value: value and list(map(read, value))
    return _unchanged


def _unchanged(value: object) -> object:
    return value


def _named(names: tuple[str, ...], value: object) -> object:
    if isinstance(value, int) and 0 <= value < len(names):
        return names[value]
    return value


def _without_nulls(value: object) -> object:
    """Return a value of unknown type without null keys in its objects."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    if isinstance(value, list) and value and not isinstance(value[0], str | int | float):
        return [_without_nulls(one) for one in value]
    return value


@contextmanager
def _refusing(
    path: str,
    datasets: Any,  # noqa: ANN401
    why: str = "cannot be read: ",
) -> Iterator[None]:
    from huggingface_hub.errors import HfHubHTTPError

    # A dataset with its own code raises RuntimeError; a column of images or audio, ImportError.
    known = (OSError, ValueError, LookupError, TypeError, RuntimeError, ImportError, HfHubHTTPError)
    try:
        yield
    except (*known, datasets.exceptions.DatasetsError) as exc:
        reason = str(exc).strip().partition("\n")[0] or type(exc).__name__
        raise bad_dataset(path, f"{why}{reason}") from exc
