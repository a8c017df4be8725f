"""Data at a path: its kind, its rows, and the options that have an effect on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from swarm_ft.client.data.classes import FoundClasses, class_form_of, find_classes
from swarm_ft.client.data.dataset import Dataset
from swarm_ft.client.data.files import STORED, DataSelection, find_files
from swarm_ft.client.data.forms import ASSISTANT_ONLY, COMPLETION_ONLY, PLAIN_TEXT, Form, form_of
from swarm_ft.client.data.holdout import DatasetPart
from swarm_ft.client.data.rows import TEXT_COLUMN, Row, file_rows, read_text
from swarm_ft.client.data.stored import (
    StoredRows,
    card_class_names,
    hub_rows,
    is_saved,
    may_be_on_hub,
    named_rows,
    saved_rows,
    stored_rows,
)
from swarm_ft.client.data.text_files import bad_dataset
from swarm_ft.client.options import DataFormat, ReadOptions
from swarm_ft.errors import BadOption
from swarm_ft.protocol.spec.options import option_fields
from swarm_ft.protocol.spec.tasks import CausalLm, Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LOSS_OPTIONS = frozenset({COMPLETION_ONLY, ASSISTANT_ONLY})
_SAMPLE_OPTIONS = frozenset({"packing", "packing_strategy", "truncation", "separator"})
_COLUMN_OPTIONS = frozenset({"text_column", "label_column", "column", "template", "remove_columns"})
_FOR_DOCUMENTS = _LOSS_OPTIONS | _SAMPLE_OPTIONS | _COLUMN_OPTIONS
_NOT_FOR_CLASSES = _SAMPLE_OPTIONS | {"column", "template"}
_FOR_TABLES = _FOR_DOCUMENTS | {"data_format", "column_names", "delimiter", "quotes"}
_FOR_FORMAT = {
    DataFormat.TEXT: frozenset({"data_format", "packing", "packing_strategy"}),
    DataFormat.LINES: _SAMPLE_OPTIONS | {"data_format"},
    DataFormat.JSON: _FOR_DOCUMENTS | {"data_format", "field"},
    DataFormat.CSV: _FOR_TABLES,
    DataFormat.TSV: _FOR_TABLES,
}
"""Fields of `ReadOptions` that have an effect for each format; others have `_FOR_DOCUMENTS`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    """Data found at a path.

    Attributes:
        words: Description, for people.
        rows: Rows of the data.
        takes: Options that have an effect on it.
        form: Form of its documents; None if that depends on the rows.
        class_names: Names of classes by column, if the data declares them.
    """

    words: str
    rows: Iterator[Row]
    takes: frozenset[str]
    form: Form | None = None
    class_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


_CAUSAL_LM = CausalLm()


def classes_in(
    path: str, selection: DataSelection, options: ReadOptions, task: Task
) -> FoundClasses:
    """Return all classes of some data, which is read once unless it declares them.

    Args:
        path, selection, options: See `open_dataset`.
        task: Task to learn; its own classes are ignored.

    Raises:
        BadDataset: See `open_dataset`; or the data has no classes, or too many.
    """
    found = _find(path, selection, options)
    if found.form is not None:
        raise bad_dataset(path, f"expected columns of text and classes, got {found.words}")
    return find_classes(found.rows, options, task.kind, path, found.class_names)


def open_dataset(  # noqa: PLR0913 - where data lies, how it is read, and for what
    path: str,
    selection: DataSelection,
    options: ReadOptions,
    tokenizer: PreTrainedTokenizerBase,
    *,
    all_options: bool = True,
    task: Task = _CAUSAL_LM,
    counted_names: tuple[str, ...] = (),
) -> Dataset:
    """Open a dataset and interpret its first row.

    Args:
        path: File, directory, or id of a dataset on the hub.
        selection: Split and format.
        options: Options of reading.
        tokenizer: Tokenizer of the model.
        all_options: Whether every changed option must have an effect on this data.
        task: Task to learn.
        counted_names: Names of classes that numbers in the data count from 0.

    Raises:
        BadDataset: The data cannot be used, as far as its first document shows.
        BadOption: An option is missing, or has no effect here.
    """
    found = _find(path, selection, options)
    if selection.part is not None:
        found = _part_of(found, selection.part, path, lambda: _find(path, selection, options).rows)
    meaningless = _meaningless_there(path, found, options)
    form, rows = found.form, found.rows
    if form is not None and task.labels:
        raise bad_dataset(path, f"expected columns of text and classes, got {found.words}")
    if form is None:
        first = next(rows, None)
        if first is None:
            raise bad_dataset(path, "expected rows, found none; the data is empty")
        if task.labels:
            form = class_form_of(list(first.values), options, task, path, counted_names)
        else:
            form = form_of(first.values, options, tokenizer, path)
        meaningless = _meaningless_in(form, options) | meaningless
        rows = chain((first,), rows)
    if all_options and meaningless:
        raise BadOption(next(iter(meaningless.values())))
    data = Dataset(path, found.words, form, rows, tokenizer, options)
    data.ineffective_options = meaningless
    return data


def _find(path: str, wanted: DataSelection, options: ReadOptions) -> _Found:
    if is_saved(path):
        return _found_stored("a saved dataset", saved_rows(path, wanted), _FOR_DOCUMENTS)
    if may_be_on_hub(path):
        on_hub = hub_rows(path, options.subset, wanted)
        return _found_stored("a dataset on the hub", on_hub, _FOR_DOCUMENTS | {"subset"})
    files = find_files(path, wanted)
    words = _words(files.format.value, files.split, len(files.paths))
    takes = _FOR_FORMAT.get(files.format, _FOR_DOCUMENTS | {"data_format"})
    if files.format is DataFormat.TEXT:
        row = Row({TEXT_COLUMN: read_text(path, files)}, path, 1.0)
        return _Found(words=words, rows=iter((row,)), takes=takes, form=PLAIN_TEXT)
    if files.format in STORED:
        found = replace(_found_stored("", stored_rows(path, files), takes), words=words)
    else:
        found = _Found(words=words, rows=file_rows(files, options), takes=takes)
    names = card_class_names(path) if Path(path).is_dir() and not found.class_names else {}
    if names:
        return replace(found, rows=named_rows(found.rows, names), class_names=names)
    return found


def _found_stored(kind: str, stored: StoredRows, takes: frozenset[str]) -> _Found:
    words = _words(kind, stored.split)
    return _Found(words=words, rows=stored.rows, takes=takes, class_names=stored.class_names)


def _part_of(
    found: _Found, part: DatasetPart, path: str, all_rows: Callable[[], Iterable[Row]]
) -> _Found:
    """Return the data without the documents outside of a part.

    Raises:
        BadDataset: No document would remain.
        BadOption: The size is a number of documents, and the data is one document.
    """
    words = f"{found.words}, {part}"
    if found.form is not PLAIN_TEXT:
        num_rows = 0 if part.is_share else sum(1 for _ in all_rows())
        if not part.is_share and num_rows <= part.size:
            why = f"expected more than {part.size:,.0f} rows (--eval-size), got {num_rows}"
            raise bad_dataset(path, why)
        return replace(found, rows=part.select_rows(found.rows, num_rows), words=words)
    (row,) = found.rows
    try:
        text = part.select_text(str(row.values[TEXT_COLUMN]))
    except ValueError as exc:
        raise BadOption(f"--eval-size: plain text is one document; {exc}") from exc
    return replace(found, rows=iter((row._replace(values={TEXT_COLUMN: text}),)), words=words)


def _meaningless_there(path: str, found: _Found, options: ReadOptions) -> dict[str, str]:
    """Return the changed options without effect on this kind of data, with the reasons."""
    return {
        one.field: f"{one.arguments(value)[0]}: has no effect on '{path}', which is {found.words}"
        for one in option_fields(ReadOptions)
        if (value := getattr(options, one.field)) != one.default and one.field not in found.takes
    }


def _meaningless_in(form: Form, options: ReadOptions) -> dict[str, str]:
    """Return the changed options without effect on rows of this form, with the reasons."""
    meaningless = _LOSS_OPTIONS - form.loss_options
    meaningless |= _NOT_FOR_CLASSES if form.has_class else {"label_column"}
    return {
        one.field: f"{one.arguments(value)[0]}: has no effect where {form.description}"
        for one in option_fields(ReadOptions)
        if (value := getattr(options, one.field)) != one.default and one.field in meaningless
    }


def _words(kind: str, split: str, num_files: int = 1) -> str:
    parts = [kind, f"split '{split}'" if split else "", f"{num_files} files" * (num_files > 1)]
    return ", ".join(filter(None, parts))
