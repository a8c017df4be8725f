"""Messages between peers and the coordinator, as frozen values whose types bound them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Annotated, TypeAlias

from swarm_ft.errors import MalformedMessage
from swarm_ft.ids import NO_ATTEMPT, Attempt, MicrobatchIndex, PeerId, RunId, SampleId, StepNumber
from swarm_ft.protocol.messages.capacity import LinkSpeed, Machine
from swarm_ft.protocol.messages.contribution import (
    MAX_GIVEN_BYTES,
    ContributionReport,
    ContributionRequest,
)
from swarm_ft.protocol.messages.reports import (
    MAX_TRAFFIC_BYTES,
    BufferCounts,
    GradientTraffic,
    HeldBuffers,
    OfOneStep,
    Traffic,
)
from swarm_ft.protocol.messages.shard import KeptShard, ShardFile, ShardName
from swarm_ft.protocol.messages.timeline import ClockTime, StepTimeline
from swarm_ft.protocol.spec.bounds import (
    MAX_HOSTED,
    MAX_PEER_NUMBER,
    MAX_SQUARED_NORM,
    Bound,
    Digest,
    Endpoint,
    HostAndPort,
    Length,
    Name,
    Range,
    Text,
)
from swarm_ft.protocol.spec.layers import MAX_BLOCKS, LayerRange
from swarm_ft.protocol.spec.microbatch import Microbatch
from swarm_ft.protocol.spec.priority import DEFAULT_PRIORITY, DEFAULT_WEIGHT, Priority, Weight
from swarm_ft.protocol.spec.run_spec import (
    BYTES_PER_TOKEN,
    MAX_BATCH_SIZE,
    MAX_COUNTS,
    MAX_EVAL_SAMPLES,
    MAX_MICROBATCHES,
    MAX_SEQ_LENGTH,
    MIN_LENGTH,
    Codecs,
    RunSpec,
)
from swarm_ft.protocol.spec.version import PROTOCOL_VERSION, VersionField

# ---- messages from the coordinator to peers
#
# Tokens travel as little-endian uint32 bytes, so that the coordinator need not read them.

MAX_RUN_PEERS = 1 << 14
MAX_PLAN_SAMPLES = MAX_BATCH_SIZE + 2 * MAX_EVAL_SAMPLES
MAX_EVAL_PASSES = 2
MAX_KEPT_RUNS = 64
MAX_KEPT_SHARDS = 256
MAX_MEMORY_BYTES = 16 << 40
STORAGE_KEY_BYTES = 32
StorageKey = Annotated[bytes, Length(STORAGE_KEY_BYTES)]
SomePeers = Annotated[tuple[PeerId, ...], Length(MAX_RUN_PEERS, 1)]
Amount = Annotated[float, Range(0.0)]
Measured = Annotated[float, Range(0.0, MAX_PEER_NUMBER)]
DocumentLengths = Annotated[
    tuple[Annotated[int, Range(MIN_LENGTH, MAX_SEQ_LENGTH)], ...],
    Length(MAX_SEQ_LENGTH, 2),
]
"""Tokens of each document that shares a sample."""
Targets = Annotated[int, Range(0, MAX_BATCH_SIZE * MAX_SEQ_LENGTH)]
"""Target tokens of one step."""


@dataclass(frozen=True, slots=True)
class WholeTokens(Bound):
    """Bound on one sample's tokens: a whole number of them."""

    def refusal(self, value: object) -> str | None:
        """See `Bound`."""
        num_bytes = len(value) if isinstance(value, bytes) else 0
        if num_bytes % BYTES_PER_TOKEN == 0 and 0 < num_bytes <= MAX_SEQ_LENGTH * BYTES_PER_TOKEN:
            return None
        return (
            f"expected 1 to {MAX_SEQ_LENGTH} tokens of {BYTES_PER_TOKEN} bytes, "
            f"got {num_bytes} bytes"
        )


TokenIds = Annotated[bytes, WholeTokens()]


@dataclass(frozen=True, kw_only=True, slots=True)
class StageAssignment:
    """Assignment of one stage to a peer; a run's list has replicas side by side, in a fixed order.

    Attributes:
        peer_id: The peer.
        layers: Blocks of the stage.
        endpoint: Endpoint for other peers, `host:port`; empty if the peer is away.
    """

    peer_id: PeerId
    layers: LayerRange
    endpoint: Annotated[str, HostAndPort(is_optional=True)] = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A stage and its replicas."""

    layers: LayerRange
    peers: tuple[PeerId, ...]


def stages_of(
    assignments: Iterable[StageAssignment], *, but: Collection[PeerId] = ()
) -> tuple[Stage, ...]:
    """Return the pipeline of assignments without the peers in `but`, first stage to last."""
    left_out = set(but)
    others = (a for a in assignments if a.peer_id not in left_out)
    groups = groupby(others, key=lambda assignment: assignment.layers)
    return tuple(Stage(layers=r, peers=tuple(a.peer_id for a in group)) for r, group in groups)


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedStage:
    """A stage of a snapshot, with its file's digest and length, see `shard.ChunkList`.

    Attributes:
        layers: Blocks of the stage.
        digest: Digest of the file.
        total_bytes: Bytes of the file.
        keepers: Peers that have it; empty if the snapshots lie at a url.
    """

    layers: LayerRange
    digest: Digest
    total_bytes: int
    keepers: Annotated[tuple[PeerId, ...], Length(MAX_RUN_PEERS)] = ()

    @property
    def file(self) -> ShardFile:
        """Digest and length that any source's file has to match."""
        return ShardFile(digest=self.digest, total_bytes=self.total_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Learner:
    """A peer that receives its stage's state from other replicas.

    It listens meanwhile: it receives the sums of their gradients, and applies them once it has the
    state. Where several stages share a weight it cannot, and all wait for it.

    Attributes:
        step: Steps in the state.
        sources: Replicas that offer it.
    """

    peer_id: PeerId
    step: StepNumber
    sources: SomePeers


@dataclass(frozen=True, kw_only=True, slots=True)
class Assign:
    """Coordinator to peer: host a stage, connect to the neighbours, and reply with StageReady.

    Attributes:
        assignments: All peers of the run, first stage to last, replicas beside each other.
        fresh: Whether to load the snapshot, or the run's first weights, and drop present state.
        spec_digest: Digest of the spec by the coordinator; the peer computes its own.
        learners: Peers without their stage's state, each of which receives a `CatchUp`.
        last_attempt: Attempt of the last commit.
        saved: Snapshot of the committed steps, if the run rolled back to it.
        owner: Name of the client that may fetch the result; empty in a swarm without keys.
        priority: Priority among runs of the same claim at the peer.
        claim: Claim whose share of the peer's time the run belongs to; empty: its own.
        weight: Weight of this claim among claims.
        storage_key: Key of this peer's files of the run, which it alone reads; deleted with the
            run.
        stage_keys: Keys of the peer's stage in snapshots that it writes, and of the `saved` ones
            that it reads.
    """

    run_id: RunId
    spec: RunSpec
    attempt: Attempt
    assignments: Annotated[tuple[StageAssignment, ...], Length(MAX_RUN_PEERS, 1)]
    committed_steps: int
    fresh: bool
    spec_digest: Digest
    learners: Annotated[tuple[Learner, ...], Length(MAX_RUN_PEERS)] = ()
    last_attempt: Attempt = NO_ATTEMPT
    saved: Annotated[tuple[SavedStage, ...], Length(MAX_BLOCKS)] = ()
    owner: Text = ""
    priority: Priority = DEFAULT_PRIORITY
    claim: Text = ""
    weight: Weight = DEFAULT_WEIGHT
    storage_key: StorageKey = field(default=b"", repr=False)
    stage_keys: Annotated[dict[LayerRange, StorageKey], Length(MAX_BLOCKS)] = field(
        default_factory=dict, repr=False
    )

    def layers_of(self, peer_id: PeerId) -> LayerRange:
        """Return the stage of a peer.

        Raises:
            MalformedMessage: The peer has none.
        """
        for stage in self.assignments:
            if stage.peer_id == peer_id:
                return stage.layers
        raise MalformedMessage(f"run {self.run_id}: expected a stage for peer {peer_id}, got none")


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveStage:
    """Coordinator to peer: save the stage's state after `step` steps into the run's snapshots.

    Attributes:
        by_peers: Whether the peer keeps it until others do; otherwise it goes to the run's url.
    """

    run_id: RunId
    step: StepNumber
    by_peers: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class KeepShard:
    """Coordinator to keeper: fetch and keep a snapshot's stage; reply ShardKept or ShardLost."""

    name: ShardName
    file: ShardFile
    sources: SomePeers


@dataclass(frozen=True, kw_only=True, slots=True)
class GiveShard:
    """Coordinator to keeper: more peers that may fetch a shard."""

    name: ShardName
    takers: SomePeers


@dataclass(frozen=True, kw_only=True, slots=True)
class DropShards:
    """Coordinator to keeper: the steps whose snapshots of this run it still keeps."""

    run_id: RunId
    but: Annotated[tuple[StepNumber, ...], Length(MAX_KEPT_SHARDS)]


@dataclass(frozen=True, kw_only=True, slots=True)
class CatchUp:
    """Coordinator to learner: peers that offer the stage's state, with its digest."""

    run_id: RunId
    attempt: Attempt
    digest: Digest
    total_bytes: int
    sources: SomePeers


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanStep:
    """Coordinator to peer: run the microbatches of one step whose routes pass this peer.

    Attributes:
        microbatches: Microbatches that train; empty where all steps are committed, and only the
            last weights are evaluated.
        evaluation: Microbatches of held-out samples, which only go forward; numbered after the
            others.
        listeners: Peers without microbatches or gradients; routes count the others, in order.
        tokens: Row of each sample, at the first and the last stage, see `spec.sample_rows`.
        traced: Whether to report a timeline, see `timeline`.
        num_targets: Targets of all training samples, over which the step's loss is a mean; 0:
            not counted yet.
        lengths: Tokens of each sample, in the order of `samples`; empty: not counted yet.
        documents: Tokens of each document, of samples that several documents share.
        codecs: Codecs of this step; None: the RunSpec's.
    """

    run_id: RunId
    attempt: Attempt
    step: StepNumber
    microbatches: Annotated[tuple[Microbatch, ...], Length(MAX_BATCH_SIZE)]
    evaluation: Annotated[tuple[Microbatch, ...], Length(2 * MAX_EVAL_SAMPLES)] = ()
    listeners: Annotated[tuple[PeerId, ...], Length(MAX_RUN_PEERS)] = ()
    tokens: Annotated[dict[SampleId, TokenIds], Length(MAX_PLAN_SAMPLES)] = field(
        default_factory=dict
    )
    traced: bool = False
    num_targets: Targets = 0
    lengths: Annotated[
        tuple[Annotated[int, Range(MIN_LENGTH, MAX_SEQ_LENGTH)], ...], Length(MAX_PLAN_SAMPLES)
    ] = ()
    documents: Annotated[dict[SampleId, DocumentLengths], Length(MAX_PLAN_SAMPLES)] = field(
        default_factory=dict
    )
    codecs: Codecs | None = None

    def __post_init__(self) -> None:
        batches = (*self.microbatches, *self.evaluation)
        if not batches or any(batch.index != place for place, batch in enumerate(batches)):
            raise MalformedMessage("expected microbatches numbered from 0")
        samples, held_out = self.samples, sum(len(batch.samples) for batch in self.evaluation)
        num_trained = len(samples) - held_out
        is_bounded = num_trained <= MAX_BATCH_SIZE and held_out <= 2 * MAX_EVAL_SAMPLES
        if not is_bounded or len(set(samples)) < len(samples):
            raise MalformedMessage(
                f"expected at most {MAX_BATCH_SIZE} samples, each once, "
                f"got {num_trained} and {held_out} held out, {len(set(samples))} different ones"
            )
        if self.lengths and len(self.lengths) != len(samples):
            raise MalformedMessage(
                f"expected lengths of {len(samples)} samples, got {len(self.lengths)}"
            )
        self._check_documents()

    def _check_documents(self) -> None:
        length_of = self.length_of if self.documents else {}
        for sample, lengths in self.documents.items():
            if sum(lengths) != length_of.get(sample):
                raise MalformedMessage(
                    f"sample {sample}: expected documents of {length_of.get(sample, 0)} tokens in "
                    f"all, got {sum(lengths)}"
                )

    @property
    def samples(self) -> tuple[SampleId, ...]:
        """Samples of all microbatches, in their order, those of the evaluation last."""
        batches = (*self.microbatches, *self.evaluation)
        return tuple(sample for batch in batches for sample in batch.samples)

    @property
    def length_of(self) -> dict[SampleId, int]:
        """Tokens of each sample.

        Raises:
            MalformedMessage: The plan has no lengths.
        """
        if not self.lengths:
            raise MalformedMessage(f"plan of step {self.step}: expected lengths of its samples")
        return dict(zip(self.samples, self.lengths, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitStep:
    """Coordinator to peer: commit the step: scale gradients, step the optimizer, keep its buffers.

    Attributes:
        attempt: Attempt whose gradients count.
        clip_factor: Factor of the gradients, at most 1.
        learning_rate: Learning rate of the step.
    """

    run_id: RunId
    attempt: Attempt
    step: StepNumber
    clip_factor: Amount
    learning_rate: Amount


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportStage:
    """Coordinator to peer: write the trained stage, and serve it until it is collected."""

    run_id: RunId


@dataclass(frozen=True, kw_only=True, slots=True)
class ReleaseStage:
    """Coordinator to peer: release the run, and delete its files on this peer's disk.

    Attributes:
        reason: Text for the peer's log.
        is_over: Whether the run never resumes, so that its snapshots are void too.
    """

    run_id: RunId
    reason: Text
    is_over: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class StayIdle:
    """Coordinator to peer: no work suits this peer now, with the reason; it stays connected."""

    reason: Text


@dataclass(frozen=True, kw_only=True, slots=True)
class Revoked:
    """Coordinator to peer: all revoked members, whose calls it has to refuse."""

    names: Annotated[tuple[Text, ...], Length(MAX_REVOKED)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Renewed:
    """Coordinator to peer: a member has a newer certificate, which covers its present calls.

    Attributes:
        name: Name of the member.
        until_unix_s: Expiry, by the coordinator's wall clock.
    """

    name: Text
    until_unix_s: Amount


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryShare:
    """Coordinator to peer: the memory of this peer that placements count.

    It is less than the peer offers if all peers on its machine together offer more than the machine
    has.

    Attributes:
        memory_bytes: Memory that counts.
        num_peers: Peers of this swarm on the machine.
    """

    memory_bytes: Annotated[int, Range(0, MAX_MEMORY_BYTES)]
    num_peers: Annotated[int, Range(1, MAX_RUN_PEERS)]


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaveProgress:
    """Coordinator to a leaving peer: work under way, and whether the peer may go.

    Attributes:
        may_go: Whether nothing would be lost.
        words: Text: the handover, or the loss.
        seconds: Seconds that the handover still takes, about; 0: unknown.
    """

    may_go: bool
    words: Text
    seconds: Measured = 0.0


def without_numbers(words: str) -> str:
    """Return a text without its numbers, which may change while the rest does not."""
    return "".join(c for c in words if not c.isdigit())


@dataclass(frozen=True, slots=True)
class ClockReply:
    """Coordinator to peer: its time at a probe's arrival, with the probe's `sent_us`."""

    sent_us: ClockTime
    coordinator_us: ClockTime


ToPeer: TypeAlias = (
    Assign
    | CatchUp
    | SaveStage
    | KeepShard
    | GiveShard
    | DropShards
    | PlanStep
    | CommitStep
    | ExportStage
    | ReleaseStage
    | StayIdle
    | Revoked
    | Renewed
    | LeaveProgress
    | MemoryShare
    | ClockReply
    | ContributionReport
)


MAX_REVOKED = 10_000
MAX_BOUNDARIES = 2
"""Boundaries of one peer: in front of its stage and behind it."""
SomeHeld = Annotated[tuple[HeldBuffers, ...], Length(MAX_BOUNDARIES)]


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldStage:
    """A run's state at a peer, so that a restarted coordinator can resume it.

    Attributes:
        last_attempt: Attempt of the last applied commit, 0 for none: distinguishes two histories.
        exported: File of the trained stage, if the peer has written it.
    """

    run_id: RunId
    spec_digest: Digest
    layers: LayerRange
    committed_steps: int
    last_attempt: Attempt = NO_ATTEMPT
    exported: ShardFile | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerLeaving:
    """Peer to coordinator: a request to leave; the peer works on until `LeaveProgress` allows it.

    Attributes:
        stays: Whether it only pauses: it stays connected, and may work again later.
        reason: Text for people.
        up_bytes_per_s: Measured rate of its link; 0: unknown.
    """

    stays: bool = False
    reason: Text = ""
    up_bytes_per_s: Measured = 0.0


@dataclass(frozen=True, slots=True)
class PeerResumed:
    """Peer to coordinator: it works again after a pause, or stays after all."""


MAX_SESSION = (1 << 63) - 1
"""Memory that a peer may offer; no machine of a volunteer has more."""
MAX_DISK_BYTES = 1 << 50
"""Disk space that a peer may offer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerHello:
    """Peer to coordinator: its offer. `layers` None: the coordinator chooses, by `memory_bytes`.

    Attributes:
        endpoint: Endpoint for other peers, `host:port`.
        held: State of each run that it works for.
        kept_runs: Runs with buffers on its disk, besides those of `held`.
        device: Device that it computes on, for people.
        version: Version of its swarm-ft.
        leaving: Its request to leave, if any.
        max_up_bytes_per_s: Upload rate that it lends; 0: no limit.
        max_down_bytes_per_s: Download rate that it lends; 0: no limit.
        keep_bytes: Disk space for snapshots of others' stages.
        kept_shards: Shards on this disk space.
        max_beside: Stages beside its first, each of another run, if memory allows.
        device_memory_bytes: Memory of its device in all, of which it lends a part; 0: unknown.
        session: Random number of its process, which counts sent bytes from its start; 0: no count.
        machine_key: Digest that all peers on the same device of one machine have, and that only
            programs on this machine can know; empty: unknown. No other member receives it.
        machine_memory_bytes: Memory of this device in all, outside any container; 0: unknown.
    """

    peer_id: PeerId
    endpoint: Endpoint
    layers: LayerRange | None
    memory_bytes: Annotated[int, Range(0, MAX_MEMORY_BYTES)]
    held: Annotated[tuple[HeldStage, ...], Length(MAX_HOSTED)] = ()
    kept_runs: Annotated[tuple[RunId, ...], Length(MAX_KEPT_RUNS)] = ()
    device: Text = ""
    version: Text = ""
    leaving: PeerLeaving | None = None
    max_up_bytes_per_s: Measured = 0.0
    max_down_bytes_per_s: Measured = 0.0
    keep_bytes: Annotated[int, Range(0, MAX_DISK_BYTES)] = 0
    kept_shards: Annotated[tuple[KeptShard, ...], Length(MAX_KEPT_SHARDS)] = ()
    max_beside: Annotated[int, Range(0, MAX_HOSTED - 1)] = 0
    device_memory_bytes: Annotated[int, Range(0, MAX_MEMORY_BYTES)] = 0
    session: Annotated[int, Range(0, MAX_SESSION)] = 0
    machine_key: Text = field(default="", repr=False)
    machine_memory_bytes: Annotated[int, Range(0, MAX_MEMORY_BYTES)] = 0
    protocol_version: Annotated[int, VersionField("peer", "coordinator")] = PROTOCOL_VERSION

    def held_of(self, run_id: RunId) -> HeldStage | None:
        """Return the peer's state of a run, if any."""
        return next((held for held in self.held if held.run_id == run_id), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageReady:
    """Peer to coordinator: neighbours are connected, and weights are loaded unless it listens.

    Attributes:
        done: Microbatches of the first uncommitted step whose gradients this peer has summed, and
            whose frames it has; or which are evaluated, at the last stage.
        buffers: Buffers at each of the stage's boundaries.
    """

    run_id: RunId
    attempt: Attempt
    done: Annotated[frozenset[MicrobatchIndex], Length(MAX_MICROBATCHES)] = frozenset()
    buffers: SomeHeld = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class CaughtUp:
    """Learner to coordinator: it has the state of the last commit that it received.

    Attributes:
        state_bytes: Bytes that it fetched from the other replicas.
        proof: Proof that it has the state, see `shard.proof_by`.
    """

    run_id: RunId
    attempt: Attempt
    state_bytes: Annotated[int, Range(0, MAX_TRAFFIC_BYTES)]
    proof: Digest


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalSum:
    """Sums over the held-out samples that a peer of the last stage evaluated in one pass.

    Attributes:
        loss_sum: Cross-entropy in nats, summed over `num_targets` targets.
        num_targets: Number of targets.
        counts: Counts behind metrics, see `Task.num_counts`.
    """

    loss_sum: Measured = 0.0
    num_targets: Targets = 0
    counts: Annotated[tuple[Targets, ...], Length(MAX_COUNTS)] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReady:
    """Peer to coordinator: its part of the step is done; gradients are summed and not applied.

    Attributes:
        squared_grad_norm: Squared norm of the stage's gradient, over all of its replicas.
        loss_sum: Loss of this peer's microbatches, at the last stage.
        num_targets: Targets of `loss_sum`.
        evaluation: Sums of each pass over the held-out samples, at the last stage.
        shadowed: Sums of the shadow microbatch as trained, at the last stage; None if there is
            none, or another replica has it.
        shadows: Sums of the shadow microbatch without compression.
        compute_s: Seconds of forwards and backwards, without those of the evaluation.
        traffic: Traffic that it sent over its boundaries; all replicas behind one count as one.
        gradients: Traffic of gradients that it sent.
        buffers: Counts of buffers at each boundary.
        lost: Buffers lost since the last report.
    """

    run_id: RunId
    attempt: Attempt
    step: StepNumber
    squared_grad_norm: Annotated[float, Range(0.0, MAX_SQUARED_NORM)]
    loss_sum: Measured = 0.0
    num_targets: Targets = 0
    evaluation: Annotated[tuple[EvalSum, ...], Length(MAX_EVAL_PASSES)] = ()
    shadowed: EvalSum | None = None
    shadows: EvalSum | None = None
    compute_s: Measured = 0.0
    traffic: Annotated[tuple[Annotated[Traffic, OfOneStep()], ...], Length(MAX_BOUNDARIES)] = ()
    gradients: Annotated[GradientTraffic, OfOneStep()] = field(default_factory=GradientTraffic)
    buffers: Annotated[
        tuple[Annotated[BufferCounts, OfOneStep()], ...], Length(MAX_BOUNDARIES)
    ] = ()
    lost: SomeHeld = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class StageExported:
    """Peer to coordinator: the trained stage is written and can be fetched from this peer."""

    run_id: RunId
    file: ShardFile


@dataclass(frozen=True, kw_only=True, slots=True)
class StageFailed:
    """Peer to coordinator: it cannot continue the run.

    Attributes:
        code: Code of a `SwarmError`.
        message: Text for people.
        about: Peer at the other end of the failed link, if a link failed.
    """

    run_id: RunId
    attempt: Attempt
    code: Annotated[str, Name()]
    message: Text
    about: PeerId | None = None


@dataclass(frozen=True, slots=True)
class PeerGoodbye:
    """Peer to coordinator: it leaves on purpose."""


_FIRST_STEP = StepNumber(0)
MAX_MEASURED_LINKS = 8
"""Measured links of one peer in a message: the slowest ones, which others wait for."""
LinkSpeeds = Annotated[dict[PeerId, LinkSpeed], Length(MAX_MEASURED_LINKS)]


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerAlive:
    """Peer to coordinator: heartbeat with its progress in a run's step, one for each run.

    Attributes:
        run_id: The run; None if it works for none.
        attempt: Attempt at work; 0: none.
        step: Its open step.
        parts_begun: Forwards, backwards and weights in this attempt, see `pipeline.PARTS`.
        compute_s: Seconds of them so far.
        waits_for: Peers of the attempt that are not connected, or that block this one; empty while
            it loads its stage or computes.
        links: Measured speed of its links to other peers.
        sent_bytes: Bytes that it sent to other members in this session.
    """

    run_id: RunId | None = None
    attempt: Attempt = NO_ATTEMPT
    step: StepNumber = _FIRST_STEP
    parts_begun: int = 0
    compute_s: Measured = 0.0
    waits_for: Annotated[tuple[PeerId, ...], Length(MAX_RUN_PEERS)] = ()
    links: LinkSpeeds = field(default_factory=dict)
    sent_bytes: Annotated[int, Range(0, MAX_GIVEN_BYTES)] = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StageOffered:
    """Peer to coordinator: an offer of this stage's state to learners.

    Attributes:
        step: Steps in the state.
        digest: Digest of the offered shard, see `ChunkList.digest`.
        total_bytes: Bytes of the shard.
        proofs: Proof of each learner that it has the shard; a secret from learners.
    """

    run_id: RunId
    attempt: Attempt
    step: StepNumber
    digest: Digest
    total_bytes: int
    proofs: Annotated[dict[PeerId, Digest], Length(MAX_RUN_PEERS)] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSaved:
    """Peer to coordinator: a stage's state is in the run's snapshots, as a file of this digest."""

    name: ShardName
    digest: Digest
    total_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StageUnsaved:
    """Peer to coordinator: a stage's state cannot be saved, with the reason."""

    name: ShardName
    reason: Text


@dataclass(frozen=True, slots=True)
class ShardKept:
    """Keeper to coordinator: it keeps a shard, as requested."""

    shard: KeptShard


@dataclass(frozen=True, slots=True)
class ShardLost:
    """Keeper to coordinator: it does not have a requested shard, with the reason."""

    shard: KeptShard
    reason: Text


@dataclass(frozen=True, slots=True)
class ClockProbe:
    """Peer to coordinator: a request for the time; `sent_us` is the peer's own."""

    sent_us: ClockTime


FromPeer: TypeAlias = (
    PeerHello
    | StageReady
    | CaughtUp
    | StepReady
    | StageExported
    | StageFailed
    | PeerGoodbye
    | PeerLeaving
    | PeerResumed
    | PeerAlive
    | StageOffered
    | StageSaved
    | StageUnsaved
    | ShardKept
    | ShardLost
    | StepTimeline
    | ClockProbe
    | Machine
    | ContributionRequest
)
