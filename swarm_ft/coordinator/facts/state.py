"""What the coordinator knows. Values only.

`machine.decide` maps (state, event, now) to (state, effects); see `events` and `effects`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from swarm_ft.coordinator.facts.ledger import Ledger
from swarm_ft.ids import NO_ATTEMPT, Attempt, BlockIndex, MicrobatchIndex, PeerId, RunId, StepNumber
from swarm_ft.protocol.messages.client import RunPhase, RunStatus, StageResult
from swarm_ft.protocol.messages.control import (
    CommitStep,
    PeerHello,
    SavedStage,
    Stage,
    StageAssignment,
    StepReady,
    Taker,
    stages_of,
)
from swarm_ft.protocol.messages.reports import BufferCounts, ByteCounts, Traffic
from swarm_ft.protocol.messages.shard import ShardFile
from swarm_ft.protocol.spec.run_spec import RunSpec
from swarm_ft.protocol.spec.training_plan import Microbatch

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A peer whose control stream is up, and when it last said something."""

    hello: PeerHello
    joined_at_s: float
    heard_at_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """A run's state at a step that all its stages saved, or are saving.

    Attributes:
        last_commit: the last one that is in it; as many steps are in it.
        sent: what peers sent each other in these steps.
        traffic: of that, what went over each boundary.
        stages: those that are saved, first to last once all are.
    """

    last_commit: CommitStep
    sent: ByteCounts
    traffic: tuple[Traffic, ...] = ()
    stages: tuple[SavedStage, ...] = ()

    @property
    def step(self) -> StepNumber:
        """How many steps are in it."""
        return StepNumber(self.last_commit.step + 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenStep:
    """The first uncommitted step as it was planned last.

    Its microbatches stay as they are however often it is planned: gradients of some of them may be
    summed already.

    Attributes:
        pipeline: the stages of their routes; empty if these are not known.
    """

    microbatches: tuple[Microbatch, ...]
    pipeline: tuple[Stage, ...] = ()

    def host(self, microbatch: Microbatch, stage_index: int) -> PeerId | None:
        """The peer of a stage that a microbatch was to pass, if that is known."""
        if not self.pipeline:
            return None
        return self.pipeline[stage_index].peers[microbatch.replica_at(stage_index)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run and where it stands.

    Attributes:
        notice: who of its peers at work is silent just now; of no use after a restart.
        attempt: rises with every assignment; messages of older ones are void.
        stages: who hosts what, replicas beside each other; a peer that no replica stands in for
            is kept while it is away and may come back.
        holds: steps that each peer's weights contain, as far as is known.
        committers: peers whose gradients are in the last commit.
        away_since_s: stages' peers that are away, and since when.
        gather_until_s: until then peers that are away are waited for, replicas or not.
        loaded: peers that said StageReady in this attempt.
        takers: peers of this attempt that take their stage's state over.
        told: takers that were told to `TakeStage` in this attempt.
        taken: takers that said they have it; replicas as all others from the next plan on.
        ready: peers that said StepReady in this attempt and step.
        open_step: the first uncommitted step, once it was planned.
        done: microbatches of it that peers said are done there, at the start of this attempt.
        exported: peers that wrote down their trained stage, and have it as far as is known; what
            it is, None where the peer did not say so again since a restart.
        last_commit: repeated to a peer that may have missed it.
        seconds: how long a microbatch took each peer to compute in its last steps.
        step_seconds: how long each of the last steps took, from its plan to its commit.
        sent: what peers sent each other in the steps that count.
        traffic: of that, what went over each boundary.
        ledger: who holds the buffers of which sample; None if the run has none at both ends.
        kept: what peers told of their buffers, at each of their boundaries; of no use after a
            restart.
        state_bytes: of state that newcomers took since the last commit.
        saving: the snapshot that peers were asked for last.
        unlisted: snapshots that are whole but for their manifests, which are being written.
        snapshot: the newest that is whole.
        step_began_s: when the step under way was planned.
        not_before_s: no new attempt begins earlier.
    """

    run_id: RunId
    spec: RunSpec
    phase: RunPhase = RunPhase.QUEUED
    detail: str = ""
    notice: str = ""
    attempt: Attempt = NO_ATTEMPT
    stages: tuple[StageAssignment, ...] = ()
    holds: Mapping[PeerId, int] = field(default_factory=lambda: MappingProxyType({}))
    committers: frozenset[PeerId] = frozenset()
    away_since_s: Mapping[PeerId, float] = field(default_factory=lambda: MappingProxyType({}))
    gather_until_s: float = -math.inf
    loaded: frozenset[PeerId] = frozenset()
    takers: tuple[Taker, ...] = ()
    told: frozenset[PeerId] = frozenset()
    taken: frozenset[PeerId] = frozenset()
    ready: Mapping[PeerId, StepReady] = field(default_factory=lambda: MappingProxyType({}))
    open_step: OpenStep | None = None
    done: Mapping[PeerId, frozenset[MicrobatchIndex]] = field(
        default_factory=lambda: MappingProxyType({})
    )
    exported: Mapping[PeerId, ShardFile | None] = field(
        default_factory=lambda: MappingProxyType({})
    )
    committed_steps: int = 0
    last_commit: CommitStep | None = None
    seconds: Mapping[PeerId, tuple[float, ...]] = field(
        default_factory=lambda: MappingProxyType({})
    )
    step_seconds: tuple[float, ...] = ()
    sent: ByteCounts = field(default_factory=ByteCounts)
    traffic: tuple[Traffic, ...] = ()
    ledger: Ledger | None = None
    kept: Mapping[PeerId, Mapping[BlockIndex, BufferCounts]] = field(
        default_factory=lambda: MappingProxyType({})
    )
    state_bytes: int = 0
    saving: Snapshot | None = None
    unlisted: tuple[Snapshot, ...] = ()
    snapshot: Snapshot | None = None
    step_began_s: float = 0.0
    not_before_s: float = 0.0

    @property
    def peers(self) -> tuple[PeerId, ...]:
        """Peers of the stages, first to last."""
        return tuple(stage.peer_id for stage in self.stages)

    @property
    def pipeline(self) -> tuple[Stage, ...]:
        """Stages with their replicas, first to last."""
        return stages_of(self.stages)

    def share(self, stage_index: int, replica: int) -> int:
        """How many microbatches of the open step a replica computes in this attempt."""
        batches = self.open_step.microbatches if self.open_step else ()
        own = [batch for batch in batches if batch.replica_at(stage_index) == replica]
        return sum(stage_index not in batch.done for batch in own)

    @property
    def listeners(self) -> tuple[PeerId, ...]:
        """Takers that the others do not wait for: no microbatch passes them.

        Where tied embeddings are synchronised there are none, since what first and last stage add
        to each other's sums goes past them.
        """
        is_tied = self.spec.train.sync_tied_embeddings
        return () if is_tied else tuple(taker.peer_id for taker in self.takers)

    @property
    def computing(self) -> tuple[Stage, ...]:
        """The pipeline without peers that only listen."""
        return stages_of(self.stages, but=self.listeners)

    @property
    def status(self) -> RunStatus:
        """The run as others see it."""
        return RunStatus(
            run_id=self.run_id,
            phase=self.phase,
            detail=(self.notice if self.phase.is_working else "") or self.detail,
            committed_steps=self.committed_steps,
            attempt=self.attempt,
            spec=self.spec,
            stages=self.stages,
            sent=self.sent,
            joining=self.listeners,
            results=tuple(
                StageResult(peer_id=peer, file=file) for peer, file in self.exported.items() if file
            ),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SwarmState:
    """Members by name and runs in the order they were submitted; one run trains at a time.

    Attributes:
        seen_at_s: when the last event was; infinite before the first.
    """

    members: Mapping[PeerId, Member] = field(default_factory=lambda: MappingProxyType({}))
    runs: Mapping[RunId, Run] = field(default_factory=lambda: MappingProxyType({}))
    seen_at_s: float = math.inf

    @property
    def active_run(self) -> Run | None:
        """The one that is begun and not over; else the oldest that waits for its turn."""
        going = [run for run in self.runs.values() if not run.phase.is_over]
        begun = (run for run in going if run.phase is not RunPhase.QUEUED)
        return next(begun, going[0] if going else None)

    def keeps_result(self, peer_id: PeerId) -> bool:
        """Whether a client has yet to collect a result from this peer."""
        finished = (run for run in self.runs.values() if run.phase is RunPhase.FINISHED)
        return any(peer_id in run.exported for run in finished)

    def with_run(self, run: Run) -> SwarmState:
        """The same state with this run put in place."""
        return replace(self, runs=MappingProxyType({**self.runs, run.run_id: run}))

    def with_member(self, member: Member) -> SwarmState:
        """The same state with this member put in place."""
        members = {**self.members, member.hello.peer_id: member}
        return replace(self, members=MappingProxyType(members))

    def with_heard(self, peer_id: PeerId, now_s: float) -> SwarmState:
        """The same state, in which something was heard of this peer just now."""
        member = self.members.get(peer_id)
        return self.with_member(replace(member, heard_at_s=now_s)) if member else self

    def without_member(self, peer_id: PeerId) -> SwarmState:
        """The same state with this member gone."""
        members = {name: m for name, m in self.members.items() if name != peer_id}
        return replace(self, members=MappingProxyType(members))
