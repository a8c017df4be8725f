"""What peers say to the coordinator, as frozen values. Protobuf is met only in `peer_wire`."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm_ft.ids import (
    NO_ATTEMPT,
    Attempt,
    MicrobatchIndex,
    PeerId,
    RunId,
    StepNumber,
)
from swarm_ft.protocol.buffer_reports import BufferCounts, HeldBuffers
from swarm_ft.protocol.layers import LayerRange
from swarm_ft.protocol.shard import ShardName
from swarm_ft.protocol.timeline import StepTimeline
from swarm_ft.protocol.traffic import GradientTraffic, Traffic


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldStage:
    """What a peer still holds of a run, so that a restarted coordinator can go on with it.

    Attributes:
        last_attempt: whose commit was applied last, 0 if none was: tells apart two histories.
    """

    run_id: RunId
    spec_digest: bytes
    layers: LayerRange
    committed_steps: int
    last_attempt: Attempt = NO_ATTEMPT
    exported: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerHello:
    """A peer offers itself. `layers` None: the coordinator chooses, within `memory_bytes`."""

    peer_id: PeerId
    layers: LayerRange | None
    memory_bytes: int
    held: HeldStage | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StageReady:
    """All neighbours are connected, and weights are loaded, but at a peer that listens.

    Attributes:
        done: microbatches of the first uncommitted step whose gradients are summed here already,
            and whose frames are kept.
        buffers: that are here, at each of the stage's boundaries.
    """

    run_id: RunId
    attempt: Attempt
    done: frozenset[MicrobatchIndex] = frozenset()
    buffers: tuple[HeldBuffers, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTaken:
    """A taker has the stage's state as of the last commit that it heard of, and may compute.

    Attributes:
        state_bytes: that were fetched from the other replicas.
    """

    run_id: RunId
    attempt: Attempt
    state_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReady:
    """This peer did its part of the step: all gradients are summed, none is applied.

    Attributes:
        squared_grad_norm: of the stage's gradient, over all of its replicas.
        loss_sum: of this peer's microbatches, at the last stage.
        compute_s: seconds that forwards and backwards took.
        traffic: what it sent over its boundaries; all replicas behind one count as one.
        buffers: what is kept at each boundary.
        lost: buffers that are here no more since the peer told last.
    """

    run_id: RunId
    attempt: Attempt
    step: StepNumber
    squared_grad_norm: float
    loss_sum: float = 0.0
    compute_s: float = 0.0
    traffic: tuple[Traffic, ...] = ()
    gradients: GradientTraffic = field(default_factory=GradientTraffic)
    buffers: tuple[BufferCounts, ...] = ()
    lost: tuple[HeldBuffers, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class StageExported:
    """The trained stage is written down and can be fetched from this peer."""

    run_id: RunId
    shard_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StageFailed:
    """This peer cannot go on with the run; `code` is that of a `SwarmError`."""

    run_id: RunId
    attempt: Attempt
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class PeerGoodbye:
    """The peer leaves on purpose."""


_FIRST_STEP = StepNumber(0)


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerAlive:
    """The peer is there, and so far with the step under way.

    Attributes:
        attempt: the one at work; 0 if none is.
        step: its open step.
        parts_begun: forwards, backwards and weights of it, in this attempt, see `pipeline.PARTS`.
        compute_s: seconds that they took until now.
    """

    attempt: Attempt = NO_ATTEMPT
    step: StepNumber = _FIRST_STEP
    parts_begun: int = 0
    compute_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StageOffered:
    """A taker may have this stage's state from this peer.

    Attributes:
        step: how many steps are in it.
        digest: of the shard that it is offered as, see `ChunkList.digest`.
        total_bytes: of the shard.
    """

    run_id: RunId
    attempt: Attempt
    step: StepNumber
    digest: bytes
    total_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSaved:
    """A stage's state lies among the run's snapshots, as a file of that digest."""

    name: ShardName
    digest: bytes
    total_bytes: int


@dataclass(frozen=True, slots=True)
class ClockProbe:
    """What time is it at the coordinator? `sent_us` is this peer's own."""

    sent_us: int


FromPeer = (
    PeerHello
    | StageReady
    | StageTaken
    | StepReady
    | StageExported
    | StageFailed
    | PeerGoodbye
    | PeerAlive
    | StageOffered
    | StageSaved
    | StepTimeline
    | ClockProbe
)
