"""First and last stage add up the gradients of the tied embeddings, to the same bits."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import torch

from swarm_ft.discovery.directory import Board, Role, StaticDirectory
from swarm_ft.errors import BadFrame, MalformedMessage, NonFinite, OutOfTurn
from swarm_ft.ids import PeerId
from swarm_ft.peer.reduce.tied_embeddings import TiedExchange, exchange_from_last
from swarm_ft.testing.clock import ManualClock
from swarm_ft.testing.faults import FaultyTransport
from swarm_ft.transport.blob import BlobName, receive_bytes, receive_header, send_bytes
from swarm_ft.transport.methods import TIED_GRADIENT

SHAPE = (40, 8)
NAME = BlobName(run_id="run", attempt=3, step=7)


@pytest.fixture
def gradients():
    first, last = torch.randn(2, *SHAPE, generator=torch.manual_seed(4))
    return first * 1e-3, last


@pytest.fixture(autouse=True)
def no_patience(monkeypatch):
    monkeypatch.setattr("swarm_ft.peer.reduce.tied_embeddings.MAX_BACKOFF_S", 0.0)
    monkeypatch.setattr("swarm_ft.transport.base.LOST_GRACE_S", 0.0)


class First:
    """The first stage's end, served; `over` has an entry for every call that ended."""

    def __init__(self, server):
        self.exchange = TiedExchange(NAME, SHAPE)
        self.server = server
        self.over = asyncio.Queue()

    async def handle(self, stream):
        try:
            await self.exchange.serve(stream)
        finally:
            self.over.put_nowait(asyncio.current_task())


@asynccontextmanager
async def serving(transport):
    first = First(None)
    first.server = await transport.serve("127.0.0.1", 0, {TIED_GRADIENT: first.handle})
    try:
        yield first
    finally:
        await first.server.stop()


async def from_last(last, first, transport, name=NAME):
    directory = StaticDirectory(Board(), ManualClock())
    await directory.announce(Role.PEER, "first", first.server.endpoint)
    return await exchange_from_last(
        last, name, PeerId("first"), directory=directory, transport=transport
    )


async def both(first, last, served, transport):
    return await asyncio.gather(served.exchange.sum(first), from_last(last, served, transport))


async def test_both_ends_get_the_same_bits(transport, gradients):
    first, last = gradients
    async with serving(transport) as served:
        at_first, at_last = await both(first, last, served, transport)
    assert torch.equal(at_first, at_last)
    assert torch.equal(at_first, first + last)


async def test_a_call_that_broke_is_made_again(transport, gradients):
    for cut in ("cut_sends", "cut_receives"):
        for message in (1, 2):  # header and data
            faulty = FaultyTransport(transport, **{cut: {TIED_GRADIENT: [message]}})
            async with serving(transport) as served:
                at_first, at_last = await both(*gradients, served, faulty)
            assert faulty.num_cuts == 1
            assert torch.equal(at_first, at_last)


async def test_a_call_that_is_repeated_gets_the_same_answer(transport, gradients):
    first, last = gradients
    async with serving(transport) as served:
        await both(first, last, served, transport)
        again = await from_last(last, served, transport)
        other = await from_last(last * 2, served, transport)
    assert torch.equal(again, first + last)
    assert torch.equal(other, first + last * 2)


async def test_a_call_that_is_lost_while_the_first_stage_computes_harms_nothing(
    transport, gradients
):
    first, last = gradients
    async with serving(transport) as served:
        channel = transport.connect(served.server.endpoint)
        stream = channel.open(TIED_GRADIENT)
        await send_bytes(stream, NAME, last.numpy().tobytes())
        await asyncio.wait({served.exchange._last})  # now the call waits for the first stage
        await stream.cancel()
        await channel.close()
        await served.over.get()
        at_first, at_last = await both(first, last, served, transport)
    assert torch.equal(at_first, at_last)


async def call(stream, name, data):
    """A last stage by hand: what it gets for these bytes."""
    await send_bytes(stream, name, data)
    blob = await receive_header(stream, max_bytes=1 << 20)
    return await receive_bytes(stream, blob)


NUM_BYTES = 4 * SHAPE[0] * SHAPE[1]
NAN = torch.full(SHAPE, float("nan")).numpy().tobytes()
ATTACKS = {
    "another step": (replace(NAME, step=8), bytes(NUM_BYTES), OutOfTurn),
    "another attempt": (replace(NAME, attempt=2), bytes(NUM_BYTES), OutOfTurn),
    "another run": (replace(NAME, run_id="other"), bytes(NUM_BYTES), OutOfTurn),
    "too short": (NAME, bytes(NUM_BYTES - 4), BadFrame),
    "nothing": (NAME, b"", BadFrame),
    "too long": (NAME, bytes(NUM_BYTES + 1), MalformedMessage),
    "not finite": (NAME, NAN, BadFrame),
}


@pytest.mark.parametrize(("name", "data", "error"), ATTACKS.values(), ids=ATTACKS)
async def test_a_foreign_or_broken_gradient_is_refused_and_harms_nothing(
    transport, gradients, name, data, error
):
    async with serving(transport) as served:
        channel = transport.connect(served.server.endpoint)
        with pytest.raises(error):
            await call(channel.open(TIED_GRADIENT), name, data)
        await channel.close()
        at_first, at_last = await both(*gradients, served, transport)
    assert torch.equal(at_first, at_last)


@pytest.mark.parametrize("answer", [bytes(NUM_BYTES - 4), NAN], ids=["short", "not finite"])
async def test_a_broken_answer_of_the_first_stage_is_refused(transport, gradients, answer):
    async def handle(stream):
        await receive_bytes(stream, await receive_header(stream, max_bytes=NUM_BYTES))
        await send_bytes(stream, NAME, answer)

    server = await transport.serve("127.0.0.1", 0, {TIED_GRADIENT: handle})
    first = First(server)
    with pytest.raises(BadFrame):
        await from_last(gradients[1], first, transport)
    await server.stop()


async def test_a_gradient_that_is_not_finite_is_told_at_its_own_end(transport, gradients):
    spoiled = gradients[0].clone()
    spoiled[3, 3] = float("inf")
    async with serving(transport) as served:
        with pytest.raises(NonFinite):
            await served.exchange.sum(spoiled)
        with pytest.raises(NonFinite):
            await from_last(spoiled, served, transport)
