"""First and last stage add up the gradients of the tied embeddings, to the same bits."""

import asyncio
from collections import Counter
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
from swarm_ft.peer.attempt import Connections
from swarm_ft.peer.context import PeerContext
from swarm_ft.peer.links import Links
from swarm_ft.peer.reduce.all_reduce import synchronise, tied_pairs
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
counts = st.integers(1, 7)


@pytest.fixture(autouse=True)
def no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_ft.peer.links.MIN_BACKOFF_S", 0.0)


@given(num_firsts=counts, num_lasts=counts)
def test_everybody_has_a_partner_and_no_pair_is_there_twice(
    num_firsts: int, num_lasts: int
) -> None:
    first = Stage(layers=FIRST, peers=tuple(PeerId(f"first-{i}") for i in range(num_firsts)))
    last = Stage(layers=LAST, peers=tuple(PeerId(f"last-{i}") for i in range(num_lasts)))
    pairs = tied_pairs(first, last)
    assert len(set(pairs)) == len(pairs) == max(num_firsts, num_lasts)
    for stage, side in ((first, 0), (last, 1)):
        partners = Counter(pair[side] for pair in pairs)
        assert partners.keys() == set(stage.peers)
        assert max(partners.values()) - min(partners.values()) <= 1


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
        said: list[object] = []
        context = PeerContext(
            peer_id=peer,
            directory=net.directory,
            transport=net.dialling,
            clock=ManualClock(),
            links=net.links[peer],
            compute=net.pool,
            codecs=net.pool,
            say=said.append,
            timeline=Timeline(ManualClock(), said.append),
            memory_bytes=1 << 30,
        )
        state = StageState(context, RUN, assign.spec, lambda _spec, _layers: engine)
        self.connections = Connections(
            context,
            assign,
            state,
            num_values=0,
            deliver=lambda _key, _value: None,
            taken=lambda _key: None,
        )
        self.pairs = self.connections.tied.values()


class Net:
    """Where they meet."""

    def __init__(self, pool: Executor, transport: Transport, dialling: Transport) -> None:
        self.pool = pool
        self.transport = transport
        self.dialling = dialling
        self.directory = StaticDirectory(Board(), ManualClock())
        self.links: dict[PeerId, Links] = {}
        self._servers: list[Server] = []

    async def serve(self, peer: PeerId) -> str:
        """Where this peer is reached from now on."""
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
    running = [asyncio.create_task(pair.run()) for end in ends for pair in end.pairs]
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
    first, last = (engine.tied_gradient() for engine in engines(spec))
    assert bool((first != 0).any())
    assert bool((last != 0).any())
    async with at_work(spec, shape, Net(pool, transport, transport)) as ends:
        await asyncio.gather(*(synchronise(e.pairs, STEP, e.engine, pool) for e in ends))
    for end in ends:
        assert torch.equal(bits(end.engine.tied_gradient()), bits(first + last))


async def test_an_exchange_that_breaks_goes_on_over_the_next_stream(
    spec: RunSpec, pool: Executor
) -> None:
    first, last = (engine.tied_gradient() for engine in engines(spec))
    inner = MemoryTransport()
    faulty = FaultyTransport(inner, cut_sends={LINK: [3]}, cut_receives={LINK: [5]})
    async with at_work(spec, (1, 1), Net(pool, inner, faulty)) as ends:
        await asyncio.gather(*(synchronise(e.pairs, STEP, e.engine, pool) for e in ends))
    assert faulty.num_cuts == 2
    for end in ends:
        assert torch.equal(end.engine.tied_gradient(), first + last)


async def test_a_gradient_that_is_not_finite_is_told_at_its_own_end(
    spec: RunSpec, pool: Executor
) -> None:
    net = Net(pool, inner := MemoryTransport(), inner)
    async with at_work(spec, (2, 1), net) as ends:
        last = ends[-1]
        spoiled = last.engine.tied_gradient().detach().clone()
        spoiled[3, 3] = float("inf")
        last.engine.set_tied_gradient(spoiled)
        with pytest.raises(ExceptionGroup) as raised:
            await synchronise(last.pairs, STEP, last.engine, pool)
        assert raised.group_contains(NonFinite, match="inf or NaN")


async def test_a_partner_that_is_nowhere_is_given_up(
    spec: RunSpec, pool: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm_ft.peer.links.UNREACHABLE_AFTER_S", 0.0)
    net = Net(pool, inner := MemoryTransport(), inner)
    assign = await assign_of(spec, 1, 1, net)
    end = End(PeerId("first-0"), assign, engines(spec)[0], net)
    (pair,) = end.pairs
    await net.close()
    with pytest.raises(ExceptionGroup) as raised:
        await pair.run()
    assert raised.group_contains(Unavailable, match="peer last-0 cannot be reached")


async def test_partners_and_replicas_are_summed_with_and_nobody_else(
    spec: RunSpec, pool: Executor
) -> None:
    net = Net(pool, inner := MemoryTransport(), inner)
    assign = await assign_of(spec, 2, 2, net)
    connections = End(PeerId("first-0"), assign, engines(spec)[0], net).connections
    assert connections.tied.keys() == {"last-0"}, "last-1 is the other replica's partner"
    assert connections.tied[PeerId("last-0")].hello.layers == spec.model.layers
    assert connections.reducer is not None
    assert connections.reducer.hello.layers == FIRST
    await net.close()
