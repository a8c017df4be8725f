"""Documents as samples of tokens, stored in an unnamed temporary file.

A document is a tuple of pieces of text. The model learns to write the tokens of some pieces, its
targets, and only reads the others. A tokenised document is an array of `Words`: 32-bit integers,
each with a token id and a bit that marks targets (see `sample_rows`). They are not words of text.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from itertools import dropwhile, takewhile
from typing import TYPE_CHECKING, Self, overload

import numpy as np
import numpy.typing as npt

from swarm_ft.client.data.chat import common_length
from swarm_ft.client.data.layouts import (
    Layout,
    LongDocuments,
    Unpacked,
    Wrapped,
    truncate,
)
from swarm_ft.client.data.summary import TokenCounts
from swarm_ft.client.data.text_files import bad_dataset, reason
from swarm_ft.client.options import Truncation
from swarm_ft.errors import BadOption
from swarm_ft.protocol.spec.run_spec import MAX_SAMPLES
from swarm_ft.protocol.spec.sample_rows import (
    NO_LABEL,
    Flags,
    Numbers,
    Words,
    counts_of,
    label_tokens,
    labels_in,
    starts_in,
    targets_in,
    token_ids_of,
    words_of,
)

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedTokenizerBase

    from swarm_ft.client.data.chat import Document

TokenArray = npt.NDArray[np.uint32]
"""Words of samples on disk, uint32 [samples, seq_length]."""
ROWS_A_BLOCK = 4096
"""Number of rows that are counted or written at a time."""

# ---- text to learn


def tokenize_documents(
    documents: Sequence[Document],
    tokenizer: PreTrainedTokenizerBase,
    *,
    is_prompt_completion: bool = False,
) -> Iterator[Words]:
    """Yield the words of each document, tokenised as one text without special tokens.

    A token is a target if it contains a character of a target piece.

    Args:
        documents: Documents.
        tokenizer: Tokenizer of the model.
        is_prompt_completion: Whether each document is a prompt and its completion. Targets then
            begin at the first token that differs from the tokens of the prompt alone, as in TRL.
            This does not apply to documents of several turns.
    """
    if all(piece.is_target for document in documents for piece in document):
        for ids in _encoded(map(_text_of, documents), tokenizer)["input_ids"]:
            yield words_of(ids)
    elif is_prompt_completion:
        yield from _with_targets_after_prompt(documents, tokenizer)
    else:
        yield from _with_targets_by_character(documents, tokenizer)


def _with_targets_by_character(
    documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase
) -> Iterator[Words]:
    """Yield the words of documents; tokens with a character of a target piece are targets."""
    if tokenizer.is_fast:
        encoded = _encoded(map(_text_of, documents), tokenizer, with_offsets=True)
        found = zip(documents, encoded["input_ids"], encoded["offset_mapping"], strict=True)
        for document, ids, spans in found:
            yield words_of(ids, _targets_among(document, spans))
    else:  # a slow tokenizer does not report where in the text a token is
        for document in documents:
            yield _piece_by_piece(document, tokenizer)


def _with_targets_after_prompt(
    documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase
) -> Iterator[Words]:
    """Yield the words of documents; tokens behind those of the prompt alone are targets."""
    prompts = [
        "".join(piece.text for piece in takewhile(lambda piece: not piece.is_target, document))
        for document in documents
    ]
    prompt_ids = _encoded(prompts, tokenizer)["input_ids"]
    all_ids = _encoded(map(_text_of, documents), tokenizer)["input_ids"]
    for document, prompt, ids in zip(documents, prompt_ids, all_ids, strict=True):
        if _has_several_turns(document):
            yield from _with_targets_by_character([document], tokenizer)
            continue
        yield words_of(ids, np.arange(len(ids)) >= common_length(prompt, ids))


def _has_several_turns(document: Document) -> bool:
    """Whether text that is only read follows a target."""
    completion_and_rest = dropwhile(lambda piece: not piece.is_target, document)
    return any(piece.text and not piece.is_target for piece in completion_and_rest)


def _targets_among(document: Document, spans: Sequence[tuple[int, int]]) -> Flags:
    """Return which tokens contain a character of a target piece.

    Args:
        document: Pieces of the text.
        spans: Start and stop of each token, in characters of the text.
    """
    is_target_character = [np.full(len(piece.text), piece.is_target) for piece in document]
    num_targets_before = np.concatenate([[0], *is_target_character]).cumsum()
    start, stop = np.array(spans, dtype=np.int64).reshape(-1, 2).T
    # A token with an empty span counts as the character behind it.
    stop = np.minimum(np.maximum(stop, start + 1), len(num_targets_before) - 1)
    contains_target: Flags = num_targets_before[stop] > num_targets_before[start]
    return contains_target


def _piece_by_piece(document: Document, tokenizer: PreTrainedTokenizerBase) -> Words:
    """Return the words of a document whose pieces are tokenised each by itself."""
    encoded = _encoded([piece.text for piece in document], tokenizer)["input_ids"]
    return np.concatenate(
        [words_of(ids, piece.is_target) for ids, piece in zip(encoded, document, strict=True)]
    )


def _encoded(
    texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, *, with_offsets: bool = False
) -> BatchEncoding:
    return tokenizer(
        list(texts),
        add_special_tokens=False,
        return_attention_mask=False,
        return_offsets_mapping=with_offsets,
        verbose=False,  # texts longer than the model's context are intended here
    )


def _text_of(document: Document) -> str:
    return "".join(piece.text for piece in document)


# ---- classes to learn


def tokenize_with_classes(
    documents: Sequence[Document],
    tokenizer: PreTrainedTokenizerBase,
    seq_length: int,
    *,
    has_word_classes: bool,
) -> Iterator[Words]:
    """Yield each document as a sample with the tokenizer's special tokens, truncated if too long.

    The class of a text or of a pair stands at the last token that is not a pad token, where
    transformers reads it; the class of a word stands at its first token.

    Args:
        documents: Documents of one piece (a text), of two (a pair), or of one piece for each word.
        tokenizer: Tokenizer of the model.
        seq_length: Maximum number of tokens of a sample.
        has_word_classes: Whether each word has a class, instead of the text or pair.

    Raises:
        BadOption: Words have classes and the tokenizer reports no offsets, or samples are too short
            for special tokens.
    """
    if has_word_classes and not tokenizer.is_fast:
        raise BadOption("--task token-classification: expected a model with a fast tokenizer")
    firsts, seconds = _texts_of(documents, has_word_classes=has_word_classes)
    encoded = tokenizer(
        firsts,
        seconds,
        truncation=True,
        max_length=seq_length,
        return_attention_mask=False,
        return_offsets_mapping=has_word_classes,
        verbose=False,
    )
    all_ids = encoded["input_ids"]
    if any(len(ids) > seq_length for ids in all_ids):
        raise BadOption(f"--seq-length {seq_length}: the tokenizer's own tokens alone are more")
    # Some models and their tokenizers have no token types; type 1 marks the second text.
    all_types = encoded.get("token_type_ids") or [[0]] * len(all_ids)
    if has_word_classes:
        all_labels = map(_labels_of_words, documents, encoded["offset_mapping"])
    else:
        label_text = partial(_label_of_text, pad_token_id=tokenizer.pad_token_id)
        all_labels = map(label_text, documents, all_ids)
    for ids, labels, types in zip(all_ids, all_labels, all_types, strict=True):
        yield label_tokens(ids, labels, np.array(types) == 1)


def _labels_of_words(document: Document, spans: Sequence[tuple[int, int]]) -> Numbers:
    """Return the label of each token: the class of a word at the word's first token.

    Args:
        document: Words, with the spaces between them.
        spans: Start and stop of each token, in characters of the text; (0, 0) for special tokens.
    """
    labels = np.full(len(spans), NO_LABEL)
    stops, at = np.array([stop for _, stop in spans], dtype=np.int64), 0
    for word in document:
        begin = at + len(word.text) - len(word.text.lstrip())
        at += len(word.text)
        ends_behind_begin = stops > begin
        if ends_behind_begin.any():  # false if the word is truncated
            labels[np.argmax(ends_behind_begin)] = word.label
    return labels


def _label_of_text(
    document: Document, token_ids: Sequence[int], pad_token_id: int | None
) -> Numbers:
    """Return the label of each token: the class of a text or pair, at one token."""
    labels = np.full(len(token_ids), NO_LABEL)
    at = _class_position(token_ids, pad_token_id)
    labels[at : at + 1] = document[-1].label
    return labels


def _class_position(token_ids: Sequence[int], pad_token_id: int | None) -> int:
    """Return the token at which `AutoModelForSequenceClassification` reads a decoder's class."""
    at = max(0, len(token_ids) - 1)
    while at > 0 and token_ids[at] == pad_token_id:
        at -= 1
    return at


def count_truncated(
    documents: Sequence[Document],
    samples: Sequence[Words],
    tokenizer: PreTrainedTokenizerBase,
    seq_length: int,
    *,
    has_word_classes: bool,
) -> LongDocuments:
    """Return the counts of documents that `tokenize_with_classes` truncated to these samples.

    Documents whose samples have the full length are tokenised again, without a limit.
    """
    pairs = zip(documents, samples, strict=True)
    full = [document for document, words in pairs if len(words) == seq_length]
    if not full:
        return LongDocuments()
    texts = _texts_of(full, has_word_classes=has_word_classes)
    encoded = tokenizer(*texts, verbose=False)
    _, long_documents = truncate(map(words_of, encoded["input_ids"]), seq_length, Truncation.CUT)
    return long_documents


def _texts_of(
    documents: Sequence[Document], *, has_word_classes: bool
) -> tuple[list[str], list[str] | None]:
    """Return the texts for a tokenizer and, for pairs, the second texts."""
    if has_word_classes or all(len(document) == 1 for document in documents):
        return list(map(_text_of, documents)), None
    firsts, seconds = zip(*documents, strict=True)
    return [piece.text for piece in firsts], [piece.text for piece in seconds]


# ---- the samples of a job


class SampleFile:
    """File of samples made of documents; samples without a target are left out.

    The file has no name. It disappears when this object is closed and its arrays are released.

    Args:
        source: Name of the data, for errors.
        seq_length: Maximum number of tokens of a sample.
        vocab_size: Vocabulary size of the model.
        layout: Layout of documents in rows; None gives each document its own samples.
        truncation: Treatment of documents that are longer than a sample.

    Attributes:
        num_documents: Documents added so far.
        num_tokens: Tokens of these documents.
        num_left_out: Samples without a target.
        counts: Counts of the samples in the file.
        seq_length: Maximum number of tokens of a sample.
    """

    def __init__(
        self,
        source: str,
        *,
        seq_length: int,
        vocab_size: int,
        layout: Layout | None = None,
        truncation: Truncation = Truncation.CUT,
    ) -> None:
        self.num_documents = 0
        self.num_tokens = 0
        self._long_documents = LongDocuments()
        self.num_left_out = 0
        self.counts = TokenCounts()
        self._source = source
        self.seq_length = seq_length
        self._truncation = truncation
        self._layout = layout or Unpacked(seq_length)
        self._vocab_size = vocab_size
        self._file = tempfile.TemporaryFile(prefix="swarm-ft-tokens-")  # noqa: SIM115

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._file.close()

    @property
    def long_documents(self) -> LongDocuments:
        """Counts of documents longer than a sample; with `SPLIT`, of those that were split."""
        if isinstance(self._layout, Wrapped) and self._truncation is Truncation.SPLIT:
            return self._layout.split
        return self._long_documents

    def add(self, documents: Iterable[Words]) -> None:
        """Add tokenised documents.

        Raises:
            BadDataset: A token id is outside of the vocabulary, a run cannot take that many
                samples, or the disk is full.
        """
        tokenised = list(documents)
        self._check_vocabulary(np.concatenate([words_of([]), *tokenised]))
        self.num_documents += len(tokenised)
        self.num_tokens += sum(map(len, tokenised))
        shortened, long_documents = truncate(tokenised, self.seq_length, self._truncation)
        self.add_long_documents(long_documents)
        self._add_rows(self._layout.add(shortened))

    def add_long_documents(self, counts: LongDocuments) -> None:
        """Add counts of long documents; the caller does so for those that it truncates itself."""
        self._long_documents = self._long_documents.plus(counts)

    def end(self) -> None:
        """Write the samples that were incomplete; no document follows.

        Raises:
            BadDataset: See `add`.
        """
        self._add_rows(self._layout.end())

    def _add_rows(self, rows: Words) -> None:
        has_target = targets_in(rows).any(axis=1)
        self.num_left_out += int((~has_target).sum())
        self._store(rows[has_target])
        if self.num_samples > MAX_SAMPLES:
            raise bad_dataset(
                self._source,
                f"more than {MAX_SAMPLES} samples; take fewer (--max-samples), longer ones "
                "(--seq-length), or several documents in each (--packing)",
            )

    def samples(self, limit: int | None = None) -> TokenArray:
        """Return rows [samples, seq_length], read from disk on demand.

        Args:
            limit: Maximum number of samples; None for all.

        Raises:
            BadDataset: There is no sample.
        """
        if self.num_samples == 0:
            raise bad_dataset(self._source, self._emptiness())
        count = min(self.num_samples, limit or self.num_samples)
        return np.memmap(self._file, dtype="<u4", mode="r", shape=(count, self.seq_length))

    @property
    def num_samples(self) -> int:
        """Number of samples in the file."""
        return self.counts.num_samples

    def _check_vocabulary(self, words: Words) -> None:
        highest = int(token_ids_of(words).max(initial=0))
        if highest >= self._vocab_size:
            raise bad_dataset(
                self._source,
                f"token id {highest} is outside the model's vocabulary of "
                f"{self._vocab_size}; does the tokenizer belong to the model?",
            )

    def _emptiness(self) -> str:
        """Return why there is no sample, with the option that helps."""
        dropped = self.long_documents.num_documents
        if self._truncation is Truncation.DROP and 0 < dropped == self.num_documents:
            return (
                f"expected a document of at most {self.seq_length} tokens, but --truncation drop "
                f"leaves out all {dropped}; take a larger --seq-length, or --truncation cut"
            )
        if self.num_left_out:
            return (
                f"expected learned tokens, but none of {self.num_left_out} samples of "
                f"{self.seq_length} tokens has any: all are prompts or have weight 0; "
                "take a larger --seq-length, or --no-completion-only-loss"
            )
        return (
            f"expected at least one sample of {self.seq_length} tokens, got "
            f"{self.num_tokens} tokens in all; give more text or a smaller --seq-length"
        )

    def _store(self, rows: Words) -> None:
        self.counts = self.counts.plus(_counts_in(rows))
        with storing_tokens(self._source):
            self._file.write(rows.tobytes())
            self._file.flush()


@contextmanager
def storing_tokens(source: str) -> Iterator[None]:
    """Turn errors of writing tokens to a temporary file into errors of the data.

    Raises:
        BadDataset: The tokens could not be written.
    """
    try:
        yield
    except OSError as exc:
        raise bad_dataset(
            source,
            f"its tokens cannot be stored in {tempfile.gettempdir()} ({reason(exc)}); set TMPDIR "
            "to another directory",
        ) from exc


def token_counts(tokens: TokenArray) -> TokenCounts:
    """Return the counts of rows [samples, seq_length] on disk."""
    starts = range(0, len(tokens), ROWS_A_BLOCK)
    blocks = (np.asarray(tokens[start : start + ROWS_A_BLOCK]) for start in starts)
    return reduce(TokenCounts.plus, map(_counts_in, blocks), TokenCounts())


def _counts_in(rows: Words) -> TokenCounts:
    counts, labels = counts_of(rows), labels_in(rows)
    num_further_documents = int(starts_in(rows).sum())
    return TokenCounts(
        num_samples=len(rows),
        num_tokens=sum(counts.lengths),
        num_starts=len(rows) + num_further_documents,
        num_targets=counts.num_targets,
        by_class=tuple(np.bincount(labels[labels != NO_LABEL]).tolist()),
    )


class SampleBytes(Sequence[bytes]):
    """Samples in the form of the wire, encoded on access.

    Args:
        tokens: Rows [samples, seq_length].
    """

    def __init__(self, tokens: TokenArray) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, slice):
            return [tokens_to_bytes(row) for row in self._tokens[index]]
        return tokens_to_bytes(self._tokens[index])


def tokens_to_bytes(row: TokenArray) -> bytes:
    """Encode one row [seq_length] as little-endian uint32."""
    return row.astype("<u4").tobytes()
