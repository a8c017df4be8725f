"""What peers tell of their buffers, and what becomes of the ledger by it. Pure.

Only commits are written down, see `commits`. What an inventory or a
loss takes out of the ledger is told again by every peer that joins a restarted coordinator.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from types import MappingProxyType

from swarm_ft.coordinator.facts.ledger import Ledger, Side
from swarm_ft.coordinator.facts.state import Run
from swarm_ft.errors import MalformedMessage
from swarm_ft.ids import BlockIndex, PeerId
from swarm_ft.protocol.messages.control import StageReady, StepReady
from swarm_ft.protocol.messages.reports import BufferCounts, HeldBuffers, SampleSet
from swarm_ft.protocol.spec.codec_spec import Direction

MAX_COUNT = 1 << 48
"""Of one peer; sums over all peers must stay in their fields whatever these tell."""


def with_ledger(run: Run) -> Run:
    """The run with a ledger of its pipeline's boundaries, if both ends of these keep buffers.

    What is known of other boundaries is of no use.
    """
    train = run.spec.train
    boundaries = tuple(BlockIndex(stage.layers.start) for stage in run.stages[1:])
    if not boundaries or not any(train.codec(direction).is_delta for direction in Direction):
        return run.with_ledger(None)
    if run.past.ledger is not None and run.past.ledger.boundaries == boundaries:
        return run
    return run.with_ledger(Ledger.empty(boundaries, train.num_samples))


def ends_of(run: Run, peer_id: PeerId) -> dict[BlockIndex, Side]:
    """The boundaries of a peer's stage, and its side of them."""
    last = len(run.stages) - 1
    ends = {}
    for index, stage in enumerate(run.stages):
        if peer_id in stage.peers and index > 0:
            ends[BlockIndex(stage.layers.start)] = Side.DOWNSTREAM
        if peer_id in stage.peers and index < last:
            ends[BlockIndex(stage.layers.stop)] = Side.UPSTREAM
    return ends


def refusal_of(
    run: Run, peer_id: PeerId, report: StageReady | StepReady
) -> MalformedMessage | None:
    """Why what a peer of the run tells of its buffers cannot be, if it cannot."""
    held = report.buffers if isinstance(report, StageReady) else report.lost
    boundaries = ends_of(run, peer_id)
    for boundary in (buffers.boundary for buffers in (*held, *report.buffers)):
        if boundary not in boundaries:
            expected = " or ".join(map(str, boundaries)) or "none"
            return MalformedMessage(
                f"peer {peer_id}: buffers of boundary {boundary}; its stage has {expected}"
            )
    try:
        for buffers in held:
            SampleSet.checked(buffers.samples.bitmap, run.spec.train.num_samples)
    except MalformedMessage as error:
        return MalformedMessage(f"peer {peer_id}: {error.message}")
    return None


def took_stock(run: Run, peer_id: PeerId, held: Iterable[HeldBuffers]) -> Run:
    """After a peer told all that it has."""
    ledger = run.past.ledger
    if ledger is None:
        return run
    known = {buffers.boundary: buffers.samples for buffers in held}
    return run.with_ledger(ledger.with_inventory(peer_id, known))


def after_report(run: Run, peer_id: PeerId, ready: StepReady) -> Run:
    """After a peer told what it lost, and what its buffers take."""
    ledger = run.past.ledger
    for lost in ready.lost if ledger else ():
        ledger = ledger and ledger.without(peer_id, lost.boundary, lost.samples)
    counts = dict(run.measured.buffers.get(peer_id, {}))
    for new in ready.buffers:
        counts[new.boundary] = _sum(counts.get(new.boundary), new)
    kept = MappingProxyType({**run.measured.buffers, peer_id: MappingProxyType(counts)})
    return replace(run.with_ledger(ledger), measured=replace(run.measured, buffers=kept))


def _sum(before: BufferCounts | None, new: BufferCounts) -> BufferCounts:
    """What is kept as of now, and all that happened until now."""
    if before is not None:
        new = replace(before, samples=0, memory_bytes=0, disk_bytes=0) + new
    return replace(new, **{name: min(n, MAX_COUNT) for name, n in new.counts().items()})
