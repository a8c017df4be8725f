"""Best-fit packing of several whole documents into one sample. Pure.

`sample_rows.START` marks the start of each document; no document attends to another.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Sequence

import numpy as np

from swarm_ft.protocol.spec.sample_rows import Words, join_documents, pad_rows, words_of

MAX_GROUP_TOKENS = 1 << 24
"""Maximum number of tokens in memory that wait to be packed, 4 bytes each."""


def best_fit(lengths: Sequence[int], seq_length: int) -> list[list[int]]:
    """Return the documents of each sample, by best-fit decreasing.

    Documents are placed from the longest to the shortest, equally long ones in order. Each goes
    into the sample with the least sufficient room, the oldest of these. The result equals TRL's
    `bfd` sample by sample (arXiv 2404.10830).

    Args:
        lengths: Number of tokens of each document, from 1 to `seq_length`.
        seq_length: Maximum number of tokens of a sample.

    Returns:
        Indices of documents for each sample.
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
    """Layout of several whole documents in one sample.

    Longer documents than a sample are split first.

    Args:
        seq_length: Maximum number of tokens of a sample.
        group_size: Number of documents that are packed together; no sample mixes groups.
    """

    def __init__(self, seq_length: int, group_size: int) -> None:
        self._seq_length = seq_length
        self._group_size = group_size
        self._group: list[Words] = []
        self._num_documents = self._num_tokens = 0

    def add(self, documents: Sequence[Words]) -> Words:
        """Return the rows of groups that are complete."""
        rows = [pad_rows(words_of([]), self._seq_length)]
        for document in documents:
            starts = range(0, len(document), self._seq_length)
            self._group += [document[start : start + self._seq_length] for start in starts]
            self._num_documents += 1
            self._num_tokens += len(document)
            if self._num_documents == self._group_size or self._num_tokens >= MAX_GROUP_TOKENS:
                rows.append(self.end())
        return np.concatenate(rows)

    def end(self) -> Words:
        """Return the rows of the incomplete group."""
        group, self._group = self._group, []
        self._num_documents = self._num_tokens = 0
        rows = [pad_rows(words_of([]), self._seq_length)]
        for sample in best_fit(list(map(len, group)), self._seq_length):
            rows.append(
                pad_rows(join_documents([group[index] for index in sample]), self._seq_length)
            )
        return np.concatenate(rows)
