"""Simulation of a swarm from one moment on: the real decisions, with obedient peers. Pure.

Simulated peers answer each message of the coordinator as honest ones do: they load, compute, sum,
commit and copy stages. A model provides all durations, nothing is computed, and losses stay the
same. The result is the swarm's speed, and its decisions.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from swarm_ft.coordinator.decide.machine import decide
from swarm_ft.coordinator.facts.events import (
    CommitRecord,
    Effect,
    EmitEvent,
    Event,
    PeerSaid,
    SendMessage,
    SnapshotWritten,
    Tick,
    WriteSnapshot,
)
from swarm_ft.coordinator.facts.messages import Message
from swarm_ft.coordinator.facts.state import Run, SwarmState
from swarm_ft.digest import digest_of
from swarm_ft.ids import PeerId, RunId, StepNumber
from swarm_ft.protocol.machines.pipeline import PARTS
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.messages.control import (
    Assign,
    CatchUp,
    CaughtUp,
    EvalSum,
    FromPeer,
    PeerAlive,
    PlanStep,
    SaveStage,
    StageOffered,
    StageReady,
    StageSaved,
    StepReady,
)
from swarm_ft.protocol.messages.shard import ShardName

TICK_S, ALIVE_S = 0.5, 2.0
STEPS = 20
PATIENCE_S, PATIENCE_STEPS = 600.0, 3.0
"""Longest wait for a commit: these seconds, and the duration of this many steps."""
MAX_EVENTS = 200_000


class Speeds(Protocol):
    """Durations of a swarm's work, in seconds."""

    def step_s(self, run: Run) -> float:
        """Return the seconds of a step as it is planned now, until all peers are ready."""
        ...

    def load_s(self, run: Run, peer_id: PeerId) -> float:
        """Return the seconds in which a peer loads a stage's weights, or copies its state."""
        ...

    def compute_s(self, run: Run, peer_id: PeerId) -> float:
        """Return the seconds of a peer's share of a step."""
        ...


@dataclass(kw_only=True, slots=True)
class SimulationResult:
    """Result of a simulation.

    Attributes:
        state: Final state.
        seconds: Seconds until the last commit.
        step_s: Seconds of each committed step.
        happened: Events for people, each with its time in seconds.
    """

    state: SwarmState
    seconds: float = 0.0
    step_s: list[float] = field(default_factory=list)
    happened: list[tuple[float, EmitEvent]] = field(default_factory=list)


def simulate_from(
    state: SwarmState,
    run_id: RunId,
    speeds: Speeds,
    events: Iterable[Event] = (),
    steps: int = STEPS,
) -> SimulationResult:
    """Simulate a swarm from a state on.

    Args:
        state: Any state.
        run_id: Run to observe; other runs continue beside it.
        speeds: Durations of work.
        events: Events that happen first.
        steps: Steps of the run after which the simulation ends. It also ends with the run, or when
            nothing moves for long.
    """
    swarm = _Swarm(state, run_id, speeds)
    swarm.take_up()
    for event in events:
        swarm.handle(event)
    while len(swarm.went.step_s) < steps and swarm.goes_on():
        swarm.next()
    swarm.went.state = swarm.state
    return swarm.went


class _Swarm:
    def __init__(self, state: SwarmState, run_id: RunId, speeds: Speeds) -> None:
        self.state = state
        self.went = SimulationResult(state=state)
        self._run_id = run_id
        self._speeds = speeds
        self._began_s = self._now_s = state.seen_at_s
        self._serial = count()
        self._num_events = 0
        self._coming: list[tuple[float, int, Callable[[], Event | None]]] = []

    def take_up(self) -> None:
        """Let peers finish the work that is under way."""
        self._at(0.0, self._tick)
        self._at(ALIVE_S, self._all_alive)
        for run in self.state.going_runs:
            for peer in run.peers:
                if peer in self.state.members:
                    self._take_up(run, peer)

    def _take_up(self, run: Run, peer: PeerId) -> None:
        learners = {learner.peer_id: learner for learner in run.attempt.learners}
        if run.phase is RunPhase.LOADING and peer not in run.attempt.loaded:
            self._say(self._speeds.load_s(run, peer), peer, _stage_ready(run))
        if peer in learners and peer in run.attempt.proofs:
            (proof, *_) = run.attempt.proofs[peer]
            self._say(self._speeds.load_s(run, peer), peer, _caught_up(run, proof))
        if run.phase is RunPhase.TRAINING and run.step and peer not in run.step.ready:
            left_s = run.step.began_s + self._speeds.step_s(run) - self._now_s
            self._step_ready(run, peer, max(0.0, left_s))

    def goes_on(self) -> bool:
        run = self.state.runs.get(self._run_id)
        if run is None or run.phase >= RunPhase.EXPORTING or self._num_events >= MAX_EVENTS:
            return False
        waited_s = self._now_s - self._began_s - self.went.seconds
        return waited_s < PATIENCE_S + PATIENCE_STEPS * self._speeds.step_s(run)

    def next(self) -> None:
        """Process the next event."""
        self._now_s, _, made = heapq.heappop(self._coming)
        event = made()
        if event is not None:
            self.handle(event)

    def handle(self, event: Event) -> None:
        self._num_events += 1
        self.state, effects = decide(self.state, event, self._now_s)
        for effect in effects:
            self._follow(effect)

    def _follow(self, effect: Effect) -> None:
        match effect:
            case SendMessage(peer, message) if peer in self.state.members:
                self._on_message(peer, message)
            case CommitRecord(run_id, step) if run_id == self._run_id:
                self.went.step_s.append(step.seconds)
                self.went.seconds = self._now_s - self._began_s
            case WriteSnapshot(run_id, _, snapshot):
                self._at(0.0, lambda: SnapshotWritten(run_id, snapshot))
            case EmitEvent():
                self.went.happened.append((self._now_s - self._began_s, effect))

    def _at(self, after_s: float, made: Callable[[], Event | None]) -> None:
        heapq.heappush(self._coming, (self._now_s + after_s, next(self._serial), made))

    def _say(self, after_s: float, peer: PeerId, message: FromPeer) -> None:
        self._at(after_s, lambda: PeerSaid(peer, message) if peer in self.state.members else None)

    # ---- time

    def _tick(self) -> Event:
        self._at(TICK_S, self._tick)
        return Tick()

    def _all_alive(self) -> None:
        for peer in self.state.members:
            runs = self.state.runs_of(peer)
            for alive in [self._alive(run, peer) for run in runs] or [PeerAlive()]:
                self._say(0.0, peer, alive)
        self._at(ALIVE_S, self._all_alive)

    def _alive(self, run: Run, peer: PeerId) -> PeerAlive:
        """Return a peer's progress, if all take as long as the model predicts."""
        if run.step is None or run.phase is not RunPhase.TRAINING:
            return PeerAlive(run_id=run.run_id, attempt=run.attempt.number)
        part = min(1.0, (self._now_s - run.step.began_s) / max(self._speeds.step_s(run), 1e-6))
        return PeerAlive(
            run_id=run.run_id,
            attempt=run.attempt.number,
            step=StepNumber(run.committed_steps),
            parts_begun=int(part * PARTS * share_of(run, peer)),
            compute_s=part * self._speeds.compute_s(run, peer),
        )

    # ---- simulated peers

    def _on_message(self, peer: PeerId, message: Message) -> None:
        run = self.state.runs.get(getattr(message, "run_id", RunId("")))
        if run is None:
            return
        match message:
            case Assign():
                self._assigned(run, peer, message)
            case CatchUp():
                after_s = self._speeds.load_s(run, peer)
                self._say(after_s, peer, _caught_up(run, _proof(peer)))
                if peer not in run.listeners:
                    self._say(after_s, peer, _stage_ready(run))
            case PlanStep():
                self._step_ready(run, peer, self._speeds.step_s(run))
            case SaveStage():
                self._saved(run, peer, message)

    def _assigned(self, run: Run, peer: PeerId, assign: Assign) -> None:
        learners = [one for one in assign.learners if peer in one.sources]
        for step in sorted({one.step for one in learners}):
            proofs = {one.peer_id: _proof(one.peer_id) for one in learners if one.step == step}
            offered = StageOffered(
                run_id=assign.run_id,
                attempt=assign.attempt,
                step=step,
                digest=_proof(peer),
                total_bytes=1,
                proofs=proofs,
            )
            self._say(0.0, peer, offered)
        learns = any(one.peer_id == peer for one in assign.learners)
        if learns and peer not in run.listeners:
            return  # ready once it has caught up
        has_it = run.past.holds.get(peer) == run.committed_steps and not assign.fresh
        after_s = 0.0 if learns or has_it else self._speeds.load_s(run, peer)
        self._say(after_s, peer, _stage_ready(run))

    def _saved(self, run: Run, peer: PeerId, save: SaveStage) -> None:
        layers = next(one.layers for one in run.attempt.assignments if one.peer_id == peer)
        name = ShardName(run_id=run.run_id, step=save.step, layers=layers)
        self._say(0.0, peer, StageSaved(name=name, digest=_proof(peer), total_bytes=1))

    def _step_ready(self, run: Run, peer: PeerId, after_s: float) -> None:
        last, step = run.past.last_step, run.step
        is_last = bool(run.computing) and peer in run.computing[-1].peers
        num_targets = share_of(run, peer) * run.spec.train.seq_length if is_last else 0
        self._say(
            after_s,
            peer,
            StepReady(
                run_id=run.run_id,
                attempt=run.attempt.number,
                step=StepNumber(run.committed_steps),
                squared_grad_norm=0.0,
                loss_sum=(last.loss if last else 0.0) * num_targets,
                num_targets=num_targets,
                evaluation=tuple(_evaluated(run, peer)) if is_last and step else (),
                compute_s=self._speeds.compute_s(run, peer),
            ),
        )


def share_of(run: Run, peer: PeerId) -> int:
    """Return how many microbatches of the present step a peer computes."""
    for index, stage in enumerate(run.computing):
        if run.step is not None and peer in stage.peers:
            return run.step.share(index, stage.peers.index(peer))
    return 0


def _evaluated(run: Run, peer: PeerId) -> Iterator[EvalSum]:
    """Yield a last-stage peer's sums for held-out samples, with the last known loss."""
    train, known = run.spec.train, run.past.last_evaluation
    index, stage = len(run.computing) - 1, run.computing[-1]
    batches = run.step.evaluation if run.step else ()
    own = [b for b in batches if b.replica_at(index) == stage.peers.index(peer)]
    samples = [s for batch in own for s in batch.samples if not train.is_shadow(s)]
    for number in range(len(train.eval_passes) if batches else 0):
        targets = sum(train.pass_of(sample) == number for sample in samples)
        yield EvalSum(loss_sum=targets * (known.loss if known else 0.0), num_targets=targets)


def _stage_ready(run: Run) -> StageReady:
    return StageReady(run_id=run.run_id, attempt=run.attempt.number)


def _caught_up(run: Run, proof: bytes) -> CaughtUp:
    return CaughtUp(run_id=run.run_id, attempt=run.attempt.number, state_bytes=0, proof=proof)


def _proof(peer: PeerId) -> bytes:
    return digest_of(peer.encode())
