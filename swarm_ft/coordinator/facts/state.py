"""The coordinator's state. Values only.

`machine.decide` maps (state, event, now) to (state, effects), see `events`. A `SwarmState` has
members and runs. A `Run` has a value for each part of it that changes together: `CommittedState`,
`AttemptState` with its `PhaseProgress`, `PlannedStep`, `Saving`, `Keeping`, `Steering` and others.

Recordings contain the names of all fields, see `recording.values`. Times in seconds are monotonic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from swarm_ft.coordinator.facts.conduct import Conduct, Trouble
from swarm_ft.coordinator.facts.connectivity import Connectivity
from swarm_ft.coordinator.facts.ledger import Ledger
from swarm_ft.coordinator.facts.messages import Progress
from swarm_ft.coordinator.facts.reasons import Reason
from swarm_ft.coordinator.facts.reputation import Reputation
from swarm_ft.ids import NO_ATTEMPT, Attempt, BlockIndex, MicrobatchIndex, PeerId, RunId, StepNumber
from swarm_ft.protocol.messages.capacity import LinkSpeed
from swarm_ft.protocol.messages.client import (
    MAX_STEERED,
    CodecChange,
    CompressionCost,
    Evaluated,
    RunPhase,
    StepCommitted,
)
from swarm_ft.protocol.messages.contribution import MAX_GIVEN_BYTES, Contribution
from swarm_ft.protocol.messages.control import (
    CommitStep,
    Learner,
    PeerHello,
    PeerLeaving,
    SavedStage,
    Stage,
    StageAssignment,
    StepReady,
    stages_of,
)
from swarm_ft.protocol.messages.events import EventKind
from swarm_ft.protocol.messages.reports import BufferCounts, ByteCounts, Traffic
from swarm_ft.protocol.messages.shard import KeptShard, ShardFile, ShardName
from swarm_ft.protocol.spec.best import Judged
from swarm_ft.protocol.spec.grant import Grant
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.microbatch import Microbatch
from swarm_ft.protocol.spec.priority import DEFAULT_PRIORITY, NO_CLAIM, Claim
from swarm_ft.protocol.spec.quality import QualityControl
from swarm_ft.protocol.spec.run_spec import Codecs, RunSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

T = TypeVar("T")

MAX_STANDINGS = 4096
"""Peers whose failures are remembered; a bound, since anybody can make names."""
MAX_CONDUCTS = 256
"""Peers whose failures in one run are remembered, see `Run.conducts`."""
QUEUE_S = 24 * 3600.0
"""Seconds that a run waits for peers that can host it."""
RESULT_S = 7 * 24 * 3600.0
"""Seconds that peers keep the result of a finished run for its client."""


def _nothing() -> MappingProxyType[Any, Any]:
    return MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A peer with an open control stream.

    Attributes:
        hello: Its offer; `memory_bytes` is its share of its machine's memory.
        idle: Reason why it has nothing to do, as last sent to it; None if it may have.
        grant: Permissions of its invitation, from the coordinator's registry and never from the
            peer.
        leaving: Its request to leave or pause, if it made one.
        told: Progress of its leaving that was last sent to it; None before the first.
        told_at_s: Monotonic seconds of that message.
        links: Its measurements of links to other members.
        site: Name of its machine, see `plan.shared_memory`; empty: unknown.
        offered_bytes: Memory that it offers; 0: that of `hello`.
    """

    hello: PeerHello
    joined_at_s: float
    heard_at_s: float
    idle: Reason | None = None
    grant: Grant = field(default_factory=Grant)
    leaving: PeerLeaving | None = None
    told: Progress | None = None
    told_at_s: float = 0.0
    links: Mapping[PeerId, LinkSpeed] = field(default_factory=lambda: MappingProxyType({}))
    site: str = ""
    offered_bytes: int = 0


@dataclass(frozen=True, slots=True)
class SentTraffic:
    """Bytes that a member sent to other members, by its own count.

    A session is one process of the member, which reports all its bytes so far, again and again. The
    newest session's last report is remembered, so that no byte counts twice.

    Attributes:
        session: Number of the newest session; see `PeerHello.session`.
        session_bytes: Bytes of that session, as last reported.
        all_bytes: Bytes of all sessions.
    """

    session: int = 0
    session_bytes: int = 0
    all_bytes: int = 0

    def counted(self, session: int, sent_bytes: int) -> SentTraffic:
        """Return the sums after a report of all bytes of a session so far."""
        before = self.session_bytes if session == self.session else 0
        newest = max(before, sent_bytes)
        all_bytes = min(self.all_bytes + newest - before, MAX_GIVEN_BYTES)
        return SentTraffic(session, newest, all_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """A run's state at one step, which all its stages saved or are saving.

    Attributes:
        last_commit: Last commit that it contains.
        sent: Bytes that peers sent each other in all steps up to this one.
        traffic: Bytes over each boundary, a part of `sent`.
        judged: Summary of evaluations until the request. The snapshot's own weights are evaluated
            later, except those of the run's last step.
        stages: Saved stages; first to last once all are there.
    """

    last_commit: CommitStep
    sent: ByteCounts
    traffic: tuple[Traffic, ...] = ()
    judged: Judged = field(default_factory=Judged)
    stages: tuple[SavedStage, ...] = ()

    @property
    def step(self) -> StepNumber:
        """Number of steps that it contains."""
        return StepNumber(self.last_commit.step + 1)

    def shard(self, run_id: RunId, stage: SavedStage) -> KeptShard:
        """Return the identity of one saved stage, as a keeper stores it."""
        name = ShardName(run_id=run_id, step=self.step, layers=stage.layers, is_saved=True)
        return KeptShard(name=name, digest=stage.digest)

    def with_stage(self, stage: SavedStage) -> Snapshot:
        """Return the snapshot with this stage added, or replaced if its layers are there."""
        others = [one for one in self.stages if one.layers != stage.layers]
        return replace(self, stages=tuple(sorted((*others, stage), key=lambda one: one.layers)))


@dataclass(frozen=True, kw_only=True, slots=True)
class CommittedState:
    """The steps of a run that count. A commit adds one; a rollback returns to an earlier value.

    Attributes:
        committed_steps: Number of these steps.
        last_commit: Last commit; it is sent again to a peer that may have missed it.
        committers: Peers whose gradients are in the last commit.
        holds: Number of committed steps in each peer's weights. A peer with unknown weights has no
            entry.
        exported: File of each peer that wrote its trained stage for the client; None if the peer
            has not confirmed the file since the coordinator restarted.
        sent: Bytes that peers sent each other in these steps.
        traffic: Bytes over each boundary, a part of `sent`.
        ledger: Peers with each sample's buffers and cached inputs; None if the run has neither.
        judged: Summary of all evaluations.
        snapshots: Complete snapshots that are kept, by rising step.
        trained_steps: None while the best weights are not loaded in place of the last ones. After
            that the number of steps that were trained, while `committed_steps` counts those in the
            best weights.
        last_step: Last step as published to watchers; None after a rollback until the next step.
        last_evaluation: Last evaluation as published to watchers; None in the same case.
    """

    committed_steps: int = 0
    last_commit: CommitStep | None = None
    committers: frozenset[PeerId] = frozenset()
    holds: Mapping[PeerId, int] = field(default_factory=_nothing)
    exported: Mapping[PeerId, ShardFile | None] = field(default_factory=_nothing)
    sent: ByteCounts = field(default_factory=ByteCounts)
    traffic: tuple[Traffic, ...] = ()
    ledger: Ledger | None = None
    judged: Judged = field(default_factory=Judged)
    snapshots: tuple[Snapshot, ...] = ()
    trained_steps: int | None = None
    last_step: StepCommitted | None = None
    last_evaluation: Evaluated | None = None

    @property
    def snapshot(self) -> Snapshot | None:
        """Newest snapshot, to which a rollback returns."""
        return self.snapshots[-1] if self.snapshots else None

    @property
    def saved(self) -> Snapshot | None:
        """Snapshot of exactly the committed steps; None without one."""
        found = (one for one in self.snapshots if one.step == self.committed_steps)
        return next(found, None)

    @property
    def all_steps(self) -> int:
        """Number of trained steps, even if the best weights replaced the last ones."""
        return self.committed_steps if self.trained_steps is None else self.trained_steps

    @property
    def rolled_back(self) -> CommittedState:
        """History as of the newest snapshot, or the beginning; all peers load its weights.

        The ledger stays until peers that loaded report their buffers. A trained run that loaded its
        best weights loads these again.
        """
        if self.trained_steps is not None:
            return replace(
                self,
                committers=frozenset(),
                holds=_nothing(),
                exported=_nothing(),
            )
        if self.snapshot is None:
            return CommittedState()
        return CommittedState(
            committed_steps=self.snapshot.step,
            last_commit=self.snapshot.last_commit,
            sent=self.snapshot.sent,
            traffic=self.snapshot.traffic,
            ledger=self.ledger,
            judged=self.snapshot.judged,
            snapshots=self.snapshots,
        )

    def with_best(self, best: Snapshot) -> CommittedState:
        """Return the history with the best weights in place of the last, for all peers to load."""
        return replace(
            self,
            committed_steps=best.step,
            last_commit=best.last_commit,
            committers=frozenset(),
            holds=_nothing(),
            exported=_nothing(),
            trained_steps=self.committed_steps,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseProgress:
    """Progress of peers in the present phase: loading, a step, or the export.

    Attributes:
        since_s: Monotonic seconds at the start of the phase.
        moved_s: Monotonic seconds of each peer's last progress.
        parts_begun: Parts of the step that each peer has begun.
        waits_for: Peers that each peer waits for, by its last report; a peer that waits for nobody
            has no entry.
        waited_s: Monotonic seconds of each peer's last report that it waits.
    """

    since_s: float = 0.0
    moved_s: Mapping[PeerId, float] = field(default_factory=_nothing)
    parts_begun: Mapping[PeerId, int] = field(default_factory=_nothing)
    waits_for: Mapping[PeerId, frozenset[PeerId]] = field(default_factory=_nothing)
    waited_s: Mapping[PeerId, float] = field(default_factory=_nothing)

    @property
    def newest_s(self) -> float:
        """Monotonic seconds of the last progress of any peer."""
        return max(self.moved_s.values(), default=self.since_s)

    def last_excused_s(self, peer: PeerId) -> float:
        """Return when a peer last made progress, or last reported that it waits for others."""
        known = (self.moved_s.get(peer), self.waited_s.get(peer), self.since_s)
        return max(seconds for seconds in known if seconds is not None)

    def with_progress(self, peer: PeerId, now_s: float) -> PhaseProgress:
        """Return the state after progress of a peer."""
        waits_for = {p: others for p, others in self.waits_for.items() if p != peer}
        return replace(
            self,
            moved_s=MappingProxyType({**self.moved_s, peer: now_s}),
            waits_for=MappingProxyType(waits_for),
        )

    def with_report(
        self, peer: PeerId, waits_for: Collection[PeerId], parts_begun: int, now_s: float
    ) -> PhaseProgress:
        """Return the state after a peer's report.

        Parts that it began are progress. So is its first report in this phase that it waits.
        """
        known = self.parts_begun.get(peer, 0)
        waits_first = bool(waits_for) and peer not in self.waited_s
        has_moved = parts_begun > known or waits_first
        after = self.with_progress(peer, now_s) if has_moved else self
        waiting = {p: others for p, others in self.waits_for.items() if p != peer}
        waited_s = dict(self.waited_s)
        if waits_for:
            waiting[peer], waited_s[peer] = frozenset(waits_for), now_s
        return replace(
            after,
            parts_begun=MappingProxyType({**self.parts_begun, peer: max(parts_begun, known)}),
            waits_for=MappingProxyType(waiting),
            waited_s=MappingProxyType(waited_s),
        )

    def postponed(self, gap_s: float) -> PhaseProgress:
        """Return the state with all its times later by `gap_s`."""
        moved_s = {peer: seconds + gap_s for peer, seconds in self.moved_s.items()}
        waited_s = {peer: seconds + gap_s for peer, seconds in self.waited_s.items()}
        return replace(
            self,
            since_s=self.since_s + gap_s,
            moved_s=MappingProxyType(moved_s),
            waited_s=MappingProxyType(waited_s),
        )


@dataclass(frozen=True, kw_only=True)  # no slots, for what is cached
class AttemptState:
    """Assignments of one attempt, and the progress of their peers.

    Attributes:
        number: Number of the attempt; messages of older attempts are void.
        assignments: Stages and their peers, replicas next to each other. A peer that is away stays
            while no replica replaces it and it may come back.
        learners: Peers that copy their stage's state.
        learning_since_s: Monotonic seconds at which each learner began, over all attempts.
        proofs: Values that sources sent for each learner that was sent a `CatchUp`. A learner that
            has the whole state can compute one of them, and so proves it.
        caught_up: Learners that have the state; the next plan counts them as replicas.
        awaited: Progress of the peers in the present phase, for whose end the coordinator waits.
        loaded: Peers that sent StageReady.
        done: Microbatches of the open step that each peer reported as done at the start.
        away_since_s: Monotonic seconds since which each absent peer is away.
    """

    number: Attempt = NO_ATTEMPT
    assignments: tuple[StageAssignment, ...] = ()
    learners: tuple[Learner, ...] = ()
    learning_since_s: Mapping[PeerId, float] = field(default_factory=_nothing)
    proofs: Mapping[PeerId, frozenset[bytes]] = field(default_factory=_nothing)
    caught_up: frozenset[PeerId] = frozenset()
    awaited: PhaseProgress = field(default_factory=PhaseProgress)
    loaded: frozenset[PeerId] = frozenset()
    done: Mapping[PeerId, frozenset[MicrobatchIndex]] = field(default_factory=_nothing)
    away_since_s: Mapping[PeerId, float] = field(default_factory=_nothing)

    @cached_property
    def peers(self) -> tuple[PeerId, ...]:
        """Peers of the stages, first stage to last."""
        return tuple(assignment.peer_id for assignment in self.assignments)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """Stages with their replicas, first to last."""
        return stages_of(self.assignments)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedStep:
    """The first uncommitted step in its newest plan.

    Its microbatches stay the same in every plan: gradients of some may be summed already.

    Attributes:
        stages: Stages of its routes; empty if unknown.
        evaluation: Microbatches of held-out samples, which pass the stages forward only.
        began_s: Monotonic seconds of the plan.
        ready: Reports of the peers that sent StepReady since.
    """

    microbatches: tuple[Microbatch, ...]
    stages: tuple[Stage, ...] = ()
    evaluation: tuple[Microbatch, ...] = ()
    began_s: float = 0.0
    ready: Mapping[PeerId, StepReady] = field(default_factory=_nothing)

    def host(self, microbatch: Microbatch, stage_index: int) -> PeerId | None:
        """Return the peer of a stage on a microbatch's route, or None if unknown."""
        if not self.stages:
            return None
        return self.stages[stage_index].peers[microbatch.replica_at(stage_index)]

    def share(self, stage_index: int, replica: int) -> int:
        """Return how many microbatches a replica computes in this attempt."""
        return _num_left(self.microbatches, stage_index, replica)

    def eval_share(self, stage_index: int, replica: int) -> int:
        """Return how many evaluated microbatches a replica computes in this attempt."""
        return _num_left(self.evaluation, stage_index, replica)


def _num_left(batches: Iterable[Microbatch], stage_index: int, replica: int) -> int:
    own = [b for b in batches if b.replica_at(stage_index) == replica]
    return sum(batch.is_to_do(stage_index) for batch in own)


@dataclass(frozen=True, kw_only=True, slots=True)
class Saving:
    """Snapshots that are being made.

    A snapshot is complete once all stages are saved and its manifest, which lists them, is written.

    Attributes:
        asked: Snapshot whose stages the peers save now.
        attempt: Attempt of that request.
        unlisted: Snapshots whose stages are saved, while their manifests are being written.
        failed: Reason why the last snapshot failed; None if it did not.
    """

    asked: Snapshot | None = None
    attempt: Attempt = NO_ATTEMPT
    unlisted: tuple[Snapshot, ...] = ()
    failed: Reason | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether a snapshot is being made."""
        return self.asked is not None or bool(self.unlisted)


@dataclass(frozen=True, kw_only=True, slots=True)
class Keeping:
    """Storage of a run's snapshots at keepers. The journal lacks it: reports of peers restore it.

    A shard is one stage of a snapshot.

    Attributes:
        asked: Peers with an unanswered request to keep each shard.
        refused: Peers that cannot keep each shard.
        began_s: Monotonic seconds of the last request for a snapshot; before the first, when the
            coordinator first checked whether one is due.
        took_s: Seconds until all keepers had the last snapshot; 0 before the first.
        lacking_since_s: Monotonic seconds since which a complete snapshot has too few keepers;
            infinite if it has enough.
        missing_since_s: Monotonic seconds since which the run waits for keepers of the snapshot
            that it goes back to.
    """

    asked: Mapping[KeptShard, frozenset[PeerId]] = field(default_factory=_nothing)
    refused: Mapping[KeptShard, frozenset[PeerId]] = field(default_factory=_nothing)
    began_s: float = -math.inf
    took_s: float = 0.0
    lacking_since_s: float = math.inf
    missing_since_s: float = math.inf


@dataclass(frozen=True, slots=True)
class RateChange:
    """A new peak learning rate from one step on, however often the step is repeated."""

    first_step: StepNumber
    learning_rate: float


@dataclass(frozen=True, slots=True)
class SteeringRequest:
    """A request to pause, to resume or to change a run.

    Attributes:
        number: Position among all requests for this run, from 1.
        step: Number of committed steps at the time.
        reason: Reason that names the change and the actor.
    """

    number: int
    kind: EventKind
    step: int
    reason: Reason


@dataclass(frozen=True, kw_only=True, slots=True)
class Steering:
    """Requests for a run since its submission, and their effects; a rollback keeps them.

    Attributes:
        is_paused: Whether no further step is planned.
        rates: Changes of the learning rate, by rising step.
        codecs: Changes of codecs, by rising step. The quality control, which makes many, drops
            those that no step can use any more.
        quality: State of the quality control; None before the first measurement.
        measured_steps: Number of steps whose measurements are in `quality`, however often they are
            repeated.
        requests: The last `MAX_STEERED` requests, oldest first.
    """

    is_paused: bool = False
    rates: tuple[RateChange, ...] = ()
    codecs: tuple[CodecChange, ...] = ()
    quality: QualityControl | None = None
    measured_steps: int = 0
    requests: tuple[SteeringRequest, ...] = ()

    def with_request(self, kind: EventKind, step: int, reason: Reason) -> Steering:
        """Add a request, and drop the oldest beyond `MAX_STEERED`."""
        number = self.requests[-1].number + 1 if self.requests else 1
        request = SteeringRequest(number, kind, step, reason)
        return replace(self, requests=(*self.requests, request)[-MAX_STEERED:])

    def peak_at(self, step: int, submitted: float) -> float:
        """Return the schedule's peak learning rate at a step.

        Args:
            step: Number of the step.
            submitted: Peak with which the run was submitted.
        """
        changes = [one for one in self.rates if one.first_step <= step]
        return changes[-1].learning_rate if changes else submitted

    def with_rate(self, change: RateChange) -> Steering:
        """Add a change of the rate; it replaces changes of the same or later steps."""
        before = [one for one in self.rates if one.first_step < change.first_step]
        return replace(self, rates=(*before, change))

    def codecs_at(self, step: int) -> Codecs | None:
        """Return the codecs in effect at a step, or None for the submitted ones."""
        changes = [one for one in self.codecs if one.first_step <= step]
        return changes[-1].codecs if changes else None

    def with_codecs(self, change: CodecChange) -> Steering:
        """Add a change of codecs; it replaces changes of the same or later steps."""
        before = [one for one in self.codecs if one.first_step < change.first_step]
        return replace(self, codecs=(*before, change))

    def without_codecs_before(self, step: int) -> Steering:
        """Drop changes of codecs that are superseded at this step."""
        num_in_effect_or_superseded = sum(one.first_step <= step for one in self.codecs)
        return replace(self, codecs=self.codecs[max(0, num_in_effect_or_superseded - 1) :])

    @property
    def without_measurements(self) -> Steering:
        """The value for a run that restarts: without the quality control's state and changes."""
        if self.quality is None:
            return self
        return replace(self, codecs=(), quality=None, measured_steps=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurements:
    """Measurements of peers at work; a rollback does not undo them.

    Attributes:
        seconds: Seconds per microbatch that each peer took in its last steps.
        flops_per_s: Operations per second of each peer in the last steps that it computed, on any
            layers.
        step_seconds: Seconds of each of the last steps, from its plan to its commit.
        step_targets: Target tokens of each of the last steps; lost in a restart.
        state_bytes: Bytes of state that learners copied since the last commit.
        state_bytes_per_s: Rate of the last copy of a state; 0 before the first.
        buffers: Buffers that each peer reported at each of its boundaries; lost in a restart.
    """

    seconds: Mapping[PeerId, tuple[float, ...]] = field(default_factory=_nothing)
    flops_per_s: Mapping[PeerId, tuple[float, ...]] = field(default_factory=_nothing)
    step_seconds: tuple[float, ...] = ()
    step_targets: tuple[int, ...] = ()
    state_bytes: int = 0
    state_bytes_per_s: float = 0.0
    buffers: Mapping[PeerId, Mapping[BlockIndex, BufferCounts]] = field(default_factory=_nothing)


@dataclass(frozen=True, kw_only=True, slots=True)
class Repartition:
    """New stages on which a run continues from a snapshot.

    Attributes:
        step: Step of the snapshot.
        assignments: New assignments, first stage to last, replicas next to each other.
        before_s: Seconds of a step on the old stages.
        after_s: Expected seconds of a step on the new stages.
        has_begun: Whether the run gave up the old stages. Before, it waits for the snapshot and
            plans no step.
    """

    step: StepNumber
    assignments: tuple[StageAssignment, ...]
    before_s: float
    after_s: float
    has_begun: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class RepartitionStats:
    """Repartitions of a run for speed since the coordinator started.

    Attributes:
        count: Number of repartitions.
        last_s: Monotonic seconds at which the last one began.
        looked_s: Monotonic seconds of the last check whether another one pays.
    """

    count: int = 0
    last_s: float = -math.inf
    looked_s: float = -math.inf


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run and its progress. Fields that change together share a value, such as `past`.

    Attributes:
        owner: Client that submitted it, and alone may watch it, end it and fetch its result; empty
            where clients have no keys.
        storage_key: Key from which those of its peers derive, for encryption on disk. Empty once
            the run is over, so that nobody can decrypt its remains.
        priority: Order among the runs of one claim.
        claim: Claim of its owner on peers, relative to other claims.
        detail: Reason why it waits, ended, or changed.
        notice: Reason that names silent or late peers; lost in a restart.
        attempt: Present attempt, or the last one.
        step: First uncommitted step, once it is planned.
        steering: Requests of people since its submission.
        moving: Repartition under way, from its decision until the new stages have a snapshot; None
            without one.
        moves: Repartitions for speed so far.
        misfits: Peers that cannot host any stage of it, with the reason; a peer that joins again is
            removed.
        doubts: Peers that reported inf or NaN in an uncommitted step, and the step.
        lost_at: Last step for which each peer had lost a buffer that the plan relied on.
        conducts: Failures of peers in this run, members or not; lost in a restart.
        trouble: Failures that the run itself may have caused; lost in a restart.
        unplaced_since_s: Monotonic seconds since which it has no peers to continue with; infinite
            while it has.
        finished_since_s: Monotonic seconds since which it is finished; infinite before.
        gather_until_s: Monotonic seconds until which it waits for absent peers, even if replicas
            could replace them.
        not_before_s: Monotonic seconds before which no attempt begins.
    """

    run_id: RunId
    spec: RunSpec
    owner: str = ""
    storage_key: bytes = field(default=b"", repr=False)
    priority: int = DEFAULT_PRIORITY
    claim: Claim = NO_CLAIM
    phase: RunPhase = RunPhase.QUEUED
    detail: Reason | None = None
    notice: Reason | None = None
    past: CommittedState = field(default_factory=CommittedState)
    attempt: AttemptState = field(default_factory=AttemptState)
    step: PlannedStep | None = None
    saving: Saving = field(default_factory=Saving)
    keeping: Keeping = field(default_factory=Keeping)
    measured: Measurements = field(default_factory=Measurements)
    steering: Steering = field(default_factory=Steering)
    moving: Repartition | None = None
    moves: RepartitionStats = field(default_factory=RepartitionStats)
    misfits: Mapping[PeerId, Reason] = field(default_factory=_nothing)
    doubts: Mapping[PeerId, StepNumber] = field(default_factory=_nothing)
    lost_at: Mapping[PeerId, StepNumber] = field(default_factory=_nothing)
    conducts: Mapping[PeerId, Conduct] = field(default_factory=_nothing)
    trouble: Trouble = field(default_factory=Trouble)
    unplaced_since_s: float = math.inf
    finished_since_s: float = math.inf
    gather_until_s: float = -math.inf
    not_before_s: float = 0.0

    @property
    def committed_steps(self) -> int:
        """Number of committed steps."""
        return self.past.committed_steps

    @property
    def has_all_steps(self) -> bool:
        """Whether all steps of the job are committed; evaluations may end it before."""
        return self.committed_steps >= self.spec.train.num_steps

    @property
    def peers(self) -> tuple[PeerId, ...]:
        """Peers of the stages, first to last."""
        return self.attempt.peers

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Stages with their replicas, first to last."""
        return self.attempt.stages

    @property
    def listeners(self) -> tuple[PeerId, ...]:
        """Learners that no other peer waits for: no microbatch passes them.

        Where several stages train one weight there are none, because these stages exchange
        gradients that a listener would not receive. All peers then wait for the learners.
        """
        if not self.attempt.learners or self.spec.shared_values > 0:
            return ()
        return tuple(learner.peer_id for learner in self.attempt.learners)

    @property
    def computing(self) -> tuple[Stage, ...]:
        """The stages without peers that only listen."""
        listeners = self.listeners
        return stages_of(self.attempt.assignments, but=listeners) if listeners else self.stages

    @property
    def reason(self) -> Reason | None:
        """The notice while its peers work, else the detail."""
        return (self.notice if self.phase.is_working else None) or self.detail

    @property
    def quality(self) -> QualityControl | None:
        """Quality control of the activation codec; None if the job requests no quality."""
        train = self.spec.train
        if self.steering.quality is None and train.quality:
            return QualityControl.of(train.quality, adapts=train.adapts)
        return self.steering.quality

    @property
    def quality_found(self) -> CompressionCost | None:
        """The quality control's result, as a message."""
        known = self.quality
        if known is None:
            return None
        return CompressionCost(
            asked=known.allowed, cost=known.cost, num_measured=known.num_measured
        )

    @property
    def oldest_kept_step(self) -> int:
        """Step of its oldest snapshot, complete or not: the farthest that a rollback can go."""
        saving = self.saving
        pending = () if saving.asked is None else (saving.asked,)
        snapshots = (*self.past.snapshots, *saving.unlisted, *pending)
        return min((snapshot.step for snapshot in snapshots), default=self.committed_steps)

    @property
    def is_in_first_epoch(self) -> bool:
        """Whether the next step's samples are met for the first time."""
        return self.committed_steps < self.spec.train.steps_per_epoch

    @property
    def owner_name(self) -> str:
        """Name under which the run counts, together with other runs, for fairness between owners.

        Keys of one invitation share a claim. Without keys, each run is its own owner.
        """
        return self.claim.name or self.owner or f"run {self.run_id}"

    def conduct(self, peer_id: PeerId) -> Conduct:
        """Return a peer's failures in this run."""
        return self.conducts.get(peer_id, Conduct())

    def with_conduct(self, peer_id: PeerId, conduct: Conduct) -> Run:
        """Return the run with these failures of a peer; the oldest beyond `MAX_CONDUCTS` go."""
        others = {name: one for name, one in self.conducts.items() if name != peer_id}
        newest = dict(list(others.items())[-(MAX_CONDUCTS - 1) :])
        return replace(self, conducts=MappingProxyType({**newest, peer_id: conduct}))

    def has_suspended(self, peer_id: PeerId, now_s: float) -> bool:
        """Whether this run suspended a peer that failed in it too often."""
        return self.conduct(peer_id).standing.is_suspended(now_s)

    def spec_at(self, step: int) -> RunSpec:
        """Return the RunSpec with the codecs in effect at a step."""
        codecs = self.steering.codecs_at(step)
        return self.spec if codecs is None else self.spec.with_codecs(codecs)

    def with_assignments(self, assignments: Iterable[StageAssignment]) -> Run:
        """Return the run with these assignments."""
        return replace(self, attempt=replace(self.attempt, assignments=tuple(assignments)))

    def with_awaited(self, awaited: PhaseProgress) -> Run:
        """Return the run with this progress of its phase."""
        return replace(self, attempt=replace(self.attempt, awaited=awaited))

    def with_away(self, away_since_s: Mapping[PeerId, float]) -> Run:
        """Return the run with exactly these peers away."""
        away = MappingProxyType(away_since_s)
        return replace(self, attempt=replace(self.attempt, away_since_s=away))

    def with_holds(self, holds: Mapping[PeerId, int]) -> Run:
        """Return the run with these steps at each peer; other peers' weights are unknown."""
        return replace(self, past=replace(self.past, holds=MappingProxyType(holds)))

    def with_ledger(self, ledger: Ledger | None) -> Run:
        """Return the run with this ledger."""
        return replace(self, past=replace(self.past, ledger=ledger))


MAX_MEMO_INPUTS = 4
"""Inputs whose answers a `Memo` caches: those of the state, and of variants of it that are tried.
"""


class Memo:
    """A cache of answers that depend on a part of the state alone.

    The caller names that part, the answer's input. Successive states share one cache. It affects
    nothing but time, since inputs are immutable: an answer is found for an equal input only.
    """

    __slots__ = ("_by_input", "_by_runs")

    def __init__(self) -> None:
        self._by_input: list[tuple[object, dict[object, Any]]] = []  # newest first
        self._by_runs: tuple[object, dict[object, Any]] = ((), {})

    def of_runs(self, runs: Mapping[RunId, Run]) -> dict[object, Any]:
        """Return the answers that depend on these runs; callers may add to them."""
        known, answers = self._by_runs
        if known is not runs:
            answers = {}
            self._by_runs = (runs, answers)
        return answers

    def of(self, inputs: object) -> dict[object, Any]:
        """Return the answers for inputs equal to these; callers may add to them."""
        for known, answers in self._by_input:
            if known == inputs:
                return answers
        answers = dict[object, Any]()
        self._by_input = [(inputs, answers), *self._by_input[: MAX_MEMO_INPUTS - 1]]
        return answers


@dataclass(frozen=True, kw_only=True, slots=True)
class SwarmState:
    """Members by name, and runs in the order of their submission.

    Attributes:
        standings: Reputations of peers that failed, members or not.
        ways: Ways by which pairs of members reach each other; empty where links have no keys.
        contributions: Contributions to committed steps of present and former members.
        sent_traffic: Everything that each member sent.
        queue_s: Seconds that a run without peers waits for its turn.
        result_s: Seconds that a result is kept for its client.
        keeps_snapshots: Whether snapshots have a common directory, or peers keep them.
        num_keepers: Number of peers, beside the hosts, that keep each stage of a snapshot; 0 with a
            common directory, or without snapshots.
        moves_layers: Whether runs are repartitioned for speed while they train.
        seen_at_s: Monotonic seconds of the last event; infinite before the first.
        memo: Cached answers; neither compared nor written.
    """

    members: Mapping[PeerId, Member] = field(default_factory=_nothing)
    runs: Mapping[RunId, Run] = field(default_factory=_nothing)
    standings: Mapping[PeerId, Reputation] = field(default_factory=_nothing)
    ways: Connectivity = field(default_factory=Connectivity)
    contributions: Mapping[PeerId, Contribution] = field(default_factory=_nothing)
    sent_traffic: Mapping[PeerId, SentTraffic] = field(default_factory=_nothing)
    queue_s: float = QUEUE_S
    result_s: float = RESULT_S
    keeps_snapshots: bool = False
    num_keepers: int = 0
    moves_layers: bool = True
    seen_at_s: float = math.inf
    memo: Memo = field(default_factory=Memo, compare=False, repr=False)

    def _from_runs(self, name: str, find: Callable[[], T]) -> T:
        """Return an answer that depends on the runs alone, from the cache or by `find`."""
        answers = self.memo.of_runs(self.runs)
        if name not in answers:
            answers[name] = find()
        found: T = answers[name]
        return found

    @property
    def going_runs(self) -> Sequence[Run]:
        """Runs that are not over, with peers or without, in the order of their submission."""
        return self._from_runs("going", self._find_going)

    def _find_going(self) -> Sequence[Run]:
        return tuple(run for run in self.runs.values() if not run.phase.is_over)

    @property
    def active_runs(self) -> Sequence[Run]:
        """Those `going_runs` that have peers; a peer may serve several."""
        return self._from_runs("active", self._find_active)

    def _find_active(self) -> Sequence[Run]:
        return tuple(run for run in self.going_runs if run.attempt.assignments)

    def runs_of(self, peer_id: PeerId) -> Sequence[Run]:
        """Return the active runs of a peer, connected or away."""
        return self._from_runs("by peer", self._find_by_peer).get(peer_id, ())

    def _find_by_peer(self) -> Mapping[PeerId, Sequence[Run]]:
        found: dict[PeerId, list[Run]] = {}
        for run in self.active_runs:
            for peer in dict.fromkeys(run.peers):
                found.setdefault(peer, []).append(run)
        return {peer: tuple(runs) for peer, runs in found.items()}

    @property
    def hosted(self) -> Mapping[PeerId, Mapping[RunId, LayerRange]]:
        """Layers of each run that each peer holds, connected or away: at work, or as a result."""
        return self._from_runs("hosted", self._find_hosted)

    def _find_hosted(self) -> Mapping[PeerId, Mapping[RunId, LayerRange]]:
        found: dict[PeerId, dict[RunId, LayerRange]] = {}
        for run in self.runs.values():
            has_result = run.phase is RunPhase.FINISHED
            if run.phase.is_over and not has_result:
                continue
            for one in run.attempt.assignments:
                if not has_result or one.peer_id in run.past.exported:
                    found.setdefault(one.peer_id, {})[run.run_id] = one.layers
        return found

    @property
    def result_keepers(self) -> frozenset[PeerId]:
        """Peers from which a client has yet to fetch a result."""
        return self._from_runs("keepers", self._find_keepers)

    def _find_keepers(self) -> frozenset[PeerId]:
        finished = (run for run in self.runs.values() if run.phase is RunPhase.FINISHED)
        return frozenset().union(*(run.past.exported for run in finished))

    @property
    def leaving(self) -> tuple[PeerId, ...]:
        """Members that requested to leave or to pause."""
        return tuple(peer for peer, member in self.members.items() if member.leaving is not None)

    @property
    def link_caps(self) -> Mapping[PeerId, tuple[float, float]]:
        """Limits of members' links, in bytes per second, up and down, where there are any."""
        caps = {
            peer: (member.hello.max_up_bytes_per_s, member.hello.max_down_bytes_per_s)
            for peer, member in self.members.items()
        }
        return MappingProxyType({peer: both for peer, both in caps.items() if any(both)})

    def may_host_alone(self, peer_id: PeerId) -> bool:
        """Whether a peer may host a stage alone; False for peers that are no members."""
        member = self.members.get(peer_id)
        return member is not None and not member.grant.replica_only

    def with_run(self, run: Run) -> SwarmState:
        """Return the state with this run added or replaced."""
        return replace(self, runs=MappingProxyType({**self.runs, run.run_id: run}))

    def without_run(self, run_id: RunId) -> SwarmState:
        """Return the state without this run."""
        runs = {name: run for name, run in self.runs.items() if name != run_id}
        return replace(self, runs=MappingProxyType(runs))

    def with_member(self, member: Member) -> SwarmState:
        """Return the state with this member added or replaced."""
        members = {**self.members, member.hello.peer_id: member}
        return replace(self, members=MappingProxyType(members))

    def with_members(self, names: Collection[PeerId]) -> SwarmState:
        """Return the state with these members only."""
        members = {name: member for name, member in self.members.items() if name in names}
        return replace(self, members=MappingProxyType(members))

    def reputation(self, peer_id: PeerId) -> Reputation:
        """Return a peer's reputation."""
        return self.standings.get(peer_id, Reputation())

    def is_suspended(self, peer_id: PeerId, now_s: float) -> bool:
        """Whether a peer is suspended from all runs now."""
        return self.reputation(peer_id).is_suspended(now_s)

    def with_reputation(self, peer_id: PeerId, standing: Reputation) -> SwarmState:
        """Return the state with this reputation; the oldest beyond `MAX_STANDINGS` is dropped."""
        others = {name: one for name, one in self.standings.items() if name != peer_id}
        newest = dict(list(others.items())[-(MAX_STANDINGS - 1) :])
        return replace(self, standings=MappingProxyType({**newest, peer_id: standing}))

    def contribution_of(self, peer_id: PeerId) -> Contribution:
        """Return a peer's contribution, as all displays show it."""
        sent = self.sent_traffic.get(peer_id, SentTraffic())
        return replace(self.contributions.get(peer_id, Contribution()), all_bytes=sent.all_bytes)

    def with_message_at(self, peer_id: PeerId, now_s: float) -> SwarmState:
        """Return the state with a message of this peer received now."""
        member = self.members.get(peer_id)
        return self.with_member(replace(member, heard_at_s=now_s)) if member else self

    def with_links(self, peer_id: PeerId, links: Mapping[PeerId, LinkSpeed]) -> SwarmState:
        """Return the state with a member's link measurements; links to strangers are dropped."""
        member = self.members.get(peer_id)
        if member is None or not (links or member.links):
            return self
        known = {p: speed for p, speed in links.items() if p in self.members and p != peer_id}
        return self.with_member(replace(member, links=MappingProxyType(known)))

    def without_member(self, peer_id: PeerId) -> SwarmState:
        """Return the state without this member."""
        return self.with_members(self.members.keys() - {peer_id})
