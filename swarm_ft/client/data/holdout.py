"""Documents of the training data that are held out, drawn by a seed. Pure.

A share is drawn evenly: one document of each run of 1/share documents, as they are read. A number
of documents is drawn of all, which have to be counted first.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """The documents that are held out, or all others.

    Attributes:
        size: of what is held out: below 1 a share of all documents, from 1 on their number.
        seed: of the draw.
        is_held_out: whether this is the part that is held out.
    """

    size: float
    seed: int
    is_held_out: bool

    @property
    def is_share(self) -> bool:
        """Whether the number of all documents need not be known."""
        return self.size < 1

    def __str__(self) -> str:
        held_out = f"{self.size:.3g}" if self.is_share else f"{self.size:,.0f} documents"
        return f"{held_out} held out" if self.is_held_out else f"without {held_out} held out"

    def of(self, rows: Iterable[T], num_rows: int = 0) -> Iterator[T]:
        """The rows of this part.

        Args:
            rows: all of them, one a document.
            num_rows: how many there are; needed unless this is of a share.
        """
        drawn = self._drawn_by_share() if self.is_share else self._drawn_of(num_rows)
        held_out = next(drawn, None)
        for index, row in enumerate(rows):
            is_drawn = index == held_out
            if is_drawn:
                held_out = next(drawn, None)
            if is_drawn == self.is_held_out:
                yield row

    def of_text(self, text: str) -> str:
        """This part of a text: its end is held out, from the beginning of a line if it has lines.

        Raises:
            ValueError: this is no share.
        """
        if not self.is_share:
            raise ValueError(f"expected a share below 1, got {self.size}")
        cut = round(len(text) * (1 - self.size))
        cut = text.rfind("\n", 0, cut) + 1 or cut
        return text[cut:] if self.is_held_out else text[:cut]

    def _drawn_by_share(self) -> Iterator[int]:
        """Rising indices without end, one in each run of 1/size."""
        draw, start = random.Random(self.seed), 0
        for number in range(1, 1 << 62):
            stop = math.ceil(number / self.size)
            yield start + int(draw.random() * (stop - start))
            start = stop

    def _drawn_of(self, num_rows: int) -> Iterator[int]:
        count = min(int(self.size), num_rows)
        yield from sorted(random.Random(self.seed).sample(range(num_rows), count))
