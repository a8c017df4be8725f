"""Ends of a boundary, a neighbour driven by hand, and a model small enough to train in a blink."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, TypeAlias, cast

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from swarm_ft.base.clock import SystemClock
from swarm_ft.buffers import BufferStore
from swarm_ft.codec.spec import Direction
from swarm_ft.errors import SwarmError
from swarm_ft.ids import Attempt, BlockIndex, MicrobatchIndex, PeerId, RunId, SampleId, StepNumber
from swarm_ft.peer.boundary.coder import FrameCoder
from swarm_ft.peer.boundary.end import Boundary
from swarm_ft.peer.boundary.side_info import SideInfoStore
from swarm_ft.peer.links import ChannelEnd, LinkChannel, Links
from swarm_ft.peer.timeline import Timeline
from swarm_ft.protocol.machines.session import WINDOW_FRAMES
from swarm_ft.protocol.messages.boundary import BoundaryHello, FrameKey
from swarm_ft.protocol.messages.link import ChannelMessage
from swarm_ft.protocol.spec.run_spec import Codecs, LrSchedule, RunSpec, TrainSpec
from swarm_ft.transport.base import Transport
from swarm_ft.transport.grpc_transport import GrpcTransport
from swarm_ft.transport.methods import LINK
from tests.doubles.clock import ManualClock
from tests.doubles.memory_transport import MemoryTransport
from tests.specs import model_spec, train_spec
from tests.unit.peer.hands import Caller, Hand

TOKENS, CHANNELS, BOUNDARY_BLOCK = 6, 8, BlockIndex(2)

MakeTrain: TypeAlias = Callable[..., TrainSpec]
MakeSpec: TypeAlias = Callable[..., RunSpec]
MakeEnds: TypeAlias = "Callable[[RunSpec], tuple[End, End]]"
AtWork: TypeAlias = "Callable[[End, End], AbstractAsyncContextManager[Site]]"


@pytest.fixture(scope="session")
def make_train() -> MakeTrain:
    def make(**changes: Any) -> TrainSpec:
        fields: dict[str, Any] = {
            "num_samples": 8,
            "seq_length": TOKENS,
            "num_steps": 9,
            "learning_rate": 1e-2,
            "lr_schedule": LrSchedule.CONSTANT,
            "weight_decay": 0.1,
            "clip_grad_norm": 0.0,
            "seed": 5,
        }
        return train_spec(**fields | changes)

    return make


@pytest.fixture(scope="session")
def make_spec(make_train: MakeTrain) -> MakeSpec:
    """`make_spec(forward_codec="q4")`: a run over a model of which only the sizes matter."""

    def make(*, channels: int = CHANNELS, **train: Any) -> RunSpec:
        model = model_spec(hidden_size=channels, tied_embeddings=True)
        return RunSpec(model=model, train=make_train(**train))

    return make


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random GPT-2 of two blocks."""
    torch.manual_seed(3)
    sizes = {"vocab_size": 32, "n_positions": 16, "n_embd": CHANNELS, "n_layer": 2, "n_head": 2}
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    directory = tmp_path_factory.mktemp("gpt2")
    AutoModelForCausalLM.from_config(GPT2Config(**sizes, **ids)).save_pretrained(directory)
    return directory


@pytest.fixture(params=["memory", "grpc"])
def transport(request: pytest.FixtureRequest) -> Transport:
    return MemoryTransport() if request.param == "memory" else GrpcTransport()


@pytest.fixture
def pool() -> Iterator[Executor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


RELAYED = PeerId("r")
"""Whom others reach over a relay only."""


def links_of(name: str, transport: Transport) -> Links:
    """A peer's links; nobody is given up for being away."""
    return Links(
        PeerId(name),
        transport=transport,
        clock=ManualClock(),
        rng=Random(0),
        is_relayed=lambda peer: peer == RELAYED,
    )


def frame_key(step: int, sample: int, direction: Direction) -> FrameKey:
    """Of the first attempt's first microbatch."""
    name = Attempt(1), StepNumber(step), MicrobatchIndex(0), SampleId(sample)
    return FrameKey(*name, direction)


class End:
    """One end of a boundary with its buffers; what it decodes is in `arrivals`.

    In `taken` are held-out samples of its own that the other end computed with.
    """

    boundary: Boundary
    """Once it has joined."""

    def __init__(self, spec: RunSpec, sends: Direction, pool: Executor) -> None:
        self.sends = sends
        self.store = BufferStore()
        self.bases = SideInfoStore()
        self.arrivals: asyncio.Queue[tuple[FrameKey, torch.Tensor]] = asyncio.Queue()
        self.taken: asyncio.Queue[FrameKey] = asyncio.Queue()
        self.timeline = Timeline(SystemClock(), lambda _message: None)
        self._spec = spec
        self._pool = pool

    def hello(self, name: str) -> BoundaryHello:
        return BoundaryHello(
            run_id=RunId("run"),
            spec_digest=self._spec.digest(),
            boundary=BOUNDARY_BLOCK,
            peer_id=PeerId(name),
            attempt=Attempt(1),
            window_frames=WINDOW_FRAMES,
        )

    def join(self, name: str, channel: LinkChannel) -> None:
        """Be at the peer of this name, with that way to the other end."""
        coder = FrameCoder(
            self._spec,
            run_id=RunId("run"),
            boundary=BOUNDARY_BLOCK,
            store=self.store,
            side_info=self.bases,
        )
        self.boundary = Boundary(
            self.hello(name),
            channel,
            sends=self.sends,
            coder=coder,
            pool=self._pool,
            deliver=lambda key, value: self.arrivals.put_nowait((key, value)),
            timeline=self.timeline,
            on_consumed=self.taken.put_nowait,
        )

    def begin(self, step: int, samples: Collection[int], codecs: Codecs | None = None) -> None:
        """Roll back what an aborted step left, and expect frames of these samples."""
        self.store.rollback()
        self.bases.rollback()
        comes = Direction.BACKWARD if self.sends is Direction.FORWARD else Direction.FORWARD
        expected = {frame_key(step, sample, comes): TOKENS for sample in samples}
        train = self._spec.train if codecs is None else self._spec.train.with_codecs(codecs)
        self.boundary.begin(StepNumber(step), expected, train, len(samples))

    def send(self, step: int, values: Mapping[int, torch.Tensor]) -> None:
        for sample, x in values.items():
            self.boundary.send(frame_key(step, sample, self.sends), x)

    async def receive(self, count: int) -> dict[int, torch.Tensor]:
        """The next `count` arrivals by sample; one more, or one twice, fails."""
        got = [await self.arrivals.get() for _ in range(count)]
        values: dict[int, torch.Tensor] = {key.sample: value for key, value in got}
        assert len(values) == count
        assert self.arrivals.empty()
        return values


@pytest.fixture
def make_ends(pool: Executor) -> MakeEnds:
    """Both ends of a boundary: the one that sends activations, the one that sends gradients."""

    def make(spec: RunSpec) -> tuple[End, End]:
        return End(spec, Direction.FORWARD, pool), End(spec, Direction.BACKWARD, pool)

    return make


class LaterChannel:
    """A way to the other end that is not known yet."""

    def __init__(self) -> None:
        self.real: LinkChannel | None = None
        self.is_relayed = False

    async def keep_connected(self, end: ChannelEnd[Any, Any]) -> None:
        assert self.real is not None
        await self.real.keep_connected(end)

    def send(self, message: ChannelMessage) -> None:
        if self.real is not None:
            self.real.send(message)

    def break_off(self, error: SwarmError) -> None:
        assert self.real is not None
        self.real.break_off(error)


class Site:
    """An end that is served as `served` and at work; `call` gives a neighbour driven by hand."""

    def __init__(
        self,
        hello: BoundaryHello,
        caller: Caller,
        channel: LaterChannel,
        running: asyncio.Task[None],
    ) -> None:
        self.hello = hello
        self.running = running
        self.caller = caller
        self.channel = channel

    @property
    def endpoint(self) -> str:
        return self.caller.endpoint

    async def call(self, received: Iterable[FrameKey] = ()) -> Hand:
        """A neighbour that has exchanged hellos."""
        hello = replace(self.hello, received=frozenset(received))
        hand, _ = await self.caller.greet(hello)
        return hand

    @asynccontextmanager
    async def dialled(self, neighbour: End, transport: Transport) -> AsyncIterator[None]:
        """The neighbour's end at work, calling as `caller`."""
        links = links_of("caller", transport)
        self.channel.real = links.channel(PeerId("served"), self.endpoint)
        running = asyncio.create_task(neighbour.boundary.run())
        try:
            yield
        finally:
            running.cancel()
            (ended,) = await asyncio.gather(running, return_exceptions=True)
            await links.close()
            assert isinstance(ended, asyncio.CancelledError), ended


@pytest.fixture
def at_work(transport: Transport) -> AtWork:
    """`async with at_work(end, neighbour)`: serve `end`, for one who calls in its place."""

    @asynccontextmanager
    async def start(end: End, neighbour: End) -> AsyncIterator[Site]:
        links = links_of("served", transport)
        end.join("served", links.channel(PeerId("caller"), ""))
        channel = LaterChannel()
        neighbour.join("caller", cast("LinkChannel", channel))
        server = await transport.serve("127.0.0.1", 0, {LINK: links.answer})
        caller = Caller(transport, "caller", "served")
        caller.endpoint = server.endpoint
        running = asyncio.create_task(end.boundary.run())
        try:
            yield Site(neighbour.hello("caller"), caller, channel, running)
        finally:
            await caller.close()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await links.close()
            await server.stop()

    return start
