"""What peers and coordinator say to each other, to and from protobuf, checked."""

from __future__ import annotations

from typing import assert_never

from swarm_ft.errors import MalformedMessage
from swarm_ft.ids import Attempt, BlockIndex, MicrobatchIndex, PeerId, RunId, SampleId, StepNumber
from swarm_ft.proto import coordinator_pb2 as pb
from swarm_ft.protocol.checks import (
    MAX_PEER_NUMBER,
    bounded,
    checked_digest,
    checked_id,
    checked_text,
    finite,
)
from swarm_ft.protocol.layers import MAX_BLOCKS
from swarm_ft.protocol.messages import (
    Assign,
    CommitStep,
    ExportStage,
    FromPeer,
    GradientTraffic,
    HeldStage,
    PeerAlive,
    PeerGoodbye,
    PeerHello,
    PlanStep,
    ReleaseStage,
    SavedStage,
    SaveStage,
    StageAssignment,
    StageExported,
    StageFailed,
    StageOffered,
    StageReady,
    StageSaved,
    StepReady,
    TakeStage,
    ToPeer,
    Traffic,
)
from swarm_ft.protocol.run_spec import MAX_BATCH_SIZE, MAX_SEQ_LENGTH
from swarm_ft.protocol.run_wire import (
    layers_from_wire,
    layers_to_wire,
    spec_from_wire,
    spec_to_wire,
)
from swarm_ft.protocol.shard import ShardName
from swarm_ft.protocol.training_plan import Microbatch

BYTES_PER_TOKEN = 4
MAX_RUN_PEERS = 1 << 14
MAX_TRAFFIC_BYTES, MAX_TRAFFIC_FRAMES = 1 << 50, 1 << 26
"""Of one step over one boundary; sums over peers and steps must stay in their fields."""


def run_id_from_wire(text: str) -> RunId:
    """A run's name, checked."""
    return RunId(checked_id("run id", text))


def peer_id_from_wire(text: str) -> PeerId:
    """A peer's name, checked."""
    return PeerId(checked_id("peer id", text))


# ---- peer to coordinator


def from_peer_to_wire(message: FromPeer) -> pb.FromPeer:
    """What a peer says, as protobuf."""
    match message:
        case PeerHello():
            return pb.FromPeer(hello=_hello_to_wire(message))
        case StageReady():
            ready = pb.StageReady(
                run_id=message.run_id, attempt=message.attempt, state_bytes=message.state_bytes
            )
            return pb.FromPeer(stage_ready=ready)
        case StepReady():
            return pb.FromPeer(step_ready=_step_ready_to_wire(message))
        case StageExported():
            exported = pb.StageExported(run_id=message.run_id, shard_bytes=message.shard_bytes)
            return pb.FromPeer(exported=exported)
        case StageFailed():
            return pb.FromPeer(
                failed=pb.StageFailed(
                    run_id=message.run_id,
                    attempt=message.attempt,
                    code=message.code,
                    message=message.message,
                )
            )
        case PeerGoodbye():
            return pb.FromPeer(goodbye=pb.PeerGoodbye())
        case PeerAlive():
            return pb.FromPeer(alive=pb.PeerAlive(tasks_done=message.tasks_done))
        case StageOffered():
            offered = pb.StageOffered(
                run_id=message.run_id,
                attempt=message.attempt,
                digest=message.digest,
                total_bytes=message.total_bytes,
            )
            return pb.FromPeer(offered=offered)
        case StageSaved():
            return pb.FromPeer(saved=_saved_to_wire(message))
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
            return StageReady(
                run_id=run_id_from_wire(ready.run_id),
                attempt=Attempt(ready.attempt),
                state_bytes=bounded("state's bytes", ready.state_bytes, 0, MAX_TRAFFIC_BYTES),
            )
        case "step_ready":
            return _step_ready_from_wire(message.step_ready)
        case "exported":
            exported = message.exported
            return StageExported(
                run_id=run_id_from_wire(exported.run_id), shard_bytes=exported.shard_bytes
            )
        case "failed":
            failed = message.failed
            return StageFailed(
                run_id=run_id_from_wire(failed.run_id),
                attempt=Attempt(failed.attempt),
                code=checked_id("error code", failed.code),
                message=checked_text(failed.message),
            )
        case "goodbye":
            return PeerGoodbye()
        case "alive":
            return PeerAlive(tasks_done=message.alive.tasks_done)
        case "offered":
            offered = message.offered
            return StageOffered(
                run_id=run_id_from_wire(offered.run_id),
                attempt=Attempt(offered.attempt),
                digest=checked_digest("digest of a shard", offered.digest),
                total_bytes=offered.total_bytes,
            )
        case "saved":
            return _saved_from_wire(message.saved)
        case _:
            raise MalformedMessage("message from a peer: expected a body, got none we know")


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
        run_id=run_id_from_wire(saved.run_id),
        step=StepNumber(saved.step),
        layers=layers_from_wire(saved.layers),
    )
    digest = checked_digest("digest of a shard", saved.digest)
    return StageSaved(name=name, digest=digest, total_bytes=saved.total_bytes)


def _hello_to_wire(hello: PeerHello) -> pb.PeerHello:
    held = hello.held
    return pb.PeerHello(
        peer_id=hello.peer_id,
        layers=layers_to_wire(hello.layers) if hello.layers else None,
        memory_bytes=hello.memory_bytes,
        held=pb.HeldStage(
            run_id=held.run_id,
            spec_digest=held.spec_digest,
            layers=layers_to_wire(held.layers),
            committed_steps=held.committed_steps,
            last_attempt=held.last_attempt,
            exported=held.exported,
        )
        if held
        else None,
    )


def _hello_from_wire(hello: pb.PeerHello) -> PeerHello:
    held = None
    if hello.HasField("held"):
        held = HeldStage(
            run_id=run_id_from_wire(hello.held.run_id),
            spec_digest=checked_digest("RunSpec digest", hello.held.spec_digest),
            layers=layers_from_wire(hello.held.layers),
            committed_steps=hello.held.committed_steps,
            last_attempt=Attempt(hello.held.last_attempt),
            exported=hello.held.exported,
        )
    return PeerHello(
        peer_id=peer_id_from_wire(hello.peer_id),
        layers=layers_from_wire(hello.layers) if hello.HasField("layers") else None,
        memory_bytes=hello.memory_bytes,
        held=held,
    )


def traffic_to_wire(traffic: Traffic) -> pb.Traffic:
    """Counters of one boundary as protobuf."""
    return pb.Traffic(**{name: getattr(traffic, name) for name in Traffic.__dataclass_fields__})


def traffic_from_wire(traffic: pb.Traffic) -> Traffic:
    """Counters of one boundary from protobuf."""
    return Traffic(
        boundary=BlockIndex(bounded("boundary", traffic.boundary, 1, MAX_BLOCKS)),
        forward_bytes=traffic.forward_bytes,
        backward_bytes=traffic.backward_bytes,
        forward_uncompressed_bytes=traffic.forward_uncompressed_bytes,
        backward_uncompressed_bytes=traffic.backward_uncompressed_bytes,
        key_frames=traffic.key_frames,
        delta_frames=traffic.delta_frames,
    )


def gradients_to_wire(traffic: GradientTraffic) -> pb.GradientTraffic:
    """Counters of what replicas sent each other as protobuf."""
    return pb.GradientTraffic(
        sent_bytes=traffic.sent_bytes, uncompressed_bytes=traffic.uncompressed_bytes
    )


def gradients_from_wire(traffic: pb.GradientTraffic) -> GradientTraffic:
    """Counters of what replicas sent each other from protobuf."""
    return GradientTraffic(
        sent_bytes=traffic.sent_bytes, uncompressed_bytes=traffic.uncompressed_bytes
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
    )


def _step_ready_from_wire(ready: pb.StepReady) -> StepReady:
    bounded("boundaries of a peer", len(ready.traffic), 0, 2)
    return StepReady(
        run_id=run_id_from_wire(ready.run_id),
        attempt=Attempt(ready.attempt),
        step=StepNumber(ready.step),
        squared_grad_norm=finite(
            "squared gradient norm", ready.squared_grad_norm, high=MAX_PEER_NUMBER
        ),
        loss_sum=finite("loss", ready.loss_sum, high=MAX_PEER_NUMBER),
        compute_s=finite("seconds of compute", ready.compute_s, high=MAX_PEER_NUMBER),
        traffic=tuple(_reported_traffic(t) for t in ready.traffic),
        gradients=_reported_gradients(ready.gradients),
    )


def _reported_traffic(traffic: pb.Traffic) -> Traffic:
    for name in Traffic.__dataclass_fields__.keys() - {"boundary"}:
        high = MAX_TRAFFIC_FRAMES if name.endswith("frames") else MAX_TRAFFIC_BYTES
        bounded(name, getattr(traffic, name), 0, high)
    return traffic_from_wire(traffic)


def _reported_gradients(traffic: pb.GradientTraffic) -> GradientTraffic:
    for name in GradientTraffic.__dataclass_fields__:
        bounded(f"{name} of gradients", getattr(traffic, name), 0, MAX_TRAFFIC_BYTES)
    return gradients_from_wire(traffic)


# ---- coordinator to peer


def to_peer_to_wire(message: ToPeer) -> pb.ToPeer:
    """What the coordinator says to a peer, as protobuf."""
    match message:
        case Assign():
            return pb.ToPeer(assign=_assign_to_wire(message))
        case PlanStep():
            return pb.ToPeer(plan=_plan_to_wire(message))
        case CommitStep():
            return pb.ToPeer(
                commit=pb.CommitStep(
                    run_id=message.run_id,
                    attempt=message.attempt,
                    step=message.step,
                    clip_factor=message.clip_factor,
                    learning_rate=message.learning_rate,
                )
            )
        case ExportStage():
            return pb.ToPeer(export=pb.ExportStage(run_id=message.run_id))
        case TakeStage():
            take = pb.TakeStage(
                run_id=message.run_id,
                attempt=message.attempt,
                digest=message.digest,
                donors=message.donors,
            )
            return pb.ToPeer(take=take)
        case SaveStage():
            return pb.ToPeer(save=pb.SaveStage(run_id=message.run_id, step=message.step))
        case ReleaseStage():
            release = pb.ReleaseStage(run_id=message.run_id, reason=message.reason)
            return pb.ToPeer(release=release)
        case _:
            assert_never(message)


def to_peer_from_wire(message: pb.ToPeer) -> ToPeer:
    """What the coordinator says to a peer, from protobuf.

    Raises:
        MalformedMessage: any field is out of its bounds.
    """
    match message.WhichOneof("body"):
        case "assign":
            return _assign_from_wire(message.assign)
        case "plan":
            return _plan_from_wire(message.plan)
        case "commit":
            commit = message.commit
            return CommitStep(
                run_id=run_id_from_wire(commit.run_id),
                attempt=Attempt(commit.attempt),
                step=StepNumber(commit.step),
                clip_factor=finite("clip factor", commit.clip_factor),
                learning_rate=finite("learning rate", commit.learning_rate),
            )
        case "export":
            return ExportStage(run_id=run_id_from_wire(message.export.run_id))
        case "release":
            return ReleaseStage(
                run_id=run_id_from_wire(message.release.run_id),
                reason=checked_text(message.release.reason),
            )
        case "save":
            run_id = run_id_from_wire(message.save.run_id)
            return SaveStage(run_id=run_id, step=StepNumber(message.save.step))
        case "take":
            bounded("donors", len(message.take.donors), 1, MAX_RUN_PEERS)
            return TakeStage(
                run_id=run_id_from_wire(message.take.run_id),
                attempt=Attempt(message.take.attempt),
                digest=checked_digest("digest of a shard", message.take.digest),
                donors=tuple(peer_id_from_wire(donor) for donor in message.take.donors),
            )
        case _:
            raise MalformedMessage("message from the coordinator: expected a body we know")


def stages_to_wire(stages: tuple[StageAssignment, ...]) -> list[pb.StageAssignment]:
    """A run's stages as protobuf."""
    return [
        pb.StageAssignment(peer_id=stage.peer_id, layers=layers_to_wire(stage.layers))
        for stage in stages
    ]


def stage_from_wire(stage: pb.StageAssignment) -> StageAssignment:
    """One stage of a run from protobuf."""
    return StageAssignment(
        peer_id=peer_id_from_wire(stage.peer_id), layers=layers_from_wire(stage.layers)
    )


def _assign_to_wire(assign: Assign) -> pb.Assign:
    return pb.Assign(
        run_id=assign.run_id,
        spec=spec_to_wire(assign.spec),
        attempt=assign.attempt,
        stages=stages_to_wire(assign.stages),
        committed_steps=assign.committed_steps,
        fresh=assign.fresh,
        spec_digest=assign.spec_digest,
        takers=assign.takers,
        last_attempt=assign.last_attempt,
        saved=[
            pb.SavedStage(
                layers=layers_to_wire(stage.layers),
                digest=stage.digest,
                total_bytes=stage.total_bytes,
            )
            for stage in assign.saved
        ],
    )


def _assign_from_wire(assign: pb.Assign) -> Assign:
    bounded("peers of a run", len(assign.stages), 1, MAX_RUN_PEERS)
    return Assign(
        run_id=run_id_from_wire(assign.run_id),
        spec=spec_from_wire(assign.spec),
        attempt=Attempt(assign.attempt),
        stages=tuple(stage_from_wire(stage) for stage in assign.stages),
        committed_steps=assign.committed_steps,
        fresh=assign.fresh,
        spec_digest=checked_digest("RunSpec digest", assign.spec_digest),
        takers=tuple(peer_id_from_wire(taker) for taker in assign.takers),
        last_attempt=Attempt(assign.last_attempt),
        saved=tuple(
            SavedStage(
                layers=layers_from_wire(stage.layers),
                digest=checked_digest("digest of a shard", stage.digest),
                total_bytes=stage.total_bytes,
            )
            for stage in assign.saved
        ),
    )


def tokens_to_wire(sample: SampleId, token_ids: bytes) -> pb.SampleTokens:
    """One sample's tokens as protobuf."""
    return pb.SampleTokens(sample=sample, token_ids=token_ids)


def tokens_from_wire(tokens: pb.SampleTokens) -> tuple[SampleId, bytes]:
    """One sample's tokens from protobuf: little-endian uint32, a whole number of them."""
    num_bytes = len(tokens.token_ids)
    bounded("bytes of a sample", num_bytes, BYTES_PER_TOKEN, MAX_SEQ_LENGTH * BYTES_PER_TOKEN)
    bounded("bytes past the last token", num_bytes % BYTES_PER_TOKEN, 0, 0)
    return SampleId(tokens.sample), tokens.token_ids


def _plan_to_wire(plan: PlanStep) -> pb.PlanStep:
    return pb.PlanStep(
        run_id=plan.run_id,
        attempt=plan.attempt,
        step=plan.step,
        microbatches=[
            pb.Microbatch(index=batch.index, samples=batch.samples, route=batch.route)
            for batch in plan.microbatches
        ],
        tokens=[tokens_to_wire(sample, ids) for sample, ids in plan.tokens.items()],
    )


def _check_samples(plan: pb.PlanStep) -> None:
    samples = [sample for batch in plan.microbatches for sample in batch.samples]
    bounded("samples of a step", len(samples), 1, MAX_BATCH_SIZE)
    bounded("samples that come twice", len(samples) - len(set(samples)), 0, 0)
    for batch in plan.microbatches:  # an empty one would never be complete
        bounded("samples of a microbatch", len(batch.samples), 1, MAX_BATCH_SIZE)


def _plan_from_wire(plan: pb.PlanStep) -> PlanStep:
    _check_samples(plan)
    microbatches = tuple(
        Microbatch(
            MicrobatchIndex(batch.index),
            tuple(SampleId(sample) for sample in batch.samples),
            tuple(batch.route),
        )
        for batch in plan.microbatches
    )
    if [batch.index for batch in microbatches] != list(range(len(microbatches))):
        raise MalformedMessage("plan: expected microbatches numbered from 0")
    return PlanStep(
        run_id=run_id_from_wire(plan.run_id),
        attempt=Attempt(plan.attempt),
        step=StepNumber(plan.step),
        microbatches=microbatches,
        tokens=dict(tokens_from_wire(tokens) for tokens in plan.tokens),
    )
