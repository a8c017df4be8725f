"""What peers say to the coordinator, as frozen values whose types say what may come."""

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
from swarm_ft.protocol.spec.version import PROTOCOL_VERSION, Spoken

# ---- what the coordinator says to peers, as frozen values whose types say what may come
#
# Tokens travel as little-endian uint32 bytes, so that the coordinator can pass them on unread.

MAX_RUN_PEERS = 1 << 14
MAX_PLAN_SAMPLES = MAX_BATCH_SIZE + 2 * MAX_EVAL_SAMPLES
MAX_EVAL_PASSES = 2
MAX_KEPT_RUNS = 64
MAX_KEPT_SHARDS = 256
STORAGE_KEY_BYTES = 32
StorageKey = Annotated[bytes, Length(STORAGE_KEY_BYTES)]
SomePeers = Annotated[tuple[PeerId, ...], Length(MAX_RUN_PEERS, 1)]
Amount = Annotated[float, Range(0.0)]
Measured = Annotated[float, Range(0.0, MAX_PEER_NUMBER)]
DocumentLengths = Annotated[
    tuple[Annotated[int, Range(MIN_LENGTH, MAX_SEQ_LENGTH)], ...],
    Length(MAX_SEQ_LENGTH, 2),
]
"""Of the documents that share a sample."""
Targets = Annotated[int, Range(0, MAX_BATCH_SIZE * MAX_SEQ_LENGTH)]
"""Of one step."""


@dataclass(frozen=True, slots=True)
class WholeTokens(Bound):
    """One sample's: a whole number of them."""

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
    """Which peer hosts which blocks. Replicas of a stage follow each other, in a fixed order.

    Attributes:
        endpoint: where the others reach it, `host:port`; empty if it is away.
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
    """The pipeline that assignments make without these peers, first stage to last."""
    left_out = set(but)
    others = (a for a in assignments if a.peer_id not in left_out)
    groups = groupby(others, key=lambda assignment: assignment.layers)
    return tuple(Stage(layers=r, peers=tuple(a.peer_id for a in group)) for r, group in groups)


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedStage:
    """A stage of a snapshot: a file of that digest and length, see `shard.ChunkList`.

    Attributes:
        keepers: peers that have it; none where snapshots lie in a place of their own.
    """

    layers: LayerRange
    digest: Digest
    total_bytes: int
    keepers: Annotated[tuple[PeerId, ...], Length(MAX_RUN_PEERS)] = ()

    @property
    def file(self) -> ShardFile:
        """What it must be, whoever gives it."""
        return ShardFile(digest=self.digest, total_bytes=self.total_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Learner:
    """A peer that takes its stage's state over from other replicas.

    It listens meanwhile: it gets the sums of their gradients, to apply them once it has the
    state. Where several stages train one weight it cannot, and all wait for it.

    Attributes:
        step: how many steps are in the state.
        sources: replicas that offer it.
    """

    peer_id: PeerId
    step: StepNumber
    sources: SomePeers


@dataclass(frozen=True, kw_only=True, slots=True)
class Assign:
    """Host a stage, connect to the neighbours, say StageReady.

    Attributes:
        assignments: all peers of the run, first stage to last, replicas beside each other.
        fresh: load the snapshot, or the weights that the run began with, whatever is held.
        spec_digest: of the spec, as the coordinator computes it; the peer computes its own.
        learners: peers that do not hold their stage's state yet, each to be told to `CatchUp`.
        last_attempt: whose commit is the last.
        saved: the snapshot of the committed steps, if the run went back to it.
        owner: the name of the client that may fetch the result; empty where nobody has keys.
        priority: of the peer's time, to that of other runs with the same claim.
        claim: whose share of the peer's time the run has a part of; empty: its own.
        weight: of this claim, to those of others.
        storage_key: encrypts what this peer writes to its disk of this run, and alone reads; given
            up with the run.
        stage_keys: encrypt what lies in snapshots of the peer's stage, which it writes, and of the
            `saved` ones that it reads.
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
        """The stage that a peer is to host.

        Raises:
            MalformedMessage: none.
        """
        for stage in self.assignments:
            if stage.peer_id == peer_id:
                return stage.layers
        raise MalformedMessage(f"run {self.run_id}: expected a stage for peer {peer_id}, got none")


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveStage:
    """Put the stage's state, which has so many steps in it, into the run's snapshots.

    Attributes:
        by_peers: keep it, until others do; else it goes where all snapshots lie.
    """

    run_id: RunId
    step: StepNumber
    by_peers: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class KeepShard:
    """Keep a stage of a snapshot, from one of those who have it; say ShardKept or ShardLost."""

    name: ShardName
    file: ShardFile
    sources: SomePeers


@dataclass(frozen=True, kw_only=True, slots=True)
class GiveShard:
    """To a peer that keeps it: these, too, may take it."""

    name: ShardName
    takers: SomePeers


@dataclass(frozen=True, kw_only=True, slots=True)
class DropShards:
    """Keep of this run the snapshots of these steps, and no others."""

    run_id: RunId
    but: Annotated[tuple[StepNumber, ...], Length(MAX_KEPT_SHARDS)]


@dataclass(frozen=True, kw_only=True, slots=True)
class CatchUp:
    """To a learner of the assignment: these peers offer the stage's state, with this digest."""

    run_id: RunId
    attempt: Attempt
    digest: Digest
    total_bytes: int
    sources: SomePeers


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanStep:
    """Run one step: of all microbatches, those whose route passes this peer.

    Attributes:
        microbatches: those that train; none where all steps are committed, and the last weights
            are to be evaluated.
        listeners: peers that no microbatch passes, and that have no gradient; routes are over the
            others, in their order.
        evaluation: held-out samples, which only go forward; numbered behind the others.
        tokens: sample to its row, at the first and the last stage, see `spec.sample_rows`.
        num_targets: of all samples that train, over which the step's loss is a mean; 0 until they
            are counted.
        lengths: tokens of each sample, in the order of `samples`; none until then.
        documents: of each sample that several documents share, the tokens of each of them.
        traced: whether somebody wants to know what peers do when, see `timeline`.
        codecs: in place of the RunSpec's, in this step; None: those.
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
        """Of all microbatches, in their order, those of the evaluation last."""
        batches = (*self.microbatches, *self.evaluation)
        return tuple(sample for batch in batches for sample in batch.samples)

    @property
    def length_of(self) -> dict[SampleId, int]:
        """Tokens of each sample.

        Raises:
            MalformedMessage: the plan does not say.
        """
        if not self.lengths:
            raise MalformedMessage(f"plan of step {self.step}: expected lengths of its samples")
        return dict(zip(self.samples, self.lengths, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitStep:
    """The step counts: scale the gradients, step the optimizer, make staged buffers real.

    Attributes:
        attempt: the one whose gradients count.
    """

    run_id: RunId
    attempt: Attempt
    step: StepNumber
    clip_factor: Amount
    learning_rate: Amount


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportStage:
    """The run is trained: write the stage down and serve it until it is collected."""

    run_id: RunId


@dataclass(frozen=True, kw_only=True, slots=True)
class ReleaseStage:
    """Let go of the run, and of what lies of it on this peer's disk.

    Attributes:
        is_over: nobody goes on with it: its snapshots are of no use either.
    """

    run_id: RunId
    reason: Text
    is_over: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class StayIdle:
    """There is nothing for this peer to do, and why; it stays and waits."""

    reason: Text


@dataclass(frozen=True, kw_only=True, slots=True)
class Revoked:
    """These members' keys were revoked, and no others: their calls are to be refused."""

    names: Annotated[tuple[Text, ...], Length(MAX_REVOKED)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Renewed:
    """A member has a newer certificate: its calls go on although they began with an older one.

    Attributes:
        until_unix_s: when it expires, by the coordinator's wall clock.
    """

    name: Text
    until_unix_s: Amount


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaveProgress:
    """To a peer that would work no more: what is under way, and whether it may go.

    Attributes:
        words: what all wait for, or would be lost.
        seconds: that it takes yet, about; 0 if nobody can tell.
    """

    may_go: bool
    words: Text
    seconds: Measured = 0.0


def gist_of(words: str) -> str:
    """The same words without their numbers, which may change while the rest does not."""
    return "".join(c for c in words if not c.isdigit())


@dataclass(frozen=True, slots=True)
class ClockReply:
    """The coordinator's time when a probe came, and the probe's `sent_us`."""

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
    | ClockReply
    | ContributionReport
)


MAX_REVOKED = 10_000
MAX_BOUNDARIES = 2
"""Of one peer: in front of its stage and behind it."""
SomeHeld = Annotated[tuple[HeldBuffers, ...], Length(MAX_BOUNDARIES)]


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldStage:
    """What a peer still holds of a run, so that a restarted coordinator can go on with it.

    Attributes:
        last_attempt: whose commit was applied last, 0 if none was: tells apart two histories.
        exported: the trained stage, if it is written down here.
    """

    run_id: RunId
    spec_digest: Digest
    layers: LayerRange
    committed_steps: int
    last_attempt: Attempt = NO_ATTEMPT
    exported: ShardFile | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerLeaving:
    """The peer would work no more; it does until `LeaveProgress` says that it may go.

    Attributes:
        stays: it pauses: it stays connected, and may work again later.
        reason: why, for people.
        up_bytes_per_s: of its link, as it was measured; 0 if it was not.
    """

    stays: bool = False
    reason: Text = ""
    up_bytes_per_s: Measured = 0.0


@dataclass(frozen=True, slots=True)
class PeerWorks:
    """The peer works again after a pause, or goes on after all."""


MAX_SESSION = (1 << 63) - 1
MAX_MEMORY_BYTES = 16 << 40
"""Memory that a peer may claim to lend. No machine of a volunteer has more."""
MAX_DISK_BYTES = 1 << 50
"""Disk that a peer may claim to lend."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerHello:
    """A peer offers itself. `layers` None: the coordinator chooses, within `memory_bytes`.

    Attributes:
        endpoint: where other peers reach it, `host:port`.
        held: of each run that it works for.
        kept_runs: whose buffers lie on its disk, besides those of `held`.
        device: what it computes on, in words.
        version: of its swarm-ft.
        leaving: that it would work no more, if it would not.
        max_up_bytes_per_s: that it lends of its link; 0: all there is.
        max_down_bytes_per_s: so too of what comes in.
        keep_bytes: of its disk, for snapshots of others' stages.
        kept_shards: that lie there.
        max_beside: stages that it hosts beside its first, each of another run, if memory allows.
        device_memory_bytes: that its device has in all, of which it lends a part; 0: unknown.
        session: drawn when its process started, from which on it counts what it sends; 0: it does
            not count.
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
    protocol_version: Annotated[int, Spoken("peer", "coordinator")] = PROTOCOL_VERSION

    def held_of(self, run_id: RunId) -> HeldStage | None:
        """What it holds of a run, if anything."""
        return next((held for held in self.held if held.run_id == run_id), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageReady:
    """All neighbours are connected, and weights are loaded, but at a peer that listens.

    Attributes:
        done: microbatches of the first uncommitted step whose gradients are summed here already,
            and whose frames are kept; or which are evaluated, at the last stage.
        buffers: that are here, at each of the stage's boundaries.
    """

    run_id: RunId
    attempt: Attempt
    done: Annotated[frozenset[MicrobatchIndex], Length(MAX_MICROBATCHES)] = frozenset()
    buffers: SomeHeld = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class CaughtUp:
    """A learner has the stage's state as of the last commit that it heard of, and may compute.

    Attributes:
        state_bytes: that were fetched from the other replicas.
        proof: that it has the state which it took, see `shard.proof_by`.
    """

    run_id: RunId
    attempt: Attempt
    state_bytes: Annotated[int, Range(0, MAX_TRAFFIC_BYTES)]
    proof: Digest


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalSum:
    """Of the held-out samples that a peer of the last stage evaluated in one pass over them.

    Attributes:
        loss_sum: cross-entropy in nats, summed over `num_targets` targets.
        counts: that metrics are made of, see `Task.num_counts`.
    """

    loss_sum: Measured = 0.0
    num_targets: Targets = 0
    counts: Annotated[tuple[Targets, ...], Length(MAX_COUNTS)] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReady:
    """This peer did its part of the step: all gradients are summed, none is applied.

    Attributes:
        squared_grad_norm: of the stage's gradient, over all of its replicas.
        loss_sum: of this peer's microbatches, at the last stage.
        num_targets: that it is summed over.
        evaluation: at the last stage, of each pass over the held-out samples.
        shadowed: at the last stage, of the microbatch that was computed without compression too, as
            it was trained; None if another replica has it, or there is none.
        shadows: so too without compression.
        compute_s: seconds that forwards and backwards took, those of the evaluation left out.
        traffic: what it sent over its boundaries; all replicas behind one count as one.
        buffers: what is kept at each boundary.
        lost: buffers that are here no more since the peer told last.
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
    """The trained stage is written down and can be fetched from this peer."""

    run_id: RunId
    file: ShardFile


@dataclass(frozen=True, kw_only=True, slots=True)
class StageFailed:
    """This peer cannot go on with the run.

    Attributes:
        code: of a `SwarmError`.
        about: the peer at the other end of the link that failed, if it was one.
    """

    run_id: RunId
    attempt: Attempt
    code: Annotated[str, Name()]
    message: Text
    about: PeerId | None = None


@dataclass(frozen=True, slots=True)
class PeerGoodbye:
    """The peer leaves on purpose."""


_FIRST_STEP = StepNumber(0)
MAX_MEASURED_LINKS = 8
"""Of one peer that are told: the slowest, for which others wait. Who looks is told each second."""
LinkSpeeds = Annotated[dict[PeerId, LinkSpeed], Length(MAX_MEASURED_LINKS)]


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerAlive:
    """The peer is there, and so far with a run's step under way; it says so of each run.

    Attributes:
        run_id: the run; None if it works for none.
        attempt: the one at work; 0 if none is.
        step: its open step.
        parts_begun: forwards, backwards and weights of it, in this attempt, see `pipeline.PARTS`.
        compute_s: seconds that they took until now.
        waits_for: peers of the attempt that are not connected, or without which this one cannot go
            on; none while it loads its stage or computes.
        links: what it measured of those to other peers.
        sent_bytes: everything that it sent to other members in this session.
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
    """Learners may have this stage's state from this peer.

    Attributes:
        step: how many steps are in it.
        digest: of the shard that it is offered as, see `ChunkList.digest`.
        total_bytes: of the shard.
        proofs: what each learner will tell once it has the shard; to be kept from learners.
    """

    run_id: RunId
    attempt: Attempt
    step: StepNumber
    digest: Digest
    total_bytes: int
    proofs: Annotated[dict[PeerId, Digest], Length(MAX_RUN_PEERS)] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSaved:
    """A stage's state lies among the run's snapshots, as a file of that digest."""

    name: ShardName
    digest: Digest
    total_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StageUnsaved:
    """A stage's state cannot be put among the run's snapshots, and why."""

    name: ShardName
    reason: Text


@dataclass(frozen=True, slots=True)
class ShardKept:
    """A peer keeps what it was asked to."""

    shard: KeptShard


@dataclass(frozen=True, slots=True)
class ShardLost:
    """A peer does not keep, or has no more, what it was asked to, and why."""

    shard: KeptShard
    reason: Text


@dataclass(frozen=True, slots=True)
class ClockProbe:
    """What time is it at the coordinator? `sent_us` is this peer's own."""

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
    | PeerWorks
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
