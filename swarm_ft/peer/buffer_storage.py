"""Buffers of a peer: where they lie, and an attempt's prefetching and reports.

Nothing here can fail the attempt: a buffer that is not there in time costs a key frame.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path

import numpy as np

from swarm_ft.base.log import get_logger
from swarm_ft.base.sealing import Sealer
from swarm_ft.buffers import BufferKey, BufferLimits, BufferStore, End
from swarm_ft.buffers.disk import find_runs, folders_older_than
from swarm_ft.buffers.records import Samples
from swarm_ft.codec.spec import Direction
from swarm_ft.errors import BadOption
from swarm_ft.ids import BlockIndex, RunId, SampleId, StepNumber
from swarm_ft.peer.state.stage_state import StageState
from swarm_ft.protocol.messages.control import Assign
from swarm_ft.protocol.messages.reports import BufferCounts, HeldBuffers, SampleSet
from swarm_ft.protocol.spec.bounds import Name
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.microbatch import Microbatch
from swarm_ft.protocol.spec.run_spec import RunSpec
from swarm_ft.protocol.spec.training_plan import VisitOrder, step_samples

# ---- where a peer stores its buffers, and how much space it lends

logger = get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferStorage:
    """The memory and disk space that a peer lends for buffers.

    Attributes:
        limits: Limits of memory and disk.
        directory: Directory of this peer alone; None: memory only.
        keep_s: Seconds without a write after which a run's buffers are deleted, even if the run was
            not reported as over.
    """

    limits: BufferLimits = field(default_factory=BufferLimits)
    directory: Path | None = None
    keep_s: float = 7 * 86400.0

    def open(self, run_id: RunId, spec: RunSpec, sealer: Sealer | None = None) -> BufferStore:
        """Open a run's buffers, with those of an earlier start. Blocks.

        If the directory cannot be used, buffers are in memory only; that costs key frames at most.

        Args:
            run_id: Id of the run.
            spec: Spec of the run.
            sealer: Encrypts buffers on disk; None stores them in plain.
        """
        try:
            return self._opened(run_id, spec, sealer, self.directory)
        except BadOption as error:
            logger.warning("%s; buffers are kept in memory only", error.message)
            return self._opened(run_id, spec, None, None)

    def _opened(
        self, run_id: RunId, spec: RunSpec, sealer: Sealer | None, directory: Path | None
    ) -> BufferStore:
        return BufferStore(
            self.limits,
            directory=directory,
            run_id=run_id,
            identity=spec.digest(),
            sealer=sealer,
            visits=VisitOrder(spec.train),
        )

    # ---- deletion of other people's data once they are of no use

    def delete_old(self, unix_s: float) -> None:
        """Delete the buffers of runs that had no write for `keep_s`. Blocks.

        Args:
            unix_s: The present time.
        """
        if self.directory is not None:
            with suppress(OSError):
                for folder in folders_older_than(self.directory, unix_s - self.keep_s):
                    _delete(folder, f"nothing was written for {self.keep_s / 86400:g} days")

    def runs(self) -> frozenset[RunId]:
        """Return the runs whose buffers are on disk and whose names may be sent. Blocks."""
        with suppress(OSError):
            found = find_runs(self.directory).values() if self.directory else ()
            return frozenset(run_id for run_id in found if Name().refusal(run_id) is None)
        return frozenset()

    def delete(self, run_id: RunId) -> None:
        """Delete a run's buffers on disk; no process may have them open. Blocks."""
        if self.directory is not None:
            with suppress(OSError):
                for folder, run in find_runs(self.directory).items():
                    if run == run_id:
                        _delete(folder, f"run {run_id} is over")


def _delete(folder: Path, why: str) -> None:
    logger.info("%s: buffers deleted, %s", folder, why)
    shutil.rmtree(folder, ignore_errors=True)


# ---- an attempt's buffers: which ones the stage has, prefetching, reports

_StoredEnd = tuple[BlockIndex, End]
"""A boundary and the kind of record that this peer stores there for every sample."""


class AttemptBuffers:
    """The buffers of one attempt; see the module.

    Args:
        assign: Assignment of the attempt.
        state: State of the stage, with the store.
        layers: Layers of the stage.
    """

    def __init__(self, assign: Assign, state: StageState, layers: LayerRange) -> None:
        self._assign = assign
        self._state = state
        self._shared = tuple(_shared_ends(assign.spec, layers))
        self._own = tuple(_own_ends(assign.spec, layers))

    def begin(self) -> tuple[HeldBuffers, ...]:
        """Return the buffers that are here, at the start of the next step.

        For each boundary these are the samples of which all records are here that neighbours have
        too.
        """
        self._state.store.resume_at(StepNumber(self._assign.committed_steps))
        return tuple(
            HeldBuffers(boundary=boundary, samples=SampleSet.of(self._samples_at(boundary)))
            for boundary in _boundaries(self._shared)
        )

    def planned(
        self, step: StepNumber, *, here: Iterable[Microbatch], elsewhere: Iterable[Microbatch]
    ) -> None:
        """Prefetch the buffers of a step, and then those of the next one.

        The route of the next step's samples is not known yet; most pass the same replicas again.

        Args:
            step: Number of the step.
            here: Microbatches that pass this peer.
            elsewhere: Microbatches that pass other replicas; the commit makes their buffers out of
                date.
        """
        store, train = self._state.store, self._assign.spec.train
        self._state.outdated_buffers = tuple(self._keys(_samples_of(elsewhere)))
        store.prefetch(self._keys(_samples_of(here)))
        following = StepNumber(step + 1)
        if following < train.num_steps:
            store.prefetch(self._keys(step_samples(train, following)))

    def take_counts(self) -> tuple[BufferCounts, ...]:
        """Return counts by boundary, residuals included; events since the last call."""
        stats = self._state.store.take_stats()
        boundaries = _boundaries((*self._shared, *self._own))
        return tuple(stats[boundary] for boundary in boundaries if boundary in stats)

    def take_lost(self) -> tuple[HeldBuffers, ...]:
        """Return the samples that lost a shared record since the last call, by boundary."""
        lost: dict[BlockIndex, set[SampleId]] = {}
        for key in self._state.store.take_lost():
            if (key.boundary, key.end) in self._shared:
                lost.setdefault(key.boundary, set()).add(key.sample)
        return tuple(
            HeldBuffers(boundary=boundary, samples=SampleSet.of(lost[boundary]))
            for boundary in sorted(lost)
        )

    def _keys(self, samples: Iterable[SampleId]) -> Iterator[BufferKey]:
        """Yield the keys of all records that these samples may have here, sample after sample."""
        for sample in samples:
            for boundary, end in (*self._shared, *self._own):
                yield BufferKey(self._assign.run_id, boundary, end, sample)

    def _samples_at(self, boundary: BlockIndex) -> Samples:
        samples = [
            self._state.store.samples(*stored) for stored in self._shared if stored[0] == boundary
        ]
        return reduce(np.intersect1d, samples)


def _boundaries(ends: Iterable[_StoredEnd]) -> list[BlockIndex]:
    return sorted({boundary for boundary, _ in ends})


def _shared_ends(spec: RunSpec, layers: LayerRange) -> Iterator[_StoredEnd]:
    """Yield the records to report: cached inputs, and those that a neighbour has too."""
    if spec.caches_input(layers):
        yield BlockIndex(layers.start), End.RECEIVED
    for direction in Direction:
        if spec.train.codec(direction).is_delta:
            is_forward = direction is Direction.FORWARD
            if layers.start > 0 and not spec.is_cacheable(layers.start):
                yield BlockIndex(layers.start), End.RECEIVED if is_forward else End.SENT
            if layers.stop < spec.model.num_blocks and not spec.is_cacheable(layers.stop):
                yield BlockIndex(layers.stop), End.SENT if is_forward else End.RECEIVED


def _own_ends(spec: RunSpec, layers: LayerRange) -> Iterator[_StoredEnd]:
    if spec.train.codec(Direction.BACKWARD).has_residual and layers.start > 0:
        yield BlockIndex(layers.start), End.RESIDUAL


def _samples_of(batches: Iterable[Microbatch]) -> list[SampleId]:
    return [sample for batch in batches for sample in batch.samples]
