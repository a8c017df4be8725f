"""A sample as it is kept and travels: a row of words, as many in each row of a run. Pure.

A word is a token's id. With `CONTEXT` beside it the token is only read: nobody learns to write it.
`NO_TOKEN` fills a row up behind its sample's last token. The class of a token, or of a whole sample
at the token that a decoder reads it at, stands in the bits between: the model learns the class, not
the id. Of samples that are two texts, tokens of the second have `SECOND` beside them. The targets
of a sample are its tokens without `CONTEXT`, but for the first, in front of which nothing stands,
if it has no class. So a row of plain text is its token ids, and what a sample's loss is over can be
told from its bytes alone.

Several documents may share a sample, packed. The first token of each further document carries
`START`: no token stands in front of it in its document, so it is never a target.
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
"""Marks the first token of a further document of a sample.

Its lower bit is a class's in words without `CONTEXT`.
"""
CLASS_BIT = 20
"""From this bit on a word holds one more than its token's class; 0 if it has none."""
LABELLED = 1 << CLASS_BIT
"""Above every id, see `MAX_VOCAB_SIZE`."""
_CLASSES = SECOND - LABELLED
_IDS = LABELLED - 1
NO_TOKEN = (1 << 32) - 1
NO_LABEL = -100
"""Of a token that is no target; transformers' and torch's own."""
MIN_TEXT_LENGTH = 2
"""One to read and one to write."""

Words = npt.NDArray[np.uint32]
Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


class Samples(NamedTuple):
    """Samples as a model takes them, padded on the right to the longest.

    Attributes:
        token_ids: int64 [B, T], with `SECOND` beside those of a second text; 0 where there is no
            token.
        labels: int64 [B, T]: of each token its class, or its id if a model learns to write it, or
            `NO_LABEL`.
        lengths: tokens of each sample, int64 [B].
    """

    token_ids: Numbers
    labels: Numbers
    lengths: Numbers


class Counts(NamedTuple):
    """What there is in some rows.

    Attributes:
        num_targets: of all together.
        lengths: tokens of each.
        documents: see `documents_in`.
    """

    num_targets: int
    lengths: tuple[int, ...]
    documents: tuple[tuple[int, ...], ...] = ()


def words_of(token_ids: npt.ArrayLike, is_target: npt.ArrayLike = True) -> Words:
    """Tokens as words, uint32.

    Args:
        token_ids: below `CONTEXT`.
        is_target: of each, or of all: whether a model learns to write it.
    """
    ids = np.asarray(token_ids, dtype="<u4")
    return np.where(is_target, ids, ids | np.uint32(CONTEXT)).astype("<u4")


def labelled(
    token_ids: npt.ArrayLike, labels: npt.ArrayLike, is_second: npt.ArrayLike = False
) -> Words:
    """Tokens with their classes as words, uint32.

    Args:
        token_ids: below `LABELLED`.
        labels: the class of each, below `run_spec.MAX_LABELS`; or `NO_LABEL`, and it is only read.
        is_second: of each, or of all: whether it is of a second text.
    """
    ids, classes = np.asarray(token_ids, dtype=np.int64), np.asarray(labels, dtype=np.int64)
    ids = np.where(is_second, ids | SECOND, ids)
    word = np.where(classes == NO_LABEL, ids | CONTEXT, ids | (classes + 1) << CLASS_BIT)
    return word.astype("<u4")


def joined(documents: Sequence[Words]) -> Words:
    """Join documents of text into the words of one sample, whose further documents are marked.

    Args:
        documents: words of each, uint32 [T]; none is empty.
    """
    first, *further = documents
    marked = [np.concatenate([_ids_in(one[:1]) | np.uint32(START), one[1:]]) for one in further]
    return np.concatenate([first, *marked]).astype("<u4")


def filled_up(words: Words, seq_length: int) -> Words:
    """Words of one document as rows [N, T], of which the last ends where its tokens do."""
    fill = np.full(-len(words) % seq_length, NO_TOKEN, dtype="<u4")
    return np.concatenate([words, fill]).reshape(-1, seq_length)


def rows_in(data: bytes | Sequence[bytes], seq_length: int) -> Words:
    """Rows [N, T] as they travel: little-endian uint32; a whole number of them."""
    joined = data if isinstance(data, bytes) else b"".join(data)
    return np.frombuffer(joined, dtype="<u4").reshape(-1, seq_length)


def targets_in(rows: Words) -> Flags:
    """Which words of rows [N, T] are targets."""
    is_target = rows < CONTEXT
    is_target[:, :1] &= (rows[:, :1] & _CLASSES) > 0
    return is_target


def labels_in(rows: Words) -> Numbers:
    """Classes of words [N, T], int64; `NO_LABEL` where there is none."""
    classes = (rows & np.uint32(_CLASSES)) >> CLASS_BIT
    return np.where((rows < CONTEXT) & (classes > 0), classes.astype(np.int64) - 1, NO_LABEL)


def seconds_in(rows: Words) -> Flags:
    """Which words of rows [N, T] are of a second text."""
    is_second: Flags = (rows & np.uint32(SECOND) > 0) & (rows != NO_TOKEN)
    return is_second


def lengths_in(rows: Words) -> Numbers:
    """Tokens of each of rows [N, T], int64 [N]."""
    lengths: Numbers = (rows != NO_TOKEN).sum(axis=1)
    return lengths


def starts_in(rows: Words) -> Flags:
    """Which words begin a further document of their sample; of the shape of `rows`."""
    # With `SECOND` beside it a word is no token of any model, and so is `NO_TOKEN`.
    is_start: Flags = (rows & np.uint32(START | SECOND)) == START
    return is_start


def documents_in(rows: Words) -> tuple[tuple[int, ...], ...]:
    """Tokens of each document of each of rows [N, T] that several share, else none of that row.

    Empty if no row has several documents.
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
    """Targets, tokens and documents of rows [N, T]."""
    lengths = tuple(map(int, lengths_in(rows)))
    return Counts(int(targets_in(rows).sum()), lengths, documents_in(rows))


def counts_of_all(parts: Sequence[Counts]) -> Counts:
    """Counts of rows, by the counts of some of them after the others."""
    documents: list[tuple[int, ...]] = []
    if any(part.documents for part in parts):
        for part in parts:
            documents += part.documents or ((),) * len(part.lengths)
    lengths = tuple(length for part in parts for length in part.lengths)
    return Counts(sum(part.num_targets for part in parts), lengths, tuple(documents))


def samples_in(rows: Words) -> Samples:
    """What rows [N, T], which no task refuses, hold."""
    lengths = lengths_in(rows)
    rows = rows[:, : lengths.max(initial=0)]
    token_ids = np.where(rows == NO_TOKEN, 0, _ids_in(rows)).astype(np.int64)
    token_ids |= np.where(seconds_in(rows), SECOND, 0)
    learned = np.where(rows < LABELLED, rows.astype(np.int64), labels_in(rows))
    return Samples(token_ids, learned, lengths)


def token_ids_of(row: Words) -> Numbers:
    """The tokens of one row [T], int64."""
    ids: Numbers = _ids_in(row[row != NO_TOKEN]).astype(np.int64)
    return ids


def text_refusal(rows: Words, vocab_size: int) -> tuple[int, str] | None:
    """The first of rows [N, T] that is no sample of text, and why; None if all are some."""
    if rows.shape[1] >= MIN_TEXT_LENGTH and rows.max(initial=0) < min(vocab_size, LABELLED):
        return None  # as plain text is: all of it is tokens that are learned
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
    """The first of rows [N, T] with which something is wrong, and what.

    Args:
        rows: of any words.
        vocab_size: of the model.
        wrong: what is so of rows [N], beside what no row may be, and why.
        least: tokens of a sample.
    """
    is_token = rows != NO_TOKEN
    has_gap = (is_token[:, 1:] & ~is_token[:, :-1]).any(axis=1)
    lengths, highest = is_token.sum(axis=1), np.where(is_token, _ids_in(rows), 0).max(axis=1)
    flags = (has_gap, lengths < least, highest >= vocab_size, *(flags for flags, _ in wrong))
    bad = np.flatnonzero(np.logical_or.reduce(flags))
    if not len(bad):
        return None
    row = int(bad[0])
    words = (
        "expected tokens without gaps between them",
        f"expected {least} tokens or more, got {lengths[row]}",
        f"token id {highest[row]} is outside the model's "
        f"vocabulary of {vocab_size}; does the tokenizer belong to the model?",
        *(why for _, why in wrong),
    )
    return row, next(why for of_rows, why in zip(flags, words, strict=True) if of_rows[row])


def _ids_in(words: Words) -> Words:
    """Token ids, of words that are tokens: below what marks them; no id of those that are none."""
    ids = words & np.uint32(_IDS | _CLASSES)
    ids = np.where(starts_in(words), ids & np.uint32((_IDS | _CLASSES) & ~START), ids)
    return np.where(words < CONTEXT, ids & np.uint32(_IDS), ids)
