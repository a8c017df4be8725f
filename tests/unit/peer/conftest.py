"""Ends of a boundary, a neighbour driven by hand, and a model small enough to train in a blink."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from swarm_ft.buffers import BufferStore
from swarm_ft.clock import SystemClock
from swarm_ft.ids import PeerId, RunId
from swarm_ft.peer.boundary.coder import FrameCoder
from swarm_ft.peer.boundary.end import Boundary, answer, check_hello, receive_hello
from swarm_ft.peer.timeline import Timeline
from swarm_ft.protocol.machines.session import WINDOW_FRAMES, BoundarySession
from swarm_ft.protocol.messages.boundary import BoundaryHello, FrameKey
from swarm_ft.protocol.spec.codec_spec import Direction
from swarm_ft.protocol.spec.run_spec import LrSchedule, RunSpec, TrainSpec
from swarm_ft.transport.grpc_transport import GrpcTransport
from swarm_ft.transport.memory import MemoryTransport
from swarm_ft.transport.methods import BOUNDARY
from tests.specs import model_spec, train_spec

TOKENS, CHANNELS, BOUNDARY_BLOCK = 6, 8, 2


@pytest.fixture(scope="session")
def make_train():
    def make(**changes) -> TrainSpec:
        fields = {
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
def make_spec(make_train):
    """`make_spec(forward_codec="q4")`: a run over a model of which only the sizes matter."""

    def make(*, channels: int = CHANNELS, **train) -> RunSpec:
        model = model_spec(hidden_size=channels, tied_embeddings=True)
        return RunSpec(model=model, train=make_train(**train))

    return make


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    """A random GPT-2 of two blocks."""
    torch.manual_seed(3)
    sizes = {"vocab_size": 32, "n_positions": 16, "n_embd": CHANNELS, "n_layer": 2, "n_head": 2}
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    directory = tmp_path_factory.mktemp("gpt2")
    AutoModelForCausalLM.from_config(GPT2Config(**sizes, **ids)).save_pretrained(directory)
    return directory


@pytest.fixture(params=["memory", "grpc"])
def transport(request):
    return MemoryTransport() if request.param == "memory" else GrpcTransport()


@pytest.fixture
def pool():
    with ThreadPoolExecutor(2) as pool:
        yield pool


class End:
    """One end of a boundary with its buffers; what it decodes is in `arrivals`."""

    def __init__(self, spec, name, sends, pool):
        self.sends = sends
        self.store = BufferStore()
        self.arrivals = asyncio.Queue()
        hello = BoundaryHello(
            run_id=RunId("run"),
            spec_digest=spec.digest(),
            boundary=BOUNDARY_BLOCK,
            peer_id=PeerId(name),
            attempt=1,
            window_frames=WINDOW_FRAMES,
        )
        coder = FrameCoder(spec, run_id=RunId("run"), boundary=BOUNDARY_BLOCK, store=self.store)
        self.boundary = Boundary(
            hello,
            session=BoundarySession(attempt=1, sends=sends),
            coder=coder,
            pool=pool,
            deliver=lambda key, value: self.arrivals.put_nowait((key, value)),
            timeline=Timeline(SystemClock(), lambda _message: None),
        )

    def begin(self, step, samples):
        """Roll back what an aborted step left, and expect frames of these samples."""
        self.store.rollback()
        comes = Direction.BACKWARD if self.sends is Direction.FORWARD else Direction.FORWARD
        expected = frozenset(FrameKey(1, step, 0, sample, comes) for sample in samples)
        self.boundary.begin(step, expected)

    def send(self, step, values):
        for sample, x in values.items():
            self.boundary.send(FrameKey(1, step, 0, sample, self.sends), x)

    async def receive(self, count):
        """The next `count` arrivals by sample; one more, or one twice, fails."""
        got = [await self.arrivals.get() for _ in range(count)]
        values = {key.sample: value for key, value in got}
        assert len(values) == count
        assert self.arrivals.empty()
        return values


@pytest.fixture
def make_ends(pool):
    """Both ends of a boundary: the one that sends activations, the one that sends gradients."""

    def make(spec):
        return End(spec, "up", Direction.FORWARD, pool), End(spec, "down", Direction.BACKWARD, pool)

    return make


class Hand:
    """A neighbour driven by hand: it speaks protobuf, and whatever it likes."""

    def __init__(self, stream, hello):
        self.stream = stream
        self.hello = hello

    async def greet(self, received=()):
        hello = BoundaryHello(
            **{name: getattr(self.hello, name) for name in BoundaryHello.__dataclass_fields__}
            | {"received": frozenset(received)}
        )
        await self.say(hello)
        return await self.hear()

    async def say(self, message):
        await self.stream.send(message)

    async def hear(self):
        return await self.stream.receive()

    async def say_all(self, messages):
        for message in messages:
            await self.say(message)

    async def fails(self, messages=()):
        """Say these, then wait for the error with which the other side ends the stream."""
        await self.say_all(messages)
        while await self.hear() is not None:
            pass


class Site:
    """An end that is served and at work; `call` gives a neighbour driven by hand."""

    def __init__(self, end, hello, server, transport, running):
        self.end = end
        self.hello = hello
        self.running = running
        self._server = server
        self._transport = transport
        self.channels = []

    @property
    def endpoint(self):
        return self._server.endpoint

    def open(self, method=BOUNDARY):
        """A stream on a connection of its own."""
        channel = self._transport.connect(self._server.endpoint)
        self.channels.append(channel)
        return channel.open(method)

    async def call(self, received=()):
        """A neighbour that has exchanged hellos."""
        hand = Hand(self.open(), self.hello)
        await hand.greet(received)
        return hand


@pytest.fixture
def at_work(transport):
    """`async with at_work(end, neighbour)`: serve `end` for one who says `neighbour`'s hello."""

    @asynccontextmanager
    async def start(end, neighbour):
        hello = neighbour.boundary.hello

        async def handle(stream):
            theirs = await receive_hello(stream)
            check_hello(end.boundary.hello, theirs, hello.peer_id)
            await answer(end.boundary, stream, theirs)

        server = await transport.serve("127.0.0.1", 0, {BOUNDARY: handle})
        running = asyncio.create_task(end.boundary.run())
        site = Site(end, hello, server, transport, running)
        try:
            yield site
        finally:
            for channel in site.channels:
                await channel.close()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await server.stop()

    return start
