"""The events of a trial with their times: ordered, and awaited by their kind."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Entry(Generic[Item]):
    """Something, and when it was seen, in monotonic seconds."""

    at_s: float
    item: Item


class Timeline(Generic[Item]):
    """See the module's docstring."""

    def __init__(self) -> None:
        self.entries: list[Entry[Item]] = []
        self._added = asyncio.Event()

    def add(self, item: Item) -> None:
        """This happened now."""
        self.entries.append(Entry(time.monotonic(), item))
        added, self._added = self._added, asyncio.Event()
        added.set()

    async def first(
        self, matches: Callable[[Item], bool], after_s: float = -math.inf
    ) -> Entry[Item]:
        """The first that matches and is not older; waits for it."""
        seen = 0
        while True:
            for entry in self.entries[seen:]:
                seen += 1
                if entry.at_s >= after_s and matches(entry.item):
                    return entry
            await self._added.wait()
