"""What roles say to each other, as frozen values. Protobuf is met only in `wire`.

Tokens travel as little-endian uint32 bytes, so that the coordinator can pass them on unread.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import groupby

from swarm_ft.ids import Attempt, BlockIndex, PeerId, RunId, SampleId, StepNumber
from swarm_ft.protocol.frame import Frame, FrameKey
from swarm_ft.protocol.layers import LayerRange
from swarm_ft.protocol.run_spec import RunSpec
from swarm_ft.protocol.shard import ShardName
from swarm_ft.protocol.training_plan import Microbatch

NO_ATTEMPT = Attempt(0)
"""Of a commit that never was; attempts count from 1."""

# ---- over a boundary, both ways


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundaryHello:
    """First message of either side; what the other has already is not sent again."""

    run_id: RunId
    spec_digest: bytes
    boundary: BlockIndex
    peer_id: PeerId
    attempt: Attempt
    window_frames: int
    received: frozenset[FrameKey] = frozenset()


@dataclass(frozen=True, slots=True)
class Ack:
    """The frame of this key was decoded; its sender need not send it again."""

    key: FrameKey


@dataclass(frozen=True, slots=True)
class KeyFrameRequest:
    """The frame of this key builds on a buffer that is not here, or came out different."""

    key: FrameKey
    reason: str


BoundaryMessage = BoundaryHello | Frame | Ack | KeyFrameRequest

# ---- peer to coordinator


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
    """Weights are loaded and all neighbours are connected.

    Attributes:
        state_bytes: of the stage's state, if it was fetched from the other replicas.
    """

    run_id: RunId
    attempt: Attempt
    state_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """What one side sent over one boundary; each side counts what it sends itself."""

    boundary: BlockIndex
    forward_bytes: int = 0
    backward_bytes: int = 0
    forward_uncompressed_bytes: int = 0
    backward_uncompressed_bytes: int = 0
    key_frames: int = 0
    delta_frames: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            boundary=self.boundary,
            forward_bytes=self.forward_bytes + other.forward_bytes,
            backward_bytes=self.backward_bytes + other.backward_bytes,
            forward_uncompressed_bytes=(
                self.forward_uncompressed_bytes + other.forward_uncompressed_bytes
            ),
            backward_uncompressed_bytes=(
                self.backward_uncompressed_bytes + other.backward_uncompressed_bytes
            ),
            key_frames=self.key_frames + other.key_frames,
            delta_frames=self.delta_frames + other.delta_frames,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientTraffic:
    """Bytes of gradients that replicas of a stage sent each other, and what float32 would take."""

    sent_bytes: int = 0
    uncompressed_bytes: int = 0

    def __add__(self, other: GradientTraffic) -> GradientTraffic:
        return GradientTraffic(
            sent_bytes=self.sent_bytes + other.sent_bytes,
            uncompressed_bytes=self.uncompressed_bytes + other.uncompressed_bytes,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReady:
    """This peer did its part of the step: all gradients are summed, none is applied.

    Attributes:
        squared_grad_norm: of the stage's gradient, over all of its replicas.
        loss_sum: of this peer's microbatches, at the last stage.
        compute_s: seconds that forwards and backwards took.
        traffic: what it sent over its boundaries; all replicas behind one count as one.
    """

    run_id: RunId
    attempt: Attempt
    step: StepNumber
    squared_grad_norm: float
    loss_sum: float = 0.0
    compute_s: float = 0.0
    traffic: tuple[Traffic, ...] = ()
    gradients: GradientTraffic = GradientTraffic()


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


@dataclass(frozen=True, slots=True)
class PeerAlive:
    """The peer is there; `tasks_done` forwards and backwards of the open step are computed."""

    tasks_done: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StageOffered:
    """A newcomer may have this stage's state, as of the assignment, from this peer.

    Attributes:
        digest: of the shard that it is offered as, see `ChunkList.digest`.
        total_bytes: of the shard.
    """

    run_id: RunId
    attempt: Attempt
    digest: bytes
    total_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSaved:
    """A stage's state lies among the run's snapshots, as a file of that digest."""

    name: ShardName
    digest: bytes
    total_bytes: int


FromPeer = (
    PeerHello
    | StageReady
    | StepReady
    | StageExported
    | StageFailed
    | PeerGoodbye
    | PeerAlive
    | StageOffered
    | StageSaved
)

# ---- coordinator to peer


@dataclass(frozen=True, kw_only=True, slots=True)
class StageAssignment:
    """Which peer hosts which blocks. Replicas of a stage follow each other, in a fixed order."""

    peer_id: PeerId
    layers: LayerRange


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A stage and its replicas."""

    layers: LayerRange
    peers: tuple[PeerId, ...]


def stages_of(assignments: Iterable[StageAssignment]) -> tuple[Stage, ...]:
    """The pipeline that assignments make, first stage to last."""
    groups = groupby(assignments, key=lambda assignment: assignment.layers)
    return tuple(Stage(layers=r, peers=tuple(a.peer_id for a in group)) for r, group in groups)


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedStage:
    """A stage of a snapshot: a file of that digest and length."""

    layers: LayerRange
    digest: bytes
    total_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Assign:
    """Host a stage, connect to the neighbours, say StageReady.

    Attributes:
        stages: all peers of the run, first stage to last, replicas beside each other.
        fresh: load the snapshot, or the weights that the run began with, whatever is held.
        spec_digest: of the spec, as the coordinator computes it; the peer computes its own.
        takers: peers that do not hold their stage's state yet; its other replicas offer it, and a
            taker is told to `TakeStage`.
        last_attempt: whose commit is the last.
        saved: the snapshot of the committed steps, if the run went back to it.
    """

    run_id: RunId
    spec: RunSpec
    attempt: Attempt
    stages: tuple[StageAssignment, ...]
    committed_steps: int
    fresh: bool
    spec_digest: bytes
    takers: tuple[PeerId, ...] = ()
    last_attempt: Attempt = NO_ATTEMPT
    saved: tuple[SavedStage, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveStage:
    """Put the stage's state, which has so many steps in it, into the run's snapshots."""

    run_id: RunId
    step: StepNumber


@dataclass(frozen=True, kw_only=True, slots=True)
class TakeStage:
    """To a taker of the assignment: these peers offer the stage's state, with this digest."""

    run_id: RunId
    attempt: Attempt
    digest: bytes
    donors: tuple[PeerId, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanStep:
    """Run one step: of all microbatches, those whose route passes this peer.

    Attributes:
        tokens: sample to little-endian uint32 ids, at the first and the last stage.
    """

    run_id: RunId
    attempt: Attempt
    step: StepNumber
    microbatches: tuple[Microbatch, ...]
    tokens: dict[SampleId, bytes] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitStep:
    """The step counts: scale the gradients, step the optimizer, make staged buffers real.

    Attributes:
        attempt: the one whose gradients count.
    """

    run_id: RunId
    attempt: Attempt
    step: StepNumber
    clip_factor: float
    learning_rate: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportStage:
    """The run is trained: write the stage down and serve it until it is collected."""

    run_id: RunId


@dataclass(frozen=True, kw_only=True, slots=True)
class ReleaseStage:
    """Let go of the run."""

    run_id: RunId
    reason: str


ToPeer = Assign | TakeStage | SaveStage | PlanStep | CommitStep | ExportStage | ReleaseStage

# ---- client and coordinator


class RunPhase(IntEnum):
    """Where a run stands; the numbers are those of the wire."""

    QUEUED = 1
    WAITING = 2
    LOADING = 3
    TRAINING = 4
    EXPORTING = 5
    FINISHED = 6
    COLLECTED = 7
    CANCELLED = 8
    FAILED = 9

    @property
    def is_over(self) -> bool:
        """Whether no step will follow."""
        return self >= RunPhase.FINISHED


@dataclass(frozen=True, kw_only=True, slots=True)
class ByteCounts:
    """What peers sent each other, by kind, and what it would be as plain float32.

    Attributes:
        gradient_bytes: of gradients that replicas of a stage summed.
        state_bytes: of weights and optimizer that newcomers took; never compressed.
    """

    forward_bytes: int = 0
    forward_uncompressed_bytes: int = 0
    backward_bytes: int = 0
    backward_uncompressed_bytes: int = 0
    gradient_bytes: int = 0
    gradient_uncompressed_bytes: int = 0
    state_bytes: int = 0

    def __add__(self, other: ByteCounts) -> ByteCounts:
        names = ByteCounts.__dataclass_fields__
        return ByteCounts(**{name: getattr(self, name) + getattr(other, name) for name in names})

    @property
    def sent_bytes(self) -> int:
        """Of all kinds."""
        return self.forward_bytes + self.backward_bytes + self.gradient_bytes + self.state_bytes

    @property
    def uncompressed_bytes(self) -> int:
        """Of all kinds, had nothing been compressed."""
        return (
            self.forward_uncompressed_bytes
            + self.backward_uncompressed_bytes
            + self.gradient_uncompressed_bytes
            + self.state_bytes
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """A run as others see it; `detail` says what it waits for, or why it ended."""

    run_id: RunId
    phase: RunPhase
    detail: str
    committed_steps: int
    spec: RunSpec
    stages: tuple[StageAssignment, ...] = ()
    sent: ByteCounts = ByteCounts()


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCommitted:
    """A step that counts.

    Attributes:
        loss: mean over the step's target tokens.
        seconds: from its plan to its commit.
        traffic: of this step, all peers at a boundary together.
        gradients: of this step, all stages together.
        state_bytes: of state that newcomers took since the step before.
    """

    step: StepNumber
    loss: float
    learning_rate: float
    grad_norm: float
    num_samples: int
    seconds: float
    traffic: tuple[Traffic, ...] = ()
    gradients: GradientTraffic = GradientTraffic()
    state_bytes: int = 0

    @property
    def sent(self) -> ByteCounts:
        """All that was sent for this step, by kind."""
        return ByteCounts(
            forward_bytes=sum(t.forward_bytes for t in self.traffic),
            forward_uncompressed_bytes=sum(t.forward_uncompressed_bytes for t in self.traffic),
            backward_bytes=sum(t.backward_bytes for t in self.traffic),
            backward_uncompressed_bytes=sum(t.backward_uncompressed_bytes for t in self.traffic),
            gradient_bytes=self.gradients.sent_bytes,
            gradient_uncompressed_bytes=self.gradients.uncompressed_bytes,
            state_bytes=self.state_bytes,
        )


RunEvent = RunStatus | StepCommitted


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberStatus:
    """A peer as the coordinator knows it; `layers` None: it takes what it is given."""

    peer_id: PeerId
    layers: LayerRange | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SwarmStatus:
    """Everybody and everything the coordinator knows."""

    members: tuple[MemberStatus, ...]
    runs: tuple[RunStatus, ...]
