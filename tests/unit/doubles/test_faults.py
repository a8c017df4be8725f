"""The fault injector breaks the streams of its script, and nothing else."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import pytest

from swarm_ft.errors import SwarmError, Unavailable
from swarm_ft.transport.base import Channel, MessageStream, Transport
from swarm_ft.transport.grpc_transport import GrpcTransport
from tests.doubles.faults import FaultyTransport
from tests.doubles.memory_transport import MemoryTransport
from tests.raw_calls import BYTES, MORE_BYTES


def part(number: int) -> bytes:
    return bytes([number])


class Service:
    """Echoes parts; remembers what it read and how its calls ended."""

    def __init__(self) -> None:
        self.read: list[int] = []
        self.has_read = asyncio.Event()
        self.ends: asyncio.Queue[SwarmError | None] = asyncio.Queue()

    async def echo(self, stream: MessageStream[bytes, bytes]) -> None:
        end: SwarmError | None = None
        try:
            while (message := await stream.receive()) is not None:
                self.read.append(message[0])
                self.has_read.set()
                await stream.send(message)
        except SwarmError as error:
            end = error
            raise
        finally:
            self.ends.put_nowait(end)

    async def answer(self, stream: MessageStream[bytes, bytes]) -> None:
        await stream.receive()
        await stream.send(part(42))


Faulty: TypeAlias = tuple[FaultyTransport, Service, Channel]
MakeFaulty: TypeAlias = Callable[..., Awaitable[Faulty]]


@pytest.fixture(params=["memory", "grpc"])
def inner(request: pytest.FixtureRequest) -> Transport:
    return MemoryTransport() if request.param == "memory" else GrpcTransport()


@pytest.fixture
async def faulty(inner: Transport) -> AsyncIterator[MakeFaulty]:
    """`faulty(cut_sends={BYTES: [2]})`: the transport, the service, a channel to it."""
    closing: list[Callable[[], Awaitable[None]]] = []

    async def make(**cuts: Any) -> Faulty:
        transport, service = FaultyTransport(inner, **cuts), Service()
        handlers = {BYTES: service.echo, MORE_BYTES: service.answer}
        server = await transport.serve("127.0.0.1", 0, handlers)
        channel = transport.connect(server.endpoint)
        closing.extend((channel.close, server.stop))
        return transport, service, channel

    yield make
    for close in closing:
        await close()


async def echoed(stream: MessageStream[bytes, bytes], number: int) -> int:
    await stream.send(part(number))
    message = await stream.receive()
    assert message is not None
    return message[0]


async def test_without_a_script_everything_passes(faulty: MakeFaulty) -> None:
    transport, service, channel = await faulty()
    stream = channel.open(BYTES)
    assert [await echoed(stream, i) for i in range(5)] == list(range(5))
    await stream.finish()
    assert await stream.receive() is None
    assert await service.ends.get() is None
    assert transport.num_cuts == 0


async def test_a_cut_send_loses_its_message_and_breaks_both_ends(faulty: MakeFaulty) -> None:
    transport, service, channel = await faulty(cut_sends={BYTES: [3]})
    stream = channel.open(BYTES)
    assert [await echoed(stream, i) for i in range(2)] == [0, 1]
    with pytest.raises(Unavailable, match="the script broke the stream"):
        await stream.send(part(2))
    assert isinstance(await service.ends.get(), Unavailable)
    assert service.read == [0, 1]
    for dead in (stream.send(part(3)), stream.receive()):
        with pytest.raises(Unavailable):
            await dead
    assert transport.num_cuts == 1


async def test_a_cut_receive_loses_a_message_that_the_other_side_did_send(
    faulty: MakeFaulty,
) -> None:
    transport, service, channel = await faulty(cut_receives={BYTES: [2]})
    stream = channel.open(BYTES)
    assert await echoed(stream, 0) == 0
    await stream.send(part(1))
    with pytest.raises(Unavailable, match="the script broke the stream"):
        await stream.receive()
    assert isinstance(await service.ends.get(), Unavailable)
    assert service.read == [0, 1]
    assert transport.num_cuts == 1


async def test_messages_are_counted_over_all_streams_of_a_method(faulty: MakeFaulty) -> None:
    transport, service, channel = await faulty(cut_sends={BYTES: [2, 4]})
    for number in (0, 1):
        stream = channel.open(BYTES)
        assert await echoed(stream, number) == number
        with pytest.raises(Unavailable):
            await stream.send(part(9))
    stream = channel.open(BYTES)
    assert [await echoed(stream, i) for i in (2, 3, 4)] == [2, 3, 4]
    assert service.read == [0, 1, 2, 3, 4]
    assert transport.num_cuts == 2


async def test_other_methods_and_other_streams_are_left_alone(faulty: MakeFaulty) -> None:
    transport, _, channel = await faulty(cut_sends={BYTES: [2]}, cut_receives={BYTES: [9]})
    broken, other = channel.open(BYTES), channel.open(MORE_BYTES)
    assert await echoed(broken, 0) == 0
    with pytest.raises(Unavailable):
        await broken.send(part(1))
    await other.send(b"give")
    assert await other.receive() == part(42)
    assert transport.num_cuts == 1


async def test_the_end_of_a_stream_counts_as_something_received(faulty: MakeFaulty) -> None:
    transport, _, channel = await faulty(cut_receives={BYTES: [2]})
    stream = channel.open(BYTES)
    assert await echoed(stream, 0) == 0
    await stream.finish()
    with pytest.raises(Unavailable):
        await stream.receive()
    assert transport.num_cuts == 1


async def test_a_receive_that_was_cancelled_is_not_counted(faulty: MakeFaulty) -> None:
    transport, _, channel = await faulty(cut_receives={BYTES: [2]})
    stream = channel.open(BYTES)
    waiting = asyncio.create_task(stream.receive())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert await echoed(stream, 0) == 0
    assert transport.num_cuts == 0


async def test_what_fails_by_itself_is_no_cut(faulty: MakeFaulty) -> None:
    transport, service, channel = await faulty(cut_receives={BYTES: [1]})
    stream = channel.open(BYTES)
    await stream.send(part(0))
    await service.has_read.wait()  # a call that is cancelled before never begins at the server
    await stream.cancel()
    with pytest.raises(Unavailable):
        await stream.receive()
    await service.ends.get()
    assert transport.num_cuts == 0


async def test_a_script_that_names_no_message_that_comes_does_nothing(faulty: MakeFaulty) -> None:
    transport, _, channel = await faulty(cut_sends={BYTES: [0, 99]}, cut_receives={MORE_BYTES: [1]})
    stream = channel.open(BYTES)
    assert [await echoed(stream, i) for i in range(4)] == list(range(4))
    assert transport.num_cuts == 0
