"""Data that was found and understood, and samples of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from swarm_ft.client.data.chat import Document, Piece
from swarm_ft.client.data.classes import FoundClasses, class_form_of, find_classes
from swarm_ft.client.data.files import STORED, Wanted, find_files
from swarm_ft.client.data.forms import PLAIN_TEXT, Form, form_of
from swarm_ft.client.data.progress import ReadSoFar
from swarm_ft.client.data.rows import TEXT_COLUMN, Row, file_rows, read_text
from swarm_ft.client.data.samples import SampleFile, TokenArray, labelled_in, words_in
from swarm_ft.client.data.stored import (
    StoredRows,
    hub_rows,
    is_saved,
    may_be_on_hub,
    saved_rows,
    stored_rows,
)
from swarm_ft.client.data.text_files import refused
from swarm_ft.client.options import DataFormat, ReadOptions
from swarm_ft.errors import BadDataset, BadOption
from swarm_ft.protocol.spec.options import declared
from swarm_ft.protocol.spec.sample_rows import NO_LABEL, Words, token_ids_of, words_of
from swarm_ft.protocol.spec.tasks import CausalLm, Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHOWN_CHARS = 160
"""Of each piece of the first document."""
MOST_CLASSES_TOLD = 8
BATCH_DOCUMENTS = 1000
BATCH_CHARS = 1 << 20
"""Tokenised at a time: enough for all cores, and some tens of megabytes of memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """What data came to.

    Attributes:
        tokens: rows [samples, seq_length] of words, on the disk; see `sample_rows`.
        words: how much of what it was, for people.
    """

    tokens: TokenArray
    words: str


class _One(NamedTuple):
    """One document; empty if there is no text in it."""

    pieces: Document
    done: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _End:
    """What stands behind a document: a text that is tokenised with it, or a token."""

    text: str = ""
    token_id: int | None = None


class Dataset:
    """Documents of one form; the first was made, the others are when samples are, once.

    Args:
        source: what it is called.
        words: what it is, for people.
        form: how documents are made of rows.
        rows: at least one.
        tokenizer: of the model.
        options: what becomes of documents.

    Raises:
        BadDataset: there is no text, or what comes before the first is not as it should be.
        BadOption: documents need a separator, and the tokenizer has none.
    """

    def __init__(
        self,
        source: str,
        words: str,
        form: Form,
        rows: Iterator[Row],
        tokenizer: PreTrainedTokenizerBase,
        options: ReadOptions,
    ) -> None:
        self.source = source
        self._tokenizer = tokenizer
        self._end = _end_of(form, tokenizer, options)
        self._form = form
        self._packing = options.packing and not form.has_class
        self._num_blank = 0
        for first in rows:
            document = _rendered(form, first)
            if _has_text(document):
                break
            self._num_blank += 1
        else:
            raise refused(source, "expected text, found none; the data is empty")
        self._documents = _documents(form, chain((first,), rows))
        self._words = _described(words, form, first)
        is_all_learned = all(piece.is_target for piece in document)
        brackets = "" if is_all_learned else ", of which [this] is only read and the rest learned"
        self._first = f"{brackets}: {_shown(document, self._end, tokenizer)}"

    def describe(self) -> list[str]:
        """What it is, what its columns mean, and its first document, for people."""
        return [f"{self.source}: {self._words}", f"  the first document{self._first}"]

    def samples(
        self,
        seq_length: int,
        vocab_size: int,
        *,
        limit: int | None = None,
        on_batch: Callable[[ReadSoFar], None] = lambda _so_far: None,
    ) -> Samples:
        """Read all documents, tokenise them, cut samples; memory does not grow with them.

        Args:
            seq_length: tokens a sample, at most.
            vocab_size: of the model.
            limit: of samples; no more is read than these need.
            on_batch: told after each thousand documents or so; what it raises ends this.

        Raises:
            BadDataset: a row cannot be used (it is named), or there is not one sample that has
                something to be learned.
        """
        so_far = ReadSoFar(source=self.source, num_blank=self._num_blank)
        file = SampleFile(
            self.source, seq_length=seq_length, vocab_size=vocab_size, packing=self._packing
        )
        with file:
            for batch in _batches(self._documents):
                documents = [one.pieces for one in batch if one.pieces]
                file.add(self._tokenised(documents, seq_length))
                so_far = _after(so_far, batch, file.num_samples)
                on_batch(so_far)
                if limit is not None and file.num_samples >= limit:
                    break
            tokens = file.samples(limit)
        return Samples(tokens=tokens, words=self._told(so_far, file, len(tokens)))

    def _tokenised(self, documents: list[Document], seq_length: int) -> Iterable[Words]:
        """Documents, each with its end, which is learned; or with classes."""
        if not documents:
            return
        if self._form.has_class:
            yield from labelled_in(
                documents, self._tokenizer, seq_length, of_words=self._form.are_of_words
            )
            return
        end_id = self._end.token_id
        ended = [self._with_end(document) for document in documents]
        for words, document in zip(words_in(ended, self._tokenizer), documents, strict=True):
            if end_id is None or token_ids_of(words)[-1:].tolist() == [end_id]:
                yield words
            else:
                yield np.append(words, words_of([end_id], _is_learned(document)))

    def _with_end(self, document: Document) -> Document:
        text = self._end.text
        return (*document, Piece(text, _is_learned(document))) if text else document

    def _told(self, so_far: ReadSoFar, file: SampleFile, num_samples: int) -> str:
        seq_length = file.seq_length
        words = [
            f"{self.source}: {_counted(so_far.num_documents, 'document')}, "
            f"{_counted(num_samples, 'sample')} of {'' if self._packing else 'up to '}"
            f"{seq_length} tokens"
        ]
        if so_far.num_blank:
            words.append(f"{_counted(so_far.num_blank, 'document')} without text left out")
        if file.num_left_out:
            left_out = _counted(file.num_left_out, "sample")
            words.append(f"{left_out} without anything to learn left out")
        if self._form.has_class:
            return "; ".join([*words, _shares(self._form.classes, file.class_counts.tolist())])
        # The first token of a sample is read, whatever it is.
        share = file.num_targets / max(1, file.num_kept_tokens - file.num_samples)
        if share < 1.0:
            words.append(f"{share:.0%} of all tokens are learned, the others only read")
        return "; ".join(words)


_LOSS_OPTIONS = frozenset({"completion_only_loss", "assistant_only_loss"})
_FOR_DOCUMENTS = _LOSS_OPTIONS | {
    "packing",
    "separator",
    "text_column",
    "label_column",
    "column",
    "template",
    "remove_columns",
}
_NOT_FOR_CLASSES = frozenset({"packing", "separator", "column", "template"})
_FOR_TABLES = _FOR_DOCUMENTS | {"data_format", "column_names", "delimiter", "quotes"}
_FOR_FORMAT = {
    DataFormat.TEXT: frozenset({"data_format", "packing"}),
    DataFormat.LINES: frozenset({"data_format", "packing", "separator"}),
    DataFormat.JSON: _FOR_DOCUMENTS | {"data_format", "field"},
    DataFormat.CSV: _FOR_TABLES,
    DataFormat.TSV: _FOR_TABLES,
}
"""Fields of `ReadOptions` that mean something for each format; elsewhere `_FOR_DOCUMENTS`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    """What lies at a path.

    Attributes:
        words: what it is.
        takes: options that mean something there.
        form: where that does not depend on the rows.
        class_names: by column, of data that names its classes apart from its rows.
    """

    words: str
    rows: Iterator[Row]
    takes: frozenset[str]
    form: Form | None = None
    class_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


_CAUSAL_LM = CausalLm()


def classes_in(path: str, wanted: Wanted, options: ReadOptions, task: Task) -> FoundClasses:
    """Find all classes that some data has; it is read once for that, unless it names them.

    Args:
        path, wanted, options: see `open_dataset`.
        task: what is learned of it; its own classes do not count.

    Raises:
        BadDataset: see `open_dataset`; or it has no classes, or too many.
    """
    found = _find(path, wanted, options)
    if found.form is not None:
        raise refused(path, f"expected columns of text and classes, and it is {found.words}")
    return find_classes(found.rows, options, task.kind, path, found.class_names)


def open_dataset(  # noqa: PLR0913 - where data lies, how it is read, and for what
    path: str,
    wanted: Wanted,
    options: ReadOptions,
    tokenizer: PreTrainedTokenizerBase,
    *,
    all_options: bool = True,
    task: Task = _CAUSAL_LM,
    counted_names: tuple[str, ...] = (),
) -> Dataset:
    """Find data and understand its first row.

    Args:
        path: a file, a directory, or a dataset's id on the hub.
        wanted: which split and format of it.
        options: how it is read.
        tokenizer: of the model.
        all_options: whether each of `options` is to mean something for this data.
        task: what is learned of it.
        counted_names: of classes, that numbers in the data count from 0.

    Raises:
        BadDataset: it cannot be used, as far as its first document tells.
        BadOption: an option is missing, or means nothing here.
    """
    found = _find(path, wanted, options)
    if all_options:
        _check_means_something(path, found, options)
    form, rows = found.form, found.rows
    if form is not None and task.labels:
        raise refused(path, f"expected columns of text and classes, and it is {found.words}")
    if form is None:
        first = next(rows, None)
        if first is None:
            raise refused(path, "expected rows, found none; the data is empty")
        if task.labels:
            form = class_form_of(list(first.values), options, task, path, counted_names)
        else:
            form = form_of(first.values, options, tokenizer, path)
        if all_options:
            _check_is_asked(path, form, options)
        rows = chain((first,), rows)
    return Dataset(path, found.words, form, rows, tokenizer, options)


def _find(path: str, wanted: Wanted, options: ReadOptions) -> _Found:
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
        found = _found_stored("", stored_rows(path, files), takes)
        return replace(found, words=words)
    return _Found(words=words, rows=file_rows(files, options), takes=takes)


def _found_stored(kind: str, stored: StoredRows, takes: frozenset[str]) -> _Found:
    words = _words(kind, stored.split)
    return _Found(words=words, rows=stored.rows, takes=takes, class_names=stored.class_names)


def _check_means_something(path: str, found: _Found, options: ReadOptions) -> None:
    for one in declared(ReadOptions):
        is_given = getattr(options, one.field) != one.default
        if is_given and one.field not in found.takes:
            (flag,) = one.arguments(getattr(options, one.field))[:1]
            raise BadOption(f"{flag}: means nothing for '{path}', which is {found.words}")


def _check_is_asked(path: str, form: Form, options: ReadOptions) -> None:
    for one in declared(ReadOptions):
        value = getattr(options, one.field)
        means_nothing = _LOSS_OPTIONS - form.asks
        means_nothing |= _NOT_FOR_CLASSES if form.has_class else {"label_column"}
        if one.field in means_nothing and value != one.default:
            raise BadOption(f"{one.arguments(value)[0]}: means nothing where {form.words}")


def _words(kind: str, split: str, num_files: int = 1) -> str:
    parts = [kind, f"split '{split}'" if split else "", f"{num_files} files" * (num_files > 1)]
    return ", ".join(filter(None, parts))


def _end_of(form: Form, tokenizer: PreTrainedTokenizerBase, options: ReadOptions) -> _End:
    if form.has_end:
        return _End()
    if options.separator is not None:
        return _End(text=options.separator)
    if tokenizer.eos_token_id is None:
        raise BadOption(
            "--separator: the model's tokenizer has no end-of-text token to put between documents; "
            "give a text that parts them"
        )
    return _End(token_id=int(tokenizer.eos_token_id))


def _documents(form: Form, rows: Iterator[Row]) -> Iterator[_One]:
    for row in rows:
        document = _rendered(form, row)
        yield _One(document if _has_text(document) else (), row.done)


def _rendered(form: Form, row: Row) -> Document:
    """Make a row's document.

    Raises:
        BadDataset: the row cannot be used, or its text is no Unicode text.
    """
    document = form.render(row)
    for piece in document:
        try:
            piece.text.encode()
        except UnicodeEncodeError as exc:
            raise BadDataset(
                f"{row.place}: expected text, got half a character ({piece.text[exc.start]!a}, a "
                "lone surrogate), as where a text was cut within an emoji; remove it"
            ) from exc
    return document


def _shares(names: Sequence[str], counts: Sequence[int]) -> str:
    """How much of all there is of each class, of the first few."""
    whole = max(1, sum(counts))
    pairs = list(zip(names, counts, strict=False))
    told = [f"{name} {count / whole:.1%}" for name, count in pairs[:MOST_CLASSES_TOLD]]
    more = [f"and {len(names) - len(told)} more"] if len(names) > len(told) else []
    return f"classes {', '.join([*told, *more])}"


def _is_learned(document: Document) -> bool:
    """Whether any of a document is learned, and so its end."""
    return any(piece.is_target for piece in document)


def _has_text(document: Document) -> bool:
    return any(piece.text.strip() for piece in document)


def _batches(documents: Iterable[_One]) -> Iterator[list[_One]]:
    batch: list[_One] = []
    num_chars = 0
    for one in documents:
        batch.append(one)
        num_chars += sum(len(piece.text) for piece in one.pieces)
        if len(batch) >= BATCH_DOCUMENTS or num_chars >= BATCH_CHARS:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch


def _after(so_far: ReadSoFar, batch: list[_One], num_samples: int) -> ReadSoFar:
    num_blank = sum(not one.pieces for one in batch)
    return replace(
        so_far,
        num_documents=so_far.num_documents + len(batch) - num_blank,
        num_blank=so_far.num_blank + num_blank,
        num_samples=num_samples,
        done=batch[-1].done,
    )


# ---- in words


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _described(words: str, form: Form, first: Row) -> str:
    unused = form.unused_in(first)
    told = [words, first.part, form.words, f"not used: {', '.join(unused)}" if unused else ""]
    return "; ".join(filter(None, told))


def _shown(document: Document, end: _End, tokenizer: PreTrainedTokenizerBase) -> str:
    """The pieces of a document, whose spaces and line breaks are to be seen."""
    pieces = (*document, Piece(end.text, is_target=True))
    shown = [_quoted(piece) for piece in pieces if piece.text]
    if any(piece.label != NO_LABEL for piece in document):
        return " + ".join(shown)
    if end.token_id is not None:
        shown.append(str(tokenizer.eos_token))
    return " + ".join(shown)


def _quoted(piece: Piece) -> str:
    text = f"{piece.text[:SHOWN_CHARS]!r}{'...' * (len(piece.text) > SHOWN_CHARS)}"
    if piece.label != NO_LABEL:
        return f"{text} is of class {piece.label}"
    return text if piece.is_target else f"[{text}]"
