"""Honest fake peers, and a coordinator whose every effect is checked as it is made."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TypeAlias, TypeVar

import pytest

from swarm_ft.coordinator.decide.machine import decide
from swarm_ft.coordinator.facts.events import (
    CommitRecord,
    Dismiss,
    Effect,
    Event,
    PeerJoined,
    PeerLost,
    PeerSaid,
    PlanRecord,
    Publish,
    Record,
    RollbackRecord,
    RunRecord,
    RunSubmitted,
    SendMessage,
    SnapshotWritten,
    Tick,
    WriteSnapshot,
)
from swarm_ft.coordinator.facts.messages import Idle, Progress, Release
from swarm_ft.coordinator.facts.messages import Message as AnyMessage
from swarm_ft.coordinator.facts.reasons import Reason
from swarm_ft.coordinator.facts.state import Run, SwarmState
from swarm_ft.coordinator.journal.journal import Journal
from swarm_ft.coordinator.plan.shared_memory import site_of
from swarm_ft.coordinator.plan.stage_keys import peer_key, stage_keys
from swarm_ft.coordinator.watching import status_of
from swarm_ft.digest import digest_of
from swarm_ft.ids import Attempt, BlockIndex, MicrobatchIndex, PeerId, RunId, SampleId, StepNumber
from swarm_ft.protocol.messages.client import RunPhase, StepCommitted
from swarm_ft.protocol.messages.contribution import ContributionReport
from swarm_ft.protocol.messages.control import (
    Assign,
    CatchUp,
    CaughtUp,
    ClockReply,
    CommitStep,
    DropShards,
    EvalSum,
    ExportStage,
    FromPeer,
    GiveShard,
    HeldStage,
    KeepShard,
    Learner,
    LeaveProgress,
    MemoryShare,
    PeerAlive,
    PeerGoodbye,
    PeerHello,
    PeerLeaving,
    PlanStep,
    ReleaseStage,
    Renewed,
    Revoked,
    SaveStage,
    ShardKept,
    ShardLost,
    Stage,
    StageAssignment,
    StageExported,
    StageFailed,
    StageOffered,
    StageReady,
    StageSaved,
    StageUnsaved,
    StayIdle,
    StepReady,
    stages_of,
)
from swarm_ft.protocol.messages.reports import HeldBuffers, SampleSet, Traffic
from swarm_ft.protocol.messages.shard import KeptShard, ShardFile, ShardName
from swarm_ft.protocol.spec.bounds import MAX_HOSTED
from swarm_ft.protocol.spec.grant import Grant
from swarm_ft.protocol.spec.layers import LayerRange, parse_layers
from swarm_ft.protocol.spec.run_spec import RunSpec
from tests.specs import model_spec, train_spec

RUN = RunId("run-1")
STORAGE_KEY = bytes(range(32))
EVENT_S = 0.125
MAX_PAUSE_S = 1.5
MAX_EVENTS = 1000
WORKING = (RunPhase.LOADING, RunPhase.TRAINING, RunPhase.EXPORTING)

MakeSpec: TypeAlias = Callable[..., RunSpec]
"""Maker of a RunSpec from the number of blocks, their bytes, and options of the training."""
Message = TypeVar("Message", bound=AnyMessage)


def _spec(*, num_blocks: int = 4, block_bytes: int = 1000, **train: object) -> RunSpec:
    model = model_spec(num_blocks=num_blocks, vocab_size=50, block_bytes=block_bytes)
    return RunSpec(model=model, train=train_spec(**train))


class FakePeer:
    """A peer that obeys as a real one does, with a list of applied steps in place of weights."""

    def __init__(
        self, name: str, layers: str, memory_bytes: int = 1 << 40, grant: Grant | None = None
    ) -> None:
        self.peer_id = PeerId(name)
        self.grant = grant or Grant()
        self.layers = parse_layers(layers)
        self.memory_bytes = memory_bytes
        self.endpoint = f"{name}.example:7001"
        self.session = 0
        self.squared_grad_norm = 4.0
        self.eval_losses: Sequence[float] = ()
        self.saves = True
        self.compute_s = 0.0
        self.done: frozenset[MicrobatchIndex] = frozenset()
        self.is_slow_to_take = False
        self.is_honest = True
        self.result = b""
        self.leaving: PeerLeaving | None = None
        self.max_up_bytes_per_s = 0.0
        self.keep_bytes, self.is_full = 0, False
        self.machine_key, self.machine_memory_bytes, self.address = "", 0, ""
        self.kept: dict[ShardName, KeptShard] = {}
        self.heard: list[AnyMessage] = []
        self.forget()

    def forget(self) -> None:
        """Drop all state, as a restart of its process or a release does."""
        self.assign: Assign | None = None
        self.taking: StepNumber | None = None
        self.has_state = True
        self.applied: list[int] = []
        self.last_attempt = Attempt(0)
        self.gradients_of_step: int | None = None
        self.exported: ShardFile | None = None
        self.buffers: dict[BlockIndex, set[SampleId]] = {}
        self.visited: tuple[SampleId, ...] = ()

    def part(self, run_id: RunId) -> FakePeer:
        """Return its part in a run; a fake peer has one at most."""
        return self

    def hello(self) -> PeerHello:
        held = None
        if self.assign is not None and self.has_state:
            held = HeldStage(
                run_id=self.assign.run_id,
                spec_digest=self.assign.spec.digest(),
                layers=self._stage.layers,
                committed_steps=len(self.applied),
                last_attempt=self.last_attempt,
                exported=self.exported,
            )
        return PeerHello(
            peer_id=self.peer_id,
            endpoint=self.endpoint,
            layers=self.layers,
            memory_bytes=self.memory_bytes,
            held=(held,) if held else (),
            leaving=self.leaving,
            max_up_bytes_per_s=self.max_up_bytes_per_s,
            keep_bytes=self.keep_bytes,
            kept_shards=tuple(self.kept.values()),
            session=self.session,
            machine_key=self.machine_key,
            machine_memory_bytes=self.machine_memory_bytes,
        )

    @property
    def _index(self) -> int:
        assert self.assign is not None
        return [stage.peer_id for stage in self.assign.assignments].index(self.peer_id)

    @property
    def _stage(self) -> StageAssignment:
        assert self.assign is not None
        return self.assign.assignments[self._index]

    def hear(self, message: AnyMessage) -> list[FromPeer]:
        """Return its replies; fail the test if the coordinator breaks the protocol."""
        self.heard.append(message)
        match message:
            case Assign():
                return self._take(message)
            case CatchUp():
                return self._take_over(message)
            case SaveStage():
                return [self._save(message)]
            case PlanStep():
                return [self._run_step(message)]
            case KeepShard() | GiveShard() | DropShards():
                return self._keep(message)
            case CommitStep():
                self._apply(message)
            case ExportStage():
                assert self.assign is not None
                assert self.has_state
                trained = digest_of(self.result or str(self._stage.layers).encode())
                self.exported = ShardFile(digest=trained, total_bytes=1)
                return [StageExported(run_id=message.run_id, file=self.exported)]
            case Release(run_id=run_id) | ReleaseStage(run_id=run_id):
                self.kept = {} if message.is_over else self.kept
                if self.assign is not None and self.assign.run_id == run_id:
                    self.forget()
        return []

    def _keep(self, message: KeepShard | GiveShard | DropShards) -> list[FromPeer]:
        match message:
            case KeepShard():
                shard = KeptShard(name=message.name, digest=message.file.digest)
                assert self.peer_id not in message.sources
                if self.is_full:
                    return [ShardLost(shard=shard, reason="full")]
                self.kept[shard.name] = shard
                return [ShardKept(shard)]
            case GiveShard():
                assert message.name in self.kept
            case DropShards():
                kept = self.kept.items()
                self.kept = {name: one for name, one in kept if name.step in message.but}
        return []

    def _take(self, assign: Assign) -> list[FromPeer]:
        is_new = self.assign is None or self.assign.run_id != assign.run_id
        learner = next((t for t in assign.learners if t.peer_id == self.peer_id), None)
        mine = (len(self.applied), self.last_attempt)
        if learner is not None:
            goes_on = learner.step == self.taking and mine == _last_of(assign)
            if not goes_on and learner.step != assign.committed_steps:
                self.assign = assign
                return [self.failed("out-of-turn", "not all was heard")]
            return self._listen(assign, learner, is_new=not goes_on)
        buffers = self.buffers
        if is_new or (assign.fresh and mine != _last_of(assign)):
            assert not self.exported, "a result that nobody collected would be lost"
            self.forget()
        self.assign, self.taking = assign, None
        assert self.layers in (None, self._stage.layers)
        if assign.saved and assign.fresh:
            assert all(stage.keepers for stage in assign.saved if self.keep_bytes)
            saved = [(stage.layers.start, stage.layers.stop) for stage in assign.saved]
            assert [start for start, _ in saved[1:]] == [stop for _, stop in saved[:-1]]
            self._become(assign)
            self.buffers = buffers  # as they are in the snapshot too
        if len(self.applied) != assign.committed_steps or not self.has_state:
            text = f"{assign.committed_steps} steps expected, {len(self.applied)} here"
            return [self.failed("out-of-turn", text)]
        ready = StageReady(
            run_id=assign.run_id,
            attempt=assign.attempt,
            done=self.done,
            buffers=tuple(
                HeldBuffers(boundary=boundary, samples=SampleSet.of(samples))
                for boundary, samples in self.buffers.items()
                if boundary in self.boundaries
            ),
        )
        return [*self._offers(assign), ready]

    @property
    def boundaries(self) -> tuple[BlockIndex, ...]:
        """Boundaries in front of its stage and behind it."""
        assert self.assign is not None
        last = self.assign.assignments[-1].layers.stop
        ends = (self._stage.layers.start, self._stage.layers.stop)
        return tuple(BlockIndex(end) for end in ends if 0 < end < last)

    def _listen(self, assign: Assign, learner: Learner, *, is_new: bool) -> list[FromPeer]:
        assert self.peer_id not in learner.sources
        if is_new:
            assert not self.exported, "a result that nobody collected would be lost"
            self.forget()
            self.taking, self.has_state = learner.step, False
            self._become(assign)
        self.assign = assign
        if assign.spec.train.sync_tied_embeddings:
            return []
        return [StageReady(run_id=assign.run_id, attempt=assign.attempt)]

    def _offers(self, assign: Assign) -> list[FromPeer]:
        takers = [learner for learner in assign.learners if self.peer_id in learner.sources]
        return [
            StageOffered(
                run_id=assign.run_id,
                attempt=assign.attempt,
                step=step,
                digest=bytes(16),
                total_bytes=1,
                proofs={taker.peer_id: proof(taker) for taker in takers if taker.step == step},
            )
            for step in sorted({taker.step for taker in takers})
        ]

    def _take_over(self, take: CatchUp) -> list[FromPeer]:
        assert self.assign is not None
        assert take.attempt == self.assign.attempt
        (learner,) = (t for t in self.assign.learners if t.peer_id == self.peer_id)
        assert set(take.sources) == set(learner.sources)
        if self.is_slow_to_take and not self.has_state:
            return []
        ready = StageReady(run_id=take.run_id, attempt=take.attempt)
        return [self.caught_up(), *([ready] * self.assign.spec.train.sync_tied_embeddings)]

    def caught_up(self) -> CaughtUp:
        """Return its report that it has the state, and applied all later sums."""
        assert self.assign is not None
        (learner,) = (t for t in self.assign.learners if t.peer_id == self.peer_id)
        self.has_state = True
        return CaughtUp(
            run_id=self.assign.run_id,
            attempt=self.assign.attempt,
            state_bytes=7,
            proof=proof(learner) if self.is_honest else bytes(16),
        )

    def _become(self, assign: Assign) -> None:
        """Take the state of a peer that applied the run's commits."""
        self.applied = list(range(assign.committed_steps))
        self.last_attempt = assign.last_attempt

    def _save(self, save: SaveStage) -> StageSaved | StageUnsaved:
        assert self.has_state
        assert save.step == len(self.applied)
        name = ShardName(run_id=save.run_id, step=save.step, layers=self._stage.layers)
        if not self.saves:
            return StageUnsaved(name=name, reason="full")
        if save.by_peers:
            saved = replace(name, is_saved=True)
            self.kept[saved] = KeptShard(name=saved, digest=bytes(16))
        return StageSaved(name=name, digest=bytes(16), total_bytes=1)

    def failed(self, code: str, message: str = "oh") -> StageFailed:
        assert self.assign is not None
        return StageFailed(
            run_id=self.assign.run_id, attempt=self.assign.attempt, code=code, message=message
        )

    def _run_step(self, plan: PlanStep) -> StepReady:
        assert self.assign is not None
        assert (plan.run_id, plan.attempt) == (self.assign.run_id, self.assign.attempt)
        assert plan.step == len(self.applied)
        if not self.has_state:
            assert self.peer_id in plan.listeners
        computing = stages_of(self.assign.assignments, but=plan.listeners)
        for batch in (*plan.microbatches, *plan.evaluation):
            for index, stage in enumerate(computing):
                assert batch.replica_at(index) < len(stage.peers)
        self.visited = tuple(
            sample
            for batch in plan.microbatches
            for index, stage in enumerate(computing)
            if stage.peers[batch.replica_at(index)] == self.peer_id
            for sample in batch.samples
        )
        self.gradients_of_step, self.gradients_of_attempt = plan.step, plan.attempt
        ready = self.step_ready(plan.step) if plan.microbatches else self._nothing_ready(plan)
        traffic = (*ready.traffic, *self._evaluation_traffic(plan))
        return replace(ready, evaluation=self._evaluated(plan, computing[-1]), traffic=traffic)

    def _evaluation_traffic(self, plan: PlanStep) -> tuple[Traffic, ...]:
        """Return a byte for each held-out sample that leaves the first stage."""
        assert self.assign is not None
        if self._stage.layers != self.assign.assignments[0].layers or len(self.boundaries) < 1:
            return ()
        count = sum(len(batch.samples) for batch in plan.evaluation)
        (boundary,) = self.boundaries
        own = Traffic(boundary=boundary, evaluation_bytes=count)
        return (own,) if count else ()

    def _nothing_ready(self, plan: PlanStep) -> StepReady:
        return StepReady(
            run_id=plan.run_id, attempt=plan.attempt, step=plan.step, squared_grad_norm=0.0
        )

    def _evaluated(self, plan: PlanStep, last: Stage) -> tuple[EvalSum, ...]:
        """Return sums in which a held-out sample has one target.

        Its loss is the sample's number, or the one set for the weights.
        """
        if self.assign is None or self.peer_id not in last.peers:
            return ()
        train, replica = self.assign.spec.train, last.peers.index(self.peer_id)
        index = len({stage.layers for stage in self.assign.assignments}) - 1
        own = [batch for batch in plan.evaluation if batch.replica_at(index) == replica]
        samples = [sample for batch in own for sample in batch.samples]
        of_passes = [
            [sample for sample in samples if train.pass_of(sample) == place]
            for place in range(len(train.eval_passes))
        ]
        if plan.step < len(self.eval_losses):
            loss = self.eval_losses[plan.step]
            return tuple(EvalSum(loss_sum=loss * len(of), num_targets=len(of)) for of in of_passes)
        return tuple(EvalSum(loss_sum=sum(of), num_targets=len(of)) for of in of_passes)

    def step_ready(self, step: int) -> StepReady:
        """Return a report in which step s has a loss of 10 - s per token.

        100 bytes go forward, 30 come back.
        """
        assert self.assign is not None
        train, stages = self.assign.spec.train, self.assign.assignments
        num_samples = train.batch_size if step % 2 == 0 else train.num_samples - train.batch_size
        is_last = self._stage.layers == stages[-1].layers
        traffic = []
        if self._stage.layers != stages[0].layers:
            boundary = BlockIndex(self._stage.layers.start)
            traffic.append(
                Traffic(boundary=boundary, backward_bytes=30, backward_uncompressed_bytes=120)
            )
        if not is_last:
            boundary = BlockIndex(self._stage.layers.stop)
            traffic.append(Traffic(boundary=boundary, forward_bytes=100, key_frames=num_samples))
        num_targets = num_samples * (train.seq_length - 1) if is_last else 0
        return StepReady(
            run_id=self.assign.run_id,
            attempt=self.assign.attempt,
            step=StepNumber(step),
            squared_grad_norm=self.squared_grad_norm,
            loss_sum=(10.0 - step) * num_targets,
            num_targets=num_targets,
            compute_s=self.compute_s,
            traffic=tuple(traffic),
        )

    def _apply(self, commit: CommitStep) -> None:
        if commit.step < len(self.applied):
            return
        assert commit.step == len(self.applied) == self.gradients_of_step
        assert commit.attempt == self.gradients_of_attempt
        self.gradients_of_step = None
        self.applied.append(commit.step)
        for boundary in self.boundaries:
            self.buffers.setdefault(boundary, set()).update(self.visited)
        self.last_attempt = commit.attempt


def proof(learner: Learner) -> bytes:
    """Return a learner's proof that it has its state."""
    return digest_of(learner.peer_id.encode(), bytes([learner.step]))


def _last_of(assign: Assign) -> tuple[int, Attempt]:
    return assign.committed_steps, assign.last_attempt


def _ends(layers: LayerRange) -> tuple[int, int]:
    return layers.start, layers.stop


class Swarm:
    """The coordinator's decisions, a virtual clock, and connected peers.

    Every effect is checked against the records before it. So each test that uses this also checks
    that no message is sent too early, and that a step is committed once per history.
    """

    def __init__(self, journal: Journal | None = None) -> None:
        self.journal = journal
        self.state = SwarmState()
        self.now_s = 100.0
        self.connected: dict[PeerId, FakePeer] = {}
        self.deaf: set[PeerId] = set()
        self.pending: deque[tuple[PeerId, FromPeer]] = deque()
        self.effects: list[Effect] = []
        self.written_runs: dict[RunId, Run] = {}
        self.plans: list[PlanRecord] = []
        self.history: dict[RunId, list[StepCommitted]] = {}
        self.num_rollbacks = 0
        self.has_slow_disk = False
        self.unwritten: list[SnapshotWritten] = []

    # ---- what happens

    def submit(
        self, spec: RunSpec, run_id: RunId = RUN, *, owner: str = "", priority: int = 3
    ) -> None:
        if self.journal is not None:
            run = Run(
                run_id=run_id, spec=spec, owner=owner, storage_key=STORAGE_KEY, priority=priority
            )
            self.journal.write_run(run, bytes(16))
        self.handle(RunSubmitted(run_id, spec, owner, STORAGE_KEY, priority))

    def join(self, *peers: FakePeer) -> None:
        for peer in peers:
            self.connected[peer.peer_id] = peer
            hello = peer.hello()
            self.handle(PeerJoined(hello, peer.grant, site_of(hello, peer.address)))

    def lose(self, *peers: FakePeer) -> None:
        for peer in peers:
            self._cut(peer.peer_id)
            self.handle(PeerLost(peer.peer_id))

    def leave(self, peer: FakePeer) -> None:
        self.handle(PeerSaid(peer.peer_id, PeerGoodbye()))
        self.lose(peer)

    def would_leave(self, peer: FakePeer, *, stays: bool = False) -> None:
        """Send a peer's request to leave, or to pause."""
        self.handle(PeerSaid(peer.peer_id, PeerLeaving(stays=stays, reason="Ctrl-C")))

    def may_go(self, peer: FakePeer) -> bool:
        """Whether the last progress allows the peer to go."""
        told = [message for to, message in self.said(Progress) if to == peer.peer_id]
        return told[-1].may_go

    def deafen(self, peer: FakePeer) -> None:
        """Break a peer's stream without the coordinator's knowledge."""
        self.deaf.add(peer.peer_id)
        self.forget_said(peer.peer_id)

    def say(self, peer: FakePeer, message: FromPeer) -> list[Effect]:
        return self.handle(PeerSaid(peer.peer_id, message))

    def wait(self, seconds: float) -> None:
        """Let time pass, in which all connected peers send heartbeats."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s = min(self.now_s + MAX_PAUSE_S, end_s)
            for peer_id in sorted(self.connected.keys() - self.deaf):
                self.handle(PeerSaid(peer_id, PeerAlive()))
            self.handle(Tick())

    def stand_still(self, seconds: float) -> None:
        """Let time pass in which the coordinator does not run."""
        self.now_s += seconds
        self.handle(Tick())

    def step(self) -> None:
        """Handle the oldest message, once enough time has passed for it."""
        peer_id, message = self.pending.popleft()
        if isinstance(message, StepReady):
            run = self.state.runs[message.run_id]
            if run in self.state.runs_of(peer_id) and run.step is not None:
                self.wait(run.step.began_s + message.compute_s - self.now_s)
        self.handle(PeerSaid(peer_id, message))

    def settle(self) -> None:
        """Handle messages until there are none."""
        for _ in range(MAX_EVENTS):
            if not self.pending:
                return
            self.step()
        raise AssertionError(f"after {MAX_EVENTS} messages there are still more")

    def settle_until(self, done: Callable[[], object]) -> None:
        while not done():
            self.step()

    def crash(self, event: Event, num_said: int) -> None:
        """Kill the process in this event: all records are written, `num_said` messages are sent."""
        self.handle(event, num_said=num_said)
        self.restart()

    def restart(self) -> None:
        """Start a new process with the journal's state; no peer is connected to it yet."""
        assert self.journal is not None
        for peer_id in list(self.connected):
            self._cut(peer_id)
        runs = {run.run_id: run for run in self.journal.load(self.now_s)}
        standings = MappingProxyType(self.journal.standings(self.now_s))
        given = MappingProxyType(self.journal.contributions())
        self.state = SwarmState(
            runs=MappingProxyType(runs),
            standings=standings,
            contributions=given,
            sent_traffic=MappingProxyType(self.journal.sent_traffic()),
            keeps_snapshots=self.state.keeps_snapshots,
            num_keepers=self.state.num_keepers,
            moves_layers=self.state.moves_layers,
        )

    # ---- what is seen

    def run(self, run_id: RunId = RUN) -> Run:
        return self.state.runs[run_id]

    def said(self, kind: type[Message]) -> list[tuple[PeerId, Message]]:
        return [
            (e.peer_id, e.message)
            for e in self.effects
            if isinstance(e, SendMessage) and isinstance(e.message, kind)
        ]

    def told_of(self, run_id: RunId = RUN) -> list[Run]:
        """Return the run's states as its watchers saw them."""
        published = (e for e in self.effects if isinstance(e, Publish) and e.run_id == run_id)
        return [e.event for e in published if isinstance(e.event, Run)]

    def reasons(self, run_id: RunId = RUN) -> list[Reason]:
        """Return all reasons that the run's watchers saw."""
        return [run.reason for run in self.told_of(run_id) if run.reason is not None]

    def phases(self, run_id: RunId = RUN) -> list[RunPhase]:
        """Return the phases that watchers saw, without repetitions."""
        seen: list[RunPhase] = []
        for status in self.told_of(run_id):
            if seen[-1:] != [status.phase]:
                seen.append(status.phase)
        return seen

    def dismissals(self) -> dict[str, str]:
        return {e.peer_id: e.error.code for e in self.effects if isinstance(e, Dismiss)}

    def idlers(self) -> dict[str, Reason]:
        """Return members without work, with the reasons that they received."""
        self.handle(Tick())
        idlers: dict[str, Reason] = {}
        for name, member in self.state.members.items():
            if member.idle:
                assert (name, Idle(reason=member.idle)) in self.said(Idle)
                idlers[name] = member.idle
        return idlers

    def steps(self, run_id: RunId = RUN) -> list[StepCommitted]:
        """Return the commits that count, without their times."""
        return [replace(step, seconds=0.0) for step in self.history[run_id]]

    # ---- one event

    def handle(self, event: Event, *, num_said: int | None = None) -> list[Effect]:
        self.now_s += EVENT_S
        self.state, effects = decide(self.state, event, self.now_s)
        for i, effect in enumerate(effects):
            dismissed = {e.peer_id for e in effects[i:] if isinstance(e, Dismiss)}
            self._check(effect, event, self.state.members.keys() | dismissed)
        self._check_state()
        self.effects += effects
        if self.journal is not None:
            self.journal.write(e for e in effects if isinstance(e, Record))
        says = [e for e in effects if isinstance(e, SendMessage)]
        for say in says[:num_said]:
            self._deliver(say)
        for effect in effects:
            if isinstance(effect, Dismiss):
                self._cut(effect.peer_id)
                self.handle(PeerLost(effect.peer_id))
            if isinstance(effect, WriteSnapshot):
                self.unwritten.append(SnapshotWritten(effect.run_id, effect.snapshot))
        while self.unwritten and not self.has_slow_disk:
            self.handle(self.unwritten.pop(0))
        return effects

    def _deliver(self, say: SendMessage) -> None:
        peer = self.connected.get(say.peer_id)
        if peer is not None and say.peer_id not in self.deaf:
            if isinstance(say.message, ExportStage):
                run_id = say.message.run_id
                assert len(peer.part(run_id).applied) == self.run(run_id).committed_steps
            self.pending.extend((say.peer_id, answer) for answer in peer.hear(say.message))

    def _cut(self, peer_id: PeerId) -> None:
        self.connected.pop(peer_id, None)
        self.deaf.discard(peer_id)
        self.forget_said(peer_id)

    def forget_said(self, peer_id: PeerId) -> None:
        self.pending = deque(said for said in self.pending if said[0] != peer_id)

    def _check(self, effect: Effect, event: Event, there: Collection[PeerId]) -> None:
        """Check that an effect is allowed; `there` are the peers that may receive messages."""
        if isinstance(effect, Record):
            self._check_written(effect)
        match effect:
            case SendMessage(peer_id, message):
                assert peer_id in there
                self._check_said(peer_id, message)
            case Publish(run_id, Run() as run):
                # A notice is nothing that has to last.
                written = replace(self.written_runs[run_id], notice=run.notice)
                assert status_of(run) == status_of(written)
            case Publish(run_id, StepCommitted() as step):
                assert step == self.history[run_id][-1]
            case Dismiss(peer_id):
                assert isinstance(event, PeerJoined) or peer_id not in self.state.members

    def _check_written(self, record: Record) -> None:
        match record:
            case RunRecord(run):
                known = self.written_runs.get(run.run_id)
                assert known is None or run.attempt.number >= known.attempt.number
                assert run.past.all_steps == len(self.history.setdefault(run.run_id, []))
                self.written_runs[run.run_id] = run
            case PlanRecord(run_id, step) as plan:
                assert step == len(self.history[run_id])
                self.plans.append(plan)
            case CommitRecord(run_id, step, commit, sent):
                assert step.step == commit.step == len(self.history[run_id])
                self.history[run_id].append(step)
                written = self.written_runs[run_id]
                past = replace(written.past, committed_steps=step.step + 1, sent=sent)
                self.written_runs[run_id] = replace(written, past=past)
            case RollbackRecord(run_id, first_void_step):
                self.num_rollbacks += 1
                del self.history[run_id][first_void_step:]

    def _check_said(self, peer_id: PeerId, message: AnyMessage) -> None:
        undecided = ClockReply | Renewed | Revoked | ContributionReport
        assert not isinstance(message, undecided), "no decision is needed for it"
        with_words = StayIdle | LeaveProgress
        assert not isinstance(message, with_words), "the shell puts reasons into words"
        if isinstance(message, Idle | MemoryShare):
            return
        if isinstance(message, Progress):
            assert peer_id in self.state.leaving
            return
        if isinstance(message, KeepShard | GiveShard):
            assert message.name.is_saved
            return
        run = self.written_runs.get(message.run_id)
        match message:
            case Assign():
                assert run is not None
                assert run.attempt.number == message.attempt
                assert run.attempt.assignments == message.assignments
                assert message.committed_steps == run.committed_steps
                assert bool(message.saved) == bool(message.fresh and message.committed_steps)
                assert {learner.peer_id for learner in message.learners} < set(run.peers)
                if run.storage_key:
                    self._check_keys(run.storage_key, peer_id, message)
            case PlanStep():
                named = (message.run_id, message.step, message.attempt)
                assert any(named == (p.run_id, p.step, p.attempt) for p in self.plans)
            case CommitStep():
                assert message.step == len(self.history[message.run_id]) - 1
            case ExportStage():
                assert run is not None
                assert run.phase is RunPhase.EXPORTING
            case Release():
                assert run is None or run.phase > RunPhase.FINISHED or peer_id not in run.peers

    def _check_keys(self, run_key: bytes, peer_id: PeerId, assign: Assign) -> None:
        """Check that a peer gets keys of the stages that it holds and reads, and no other."""
        own = assign.layers_of(peer_id)
        blocks = set(range(own.start, own.stop))
        readable = [s.layers for s in assign.saved if blocks & set(range(*_ends(s.layers)))]
        assert set(assign.stage_keys) == {own, *readable}
        assert assign.storage_key == peer_key(run_key, peer_id)
        for layers, key in assign.stage_keys.items():
            assert stage_keys(run_key, layers, ()) == {layers: key}

    def _check_state(self) -> None:
        for run in self.state.runs.values():
            assert run.past.all_steps == len(self.history[run.run_id])
            if run.stages:
                cuts = [(s.layers.start, s.layers.stop) for s in run.stages]
                edges = [0, *(stop for _, stop in cuts)]
                assert [start for start, _ in cuts] == edges[:-1]
                assert edges[-1] == run.spec.model.num_blocks
                assert len(set(run.peers)) == len(run.peers)
            if run.phase in WORKING:
                assert run.stages
                assert set(run.listeners) < set(run.peers)
                assert len(run.computing) == len(run.stages), "somebody has every stage"
                learners = run.attempt.learners
                assert run.attempt.caught_up <= {learner.peer_id for learner in learners}
                for learner in learners:
                    assert set(learner.sources) <= set(run.peers) - {learner.peer_id}
                    assert learner.step <= run.committed_steps
                assert set(run.peers) <= set(self.state.members)
                self._check_granted(run)
        at_work = Counter(peer for run in self.state.active_runs for peer in run.peers)
        for peer, num_runs in at_work.items():
            member = self.state.members.get(peer)
            assert num_runs <= 1 + (member.hello.max_beside if member else MAX_HOSTED)

    def _check_granted(self, run: Run) -> None:
        """Check that no peer hosts a forbidden stage, and none is left to peers on probation."""
        grants = {name: member.grant for name, member in self.state.members.items()}
        trusted = run.spec.train.private_ends
        for host in run.attempt.assignments:
            grant, layers = grants[host.peer_id], host.layers
            if grant.layers is not None:
                assert grant.layers.start <= layers.start
                assert layers.stop <= grant.layers.stop
            if 0 in (layers.start, run.spec.model.num_blocks - layers.stop):
                assert grant.sees_tokens
                assert not trusted or host.peer_id in trusted.split(",")
        for stage in run.computing:
            assert any(not grants[peer].replica_only for peer in stage.peers)
        for learner in run.attempt.learners:
            assert not any(grants[source].replica_only for source in learner.sources)


@pytest.fixture(scope="session")
def make_spec() -> MakeSpec:
    return _spec


@pytest.fixture(scope="session")
def make_peer() -> type[FakePeer]:
    return FakePeer


@pytest.fixture(scope="session")
def make_swarm() -> type[Swarm]:
    """The class, for tests that need many swarms."""
    return Swarm


@pytest.fixture
def swarm() -> Swarm:
    return Swarm()


@pytest.fixture
def a(make_peer: type[FakePeer]) -> FakePeer:
    """The only peer of the first stage."""
    return make_peer("a", "0-2")


@pytest.fixture
def b(make_peer: type[FakePeer]) -> FakePeer:
    """The only peer of the second stage."""
    return make_peer("b", "2-4")


@pytest.fixture
def newcomer(make_peer: type[FakePeer]) -> FakePeer:
    """A peer that can replace b."""
    return make_peer("newcomer", "2-4")
