"""What peers say to the coordinator, to and from protobuf, checked."""

from __future__ import annotations

from typing import assert_never

from swarm_ft.errors import MalformedMessage
from swarm_ft.ids import Attempt, MicrobatchIndex, StepNumber
from swarm_ft.proto import coordinator_pb2 as pb
from swarm_ft.proto import timeline_pb2
from swarm_ft.protocol.messages.control import (
    ClockProbe,
    FromPeer,
    HeldStage,
    PeerAlive,
    PeerGoodbye,
    PeerHello,
    StageExported,
    StageFailed,
    StageOffered,
    StageReady,
    StageSaved,
    StageTaken,
    StepReady,
)
from swarm_ft.protocol.messages.shard import ShardName
from swarm_ft.protocol.messages.timeline import StepTimeline
from swarm_ft.protocol.spec.checks import (
    MAX_PEER_NUMBER,
    bounded,
    checked_digest,
    checked_endpoint,
    checked_id,
    checked_peer_id,
    checked_run_id,
    checked_text,
    finite,
)
from swarm_ft.protocol.spec.run_spec import MAX_BATCH_SIZE
from swarm_ft.protocol.wire.buffer_wire import (
    counts_from_wire,
    counts_to_wire,
    held_from_wire,
    held_to_wire,
)
from swarm_ft.protocol.wire.run_wire import layers_from_wire, layers_to_wire
from swarm_ft.protocol.wire.shard_wire import file_from_wire, file_to_wire
from swarm_ft.protocol.wire.timeline_wire import (
    probe_from_wire,
    timeline_from_wire,
    timeline_to_wire,
)
from swarm_ft.protocol.wire.traffic_wire import (
    MAX_TRAFFIC_BYTES,
    gradients_to_wire,
    reported_gradients_from_wire,
    reported_traffic_from_wire,
    traffic_to_wire,
)


def from_peer_to_wire(message: FromPeer) -> pb.FromPeer:
    """What a peer says, as protobuf."""
    match message:
        case PeerHello():
            return pb.FromPeer(hello=_hello_to_wire(message))
        case StageReady():
            ready = pb.StageReady(
                run_id=message.run_id,
                attempt=message.attempt,
                done=sorted(message.done),
                buffers=held_to_wire(message.buffers),
            )
            return pb.FromPeer(stage_ready=ready)
        case StepReady():
            return pb.FromPeer(step_ready=_step_ready_to_wire(message))
        case StageExported() | StageFailed():
            return _outcome_to_wire(message)
        case PeerGoodbye():
            return pb.FromPeer(goodbye=pb.PeerGoodbye())
        case PeerAlive():
            alive = pb.PeerAlive(
                attempt=message.attempt,
                step=message.step,
                parts_begun=message.parts_begun,
                compute_s=message.compute_s,
            )
            return pb.FromPeer(alive=alive)
        case StageOffered() | StageTaken() | StageSaved():
            return _state_to_wire(message)
        case StepTimeline() | ClockProbe():
            return _traced_to_wire(message)
        case _:
            assert_never(message)


def from_peer_from_wire(message: pb.FromPeer) -> FromPeer:
    """What a peer says, from protobuf.

    Raises:
        MalformedMessage: any field is out of its bounds.
    """
    match message.WhichOneof("body"):
        case "hello":
            return _hello_from_wire(message.hello)
        case "stage_ready":
            ready = message.stage_ready
            bounded("microbatches that are done", len(ready.done), 0, MAX_BATCH_SIZE)
            return StageReady(
                run_id=checked_run_id(ready.run_id),
                attempt=Attempt(ready.attempt),
                done=frozenset(MicrobatchIndex(index) for index in ready.done),
                buffers=held_from_wire(ready.buffers),
            )
        case "step_ready":
            return _step_ready_from_wire(message.step_ready)
        case "exported" | "failed":
            return _outcome_from_wire(message)
        case "goodbye":
            return PeerGoodbye()
        case "alive":
            alive = message.alive
            return PeerAlive(
                attempt=Attempt(alive.attempt),
                step=StepNumber(alive.step),
                parts_begun=alive.parts_begun,
                compute_s=finite("seconds of compute", alive.compute_s, high=MAX_PEER_NUMBER),
            )
        case "offered" | "taken" | "saved":
            return _state_from_wire(message)
        case "timeline" | "probe":
            return _traced_from_wire(message)
        case _:
            raise MalformedMessage("message from a peer: expected a body, got none we know")


def _hello_to_wire(hello: PeerHello) -> pb.PeerHello:
    held = hello.held
    return pb.PeerHello(
        peer_id=hello.peer_id,
        endpoint=hello.endpoint,
        layers=layers_to_wire(hello.layers) if hello.layers else None,
        memory_bytes=hello.memory_bytes,
        held=pb.HeldStage(
            run_id=held.run_id,
            spec_digest=held.spec_digest,
            layers=layers_to_wire(held.layers),
            committed_steps=held.committed_steps,
            last_attempt=held.last_attempt,
            exported=file_to_wire(held.exported) if held.exported else None,
        )
        if held
        else None,
    )


def _hello_from_wire(hello: pb.PeerHello) -> PeerHello:
    held = None
    if hello.HasField("held"):
        held = HeldStage(
            run_id=checked_run_id(hello.held.run_id),
            spec_digest=checked_digest("RunSpec digest", hello.held.spec_digest),
            layers=layers_from_wire(hello.held.layers),
            committed_steps=hello.held.committed_steps,
            last_attempt=Attempt(hello.held.last_attempt),
            exported=file_from_wire(hello.held.exported)
            if hello.held.HasField("exported")
            else None,
        )
    return PeerHello(
        peer_id=checked_peer_id(hello.peer_id),
        endpoint=checked_endpoint(hello.endpoint),
        layers=layers_from_wire(hello.layers) if hello.HasField("layers") else None,
        memory_bytes=hello.memory_bytes,
        held=held,
    )


def _step_ready_to_wire(ready: StepReady) -> pb.StepReady:
    return pb.StepReady(
        run_id=ready.run_id,
        attempt=ready.attempt,
        step=ready.step,
        squared_grad_norm=ready.squared_grad_norm,
        loss_sum=ready.loss_sum,
        traffic=[traffic_to_wire(t) for t in ready.traffic],
        gradients=gradients_to_wire(ready.gradients),
        compute_s=ready.compute_s,
        buffers=counts_to_wire(ready.buffers),
        lost=held_to_wire(ready.lost),
    )


def _step_ready_from_wire(ready: pb.StepReady) -> StepReady:
    bounded("boundaries of a peer", len(ready.traffic), 0, 2)
    return StepReady(
        run_id=checked_run_id(ready.run_id),
        attempt=Attempt(ready.attempt),
        step=StepNumber(ready.step),
        squared_grad_norm=finite(
            "squared gradient norm", ready.squared_grad_norm, high=MAX_PEER_NUMBER
        ),
        loss_sum=finite("loss", ready.loss_sum, high=MAX_PEER_NUMBER),
        compute_s=finite("seconds of compute", ready.compute_s, high=MAX_PEER_NUMBER),
        traffic=tuple(reported_traffic_from_wire(t) for t in ready.traffic),
        gradients=reported_gradients_from_wire(ready.gradients),
        buffers=counts_from_wire(ready.buffers),
        lost=held_from_wire(ready.lost),
    )


def _outcome_to_wire(message: StageExported | StageFailed) -> pb.FromPeer:
    """How a peer's work on a run ended."""
    match message:
        case StageExported():
            exported = pb.StageExported(run_id=message.run_id, file=file_to_wire(message.file))
            return pb.FromPeer(exported=exported)
        case StageFailed():
            failed = pb.StageFailed(
                run_id=message.run_id,
                attempt=message.attempt,
                code=message.code,
                message=message.message,
            )
            return pb.FromPeer(failed=failed)


def _outcome_from_wire(message: pb.FromPeer) -> StageExported | StageFailed:
    if message.HasField("exported"):
        return StageExported(
            run_id=checked_run_id(message.exported.run_id),
            file=file_from_wire(message.exported.file),
        )
    failed = message.failed
    return StageFailed(
        run_id=checked_run_id(failed.run_id),
        attempt=Attempt(failed.attempt),
        code=checked_id("error code", failed.code),
        message=checked_text(failed.message),
    )


def _traced_to_wire(message: StepTimeline | ClockProbe) -> pb.FromPeer:
    """What a peer says in steps that are traced."""
    match message:
        case StepTimeline():
            return pb.FromPeer(timeline=timeline_to_wire(message))
        case ClockProbe(sent_us):
            return pb.FromPeer(probe=timeline_pb2.ClockProbe(sent_us=sent_us))


def _traced_from_wire(message: pb.FromPeer) -> StepTimeline | ClockProbe:
    if message.HasField("timeline"):
        return timeline_from_wire(message.timeline)
    return probe_from_wire(message.probe)


def _state_to_wire(message: StageOffered | StageTaken | StageSaved) -> pb.FromPeer:
    """What becomes of a stage's state: offered to takers, taken by one, or saved."""
    match message:
        case StageOffered():
            offered = pb.StageOffered(
                run_id=message.run_id,
                attempt=message.attempt,
                step=message.step,
                digest=message.digest,
                total_bytes=message.total_bytes,
            )
            return pb.FromPeer(offered=offered)
        case StageTaken():
            taken = pb.StageTaken(
                run_id=message.run_id, attempt=message.attempt, state_bytes=message.state_bytes
            )
            return pb.FromPeer(taken=taken)
        case StageSaved():
            return pb.FromPeer(saved=_saved_to_wire(message))


def _state_from_wire(message: pb.FromPeer) -> StageOffered | StageTaken | StageSaved:
    if message.HasField("offered"):
        offered = message.offered
        return StageOffered(
            run_id=checked_run_id(offered.run_id),
            attempt=Attempt(offered.attempt),
            step=StepNumber(offered.step),
            digest=checked_digest("digest of a shard", offered.digest),
            total_bytes=offered.total_bytes,
        )
    if message.HasField("taken"):
        taken = message.taken
        return StageTaken(
            run_id=checked_run_id(taken.run_id),
            attempt=Attempt(taken.attempt),
            state_bytes=bounded("state's bytes", taken.state_bytes, 0, MAX_TRAFFIC_BYTES),
        )
    return _saved_from_wire(message.saved)


def _saved_to_wire(saved: StageSaved) -> pb.StageSaved:
    return pb.StageSaved(
        run_id=saved.name.run_id,
        step=saved.name.step,
        layers=layers_to_wire(saved.name.layers),
        digest=saved.digest,
        total_bytes=saved.total_bytes,
    )


def _saved_from_wire(saved: pb.StageSaved) -> StageSaved:
    name = ShardName(
        run_id=checked_run_id(saved.run_id),
        step=StepNumber(saved.step),
        layers=layers_from_wire(saved.layers),
    )
    digest = checked_digest("digest of a shard", saved.digest)
    return StageSaved(name=name, digest=digest, total_bytes=saved.total_bytes)
