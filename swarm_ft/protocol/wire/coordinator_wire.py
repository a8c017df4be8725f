"""What the coordinator says to peers, to and from protobuf, checked.

Here too are samples' tokens: as clients send them, so the coordinator passes them on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from swarm_ft.errors import MalformedMessage
from swarm_ft.ids import Attempt, MicrobatchIndex, PeerId, SampleId, StepNumber
from swarm_ft.proto import coordinator_pb2 as pb
from swarm_ft.proto import timeline_pb2
from swarm_ft.protocol.messages.control import (
    Assign,
    ClockReply,
    CommitStep,
    ExportStage,
    PlanStep,
    ReleaseStage,
    SavedStage,
    SaveStage,
    StageAssignment,
    Taker,
    TakeStage,
    ToPeer,
)
from swarm_ft.protocol.spec.checks import (
    bounded,
    checked_digest,
    checked_endpoint,
    checked_peer_id,
    checked_run_id,
    checked_text,
    finite,
)
from swarm_ft.protocol.spec.run_spec import MAX_BATCH_SIZE, MAX_SEQ_LENGTH
from swarm_ft.protocol.spec.training_plan import Microbatch
from swarm_ft.protocol.wire.run_wire import (
    layers_from_wire,
    layers_to_wire,
    spec_from_wire,
    spec_to_wire,
)
from swarm_ft.protocol.wire.timeline_wire import reply_from_wire

BYTES_PER_TOKEN = 4

MAX_RUN_PEERS = 1 << 14


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
        case ClockReply(sent_us, coordinator_us):
            clock = timeline_pb2.ClockReply(sent_us=sent_us, coordinator_us=coordinator_us)
            return pb.ToPeer(clock=clock)
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
                run_id=checked_run_id(commit.run_id),
                attempt=Attempt(commit.attempt),
                step=StepNumber(commit.step),
                clip_factor=finite("clip factor", commit.clip_factor),
                learning_rate=finite("learning rate", commit.learning_rate),
            )
        case "export":
            return ExportStage(run_id=checked_run_id(message.export.run_id))
        case "release":
            return ReleaseStage(
                run_id=checked_run_id(message.release.run_id),
                reason=checked_text(message.release.reason),
            )
        case "save":
            run_id = checked_run_id(message.save.run_id)
            return SaveStage(run_id=run_id, step=StepNumber(message.save.step))
        case "take":
            return TakeStage(
                run_id=checked_run_id(message.take.run_id),
                attempt=Attempt(message.take.attempt),
                digest=checked_digest("digest of a shard", message.take.digest),
                donors=_donors_from_wire(message.take.donors),
            )
        case "clock":
            return reply_from_wire(message.clock)
        case _:
            raise MalformedMessage("message from the coordinator: expected a body we know")


def stages_to_wire(stages: tuple[StageAssignment, ...]) -> list[pb.StageAssignment]:
    """A run's stages as protobuf."""
    return [
        pb.StageAssignment(
            peer_id=stage.peer_id, layers=layers_to_wire(stage.layers), endpoint=stage.endpoint
        )
        for stage in stages
    ]


def stage_from_wire(stage: pb.StageAssignment) -> StageAssignment:
    """One stage of a run from protobuf."""
    return StageAssignment(
        peer_id=checked_peer_id(stage.peer_id),
        layers=layers_from_wire(stage.layers),
        endpoint=checked_endpoint(stage.endpoint, optional=True),
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
        takers=[
            pb.Taker(peer_id=taker.peer_id, step=taker.step, donors=taker.donors)
            for taker in assign.takers
        ],
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
        run_id=checked_run_id(assign.run_id),
        spec=spec_from_wire(assign.spec),
        attempt=Attempt(assign.attempt),
        stages=tuple(stage_from_wire(stage) for stage in assign.stages),
        committed_steps=assign.committed_steps,
        fresh=assign.fresh,
        spec_digest=checked_digest("RunSpec digest", assign.spec_digest),
        takers=tuple(_taker_from_wire(taker) for taker in assign.takers),
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


def _taker_from_wire(taker: pb.Taker) -> Taker:
    return Taker(
        peer_id=checked_peer_id(taker.peer_id),
        step=StepNumber(taker.step),
        donors=_donors_from_wire(taker.donors),
    )


def _donors_from_wire(donors: Sequence[str]) -> tuple[PeerId, ...]:
    bounded("donors", len(donors), 1, MAX_RUN_PEERS)
    return tuple(checked_peer_id(donor) for donor in donors)


def _plan_to_wire(plan: PlanStep) -> pb.PlanStep:
    return pb.PlanStep(
        run_id=plan.run_id,
        attempt=plan.attempt,
        step=plan.step,
        microbatches=[
            pb.Microbatch(
                index=batch.index,
                samples=batch.samples,
                route=batch.route,
                done=sorted(batch.done),
            )
            for batch in plan.microbatches
        ],
        listeners=plan.listeners,
        tokens=[tokens_to_wire(sample, ids) for sample, ids in plan.tokens.items()],
        traced=plan.traced,
    )


def _plan_from_wire(plan: pb.PlanStep) -> PlanStep:
    _check_samples(plan)
    microbatches = tuple(
        Microbatch(
            MicrobatchIndex(batch.index),
            tuple(SampleId(sample) for sample in batch.samples),
            tuple(batch.route),
            frozenset(batch.done),
        )
        for batch in plan.microbatches
    )
    if [batch.index for batch in microbatches] != list(range(len(microbatches))):
        raise MalformedMessage("plan: expected microbatches numbered from 0")
    return PlanStep(
        run_id=checked_run_id(plan.run_id),
        attempt=Attempt(plan.attempt),
        step=StepNumber(plan.step),
        microbatches=microbatches,
        listeners=tuple(checked_peer_id(listener) for listener in plan.listeners),
        tokens=dict(tokens_from_wire(tokens) for tokens in plan.tokens),
        traced=plan.traced,
    )


def _check_samples(plan: pb.PlanStep) -> None:
    samples = [sample for batch in plan.microbatches for sample in batch.samples]
    bounded("samples of a step", len(samples), 1, MAX_BATCH_SIZE)
    bounded("samples that come twice", len(samples) - len(set(samples)), 0, 0)
    for batch in plan.microbatches:  # an empty one would never be complete
        bounded("samples of a microbatch", len(batch.samples), 1, MAX_BATCH_SIZE)


def tokens_to_wire(sample: SampleId, token_ids: bytes) -> pb.SampleTokens:
    """One sample's tokens as protobuf."""
    return pb.SampleTokens(sample=sample, token_ids=token_ids)


def tokens_from_wire(tokens: pb.SampleTokens) -> tuple[SampleId, bytes]:
    """One sample's tokens from protobuf: little-endian uint32, a whole number of them."""
    num_bytes = len(tokens.token_ids)
    bounded("bytes of a sample", num_bytes, BYTES_PER_TOKEN, MAX_SEQ_LENGTH * BYTES_PER_TOKEN)
    bounded("bytes past the last token", num_bytes % BYTES_PER_TOKEN, 0, 0)
    return SampleId(tokens.sample), tokens.token_ids
