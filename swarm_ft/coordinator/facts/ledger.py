"""Ledger of the peers that hold each sample's buffers, as of the last commits. Values only.

An entry is the pair of peers that last exchanged a sample at a boundary. Entries are hints: frames
name their bases by digest, so a wrong entry costs a key frame and nothing else.

Entries lie in chunks of some samples. A chunk never changes: a changed entry makes a new ledger
with another chunk there, which shares all others. So an older state stays as it was.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from swarm_ft.ids import BlockIndex, PeerId, SampleId
from swarm_ft.protocol.messages.control import Stage
from swarm_ft.protocol.messages.reports import SampleSet

CHUNK_SAMPLES = 64
"""Samples per chunk. A commit writes the chunks of its samples, each about as large as a page of
the journal. At this size, Python's overhead per chunk is small.
"""
MAX_NUMBERED = 0xFFFF
"""Peers that fit into an entry. Later peers count as nobody: their samples go anywhere."""

Entries = NDArray[np.uint16]
"""Numbers of peers, [samples, boundaries, 2]; 0 is nobody."""
Samples = NDArray[np.int64]

_NUMBER = np.dtype("<u2")


class Side(IntEnum):
    """The end of a boundary; its index in an entry."""

    UPSTREAM = 0
    DOWNSTREAM = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """Holders of all buffers of one run; equal ledgers are equal values.

    Attributes:
        boundaries: Boundaries of the pipeline, in rising order.
        num_samples: Number of samples of the run.
        peers: Peers with a number, which is their position from 1.
        chunks: Entries of `CHUNK_SAMPLES` samples each, as little-endian uint16 in C order.
        entry: Index of the stage that keeps constants, if not 0. Constants are the outputs of the
            frozen stages in front of it. Only its own end of that boundary counts, and no earlier
            boundary has buffers.
    """

    boundaries: tuple[BlockIndex, ...]
    num_samples: int
    peers: tuple[PeerId, ...] = ()
    chunks: tuple[bytes, ...]
    entry: int = 0

    @classmethod
    def empty(cls, boundaries: tuple[BlockIndex, ...], num_samples: int) -> Ledger:
        """Create a ledger in which nobody holds anything."""
        nothing = bytes(CHUNK_SAMPLES * len(boundaries) * 2 * _NUMBER.itemsize)
        num_chunks = -(-num_samples // CHUNK_SAMPLES)
        return cls(boundaries=boundaries, num_samples=num_samples, chunks=(nothing,) * num_chunks)

    # ---- questions

    def entries(self, samples: Iterable[SampleId]) -> Entries:
        """Return the entries of these samples, in their order."""
        size = len(self.boundaries) * 2 * _NUMBER.itemsize
        places = (divmod(sample, CHUNK_SAMPLES) for sample in samples)
        rows = (self.chunks[chunk][row * size : (row + 1) * size] for chunk, row in places)
        return self._entries(b"".join(rows))

    def all_entries(self) -> Entries:
        """Return the entries of all samples."""
        return self._entries(b"".join(self.chunks))[: self.num_samples]

    def numbers(self) -> dict[PeerId, int]:
        """Return the number of each peer."""
        return {peer: number for number, peer in enumerate(self.peers, start=1)}

    def buffered(self, stages: Sequence[Stage]) -> dict[BlockIndex, int]:
        """Count the samples that have a buffer at both ends of each boundary of this pipeline.

        Args:
            stages: Stages, first to last, with the ledger's boundaries.
        """
        numbers, entries = self.numbers(), self.all_entries()
        counts = {}
        for i, boundary in enumerate(self.boundaries):
            ends = [
                _is_of(stage.peers, numbers)[entries[:, i, side]]
                for side, stage in zip(Side, stages[i : i + 2], strict=True)
            ]
            has_both = ends[1] if i == self.entry - 1 else ends[0] & ends[1]
            counts[boundary] = int(np.count_nonzero(has_both)) if i >= self.entry - 1 else 0
        return counts

    def keepers(self, samples: Iterable[SampleId]) -> list[PeerId | None]:
        """Return the peer that keeps the constants of each sample, or None."""
        found = self.entries(samples)[:, self.entry - 1, Side.DOWNSTREAM].tolist()
        return [self.peers[number - 1] if number else None for number in found]

    def keeps_all(self, peers: Collection[PeerId], num_samples: int) -> bool:
        """Whether these peers together keep the constants of the first `num_samples` samples."""
        if not self.entry:
            return False
        found = self.all_entries()[:num_samples, self.entry - 1, Side.DOWNSTREAM]
        return bool(_is_of(peers, self.numbers())[found].all())

    # ---- what became of it

    def after(self, routes: Mapping[SampleId, Sequence[PeerId]]) -> Ledger:
        """Return the ledger after samples passed these routes.

        Args:
            routes: For each sample the peer of each stage, first to last.
        """
        newcomers = dict.fromkeys(p for route in routes.values() for p in route)
        known = self._with_peers(newcomers)
        numbers = known.numbers()
        along = np.array(
            [[numbers.get(peer, 0) for peer in route] for route in routes.values()], _NUMBER
        )
        pairs = np.stack([along[:, :-1], along[:, 1:]], axis=2)
        return known._edited(np.fromiter(routes, np.int64), pairs)  # noqa: SLF001 - its own class

    def without(self, peer: PeerId, boundary: BlockIndex, lost: SampleSet) -> Ledger:
        """Return the ledger after a peer lost buffers; entries of other peers stay."""
        number, samples = self.numbers().get(peer, 0), lost.to_array()
        entries = self.entries(samples.tolist())
        is_gone = np.zeros(entries.shape, np.bool_)
        column = self.boundaries.index(boundary)
        is_gone[:, column] = entries[:, column] == number
        return self._cleared(samples, entries, is_gone) if number else self

    def with_inventory(self, peer: PeerId, inventory: Mapping[BlockIndex, SampleSet]) -> Ledger:
        """Return the ledger after a peer reported its inventory.

        Entries of this peer that the inventory lacks become empty. An inventory adds no entries.
        """
        number, entries = self.numbers().get(peer, 0), self.all_entries()
        is_gone = entries == number
        for boundary, samples in inventory.items():
            is_gone[samples.to_array(), self.boundaries.index(boundary)] = False
        found = np.flatnonzero(is_gone.any(axis=(1, 2)))
        return self._cleared(found, entries[found], is_gone[found]) if number else self

    # ---- parts

    def _entries(self, data: bytes) -> Entries:
        return np.frombuffer(data, _NUMBER).reshape(-1, len(self.boundaries), 2)

    def _with_peers(self, peers: Iterable[PeerId]) -> Ledger:
        known = self.numbers()
        newcomers = tuple(peer for peer in peers if peer not in known)
        return replace(self, peers=(*self.peers, *newcomers)[:MAX_NUMBERED]) if newcomers else self

    def _cleared(self, samples: Samples, entries: Entries, is_gone: NDArray[np.bool_]) -> Ledger:
        """Return the ledger with the marked numbers of these samples' entries set to nobody."""
        is_changed = is_gone.any(axis=(1, 2))
        left = np.where(is_gone, _NUMBER.type(0), entries)
        return self._edited(samples[is_changed], left[is_changed])

    def _edited(self, samples: Samples, entries: Entries) -> Ledger:
        """Return the ledger with these entries for these samples."""
        if not len(samples):
            return self
        chunks = list(self.chunks)
        order = np.argsort(samples, kind="stable")
        numbers, rows = np.divmod(samples[order], CHUNK_SAMPLES)
        touched, starts = np.unique(numbers, return_index=True)
        for chunk, part in zip(
            touched.tolist(), np.split(np.arange(len(order)), starts[1:]), strict=True
        ):
            array = self._entries(chunks[chunk]).copy()
            array[rows[part]] = entries[order[part]]
            chunks[chunk] = array.tobytes()
        return replace(self, chunks=tuple(chunks))


def _is_of(peers: Collection[PeerId], numbers: Mapping[PeerId, int]) -> NDArray[np.bool_]:
    """Return for each number, from 0 on, whether it belongs to one of these peers."""
    is_one = np.zeros(len(numbers) + 1, np.bool_)
    is_one[[numbers[peer] for peer in peers if peer in numbers]] = True
    return is_one


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerChange:
    """The difference between two ledgers.

    Attributes:
        boundaries: Boundaries of the new ledger.
        peers: Peers of the new ledger; None if they are the same.
        chunks: Changed chunks, with their positions.
        is_new: Whether nothing of the old ledger counts.
    """

    boundaries: tuple[BlockIndex, ...]
    peers: tuple[PeerId, ...] | None
    chunks: tuple[tuple[int, bytes], ...]
    is_new: bool


def change_of(before: Ledger | None, after: Ledger) -> LedgerChange:
    """Return the difference between two ledgers; None stands for an empty old one."""
    is_new = before is None or before.boundaries != after.boundaries
    base = Ledger.empty(after.boundaries, after.num_samples) if is_new or not before else before
    pairs = enumerate(zip(base.chunks, after.chunks, strict=True))
    return LedgerChange(
        boundaries=after.boundaries,
        peers=after.peers if is_new or after.peers != base.peers else None,
        chunks=tuple((i, new) for i, (old, new) in pairs if new is not old and new != old),
        is_new=is_new,
    )
