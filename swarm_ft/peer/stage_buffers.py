"""Which buffers a stage keeps by its place in the pipeline, and what to tell others of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import reduce

import numpy as np

from swarm_ft.buffers import BufferKey, BufferStore, End
from swarm_ft.ids import BlockIndex, RunId, SampleId
from swarm_ft.protocol.buffer_reports import BufferCounts, HeldBuffers
from swarm_ft.protocol.codec_spec import Direction
from swarm_ft.protocol.layers import LayerRange
from swarm_ft.protocol.run_spec import RunSpec
from swarm_ft.protocol.sample_set import Samples, SampleSet


@dataclass(frozen=True, slots=True)
class KeptEnd:
    """One of the buffers that this peer keeps of every sample.

    Attributes:
        direction: of the frames that build on it.
    """

    boundary: BlockIndex
    direction: Direction
    end: End


class StageBuffers:
    """See the module's docstring.

    Attributes:
        shared: what neighbours have too, with the same bytes.
    """

    def __init__(
        self, spec: RunSpec, run_id: RunId, layers: LayerRange, store: BufferStore
    ) -> None:
        self._run_id = run_id
        self._store = store
        self.shared = tuple(_shared_ends(spec, layers))
        self._own = tuple(_own_ends(spec, layers))

    def keys(self, samples: Iterable[SampleId]) -> Iterator[BufferKey]:
        """Names of all that these samples may have here, sample after sample."""
        for sample in samples:
            for kept in (*self.shared, *self._own):
                yield self.key(kept, sample)

    def key(self, kept: KeptEnd, sample: SampleId) -> BufferKey:
        """The name of one of a sample's buffers."""
        return BufferKey(self._run_id, kept.boundary, kept.end, sample)

    def at(self, boundary: BlockIndex) -> tuple[KeptEnd, ...]:
        """What is shared with the neighbours over one boundary."""
        return tuple(kept for kept in self.shared if kept.boundary == boundary)

    # ---- reports

    def held(self) -> tuple[HeldBuffers, ...]:
        """Samples of which all that is shared over a boundary is here, by boundary."""
        return tuple(
            HeldBuffers(boundary=boundary, samples=SampleSet.of(self._samples(boundary)))
            for boundary in _boundaries(self.shared)
        )

    def take_lost(self) -> tuple[HeldBuffers, ...]:
        """Samples of which something shared was lost since the last call, by boundary."""
        keys = self._store.take_lost()
        lost = {
            boundary: {
                key.sample
                for key in keys
                if key.boundary == boundary and key.end is not End.RESIDUAL
            }
            for boundary in _boundaries(self.shared)
        }
        return tuple(
            HeldBuffers(boundary=boundary, samples=SampleSet.of(samples))
            for boundary, samples in lost.items()
            if samples
        )

    def take_counts(self) -> tuple[BufferCounts, ...]:
        """What is kept at each boundary, residuals included, and what happened since last."""
        stats = self._store.take_stats()
        boundaries = _boundaries((*self.shared, *self._own))
        return tuple(stats[boundary] for boundary in boundaries if boundary in stats)

    def _samples(self, boundary: BlockIndex) -> Samples:
        held = [self._store.samples(boundary, kept.end) for kept in self.at(boundary)]
        return reduce(np.intersect1d, held) if held else np.empty(0, np.int64)


def _boundaries(ends: Iterable[KeptEnd]) -> list[BlockIndex]:
    return sorted({kept.boundary for kept in ends})


def _shared_ends(spec: RunSpec, layers: LayerRange) -> Iterator[KeptEnd]:
    for direction in Direction:
        if spec.train.codec(direction).is_delta:
            is_forward = direction is Direction.FORWARD
            if layers.start > 0:
                end = End.RECEIVED if is_forward else End.SENT
                yield KeptEnd(BlockIndex(layers.start), direction, end)
            if layers.stop < spec.model.num_blocks:
                end = End.SENT if is_forward else End.RECEIVED
                yield KeptEnd(BlockIndex(layers.stop), direction, end)


def _own_ends(spec: RunSpec, layers: LayerRange) -> Iterator[KeptEnd]:
    if spec.train.codec(Direction.BACKWARD).has_residual and layers.start > 0:
        yield KeptEnd(BlockIndex(layers.start), Direction.BACKWARD, End.RESIDUAL)
