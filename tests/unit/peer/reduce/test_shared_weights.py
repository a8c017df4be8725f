"""Stages that hold copies of one weight add up their gradients of it, to the same bits."""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm_ft.errors import NonFinite, Unavailable
from swarm_ft.ids import Attempt, MicrobatchIndex, PeerId, RunId, StepNumber
from swarm_ft.peer.connections import Connections
from swarm_ft.peer.context import PeerContext
from swarm_ft.peer.links import Links
from swarm_ft.peer.reduce.all_reduce import ReduceGroup, reduce_groups, synchronise
from swarm_ft.peer.state.stage_state import StageState
from swarm_ft.peer.timeline import Timeline
from swarm_ft.protocol.messages.control import Assign, Stage, StageAssignment
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import RunSpec, TrainSpec
from swarm_ft.stage.checkpoint import open_checkpoint
from swarm_ft.stage.engine import StageEngine
from swarm_ft.transport.base import Server, Transport
from swarm_ft.transport.methods import LINK
from tests.doubles.clock import ManualClock
from tests.doubles.directory import Board, StaticDirectory
from tests.doubles.faults import FaultyTransport
from tests.doubles.memory_transport import MemoryTransport

RUN, STEP, BATCH = RunId("run"), StepNumber(3), MicrobatchIndex(0)
FIRST, LAST = LayerRange(0, 1), LayerRange(1, 2)
SHAPES = [(1, 1), (2, 1), (1, 2), (3, 2)]


@pytest.fixture(autouse=True)
def no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_ft.peer.links.MIN_BACKOFF_S", 0.0)


@given(counts=st.lists(st.integers(1, 7), min_size=2, max_size=5))
def test_everybody_is_in_one_group_with_one_giver_of_each_stage(counts: list[int]) -> None:
    stages = [
        Stage(layers=LayerRange(n, n + 1), peers=tuple(PeerId(f"{n}-{i}") for i in range(count)))
        for n, count in enumerate(counts)
    ]
    groups = reduce_groups(stages)
    assert len(groups) == min(counts)
    members = [peer for group in groups for peer in group.members]
    assert sorted(members) == sorted(peer for stage in stages for peer in stage.peers)
    for group in groups:
        assert [giver.partition("-")[0] for giver in group.givers] == [
            str(n) for n in range(len(stages))
        ]
    for stage in stages:  # evenly
        sizes = [len(set(stage.peers) & set(group.members)) for group in groups]
        assert max(sizes) - min(sizes) <= 1


def test_who_listens_hears_givers_alone() -> None:
    a, b, c, d = (PeerId(name) for name in "abcd")
    group = ReduceGroup(givers=(a, b), listeners=(c, d))
    assert group.channel_peers(a) == (b, c, d)
    assert group.channel_peers(c) == group.channel_peers(d) == (a, b)


def test_of_no_stages_there_are_no_groups() -> None:
    assert reduce_groups(()) == ()


@pytest.fixture
def spec(model_dir: Path, make_train: Callable[..., TrainSpec]) -> RunSpec:
    train = make_train(sync_tied_embeddings=True, dp_codec="q4")
    return RunSpec(model=open_checkpoint(str(model_dir)).describe(), train=train)


def loaded(spec: RunSpec, layers: LayerRange) -> StageEngine:
    checkpoint, device = open_checkpoint(spec.model.reference), torch.device("cpu")
    engine = StageEngine(checkpoint, spec, layers, device=device, dtype=torch.float32)
    engine.load()
    engine.begin_step(STEP, 10)
    return engine


def engines(spec: RunSpec) -> tuple[StageEngine, StageEngine]:
    """Both stages, with the gradients of a microbatch."""
    first, last = loaded(spec, FIRST), loaded(spec, LAST)
    tokens = torch.arange(2 * spec.train.seq_length).reshape(2, -1) % spec.model.vocab_size
    back = last.forward_backward(BATCH, first.forward(BATCH, tokens), tokens).input_gradient
    assert back is not None
    first.backward(BATCH, back)
    for engine in (first, last):
        engine.weight_gradients(BATCH)
    return first, last


class End:
    """A peer of the first or of the last stage in one attempt."""

    def __init__(self, peer: PeerId, assign: Assign, engine: StageEngine, net: "Net") -> None:
        self.engine = engine
        sent: list[object] = []
        context = PeerContext(
            peer_id=peer,
            directory=net.directory,
            transport=net.dialling,
            clock=ManualClock(),
            links=net.links[peer],
            compute=net.pool,
            codecs=net.pool,
            send_to_coordinator=sent.append,
            timeline=Timeline(ManualClock(), sent.append),
            memory_bytes=1 << 30,
        )
        state = StageState(context, RUN, assign.spec, lambda _spec, _layers: engine)
        self.connections = Connections(
            context,
            assign,
            state,
            num_values=0,
            deliver=lambda _key, _value: None,
            on_consumed=lambda _key: None,
        )
        reducer, group = self.connections.shared_reducer, self.connections.shared_group
        assert reducer is not None
        assert group is not None
        self.reducer, self.group = reducer, group

    async def sum(self, pool: Executor) -> None:
        await synchronise(self.reducer, self.group, STEP, self.engine, pool)


class Net:
    """The network on which the stages meet."""

    def __init__(self, pool: Executor, transport: Transport, dialling: Transport) -> None:
        self.pool = pool
        self.transport = transport
        self.dialling = dialling
        self.directory = StaticDirectory(Board(), ManualClock())
        self.links: dict[PeerId, Links] = {}
        self._servers: list[Server] = []

    async def serve(self, peer: PeerId) -> str:
        """Serve this peer and return its endpoint."""
        links = self.links[peer] = Links(
            peer, transport=self.dialling, clock=ManualClock(), rng=Random(0)
        )
        self._servers.append(await self.transport.serve("127.0.0.1", 0, {LINK: links.answer}))
        return self._servers[-1].endpoint

    async def close(self) -> None:
        for links in self.links.values():
            await links.close()
        for server in self._servers:
            await server.stop()


async def assign_of(spec: RunSpec, num_firsts: int, num_lasts: int, net: Net) -> Assign:
    firsts = [(PeerId(f"first-{i}"), FIRST) for i in range(num_firsts)]
    lasts = [(PeerId(f"last-{i}"), LAST) for i in range(num_lasts)]
    return Assign(
        run_id=RUN,
        spec=spec,
        attempt=Attempt(1),
        assignments=tuple(
            [
                StageAssignment(peer_id=p, layers=r, endpoint=await net.serve(p))
                for p, r in (*firsts, *lasts)
            ]
        ),
        committed_steps=STEP,
        fresh=False,
        spec_digest=spec.digest(),
    )


@asynccontextmanager
async def at_work(spec: RunSpec, shape: tuple[int, int], net: Net) -> AsyncIterator[list[End]]:
    """All of them, each with an engine of its own."""
    assign = await assign_of(spec, *shape, net)
    ends = [
        End(stage.peer_id, assign, engines(spec)[stage.layers == LAST], net)
        for stage in assign.assignments
    ]
    running = [asyncio.create_task(end.reducer.run()) for end in ends]
    try:
        yield ends
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await net.close()


def bits(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.detach().clone().view(torch.int32)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
async def test_all_replicas_of_both_ends_get_the_same_bits(
    spec: RunSpec, transport: Transport, pool: Executor, shape: tuple[int, int]
) -> None:
    first, last = (engine.shared_gradient() for engine in engines(spec))
    assert bool((first != 0).any())
    assert bool((last != 0).any())
    async with at_work(spec, shape, Net(pool, transport, transport)) as ends:
        await asyncio.gather(*(end.sum(pool) for end in ends))
    for end in ends:
        assert torch.equal(bits(end.engine.shared_gradient()), bits(first + last))


async def test_an_exchange_that_breaks_goes_on_over_the_next_stream(
    spec: RunSpec, pool: Executor
) -> None:
    first, last = (engine.shared_gradient() for engine in engines(spec))
    inner = MemoryTransport()
    faulty = FaultyTransport(inner, cut_sends={LINK: [3]}, cut_receives={LINK: [5]})
    async with at_work(spec, (1, 1), Net(pool, inner, faulty)) as ends:
        await asyncio.gather(*(end.sum(pool) for end in ends))
    assert faulty.num_cuts == 2
    for end in ends:
        assert torch.equal(end.engine.shared_gradient(), first + last)


async def test_a_gradient_that_is_not_finite_is_told_at_its_own_end(
    spec: RunSpec, pool: Executor
) -> None:
    net = Net(pool, inner := MemoryTransport(), inner)
    async with at_work(spec, (2, 1), net) as ends:
        last = ends[-1]
        spoiled = last.engine.shared_gradient()
        spoiled[3] = float("inf")
        last.engine.set_shared_gradient(spoiled)
        with pytest.raises(NonFinite, match="inf or NaN"):
            await last.sum(pool)


async def test_a_partner_that_is_nowhere_is_given_up(
    spec: RunSpec, pool: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm_ft.peer.links.UNREACHABLE_AFTER_S", 0.0)
    net = Net(pool, inner := MemoryTransport(), inner)
    assign = await assign_of(spec, 1, 1, net)
    end = End(PeerId("first-0"), assign, engines(spec)[0], net)
    await net.close()
    with pytest.raises(ExceptionGroup) as raised:
        await end.reducer.run()
    assert raised.group_contains(Unavailable, match="peer last-0 cannot be reached")


async def test_partners_and_replicas_are_summed_with_and_nobody_else(
    spec: RunSpec, pool: Executor
) -> None:
    net = Net(pool, inner := MemoryTransport(), inner)
    assign = await assign_of(spec, 2, 2, net)
    connections = End(PeerId("first-0"), assign, engines(spec)[0], net).connections
    assert connections.shared_group == ReduceGroup((PeerId("first-0"), PeerId("last-0")), ()), (
        "the others have their own"
    )
    assert connections.shared_reducer is not None
    assert connections.shared_reducer.missing == ("last-0",)
    assert connections.shared_reducer.hello.layers == spec.model.layers
    assert connections.reducer is not None
    assert connections.reducer.hello.layers == FIRST
    await net.close()
