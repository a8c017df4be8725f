"""What clients are told of runs, their steps and the swarm, as frozen values."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Annotated

from swarm_ft.ids import NO_ATTEMPT, Attempt, BlockIndex, PeerId, RunId, SampleId, StepNumber
from swarm_ft.protocol.messages.control import (
    MAX_RUN_PEERS,
    Amount,
    StageAssignment,
    Targets,
    TokenIds,
)
from swarm_ft.protocol.messages.meeting import MAX_RELAYS
from swarm_ft.protocol.messages.reports import BufferCounts, ByteCounts, GradientTraffic, Traffic
from swarm_ft.protocol.messages.shard import ShardFile
from swarm_ft.protocol.spec.bounds import Digest, Endpoint, Length, Range, Text
from swarm_ft.protocol.spec.grant import Grant
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.priority import Priority
from swarm_ft.protocol.spec.run_spec import RunSpec
from swarm_ft.protocol.spec.tasks import MAX_COUNTS
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


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundaryStatus:
    """Buffers at one boundary, and the frames that built on them or did not.

    Attributes:
        buffered_samples: whose buffers are at both ends, at peers that are there.
        key_frames: of all steps that count; so too `delta_frames`.
        kept: what all peers at the boundary told, added up, since the coordinator started.
    """

    boundary: BlockIndex
    buffered_samples: int
    key_frames: int
    delta_frames: int
    kept: BufferCounts

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


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """A run as others see it; `detail` says what it waits for, or why it ended.

    Attributes:
        attempt: of a finished run, tells its result from one that was made before.
        joining: peers of the stages that take over while the others train.
        results: of a finished run, as far as its peers told (again, after a restart); of a stage's
            replicas those first that joined the run first.
        result_step: how many steps are in the result, if the best weights are it, and not the last.
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
        traffic: of this step, all peers at a boundary together.
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
            relayed_bytes=sum(t.relayed_bytes for t in self.traffic) + self.gradients.relayed_bytes,
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


RunEvent = RunStatus | StepCommitted | Evaluated


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberStatus:
    """A peer as the coordinator knows it.

    Attributes:
        layers: None: it takes what it is given.
        idle: why there is nothing to do for it; empty if there may be.
        grant: what it may host.
    """

    peer_id: PeerId
    layers: LayerRange | None
    idle: Text = ""
    grant: Grant = field(default_factory=Grant)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class SwarmStatus:
    """Everybody and everything the coordinator knows, or a page of it.

    Attributes:
        num_members: that there are in all.
        num_runs: so too of runs.
    """

    members: Annotated[tuple[MemberStatus, ...], Length(MAX_PAGE_MEMBERS)]
    runs: Annotated[tuple[RunSummary, ...], Length(MAX_PAGE_RUNS)]
    num_members: int = 0
    num_runs: int = 0
    relays: Annotated[tuple[RelayStatus, ...], Length(MAX_RELAYS)] = ()
