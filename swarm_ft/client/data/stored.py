"""What the library `datasets` reads: Parquet, Arrow, saved datasets, and datasets on the hub.

Only this module imports it, and only when there is something for it: it takes most of a second.
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

from swarm_ft.client.data.files import STORED, Files, Wanted, check_place, format_named
from swarm_ft.client.data.rows import Row
from swarm_ft.client.data.text_files import check_library, refused
from swarm_ft.client.options import DataFormat

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_LIBRARY = "datasets"
_SAVED, _ON_HUB = "saved datasets", "datasets on the hub (no such file is here)"
SAVED_FILES = ("state.json", "dataset_dict.json")
"""Either is in a directory that `save_to_disk` wrote."""


def is_saved(path: str) -> bool:
    """Whether `save_to_disk` wrote this directory."""
    return any(Path(path, name).is_file() for name in SAVED_FILES)


def may_be_on_hub(path: str) -> bool:
    """Whether this could be the id of a dataset on the hub, and is no path."""
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
    """Rows of stored data, and what the data says of itself.

    Attributes:
        split: that was chosen; empty if there is but one.
        class_names: by column, of columns that hold classes or lists of classes.
    """

    rows: Iterator[Row]
    split: str = ""
    class_names: Mapping[str, tuple[str, ...]] = {}


def saved_rows(path: str, wanted: Wanted) -> StoredRows:
    """Open one split of a dataset that `save_to_disk` wrote.

    Raises:
        BadDataset: it cannot be read, or there is no such split; so do the rows.
    """
    datasets = _library(path, _SAVED)
    with _refusing(path, datasets):
        found = datasets.load_from_disk(path)
    split, chosen = _chosen(path, found, wanted)
    return _stored(path, chosen, len(chosen), split)


def hub_rows(path: str, subset: str | None, wanted: Wanted) -> StoredRows:
    """Open one split of a dataset on the hub; its rows come as they are read.

    Raises:
        BadDataset: see `saved_rows`.
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
        BadDataset: a file is torn, is something else, or names its classes otherwise than the
            first file; so do the rows.
    """
    datasets = _library(path, files.format.value)
    names = [str(file.absolute()) for file in files.paths]
    # It locks a cache that streaming does not use, and that may be another one's, or read-only.
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
    """Refuse files whose classes have other names: `datasets` reads all by the first file's."""
    found = [_class_names(_features_of(file, files.format, datasets)) for file in files.paths]
    for file, names in zip(files.paths, found, strict=True):
        if names != found[0]:
            raise refused(
                path,
                f"'{file.name}' names its classes otherwise than '{files.paths[0].name}': "
                f"{dict(names) or 'not at all'}, not {dict(found[0]) or 'not at all'}; store them "
                "alike, or as names",
            )


def _features_of(file: Path, kind: DataFormat, datasets: Any) -> Mapping[str, Any]:  # noqa: ANN401
    """Read the types of a file's columns, which its schema's metadata tells in full."""
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
"""Files beside data that may name its classes, and a word that stands in these where they do."""


def card_class_names(directory: str) -> Mapping[str, tuple[str, ...]]:
    """Return the names of classes by column, as a dataset's card beside the data declares them.

    A card that cannot be read, or that is of several configurations, names none.

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
    """Replace numbers of classes, as numbers or in text, by their names."""
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

    # Errors come as one line of ours; bars would cut into our own.
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.disable_progress_bars()
    return datasets


def _chosen(path: str, found: Any, wanted: Wanted) -> tuple[str, Any]:  # noqa: ANN401
    """One split of a dataset; a dataset without splits is `train`."""
    by_split: Mapping[str, Any] = found if isinstance(found, Mapping) else {"train": found}
    split = wanted.choose(path, by_split)
    return split if len(by_split) > 1 else "", by_split[split]


def _num_parquet_rows(paths: Iterable[Path]) -> int:
    """Also finds a torn file before anything is read."""
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
    """Return the names of classes by column: of a `ClassLabel`, or of lists of them."""
    from datasets import ClassLabel

    elements = {name: _element_of(feature) or feature for name, feature in features.items()}
    return {
        name: tuple(one.names)
        for name, one in elements.items()
        if isinstance(one, ClassLabel) and one.names
    }


def _element_of(feature: Any) -> Any:  # noqa: ANN401
    """Return the type of a list's elements; None of what is no list."""
    from datasets import LargeList, List

    if isinstance(feature, list):
        return feature[0]
    return feature.feature if isinstance(feature, List | LargeList) else None


def _reader_of(feature: Any) -> Callable[[Any], object]:  # noqa: ANN401
    """Return the function that makes a value what the JSON lines hold that the data was made of.

    Classes are named. A table gives all objects of a column the same keys, null where an object
    has none; such keys are left out, as TRL does. `Json` columns keep what they hold.
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
        return _as_it_is if read is _as_it_is else lambda value: value and list(map(read, value))
    return _as_it_is


def _as_it_is(value: object) -> object:
    return value


def _named(names: tuple[str, ...], value: object) -> object:
    if isinstance(value, int) and 0 <= value < len(names):
        return names[value]
    return value


def _without_nulls(value: object) -> object:
    """Leave out keys with null in the objects of a value whose type is not known."""
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

    # RuntimeError: a dataset with code of its own; ImportError: a column of pictures or sounds.
    known = (OSError, ValueError, LookupError, TypeError, RuntimeError, ImportError, HfHubHTTPError)
    try:
        yield
    except (*known, datasets.exceptions.DatasetsError) as exc:
        reason = str(exc).strip().partition("\n")[0] or type(exc).__name__
        raise refused(path, f"{why}{reason}") from exc
