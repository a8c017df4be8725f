"""The waits of a run's events while another job is submitted to the coordinator.

    python -m benchmarks.coordinator_stalls [--mib N] [--seq-length N] [--step-ms MS] [--json]

Three processes and real gRPC on loopback. One is the coordinator: the real service with a journal
on the disk, on uvloop, as `swarm-ft coordinator` runs it. In another two peers train: they use
the real protocol, and sleep for a step instead of computing it. The third submits N MiB of tokens.
All is measured for a while before the submission, and then during it:

    loop         how late the coordinator's loop comes to a timer that is due
    work         the processor time of the loop's thread from one such timer to the next: what of
                 all waits is the coordinator's own doing, on a machine that has others to serve
    journal      a write of records, which the disk has when it returns
    probe        a peer's question for the time, and the answer
    commit       from the last peer's StepReady until a peer receives the commit
    plan         from a received commit until the next step's plan and its tokens are
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import uvloop

from swarm_ft.base.clock import SystemClock
from swarm_ft.client.swarm import SwarmClient
from swarm_ft.coordinator.facts.events import Record
from swarm_ft.coordinator.journal.journal import Journal
from swarm_ft.coordinator.service import CoordinatorService
from swarm_ft.identity.roles import Role
from swarm_ft.ids import PeerId, StepNumber
from swarm_ft.protocol.messages.control import (
    Assign,
    ClockProbe,
    ClockReply,
    CommitStep,
    FromPeer,
    PeerHello,
    PlanStep,
    StageReady,
    StepReady,
    ToPeer,
)
from swarm_ft.protocol.spec.layers import parse_layers
from swarm_ft.protocol.spec.run_spec import LrSchedule, ModelSpec, RunSpec, TrainSpec
from swarm_ft.transport.base import MessageStream
from swarm_ft.transport.grpc_transport import GrpcTransport
from swarm_ft.transport.methods import JOIN
from tests.doubles.directory import Board, StaticDirectory

LOOP_TIMER_S, PROBE_EVERY_S = 0.005, 0.01
QUIET_S, MAX_SUBMIT_S = 5.0, 900.0
LAYERS = ("0-1", "1-2")
KINDS = ("loop", "work", "journal", "probe", "commit", "plan")
_END = "end"
Waits = dict[str, list[float]]


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The distribution of waits, in milliseconds."""

    count: int
    p50_ms: float
    p99_ms: float
    max_ms: float

    @classmethod
    def of(cls, waits_s: Iterable[float]) -> Spread:
        """Compute the spread of at least one wait."""
        waits_ms = 1e3 * np.array(list(waits_s))
        p50, p99 = np.percentile(waits_ms, (50, 99))
        return cls(count=len(waits_ms), p50_ms=p50, p99_ms=p99, max_ms=float(waits_ms.max()))


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Waits during a phase, by kind, and the coordinator's peak memory until its end."""

    spreads: dict[str, Spread]
    peak_mib: float


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Waits before a submission and during it, by kind.

    Attributes:
        submit_s: that it took, the start of the client's process included.
    """

    mib: int
    submit_s: float
    quiet: Phase
    submitting: Phase


def measure(
    mib: int, seq_length: int, step_s: float, folder: Path, quiet_s: float = QUIET_S
) -> Figures:
    """Let a run train, and submit so many MiB of tokens beside it."""
    return uvloop.run(_measure(mib, seq_length, step_s, folder, quiet_s))


async def _measure(
    mib: int, seq_length: int, step_s: float, folder: Path, quiet_s: float
) -> Figures:
    context = get_context("spawn")
    own_end, far_end = context.Pipe()
    coordinator = context.Process(target=_coordinate, args=(str(folder), far_end))
    coordinator.start()
    client = None
    try:
        endpoint = await asyncio.to_thread(own_end.recv)
        async with _training(endpoint, seq_length, step_s) as peers:
            await _phase(own_end, peers, asyncio.sleep(quiet_s))
            quiet = await _phase(own_end, peers, asyncio.sleep(quiet_s))
            client = context.Process(target=_submit, args=(endpoint, mib, seq_length))
            client.start()
            began_s = time.monotonic()
            busy = await _phase(own_end, peers, asyncio.to_thread(client.join, MAX_SUBMIT_S))
            submit_s = time.monotonic() - began_s
        if client.exitcode != 0:
            raise SystemExit("the submission failed; its error stands above")
    finally:
        for process in (coordinator, client):
            if process is not None:
                process.kill()
                process.join()
    return Figures(mib=mib, submit_s=submit_s, quiet=quiet, submitting=busy)


async def _phase(
    coordinator: Connection, peers: _Peers, until: Coroutine[None, None, None]
) -> Phase:
    """Measure the waits of coordinator and peers until a coroutine ends."""
    peers.waits.clear()
    coordinator.send(_END)
    await asyncio.to_thread(coordinator.recv)
    await until
    coordinator.send(_END)
    theirs, peak_mib = await asyncio.to_thread(coordinator.recv)
    waits: Waits = {**theirs, **peers.waits}
    spreads = {kind: Spread.of(waits[kind]) for kind in KINDS if waits.get(kind)}
    return Phase(spreads=spreads, peak_mib=peak_mib)


# ---- the coordinator


class _TimedJournal(Journal):
    """Notes how long writes take."""

    def __init__(self, path: str, waits_s: list[float]) -> None:
        super().__init__(path)
        self._waits_s = waits_s

    def write(self, records: Iterable[Record]) -> None:
        """See `Journal.write`."""
        listed, began_s = list(records), time.monotonic()
        super().write(listed)
        if listed:
            self._waits_s.append(time.monotonic() - began_s)


def _coordinate(folder: str, pipe: Connection) -> None:
    uvloop.run(_serve(folder, pipe))


async def _serve(folder: str, pipe: Connection) -> None:
    waits: Waits = {"loop": [], "work": [], "journal": []}
    journal = _TimedJournal(str(Path(folder) / "journal.db"), waits["journal"])
    service = CoordinatorService(journal, SystemClock())
    server = await GrpcTransport().serve("127.0.0.1", 0, service.handlers())
    pipe.send(server.endpoint)
    async with asyncio.TaskGroup() as group:
        group.create_task(service.run())
        group.create_task(_watch_loop(waits))
        while True:
            await asyncio.to_thread(pipe.recv)
            pipe.send((waits, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))
            for times in waits.values():
                times.clear()


async def _watch_loop(waits: Waits) -> None:
    while True:
        due_s, worked_s = time.monotonic() + LOOP_TIMER_S, time.thread_time()
        await asyncio.sleep(LOOP_TIMER_S)
        waits["loop"].append(time.monotonic() - due_s)
        waits["work"].append(time.thread_time() - worked_s)


# ---- peers


@dataclass
class _Peers:
    """Both peers of a run that trains without end."""

    step_s: float
    waits: Waits = field(default_factory=dict)
    ready_at_s: dict[StepNumber, float] = field(default_factory=dict)

    def note(self, kind: str, wait_s: float) -> None:
        """Something was waited for."""
        self.waits.setdefault(kind, []).append(wait_s)


class _Peer:
    """A peer that follows the coordinator's messages and sleeps instead of computing."""

    def __init__(self, peers: _Peers, stream: MessageStream[FromPeer, ToPeer]) -> None:
        self._peers = peers
        self._stream = stream
        self._committed_at_s = 0.0

    async def send(self, message: FromPeer) -> None:
        """Send a message to the coordinator."""
        await self._stream.send(message)

    async def probe(self) -> None:
        """Request the time repeatedly; each request holds its own time."""
        while True:
            await self.send(ClockProbe(round(1e6 * time.monotonic())))
            await asyncio.sleep(PROBE_EVERY_S)

    async def work(self, group: asyncio.TaskGroup) -> None:
        """Follow the coordinator's messages until they end."""
        while (message := await self._stream.receive()) is not None:
            self._on_message(message, group)

    def _on_message(self, message: ToPeer, group: asyncio.TaskGroup) -> None:
        now_s = time.monotonic()
        match message:
            case Assign(run_id=run_id, attempt=attempt):
                group.create_task(self.send(StageReady(run_id=run_id, attempt=attempt)))
            case PlanStep():
                if self._committed_at_s:
                    self._peers.note("plan", now_s - self._committed_at_s)
                group.create_task(self._run_step(message))
            case CommitStep(step=step):
                self._committed_at_s = now_s
                self._peers.note("commit", now_s - self._peers.ready_at_s[step])
            case ClockReply(sent_us):
                self._peers.note("probe", now_s - sent_us / 1e6)
            case _:
                pass

    async def _run_step(self, plan: PlanStep) -> None:
        await asyncio.sleep(self._peers.step_s)
        ready = StepReady(
            run_id=plan.run_id,
            attempt=plan.attempt,
            step=plan.step,
            squared_grad_norm=1.0,
            loss_sum=1.0,
        )
        self._peers.ready_at_s[plan.step] = time.monotonic()
        await self.send(ready)


@asynccontextmanager
async def _training(endpoint: str, seq_length: int, step_s: float) -> AsyncIterator[_Peers]:
    """Two peers and a run of theirs, as long as the context lasts."""
    peers = _Peers(step_s)
    channel = GrpcTransport().connect(endpoint)
    async with asyncio.TaskGroup() as group:
        tasks = []
        for index, layers in enumerate(LAYERS):
            stream = channel.open(JOIN)
            peer = _Peer(peers, stream)
            name = PeerId(f"peer-{index}")
            hello = PeerHello(
                endpoint="127.0.0.1:1",
                peer_id=name,
                layers=parse_layers(layers),
                memory_bytes=1 << 30,
            )
            await peer.send(hello)
            tasks.append(group.create_task(peer.work(group)))
            tasks.append(group.create_task(peer.probe()))
        spec = _spec(num_samples=4096, seq_length=seq_length, num_steps=1 << 20)
        await (await _client(endpoint)).submit(spec, [bytes(4 * seq_length)] * 4096)
        yield peers
        for task in tasks:
            task.cancel()
    await channel.close()


# ---- the client


def _submit(endpoint: str, mib: int, seq_length: int) -> None:
    sample = bytes(4 * seq_length)
    num_samples = max(1, (mib << 20) // len(sample))
    spec = _spec(num_samples=num_samples, seq_length=seq_length, num_steps=1)

    async def submit() -> None:
        await (await _client(endpoint)).submit(spec, [sample] * num_samples)

    uvloop.run(submit())


async def _client(endpoint: str) -> SwarmClient:
    directory = StaticDirectory(Board(), SystemClock())
    await directory.announce(Role.COORDINATOR, "coordinator", endpoint)
    return SwarmClient(directory, GrpcTransport())


def _spec(*, num_samples: int, seq_length: int, num_steps: int) -> RunSpec:
    model = ModelSpec(
        reference="none",
        architecture="gpt2",
        num_blocks=2,
        hidden_size=8,
        vocab_size=32,
        block_bytes=1000,
        embed_digest=bytes(16),
        block_digests=(bytes(16), bytes(16)),
        head_digest=bytes(16),
        nonce=bytes(16),
        tied_embeddings=False,
    )
    train = TrainSpec(
        num_samples=num_samples,
        seq_length=seq_length,
        batch_size=32,
        micro_batch_size=4,
        num_steps=num_steps,
        learning_rate=1e-4,
        lr_schedule=LrSchedule.CONSTANT,
        warmup_steps=0,
        weight_decay=0.0,
        clip_grad_norm=1.0,
        seed=0,
        shuffle=True,
        dropout=False,
        sync_tied_embeddings=False,
        forward_codec="none",
        backward_codec="none",
    )
    return RunSpec(model=model, train=train)


def main() -> None:
    """Print a line for each kind of wait and phase, or all as JSON."""
    parser = argparse.ArgumentParser(description="How long events wait for the coordinator.")
    parser.add_argument("--mib", type=int, default=1024, help="of tokens to submit")
    parser.add_argument("--seq-length", type=int, default=512)
    parser.add_argument("--step-ms", type=float, default=20.0, help="that peers take for a step")
    parser.add_argument("--dir", help="where the journal lies meanwhile; for the disk's sake")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="coordinator-stalls-", dir=args.dir) as folder:
        figures = measure(args.mib, args.seq_length, args.step_ms / 1e3, Path(folder))
    if args.json:
        print(json.dumps(asdict(figures)))  # noqa: T201
        return
    print(f"{figures.mib} MiB in {figures.submit_s:.1f} s")  # noqa: T201
    for phase in ("quiet", "submitting"):
        print(f"{phase:<11} memory   {getattr(figures, phase).peak_mib:.0f} MiB")  # noqa: T201
        for kind, spread in getattr(figures, phase).spreads.items():
            print(  # noqa: T201
                f"{phase:<11} {kind:<8} p50 {spread.p50_ms:8.2f} ms   p99 {spread.p99_ms:8.2f} ms"
                f"   max {spread.max_ms:9.2f} ms   of {spread.count}"
            )


if __name__ == "__main__":
    main()
