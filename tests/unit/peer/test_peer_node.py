"""A peer's process against a coordinator driven by hand: joining, orders, leaving, return."""

import asyncio
import errno
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
import pytest
import torch

from swarm_ft.buffers import BufferKey, BufferLimits, BufferRecord, BufferStore, End
from swarm_ft.cli.status_line import StatusLine
from swarm_ft.errors import (
    BadLayers,
    JournalError,
    NotFound,
    OutOfTurn,
    SwarmError,
    Unavailable,
    VersionMismatch,
)
from swarm_ft.identity.roles import Role
from swarm_ft.ids import Attempt, BlockIndex, PeerId, RunId, SampleId, StepNumber
from swarm_ft.peer.buffer_storage import BufferStorage
from swarm_ft.peer.node import PeerNode, PeerOptions
from swarm_ft.protocol.messages.contribution import ContributionRequest
from swarm_ft.protocol.messages.control import (
    STORAGE_KEY_BYTES,
    Assign,
    CommitStep,
    ExportStage,
    FromPeer,
    HeldStage,
    LeaveProgress,
    MemoryShare,
    PeerAlive,
    PeerGoodbye,
    PeerHello,
    PeerLeaving,
    PeerResumed,
    PlanStep,
    ReleaseStage,
    StageAssignment,
    StageExported,
    StageFailed,
    StageReady,
    StayIdle,
    StepReady,
    ToPeer,
)
from swarm_ft.protocol.messages.shard import ShardName
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import RunSpec
from swarm_ft.protocol.spec.training_plan import step_microbatches
from swarm_ft.reach.shaping import Shape
from swarm_ft.stage.checkpoint import open_checkpoint
from swarm_ft.stage.engine import StageEngine
from swarm_ft.transport.base import Channel, MessageStream, call
from swarm_ft.transport.methods import JOIN, LIST_CHUNKS
from tests.doubles.clock import ManualClock
from tests.doubles.directory import Board, StaticDirectory
from tests.doubles.memory_transport import MemoryTransport
from tests.unit.peer.conftest import MakeTrain

RUN = RunId("run")

Stages: TypeAlias = tuple[tuple[str, int, int], ...]
MakeAssign: TypeAlias = Callable[..., Assign]
MakePlan: TypeAlias = Callable[..., PlanStep]
Sent = TypeVar("Sent")


class Joined:
    """One stream of one peer, as the coordinator sees it."""

    def __init__(self, stream: MessageStream[ToPeer, FromPeer], hello: PeerHello) -> None:
        self.hello = hello
        self.over: asyncio.Future[SwarmError | None] = asyncio.get_running_loop().create_future()
        self._stream = stream

    async def send(self, message: ToPeer) -> None:
        await self._stream.send(message)

    async def waits_for(self) -> set[str]:
        """Wait until the peer reports that it waits; return the peers that it waits for."""
        while not (
            isinstance(message := await self._stream.receive(), PeerAlive) and message.waits_for
        ):
            assert message is not None
        return set(message.waits_for)

    async def alive(self) -> PeerAlive:
        """Return the peer's next heartbeat."""
        while not isinstance(message := await self._stream.receive(), PeerAlive):
            assert message is not None
        return message

    async def receive(self, *, ends: bool = True) -> FromPeer | None:
        """Return the peer's next message that is no heartbeat and no request for contributions."""
        while isinstance(message := await self._stream.receive(), PeerAlive | ContributionRequest):
            pass
        if ends and isinstance(message, PeerGoodbye):
            self.end()
        return message

    async def expect(self, kind: type[Sent]) -> Sent:
        """Return the next message, which must be of this kind; see `receive`."""
        message = await self.receive()
        assert isinstance(message, kind), message
        return message

    @property
    def held(self) -> HeldStage:
        """Return the stage of the peer's hello."""
        (stage,) = self.hello.held
        return stage

    def end(self, error: SwarmError | None = None) -> None:
        """Hang up, with a reason or without one."""
        if not self.over.done():
            self.over.set_result(error)

    async def hang_up(self) -> None:
        self.end()


class Swarm:
    """The coordinator, by hand, and the network around it."""

    def __init__(self, shard_dir: Path) -> None:
        self.transport = MemoryTransport()
        self.directory = StaticDirectory(Board(), ManualClock())
        self._joins: dict[str, asyncio.Queue[Joined]] = {}
        self._shard_dir = shard_dir
        self._peers: list[asyncio.Task[None]] = []
        self._closing: list[Callable[[], Awaitable[None]]] = []

    async def open(self) -> None:
        server = await self.transport.serve("coordinator", 1, {JOIN: self._join})
        self._closing.append(server.stop)
        await self.directory.announce(Role.COORDINATOR, "coordinator", server.endpoint)

    async def _join(self, stream: MessageStream[ToPeer, FromPeer]) -> None:
        hello = await stream.receive()
        assert isinstance(hello, PeerHello)
        joined = Joined(stream, hello)
        self._closing.insert(0, joined.hang_up)
        self._queue(hello.peer_id).put_nowait(joined)
        error = await joined.over
        if error is not None:
            raise error

    def _queue(self, name: str) -> asyncio.Queue[Joined]:
        return self._joins.setdefault(name, asyncio.Queue())

    async def joined(self, name: str = "peer") -> Joined:
        """The next time that this peer joins."""
        return await self._queue(name).get()

    async def peer(
        self, name: str = "peer", layers: str = "0-2", **changes: Any
    ) -> tuple[PeerNode, asyncio.Task[None]]:
        """A node at work, and the task it runs in."""
        start, stop = layers.split("-")
        options = PeerOptions(
            peer_id=PeerId(name),
            layers=LayerRange(int(start), int(stop)),
            memory_bytes=1 << 30,
            shard_dir=self._shard_dir,
            **changes,
        )
        node = PeerNode(
            options,
            directory=self.directory,
            transport=self.transport,
            clock=ManualClock(),
            make_engine=cpu_engine,
        )
        server = await self.transport.serve(name, 1, node.handlers())
        await self.directory.announce(Role.PEER, name, server.endpoint)
        running = asyncio.create_task(node.run(server.endpoint))
        self._peers.append(running)
        self._closing.append(server.stop)
        return node, running

    def channel(self, name: str = "peer") -> Channel:
        channel = self.transport.connect(f"{name}:1")
        self._closing.insert(0, channel.close)
        return channel

    async def close(self) -> None:
        for running in self._peers:
            running.cancel()
        await asyncio.gather(*self._peers, return_exceptions=True)
        for close in self._closing:
            await close()


def cpu_engine(spec: RunSpec, layers: LayerRange) -> StageEngine:
    checkpoint = open_checkpoint(spec.model.reference)
    return StageEngine(checkpoint, spec, layers, device=torch.device("cpu"), dtype=torch.float32)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_ft.peer.coordinator_link.MIN_RECONNECT_S", 0.0)
    monkeypatch.setattr("swarm_ft.peer.links.MIN_BACKOFF_S", 0.0)


@pytest.fixture
async def swarm(tmp_path: Path) -> AsyncIterator[Swarm]:
    swarm = Swarm(tmp_path)
    await swarm.open()
    yield swarm
    await swarm.close()


@pytest.fixture(scope="session")
def spec(model_dir: Path, make_train: MakeTrain) -> RunSpec:
    return RunSpec(model=open_checkpoint(str(model_dir)).describe(), train=make_train())


@pytest.fixture
def assign_of(spec: RunSpec) -> MakeAssign:
    def make(
        *,
        run_id: RunId = RUN,
        attempt: int = 1,
        stages: Stages = (("peer", 0, 2),),
        fresh: bool = True,
        committed_steps: int = 0,
    ) -> Assign:
        return Assign(
            run_id=run_id,
            spec=spec,
            attempt=Attempt(attempt),
            assignments=tuple(
                StageAssignment(peer_id=PeerId(p), layers=LayerRange(a, b), endpoint=f"{p}:1")
                for p, a, b in stages
            ),
            committed_steps=committed_steps,
            fresh=fresh,
            spec_digest=spec.digest(),
        )

    return make


@pytest.fixture
def plan_of(spec: RunSpec) -> MakePlan:
    def make(step: int, *, run_id: RunId = RUN, attempt: int = 1) -> PlanStep:
        batches = step_microbatches(spec.train, StepNumber(step))
        tokens = {
            sample: (np.arange(spec.train.seq_length, dtype="<u4") + sample).tobytes()
            for batch in batches
            for sample in batch.samples
        }
        return PlanStep(
            run_id=run_id,
            attempt=Attempt(attempt),
            step=StepNumber(step),
            microbatches=batches,
            tokens=tokens,
            num_targets=len(tokens) * (spec.train.seq_length - 1),
            lengths=(spec.train.seq_length,) * len(tokens),
        )

    return make


def commit_of(step: int, *, attempt: int = 1) -> CommitStep:
    return CommitStep(
        run_id=RUN,
        attempt=Attempt(attempt),
        step=StepNumber(step),
        clip_factor=1.0,
        learning_rate=0.05,
    )


async def ready(joined: Joined, assign: Assign) -> None:
    await joined.send(assign)
    assert isinstance(await joined.receive(), StageReady)


async def exported(swarm: Swarm, assign: Assign, joined: Joined) -> None:
    """A peer with a result of the run."""
    await ready(joined, assign)
    await joined.send(ExportStage(run_id=assign.run_id))
    assert isinstance(await joined.receive(), StageExported)


def result_of(run_id: RunId) -> ShardName:
    return ShardName(run_id=run_id, step=StepNumber(0), layers=LayerRange(0, 2), is_result=True)


async def num_chunks_of(channel: Channel, run_id: RunId) -> int:
    """Count the chunks of the peer's result."""
    chunks = await call(channel, LIST_CHUNKS, result_of(run_id), timeout_s=10.0)
    return len(chunks)


# ---- obeying


async def test_a_peer_offers_itself_and_trains_what_it_is_told(
    swarm: Swarm, assign_of: MakeAssign, plan_of: MakePlan
) -> None:
    await swarm.peer()
    joined = await swarm.joined()
    assert (joined.hello.peer_id, str(joined.hello.layers)) == ("peer", "0-2")
    assert joined.hello.held == ()
    await ready(joined, assign_of())
    losses = []
    for step in range(3):
        await joined.send(plan_of(step))
        done = await joined.expect(StepReady)
        losses.append(done.loss_sum)
        await joined.send(commit_of(step))
    assert len(set(losses)) == 3
    await joined.send(ReleaseStage(run_id=RUN, reason="over"))


async def test_a_peer_that_has_its_stage_says_whom_it_waits_for(
    swarm: Swarm, assign_of: MakeAssign
) -> None:
    await swarm.peer()
    joined = await swarm.joined()
    await joined.send(assign_of(stages=(("peer", 0, 1), ("twin", 0, 1), ("below", 1, 2))))
    assert await joined.waits_for() == {"twin", "below"}


@pytest.mark.parametrize(
    ("lacked", "cut"), [("below", 1), ("twin", 2)], ids=["a gradient", "shares"]
)
async def test_a_peer_in_a_step_says_without_whom_it_cannot_go_on(
    swarm: Swarm,
    assign_of: MakeAssign,
    plan_of: MakePlan,
    monkeypatch: pytest.MonkeyPatch,
    lacked: str,
    cut: int,
) -> None:
    monkeypatch.setattr("swarm_ft.peer.coordinator_link.ALIVE_EVERY_S", 0.01)
    stages = (("peer", 0, cut), (lacked, cut % 2, 2))
    both = []
    for name, start, stop in stages:
        await swarm.peer(name, f"{start}-{stop}")
        both.append(await swarm.joined(name))
    for joined in both:
        await joined.send(assign_of(stages=stages))
    for joined in both:
        await joined.expect(StageReady)
    await both[0].send(plan_of(0))
    assert await both[0].waits_for() == {lacked}, "which has not heard of the step"


async def test_a_peer_that_has_nothing_to_do_stays_and_says_why(
    swarm: Swarm, caplog: pytest.LogCaptureFixture, assign_of: MakeAssign
) -> None:
    await swarm.peer()
    joined = await swarm.joined()
    await joined.send(StayIdle(reason="layers 0-2: outside the model"))
    await ready(joined, assign_of())
    assert "layers 0-2: outside the model; this peer waits" in caplog.text


async def test_a_peer_logs_and_stores_how_much_of_its_memory_counts(
    swarm: Swarm, caplog: pytest.LogCaptureFixture, assign_of: MakeAssign
) -> None:
    node, _ = await swarm.peer(machine_key="secret", machine_memory_bytes=1 << 34)
    caplog.set_level("INFO")
    joined = await swarm.joined()
    assert (joined.hello.machine_key, joined.hello.machine_memory_bytes) == ("secret", 1 << 34)
    shares = [node.memory_share]
    share = MemoryShare(memory_bytes=1 << 29, num_peers=3)
    await joined.send(share)
    await ready(joined, assign_of())
    shares.append(node.memory_share)
    assert "counts 512 MiB of the 1 GiB that this peer lends: 3 peers" in caplog.text
    assert "512 MiB of 1 GiB, 3 peers on this machine" in StatusLine(node, Shape())()
    await joined.send(MemoryShare(memory_bytes=1 << 30, num_peers=1))
    await ready(joined, assign_of(attempt=2))
    assert [*shares, node.memory_share] == [None, share, None]
    assert "counts all of the 1 GiB" in caplog.text


@pytest.mark.parametrize(
    "error",
    [None, Unavailable("gone"), OutOfTurn("no"), JournalError("full"), BadLayers("too many")],
    ids=repr,
)
async def test_a_peer_whose_coordinator_ails_comes_back_with_its_weights(
    swarm: Swarm, assign_of: MakeAssign, plan_of: MakePlan, error: SwarmError | None
) -> None:
    _, running = await swarm.peer()
    joined = await swarm.joined()
    await ready(joined, assign_of())
    await joined.send(plan_of(0))
    await joined.receive()
    await joined.send(commit_of(0))
    await joined.send(plan_of(1))
    await joined.receive()
    joined.end(error)
    again = await swarm.joined()
    assert again.held.committed_steps == 1
    await again.send(commit_of(1))
    await ready(again, assign_of(attempt=2, fresh=False, committed_steps=2))
    assert not running.done()


async def test_a_coordinator_that_is_nowhere_is_waited_for(swarm: Swarm, tmp_path: Path) -> None:
    await swarm.directory.withdraw(Role.COORDINATOR, "coordinator")
    _, running = await swarm.peer()
    await swarm.directory.announce(Role.COORDINATOR, "coordinator", "nobody:1")
    await asyncio.sleep(0)
    await swarm.directory.announce(Role.COORDINATOR, "coordinator", "coordinator:1")
    await swarm.joined()
    assert not running.done()


async def test_a_peer_of_another_version_is_told_so_once_and_leaves(swarm: Swarm) -> None:
    _, running = await swarm.peer()
    joined = await swarm.joined()
    joined.end(VersionMismatch("this coordinator speaks protocol version 9"))
    with pytest.raises(VersionMismatch, match="speaks protocol version 9"):
        await running


async def test_what_makes_no_sense_fails_its_run_and_costs_neither_stream_nor_stage(
    swarm: Swarm, assign_of: MakeAssign, plan_of: MakePlan
) -> None:
    _, running = await swarm.peer()
    joined = await swarm.joined()
    await ready(joined, assign_of())
    nonsense = (
        plan_of(0, run_id=RunId("other")),
        commit_of(7),
        ExportStage(run_id=RunId("other")),
        assign_of(stages=(("somebody-else", 0, 2),)),
    )
    codes = {"out-of-turn", "malformed-message"}
    for message in nonsense:
        await joined.send(message)
        failed = await joined.expect(StageFailed)
        assert failed.run_id == message.run_id
        assert failed.code in codes
    await joined.send(ExportStage(run_id=RunId("../run")))  # no message at all
    joined = await swarm.joined()
    assert joined.hello.held
    await ready(joined, assign_of(attempt=2, fresh=False))
    assert not running.done()


async def test_another_digest_of_the_spec_is_told_to_the_coordinator(
    swarm: Swarm, assign_of: MakeAssign
) -> None:
    await swarm.peer()
    joined = await swarm.joined()
    await joined.send(replace(assign_of(), spec_digest=bytes(16)))
    failed = await joined.expect(StageFailed)
    assert failed.code == "run-mismatch"
    assert "00000000" in failed.message


async def test_a_model_that_is_not_there_is_told_to_the_coordinator(
    swarm: Swarm, assign_of: MakeAssign, spec: RunSpec
) -> None:
    _, running = await swarm.peer()
    joined = await swarm.joined()
    missing_model = replace(spec, model=replace(spec.model, reference="/nowhere/at/all"))
    await joined.send(replace(assign_of(), spec=missing_model, spec_digest=missing_model.digest()))
    failed = await joined.expect(StageFailed)
    assert failed.code == "model-unavailable"
    assert "/nowhere/at/all" not in failed.message
    assert not running.done()


# ---- leaving


async def test_a_peer_that_leaves_says_goodbye(swarm: Swarm, assign_of: MakeAssign) -> None:
    node, running = await swarm.peer()
    joined = await swarm.joined()
    await ready(joined, assign_of())
    node.leave(reason="Ctrl-C")
    assert await joined.expect(PeerLeaving) == PeerLeaving(reason="Ctrl-C")
    goodbye = asyncio.create_task(joined.receive())
    await joined.send(LeaveProgress(may_go=False, words="peer heir takes the state over"))
    done, _ = await asyncio.wait({goodbye}, timeout=0.1)
    assert not done
    await joined.send(LeaveProgress(may_go=True, words=""))
    assert isinstance(await goodbye, PeerGoodbye)
    await running


async def test_a_peer_that_hosts_nothing_leaves_at_once(swarm: Swarm) -> None:
    node, running = await swarm.peer()
    joined = await swarm.joined()
    node.leave()
    await joined.expect(PeerLeaving)
    await joined.expect(PeerGoodbye)
    await running


async def test_a_peer_leaves_after_its_time_whatever_would_be_lost(
    swarm: Swarm, assign_of: MakeAssign
) -> None:
    node, running = await swarm.peer()
    joined = await swarm.joined()
    await ready(joined, assign_of())
    node.leave(timeout_s=0.0)
    await joined.expect(PeerLeaving)
    await joined.expect(PeerGoodbye)
    await running


async def test_a_peer_that_pauses_stays_and_says_so_when_it_joins_anew(
    swarm: Swarm, assign_of: MakeAssign
) -> None:
    node, running = await swarm.peer()
    joined = await swarm.joined()
    await ready(joined, assign_of())
    node.pause("outside of its hours")
    leaving = await joined.expect(PeerLeaving)
    assert leaving == PeerLeaving(stays=True, reason="outside of its hours")
    joined.end(Unavailable("the coordinator starts again"))
    joined = await swarm.joined()
    assert joined.hello.leaving == leaving
    await joined.send(LeaveProgress(may_go=True, words=""))
    node.resume()
    assert isinstance(await joined.receive(), PeerResumed)
    assert not running.done()


async def test_a_peer_stays_until_its_goodbye_was_heard(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm_ft.peer.coordinator_link.GOODBYE_S", 60.0)
    node, running = await swarm.peer()
    joined = await swarm.joined()
    node.leave()
    await joined.expect(PeerLeaving)
    assert isinstance(await joined.receive(ends=False), PeerGoodbye)
    assert await joined.receive() is None, "it said its last, and did not hang up"
    assert not running.done()
    joined.end()
    await running


async def test_a_peer_leaves_although_nobody_hears_its_goodbye(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm_ft.peer.coordinator_link.GOODBYE_S", 0.0)
    await swarm.directory.withdraw(Role.COORDINATOR, "coordinator")
    node, running = await swarm.peer()
    node.leave()
    await running


async def test_a_peer_with_a_result_leaves_once_it_is_collected(
    swarm: Swarm, assign_of: MakeAssign
) -> None:
    node, running = await swarm.peer()
    joined = await swarm.joined()
    await exported(swarm, assign_of(), joined)
    node.leave()
    await joined.expect(PeerLeaving)
    goodbye = asyncio.create_task(joined.receive())
    assert await num_chunks_of(swarm.channel(), RUN) == 1, "its client is still served"
    assert not goodbye.done()
    await joined.send(ReleaseStage(run_id=RUN, reason="collected"))
    assert isinstance(await goodbye, PeerGoodbye)
    await running


async def test_a_second_result_is_waited_for_as_the_first_was(
    swarm: Swarm, assign_of: MakeAssign
) -> None:
    node, running = await swarm.peer()
    joined = await swarm.joined()
    await exported(swarm, assign_of(), joined)
    await joined.send(ReleaseStage(run_id=RUN, reason="collected"))
    second = RunId("second")
    await exported(swarm, assign_of(run_id=second), joined)
    node.leave()
    await joined.expect(PeerLeaving)
    goodbye = asyncio.create_task(joined.receive())
    assert await num_chunks_of(swarm.channel(), second) == 1
    assert not goodbye.done()
    await joined.send(ReleaseStage(run_id=second, reason="collected"))
    assert isinstance(await goodbye, PeerGoodbye)
    await running


async def test_a_release_of_another_run_changes_nothing(
    swarm: Swarm, assign_of: MakeAssign, plan_of: MakePlan
) -> None:
    await swarm.peer()
    joined = await swarm.joined()
    await ready(joined, assign_of())
    await joined.send(ReleaseStage(run_id=RunId("other"), reason="over"))
    await joined.send(plan_of(0))
    assert isinstance(await joined.receive(), StepReady)


# ---- neighbours and clients


@pytest.mark.parametrize("hosts", [False, True], ids=["hosts nothing", "hosts another run"])
async def test_who_asks_for_a_run_that_is_not_here_is_told_so(
    swarm: Swarm, assign_of: MakeAssign, hosts: bool
) -> None:
    await swarm.peer()
    joined = await swarm.joined()
    if hosts:
        await ready(joined, assign_of(run_id=RunId("other")))
    requests = ((LIST_CHUNKS, result_of(RUN), NotFound),)
    for method, message, error in requests:
        stream = swarm.channel().open(method)
        await stream.send(message)
        with pytest.raises(error):
            await stream.receive()


STAGES = (("up", 0, 1), ("down", 1, 2))


@pytest.mark.parametrize("first", ["up", "down"])
async def test_neighbours_meet_whoever_hears_of_the_run_first(
    swarm: Swarm, assign_of: MakeAssign, plan_of: MakePlan, first: str
) -> None:
    peers = {name: await swarm.peer(name, f"{a}-{b}") for name, a, b in STAGES}
    joined = {name: await swarm.joined(name) for name in peers}
    second = "down" if first == "up" else "up"
    await joined[first].send(assign_of(stages=STAGES))
    with pytest.raises(NotFound):  # by now it hosts the run
        await num_chunks_of(swarm.channel(first), RUN)
    await joined[second].send(assign_of(stages=STAGES))
    for name in peers:
        assert isinstance(await joined[name].receive(), StageReady)
    for step in range(3):
        ready_of: dict[str, StepReady] = {}
        for name in peers:
            await joined[name].send(plan_of(step))
        for name in peers:
            ready_of[name] = await joined[name].expect(StepReady)
            await joined[name].send(commit_of(step))
        assert ready_of["down"].loss_sum > 0
        (traffic,) = ready_of["up"].traffic
        num_samples = len(plan_of(step).tokens)
        kind = traffic.key_frames if step < 2 else traffic.delta_frames
        assert kind == num_samples


async def test_a_peer_that_encrypts_hosts_no_run_without_a_key(
    swarm: Swarm, assign_of: MakeAssign
) -> None:
    await swarm.peer(encrypts=True)
    joined = await swarm.joined()
    await joined.send(assign_of())
    failed = await joined.expect(StageFailed)
    assert failed.code == "run-mismatch"
    assert "expected a key from the coordinator, got none" in failed.message
    own = replace(assign_of(attempt=2), storage_key=bytes(STORAGE_KEY_BYTES))
    await joined.send(own)  # it would write its stage's snapshots in plain
    assert (
        "expected a key from the coordinator, got none"
        in (await joined.expect(StageFailed)).message
    )
    (stage,) = own.assignments
    keys = {stage.layers: bytes(STORAGE_KEY_BYTES)}
    await joined.send(replace(own, attempt=Attempt(3), stage_keys=keys))
    await joined.expect(StageReady)


async def test_a_peer_says_whose_buffers_it_keeps_and_lets_go_of_them(
    swarm: Swarm, tmp_path: Path, spec: RunSpec, assign_of: MakeAssign
) -> None:
    place = BufferStorage(limits=BufferLimits(disk_bytes=1 << 20), directory=tmp_path / "buffers")
    store = place.open(RUN, spec)
    key = BufferKey(RUN, BlockIndex(2), End.SENT, SampleId(0))
    store.put(key, BufferRecord(bytes(16), 1, 1, b"payload"))
    store.close()
    await swarm.peer(buffers=place)
    joined = await swarm.joined()
    assert joined.hello.kept_runs == (RUN,)
    await joined.send(ReleaseStage(run_id=RunId("another"), reason="over", is_over=True))
    await joined.send(ReleaseStage(run_id=RUN, reason="over", is_over=True))
    await joined.send(assign_of())
    await joined.expect(StageReady)  # the earlier messages are processed
    joined.end()
    assert (await swarm.joined()).hello.kept_runs == ()
    assert place.runs() == set()


async def test_a_peer_that_is_assigned_again_and_again_ends_where_it_was_last(
    swarm: Swarm, assign_of: MakeAssign, plan_of: MakePlan
) -> None:
    await swarm.peer()
    joined = await swarm.joined()
    for attempt in range(1, 6):
        await joined.send(assign_of(attempt=attempt))
    message: Any = await joined.receive()
    while message.attempt != 5:
        message = await joined.receive()
    assert isinstance(message, StageReady)
    await joined.send(plan_of(0, attempt=5))
    assert isinstance(await joined.receive(), StepReady)


# ---- several runs


OTHER = RunId("other")


async def test_a_peer_with_room_works_for_two_runs_and_keeps_each_apart(
    swarm: Swarm, assign_of: MakeAssign, plan_of: MakePlan
) -> None:
    node, _ = await swarm.peer(max_extra_stages=1)
    joined = await swarm.joined()
    assert joined.hello.max_beside == 1
    losses: dict[RunId, list[float]] = {RUN: [], OTHER: []}
    for run_id in losses:
        await ready(joined, assign_of(run_id=run_id))
    for step in range(3):
        for run_id in losses:
            await joined.send(plan_of(step, run_id=run_id))
        for _ in losses:
            done = await joined.expect(StepReady)
            losses[done.run_id].append(done.loss_sum)
        for run_id in losses:
            await joined.send(replace(commit_of(step), run_id=run_id))
    assert len(set(losses[RUN])) == 3
    assert losses[RUN] == losses[OTHER]
    assert set(node.buffers) == {RUN, OTHER}
    assert {one.run_id for one in node.current_work} == {RUN, OTHER}
    joined.end(Unavailable("a test"))
    again = await swarm.joined()
    assert {(stage.run_id, stage.committed_steps) for stage in again.hello.held} == {
        (RUN, 3),
        (OTHER, 3),
    }
    await again.send(ReleaseStage(run_id=RUN, reason="over"))
    await ready(again, assign_of(run_id=OTHER, attempt=2, committed_steps=3, fresh=False))
    assert set(node.buffers) == {OTHER}


async def test_a_peer_tells_of_each_run_how_far_it_is(swarm: Swarm, assign_of: MakeAssign) -> None:
    await swarm.peer(max_extra_stages=1)
    joined = await swarm.joined()
    for run_id, below in ((RUN, "below"), (OTHER, "deeper")):
        await joined.send(assign_of(run_id=run_id, stages=(("peer", 0, 1), (below, 1, 2))))
    results: dict[str | None, set[str]] = {}
    while results != {RUN: {"below"}, OTHER: {"deeper"}}:
        alive = await joined.alive()
        results[alive.run_id] = set(alive.waits_for)


async def test_a_peer_without_room_lets_go_of_what_it_has_for_another_run(
    swarm: Swarm, assign_of: MakeAssign
) -> None:
    node, _ = await swarm.peer()
    joined = await swarm.joined()
    for run_id in (RUN, OTHER):
        await ready(joined, assign_of(run_id=run_id))
    assert set(node.buffers) == {OTHER}


# ---- what a message of one run raises


OTHER = RunId("other")


@pytest.fixture
async def two_runs(swarm: Swarm, assign_of: MakeAssign) -> Joined:
    """A peer that hosts a stage of each of two runs."""
    await swarm.peer(max_extra_stages=1)
    joined = await swarm.joined()
    await ready(joined, assign_of())
    await ready(joined, assign_of(run_id=OTHER))
    return joined


async def trains_on(joined: Joined, plan: PlanStep) -> None:
    """A step of the other run, over the same stream."""
    await joined.send(plan)
    assert (await joined.expect(StepReady)).run_id == plan.run_id


def _full_disk(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "/home/ann/secret/place")


def _bug(*_: object, **__: object) -> None:
    raise ZeroDivisionError("a detail of this machine's")


@pytest.mark.parametrize(
    ("raises", "code"), [(_full_disk, "unavailable"), (_bug, "internal")], ids=["disk", "bug"]
)
async def test_an_export_that_raises_is_the_failure_of_its_run_alone(
    two_runs: Joined,
    plan_of: MakePlan,
    monkeypatch: pytest.MonkeyPatch,
    raises: Callable[..., None],
    code: str,
) -> None:
    monkeypatch.setattr("swarm_ft.peer.host.offer", raises)
    await two_runs.send(ExportStage(run_id=RUN))
    failed = await two_runs.expect(StageFailed)
    assert (failed.run_id, failed.attempt, failed.code) == (RUN, 1, code)
    assert "secret" not in failed.message
    assert "detail of" not in failed.message
    await trains_on(two_runs, plan_of(0, run_id=OTHER))


async def test_a_commit_that_raises_fails_its_run_and_drops_weights_that_may_be_half_changed(
    two_runs: Joined,
    assign_of: MakeAssign,
    plan_of: MakePlan,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await trains_on(two_runs, plan_of(0))
    with monkeypatch.context() as broken:
        broken.setattr(StageEngine, "apply", _bug)
        await two_runs.send(commit_of(0))
        failed = await two_runs.expect(StageFailed)
    assert (failed.run_id, failed.code) == (RUN, "internal")
    await trains_on(two_runs, plan_of(0, run_id=OTHER))
    await two_runs.send(assign_of(attempt=2, fresh=False, committed_steps=1))
    failed = await two_runs.expect(StageFailed)
    assert (failed.attempt, failed.code) == (2, "out-of-turn"), "it has not what it had"
    await ready(two_runs, assign_of(attempt=3))


async def test_a_run_whose_files_cannot_be_deleted_leaves_its_place(
    two_runs: Joined, assign_of: MakeAssign, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(BufferStore, "close", _full_disk)
        await two_runs.send(ReleaseStage(run_id=RUN, reason="over"))
        await ready(two_runs, assign_of(run_id=RunId("third")))


async def test_a_name_at_the_bound_can_be_exported(swarm: Swarm, assign_of: MakeAssign) -> None:
    run_id = RunId("\N{OCTOPUS}" * 16)
    await swarm.peer()
    joined = await swarm.joined()
    await exported(swarm, assign_of(run_id=run_id), joined)
    assert await num_chunks_of(swarm.channel(), run_id)
