"""First and last stage add up the gradients of the tied embeddings, to the same bits."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm_ft.discovery.directory import Board, Role, StaticDirectory
from swarm_ft.errors import NonFinite, Unavailable
from swarm_ft.ids import Attempt, MicrobatchIndex, PeerId, RunId, StepNumber
from swarm_ft.peer.connections import Connections
from swarm_ft.peer.context import PeerContext
from swarm_ft.peer.reduce.member_link import ReduceStream, receive_reduce_hello
from swarm_ft.peer.reduce.tied_embeddings import synchronise, tied_pairs
from swarm_ft.peer.state.stage_state import StageState
from swarm_ft.peer.timeline import Timeline
from swarm_ft.protocol.messages.control import Assign, Stage, StageAssignment
from swarm_ft.protocol.messages.reduction import ReduceHello
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import RunSpec, TrainSpec
from swarm_ft.stage.checkpoint import open_checkpoint
from swarm_ft.stage.engine import StageEngine
from swarm_ft.testing.clock import ManualClock
from swarm_ft.testing.faults import FaultyTransport
from swarm_ft.transport.base import Server, Transport
from swarm_ft.transport.memory import MemoryTransport
from swarm_ft.transport.methods import ALL_REDUCE

RUN, STEP, BATCH = RunId("run"), StepNumber(3), MicrobatchIndex(0)
FIRST, LAST = LayerRange(0, 1), LayerRange(1, 2)
SHAPES = [(1, 1), (2, 1), (1, 2), (3, 2)]
counts = st.integers(1, 7)


@pytest.fixture(autouse=True)
def no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_ft.peer.links.dialling.MIN_BACKOFF_S", 0.0)


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
            compute=net.pool,
            codecs=net.pool,
            say=said.append,
            timeline=Timeline(ManualClock(), said.append),
            memory_bytes=1 << 30,
        )
        state = StageState(context, RUN, assign.spec, lambda _spec, _layers: engine)
        self.connections = Connections(
            context, assign, state, num_values=0, deliver=lambda _key, _value: None
        )
        self.pairs = self.connections.tied.values()

    async def serve(self, stream: ReduceStream) -> None:
        hello = await receive_reduce_hello(stream)
        reducer = self.connections.reducer_for(hello)
        assert reducer is not None
        await reducer.serve(stream, hello)


class Net:
    """Where they meet."""

    def __init__(self, pool: Executor, transport: Transport, dialling: Transport) -> None:
        self.pool = pool
        self.transport = transport
        self.dialling = dialling
        self.directory = StaticDirectory(Board(), ManualClock())


def assign_of(spec: RunSpec, num_firsts: int, num_lasts: int) -> Assign:
    firsts = [(PeerId(f"first-{i}"), FIRST) for i in range(num_firsts)]
    lasts = [(PeerId(f"last-{i}"), LAST) for i in range(num_lasts)]
    return Assign(
        run_id=RUN,
        spec=spec,
        attempt=Attempt(1),
        stages=tuple(StageAssignment(peer_id=p, layers=r) for p, r in (*firsts, *lasts)),
        committed_steps=STEP,
        fresh=False,
        spec_digest=spec.digest(),
    )


@asynccontextmanager
async def at_work(spec: RunSpec, shape: tuple[int, int], net: Net) -> AsyncIterator[list[End]]:
    """All of them, each with an engine of its own."""
    assign = assign_of(spec, *shape)
    ends, servers = [], []
    for stage in assign.stages:
        engine = engines(spec)[stage.layers == LAST]
        ends.append(end := End(stage.peer_id, assign, engine, net))
        server: Server = await net.transport.serve("127.0.0.1", 0, {ALL_REDUCE: end.serve})
        servers.append(server)
        await net.directory.announce(Role.PEER, stage.peer_id, server.endpoint)
    running = [asyncio.create_task(pair.run()) for end in ends for pair in end.pairs]
    try:
        yield ends
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for server in servers:
            await server.stop()


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
    faulty = FaultyTransport(inner, cut_sends={ALL_REDUCE: [2]}, cut_receives={ALL_REDUCE: [4]})
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
    monkeypatch.setattr("swarm_ft.peer.links.dialling.UNREACHABLE_AFTER_S", 0.0)
    net = Net(pool, inner := MemoryTransport(), inner)
    end = End(PeerId("first-0"), assign_of(spec, 1, 1), engines(spec)[0], net)
    (pair,) = end.pairs
    with pytest.raises(ExceptionGroup) as raised:
        await pair.run()
    assert raised.group_contains(Unavailable, match="peer last-0 cannot be reached")


async def test_only_partners_and_replicas_are_summed_with(spec: RunSpec, pool: Executor) -> None:
    net = Net(pool, inner := MemoryTransport(), inner)
    end = End(PeerId("first-0"), assign_of(spec, 2, 2), engines(spec)[0], net).connections

    def found(peer: str, layers: LayerRange) -> object:
        return end.reducer_for(
            ReduceHello(
                run_id=RUN,
                spec_digest=spec.digest(),
                attempt=Attempt(1),
                peer_id=PeerId(peer),
                layers=layers,
            )
        )

    whole = spec.model.layers
    assert found("last-0", whole) is end.tied[PeerId("last-0")]
    assert found("last-1", whole) is None, "that is the other replica's partner"
    assert found("first-1", whole) is None
    assert found("first-1", FIRST) is end.reducer
