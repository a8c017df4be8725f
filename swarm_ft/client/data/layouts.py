"""Tokens of documents as rows of samples: long documents are shortened, then laid into rows. Pure.

`layout_of` is the one place that knows the ways in which documents share samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from swarm_ft.client.data.packing import BestFit
from swarm_ft.client.options import PackingStrategy, Truncation
from swarm_ft.protocol.spec.sample_rows import Words, filled_up, words_of

DOCUMENTS_PACKED_TOGETHER = 1000
"""No sample holds documents of two such groups. TRL packs in the batches of `datasets.map`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LongDocuments:
    """Documents that are longer than a sample.

    Attributes:
        num_documents: how many there are.
        num_tokens: tokens of all of them.
        num_tokens_lost: tokens that are left out; of split documents, the tokens that stand in
            samples without the document's beginning.
    """

    num_documents: int = 0
    num_tokens: int = 0
    num_tokens_lost: int = 0

    def plus(self, other: LongDocuments) -> LongDocuments:
        """Return the counts of both."""
        return LongDocuments(
            num_documents=self.num_documents + other.num_documents,
            num_tokens=self.num_tokens + other.num_tokens,
            num_tokens_lost=self.num_tokens_lost + other.num_tokens_lost,
        )


def truncated(
    documents: Iterable[Words], seq_length: int, truncation: Truncation
) -> tuple[list[Words], LongDocuments]:
    """Shorten the documents that are longer than a sample.

    Args:
        documents: tokens of each.
        seq_length: tokens a sample, at most.
        truncation: how; `SPLIT` leaves documents whole, and the layout splits them.

    Returns:
        The documents that remain, in order, and the counts of the long ones.
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
    """A way to lay documents into rows."""

    def add(self, documents: Sequence[Words]) -> Words:
        """Take documents in order, and return the rows [N, seq_length] that are complete."""

    def end(self) -> Words:
        """Return the rows [N, seq_length] that were still incomplete; no document follows."""


class OneByOne:
    """Each document begins a sample of its own, and its last sample ends where it does.

    Args:
        seq_length: tokens a sample, at most.
    """

    def __init__(self, seq_length: int) -> None:
        self._seq_length = seq_length

    def add(self, documents: Sequence[Words]) -> Words:
        """See `Layout`."""
        rows = [filled_up(words, self._seq_length) for words in documents]
        return np.concatenate([self.end(), *rows])

    def end(self) -> Words:
        """See `Layout`."""
        return filled_up(words_of([]), self._seq_length)


class Stream:
    """All tokens in one stream, which is cut every `seq_length` tokens; its tail is dropped.

    Args:
        seq_length: tokens a sample.
    """

    def __init__(self, seq_length: int) -> None:
        self._seq_length = seq_length
        self._rest = words_of([])

    def add(self, documents: Sequence[Words]) -> Words:
        """See `Layout`."""
        stream = np.concatenate([self._rest, *documents])
        whole = len(stream) // self._seq_length * self._seq_length
        self._rest = stream[whole:].copy()
        return stream[:whole].reshape(-1, self._seq_length)

    def end(self) -> Words:
        """See `Layout`."""
        self._rest = words_of([])
        return filled_up(self._rest, self._seq_length)


class Wrapped(Stream):
    """Documents in one stream, of which the tail is a shorter sample, as TRL's `wrapped`.

    Attributes:
        split: documents that go on in another sample.
    """

    def __init__(self, seq_length: int) -> None:
        super().__init__(seq_length)
        self.split = LongDocuments()
        self._num_documents = 0

    def add(self, documents: Sequence[Words]) -> Words:
        """See `Layout`."""
        rows = [filled_up(words_of([]), self._seq_length)]
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
        """See `Layout`."""
        row, self._rest, self._num_documents = self._rest, words_of([]), 0
        return filled_up(row, self._seq_length)

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
    """Choose how documents are laid into rows.

    Args:
        strategy: how documents share samples; None gives each its own.
        seq_length: tokens a sample, at most.
    """
    if strategy is None:
        return OneByOne(seq_length)
    if strategy is PackingStrategy.WRAPPED:
        return Wrapped(seq_length)
    return BestFit(seq_length, DOCUMENTS_PACKED_TOGETHER)
