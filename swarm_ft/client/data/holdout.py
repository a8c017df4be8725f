"""Held-out documents of the training data, drawn by a seed. Pure.

A share is drawn evenly: one document of each run of 1/share documents, in reading order. A fixed
number of documents is drawn of all of them, which must be counted first.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetPart:
    """The held-out documents, or all others.

    Attributes:
        size: Size of the held-out part: below 1 a share of all documents, from 1 on a number.
        seed: Seed of the draw.
        is_held_out: Whether this is the held-out part.
    """

    size: float
    seed: int
    is_held_out: bool

    @property
    def is_share(self) -> bool:
        """Whether the size is a share, so that the total number is not needed."""
        return self.size < 1

    def __str__(self) -> str:
        held_out = f"{self.size:.3g}" if self.is_share else f"{self.size:,.0f} documents"
        return f"{held_out} held out" if self.is_held_out else f"without {held_out} held out"

    def select_rows(self, rows: Iterable[T], num_rows: int = 0) -> Iterator[T]:
        """Yield the rows of this part.

        Args:
            rows: All rows, one for each document.
            num_rows: Number of all rows; needed unless the size is a share.
        """
        drawn = self._drawn_by_share() if self.is_share else self._drawn_of(num_rows)
        held_out = next(drawn, None)
        for index, row in enumerate(rows):
            is_drawn = index == held_out
            if is_drawn:
                held_out = next(drawn, None)
            if is_drawn == self.is_held_out:
                yield row

    def select_text(self, text: str) -> str:
        """Return this part of a text: the end is held out, from the start of a line if possible.

        Raises:
            ValueError: The size is not a share.
        """
        if not self.is_share:
            raise ValueError(f"expected a share below 1, got {self.size}")
        cut = round(len(text) * (1 - self.size))
        cut = text.rfind("\n", 0, cut) + 1 or cut
        return text[cut:] if self.is_held_out else text[:cut]

    def _drawn_by_share(self) -> Iterator[int]:
        """Yield rising indices without end, one in each run of 1/size."""
        draw, start = random.Random(self.seed), 0
        for number in range(1, 1 << 62):
            stop = math.ceil(number / self.size)
            yield start + int(draw.random() * (stop - start))
            start = stop

    def _drawn_of(self, num_rows: int) -> Iterator[int]:
        count = min(int(self.size), num_rows)
        yield from sorted(random.Random(self.seed).sample(range(num_rows), count))
