"""Everything that the coordinator knows, as `swarm-ft status` shows it. Pure."""

from __future__ import annotations

from dataclasses import replace

from swarm_ft.coordinator.holdings import ends_of
from swarm_ft.coordinator.state import Run, SwarmState
from swarm_ft.ids import BlockIndex
from swarm_ft.protocol.buffer_reports import BufferCounts
from swarm_ft.protocol.status import BoundaryStatus, MemberStatus, SwarmStatus
from swarm_ft.protocol.traffic import Traffic


def overview(state: SwarmState) -> SwarmStatus:
    """Members and runs; of runs that are not over, their boundaries too."""
    return SwarmStatus(
        members=tuple(
            MemberStatus(peer_id=m.hello.peer_id, layers=m.hello.layers)
            for m in state.members.values()
        ),
        runs=tuple(replace(run.status, boundaries=_boundaries(run)) for run in state.runs.values()),
    )


def _boundaries(run: Run) -> tuple[BoundaryStatus, ...]:
    """What is kept at each boundary of the pipeline, and what went over it."""
    traffic = {one.boundary: one for one in run.traffic}
    buffered = run.ledger.buffered(run.computing) if run.ledger and run.stages else {}
    boundaries = [BlockIndex(stage.layers.start) for stage in run.computing[1:]]
    return tuple(
        BoundaryStatus(
            boundary=boundary,
            buffered_samples=buffered.get(boundary, 0),
            key_frames=traffic.get(boundary, Traffic(boundary=boundary)).key_frames,
            delta_frames=traffic.get(boundary, Traffic(boundary=boundary)).delta_frames,
            kept=_kept(run, boundary),
        )
        for boundary in boundaries
    )


def _kept(run: Run, boundary: BlockIndex) -> BufferCounts:
    """What all peers told of a boundary; who is away, or hosts another stage now, keeps nothing."""
    total = BufferCounts(boundary=boundary)
    for peer, kept in run.kept.items():
        counts = kept.get(boundary)
        if counts and boundary in ends_of(run, peer):
            total += counts
        elif counts:
            total += replace(counts, samples=0, memory_bytes=0, disk_bytes=0)
    return total
