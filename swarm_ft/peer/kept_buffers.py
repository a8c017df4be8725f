"""What an attempt does about buffers beside training: reads them ahead, and tells what is here.

None of it can fail the attempt: what is not there in time costs a key frame.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path

import numpy as np

from swarm_ft.buffers import BufferKey, BufferLimits, BufferStore, End
from swarm_ft.errors import BadOption
from swarm_ft.ids import BlockIndex, RunId, SampleId, StepNumber
from swarm_ft.log import get_logger
from swarm_ft.peer.state.stage_state import StageState
from swarm_ft.protocol.messages.control import Assign
from swarm_ft.protocol.messages.reports import BufferCounts, HeldBuffers, Samples, SampleSet
from swarm_ft.protocol.spec.codec_spec import Direction
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import RunSpec
from swarm_ft.protocol.spec.training_plan import Microbatch, VisitOrder, step_samples

# ---- where a peer keeps its buffers, and how much it lends for them

logger = get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferPlace:
    """See the module's docstring.

    Attributes:
        limits: of memory and disk.
        directory: of this peer alone; None keeps nothing on disk.
    """

    limits: BufferLimits = field(default_factory=BufferLimits)
    directory: Path | None = None

    def open(self, run_id: RunId, spec: RunSpec) -> BufferStore:
        """A run's buffers, with what is left of them from an earlier start. Blocks.

        Where the directory cannot be used they are in memory only: that costs key frames at most.
        """
        try:
            return self._opened(run_id, spec, self.directory)
        except BadOption as error:
            logger.warning("%s; buffers are kept in memory only", error.message)
            return self._opened(run_id, spec, None)

    def _opened(self, run_id: RunId, spec: RunSpec, directory: Path | None) -> BufferStore:
        return BufferStore(
            self.limits,
            directory=directory,
            run_id=run_id,
            identity=spec.digest(),
            visits=VisitOrder(spec.train),
        )


# ---- which buffers a stage keeps by its place in the pipeline, and what to tell others of them


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


class AttemptBuffers:
    """See the module's docstring.

    Args:
        state: the stage, with the store.
        layers: of the stage.
    """

    def __init__(self, assign: Assign, state: StageState, layers: LayerRange) -> None:
        self._assign = assign
        self._state = state
        self._kept = StageBuffers(assign.spec, assign.run_id, layers, state.store)

    def begin(self) -> tuple[HeldBuffers, ...]:
        """All are connected: what is here, as the next step finds it."""
        self._state.store.resume_at(StepNumber(self._assign.committed_steps))
        return self._kept.held()

    def planned(
        self, step: StepNumber, *, here: Iterable[Microbatch], elsewhere: Iterable[Microbatch]
    ) -> None:
        """A step begins: have its buffers in memory soon, and those of the next one after them.

        Which of the next step's samples pass here is not known yet; mostly those that did before.

        Args:
            step: its number.
            here: microbatches that pass this peer.
            elsewhere: that pass other replicas; what is here of them is out of date by its commit.
        """
        store, train, samples = self._state.store, self._assign.spec.train, _samples_of(here)
        self._state.elsewhere = tuple(self._kept.keys(_samples_of(elsewhere)))
        store.prefetch(self._kept.keys(samples))
        following = StepNumber(step + 1)
        if following < train.num_steps:
            store.prefetch(self._kept.keys(step_samples(train, following)))

    def take_report(self) -> tuple[tuple[BufferCounts, ...], tuple[HeldBuffers, ...]]:
        """What is kept at each boundary, and what is here no more since the last call."""
        return self._kept.take_counts(), self._kept.take_lost()


def _samples_of(batches: Iterable[Microbatch]) -> list[SampleId]:
    return [sample for batch in batches for sample in batch.samples]
