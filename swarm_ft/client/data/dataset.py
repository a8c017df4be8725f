"""Data that was found and understood, and samples of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from swarm_ft.client.data.chat import Document, Piece, marks_answers
from swarm_ft.client.data.forms import ASSISTANT_ONLY, COMPLETION_ONLY, PLAIN_TEXT, Form
from swarm_ft.client.data.layouts import Layout, LongDocuments, Stream, layout_of
from swarm_ft.client.data.progress import ReadSoFar
from swarm_ft.client.data.rows import Row
from swarm_ft.client.data.samples import (
    SampleFile,
    TokenArray,
    cut_in,
    labelled_in,
    token_counts,
    words_in,
)
from swarm_ft.client.data.special_tokens import (
    NO_SPECIAL_TOKENS,
    SpecialTokens,
    has_long_line_breaks,
    has_spaces,
    special_tokens_of,
)
from swarm_ft.client.data.summary import Summary, by_class
from swarm_ft.client.data.text_files import refused
from swarm_ft.client.options import PackingStrategy, ReadOptions, Truncation
from swarm_ft.errors import BadDataset, BadOption
from swarm_ft.protocol.spec.sample_rows import (
    NO_LABEL,
    Words,
    token_ids_of,
    words_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHOWN_CHARS = 160
"""Of each piece of the first document."""
BATCH_DOCUMENTS = 1000
BATCH_CHARS = 1 << 20
"""Tokenised at a time: enough for all cores, and some tens of megabytes of memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """What data came to.

    Attributes:
        tokens: rows [samples, seq_length] of words, on the disk; see `sample_rows`.
        summary: their counts.
    """

    tokens: TokenArray
    summary: Summary

    @property
    def words(self) -> str:
        """The counts in a line, for people."""
        return self.summary.words

    @property
    def long_documents(self) -> LongDocuments:
        """Documents that are longer than a sample."""
        return self.summary.long_documents


class _One(NamedTuple):
    """One document; empty if there is no text in it."""

    pieces: Document
    done: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _End:
    """The end that is put behind each document.

    Attributes:
        text: that is tokenised with the document; a document that ends by it gets no other.
        token_id: of the end-of-text token, if the document ends by that.
    """

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

    Attributes:
        meaningless: options that were given and mean nothing for this data, with the reason.
    """

    meaningless: Mapping[str, str] = MappingProxyType({})

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
        self._special = _special_of(form, tokenizer)
        self._strategy = _strategy_of(form, options)
        self._truncation = _truncation_of(form, options)
        self._num_begun = 0
        self._num_blank = 0
        for first in rows:
            document = _rendered(form, first)
            if _has_text(document):
                break
            self._num_blank += 1
        else:
            raise refused(source, "expected text, found none; the data is empty")
        self._documents = _documents(form, chain((first,), rows))
        self._unused = tuple(form.unused_in(first))
        self._words = _described(words, form, first, self._unused)
        is_all_learned = all(piece.is_target for piece in document)
        brackets = "" if is_all_learned else ", of which [this] is only read and the rest learned"
        begin = tokenizer.convert_ids_to_tokens(list(self._special.leading))
        shown = " + ".join([*begin, _shown(document, form, self._end, tokenizer)])
        self._first = f"{brackets}: {shown}"
        self._notes = [*_notes(form, tokenizer, options), *form.notes(first)]

    def describe(self) -> list[str]:
        """What it is, what its columns mean, and its first document, for people.

        What TRL would make of it otherwise follows; docs/how-to/prepare-data.md has the table.
        """
        first = [f"{self.source}: {self._words}", f"  the first document{self._first}"]
        return first + [f"  {note}" for note in self._notes]

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
            BadOption: documents cannot be packed in this way.
        """
        so_far = ReadSoFar(source=self.source, num_blank=self._num_blank)
        file = SampleFile(
            self.source,
            seq_length=seq_length,
            vocab_size=vocab_size,
            layout=self._layout(seq_length),
            truncation=self._truncation,
        )
        with file:
            for batch in _batches(self._documents):
                self._add(file, [one.pieces for one in batch if one.pieces])
                so_far = _after(so_far, batch, file.num_samples)
                on_batch(so_far)
                if limit is not None and file.num_samples >= limit:
                    break
            else:
                file.end()
            tokens = file.samples(limit)
        return Samples(tokens=tokens, summary=self._summary(so_far, file, tokens))

    def _layout(self, seq_length: int) -> Layout:
        if self._form is PLAIN_TEXT:
            return Stream(seq_length)
        return layout_of(self._strategy, seq_length)

    def _add(self, file: SampleFile, documents: list[Document]) -> None:
        if not documents:
            return
        if not self._form.has_class:
            file.add(self._tokenised(documents))
            return
        seq_length, of_words = file.seq_length, self._form.are_of_words
        samples = list(labelled_in(documents, self._tokenizer, seq_length, of_words=of_words))
        file.add(samples)
        file.count_cut(cut_in(documents, samples, self._tokenizer, seq_length, of_words=of_words))

    def _tokenised(self, documents: list[Document]) -> Iterable[Words]:
        """Documents, each with its beginning and its end, which is learned."""
        ended = [self._with_end(document) for document in documents]
        is_answered = COMPLETION_ONLY in self._form.asks
        tokenised = words_in(ended, self._tokenizer, is_answered=is_answered)
        for document, words in zip(documents, tokenised, strict=True):
            end = self._missing_end(document, words)
            yield np.concatenate([self._begin(document, words), words, end])

    def _begin(self, document: Document, words: Words) -> Words:
        leading = self._special.leading
        begin = self._special.missing(token_ids_of(words[: len(leading)]).tolist())
        self._num_begun += begin != leading
        return words_of(begin, all(piece.is_target for piece in document[:1]))

    def _missing_end(self, document: Document, words: Words) -> Words:
        end_id = self._end.token_id
        if end_id is None or token_ids_of(words[-1:]).tolist() == [end_id]:
            return words_of([])
        return words_of([end_id], _is_learned(document))

    def _with_end(self, document: Document) -> Document:
        end = self._end.text
        has_end = self._end.token_id is not None and document[-1].text.endswith(end)
        return document if has_end or not end else (*document, Piece(end, _is_learned(document)))

    def _summary(self, so_far: ReadSoFar, file: SampleFile, tokens: TokenArray) -> Summary:
        """The counts of the samples that remain where a limit was given."""
        counts = token_counts(tokens) if len(tokens) < file.num_samples else file.counts
        return Summary(
            source=self.source,
            unused=self._unused,
            num_documents=so_far.num_documents,
            num_blank=so_far.num_blank,
            num_begun=self._num_begun,
            long_documents=file.long_documents,
            truncation=self._truncation,
            num_samples=counts.num_samples,
            num_left_out=file.num_left_out,
            seq_length=file.seq_length,
            is_stream=self._form is PLAIN_TEXT,
            num_tokens=counts.num_tokens,
            num_starts=counts.num_starts,
            num_targets=counts.num_targets,
            class_counts=by_class(self._form.classes, counts.by_class),
        )


def _special_of(form: Form, tokenizer: PreTrainedTokenizerBase) -> SpecialTokens:
    """Find the special tokens that documents of a form begin by.

    A chat template writes its own, and `labelled_in` those of classes. Samples of plain text begin
    anywhere in it.
    """
    return NO_SPECIAL_TOKENS if form.has_end or form.has_class else special_tokens_of(tokenizer)


def _notes(form: Form, tokenizer: PreTrainedTokenizerBase, options: ReadOptions) -> list[str]:
    """Say where samples are other ones than TRL's because of the tokenizer or its template."""
    special, notes = special_tokens_of(tokenizer), []
    leading, trailing = (", ".join(tokenizer.convert_ids_to_tokens(list(ids))) for ids in special)
    if form is PLAIN_TEXT and leading:
        notes.append(
            f"{leading}: the tokenizer puts that in front of texts; plain text is cut without it"
        )
    if not form.has_end and not form.has_class and trailing:
        notes.append(
            f"{trailing}: the tokenizer puts that behind texts; TRL keeps it, here texts end once"
        )
    if ASSISTANT_ONLY in form.asks and options.assistant_only_loss:
        if not marks_answers(tokenizer):
            notes.append(
                "the chat template does not mark answers by {% generation %}: an answer is what it "
                "adds to the chat that asks for it; TRL knows marked copies of some templates"
            )
        elif not has_spaces(tokenizer):
            notes.append(
                "the tokenizer has no tokens of white space: where an answer begins or ends by "
                "some, TRL loses the answer's place, and its letters are learned here"
            )
        elif has_long_line_breaks(tokenizer):
            notes.append(
                "the tokenizer writes a line break behind a special token by several tokens: where "
                "an answer ends by one, TRL learns the first of them, and all are learned here"
            )
    return notes


def _strategy_of(form: Form, options: ReadOptions) -> PackingStrategy | None:
    is_packed = options.packing and not form.has_class and form is not PLAIN_TEXT
    return options.packing_strategy if is_packed else None


def _truncation_of(form: Form, options: ReadOptions) -> Truncation:
    if options.truncation is not None:
        return options.truncation
    is_stream = form is PLAIN_TEXT or _strategy_of(form, options) is PackingStrategy.WRAPPED
    return Truncation.SPLIT if is_stream else Truncation.CUT


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
    text, token_id = str(tokenizer.eos_token), int(tokenizer.eos_token_id)
    ids = tokenizer(f"a{text}", add_special_tokens=False, verbose=False).input_ids
    return _End(text=text if ids[-1:] == [token_id] else "", token_id=token_id)


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


def _described(words: str, form: Form, first: Row, unused: Sequence[str]) -> str:
    not_used = f"not used: {', '.join(unused)}" if unused else ""
    return "; ".join(filter(None, [words, first.part, form.words, not_used]))


def _shown(document: Document, form: Form, end: _End, tokenizer: PreTrainedTokenizerBase) -> str:
    """The pieces of a document, whose spaces and line breaks are to be seen."""
    separator = end.text if end.token_id is None else ""
    pieces = (*document, Piece(separator, is_target=True))
    shown = [_quoted(piece, form) for piece in pieces if piece.text]
    if any(piece.label != NO_LABEL for piece in document):
        return " + ".join(shown)
    if end.token_id is not None:
        shown.append(str(tokenizer.eos_token))
    return " + ".join(shown)


def _quoted(piece: Piece, form: Form) -> str:
    text = f"{piece.text[:SHOWN_CHARS]!r}{'...' * (len(piece.text) > SHOWN_CHARS)}"
    if piece.label != NO_LABEL:
        return f"{text} is of class {form.classes[piece.label]}"
    return text if piece.is_target else f"[{text}]"
