"""A sample in storage and on the wire: a row of words, as many in each row of a run. Pure.

A word holds a token's id. The bit `CONTEXT` marks a token that is only read: the model does not
learn to write it. `NO_TOKEN` fills a row up after its sample's last token. The bits between hold
the class of a token, or of a whole sample at the token at which a decoder reads it: the model then
learns the class, not the id. In samples of two texts, `SECOND` marks tokens of the second. The
targets of a sample are its tokens without `CONTEXT`, but for the first one without a class, which
no token precedes. So a row of plain text equals its token ids, and a row's bytes alone determine
what a sample's loss covers.

Several documents may share a sample, packed. The first token of each further document carries
`START`: no token precedes it in its document, so it is never a target.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from swarm_ft.protocol.spec.run_spec import MIN_LENGTH

CONTEXT = 1 << 31
SECOND = 1 << 30
START = CONTEXT | 1 << 29
"""Mark of the first token of a further document of a sample.

Its lower bit belongs to a class in words without `CONTEXT`.
"""
CLASS_BIT = 20
"""First bit of a word's class plus one; 0 for no class."""
LABELLED = 1 << CLASS_BIT
"""First word with a class, above every id, see `MAX_VOCAB_SIZE`."""
_CLASSES = SECOND - LABELLED
_IDS = LABELLED - 1
NO_TOKEN = (1 << 32) - 1
NO_LABEL = -100
"""Label of a token that is no target, as in transformers and torch."""
MIN_TEXT_LENGTH = 2
"""Tokens of a text at least: one to read and one to write."""

Words = npt.NDArray[np.uint32]
Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


class Samples(NamedTuple):
    """Samples as a model takes them, padded on the right to the longest.

    Attributes:
        token_ids: int64 [B, T], with `SECOND` in those of a second text; 0 without a token.
        labels: int64 [B, T]: each token's class, its id if the model learns to write it, or
            `NO_LABEL`.
        lengths: Tokens of each sample, int64 [B].
    """

    token_ids: Numbers
    labels: Numbers
    lengths: Numbers


class Counts(NamedTuple):
    """Counts of some rows.

    Attributes:
        num_targets: Targets of all rows together.
        lengths: Tokens of each row.
        documents: Tokens of each document, see `documents_in`.
    """

    num_targets: int
    lengths: tuple[int, ...]
    documents: tuple[tuple[int, ...], ...] = ()


def words_of(token_ids: npt.ArrayLike, is_target: npt.ArrayLike = True) -> Words:
    """Return tokens as words, uint32.

    Args:
        token_ids: Ids below `CONTEXT`.
        is_target: Whether the model learns to write each token, or all of them.
    """
    ids = np.asarray(token_ids, dtype="<u4")
    return np.where(is_target, ids, ids | np.uint32(CONTEXT)).astype("<u4")


def label_tokens(
    token_ids: npt.ArrayLike, labels: npt.ArrayLike, is_second: npt.ArrayLike = False
) -> Words:
    """Return tokens with their classes as words, uint32.

    Args:
        token_ids: Ids below `LABELLED`.
        labels: Class of each token, below `run_spec.MAX_LABELS`; `NO_LABEL` for one that is only
            read.
        is_second: Whether each token, or all of them, belong to a second text.
    """
    ids, classes = np.asarray(token_ids, dtype=np.int64), np.asarray(labels, dtype=np.int64)
    ids = np.where(is_second, ids | SECOND, ids)
    word = np.where(classes == NO_LABEL, ids | CONTEXT, ids | (classes + 1) << CLASS_BIT)
    return word.astype("<u4")


def join_documents(documents: Sequence[Words]) -> Words:
    """Join documents of text into the words of one sample, and mark the further documents.

    Args:
        documents: Words of each document, uint32 [T]; none is empty.
    """
    first, *further = documents
    marked = [np.concatenate([_ids_in(one[:1]) | np.uint32(START), one[1:]]) for one in further]
    return np.concatenate([first, *marked]).astype("<u4")


def pad_rows(words: Words, seq_length: int) -> Words:
    """Return words of one document as rows [N, T]; the last one is filled up."""
    fill = np.full(-len(words) % seq_length, NO_TOKEN, dtype="<u4")
    return np.concatenate([words, fill]).reshape(-1, seq_length)


def rows_in(data: bytes | Sequence[bytes], seq_length: int) -> Words:
    """Return rows [N, T] from their bytes on the wire, little-endian uint32."""
    joined = data if isinstance(data, bytes) else b"".join(data)
    return np.frombuffer(joined, dtype="<u4").reshape(-1, seq_length)


def targets_in(rows: Words) -> Flags:
    """Return which words of rows [N, T] are targets."""
    is_target = rows < CONTEXT
    is_target[:, :1] &= (rows[:, :1] & _CLASSES) > 0
    return is_target


def labels_in(rows: Words) -> Numbers:
    """Return classes of words [N, T], int64; `NO_LABEL` for words without one."""
    classes = (rows & np.uint32(_CLASSES)) >> CLASS_BIT
    return np.where((rows < CONTEXT) & (classes > 0), classes.astype(np.int64) - 1, NO_LABEL)


def seconds_in(rows: Words) -> Flags:
    """Return which words of rows [N, T] belong to a second text."""
    is_second: Flags = (rows & np.uint32(SECOND) > 0) & (rows != NO_TOKEN)
    return is_second


def lengths_in(rows: Words) -> Numbers:
    """Return the tokens of each of rows [N, T], int64 [N]."""
    lengths: Numbers = (rows != NO_TOKEN).sum(axis=1)
    return lengths


def starts_in(rows: Words) -> Flags:
    """Return which words begin a further document of their sample; of the shape of `rows`."""
    # A word with `SECOND` beside it is no token of any model, and neither is `NO_TOKEN`.
    is_start: Flags = (rows & np.uint32(START | SECOND)) == START
    return is_start


def documents_in(rows: Words) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each document of each of rows [N, T], empty for rows of one document.

    The result is empty if no row has several documents.
    """
    is_start = starts_in(rows)
    if not is_start.any():
        return ()
    found = zip(map(np.flatnonzero, is_start), lengths_in(rows), strict=True)
    return tuple(
        tuple(np.diff(starts, prepend=0, append=length).tolist()) if len(starts) else ()
        for starts, length in found
    )


def counts_of(rows: Words) -> Counts:
    """Return targets, tokens and documents of rows [N, T]."""
    lengths = tuple(map(int, lengths_in(rows)))
    return Counts(int(targets_in(rows).sum()), lengths, documents_in(rows))


def counts_of_all(parts: Sequence[Counts]) -> Counts:
    """Return the counts of rows from the counts of consecutive parts of them."""
    documents: list[tuple[int, ...]] = []
    if any(part.documents for part in parts):
        for part in parts:
            documents += part.documents or ((),) * len(part.lengths)
    lengths = tuple(length for part in parts for length in part.lengths)
    return Counts(sum(part.num_targets for part in parts), lengths, tuple(documents))


def samples_in(rows: Words) -> Samples:
    """Return the samples in rows [N, T] that no task refuses."""
    lengths = lengths_in(rows)
    rows = rows[:, : lengths.max(initial=0)]
    token_ids = np.where(rows == NO_TOKEN, 0, _ids_in(rows)).astype(np.int64)
    token_ids |= np.where(seconds_in(rows), SECOND, 0)
    learned = np.where(rows < LABELLED, rows.astype(np.int64), labels_in(rows))
    return Samples(token_ids, learned, lengths)


def token_ids_of(row: Words) -> Numbers:
    """Return the tokens of one row [T], int64."""
    ids: Numbers = _ids_in(row[row != NO_TOKEN]).astype(np.int64)
    return ids


def text_refusal(rows: Words, vocab_size: int) -> tuple[int, str] | None:
    """Return the first of rows [N, T] that is no sample of text, with the reason; None for none."""
    if rows.shape[1] >= MIN_TEXT_LENGTH and rows.max(initial=0) < min(vocab_size, LABELLED):
        return None  # plain text: all of it is tokens that the model learns
    has_class = (labels_in(rows) != NO_LABEL).any(axis=1)
    has_none = ~targets_in(rows).any(axis=1)
    wrong = [
        (has_class, "expected tokens without classes"),
        (seconds_in(rows).any(axis=1), "expected one text"),
        (starts_in(rows)[:, 0], "expected a document in front of a further one"),
        (has_none, "expected a token that is to be learned, behind the first; all are only read"),
    ]
    return first_refused(rows, vocab_size, wrong, least=MIN_TEXT_LENGTH)


def first_refused(
    rows: Words,
    vocab_size: int,
    wrong: Sequence[tuple[Flags, str]],
    *,
    least: int = MIN_LENGTH,
) -> tuple[int, str] | None:
    """Return the first wrong one of rows [N, T], with the reason; None for none.

    Args:
        rows: Rows of any words.
        vocab_size: Vocabulary of the model.
        wrong: Further faults: flags of rows [N], each with its reason.
        least: Tokens of a sample at least.
    """
    is_token = rows != NO_TOKEN
    has_gap = (is_token[:, 1:] & ~is_token[:, :-1]).any(axis=1)
    lengths, highest = is_token.sum(axis=1), np.where(is_token, _ids_in(rows), 0).max(axis=1)
    flags = (has_gap, lengths < least, highest >= vocab_size, *(flags for flags, _ in wrong))
    bad = np.flatnonzero(np.logical_or.reduce(flags))
    if not len(bad):
        return None
    row = int(bad[0])
    reasons = (
        "expected tokens without gaps between them",
        f"expected {least} tokens or more, got {lengths[row]}",
        f"token id {highest[row]} is outside the model's "
        f"vocabulary of {vocab_size}; does the tokenizer belong to the model?",
        *(why for _, why in wrong),
    )
    return row, next(why for of_rows, why in zip(flags, reasons, strict=True) if of_rows[row])


def _ids_in(words: Words) -> Words:
    """Return the ids of words that are tokens; other words yield no valid id."""
    ids = words & np.uint32(_IDS | _CLASSES)
    ids = np.where(starts_in(words), ids & np.uint32((_IDS | _CLASSES) & ~START), ids)
    return np.where(words < CONTEXT, ids & np.uint32(_IDS), ids)
