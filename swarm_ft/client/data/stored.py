"""What the library `datasets` reads: Parquet, Arrow, saved datasets, and datasets on the hub.

Only this module imports it, and only when there is something for it: it takes most of a second.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from swarm_ft.client.data.files import FORMAT_OF, Files, Wanted, refused
from swarm_ft.client.data.rows import Row
from swarm_ft.client.options import DataFormat

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
SAVED_FILES = ("state.json", "dataset_dict.json")
"""Either is in a directory that `save_to_disk` wrote."""


def is_saved(path: str) -> bool:
    """Whether `save_to_disk` wrote this directory."""
    return any(Path(path, name).is_file() for name in SAVED_FILES)


def may_be_on_hub(path: str) -> bool:
    """Whether this could be the id of a dataset on the hub, and is no path."""
    is_file_name = Path(path).suffix.lower() in FORMAT_OF
    return not Path(path).exists() and not is_file_name and bool(_HUB_ID.fullmatch(path))


def saved_rows(path: str, wanted: Wanted) -> tuple[str, Iterator[Row]]:
    """The split of a saved dataset that was chosen, empty if there is but one; and its rows.

    Raises:
        BadDataset: it cannot be read, or there is no such split; so do the rows.
    """
    datasets = _library()
    with _refusing(path, datasets):
        found = datasets.load_from_disk(path)
    split, chosen = _chosen(path, found, wanted)
    return split, _rows(path, chosen, len(chosen))


def hub_rows(path: str, subset: str | None, wanted: Wanted) -> tuple[str, Iterator[Row]]:
    """As `saved_rows`, of a dataset on the hub; its rows come as they are read."""
    datasets = _library()
    with _refusing(path, datasets, "no such file or directory here, and not read from the hub: "):
        found = datasets.load_dataset(path, subset, streaming=True)
    split, chosen = _chosen(path, found, wanted)
    info = (chosen.info.splits or {}).get(split)
    return split, _rows(path, chosen, info.num_examples if info else None)


def stored_rows(path: str, files: Files) -> Iterator[Row]:
    """The rows of Parquet or Arrow files.

    Raises:
        BadDataset: a file is torn, or something else.
    """
    datasets = _library()
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
    yield from _rows(path, found, total)


def _library() -> Any:  # noqa: ANN401
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


def _rows(path: str, dataset: Iterable[Mapping[str, object]], total: int | None) -> Iterator[Row]:
    with _refusing(path, _library()):
        for number, values in enumerate(dataset, 1):
            done = number / total if total else None
            row = {name: without_nulls(value) for name, value in values.items()}
            yield Row(row, f"dataset '{path}', row {number}", done)


def without_nulls(value: object) -> object:
    """A value of a table without the keys that the table filled up with null.

    All objects of a column have the same keys there: a tool call gets the arguments of others.
    """
    if isinstance(value, Mapping):
        return {key: without_nulls(one) for key, one in value.items() if one is not None}
    if isinstance(value, list) and value and not isinstance(value[0], str | int):
        return [without_nulls(one) for one in value]
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
