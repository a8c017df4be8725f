"""Committed steps that wait to be applied: what replicas summed, and how it is to be applied.

A newcomer fills it while it fetches its stage's state. Sums wait as they were encoded, in memory up
to a bound and in files beyond it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from swarm_ft.errors import Unavailable
from swarm_ft.peer.gradient_coder import EncodedSum
from swarm_ft.protocol.coordinator_messages import CommitStep
from swarm_ft.protocol.frame import EncodedTensor

MAX_MEMORY_BYTES = 256 << 20
"""Of all sums together that are not in files."""


@dataclass(frozen=True, slots=True)
class _InFile:
    """A sum in a file: how many values and bytes each piece has."""

    path: Path
    sizes: tuple[tuple[int, int], ...]


class Backlog:
    """First in, first out.

    Args:
        folder: where files may lie.
        name: that their names begin with; no other backlog's there.
        memory_bytes: of sums that may be in memory.
    """

    def __init__(self, folder: Path, name: str, *, memory_bytes: int = MAX_MEMORY_BYTES) -> None:
        self._folder = folder
        self._name = name
        self._memory_bytes = memory_bytes
        self._steps: deque[tuple[CommitStep, EncodedSum | _InFile]] = deque()

    async def append(self, commit: CommitStep, total: EncodedSum) -> None:
        """A step was committed.

        Raises:
            Unavailable: the disk does not take its sum.
        """
        held = sum(kept.num_bytes for _, kept in self._steps if isinstance(kept, EncodedSum))
        if held + total.num_bytes <= self._memory_bytes:
            self._steps.append((commit, total))
            return
        path = self._folder / f"{self._name}-{commit.step}.sum"
        self._steps.append((commit, await asyncio.to_thread(_write, path, total)))

    async def first(self) -> tuple[CommitStep, EncodedSum] | None:
        """The oldest step, which stays until it is dropped; None if there is none.

        Raises:
            Unavailable: its file cannot be read.
        """
        if not self._steps:
            return None
        commit, kept = self._steps[0]
        if isinstance(kept, _InFile):
            kept = await asyncio.to_thread(_read, kept)
        return commit, kept

    def drop_first(self) -> None:
        """The oldest step is applied."""
        _, kept = self._steps.popleft()
        if isinstance(kept, _InFile):
            kept.path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Nobody will apply what is there."""
        while self._steps:
            self.drop_first()


def _write(path: Path, total: EncodedSum) -> _InFile:
    pieces = [(count, tensor.to_bytes()) for count, tensor in total.pieces]
    try:
        with path.open("wb") as file:
            file.writelines(data for _, data in pieces)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise Unavailable(f"{path} cannot be written: {error}") from error
    return _InFile(path, tuple((count, len(data)) for count, data in pieces))


def _read(kept: _InFile) -> EncodedSum:
    try:
        with kept.path.open("rb") as file:
            return EncodedSum(
                tuple(
                    (count, EncodedTensor.from_bytes(file.read(num_bytes)))
                    for count, num_bytes in kept.sizes
                )
            )
    except OSError as error:
        raise Unavailable(f"{kept.path} cannot be read: {error}") from error
