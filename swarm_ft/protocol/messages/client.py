"""Messages between clients and the coordinator on runs, steps and the swarm, as frozen values."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Annotated

from swarm_ft.ids import NO_ATTEMPT, Attempt, BlockIndex, PeerId, RunId, SampleId, StepNumber
from swarm_ft.protocol.messages.capacity import LinkSpeed, Machine
from swarm_ft.protocol.messages.contribution import Contribution
from swarm_ft.protocol.messages.control import (
    MAX_RUN_PEERS,
    Amount,
    StageAssignment,
    Targets,
    TokenIds,
)
from swarm_ft.protocol.messages.enrolment import NamedMember
from swarm_ft.protocol.messages.events import Rollback, Serial, Steered
from swarm_ft.protocol.messages.meeting import MAX_RELAYS, Way
from swarm_ft.protocol.messages.reports import BufferCounts, ByteCounts, GradientTraffic, Traffic
from swarm_ft.protocol.messages.shard import ShardFile
from swarm_ft.protocol.spec.bounds import (
    MAX_HOSTED,
    Digest,
    Endpoint,
    HostAndPort,
    Length,
    Range,
    Text,
)
from swarm_ft.protocol.spec.grant import Grant
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.priority import Priority
from swarm_ft.protocol.spec.run_spec import MAX_COUNTS, Codecs, RunSpec
from swarm_ft.protocol.spec.version import PROTOCOL_VERSION, VersionField

# ---- requests of clients to the coordinator; their types bound the values

ClientsVersion = Annotated[int, VersionField("client", "coordinator")]


@dataclass(frozen=True, kw_only=True, slots=True)
class SubmitHeader:
    """Client to coordinator: a job without its data.

    Attributes:
        spec: Spec of the run.
        spec_digest: Digest of the spec by the client; the coordinator computes its own.
        run_id: Name that the client drew, so that a job sent again is the same run.
        priority: Priority of the run, which peers need not agree on; None for the default. The
            first submission's counts.
    """

    spec: RunSpec
    spec_digest: Digest
    run_id: RunId
    priority: Priority | None = None
    protocol_version: ClientsVersion = PROTOCOL_VERSION


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleTokens:
    """Client to coordinator: one sample's tokens, little-endian uint32."""

    sample: SampleId
    token_ids: TokenIds


SubmitPart = SubmitHeader | SampleTokens
"""Messages of a submission: a header, then every sample in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchRequest:
    """Client to coordinator: a request for a run's past and coming events.

    Attributes:
        run_id: The run; None for the client's only one that is not over.
        traced: Whether to send timelines of peers, from the next plan on.
    """

    run_id: RunId | None = None
    traced: bool = False
    protocol_version: ClientsVersion = PROTOCOL_VERSION


@dataclass(frozen=True, kw_only=True, slots=True)
class CancelRequest:
    """Client to coordinator: the end of a run; of the client's only one if `run_id` is None."""

    run_id: RunId | None = None
    protocol_version: ClientsVersion = PROTOCOL_VERSION


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectedRequest:
    """Client to coordinator: the client has the result, and peers may delete it."""

    run_id: RunId
    protocol_version: ClientsVersion = PROTOCOL_VERSION


@dataclass(frozen=True, kw_only=True, slots=True)
class StatusRequest:
    """Client or peer to coordinator: a request for a page of members and of runs.

    Attributes:
        first_member: Number of the page's first member, from 0.
        first_run: Number of the page's first run, from 0.
    """

    first_member: Annotated[int, Range(0, 1 << 31)] = 0
    first_run: Annotated[int, Range(0, 1 << 31)] = 0
    protocol_version: ClientsVersion = PROTOCOL_VERSION


class RunPhase(IntEnum):
    """Phase of a run; the numbers are those of the wire."""

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
    def is_working(self) -> bool:
        """Whether all of its peers are present and at work."""
        return RunPhase.LOADING <= self <= RunPhase.EXPORTING

    @property
    def is_over(self) -> bool:
        """Whether no step will follow."""
        return self >= RunPhase.FINISHED

    @property
    def has_tokens(self) -> bool:
        """Whether the coordinator stores the tokens: a lost result is repeated from them."""
        return self <= RunPhase.FINISHED

    def in_words(self, detail: str) -> str:
        """Return the phase and its detail for people: `queued`, or `waiting: layers 2-4`."""
        name = self.name.lower()
        if detail.startswith(f"{name} for "):
            detail = detail.removeprefix(f"{name} for ")
        elif not detail or detail.startswith((name, "paused")):
            return detail or name
        return f"{name}: {detail}"


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundaryStatus:
    """Buffers at one boundary, with the frames that built on them or did not.

    Attributes:
        boundary: The boundary.
        buffered_samples: Samples with buffers at both ends, at present peers.
        key_frames: Key frames of all committed steps.
        delta_frames: Delta frames of all committed steps.
        kept: Sum of the reports of all peers at the boundary, since the coordinator started.
        forward_codec: Codec of activations in the step under way.
        backward_codec: Codec of gradients in the step under way.
        traffic: Traffic of all committed steps, both sides together.
        newest: Traffic of the last committed step.
    """

    boundary: BlockIndex
    buffered_samples: int
    key_frames: int
    delta_frames: int
    kept: BufferCounts
    forward_codec: Text = ""
    backward_codec: Text = ""
    traffic: Traffic = field(default_factory=lambda: Traffic(boundary=BlockIndex(0)))
    newest: Traffic = field(default_factory=lambda: Traffic(boundary=BlockIndex(0)))

    @property
    def ratio(self) -> float | None:
        """Bytes of plain float32 per sent byte, in the last step; None before any.

        After a rollback it covers all steps until the next one.
        """
        t = self.newest if self.newest.forward_bytes else self.traffic
        sent = t.forward_bytes + t.backward_bytes
        plain = t.forward_uncompressed_bytes + t.backward_uncompressed_bytes
        return plain / sent if sent else None

    @property
    def hit_rate(self) -> float | None:
        """Share of frames with a usable buffer that built on it; None before the first."""
        frames = self.key_frames + self.delta_frames
        return self.delta_frames / frames if frames else None


@dataclass(frozen=True, kw_only=True, slots=True)
class StageResult:
    """A peer with its stage of the result."""

    peer_id: PeerId
    file: ShardFile


MAX_CODEC_CHANGES = 64
"""Codec changes of one run."""
MAX_STEERED = 64
"""Newest requests for one run that the coordinator remembers."""


@dataclass(frozen=True, slots=True)
class CodecChange:
    """Other codecs from this step on, however often the step is repeated."""

    first_step: StepNumber
    codecs: Codecs


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressionCost:
    """Cost of compression in a run with a configured quality.

    Attributes:
        asked: Share of the perplexity that it may cost.
        cost: Share that it has cost so far, as far as known.
        num_measured: Number of steps with a measurement.
    """

    asked: Amount
    cost: Amount = 0.0
    num_measured: int = 0

    def __str__(self) -> str:
        if not self.num_measured:
            return f"compression may cost {100 * self.asked:.3g} % of perplexity"
        return (
            f"compression cost {100 * self.cost:.2g} % of perplexity so far, "
            f"{100 * self.asked:.3g} % allowed"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """Coordinator to client: state of a run; `detail` names the obstacle, or the reason of its end.

    Attributes:
        attempt: Attempt of a finished run's result, which distinguishes it from an earlier one.
        joining: Peers of the stages that receive their state while the others train.
        results: Holders of a finished run's result, as far as its peers reported (again, after a
            restart); replicas of a stage in the order in which they joined the run.
        result_step: Steps in the result if the best weights are it; None: the last weights.
        codecs: Latest changes of the codecs, by rising step.
        quality: Cost of compression; None without a configured quality.
        steered: Latest requests to pause, resume or change the run, oldest first.
        names: Names of peers in this message.
    """

    run_id: RunId
    phase: RunPhase
    detail: Text
    committed_steps: int
    spec: RunSpec
    attempt: Attempt = NO_ATTEMPT
    assignments: Annotated[tuple[StageAssignment, ...], Length(MAX_RUN_PEERS)] = ()
    sent: ByteCounts = field(default_factory=ByteCounts)
    joining: Annotated[tuple[PeerId, ...], Length(MAX_RUN_PEERS)] = ()
    results: Annotated[tuple[StageResult, ...], Length(MAX_RUN_PEERS)] = ()
    result_step: StepNumber | None = None
    codecs: Annotated[tuple[CodecChange, ...], Length(MAX_CODEC_CHANGES)] = ()
    quality: CompressionCost | None = None
    steered: Annotated[tuple[Steered, ...], Length(MAX_STEERED)] = ()
    names: Annotated[tuple[NamedMember, ...], Length(MAX_RUN_PEERS)] = ()

    @property
    def ending(self) -> str:
        """Phase and reason: `failed: ...`, `cancelled by the run's owner`."""
        return self.phase.in_words(self.detail)

    @property
    def steps_in_result(self) -> StepNumber:
        """Steps in the result, or in the one to come."""
        return StepNumber(self.committed_steps) if self.result_step is None else self.result_step


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCommitted:
    """Coordinator to client: a committed step.

    Attributes:
        loss: Mean over the step's target tokens.
        seconds: Seconds from its plan to its commit.
        traffic: Traffic of this step, all peers at a boundary together, without its evaluation.
        gradients: Traffic of gradients of this step, all stages together.
        state_bytes: Bytes of state that learners received since the step before.
    """

    step: StepNumber
    loss: Amount
    learning_rate: Amount
    grad_norm: Amount
    num_samples: int
    seconds: Amount
    traffic: tuple[Traffic, ...] = ()
    gradients: GradientTraffic = field(default_factory=GradientTraffic)
    state_bytes: int = 0

    @property
    def sent(self) -> ByteCounts:
        """Bytes sent for this step, by kind."""
        return ByteCounts(
            forward_bytes=sum(t.forward_bytes for t in self.traffic),
            forward_uncompressed_bytes=sum(t.forward_uncompressed_bytes for t in self.traffic),
            backward_bytes=sum(t.backward_bytes for t in self.traffic),
            backward_uncompressed_bytes=sum(t.backward_uncompressed_bytes for t in self.traffic),
            gradient_bytes=self.gradients.sent_bytes,
            gradient_uncompressed_bytes=self.gradients.uncompressed_bytes,
            state_bytes=self.state_bytes,
            relayed_bytes=sum(t.relayed_bytes + t.evaluation_relayed_bytes for t in self.traffic)
            + self.gradients.relayed_bytes,
            evaluation_bytes=sum(t.evaluation_bytes for t in self.traffic),
            evaluation_uncompressed_bytes=sum(
                t.evaluation_uncompressed_bytes for t in self.traffic
            ),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """Coordinator to client: an evaluation on the held-out samples, with mean losses over targets.

    Attributes:
        step: Steps in the weights.
        eval_loss: Loss without compression; None if not requested.
        compressed_eval_loss: Loss with compressed activations; None if not requested.
        counts: Counts behind the task's metrics; uncompressed, if that was requested.
        traffic: Traffic of the evaluation, all peers at a boundary together.
    """

    step: StepNumber
    num_samples: int
    eval_loss: Amount | None = None
    compressed_eval_loss: Amount | None = None
    counts: Annotated[tuple[Targets, ...], Length(MAX_COUNTS)] = ()
    traffic: tuple[Traffic, ...] = ()

    @property
    def sent(self) -> ByteCounts:
        """Bytes sent for the evaluation."""
        return ByteCounts(
            evaluation_bytes=sum(t.evaluation_bytes for t in self.traffic),
            evaluation_uncompressed_bytes=sum(
                t.evaluation_uncompressed_bytes for t in self.traffic
            ),
            relayed_bytes=sum(t.evaluation_relayed_bytes for t in self.traffic),
        )

    @property
    def loss(self) -> float:
        """Uncompressed loss, or else the compressed one."""
        known = (self.eval_loss, self.compressed_eval_loss)
        return next((loss for loss in known if loss is not None), math.nan)


RunEvent = RunStatus | StepCommitted | Evaluated | Rollback


class MemberActivity(IntEnum):
    """Present activity of a run's member; the numbers are those of the wire."""

    LOADING = 1
    COMPUTING = 2
    WAITING = 3
    """The member waits for others, by its own report."""
    JOINING = 4
    """The member receives its stage's state while the others train."""
    READY = 5
    """The member finished its part of the run's present work."""
    EXPORTING = 6
    KEEPING = 7
    """The member stores a result until the client fetches it."""


class MemberState(IntEnum):
    """State of a peer, over all runs; the numbers are those of the wire."""

    IDLE = 1
    WORKING = 2
    """The peer has work for a run."""
    PAUSING = 3
    """The peer asked to pause, and still has work."""
    PAUSED = 4
    LEAVING = 5
    """The peer asked to leave."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberWork:
    """Work of a member for a run.

    Attributes:
        stage: Number of its stage, from 0.
        replica: Number of its replica, from 0, of `num_replicas` of the stage.
        waits_for: Peers that it waits for, by its last report.
        share: Microbatches of the step under way that are assigned to it.
        parts_begun: Forwards, backwards and weights of these, of `num_parts`, by its last report.
        microbatch_s: Seconds of computing a recent microbatch; None: unknown.
    """

    run_id: RunId
    layers: LayerRange
    stage: int
    replica: int
    num_replicas: int
    doing: MemberActivity
    waits_for: Annotated[tuple[PeerId, ...], Length(MAX_RUN_PEERS)] = ()
    share: int = 0
    parts_begun: int = 0
    num_parts: int = 0
    microbatch_s: Amount | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberLink:
    """A link from a member to another.

    Attributes:
        peer_id: The other member.
        way: Way of the last meeting; None: unknown.
        speed: Speed as the member measured it.
    """

    peer_id: PeerId
    way: Way | None = None
    speed: LinkSpeed = field(default_factory=LinkSpeed)


@dataclass(frozen=True, kw_only=True, slots=True)
class Contributor:
    """A contributor, connected or not, with its contribution."""

    peer_id: PeerId
    given: Contribution


MAX_LINKS = 64
"""Links of a member in its status."""
MAX_CONTRIBUTORS = 256
"""Contributors in a status: those with the largest contributions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberStatus:
    """State of a peer at the coordinator.

    Attributes:
        layers: Layers that it offers; None: the coordinator chooses.
        idle: Reason why no work suits it, or why it pauses or leaves; empty if some work may.
        grant: Stages that it may host.
        endpoint: Endpoint for other peers; empty if the caller may not connect to it.
        device: Device that it computes on, by its own report.
        memory_bytes: Memory of it that placements count.
        version: Version of its swarm-ft, by its own report.
        speaks: Version of its protocol.
        joined_ago_s: Seconds since its stream began.
        heard_ago_s: Seconds since its last message.
        machine: Measurements of its machine and of its link to the coordinator.
        works: Work for each run that has it, active runs first.
        links: Links to replicas of its stage and of adjoining stages, as far as known.
        given: Contribution in all committed steps, since the journal was made.
        state: State, for programs; `idle` is its text for people.
        offered_bytes: Memory that it offers, by its own report. It is more than `memory_bytes` if
            the peers on its machine together offer more than the machine has.
    """

    peer_id: PeerId
    layers: LayerRange | None
    idle: Text = ""
    grant: Grant = field(default_factory=Grant)
    endpoint: Annotated[str, HostAndPort(is_optional=True)] = ""
    device: Text = ""
    memory_bytes: int = 0
    version: Text = ""
    speaks: int = 0
    joined_ago_s: Amount = 0.0
    heard_ago_s: Amount = 0.0
    machine: Machine = field(default_factory=Machine)
    works: Annotated[tuple[MemberWork, ...], Length(MAX_HOSTED)] = ()
    links: Annotated[tuple[MemberLink, ...], Length(MAX_LINKS)] = ()
    given: Contribution = field(default_factory=Contribution)
    state: MemberState = MemberState.IDLE
    offered_bytes: int = 0

    def work_in(self, run_id: RunId) -> MemberWork | None:
        """Return the peer's work for a run; None if the run does not have it."""
        return next((work for work in self.works if work.run_id == run_id), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """A run as everybody in the swarm may see it, without the facts for its client alone.

    Attributes:
        detail: Obstacle or reason of the end; without failures' texts for another client's run.
        assignments: Stages of its peers; without endpoints for another client's run.
        num_steps: Steps of the run in all.
        spec_digest: Digest by which a client recognises its job.
        joining: Peers of the stages that receive their state while the others train.
        boundaries: State of the boundaries, first to last; empty for a run that is over.
        is_own: Whether the run is the caller's or shared with it, or nobody has keys.
        model: Model of the caller's own run; empty for others'.
        last_step: Last step of the caller's own run; None before the first, or after a rollback.
        last_evaluation: Last evaluation of the caller's own run; None before the first.
        step_s: Seconds of a recent step; 0: unknown.
        samples_per_s: Training samples per second, over the last steps; 0: unknown.
        tokens_per_s: Target tokens per second over the last steps since the coordinator started;
            0: unknown.
        eta_s: Seconds until its last step at the recent pace; None: unknown.
        eta_low_s, eta_high_s: Range of `eta_s`.
        place: Place in the queue; 0: its turn, active, or over.
        behind: Run before it in the queue.
        snapshots: Steps in each whole snapshot.
        is_paused: Whether somebody paused it, so that no step is planned.
        learning_rate: Peak of the schedule in effect; 0 for another client's run.
        codecs: Codecs in effect; None for another client's run.
        quality: Cost of compression; None without a configured quality, or for others' runs.
    """

    run_id: RunId
    phase: RunPhase
    detail: Text
    committed_steps: int
    num_steps: int
    spec_digest: Digest
    is_own: bool = True
    attempt: Attempt = NO_ATTEMPT
    assignments: Annotated[tuple[StageAssignment, ...], Length(MAX_RUN_PEERS)] = ()
    sent: ByteCounts = field(default_factory=ByteCounts)
    joining: Annotated[tuple[PeerId, ...], Length(MAX_RUN_PEERS)] = ()
    boundaries: tuple[BoundaryStatus, ...] = ()
    model: Text = ""
    last_step: StepCommitted | None = None
    last_evaluation: Evaluated | None = None
    step_s: Amount = 0.0
    samples_per_s: Amount = 0.0
    tokens_per_s: Amount = 0.0
    eta_s: Amount | None = None
    place: int = 0
    behind: RunId | None = None
    snapshots: tuple[StepNumber, ...] = ()
    is_paused: bool = False
    learning_rate: Amount = 0.0
    codecs: Codecs | None = None
    quality: CompressionCost | None = None
    eta_low_s: Amount | None = None
    eta_high_s: Amount | None = None

    @property
    def bytes_saved(self) -> int:
        """Bytes that the codecs saved, in all committed steps."""
        return self.sent.uncompressed_bytes - self.sent.sent_bytes


MAX_PAGE_MEMBERS, MAX_PAGE_RUNS = 256, 32


@dataclass(frozen=True, kw_only=True, slots=True)
class RelayStatus:
    """State of a connected relay.

    Attributes:
        name: Name of its key; empty: the coordinator's own relay.
        endpoint: Endpoint of its legs.
        links: Present links.
        relayed_bytes: Bytes since its start, both ways.
    """

    name: Text = ""
    endpoint: Endpoint
    links: int = 0
    relayed_bytes: int = 0


MAX_WARNINGS = 16
MAX_NAMES = 4096
"""Names of members in one message; more of them follow from their ids there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SwarmStatus:
    """Coordinator to caller: a page of the swarm's members and runs.

    Attributes:
        num_members: Members in all.
        num_runs: Runs in all.
        version: Version of the coordinator's swarm-ft.
        unix_s: Wall clock of the coordinator.
        next_event: Serial number of the next event.
        contributors: Largest contributors, connected or not; on the first page.
        warnings: Texts for the coordinator's operator that need action.
        names: Names of members in this message.
    """

    members: Annotated[tuple[MemberStatus, ...], Length(MAX_PAGE_MEMBERS)]
    runs: Annotated[tuple[RunSummary, ...], Length(MAX_PAGE_RUNS)]
    num_members: int = 0
    num_runs: int = 0
    relays: Annotated[tuple[RelayStatus, ...], Length(MAX_RELAYS)] = ()
    version: Text = ""
    unix_s: Amount = 0.0
    next_event: Serial = 0
    contributors: Annotated[tuple[Contributor, ...], Length(MAX_CONTRIBUTORS)] = ()
    warnings: Annotated[tuple[Text, ...], Length(MAX_WARNINGS)] = ()
    names: Annotated[tuple[NamedMember, ...], Length(MAX_NAMES)] = ()
