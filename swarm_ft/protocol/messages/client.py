"""What clients are told of runs, their steps and the swarm, as frozen values."""

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
from swarm_ft.protocol.messages.events import Serial, Steered, WentBack
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
from swarm_ft.protocol.spec.version import PROTOCOL_VERSION, Spoken

# ---- what clients ask of the coordinator, as frozen values whose types say what may come

ClientsVersion = Annotated[int, Spoken("client", "coordinator")]


@dataclass(frozen=True, kw_only=True, slots=True)
class SubmitHeader:
    """A job, without its data.

    Attributes:
        spec_digest: as the client computes it; the coordinator computes its own.
        run_id: drawn by the client, so that a job that comes again is the same run.
        priority: no part of what peers agree on; None for the usual one. Of a job that comes again
            the first one's counts.
    """

    spec: RunSpec
    spec_digest: Digest
    run_id: RunId
    priority: Priority | None = None
    protocol_version: ClientsVersion = PROTOCOL_VERSION


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleTokens:
    """One sample's tokens, little-endian uint32."""

    sample: SampleId
    token_ids: TokenIds


SubmitPart = SubmitHeader | SampleTokens
"""A header, then every sample in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchRequest:
    """Tell everything that happened in a run, then everything that happens.

    Attributes:
        run_id: None for the client's only one that is not over.
        traced: tell what peers do when, from the next plan on.
    """

    run_id: RunId | None = None
    traced: bool = False
    protocol_version: ClientsVersion = PROTOCOL_VERSION


@dataclass(frozen=True, kw_only=True, slots=True)
class CancelRequest:
    """End a run; the client's only one if `run_id` is None."""

    run_id: RunId | None = None
    protocol_version: ClientsVersion = PROTOCOL_VERSION


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectedRequest:
    """The client has the result: peers may let go of it."""

    run_id: RunId
    protocol_version: ClientsVersion = PROTOCOL_VERSION


@dataclass(frozen=True, kw_only=True, slots=True)
class StatusRequest:
    """Tell who is there and which runs there are, a page of each.

    Attributes:
        first_member: the page begins with it, counted from 0.
        first_run: so too of runs.
    """

    first_member: Annotated[int, Range(0, 1 << 31)] = 0
    first_run: Annotated[int, Range(0, 1 << 31)] = 0
    protocol_version: ClientsVersion = PROTOCOL_VERSION


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
    def is_working(self) -> bool:
        """Whether all of its peers are there and at work."""
        return RunPhase.LOADING <= self <= RunPhase.EXPORTING

    @property
    def is_over(self) -> bool:
        """Whether no step will follow."""
        return self >= RunPhase.FINISHED

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
    """Buffers at one boundary, and the frames that built on them or did not.

    Attributes:
        buffered_samples: whose buffers are at both ends, at peers that are there.
        key_frames: of all steps that count; so too `delta_frames`.
        kept: what all peers at the boundary told, added up, since the coordinator started.
        forward_codec: of activations, in the step under way; so too `backward_codec`.
        traffic: of all steps that count, both sides together.
        newest: of the last of them.
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
        """Bytes that plain float32 would take to those sent, in the last step; None before any.

        After going back, of all steps until the next one.
        """
        t = self.newest if self.newest.forward_bytes else self.traffic
        sent = t.forward_bytes + t.backward_bytes
        plain = t.forward_uncompressed_bytes + t.backward_uncompressed_bytes
        return plain / sent if sent else None

    @property
    def hit_rate(self) -> float | None:
        """Of frames that could build on a buffer, how many did; None before the first."""
        frames = self.key_frames + self.delta_frames
        return self.delta_frames / frames if frames else None


@dataclass(frozen=True, kw_only=True, slots=True)
class StageResult:
    """A peer that gives its stage of the result."""

    peer_id: PeerId
    file: ShardFile


MAX_CODEC_CHANGES = 64
"""Of one run."""
MAX_STEERED = 64
"""Requests for one run that the coordinator remembers: the newest."""


@dataclass(frozen=True, slots=True)
class CodecChange:
    """Other codecs, from this step on, however often the step is made."""

    first_step: StepNumber
    codecs: Codecs


@dataclass(frozen=True, kw_only=True, slots=True)
class QualityFound:
    """What compression costs a run that asks for a quality.

    Attributes:
        asked: share of the perplexity that it may cost.
        cost: share that it cost so far, as far as can be told.
        num_measured: steps in which that was measured.
    """

    asked: Amount
    cost: Amount = 0.0
    num_measured: int = 0

    def __str__(self) -> str:
        if not self.num_measured:
            return f"compression may cost {100 * self.asked:.3g} % of perplexity"
        return (
            f"compression cost {100 * self.cost:.2g} % of perplexity so far, "
            f"asked {100 * self.asked:.3g} %"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """A run as others see it; `detail` says what it waits for, or why it ended.

    Attributes:
        attempt: of a finished run, tells its result from one that was made before.
        joining: peers of the stages that take over while the others train.
        results: of a finished run, as far as its peers told (again, after a restart); of a stage's
            replicas those first that joined the run first.
        result_step: how many steps are in the result, if the best weights are it, and not the last.
        codecs: what they were changed to meanwhile, the last times; steps rising.
        quality: None where none was asked for.
        steered: the last requests to pause, resume or change the run, oldest first.
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
    quality: QualityFound | None = None
    steered: Annotated[tuple[Steered, ...], Length(MAX_STEERED)] = ()
    names: Annotated[tuple[NamedMember, ...], Length(MAX_RUN_PEERS)] = ()

    @property
    def ending(self) -> str:
        """The phase and its reason: `failed: ...`, `cancelled by the run's owner`."""
        return self.phase.in_words(self.detail)

    @property
    def steps_in_result(self) -> StepNumber:
        """How many steps are in the result, or would be."""
        return StepNumber(self.committed_steps) if self.result_step is None else self.result_step


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCommitted:
    """A step that counts.

    Attributes:
        loss: mean over the step's target tokens.
        seconds: from its plan to its commit.
        traffic: of this step, all peers at a boundary together; of an evaluation in it, nothing.
        gradients: of this step, all stages together.
        state_bytes: of state that newcomers took since the step before.
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
        """All that was sent for this step, by kind."""
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
    """How well the weights predict the held-out samples; losses are means over all targets.

    Attributes:
        step: how many steps are in the weights.
        eval_loss: with nothing compressed; None if that was not asked for.
        compressed_eval_loss: so too with compressed activations.
        counts: that the task's metrics are made of; uncompressed, if that was asked for.
        traffic: what was sent for it, all peers at a boundary together.
    """

    step: StepNumber
    num_samples: int
    eval_loss: Amount | None = None
    compressed_eval_loss: Amount | None = None
    counts: Annotated[tuple[Targets, ...], Length(MAX_COUNTS)] = ()
    traffic: tuple[Traffic, ...] = ()

    @property
    def sent(self) -> ByteCounts:
        """All that was sent for it."""
        return ByteCounts(
            evaluation_bytes=sum(t.evaluation_bytes for t in self.traffic),
            evaluation_uncompressed_bytes=sum(
                t.evaluation_uncompressed_bytes for t in self.traffic
            ),
            relayed_bytes=sum(t.evaluation_relayed_bytes for t in self.traffic),
        )

    @property
    def loss(self) -> float:
        """The uncompressed one, or else the other."""
        known = (self.eval_loss, self.compressed_eval_loss)
        return next((loss for loss in known if loss is not None), math.nan)


RunEvent = RunStatus | StepCommitted | Evaluated | WentBack


class MemberDoing(IntEnum):
    """What a member of a run does now; the numbers are those of the wire."""

    LOADING = 1
    COMPUTING = 2
    WAITING = 3
    """For others, by its own word."""
    JOINING = 4
    """Takes its stage's state over while the others train."""
    READY = 5
    """Did its part of what all do now."""
    EXPORTING = 6
    KEEPING = 7
    """A result, until it is fetched."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberWork:
    """What a member does for a run.

    Attributes:
        stage: counted from 0; so too `replica`, of `num_replicas` of the stage.
        waits_for: whom it waits for, as it told last.
        share: microbatches of the step under way that are its own.
        parts_begun: forwards, backwards and weights of these, of `num_parts`, as it told last.
        microbatch_s: seconds that a microbatch takes it to compute, of late; None: not known yet.
    """

    run_id: RunId
    layers: LayerRange
    stage: int
    replica: int
    num_replicas: int
    doing: MemberDoing
    waits_for: Annotated[tuple[PeerId, ...], Length(MAX_RUN_PEERS)] = ()
    share: int = 0
    parts_begun: int = 0
    num_parts: int = 0
    microbatch_s: Amount | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberLink:
    """A way from a member to another.

    Attributes:
        way: how the two met last; None: not known.
        speed: as the member measured it.
    """

    peer_id: PeerId
    way: Way | None = None
    speed: LinkSpeed = field(default_factory=LinkSpeed)


@dataclass(frozen=True, kw_only=True, slots=True)
class Contributor:
    """Who gave something, here or not."""

    peer_id: PeerId
    given: Contribution


MAX_LINKS = 64
"""Of a member that are told."""
MAX_CONTRIBUTORS = 256
"""That are told: those that gave most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberStatus:
    """A peer as the coordinator knows it.

    Attributes:
        layers: None: it takes what it is given.
        idle: why there is nothing to do for it; empty if there may be.
        grant: what it may host.
        endpoint: where others reach it; empty where the caller has no business with it.
        device: what it computes on, as it says; so too `memory_bytes`, that it lends.
        version: of its swarm-ft, as it says.
        speaks: which version of the protocol.
        joined_ago_s: seconds since its stream began.
        heard_ago_s: seconds since it last said something.
        machine: what it measured of itself and of its link to the coordinator.
        works: what it does, for each run that has it; those under way first.
        links: to replicas of its stage and of those beside it, as far as they met or measured.
        given: in all committed steps, since the journal was made.
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

    def work_in(self, run_id: RunId) -> MemberWork | None:
        """What it does for a run; None: that has it not."""
        return next((work for work in self.works if work.run_id == run_id), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """A run as everybody in the swarm may see it, without what only its client needs.

    Attributes:
        detail: of another client's run, without what somebody's failure says of it.
        assignments: of another client's run without endpoints.
        num_steps: that it has in all.
        spec_digest: tells the client of a job whether it is this run.
        joining: peers of the stages that take over while the others train.
        boundaries: first to last; of a run that is not over.
        is_own: the caller's, or shared with it, or nobody has keys.
        model: of the caller's own alone; so too `last_step` and `last_evaluation`.
        last_step: None before the first, and after going back until the next.
        step_s: seconds that a step took of late; 0: not known yet. So too the rates.
        samples_per_s: trained, over the last steps.
        tokens_per_s: target tokens, over the last steps since the coordinator started.
        eta_s: seconds until its last step, at the pace of the last ones; None: not known.
        eta_low_s, eta_high_s: the range of that.
        place: in the queue: 0 is its turn, at work, or over.
        behind: the run that is before it in the queue.
        snapshots: how many steps are in those that are whole.
        is_paused: somebody paused it: no step is planned.
        learning_rate: the schedule's peak in effect; 0 for another client's run.
        codecs: the codecs in effect; None for another client's run.
        quality: what compression costs; None where no quality was asked for, and of others'.
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
    quality: QualityFound | None = None
    eta_low_s: Amount | None = None
    eta_high_s: Amount | None = None

    @property
    def bytes_saved(self) -> int:
        """What the codecs kept off the links, in all steps that count."""
        return self.sent.uncompressed_bytes - self.sent.sent_bytes


MAX_PAGE_MEMBERS, MAX_PAGE_RUNS = 256, 32


@dataclass(frozen=True, kw_only=True, slots=True)
class RelayStatus:
    """A relay that is there.

    Attributes:
        name: of its key; empty: the coordinator's own.
        links: that stand now.
        relayed_bytes: since it was started, both ways.
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
    """Everybody and everything the coordinator knows, or a page of it.

    Attributes:
        num_members: that there are in all.
        num_runs: so too of runs.
        version: of the coordinator's swarm-ft.
        unix_s: its wall clock.
        next_event: the serial number that the next event will have.
        contributors: who gave most, here or not; on the first page.
        warnings: what the coordinator's operator has to see to, for people.
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
