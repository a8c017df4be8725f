"""Datasets: documents of one form, and the samples made of them."""

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
from swarm_ft.client.data.progress import ReadProgress
from swarm_ft.client.data.rows import Row
from swarm_ft.client.data.samples import (
    SampleFile,
    TokenArray,
    count_truncated,
    token_counts,
    tokenize_documents,
    tokenize_with_classes,
)
from swarm_ft.client.data.special_tokens import (
    NO_SPECIAL_TOKENS,
    SpecialTokens,
    has_long_line_breaks,
    has_spaces,
    special_tokens_of,
)
from swarm_ft.client.data.summary import Summary, by_class
from swarm_ft.client.data.text_files import bad_dataset
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
"""Characters of each piece of the first document that the description shows."""
BATCH_DOCUMENTS = 1000
BATCH_CHARS = 1 << 20
"""Characters that are tokenised at a time: work for all cores, and some tens of megabytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """Samples of a dataset.

    Attributes:
        tokens: Rows [samples, seq_length] of token words, on disk; see `sample_rows`.
        summary: Counts of the samples.
    """

    tokens: TokenArray
    summary: Summary

    @property
    def words(self) -> str:
        """Counts as one line, for people."""
        return self.summary.line

    @property
    def long_documents(self) -> LongDocuments:
        """Documents that are longer than a sample."""
        return self.summary.long_documents


class _One(NamedTuple):
    """A document with the progress of reading; `pieces` is empty for a blank one."""

    pieces: Document
    done: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _End:
    """End of a document.

    Attributes:
        text: Text that is tokenised with the document, unless the document ends with it already.
        token_id: End-of-text token that the document ends with; None for a text separator.
    """

    text: str = ""
    token_id: int | None = None


class Dataset:
    """Documents of one form. The first is rendered at once, the others once, with the samples.

    Args:
        source: Name of the data.
        words: Description of the data, for people.
        form: Conversion of rows to documents.
        rows: Rows; at least one.
        tokenizer: Tokenizer of the model.
        options: Options of reading.

    Raises:
        BadDataset: There is no text, or a row before the first text is malformed.
        BadOption: Documents need a separator, and the tokenizer has none.

    Attributes:
        source: Name of the data.
        ineffective_options: Options that have no effect on this data, with the reasons.
    """

    ineffective_options: Mapping[str, str] = MappingProxyType({})

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
            raise bad_dataset(source, "expected text, found none; the data is empty")
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
        """Return lines for people about the data, its columns and its first document."""
        first = [f"{self.source}: {self._words}", f"  the first document{self._first}"]
        return first + [f"  {note}" for note in self._notes]

    def samples(
        self,
        seq_length: int,
        vocab_size: int,
        *,
        limit: int | None = None,
        on_batch: Callable[[ReadProgress], None] = lambda _so_far: None,
    ) -> Samples:
        """Read and tokenise all documents and lay out samples, in constant memory.

        Args:
            seq_length: Maximum number of tokens of a sample.
            vocab_size: Vocabulary size of the model.
            limit: Maximum number of samples; reading stops there.
            on_batch: Callback after about a thousand documents; its exception ends the reading.

        Raises:
            BadDataset: A row cannot be used (the message names it), or no sample has a target.
            BadOption: These documents cannot be packed.
        """
        so_far = ReadProgress(source=self.source, num_blank=self._num_blank)
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
        seq_length, is_by_word = file.seq_length, self._form.has_word_classes
        samples = list(
            tokenize_with_classes(
                documents, self._tokenizer, seq_length, has_word_classes=is_by_word
            )
        )
        file.add(samples)
        file.add_long_documents(
            count_truncated(
                documents, samples, self._tokenizer, seq_length, has_word_classes=is_by_word
            )
        )

    def _tokenised(self, documents: list[Document]) -> Iterable[Words]:
        """Yield the tokens of documents with their begin and their end; the end is learned."""
        ended = [self._with_end(document) for document in documents]
        is_prompt_completion = COMPLETION_ONLY in self._form.loss_options
        tokenised = tokenize_documents(
            ended, self._tokenizer, is_prompt_completion=is_prompt_completion
        )
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

    def _summary(self, so_far: ReadProgress, file: SampleFile, tokens: TokenArray) -> Summary:
        """Return the counts of all samples, or of those within the limit."""
        counts = token_counts(tokens) if len(tokens) < file.num_samples else file.counts
        return Summary(
            source=self.source,
            unused=self._unused,
            num_documents=so_far.num_documents,
            num_blank=so_far.num_blank,
            num_with_leading_tokens=self._num_begun,
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
    """Return the special tokens that documents of a form begin with.

    Chat templates write their own, and `tokenize_with_classes` adds those of classes. Samples of
    plain text begin anywhere in it.
    """
    return NO_SPECIAL_TOKENS if form.has_end or form.has_class else special_tokens_of(tokenizer)


def _notes(form: Form, tokenizer: PreTrainedTokenizerBase, options: ReadOptions) -> list[str]:
    """Return notes where the tokenizer or its template makes samples differ from TRL's."""
    special, notes = special_tokens_of(tokenizer), []
    leading, trailing = (", ".join(tokenizer.convert_ids_to_tokens(list(ids))) for ids in special)
    if form is PLAIN_TEXT and leading:
        notes.append(
            f"{leading}: the tokenizer adds it in front of texts; plain text is cut without it"
        )
    if not form.has_end and not form.has_class and trailing:
        notes.append(
            f"{trailing}: the tokenizer adds it behind texts; TRL keeps it, swarm-ft ends a text "
            "only once"
        )
    if ASSISTANT_ONLY in form.loss_options and options.assistant_only_loss:
        if not marks_answers(tokenizer):
            notes.append(
                "the chat template does not mark answers with {% generation %}: an answer is the "
                "text that it adds to the prompt; TRL has marked copies of some templates"
            )
        elif not has_spaces(tokenizer):
            notes.append(
                "the tokenizer has no white space tokens: if an answer begins or ends with white "
                "space, TRL skips the answer, and swarm-ft learns its letters"
            )
        elif has_long_line_breaks(tokenizer):
            notes.append(
                "the tokenizer encodes a line break behind a special token as several tokens: if "
                "an answer ends with one, TRL learns the first token, and swarm-ft learns all"
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
            "give a separator text"
        )
    text, token_id = str(tokenizer.eos_token), int(tokenizer.eos_token_id)
    ids = tokenizer(f"a{text}", add_special_tokens=False, verbose=False).input_ids
    return _End(text=text if ids[-1:] == [token_id] else "", token_id=token_id)


def _documents(form: Form, rows: Iterator[Row]) -> Iterator[_One]:
    for row in rows:
        document = _rendered(form, row)
        yield _One(document if _has_text(document) else (), row.done)


def _rendered(form: Form, row: Row) -> Document:
    """Render a row as a document.

    Raises:
        BadDataset: The row cannot be used, or its text is not valid Unicode.
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
    """Whether a part of a document is learned, and with it the end."""
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


def _after(so_far: ReadProgress, batch: list[_One], num_samples: int) -> ReadProgress:
    num_blank = sum(not one.pieces for one in batch)
    return replace(
        so_far,
        num_documents=so_far.num_documents + len(batch) - num_blank,
        num_blank=so_far.num_blank + num_blank,
        num_samples=num_samples,
        share_read=batch[-1].done,
    )


# ---- in words


def _described(words: str, form: Form, first: Row, unused: Sequence[str]) -> str:
    not_used = f"not used: {', '.join(unused)}" if unused else ""
    return "; ".join(filter(None, [words, first.part, form.description, not_used]))


def _shown(document: Document, form: Form, end: _End, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the pieces of a document, with visible spaces and line breaks."""
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
