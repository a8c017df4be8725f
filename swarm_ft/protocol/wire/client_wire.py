"""What clients and coordinator say to each other, to and from protobuf, checked."""

from __future__ import annotations

from dataclasses import asdict

from swarm_ft.errors import MalformedMessage
from swarm_ft.ids import Attempt, BlockIndex, StepNumber
from swarm_ft.proto import coordinator_pb2 as pb
from swarm_ft.protocol.messages.client import (
    BoundaryStatus,
    MemberStatus,
    RunEvent,
    RunPhase,
    RunStatus,
    StageResult,
    StepCommitted,
    SwarmStatus,
)
from swarm_ft.protocol.messages.reports import BufferCounts, ByteCounts
from swarm_ft.protocol.messages.timeline import PeerTimeline
from swarm_ft.protocol.spec.checks import (
    bounded,
    checked_peer_id,
    checked_run_id,
    checked_text,
    finite,
)
from swarm_ft.protocol.spec.layers import MAX_BLOCKS
from swarm_ft.protocol.wire.buffer_wire import counts_to_wire
from swarm_ft.protocol.wire.coordinator_wire import stage_from_wire, stages_to_wire
from swarm_ft.protocol.wire.run_wire import (
    layers_from_wire,
    layers_to_wire,
    spec_from_wire,
    spec_to_wire,
)
from swarm_ft.protocol.wire.shard_wire import file_from_wire, file_to_wire
from swarm_ft.protocol.wire.timeline_wire import peer_timeline_from_wire, peer_timeline_to_wire
from swarm_ft.protocol.wire.traffic_wire import (
    gradients_from_wire,
    gradients_to_wire,
    traffic_from_wire,
    traffic_to_wire,
)


def status_to_wire(status: RunStatus) -> pb.RunStatus:
    """A run's status as protobuf."""
    return pb.RunStatus(
        run_id=status.run_id,
        phase=pb.RunPhase.Name(status.phase),
        detail=status.detail,
        committed_steps=status.committed_steps,
        spec=spec_to_wire(status.spec),
        attempt=status.attempt,
        stages=stages_to_wire(status.stages),
        bytes=pb.ByteCounts(**asdict(status.sent)),
        joining=status.joining,
        boundaries=[_boundary_to_wire(boundary) for boundary in status.boundaries],
        results=[
            pb.StageResult(peer_id=result.peer_id, file=file_to_wire(result.file))
            for result in status.results
        ],
    )


def status_from_wire(status: pb.RunStatus) -> RunStatus:
    """A run's status from protobuf.

    Raises:
        MalformedMessage: any field is out of its bounds.
    """
    return RunStatus(
        run_id=checked_run_id(status.run_id),
        phase=RunPhase(bounded("phase", status.phase, min(RunPhase), max(RunPhase))),
        detail=checked_text(status.detail),
        committed_steps=status.committed_steps,
        spec=spec_from_wire(status.spec),
        attempt=Attempt(status.attempt),
        stages=tuple(stage_from_wire(stage) for stage in status.stages),
        sent=ByteCounts(
            **{name: getattr(status.bytes, name) for name in ByteCounts.__dataclass_fields__}
        ),
        joining=tuple(checked_peer_id(peer) for peer in status.joining),
        boundaries=tuple(_boundary_from_wire(boundary) for boundary in status.boundaries),
        results=tuple(
            StageResult(peer_id=checked_peer_id(result.peer_id), file=file_from_wire(result.file))
            for result in status.results
        ),
    )


def _boundary_to_wire(status: BoundaryStatus) -> pb.BoundaryStatus:
    (kept,) = counts_to_wire([status.kept])
    return pb.BoundaryStatus(
        boundary=status.boundary,
        buffered_samples=status.buffered_samples,
        key_frames=status.key_frames,
        delta_frames=status.delta_frames,
        kept=kept,
    )


def _boundary_from_wire(status: pb.BoundaryStatus) -> BoundaryStatus:
    boundary = BlockIndex(bounded("boundary", status.boundary, 1, MAX_BLOCKS))
    names = [name for name in BufferCounts.__dataclass_fields__ if name != "boundary"]
    return BoundaryStatus(
        boundary=boundary,
        buffered_samples=status.buffered_samples,
        key_frames=status.key_frames,
        delta_frames=status.delta_frames,
        kept=BufferCounts(
            boundary=boundary, **{name: getattr(status.kept, name) for name in names}
        ),
    )


def event_to_wire(event: RunEvent | PeerTimeline) -> pb.RunEvent:
    """Something that happened in a run, as protobuf."""
    if isinstance(event, RunStatus):
        return pb.RunEvent(status=status_to_wire(event))
    if isinstance(event, PeerTimeline):
        return pb.RunEvent(timeline=peer_timeline_to_wire(event))
    return pb.RunEvent(
        step=pb.StepCommitted(
            step=event.step,
            loss=event.loss,
            learning_rate=event.learning_rate,
            grad_norm=event.grad_norm,
            num_samples=event.num_samples,
            seconds=event.seconds,
            traffic=[traffic_to_wire(t) for t in event.traffic],
            gradients=gradients_to_wire(event.gradients),
            state_bytes=event.state_bytes,
        )
    )


def event_from_wire(event: pb.RunEvent) -> RunEvent | PeerTimeline:
    """Something that happened in a run, from protobuf.

    Raises:
        MalformedMessage: any field is out of its bounds.
    """
    match event.WhichOneof("body"):
        case "status":
            return status_from_wire(event.status)
        case "step":
            return _step_from_wire(event.step)
        case "timeline":
            return peer_timeline_from_wire(event.timeline)
        case _:
            raise MalformedMessage("event of a run: expected a body, got none we know")


def _step_from_wire(step: pb.StepCommitted) -> StepCommitted:
    return StepCommitted(
        step=StepNumber(step.step),
        loss=finite("loss", step.loss),
        learning_rate=finite("learning rate", step.learning_rate),
        grad_norm=finite("gradient norm", step.grad_norm),
        num_samples=step.num_samples,
        seconds=finite("seconds", step.seconds),
        traffic=tuple(traffic_from_wire(t) for t in step.traffic),
        gradients=gradients_from_wire(step.gradients),
        state_bytes=step.state_bytes,
    )


def swarm_to_wire(swarm: SwarmStatus) -> pb.SwarmStatus:
    """The swarm's status as protobuf."""
    return pb.SwarmStatus(
        members=[
            pb.MemberStatus(
                peer_id=member.peer_id,
                layers=layers_to_wire(member.layers) if member.layers else None,
            )
            for member in swarm.members
        ],
        runs=[status_to_wire(run) for run in swarm.runs],
    )


def swarm_from_wire(swarm: pb.SwarmStatus) -> SwarmStatus:
    """The swarm's status from protobuf."""
    return SwarmStatus(
        members=tuple(
            MemberStatus(
                peer_id=checked_peer_id(member.peer_id),
                layers=layers_from_wire(member.layers) if member.HasField("layers") else None,
            )
            for member in swarm.members
        ),
        runs=tuple(status_from_wire(run) for run in swarm.runs),
    )
