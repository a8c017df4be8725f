"""CPU of the coordinator's decisions: `decide(state, event, now)` alone, without sockets or disks.

    python -m benchmarks.coordinator_cost [--quick] [--json] [--limit-s SECONDS]

Each cell has some peers, some jobs that wait, and one reason for which these wait:

    large       the jobs' models fit into no set of these peers; no two jobs are alike
    behind      the peers are busy with other runs; each job could begin if one of these ended
    fit         as `behind`, but a newcomer that joins can host one job alone

and these events, which the coordinator decides one after the other in a swarm at rest:

    tick        time passes, as it does four times a second
    alive       a peer reports that it lives
    ready       the last peer of a step reports StepReady, and the step is committed
    join        a peer joins
    after join  the tick after a newcomer had its time to settle
    lost        a peer is gone

The column `at once` has its own swarm: all peers are idle, and two jobs arrive, which share them.
The numbers are milliseconds of processor time, the median of several events. A decision that takes
longer than the limit is stopped, and its cell shows it.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from statistics import median
from types import FrameType, MappingProxyType

from swarm_ft.coordinator.decide.machine import decide
from swarm_ft.coordinator.facts.events import (
    Event,
    PeerJoined,
    PeerLost,
    PeerSaid,
    RunSubmitted,
    Tick,
)
from swarm_ft.coordinator.facts.state import AttemptState, Member, Run, SwarmState
from swarm_ft.ids import Attempt, PeerId, RunId, StepNumber
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.messages.control import (
    PeerAlive,
    PeerHello,
    StageAssignment,
    StageReady,
    StepReady,
)
from swarm_ft.protocol.spec.grant import Grant
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import LrSchedule, ModelSpec, RunSpec, TrainSpec

BLOCK_BYTES = 10_000_000
NUM_BLOCKS = 12
STAGES = 4
"""Of each run at work."""
OWNERS = 16
COPIES = 4
"""In memory, of each weight: gradient and AdamW's moments are beside it."""
BLOCKS_EACH = 3
"""That a peer has memory for."""
TICK_S = 0.25
SETTLED_S = 100.0
REASONS = ("large", "behind", "fit")
REPEATS = 5
LOOK_EVERY_S = 0.1
"""Whether a decision took too long; the timer of processor time makes its clock coarse."""


def spec_of(num_blocks: int = NUM_BLOCKS, block_bytes: int = BLOCK_BYTES) -> RunSpec:
    """Return a job's spec; equal arguments give equal specs, and others another model."""
    model = ModelSpec(
        reference="a-model",
        architecture="gpt2",
        num_blocks=num_blocks,
        hidden_size=64,
        vocab_size=1000,
        block_bytes=block_bytes,
        embed_digest=bytes(16),
        block_digests=tuple(bytes([i % 256]) * 16 for i in range(num_blocks)),
        head_digest=bytes(16),
        tied_embeddings=False,
    )
    train = TrainSpec(
        num_samples=512,
        seq_length=64,
        batch_size=16,
        micro_batch_size=4,
        num_steps=10_000,
        lr_schedule=LrSchedule.LINEAR,
    )
    return RunSpec(model=model, train=train)


def member_of(index: int) -> Member:
    """Return a member that joined long ago; no two members lend the same amount of memory."""
    return Member(hello=hello_of(index), joined_at_s=0.0, heard_at_s=SETTLED_S)


def hello_of(
    index: int, *, blocks: float = BLOCKS_EACH, layers: LayerRange | None = None
) -> PeerHello:
    """Return the message with which that member joins."""
    return PeerHello(
        peer_id=PeerId(f"peer-{index:03d}"),
        endpoint="peer.example:7001",
        layers=layers,
        memory_bytes=int(blocks * COPIES * BLOCK_BYTES) + index,
    )


def waiting_jobs(num_jobs: int, num_peers: int, reason: str) -> list[Run]:
    """Return jobs of several owners that wait for this reason."""
    jobs = []
    for index in range(num_jobs):
        blocks, block_bytes = NUM_BLOCKS, BLOCK_BYTES - index
        if reason == "large":
            # All lack more than the newcomers lend: some a little of it, and some a lot.
            blocks = (num_peers + REPEATS + 1) * BLOCKS_EACH + index * BLOCKS_EACH // 2
        name = RunId(f"job-{index:02d}")
        spec = spec_of(min(blocks, 4096), block_bytes * (1 if blocks <= 4096 else 8))
        jobs.append(Run(run_id=name, spec=spec, owner=f"owner-{index % OWNERS}"))
    return jobs


def training_runs(members: Iterable[Member]) -> list[Run]:
    """Return runs at work: each has four of these members, one a stage."""
    names, spec = [member.hello.peer_id for member in members], spec_of()
    cuts = [
        LayerRange(start, start + NUM_BLOCKS // STAGES)
        for start in range(0, NUM_BLOCKS, NUM_BLOCKS // STAGES)
    ]
    runs = []
    for begin in range(0, len(names) - STAGES + 1, STAGES):
        peers = names[begin : begin + STAGES]
        assignments = tuple(
            StageAssignment(peer_id=peer, layers=layers, endpoint="peer.example:7001")
            for peer, layers in zip(peers, cuts, strict=True)
        )
        attempt = AttemptState(number=Attempt(1), assignments=assignments)
        runs.append(
            Run(
                run_id=RunId(f"run-{begin // STAGES:03d}"),
                spec=spec,
                owner=f"owner-{begin // STAGES % OWNERS}",
                phase=RunPhase.LOADING,
                attempt=attempt,
            )
        )
    return runs


# ---- a swarm, and time in it


class Swarm:
    """A swarm whose decisions are timed.

    Attributes:
        now_s: the time of its last event.
        limit_s: the longest time that one decision may take.
    """

    def __init__(self, state: SwarmState, limit_s: float) -> None:
        self.state = state
        self.now_s = SETTLED_S
        self.limit_s = limit_s

    def decide(self, event: Event, after_s: float = 0.01) -> float:
        """Decide one event, and return the milliseconds that it took.

        Raises:
            TimeoutError: it took longer than the limit.
        """
        self.now_s += after_s
        with limited(self.limit_s):
            begin_s = time.process_time()
            self.state, _ = decide(self.state, event, self.now_s)
            return (time.process_time() - begin_s) * 1e3

    def set_heartbeats(self) -> None:
        """Set the last heartbeat of all members to now, so that no tick dismisses them."""
        members = {p: replace(m, heard_at_s=self.now_s) for p, m in self.state.members.items()}
        self.state = replace(self.state, members=MappingProxyType(members))

    def begin_training(self) -> None:
        """Have all runs that load report their stages, so that each plans its first step."""
        for run in [run for run in self.state.runs.values() if run.phase is RunPhase.LOADING]:
            for peer in run.peers:
                ready = StageReady(run_id=run.run_id, attempt=run.attempt.number)
                self.decide(PeerSaid(peer, ready), 0.001)


@contextmanager
def limited(limit_s: float) -> Iterator[None]:
    """Stop the block after so many seconds of processor time.

    Raises:
        TimeoutError: it is over.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        del number, frame
        if time.process_time() - begin_s >= limit_s:
            raise TimeoutError

    begin_s = time.process_time()
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit_s, LOOK_EVERY_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def busy_swarm(num_peers: int, num_jobs: int, reason: str, limit_s: float) -> Swarm:
    """Return a swarm in which peers are busy, or idle where all jobs are too large for them."""
    members = [member_of(index) for index in range(num_peers)]
    at_work = [] if reason == "large" else training_runs(members)
    runs = [*at_work, *waiting_jobs(num_jobs, num_peers, reason)]
    state = SwarmState(
        members=MappingProxyType({one.hello.peer_id: one for one in members}),
        runs=MappingProxyType({run.run_id: run for run in runs}),
    )
    return Swarm(state, limit_s)


# ---- events


def ticks(swarm: Swarm) -> float:
    """Ticks in a swarm at rest, once all runs that have peers train."""
    swarm.begin_training()
    swarm.set_heartbeats()
    swarm.decide(Tick(), TICK_S)
    return median(swarm.decide(Tick(), TICK_S) for _ in range(REPEATS))


def alive(swarm: Swarm) -> float:
    """Peers that report that they live."""
    peers = tuple(swarm.state.members)[:REPEATS]
    return median(swarm.decide(PeerSaid(peer, _alive(swarm, peer))) for peer in peers)


def _alive(swarm: Swarm, peer: PeerId) -> PeerAlive:
    runs = swarm.state.runs_of(peer)
    if not runs:
        return PeerAlive()
    run = runs[0]
    return PeerAlive(run_id=run.run_id, attempt=run.attempt.number, step=StepNumber(0))


def ready(swarm: Swarm) -> float:
    """Measure a step's last StepReady; NaN if no run trains."""
    training = [run for run in swarm.state.runs.values() if run.phase is RunPhase.TRAINING]
    took = []
    for run in training[:REPEATS]:
        for peer in run.peers:
            ready = StepReady(
                run_id=run.run_id,
                attempt=run.attempt.number,
                step=StepNumber(run.committed_steps),
                squared_grad_norm=1.0,
                compute_s=0.0,
            )
            last_ms = swarm.decide(PeerSaid(peer, ready), 0.001)
        after = swarm.state.runs[run.run_id]
        if after.committed_steps != run.committed_steps + 1:
            raise RuntimeError(f"run {run.run_id}: expected a commit, got phase {after.phase.name}")
        took.append(last_ms)
    return median(took) if took else math.nan


def joins(swarm: Swarm, reason: str) -> tuple[float, float]:
    """Peers that join one after the other, and ticks once each is settled."""
    took, after = [], []
    for number in range(REPEATS):
        index = 900 + number
        hello = hello_of(index)
        if reason == "fit":
            hello = hello_of(index, blocks=NUM_BLOCKS, layers=LayerRange(0, NUM_BLOCKS))
        took.append(swarm.decide(PeerJoined(hello, Grant()), TICK_S))
        swarm.now_s += 1.5
        swarm.set_heartbeats()
        swarm.decide(Tick(), 0.2)
        swarm.now_s += 0.6
        swarm.set_heartbeats()
        after.append(swarm.decide(Tick(), 0.2))
    return median(took), median(after)


def lost(swarm: Swarm) -> float:
    """Newcomers that are gone."""
    peers = [peer for peer in swarm.state.members if peer >= PeerId("peer-900")]
    return median(swarm.decide(PeerLost(peer), TICK_S) for peer in peers)


def at_once(num_peers: int, limit_s: float) -> float:
    """All peers idle, and a second job that arrives beside one that nobody could host yet."""
    members = [member_of(index) for index in range(num_peers)]
    state = SwarmState(members=MappingProxyType({m.hello.peer_id: m for m in members}))
    swarm = Swarm(state, limit_s)
    first = Run(run_id=RunId("job-0"), spec=spec_of(), owner="owner-0", not_before_s=SETTLED_S + 1)
    swarm.state = swarm.state.with_run(first)
    took = swarm.decide(RunSubmitted(RunId("job-1"), spec_of(), "owner-1", b"k" * 32, 3), 2.0)
    hosted = {peer for run in swarm.state.active_runs for peer in run.peers}
    if len(hosted) != num_peers:
        raise RuntimeError(f"expected {num_peers} peers that are placed, got {len(hosted)}")
    return took


# ---- cells


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Milliseconds of each kind of event; infinite where the limit ended it.

    Attributes:
        reason: why the jobs wait.
    """

    peers: int
    jobs: int
    reason: str
    tick: float = math.nan
    alive: float = math.nan
    ready: float = math.nan
    join: float = math.nan
    after_join: float = math.nan
    lost: float = math.nan


def measured(num_peers: int, num_jobs: int, reason: str, limit_s: float) -> Cell:
    """Measure one cell."""
    found: dict[str, float] = {}

    def take(names: str, measure: Callable[[], float | tuple[float, ...]]) -> bool:
        try:
            values = measure()
        except TimeoutError:
            found.update(dict.fromkeys(names.split(), math.inf))
            return False
        values = values if isinstance(values, tuple) else (values,)
        found.update(zip(names.split(), values, strict=True))
        return True

    swarm = busy_swarm(num_peers, num_jobs, reason, limit_s)
    if take("tick", lambda: ticks(swarm)):
        take("alive", lambda: alive(swarm))
        take("ready", lambda: ready(swarm))
        if take("join after_join", lambda: joins(swarm, reason)):
            take("lost", lambda: lost(swarm))
    return Cell(peers=num_peers, jobs=num_jobs, reason=reason, **found)


def cells(*, is_quick: bool) -> Iterator[tuple[int, int, str]]:
    """Yield the sizes and reasons of all cells."""
    sizes = (8, 40, 200) if is_quick else (8, 22, 40, 128, 200, 512)
    for num_peers in sizes:
        for num_jobs in (0, 4, 64) if is_quick else (0, 4, 16, 64):
            for reason in REASONS if num_jobs else ("behind",):
                yield num_peers, num_jobs, reason


def main() -> None:
    """Measure all cells and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="Three sizes of swarms.")
    parser.add_argument("--json", action="store_true", help="Print JSON instead of tables.")
    parser.add_argument("--limit-s", type=float, default=5.0, help="Of one decision.")
    options = parser.parse_args()
    found = []
    if not options.json:
        _print_heading()
    for sizes in cells(is_quick=options.quick):
        found.append(measured(*sizes, options.limit_s))
        if not options.json:
            _print_row(found[-1])
    placed = {}
    for num_peers in (8, 40, 128) if options.quick else (8, 40, 128, 200, 512):
        try:
            placed[num_peers] = at_once(num_peers, options.limit_s)
        except TimeoutError:
            placed[num_peers] = math.inf
    if options.json:
        _write(json.dumps({"cells": [asdict(cell) for cell in found], "at_once": placed}))
        return
    _write("\n| peers placed at once | ms |\n|---|---|")
    for num_peers, took_ms in placed.items():
        _write(f"| {num_peers} | {_in_ms(took_ms)} |")


def _print_heading() -> None:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    _write(f"commit {commit.stdout.strip()}, Python {sys.version.split()[0]}\n")
    _write("| peers | jobs | they wait for | tick | alive | ready | join | after join | lost |")
    _write("|---|---|---|---|---|---|---|---|---|")


def _print_row(cell: Cell) -> None:
    events = (cell.tick, cell.alive, cell.ready, cell.join, cell.after_join, cell.lost)
    words = " | ".join(map(_in_ms, events))
    reason = cell.reason if cell.jobs else "none wait"
    _write(f"| {cell.peers} | {cell.jobs} | {reason} | {words} |")


def _write(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _in_ms(took_ms: float) -> str:
    if math.isnan(took_ms):
        return ""
    return "over the limit" if math.isinf(took_ms) else f"{took_ms:.2f}"


if __name__ == "__main__":
    main()
