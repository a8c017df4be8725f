"""Rows with classes: of a text, of a pair of texts, or of each word of a text."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from swarm_ft.client.data.chat import Document, Piece
from swarm_ft.client.data.columns import LABEL_COLUMNS, MEDIA, ColumnMap
from swarm_ft.client.data.forms import Form, text_in, with_row_checks
from swarm_ft.client.data.rows import TEXT_COLUMN, Row, describe_type
from swarm_ft.client.data.text_files import bad_dataset
from swarm_ft.client.options import ReadOptions
from swarm_ft.errors import BadDataset
from swarm_ft.protocol.spec.run_spec import MAX_LABELS, TaskKind
from swarm_ft.protocol.spec.tasks import Task

TAG_COLUMNS = ("labels", "ner_tags", "tags")
WORDS_COLUMN = "tokens"
PAIRS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question", "sentence"),
    ("question1", "question2"),
)
"""Columns of text pairs, as GLUE's tasks name them."""
_TEXTS = {
    TaskKind.CLASSIFICATION: ((TEXT_COLUMN,), *PAIRS, ("sentence",)),
    TaskKind.TOKEN_CLASSIFICATION: ((WORDS_COLUMN,),),
}
_LABELS = {TaskKind.CLASSIFICATION: LABEL_COLUMNS, TaskKind.TOKEN_CLASSIFICATION: TAG_COLUMNS}


class FoundClasses(NamedTuple):
    """Classes of some data.

    Attributes:
        names: Names in declared order, or sorted; by number if all names are numbers.
        are_declared: Whether the data declares its classes, in this order, apart from its rows.
    """

    names: tuple[str, ...]
    are_declared: bool = False

    @property
    def are_numbers(self) -> bool:
        """Whether all names are numbers."""
        return all(name.isdecimal() for name in self.names)


def class_form_of(
    columns: Sequence[str],
    options: ReadOptions,
    task: Task,
    source: str,
    counted_names: tuple[str, ...] = (),
) -> Form:
    """Return the form of rows with classes.

    Args:
        columns: Columns of the first row.
        options: Options that name columns.
        task: Task with its classes.
        source: Name of the data, for errors.
        counted_names: Names that numbers in the data count from 0; empty if numbers are names.

    Raises:
        BadDataset: The columns of text or class are missing.
    """
    texts, label = _columns_of(columns, options, task.kind, source)
    numbers = {name: number for number, name in enumerate(task.labels)}
    # Numbers count classes only if no class has a number for its name.
    for place, name in enumerate(counted_names):
        numbers.setdefault(str(place), numbers[name])

    def of_texts(row: Row) -> Document:
        number = _number_of(row, label, row.values.get(label), numbers)
        *others, last = (text_in(row, text) for text in texts)
        return (*(Piece(text, True) for text in others), Piece(last, True, number))

    def of_words(row: Row) -> Document:
        words, labels = _words_in(row, texts[0], label)
        found = [_number_of(row, label, one, numbers) for one in labels]
        pieces = zip(words, found, strict=True)
        return tuple(
            Piece(f" {word}" if place else word, True, number)
            for place, (word, number) in enumerate(pieces)
        )

    is_text = task.kind is TaskKind.CLASSIFICATION
    names = " and ".join(f"'{text}'" for text in texts)
    form = Form(
        description=f"a document is {names}, "
        + (f"its class is '{label}'" if is_text else f"classes of its words are '{label}'"),
        columns=(*texts, label),
        render=of_texts if is_text else of_words,
        has_end=True,
        classes=task.labels,
        has_word_classes=not is_text,
    )
    return with_row_checks(form, ColumnMap.of(options).removed, MEDIA)


def find_classes(
    rows: Iterable[Row],
    options: ReadOptions,
    kind: TaskKind,
    source: str,
    declared: Mapping[str, tuple[str, ...]],
) -> FoundClasses:
    """Return all classes of some data: the declared ones, or those of its rows.

    Args:
        rows: Rows of the data; only the first is read if classes are declared.
        options: Options that name columns.
        kind: Kind of the task.
        source: Name of the data, for errors.
        declared: Names of classes by column.

    Raises:
        BadDataset: A class is neither text nor a whole number, or there are too many.
    """
    found: set[str] = set()
    for row in rows:
        texts, label = _columns_of(list(row.values), options, kind, source)
        if label in declared:
            names = tuple(_name_of(row, label, name) for name in declared[label])
            _check_count(row, label, names)
            return FoundClasses(names, are_declared=True)
        is_text = kind is TaskKind.CLASSIFICATION
        many = [row.values.get(label)] if is_text else _words_in(row, texts[0], label)[1]
        found.update(_name_of(row, label, one) for one in many)
        _check_count(row, label, found)
    return FoundClasses(_sorted(found))


def _check_count(row: Row, label: str, names: Collection[str]) -> None:
    if len(names) > MAX_LABELS:
        raise BadDataset(
            f"{row.place}: '{label}' has more than {MAX_LABELS} different values; is it the "
            "column of classes? --label-column names another"
        )


def _sorted(names: Iterable[str]) -> tuple[str, ...]:
    found = FoundClasses(tuple(names))
    key = (lambda name: (int(name), name)) if found.are_numbers else (lambda name: (0, name))
    return tuple(sorted(found.names, key=key))


def merged_classes(train: FoundClasses, held_out: FoundClasses, source: str) -> FoundClasses:
    """Return the classes of two datasets, such as training and held-out data.

    Args:
        train, held_out: Classes of each dataset.
        source: Name of the second dataset, for errors.

    Raises:
        BadDataset: One has names and the other numbers, so their relation is unknown.
    """
    has_all, lacks_none = (
        set(held_out.names) <= set(train.names),
        set(train.names) <= set(held_out.names),
    )
    if has_all and (train.are_declared or not lacks_none):
        return train
    if lacks_none:
        return held_out
    if train.are_numbers != held_out.are_numbers:
        raise bad_dataset(
            source,
            f"its classes are {some_of(held_out.names)}, and those of --dataset "
            f"{some_of(train.names)}; --labels NAME,NAME,... lists the names that numbers count",
        )
    if train.are_declared:
        more = [name for name in held_out.names if name not in train.names]
        return FoundClasses((*train.names, *more), are_declared=True)
    return FoundClasses(_sorted({*train.names, *held_out.names}))


def _columns_of(
    columns: Sequence[str], options: ReadOptions, kind: TaskKind, source: str
) -> tuple[tuple[str, ...], str]:
    """Return the columns of the text or texts, and the column of the class."""
    known, labels = _known_texts(columns, options, kind), _label_option(options) or _LABELS[kind]
    texts = next((names for names in known if set(names) <= set(columns)), None)
    label = next((name for name in labels if name in columns), None)
    if texts is not None and label is not None:
        return texts, label
    missing = labels[0] if texts is not None else next(x for x in known[0] if x not in columns)
    option = "--label-column" if texts is not None else "--text-column"
    found = ", ".join(f"'{name}'" for name in columns)
    raise BadDataset(
        f"dataset '{source}': expected a column '{missing}'; it has {found}; {option} names another"
    )


def _known_texts(
    columns: Sequence[str], options: ReadOptions, kind: TaskKind
) -> tuple[tuple[str, ...], ...]:
    """Return candidates for the columns of the text, one or two each, in order of preference."""
    option = options.text_column
    if option is None:
        return _TEXTS[kind]
    pair = tuple(option.split(","))
    is_pair = option not in columns and len(pair) == 2 and kind is TaskKind.CLASSIFICATION
    return (pair if is_pair else (option,),)


def _label_option(options: ReadOptions) -> tuple[str, ...]:
    return (options.label_column,) if options.label_column is not None else ()


def _words_in(row: Row, text: str, label: str) -> tuple[list[str], list[object]]:
    """Return the words of a row and their classes."""
    words, labels = row.values.get(text), row.values.get(label)
    if not isinstance(words, list) or not isinstance(labels, list) or len(words) != len(labels):
        raise BadDataset(
            f"{row.place}: expected '{text}' and '{label}' to be lists of one length, got "
            f"{describe_type(words)} and {describe_type(labels)}"
        )
    if not all(isinstance(word, str) for word in words):
        raise BadDataset(f"{row.place}: expected '{text}' to be a list of words")
    return words, labels


def _name_of(row: Row, column: str, value: object) -> str:
    """Return the name of a class: a word, or a number without sign or point."""
    name = str(int(value)) if isinstance(value, int) else value
    if isinstance(name, str) and "," in name:
        raise BadDataset(f"{row.place}: expected '{column}' to be a class without a comma in it")
    if isinstance(name, str) and not name.strip().isprintable():
        raise BadDataset(f"{row.place}: expected '{column}' to be printable, got {name[:80]!a}")
    if isinstance(name, str) and name.strip() and not name.startswith("-"):
        return name.strip()
    raise BadDataset(
        f"{row.place}: expected '{column}' to be a class, a name or a number from 0 on, got "
        f"{value if isinstance(value, int | float) else describe_type(value)}"
    )


def _number_of(row: Row, column: str, value: object, numbers: Mapping[str, int]) -> int:
    name = _name_of(row, column, value)
    if name in numbers:
        return numbers[name]
    raise BadDataset(
        f"{row.place}: '{column}' is '{name}', which is none of the classes "
        f"{some_of(numbers)} (--labels)"
    )


def some_of(names: Iterable[str], most: int = 10) -> str:
    """Return the first few names, for people."""
    rest: Iterator[str] = iter(names)
    first = [name for name, _ in zip(rest, range(most), strict=False)]
    return ", ".join(first)
