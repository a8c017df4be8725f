"""What the coordinator knows. Values only.

`machine.decide` maps (state, event, now) to (state, effects); see `events` and `effects`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from swarm_ft.coordinator.facts.conduct import Conduct, Trouble
from swarm_ft.coordinator.facts.ledger import Ledger
from swarm_ft.coordinator.facts.messages import Progress
from swarm_ft.coordinator.facts.reasons import Reason
from swarm_ft.coordinator.facts.standing import Standing
from swarm_ft.coordinator.facts.ways import Ways
from swarm_ft.ids import NO_ATTEMPT, Attempt, BlockIndex, MicrobatchIndex, PeerId, RunId, StepNumber
from swarm_ft.protocol.messages.capacity import LinkSpeed
from swarm_ft.protocol.messages.client import (
    MAX_STEERED,
    CodecChange,
    Evaluated,
    QualityFound,
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

MAX_REMEMBERED = 4
"""Parts of states whose answers are kept: a state, and others that are looked at beside it."""
MAX_STANDINGS = 4096
"""Peers whose failures are remembered; names cost nothing."""
MAX_CONDUCTS = 256
"""Peers whose failures in one run are remembered."""
QUEUE_S = 24 * 3600.0
"""How long a run waits for peers that can host it."""
RESULT_S = 7 * 24 * 3600.0
"""How long peers keep the result of a finished run for its client."""


def _nothing() -> MappingProxyType[Any, Any]:
    return MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A peer whose control stream is up, and when it last said something.

    Attributes:
        idle: why there is nothing to do for it, as it was told; None if there may be.
        grant: what its invitation lets it host; never its own word.
        leaving: that it would work no more, if it would not.
        told: what it was told of that last.
        told_at_s: when.
        links: what it measured of those to other members.
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


@dataclass(frozen=True, slots=True)
class SentTraffic:
    """Everything that a member sent to other members, by its own count.

    A session is a process of the member. Its count is remembered, so that bytes count once when the
    member or the coordinator comes back.

    Attributes:
        session: the newest; see `PeerHello.session`.
        session_bytes: sent in it, as far as was counted here.
        all_bytes: sent in all sessions.
    """

    session: int = 0
    session_bytes: int = 0
    all_bytes: int = 0

    def counted(self, session: int, sent_bytes: int) -> SentTraffic:
        """The sums after a report of what was sent in this session until now."""
        before = self.session_bytes if session == self.session else 0
        newest = max(before, sent_bytes)
        all_bytes = min(self.all_bytes + newest - before, MAX_GIVEN_BYTES)
        return SentTraffic(session, newest, all_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """A run's state at a step that all its stages saved, or are saving.

    Attributes:
        last_commit: the last one that is in it; as many steps are in it.
        sent: what peers sent each other in these steps.
        traffic: of that, what went over each boundary.
        judged: what evaluations said when it was asked for; of its own weights there is none yet,
            unless they are the last.
        stages: those that are saved, first to last once all are.
    """

    last_commit: CommitStep
    sent: ByteCounts
    traffic: tuple[Traffic, ...] = ()
    judged: Judged = field(default_factory=Judged)
    stages: tuple[SavedStage, ...] = ()

    @property
    def step(self) -> StepNumber:
        """How many steps are in it."""
        return StepNumber(self.last_commit.step + 1)

    def shard(self, run_id: RunId, stage: SavedStage) -> KeptShard:
        """What a peer keeps that has one of its stages."""
        name = ShardName(run_id=run_id, step=self.step, layers=stage.layers, is_saved=True)
        return KeptShard(name=name, digest=stage.digest)

    def with_stage(self, stage: SavedStage) -> Snapshot:
        """The snapshot with this stage, in the place of the one with its layers if there is one."""
        others = [one for one in self.stages if one.layers != stage.layers]
        return replace(self, stages=tuple(sorted((*others, stage), key=lambda one: one.layers)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Past:
    """What a run has behind it: every commit makes a new one, and a rollback an older one.

    Attributes:
        last_commit: repeated to a peer that may have missed it.
        committers: peers whose gradients are in the last commit.
        holds: steps that each peer's weights contain, as far as is known.
        exported: peers that wrote down their trained stage, and have it as far as is known; what
            it is, None where the peer did not say so again since a restart.
        sent: what peers sent each other in the steps that count.
        traffic: of that, what went over each boundary.
        ledger: who holds the buffers of which sample; None if the run has none at both ends.
        judged: what its evaluations say; the journal has these.
        snapshots: that are whole and kept, steps rising.
        trained_steps: how many steps were trained, once the best weights took the place of the
            last: then the committed steps are those in the best. None before, and otherwise.
        last_step: as watchers were told of it; None until the next after going back.
        last_evaluation: so too.
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
        """The newest."""
        return self.snapshots[-1] if self.snapshots else None

    @property
    def saved(self) -> Snapshot | None:
        """That of the committed steps, if they were saved."""
        found = (one for one in self.snapshots if one.step == self.committed_steps)
        return next(found, None)

    @property
    def all_steps(self) -> int:
        """How many steps count, whatever weights are the result."""
        return self.committed_steps if self.trained_steps is None else self.trained_steps

    @property
    def rolled_back(self) -> Past:
        """As of the snapshot, or the beginning. Nobody holds weights of then, all load them.

        The ledger of before stays until peers that loaded tell which buffers they have. A run that
        is trained, and has loaded its best weights, loads these again.
        """
        if self.trained_steps is not None:
            return replace(
                self,
                committers=frozenset(),
                holds=_nothing(),
                exported=_nothing(),
            )
        if self.snapshot is None:
            return Past()
        return Past(
            committed_steps=self.snapshot.step,
            last_commit=self.snapshot.last_commit,
            sent=self.snapshot.sent,
            traffic=self.snapshot.traffic,
            ledger=self.ledger,
            judged=self.snapshot.judged,
            snapshots=self.snapshots,
        )

    def with_best(self, best: Snapshot) -> Past:
        """Once the run is trained: its best weights in the place of the last, for all to load."""
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
class Awaited:
    """What all wait for in the present phase, stages, a step or results, and who gets on with it.

    Attributes:
        since_s: when it was asked for.
        moved_s: when each peer last got on with it.
        parts_begun: of a step, by each.
        waits_for: whom each waits for, by its own last words; who waits for nobody is not in it.
        waited_s: when each last said that it waits.
    """

    since_s: float = 0.0
    moved_s: Mapping[PeerId, float] = field(default_factory=_nothing)
    parts_begun: Mapping[PeerId, int] = field(default_factory=_nothing)
    waits_for: Mapping[PeerId, frozenset[PeerId]] = field(default_factory=_nothing)
    waited_s: Mapping[PeerId, float] = field(default_factory=_nothing)

    @property
    def newest_s(self) -> float:
        """When anybody last got on with it."""
        return max(self.moved_s.values(), default=self.since_s)

    def excused_until_s(self, peer: PeerId) -> float:
        """When a peer last got on, or said that it cannot for others."""
        known = (self.moved_s.get(peer), self.waited_s.get(peer), self.since_s)
        return max(seconds for seconds in known if seconds is not None)

    def moved(self, peer: PeerId, now_s: float) -> Awaited:
        """After a peer got on with it."""
        waits_for = {p: others for p, others in self.waits_for.items() if p != peer}
        return replace(
            self,
            moved_s=MappingProxyType({**self.moved_s, peer: now_s}),
            waits_for=MappingProxyType(waits_for),
        )

    def told(
        self, peer: PeerId, waits_for: Collection[PeerId], parts_begun: int, now_s: float
    ) -> Awaited:
        """After a peer said how far it is. Who waits for others has done what it can alone."""
        known = self.parts_begun.get(peer, 0)
        has_moved = parts_begun > known or (waits_for and peer not in self.waited_s)
        after = self.moved(peer, now_s) if has_moved else self
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

    def postponed(self, gap_s: float) -> Awaited:
        """The same, as if all had been so much later."""
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
    """Who hosts what, and how far they are: each attempt begins with a new one.

    Attributes:
        number: rises with every assignment; messages of older ones are void.
        assignments: who hosts what, replicas beside each other; a peer that no replica stands in
            for is kept while it is away and may come back.
        learners: peers that take their stage's state over.
        learning_since_s: since when each of them does, over all attempts.
        proofs: of learners that were told to `CatchUp`, what each tells once it has the state, as
            sources told.
        caught_up: learners that said they have it; replicas as all others from the next plan on.
        awaited: what all wait for now.
        loaded: peers that said StageReady.
        done: microbatches of the open step that peers said are done there, at the start.
        away_since_s: peers that are away, and since when.
    """

    number: Attempt = NO_ATTEMPT
    assignments: tuple[StageAssignment, ...] = ()
    learners: tuple[Learner, ...] = ()
    learning_since_s: Mapping[PeerId, float] = field(default_factory=_nothing)
    proofs: Mapping[PeerId, frozenset[bytes]] = field(default_factory=_nothing)
    caught_up: frozenset[PeerId] = frozenset()
    awaited: Awaited = field(default_factory=Awaited)
    loaded: frozenset[PeerId] = frozenset()
    done: Mapping[PeerId, frozenset[MicrobatchIndex]] = field(default_factory=_nothing)
    away_since_s: Mapping[PeerId, float] = field(default_factory=_nothing)

    @cached_property
    def peers(self) -> tuple[PeerId, ...]:
        """Of the stages, first to last."""
        return tuple(assignment.peer_id for assignment in self.assignments)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """With their replicas, first to last."""
        return stages_of(self.assignments)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedStep:
    """The first uncommitted step as it was planned last.

    Its microbatches stay as they are however often it is planned: gradients of some of them may be
    summed already.

    Attributes:
        stages: those of its routes; empty if these are not known.
        evaluation: held-out samples that pass the stages in it, forward alone.
        began_s: when it was planned.
        ready: peers that said StepReady since.
    """

    microbatches: tuple[Microbatch, ...]
    stages: tuple[Stage, ...] = ()
    evaluation: tuple[Microbatch, ...] = ()
    began_s: float = 0.0
    ready: Mapping[PeerId, StepReady] = field(default_factory=_nothing)

    def host(self, microbatch: Microbatch, stage_index: int) -> PeerId | None:
        """The peer of a stage that a microbatch was to pass, if that is known."""
        if not self.stages:
            return None
        return self.stages[stage_index].peers[microbatch.replica_at(stage_index)]

    def share(self, stage_index: int, replica: int) -> int:
        """How many of its microbatches a replica computes in this attempt."""
        return _num_left(self.microbatches, stage_index, replica)

    def eval_share(self, stage_index: int, replica: int) -> int:
        """So too of those that are only evaluated."""
        return _num_left(self.evaluation, stage_index, replica)


def _num_left(batches: Iterable[Microbatch], stage_index: int, replica: int) -> int:
    own = [b for b in batches if b.replica_at(stage_index) == replica]
    return sum(batch.is_to_do(stage_index) for batch in own)


@dataclass(frozen=True, kw_only=True, slots=True)
class Saving:
    """Snapshots that are not whole yet.

    Attributes:
        asked: the one that peers were asked for last.
        attempt: in which they were.
        unlisted: whole but for their manifests, which are being written.
        failed: why the last one failed; None if it did not.
    """

    asked: Snapshot | None = None
    attempt: Attempt = NO_ATTEMPT
    unlisted: tuple[Snapshot, ...] = ()
    failed: Reason | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether one is being made."""
        return self.asked is not None or bool(self.unlisted)


@dataclass(frozen=True, kw_only=True, slots=True)
class Keeping:
    """How peers keep a run's snapshots; all of it is found again after a restart.

    Attributes:
        asked: who was asked to keep what, and did not answer yet.
        refused: who cannot.
        began_s: when a snapshot was asked for last, or the run was first seen without any.
        took_s: how long the last one took until all its keepers had it; 0 before the first.
        lacking_since_s: since when a snapshot that is whole has too few keepers; infinite: it has
            enough.
        missing_since_s: since when the run waits for those that keep what it goes back to.
    """

    asked: Mapping[KeptShard, frozenset[PeerId]] = field(default_factory=_nothing)
    refused: Mapping[KeptShard, frozenset[PeerId]] = field(default_factory=_nothing)
    began_s: float = -math.inf
    took_s: float = 0.0
    lacking_since_s: float = math.inf
    missing_since_s: float = math.inf


@dataclass(frozen=True, slots=True)
class RateChange:
    """Another peak learning rate, from this step on, however often the step is made."""

    first_step: StepNumber
    learning_rate: float


@dataclass(frozen=True, slots=True)
class SteeringRequest:
    """One request to pause, to resume or to change a run.

    Attributes:
        number: place among all requests for this run, from 1.
        step: how many steps were committed.
        reason: names the change and the actor.
    """

    number: int
    kind: EventKind
    step: int
    reason: Reason


@dataclass(frozen=True, kw_only=True, slots=True)
class Steering:
    """Requests for a run since it was submitted, and their effect; a rollback keeps them.

    Attributes:
        is_paused: no step is planned; one that was begun is finished.
        rates: steps rising.
        codecs: so too; those that follow a quality as far as a step may yet go by them.
        quality: what follows from what was measured; None before the first time.
        measured_steps: what came of steps before this one is in it, however often they are made.
        requests: the last `MAX_STEERED`, oldest first.
    """

    is_paused: bool = False
    rates: tuple[RateChange, ...] = ()
    codecs: tuple[CodecChange, ...] = ()
    quality: QualityControl | None = None
    measured_steps: int = 0
    requests: tuple[SteeringRequest, ...] = ()

    def with_request(self, kind: EventKind, step: int, reason: Reason) -> Steering:
        """Remember one more request, and forget the oldest beyond `MAX_STEERED`."""
        number = self.requests[-1].number + 1 if self.requests else 1
        request = SteeringRequest(number, kind, step, reason)
        return replace(self, requests=(*self.requests, request)[-MAX_STEERED:])

    def peak_at(self, step: int, submitted: float) -> float:
        """The schedule's peak at a step."""
        changes = [one for one in self.rates if one.first_step <= step]
        return changes[-1].learning_rate if changes else submitted

    def with_rate(self, change: RateChange) -> Steering:
        """What was asked for steps that are yet to be made is asked no more."""
        before = [one for one in self.rates if one.first_step < change.first_step]
        return replace(self, rates=(*before, change))

    def codecs_at(self, step: int) -> Codecs | None:
        """By which a step goes; None: those that were submitted."""
        changes = [one for one in self.codecs if one.first_step <= step]
        return changes[-1].codecs if changes else None

    def with_codecs(self, change: CodecChange) -> Steering:
        """As `with_rate`."""
        before = [one for one in self.codecs if one.first_step < change.first_step]
        return replace(self, codecs=(*before, change))

    def asked_from(self, step: int) -> Steering:
        """Without changes of codecs by which no step from this one on goes."""
        in_force = sum(one.first_step <= step for one in self.codecs)
        return replace(self, codecs=self.codecs[max(0, in_force - 1) :])

    @property
    def measured_anew(self) -> Steering:
        """Of a run that begins anew: what its codecs cost is measured from the first step on."""
        if self.quality is None:
            return self
        return replace(self, codecs=(), quality=None, measured_steps=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What was seen of peers at work; a rollback does not undo it.

    Attributes:
        seconds: how long a microbatch took each peer to compute in its last steps.
        flops_per_s: that each peer computed in its last steps, whatever layers it had; of those
            that have none now, what they did when they had some.
        step_seconds: how long each of the last steps took, from its plan to its commit.
        step_targets: how many target tokens each of the last steps trained; of no use after a
            restart.
        state_bytes: of state that newcomers took since the last commit.
        state_bytes_per_s: at which the last state was taken over; 0 before the first.
        buffers: what peers told of theirs, at each of their boundaries; of no use after a restart.
    """

    seconds: Mapping[PeerId, tuple[float, ...]] = field(default_factory=_nothing)
    flops_per_s: Mapping[PeerId, tuple[float, ...]] = field(default_factory=_nothing)
    step_seconds: tuple[float, ...] = ()
    step_targets: tuple[int, ...] = ()
    state_bytes: int = 0
    state_bytes_per_s: float = 0.0
    buffers: Mapping[PeerId, Mapping[BlockIndex, BufferCounts]] = field(default_factory=_nothing)


@dataclass(frozen=True, kw_only=True, slots=True)
class Moving:
    """On which stages a run goes on from a snapshot, in the place of the snapshot's own.

    Attributes:
        step: of the snapshot.
        assignments: who is to host what, first stage to last, replicas beside each other.
        before_s: how long a step takes.
        after_s: how long one is expected to take then.
        has_begun: whether the old stages are given up; before that the snapshot is awaited, and no
            step is planned.
    """

    step: StepNumber
    assignments: tuple[StageAssignment, ...]
    before_s: float
    after_s: float
    has_begun: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Moves:
    """How often a run moved for speed since the coordinator started, and when that was asked last.

    Attributes:
        count: of moves.
        last_s: when the last one began.
        looked_s: when it was last asked whether another one is worth it.
    """

    count: int = 0
    last_s: float = -math.inf
    looked_s: float = -math.inf


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run and where it stands. What ends at one time is one value: see `Past` and those below it.

    Attributes:
        owner: the client that submitted it, and alone may watch it, end it and fetch its result;
            empty where clients have no keys.
        storage_key: from which come those with which its peers encrypt what they write down; empty
            once it is over, so that nothing opens what may be left of it.
        priority: orders the runs of one claim.
        claim: by which its owner gets peers, to the claims of others.
        detail: why it waits, or ended, or changed.
        notice: which of its peers at work is silent or late now; of no use after a restart.
        attempt: the one at work, or the last one.
        step: the first uncommitted step, once it was planned.
        steering: requests of people since it was submitted.
        moving: the stages that it is to go on on, or went on on and has no snapshot of yet; None
            where nothing moves.
        moves: those that were for speed.
        misfits: peers that cannot host it, whatever the stage, and why; until they join again.
        doubts: peers by which a step that is not committed is inf or NaN, and which step.
        lost_at: peers that lacked a buffer with which this step was planned, the last of each.
        conducts: failures of peers in this run, its members or not; of no use after a restart.
        trouble: failures that speak against the run itself; of no use after a restart.
        unplaced_since_s: when it first had nobody to go on with since the last commit.
        finished_since_s: when it was first seen to be finished; infinite while it is not.
        gather_until_s: until then peers that are away are waited for, replicas or not.
        not_before_s: no new attempt begins earlier.
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
    past: Past = field(default_factory=Past)
    attempt: AttemptState = field(default_factory=AttemptState)
    step: PlannedStep | None = None
    saving: Saving = field(default_factory=Saving)
    keeping: Keeping = field(default_factory=Keeping)
    measured: Measured = field(default_factory=Measured)
    steering: Steering = field(default_factory=Steering)
    moving: Moving | None = None
    moves: Moves = field(default_factory=Moves)
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
        """How many steps count."""
        return self.past.committed_steps

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
        """Learners that the others do not wait for: no microbatch passes them.

        Where several stages train one weight there are none, since what these add to each other's
        sums goes past them.
        """
        learners = self.attempt.learners
        all_wait = not learners or self.spec.shared_values > 0
        return () if all_wait else tuple(learner.peer_id for learner in learners)

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
        """By which the codec of activations follows what is asked; None if nothing is."""
        train = self.spec.train
        if self.steering.quality is None and train.quality:
            return QualityControl.of(train.quality, adapts=train.adapts)
        return self.steering.quality

    @property
    def quality_found(self) -> QualityFound | None:
        """That, as others see it."""
        known = self.quality
        if known is None:
            return None
        return QualityFound(asked=known.asked, cost=known.cost, num_measured=known.num_measured)

    @property
    def oldest_kept_step(self) -> int:
        """Of its oldest snapshot, whole or not: steps before it are made again if all are."""
        saving = self.saving
        asked = () if saving.asked is None else (saving.asked,)
        kept = (*self.past.snapshots, *saving.unlisted, *asked)
        return min((snapshot.step for snapshot in kept), default=self.committed_steps)

    @property
    def is_in_first_epoch(self) -> bool:
        """Whether the next step's samples are met for the first time."""
        return self.committed_steps < self.spec.train.steps_per_epoch

    @property
    def owner_name(self) -> str:
        """The claim, which keys of one invitation share; without keys each run has its own."""
        return self.claim.name or self.owner or f"run {self.run_id}"

    def conduct(self, peer_id: PeerId) -> Conduct:
        """A peer's failures in this run."""
        return self.conducts.get(peer_id, Conduct())

    def with_conduct(self, peer_id: PeerId, conduct: Conduct) -> Run:
        """The run with these failures of a peer; it forgets the oldest of many."""
        others = {name: one for name, one in self.conducts.items() if name != peer_id}
        known = dict(list(others.items())[1 - MAX_CONDUCTS :])
        return replace(self, conducts=MappingProxyType({**known, peer_id: conduct}))

    def is_without(self, peer_id: PeerId, now_s: float) -> bool:
        """Whether this run goes on without a peer for now, since it failed in it too often."""
        return self.conduct(peer_id).standing.is_aside(now_s)

    def spec_at(self, step: int) -> RunSpec:
        """With the codecs by which a step goes."""
        codecs = self.steering.codecs_at(step)
        return self.spec if codecs is None else self.spec.with_codecs(codecs)

    def with_assignments(self, assignments: Iterable[StageAssignment]) -> Run:
        """The run on these peers."""
        return replace(self, attempt=replace(self.attempt, assignments=tuple(assignments)))

    def with_awaited(self, awaited: Awaited) -> Run:
        """The run in which all wait for this."""
        return replace(self, attempt=replace(self.attempt, awaited=awaited))

    def with_away(self, away_since_s: Mapping[PeerId, float]) -> Run:
        """The run in which these peers are away, and no others."""
        away = MappingProxyType(away_since_s)
        return replace(self, attempt=replace(self.attempt, away_since_s=away))

    def with_holds(self, holds: Mapping[PeerId, int]) -> Run:
        """The run in which these peers hold so many steps, and of no others it is known."""
        return replace(self, past=replace(self.past, holds=MappingProxyType(holds)))

    def with_ledger(self, ledger: Ledger | None) -> Run:
        """The run with this ledger."""
        return replace(self, past=replace(self.past, ledger=ledger))


class Memo:
    """Answers that follow from a part of a state alone, kept while that part stays as it is.

    States that follow each other share one. It changes nothing but the time that an answer takes:
    each answer belongs to the very part of which it was asked, and no part ever changes.
    """

    __slots__ = ("_parts", "_runs")

    def __init__(self) -> None:
        self._parts: list[tuple[object, dict[object, Any]]] = []
        self._runs: tuple[object, dict[object, Any]] = ((), {})

    def of_runs(self, runs: Mapping[RunId, Run]) -> dict[object, Any]:
        """Return the answers that follow from these runs, which whoever asks may add to."""
        known, answers = self._runs
        if known is not runs:
            answers = {}
            self._runs = (runs, answers)
        return answers

    def of(self, part: object) -> dict[object, Any]:
        """Return the answers that follow from a value that is equal to this one; so too."""
        for known, answers in self._parts:
            if known == part:
                return answers
        answers = dict[object, Any]()
        self._parts = [(part, answers), *self._parts[: MAX_REMEMBERED - 1]]
        return answers


@dataclass(frozen=True, kw_only=True, slots=True)
class SwarmState:
    """Members by name and runs in the order they were submitted.

    Attributes:
        standings: of peers that failed, members or not.
        ways: who reaches whom, as introductions know it; nothing where links have no keys.
        contributions: what members gave in committed steps, whether they are here or not.
        sent_traffic: everything that they sent.
        queue_s: how long a run that cannot be placed waits for its turn.
        result_s: how long a result is kept for its client.
        keeps_snapshots: whether there is a place for them, or peers keep them.
        num_keepers: how many peers keep each stage of a snapshot, beside those that host it; 0
            where there is a place, and where none are kept.
        moves_layers: whether runs are cut anew while they train, where that is faster.
        seen_at_s: when the last event was; infinite before the first.
        memo: answers that were found before; no part of the state, and never written down.
    """

    members: Mapping[PeerId, Member] = field(default_factory=_nothing)
    runs: Mapping[RunId, Run] = field(default_factory=_nothing)
    standings: Mapping[PeerId, Standing] = field(default_factory=_nothing)
    ways: Ways = field(default_factory=Ways)
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
        answers = self.memo.of_runs(self.runs)
        if name not in answers:
            answers[name] = find()
        found: T = answers[name]
        return found

    @property
    def going_runs(self) -> Sequence[Run]:
        """Those that are not over, as they were submitted."""
        return self._from_runs("going", self._find_going)

    def _find_going(self) -> Sequence[Run]:
        return tuple(run for run in self.runs.values() if not run.phase.is_over)

    @property
    def active_runs(self) -> Sequence[Run]:
        """Of these, those that have peers; a peer may be one of several."""
        return self._from_runs("active", self._find_active)

    def _find_active(self) -> Sequence[Run]:
        return tuple(run for run in self.going_runs if run.attempt.assignments)

    def runs_of(self, peer_id: PeerId) -> Sequence[Run]:
        """Those that a peer works for, there or away."""
        return self._from_runs("by peer", self._find_by_peer).get(peer_id, ())

    def _find_by_peer(self) -> Mapping[PeerId, Sequence[Run]]:
        found: dict[PeerId, list[Run]] = {}
        for run in self.active_runs:
            for peer in dict.fromkeys(run.peers):
                found.setdefault(peer, []).append(run)
        return {peer: tuple(runs) for peer, runs in found.items()}

    @property
    def hosted(self) -> Mapping[PeerId, Mapping[RunId, LayerRange]]:
        """What peers hold of each run, there or away: stages at work, and trained ones."""
        return self._from_runs("hosted", self._find_hosted)

    def _find_hosted(self) -> Mapping[PeerId, Mapping[RunId, LayerRange]]:
        found: dict[PeerId, dict[RunId, LayerRange]] = {}
        for run in self.runs.values():
            held = () if run.phase > RunPhase.FINISHED else run.attempt.assignments
            for one in held:
                if run.phase < RunPhase.FINISHED or one.peer_id in run.past.exported:
                    found.setdefault(one.peer_id, {})[run.run_id] = one.layers
        return found

    @property
    def result_keepers(self) -> frozenset[PeerId]:
        """Peers from which a client has yet to collect a result."""
        return self._from_runs("keepers", self._find_keepers)

    def _find_keepers(self) -> frozenset[PeerId]:
        finished = (run for run in self.runs.values() if run.phase is RunPhase.FINISHED)
        return frozenset().union(*(run.past.exported for run in finished))

    @property
    def leaving(self) -> tuple[PeerId, ...]:
        """Members that would work no more."""
        return tuple(peer for peer, member in self.members.items() if member.leaving is not None)

    @property
    def link_caps(self) -> Mapping[PeerId, tuple[float, float]]:
        """Bytes a second that members lend of their links, up and down, where they lend a part."""
        caps = {
            peer: (member.hello.max_up_bytes_per_s, member.hello.max_down_bytes_per_s)
            for peer, member in self.members.items()
        }
        return MappingProxyType({peer: both for peer, both in caps.items() if any(both)})

    def carries(self, peer_id: PeerId) -> bool:
        """Whether a member may host a stage alone; who is not there is not asked."""
        member = self.members.get(peer_id)
        return member is not None and not member.grant.replica_only

    def with_run(self, run: Run) -> SwarmState:
        """The same state with this run put in place."""
        return replace(self, runs=MappingProxyType({**self.runs, run.run_id: run}))

    def without_run(self, run_id: RunId) -> SwarmState:
        """The same state in which this run is not known."""
        runs = {name: run for name, run in self.runs.items() if name != run_id}
        return replace(self, runs=MappingProxyType(runs))

    def with_member(self, member: Member) -> SwarmState:
        """The same state with this member put in place."""
        members = {**self.members, member.hello.peer_id: member}
        return replace(self, members=MappingProxyType(members))

    def with_members(self, names: Collection[PeerId]) -> SwarmState:
        """The same state with these members alone."""
        members = {name: member for name, member in self.members.items() if name in names}
        return replace(self, members=MappingProxyType(members))

    def standing(self, peer_id: PeerId) -> Standing:
        """How a peer did of late."""
        return self.standings.get(peer_id, Standing())

    def is_aside(self, peer_id: PeerId, now_s: float) -> bool:
        """Whether no run is given to a peer now, since it failed too often."""
        return self.standing(peer_id).is_aside(now_s)

    def with_standing(self, peer_id: PeerId, standing: Standing) -> SwarmState:
        """The same state in which this peer did so of late; the oldest of many is forgotten."""
        others = {name: s for name, s in self.standings.items() if name != peer_id}
        kept = dict(list(others.items())[1 - MAX_STANDINGS :])
        return replace(self, standings=MappingProxyType({**kept, peer_id: standing}))

    def contribution_of(self, peer_id: PeerId) -> Contribution:
        """A member's entry of the ledger, for everybody who shows it."""
        sent = self.sent_traffic.get(peer_id, SentTraffic())
        return replace(self.contributions.get(peer_id, Contribution()), all_bytes=sent.all_bytes)

    def with_heard(self, peer_id: PeerId, now_s: float) -> SwarmState:
        """The same state, in which something was heard of this peer just now."""
        member = self.members.get(peer_id)
        return self.with_member(replace(member, heard_at_s=now_s)) if member else self

    def with_links(self, peer_id: PeerId, links: Mapping[PeerId, LinkSpeed]) -> SwarmState:
        """The same state, in which a member measured these; those to nobody we know left out."""
        member = self.members.get(peer_id)
        if member is None or not (links or member.links):
            return self
        known = {p: speed for p, speed in links.items() if p in self.members and p != peer_id}
        return self.with_member(replace(member, links=MappingProxyType(known)))

    def without_member(self, peer_id: PeerId) -> SwarmState:
        """The same state with this member gone."""
        return self.with_members(self.members.keys() - {peer_id})
