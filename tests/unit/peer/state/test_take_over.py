"""A newcomer fetches its stage's state and applies the sums of the meantime: it ends with the bits
that the source has, whatever comes in between."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from swarm_ft.codec.gradient_pieces import PieceCodec
from swarm_ft.codec.spec import parse_dp_spec
from swarm_ft.digest import file_stem
from swarm_ft.discovery.directory import Directory
from swarm_ft.errors import OutOfTurn, Unavailable
from swarm_ft.identity.roles import Role
from swarm_ft.ids import Attempt, PeerId, RunId, StepNumber
from swarm_ft.net.transfer import serve_chunk_list, serve_chunks
from swarm_ft.peer.context import PeerContext
from swarm_ft.peer.reduce.gradient_coder import EncodedSum
from swarm_ft.peer.state.exchange import StateExchange
from swarm_ft.peer.state.learner import Backlog, CatchUpTransfer
from swarm_ft.peer.state.stage_state import StageState
from swarm_ft.peer.timeline import Timeline
from swarm_ft.protocol.messages.control import (
    Assign,
    CatchUp,
    CaughtUp,
    CommitStep,
    FromPeer,
    Learner,
    StageOffered,
)
from swarm_ft.protocol.messages.shard import ShardName
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import RunSpec
from swarm_ft.transport.base import Transport
from swarm_ft.transport.methods import FETCH_CHUNKS, LIST_CHUNKS
from tests.doubles.clock import ManualClock
from tests.doubles.directory import Board, StaticDirectory
from tests.doubles.faults import FaultyTransport
from tests.doubles.memory_transport import MemoryTransport
from tests.simulation.engine import TinyEngine
from tests.states import weights_digest
from tests.unit.peer.conftest import MakeSpec, links_of

RUN, LAYERS, BEGAN = RunId("run"), LayerRange(1, 3), StepNumber(2)
CODEC = PieceCodec(parse_dp_spec("none"))
NAME = ShardName(run_id=RUN, step=BEGAN, layers=LAYERS)


def commit_of(step: int, attempt: int = 1) -> CommitStep:
    return CommitStep(
        run_id=RUN,
        attempt=Attempt(attempt),
        step=StepNumber(step),
        clip_factor=0.5,
        learning_rate=step / 8,
    )


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def gradient_of(step: int, num_values: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 9, (num_values,), generator=generator).float()


class Side:
    """One of the two peers."""

    def __init__(
        self, name: str, spec: RunSpec, folder: Path, directory: Directory, transport: Transport
    ) -> None:
        folder.mkdir()
        self.sent: asyncio.Queue[FromPeer] = asyncio.Queue()
        self.pools = ThreadPoolExecutor(1), ThreadPoolExecutor(2)
        self.context = PeerContext(
            peer_id=PeerId(name),
            directory=directory,
            transport=transport,
            clock=ManualClock(),
            links=links_of(name, transport),
            compute=self.pools[0],
            codecs=self.pools[1],
            send_to_coordinator=self.sent.put_nowait,
            timeline=Timeline(ManualClock(), self.sent.put_nowait),
            memory_bytes=1 << 30,
        )
        self.state = StageState(self.context, RUN, spec, TinyEngine)
        self.folder = folder

    def weights(self) -> bytes:
        return weights_digest(self.state.engine)


class Scene:
    """A source with two steps, which offers its state, and a newcomer that is to take it."""

    def __init__(self, spec: RunSpec, folder: Path, lost_lists: Iterable[int] = ()) -> None:
        self.spec = spec
        self.released = asyncio.Event()
        self.inner = MemoryTransport()
        transport = FaultyTransport(
            self.inner,
            waits={FETCH_CHUNKS: self.released.wait},
            cut_receives={LIST_CHUNKS: lost_lists},
        )
        self.directory = StaticDirectory(Board(), ManualClock())
        self.source = Side("source", spec, folder / "source", self.directory, self.inner)
        self.newcomer = Side("newcomer", spec, folder / "newcomer", self.directory, transport)

    async def begin(self) -> None:
        await self.source.state.load(LAYERS)
        self.num_values = self.source.state.engine.num_values
        for step in range(BEGAN):
            await self.train(step)
        await self.offer()
        offers = self.source.context.offers
        self.server = await self.inner.serve(
            "source",
            1,
            {
                FETCH_CHUNKS: partial(serve_chunks, offers=offers),
                LIST_CHUNKS: partial(serve_chunk_list, offers=offers),
            },
        )
        await self.directory.announce(Role.PEER, "source", self.server.endpoint)
        self.catching_up = CatchUpTransfer(
            self.newcomer.context,
            self.newcomer.state,
            self.newcomer.folder,
            NAME,
            self.assign(),
        )

    async def offer(self) -> None:
        """Let the source offer its state and report it."""
        side = self.source
        exchange = StateExchange(side.context, side.state, side.folder, self.spec.digest(), None)
        newcomer = self.newcomer.context.peer_id
        learner = Learner(peer_id=newcomer, step=BEGAN, sources=(side.context.peer_id,))
        await exchange.offer(replace(self.assign(), learners=(learner,)), LAYERS)
        offered = await side.sent.get()
        assert isinstance(offered, StageOffered)
        self.offered = offered

    def assign(
        self, *, attempt: int = 1, committed_steps: int = BEGAN, last_attempt: int = 1
    ) -> Assign:
        return Assign(
            run_id=RUN,
            spec=self.spec,
            attempt=Attempt(attempt),
            assignments=(),
            committed_steps=committed_steps,
            fresh=False,
            spec_digest=self.spec.digest(),
            last_attempt=Attempt(last_attempt),
        )

    async def train(self, step: int, attempt: int = 1) -> None:
        """Train a step at the source alone."""
        await self.source.state.apply_sum(
            commit_of(step, attempt), gradient_of(step, self.num_values)
        )

    def sum(self, step: int, attempt: int = 1) -> None:
        """Let the newcomer receive the sum."""
        encoded = CODEC.encode(gradient_of(step, self.num_values)).tensor
        self.catching_up.store_sum(
            Attempt(attempt), StepNumber(step), EncodedSum(((self.num_values, encoded),))
        )

    async def receive_frames(self, step: int, attempt: int = 1) -> None:
        """A step that is committed."""
        await self.train(step, attempt)
        self.sum(step, attempt)
        await self.catching_up.commit(commit_of(step, attempt))

    def take(self, attempt: int = 1) -> None:
        take = CatchUp(
            run_id=RUN,
            attempt=Attempt(attempt),
            digest=self.offered.digest,
            total_bytes=self.offered.total_bytes,
            sources=(PeerId("source"),),
        )
        self.catching_up.start_fetch(take)

    async def taken(self, attempt: int = 1) -> None:
        message = await self.newcomer.sent.get()
        assert isinstance(message, CaughtUp)
        assert message.attempt == attempt
        assert message.state_bytes > 0
        assert message.proof == self.offered.proofs[self.newcomer.context.peer_id]
        assert message.proof != self.offered.digest

    def assert_equal(self, committed_steps: int, last_attempt: int = 1) -> None:
        for side in (self.source, self.newcomer):
            mine = side.state.committed_steps, side.state.last_attempt
            assert mine == (committed_steps, last_attempt)
        assert self.newcomer.weights() == self.source.weights()


@asynccontextmanager
async def played(scene: Scene) -> AsyncIterator[Scene]:
    await scene.begin()
    yield scene
    await scene.server.stop()
    for side in (scene.source, scene.newcomer):
        for pool in side.pools:
            pool.shutdown()


@pytest.fixture(autouse=True)
def no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_ft.peer.state.learner.RETRY_S", 0.0)


@pytest.fixture
async def scene(make_spec: MakeSpec, tmp_path: Path) -> AsyncIterator[Scene]:
    async with played(Scene(make_spec(dp_codec="none"), tmp_path)) as scene:
        yield scene


async def test_a_call_that_breaks_costs_neither_the_attempt_nor_the_take_over(
    make_spec: MakeSpec, tmp_path: Path
) -> None:
    lost = Scene(make_spec(dp_codec="none"), tmp_path, lost_lists=(1, 2))
    async with played(lost) as scene:
        scene.released.set()
        scene.take()
        await scene.catching_up.run()
        await scene.taken()
        scene.assert_equal(BEGAN)


async def test_what_was_heard_while_the_state_came_is_applied_to_it_in_order(scene: Scene) -> None:
    running = asyncio.create_task(scene.catching_up.run())
    scene.take()
    for step in (2, 3, 4):
        await scene.receive_frames(step)
    assert not scene.catching_up.has_caught_up
    scene.released.set()
    await running
    await scene.taken()
    scene.assert_equal(5)


async def test_who_has_caught_up_applies_each_step_as_it_comes(scene: Scene) -> None:
    scene.released.set()
    scene.take()
    await scene.catching_up.run()
    await scene.taken()
    for step in (2, 3):
        await scene.receive_frames(step)
        scene.assert_equal(step + 1)


async def test_the_next_attempt_goes_on_with_what_was_heard_and_fetched(scene: Scene) -> None:
    running = asyncio.create_task(scene.catching_up.run())
    scene.take()
    await scene.receive_frames(2)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    following = scene.assign(attempt=2, committed_steps=3)
    assert scene.catching_up.can_resume(following, NAME)
    scene.catching_up.begin_attempt(Attempt(2))
    await scene.receive_frames(3, attempt=2)
    scene.take(attempt=1)  # of an attempt that is over
    scene.take(attempt=2)
    scene.released.set()
    await scene.catching_up.run()
    await scene.taken(attempt=2)
    scene.assert_equal(4, last_attempt=2)


async def test_who_has_caught_up_says_so_in_every_attempt_and_fetches_nothing_again(
    scene: Scene,
) -> None:
    scene.released.set()
    scene.take()
    await scene.catching_up.run()
    await scene.taken()
    await scene.server.stop()
    scene.catching_up.begin_attempt(Attempt(2))
    running = asyncio.create_task(scene.catching_up.run())
    await asyncio.sleep(0)
    assert scene.newcomer.sent.empty(), "nobody could check it yet"
    scene.take(attempt=2)
    await running
    await scene.taken(attempt=2)
    scene.assert_equal(BEGAN)


async def test_a_sum_whose_step_did_not_commit_is_forgotten(scene: Scene) -> None:
    scene.sum(2, attempt=1)
    scene.catching_up.begin_attempt(Attempt(2))
    assert not scene.catching_up.awaits_commit(commit_of(2, attempt=1))
    with pytest.raises(OutOfTurn, match="commit of step 2, sums of 2 steps are here"):
        await scene.catching_up.commit(commit_of(2, attempt=1))
    await scene.receive_frames(2, attempt=2)
    scene.released.set()
    scene.take(attempt=2)
    await scene.catching_up.run()
    scene.assert_equal(3, last_attempt=2)


async def test_a_lost_step_or_another_history_is_nothing_to_go_on_with(scene: Scene) -> None:
    await scene.receive_frames(2)
    goes_on = scene.catching_up.can_resume
    assert goes_on(scene.assign(attempt=2, committed_steps=3), NAME)
    assert not goes_on(scene.assign(attempt=2, committed_steps=4), NAME)
    assert not goes_on(scene.assign(attempt=3, committed_steps=3, last_attempt=2), NAME)
    other = ShardName(run_id=RUN, step=StepNumber(3), layers=LAYERS)
    assert not goes_on(scene.assign(attempt=2, committed_steps=3), other)


async def test_a_source_that_is_gone_costs_the_attempt_and_not_what_was_heard(scene: Scene) -> None:
    await scene.directory.withdraw(Role.PEER, "source")
    await scene.receive_frames(2)
    scene.take()
    with pytest.raises(ExceptionGroup) as raised:
        await scene.catching_up.run()
    assert raised.group_contains(Unavailable, match="no source has a list")

    await scene.directory.announce(Role.PEER, "source", scene.server.endpoint)
    scene.released.set()
    scene.catching_up.begin_attempt(Attempt(2))
    scene.take(attempt=2)
    await scene.catching_up.run()
    await scene.taken(attempt=2)
    scene.assert_equal(3)


async def test_what_was_heard_does_not_lie_about_when_nobody_wants_it(
    make_spec: MakeSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm_ft.peer.state.learner.Backlog", partial(Backlog, memory_bytes=0))
    async with played(Scene(make_spec(dp_codec="none"), tmp_path)) as scene:
        await scene.receive_frames(2)
        assert names_in(scene.newcomer.folder) == [f"heard-{file_stem(RUN)}-1-3-2.sum"]
        scene.catching_up.close()
        assert names_in(scene.newcomer.folder) == []
