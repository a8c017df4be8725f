"""Real swarms finish their runs with any faulty peer, and no process ends."""

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from swarm_ft.coordinator.decide import blame
from swarm_ft.coordinator.plan import lateness
from swarm_ft.identity.roles import Role
from swarm_ft.ids import MicrobatchIndex, PeerId, RunId
from swarm_ft.peer import coordinator_link
from swarm_ft.peer.links import Send
from swarm_ft.peer.reduce.all_reduce import GradientReducer
from swarm_ft.peer.state.stage_state import EngineMaker
from swarm_ft.protocol.messages.client import RunEvent, RunPhase, RunStatus, StepCommitted
from swarm_ft.protocol.messages.control import (
    Assign,
    CatchUp,
    CaughtUp,
    FromPeer,
    PeerAlive,
    PeerHello,
    StageFailed,
    ToPeer,
)
from swarm_ft.protocol.messages.reduction import PieceAck, PieceMessage
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import RunSpec
from swarm_ft.stage.base import Engine, Lengths, LossAndGradient
from swarm_ft.stage.checkpoint import open_checkpoint
from swarm_ft.stage.engine import StageEngine
from swarm_ft.stage.model_access import UNAVAILABLE
from swarm_ft.transport.grpc_transport import GrpcTransport
from swarm_ft.transport.methods import JOIN
from tests.integration.conftest import Job, MakeJob, QuietEvents
from tests.local_swarm import POLL_S, LocalSwarm, cpu_engine

LAYERS = ["0-3", "3-6"]
LIAR = PeerId("liar")


def losses(events: list[RunEvent]) -> list[float]:
    found = {event.step: event.loss for event in events if isinstance(event, StepCommitted)}
    return [found[step] for step in sorted(found)]


def last_status(events: list[RunEvent]) -> RunStatus:
    return [event for event in events if isinstance(event, RunStatus)][-1]


async def names(swarm: LocalSwarm) -> set[str]:
    return {member.peer_id for member in (await swarm.client.status()).members}


async def idle_reason(swarm: LocalSwarm, name: PeerId) -> str:
    """Wait until a member has an idle reason and return it."""
    while True:
        idle = {m.peer_id: m.idle for m in (await swarm.client.status()).members}
        if idle[name]:
            return idle[name]
        await asyncio.sleep(POLL_S)


@pytest.fixture
def job(make_job: MakeJob) -> Job:
    return make_job(num_samples=8, num_steps=4)


@pytest.fixture(autouse=True)
def short_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between an attempt that failed and the next one."""
    monkeypatch.setattr(blame, "RETRY_S", 0.1)


async def test_a_job_of_a_smaller_model_costs_no_peer(job: Job, tmp_path: Path) -> None:
    digests = job.spec.model.block_digests[:1]
    model = replace(job.spec.model, num_blocks=1, block_digests=digests)
    small = replace(job.spec, model=model)
    async with LocalSwarm(tmp_path, LAYERS) as swarm:
        await swarm.all_joined()
        status = await swarm.client.submit(small, job.samples)
        assert last_status(await swarm.train(job.spec, job.samples)).phase is RunPhase.FINISHED
        assert await names(swarm) == {"peer-0", "peer-1"}
        runs = {run.run_id: run for run in (await swarm.client.status()).runs}
        assert runs[status.run_id].detail.startswith("waiting for layers 0-1")


async def test_a_job_whose_model_nobody_has_fails_with_the_reason(job: Job, tmp_path: Path) -> None:
    missing_model = replace(
        job.spec, model=replace(job.spec.model, reference=str(tmp_path / "no-model"))
    )
    async with LocalSwarm(tmp_path, LAYERS) as swarm:
        failed = last_status(await swarm.train(missing_model, job.samples))
        assert failed.phase is RunPhase.FAILED
        assert failed.detail.startswith("no peer can host it: peer peer-")
        assert failed.detail.endswith(UNAVAILABLE)
        assert last_status(await swarm.train(job.spec, job.samples)).phase is RunPhase.FINISHED


async def test_a_replica_that_cannot_load_is_done_without(
    job: Job, quiet_events: QuietEvents, tmp_path: Path
) -> None:
    def no_threads(spec: RunSpec, layers: LayerRange) -> Engine:
        raise RuntimeError("can't start new thread")

    async with LocalSwarm(tmp_path, LAYERS) as swarm:
        await swarm.add_peer(PeerId("weak"), "3-6", make_engine=no_threads)
        events = await swarm.train(job.spec, job.samples)
        (weak,) = (m for m in (await swarm.client.status()).members if m.peer_id == "weak")
    assert last_status(events).phase is RunPhase.FINISHED
    assert losses(events) == losses(await quiet_events(job, LAYERS))
    # From this run alone, until its replica has done the step at which it failed.
    assert weak.idle.startswith("this peer is suspended ")
    assert " for 30 s: failed 3 times, last it reported the error 'internal'" in weak.idle


async def test_a_result_that_finds_no_room_here_is_its_replicas(job: Job, tmp_path: Path) -> None:
    async with LocalSwarm(tmp_path, [*LAYERS, "3-6"]) as swarm:
        await swarm.all_joined()
        status = await swarm.client.submit(job.spec, job.samples)
        shutil.rmtree(tmp_path / "peer-2")
        (tmp_path / "peer-2").write_text("no folder, so nothing can be written there")
        finished = last_status(await swarm.watch(status.run_id))
    assert finished.phase is RunPhase.FINISHED
    assert {stage.peer_id for stage in finished.assignments} == {"peer-0", "peer-1"}


class WrongNorm(StageEngine):
    """An engine that reports another norm than that of its gradient."""

    def squared_grad_norm(self) -> float:
        return super().squared_grad_norm() * 1e20


class WrongResult(StageEngine):
    """Writes down other weights than it trained."""

    def export(self) -> Iterator[bytes]:
        data = bytearray(b"".join(super().export()))
        data[-1] ^= 1
        return iter((bytes(data),))


def maker_of(engine: type[StageEngine]) -> EngineMaker:
    def make(spec: RunSpec, layers: LayerRange) -> Engine:
        checkpoint = open_checkpoint(spec.model.reference)
        return engine(checkpoint, spec, layers, device=torch.device("cpu"), dtype=torch.float32)

    return make


async def test_a_replica_that_lies_of_its_norm_moves_no_clip_factor(
    job: Job, quiet_events: QuietEvents, tmp_path: Path
) -> None:
    async with LocalSwarm(tmp_path, LAYERS) as swarm:
        await swarm.all_joined()
        await swarm.add_peer(LIAR, "3-6", make_engine=maker_of(WrongNorm))
        events = await swarm.train(job.spec, job.samples)
        why = await idle_reason(swarm, LIAR)
    assert last_status(events).phase is RunPhase.FINISHED
    assert losses(events) == pytest.approx(losses(await quiet_events(job, LAYERS)), rel=1e-5)
    assert why.endswith("reported a gradient norm that differs from its replicas'")


@pytest.mark.parametrize("honest", [1, 2])
async def test_a_result_that_is_not_its_replicas_is_fetched_last_or_not_at_all(
    job: Job, tmp_path: Path, honest: int
) -> None:
    async with LocalSwarm(tmp_path, ["0-3", *["3-6"] * honest]) as swarm:
        await swarm.all_joined()
        await swarm.add_peer(LIAR, "3-6", make_engine=maker_of(WrongResult))
        finished = last_status(await swarm.train(job.spec, job.samples))
        (tmp_path / "taken").mkdir()
        _, last = await swarm.client.fetch_shards(finished, tmp_path / "taken")
        assert last.read_bytes() == exported(tmp_path / "peer-1").read_bytes()
        assert (LIAR in {result.peer_id for result in finished.results}) == (honest == 1)
        assert ("replicas of layers 3-6 have different results" in finished.detail) == (honest == 1)


def exported(folder: Path) -> Path:
    (path,) = folder.glob("run-*-3-6.safetensors")
    return path


Answer = Callable[[ToPeer], FromPeer | None]


@asynccontextmanager
async def liar(swarm: LocalSwarm, answer: Answer) -> AsyncIterator[None]:
    """A member that answers as it likes, and hosts nothing."""
    endpoints = await swarm.directory.find(Role.COORDINATOR)
    channel = GrpcTransport().connect(next(iter(endpoints.values())))
    stream = channel.open(JOIN)
    hello = PeerHello(
        peer_id=LIAR,
        endpoint="127.0.0.1:1",
        layers=LayerRange(3, 6),
        memory_bytes=1 << 33,
    )
    await stream.send(hello)

    async def lie() -> None:
        while (message := await stream.receive()) is not None:
            reply = answer(message)
            if reply is not None:
                await stream.send(reply)

    async def live() -> None:
        while True:
            await stream.send(PeerAlive())
            await asyncio.sleep(1.0)

    tasks = [asyncio.create_task(lie()), asyncio.create_task(live())]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await channel.close()


@pytest.mark.parametrize("code", ["non-finite", "internal", "bad-model"])
async def test_a_liar_ends_no_run(
    job: Job, quiet_events: QuietEvents, tmp_path: Path, code: str
) -> None:
    def fail(message: ToPeer) -> StageFailed | None:
        if not isinstance(message, Assign):
            return None
        return StageFailed(
            run_id=message.run_id, attempt=message.attempt, code=code, message="so I say"
        )

    async with LocalSwarm(tmp_path, LAYERS) as swarm, liar(swarm, fail):
        while LIAR not in await names(swarm):  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        events = await swarm.train(job.spec, job.samples)
        assert await names(swarm) == {"peer-0", "peer-1", "liar"}
    assert last_status(events).phase is RunPhase.FINISHED
    assert losses(events) == losses(await quiet_events(job, LAYERS))


@pytest.mark.thorough
async def test_who_says_that_it_took_its_stage_over_and_did_not_is_no_replica(
    make_job: MakeJob, quiet_events: QuietEvents, tmp_path: Path
) -> None:
    def echo(message: ToPeer) -> CaughtUp | None:
        if not isinstance(message, CatchUp):
            return None
        return CaughtUp(
            run_id=message.run_id, attempt=message.attempt, state_bytes=1, proof=message.digest
        )

    job, events = make_job(num_samples=16, batch_size=8, num_steps=24), list[RunEvent]()
    async with LocalSwarm(tmp_path, LAYERS) as swarm, AsyncExitStack() as joined:
        await swarm.all_joined()
        status = await swarm.client.submit(job.spec, job.samples)
        async for event in swarm.client.watch(status.run_id, lambda _trouble: None):
            events.append(event)
            if isinstance(event, StepCommitted) and event.step == 2:
                await joined.enter_async_context(liar(swarm, echo))
        why = await idle_reason(swarm, LIAR)
    assert last_status(events).phase is RunPhase.FINISHED
    assert {stage.peer_id for stage in last_status(events).assignments} == {"peer-0", "peer-1"}
    assert losses(events) == losses(await quiet_events(job, LAYERS))
    assert why.endswith("copied a state that differs from its replicas'")


# ---- peers that send heartbeats, and are never ready

RTOL = 1e-5
"""Sums over another set of replicas have another order."""


class Gate:
    """Lets so many tasks of an engine pass; the others wait in the compute thread until it opens.

    The rest of the peer goes on: it answers, and sends heartbeats.
    """

    def __init__(self, num_passing: int) -> None:
        self._passing = threading.Semaphore(num_passing)

    def let_pass(self, num_passing: int) -> None:
        self._passing.release(num_passing)

    def wait(self) -> None:
        self._passing.acquire()

    def engine(self, spec: RunSpec, layers: LayerRange) -> Engine:
        """Computes what the gate lets pass."""
        gate, checkpoint = self, open_checkpoint(spec.model.reference)

        class GatedEngine(StageEngine):
            def forward(
                self, microbatch: MicrobatchIndex, x: Tensor, lengths: Lengths = None
            ) -> Tensor:
                gate.wait()
                return super().forward(microbatch, x, lengths)

            def forward_backward(
                self,
                microbatch: MicrobatchIndex,
                x: Tensor,
                labels: Tensor,
                lengths: Lengths = None,
            ) -> LossAndGradient:
                gate.wait()
                return super().forward_backward(microbatch, x, labels, lengths)

        return GatedEngine(
            checkpoint, spec, layers, device=torch.device("cpu"), dtype=torch.float32
        )

    def loading(self, spec: RunSpec, layers: LayerRange) -> Engine:
        """It is there once the gate lets it."""
        self.wait()
        return cpu_engine(spec, layers)


@pytest.fixture
def gate() -> Iterator[Gate]:
    """Closed."""
    gate = Gate(0)
    yield gate
    gate.let_pass(1000)


@pytest.fixture
def late_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a peer that stands still in a step late after a second."""
    monkeypatch.setattr(lateness, "STEP_S", 1.0)
    monkeypatch.setattr(coordinator_link, "ALIVE_EVERY_S", 0.1)


async def idle_of(swarm: LocalSwarm, name: str) -> str:
    """Why a peer is idle, as soon as it is."""
    while True:
        for member in (await swarm.client.status()).members:
            if member.peer_id == name and member.idle:
                return member.idle
        await asyncio.sleep(POLL_S)


async def committed(swarm: LocalSwarm, run_id: RunId, num_steps: int) -> None:
    while True:
        runs = {run.run_id: run for run in (await swarm.client.status()).runs}
        if runs[run_id].committed_steps >= num_steps:
            return
        await asyncio.sleep(POLL_S)


@pytest.mark.usefixtures("late_soon")
async def test_a_replica_that_stops_in_a_step_and_stays_is_done_without(
    job: Job, gate: Gate, quiet_events: QuietEvents, tmp_path: Path
) -> None:
    quiet = losses(await quiet_events(job, LAYERS))
    async with LocalSwarm(tmp_path, LAYERS) as swarm:
        await swarm.add_peer(PeerId("stuck"), "3-6", make_engine=gate.engine)
        gate.let_pass(1)  # its share of the first step
        events = await swarm.train(job.spec, job.samples)
        words = await idle_of(swarm, "stuck")
        assert await names(swarm) == {"peer-0", "peer-1", "stuck"}
        gate.let_pass(1000)
    finished = last_status(events)
    assert finished.phase is RunPhase.FINISHED
    assert {stage.peer_id for stage in finished.assignments} == {"peer-0", "peer-1"}
    assert "delayed step 1" in words
    assert losses(events) == pytest.approx(quiet, rel=RTOL)


async def joined_late(swarm: LocalSwarm, job: Job, gate: Gate, late: Gate) -> RunId:
    """A peer `late` listens to the third step, at which the first stage waits at the gate."""
    await swarm.add_peer(PeerId("first"), "0-3", make_engine=gate.engine)
    await swarm.add_peer(PeerId("second"), "3-6")
    await swarm.all_joined()
    gate.let_pass(2)
    status = await swarm.client.submit(job.spec, job.samples)
    await committed(swarm, status.run_id, 1)
    await swarm.add_peer(PeerId("late"), "3-6", make_engine=late.loading)
    await swarm.all_joined()
    gate.let_pass(2)
    await committed(swarm, status.run_id, 2)
    return status.run_id


@pytest.mark.usefixtures("late_soon")
async def test_a_listener_that_never_acknowledges_is_done_without(
    job: Job,
    gate: Gate,
    quiet_events: QuietEvents,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    write = GradientReducer.write

    async def mute(self: GradientReducer, member: int, message: PieceMessage, send: Send) -> None:
        if not (self.hello.peer_id == "late" and isinstance(message, PieceAck)):
            await write(self, member, message, send)

    monkeypatch.setattr(GradientReducer, "write", mute)
    async with LocalSwarm(tmp_path, []) as swarm:
        run_id = await joined_late(swarm, job, gate, Gate(1000))
        gate.let_pass(1000)
        events = await swarm.watch(run_id)
        words = await idle_of(swarm, "late")
    assert last_status(events).phase is RunPhase.FINISHED
    assert "delayed step 2" in words
    assert losses(events) == losses(await quiet_events(job, LAYERS))


async def test_a_newcomer_that_never_catches_up_is_let_go(
    job: Job,
    gate: Gate,
    quiet_events: QuietEvents,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(lateness, "hand_over_limit_s", lambda _spec, _layers: 0.5)
    late = Gate(0)
    async with LocalSwarm(tmp_path, []) as swarm:
        run_id = await joined_late(swarm, job, gate, late)
        words = await idle_of(swarm, "late")
        gate.let_pass(1000)
        events = await swarm.watch(run_id)
        late.let_pass(1)
    assert last_status(events).phase is RunPhase.FINISHED
    assert "did not copy its stage's state in" in words
    assert losses(events) == losses(await quiet_events(job, LAYERS))
