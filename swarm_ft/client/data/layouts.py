"""Layouts: documents are shortened if needed, then placed into rows of samples. Pure.

`layout_of` is the single place that lists the ways in which documents share samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from swarm_ft.client.data.packing import BestFit
from swarm_ft.client.options import PackingStrategy, Truncation
from swarm_ft.protocol.spec.sample_rows import Words, pad_rows, words_of

DOCUMENTS_PACKED_TOGETHER = 1000
"""Number of documents in a group; no sample mixes groups. TRL packs in the batches of
`datasets.map`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LongDocuments:
    """Counts of documents that are longer than a sample.

    Attributes:
        num_documents: Number of such documents.
        num_tokens: Number of their tokens.
        num_tokens_lost: Number of tokens left out; for split documents, the number of tokens in
            samples without the document's beginning.
    """

    num_documents: int = 0
    num_tokens: int = 0
    num_tokens_lost: int = 0

    def plus(self, other: LongDocuments) -> LongDocuments:
        """Return the sum of both counts."""
        return LongDocuments(
            num_documents=self.num_documents + other.num_documents,
            num_tokens=self.num_tokens + other.num_tokens,
            num_tokens_lost=self.num_tokens_lost + other.num_tokens_lost,
        )


def truncate(
    documents: Iterable[Words], seq_length: int, truncation: Truncation
) -> tuple[list[Words], LongDocuments]:
    """Shorten documents that are longer than a sample.

    Args:
        documents: Tokens of each document.
        seq_length: Maximum number of tokens of a sample.
        truncation: Treatment of long documents; `SPLIT` leaves them to the layout.

    Returns:
        The remaining documents in order, and the counts of the long ones.
    """
    tokens = list(documents)
    lengths = [len(words) for words in tokens if len(words) > seq_length]
    lost = sum(lengths)
    if truncation is Truncation.DROP:
        tokens = [words for words in tokens if len(words) <= seq_length]
    else:
        lost -= seq_length * len(lengths)
    if truncation is Truncation.CUT:
        tokens = [words[:seq_length] for words in tokens]
    long = LongDocuments(num_documents=len(lengths), num_tokens=sum(lengths), num_tokens_lost=lost)
    return tokens, long


class Layout(Protocol):
    """A way to place documents into rows."""

    def add(self, documents: Sequence[Words]) -> Words:
        """Add documents in order and return the completed rows [N, seq_length]."""

    def end(self) -> Words:
        """Return the rows [N, seq_length] that were incomplete; no document follows."""


class Unpacked:
    """A sample of its own for each document, padded behind its end.

    Args:
        seq_length: Maximum number of tokens of a sample.
    """

    def __init__(self, seq_length: int) -> None:
        self._seq_length = seq_length

    def add(self, documents: Sequence[Words]) -> Words:
        """Return one row for each document."""
        rows = [pad_rows(words, self._seq_length) for words in documents]
        return np.concatenate([self.end(), *rows])

    def end(self) -> Words:
        """Return no rows."""
        return pad_rows(words_of([]), self._seq_length)


class Stream:
    """A single stream of all tokens, cut every `seq_length` tokens; its tail is dropped."""

    def __init__(self, seq_length: int) -> None:
        self._seq_length = seq_length
        self._rest = words_of([])

    def add(self, documents: Sequence[Words]) -> Words:
        """Return the full rows of the stream so far."""
        stream = np.concatenate([self._rest, *documents])
        whole = len(stream) // self._seq_length * self._seq_length
        self._rest = stream[whole:].copy()
        return stream[:whole].reshape(-1, self._seq_length)

    def end(self) -> Words:
        """Drop the tail and return no rows."""
        self._rest = words_of([])
        return pad_rows(self._rest, self._seq_length)


class Wrapped(Stream):
    """A stream of documents, whose tail becomes a shorter sample, as in TRL's `wrapped`."""

    def __init__(self, seq_length: int) -> None:
        super().__init__(seq_length)
        self.split = LongDocuments()
        self._num_documents = 0

    def add(self, documents: Sequence[Words]) -> Words:
        """Return the full rows of the stream, which restarts with each group of documents."""
        rows = [pad_rows(words_of([]), self._seq_length)]
        while documents:
            room = DOCUMENTS_PACKED_TOGETHER - self._num_documents
            group, documents = documents[:room], documents[room:]
            self._num_documents += len(group)
            self._count_split([len(words) for words in group])
            rows.append(super().add(group))
            if self._num_documents == DOCUMENTS_PACKED_TOGETHER:
                rows.append(self.end())
        return np.concatenate(rows)

    def end(self) -> Words:
        """Return the tail of the stream as a shorter sample."""
        row, self._rest, self._num_documents = self._rest, words_of([]), 0
        return pad_rows(row, self._seq_length)

    def _count_split(self, lengths: Sequence[int]) -> None:
        sizes = np.array(lengths, dtype=np.int64)
        begins = len(self._rest) + np.cumsum(sizes) - sizes
        behind = sizes - (self._seq_length - begins % self._seq_length)
        is_split = behind > 0
        self.split = self.split.plus(
            LongDocuments(
                num_documents=int(is_split.sum()),
                num_tokens=int(sizes[is_split].sum()),
                num_tokens_lost=int(behind[is_split].sum()),
            )
        )


def layout_of(strategy: PackingStrategy | None, seq_length: int) -> Layout:
    """Return the layout of documents in rows.

    Args:
        strategy: Packing strategy; None gives each document its own sample.
        seq_length: Maximum number of tokens of a sample.
    """
    if strategy is None:
        return Unpacked(seq_length)
    if strategy is PackingStrategy.WRAPPED:
        return Wrapped(seq_length)
    return BestFit(seq_length, DOCUMENTS_PACKED_TOGETHER)
