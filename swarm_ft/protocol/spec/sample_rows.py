"""A sample as it is kept and travels: a row of words, as many in each row of a run. Pure.

A word is a token's id. With `CONTEXT` beside it the token is only read: nobody learns to write it.
`NO_TOKEN` fills a row up behind its sample's last token. The targets of a sample are its tokens
without `CONTEXT`, but for the first, in front of which nothing stands. So a row of plain text is
its token ids, and what a sample's loss is over can be told from its bytes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

CONTEXT = 1 << 31
"""Far above every id, see `MAX_VOCAB_SIZE`."""
NO_TOKEN = (1 << 32) - 1
NO_LABEL = -100
"""Of a token that is no target; transformers' and torch's own."""
MIN_LENGTH = 2
"""Tokens of a sample: one to read and one to write."""

Words = npt.NDArray[np.uint32]
Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


class Samples(NamedTuple):
    """Samples as a model takes them, padded on the right to the longest.

    Attributes:
        token_ids: int64 [B, T]; 0 where there is no token.
        labels: int64 [B, T]: of each token its id, if a model learns to write it, or `NO_LABEL`.
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
    """

    num_targets: int
    lengths: tuple[int, ...]


def words_of(token_ids: npt.ArrayLike, is_target: npt.ArrayLike = True) -> Words:
    """Tokens as words, uint32.

    Args:
        token_ids: below `CONTEXT`.
        is_target: of each, or of all: whether a model learns to write it.
    """
    ids = np.asarray(token_ids, dtype="<u4")
    return np.where(is_target, ids, ids | np.uint32(CONTEXT)).astype("<u4")


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
    is_target[:, :1] = False
    return is_target


def counts_of(rows: Words) -> Counts:
    """Targets and tokens of rows [N, T]."""
    lengths = (rows != NO_TOKEN).sum(axis=1)
    return Counts(int(targets_in(rows).sum()), tuple(map(int, lengths)))


def samples_in(rows: Words) -> Samples:
    """What rows [N, T], of which `refusal` says nothing, hold."""
    lengths = (rows != NO_TOKEN).sum(axis=1)
    rows = rows[:, : lengths.max(initial=0)]
    token_ids = np.where(rows == NO_TOKEN, 0, rows & ~np.uint32(CONTEXT)).astype(np.int64)
    labels = np.where(rows < CONTEXT, rows.astype(np.int64), NO_LABEL)
    return Samples(token_ids, labels, lengths)


def token_ids_of(row: Words) -> Numbers:
    """The tokens of one row [T], int64."""
    ids: Numbers = (row[row != NO_TOKEN] & ~np.uint32(CONTEXT)).astype(np.int64)
    return ids


def refusal(rows: Words, vocab_size: int) -> tuple[int, str] | None:
    """The first of rows [N, T] that is no sample, and why; None if all are some."""
    if rows.shape[1] >= MIN_LENGTH and rows.max(initial=0) < vocab_size:
        return None  # as plain text is: all of it is tokens that are learned
    is_token = rows != NO_TOKEN
    token_ids = rows & ~np.uint32(CONTEXT)
    wrong = (
        (is_token[:, 1:] & ~is_token[:, :-1]).any(axis=1),
        is_token.sum(axis=1) < MIN_LENGTH,
        ((token_ids >= vocab_size) & is_token).any(axis=1),
        ~targets_in(rows).any(axis=1),
    )
    bad = np.flatnonzero(np.logical_or.reduce(wrong))
    if not len(bad):
        return None
    row = int(bad[0])
    words = (
        "expected tokens without gaps between them",
        f"expected {MIN_LENGTH} tokens or more, got {is_token[row].sum()}",
        f"token id {token_ids[row][is_token[row]].max(initial=0)} is outside the model's "
        f"vocabulary of {vocab_size}; does the tokenizer belong to the model?",
        "expected a token that is to be learned, behind the first; all are only read",
    )
    return row, next(why for flags, why in zip(wrong, words, strict=True) if flags[row])
