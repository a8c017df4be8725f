"""Best-fit packing: several whole documents share a sample. Pure.

`sample_rows.START` marks where each begins; no document attends to another.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Sequence

import numpy as np

from swarm_ft.protocol.spec.sample_rows import Words, filled_up, joined, words_of

MAX_GROUP_TOKENS = 1 << 24
"""Tokens that wait in memory to be packed together, 4 bytes each."""


def best_fit(lengths: Sequence[int], seq_length: int) -> list[list[int]]:
    """Choose the documents of each sample, best fit decreasing.

    Documents are placed from the longest to the shortest, in order where they are equally long.
    Each goes into the sample with the least room that is enough, the oldest of such samples. This
    is TRL's `bfd`, sample by sample (arXiv 2404.10830).

    Args:
        lengths: tokens of each document, from 1 to `seq_length`.
        seq_length: tokens a sample, at most.

    Returns:
        Indices of documents, for each sample.
    """
    samples: list[list[int]] = []
    by_room: defaultdict[int, deque[list[int]]] = defaultdict(deque)
    rooms: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda one: -lengths[one]):
        place = bisect_left(rooms, lengths[index])
        if place < len(rooms):
            room = rooms[place]
            sample = by_room[room].popleft()
            if not by_room[room]:
                del rooms[place]
        else:
            room, sample = seq_length, []
            samples.append(sample)
        sample.append(index)
        room -= lengths[index]
        if room and not by_room[room]:
            insort(rooms, room)
        by_room[room].append(sample)
    return samples


class BestFit:
    """A `Layout` of samples that several whole documents share.

    Documents that are longer than a sample are split before.

    Args:
        seq_length: tokens a sample, at most.
        group_size: documents that are packed together; no sample has documents of two groups.
    """

    def __init__(self, seq_length: int, group_size: int) -> None:
        self._seq_length = seq_length
        self._group_size = group_size
        self._group: list[Words] = []
        self._num_documents = self._num_tokens = 0

    def add(self, documents: Sequence[Words]) -> Words:
        """See `Layout`."""
        rows = [filled_up(words_of([]), self._seq_length)]
        for document in documents:
            starts = range(0, len(document), self._seq_length)
            self._group += [document[start : start + self._seq_length] for start in starts]
            self._num_documents += 1
            self._num_tokens += len(document)
            if self._num_documents == self._group_size or self._num_tokens >= MAX_GROUP_TOKENS:
                rows.append(self.end())
        return np.concatenate(rows)

    def end(self) -> Words:
        """See `Layout`."""
        group, self._group = self._group, []
        self._num_documents = self._num_tokens = 0
        rows = [filled_up(words_of([]), self._seq_length)]
        for sample in best_fit(list(map(len, group)), self._seq_length):
            rows.append(filled_up(joined([group[index] for index in sample]), self._seq_length))
        return np.concatenate(rows)
