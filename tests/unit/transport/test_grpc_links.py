"""Behaviour of real sockets alone: ports, dead links, other gRPC clients."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest

from swarm_ft import errors
from swarm_ft.ids import PeerId
from swarm_ft.protocol.messages.client import MemberStatus, StatusRequest, SwarmStatus
from swarm_ft.transport.base import MessageStream, call
from swarm_ft.transport.grpc_options import GrpcOptions, format_endpoint
from swarm_ft.transport.grpc_transport import METADATA_KEY, GrpcTransport
from swarm_ft.transport.methods import STATUS
from tests.members import OneMember
from tests.raw_calls import BYTES, MORE_BYTES

pytestmark = pytest.mark.timeout(20)

SWARM = SwarmStatus(members=(MemberStatus(peer_id=PeerId("p"), layers=None),), runs=())


async def echo(stream: MessageStream[bytes, bytes]) -> None:
    while (message := await stream.receive()) is not None:
        await stream.send(message)


async def status(stream: MessageStream[SwarmStatus, StatusRequest]) -> None:
    await stream.receive()
    await stream.send(SWARM)


class Cable:
    """A TCP forwarder that can be slow, and go dead: sockets stay open, bytes stop."""

    def __init__(self, endpoint: str, bytes_per_s: float | None = None) -> None:
        self._bytes_per_s = bytes_per_s
        self._host, _, self._port = endpoint.rpartition(":")
        self._alive = asyncio.Event()
        self._alive.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.from_client: asyncio.Queue[bytes] = asyncio.Queue()
        self.from_server: asyncio.Queue[bytes] = asyncio.Queue()

    @asynccontextmanager
    async def plugged(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        try:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def go_dead(self) -> None:
        self._alive.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self._host, int(self._port))
        ways = (reader, far_writer, self.from_client), (far_reader, writer, self.from_server)
        for way in ways:
            task = asyncio.create_task(self._forward(*way))
            self._tasks.add(task)

    async def _forward(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, seen: asyncio.Queue[bytes]
    ) -> None:
        try:
            while data := await source.read(65536):
                await self._alive.wait()
                sink.write(data)
                if self._bytes_per_s is not None:
                    await asyncio.sleep(len(data) / self._bytes_per_s)
                seen.put_nowait(data)
        except ConnectionError:
            pass
        finally:
            sink.close()


@pytest.mark.parametrize("warm_idle_s", [None, 0.05])
async def test_both_ends_notice_a_dead_link(warm_idle_s: float | None) -> None:
    transport = GrpcTransport(
        GrpcOptions(keepalive_idle_s=0.2, answer_timeout_s=0.2, warm_idle_s=warm_idle_s)
    )
    handler_saw: asyncio.Future[errors.Unavailable] = asyncio.get_running_loop().create_future()

    async def watch(stream: MessageStream[bytes, bytes]) -> None:
        try:
            await echo(stream)
        except errors.Unavailable as error:
            handler_saw.set_result(error)

    server = await transport.serve("127.0.0.1", 0, {BYTES: watch})
    cable = Cable(server.endpoint)
    async with cable.plugged() as endpoint:
        channel = transport.connect(endpoint)
        stream = channel.open(BYTES)
        await stream.send(b"x")
        assert await stream.receive() == b"x"
        cable.go_dead()
        async with asyncio.timeout(5.0):
            with pytest.raises(errors.Unavailable):
                await stream.receive()
            await handler_saw
        await channel.close()
    await server.stop()


async def test_on_a_link_that_is_kept_warm_both_ends_send_all_the_time() -> None:
    transport = GrpcTransport(GrpcOptions(warm_idle_s=0.02))
    server = await transport.serve("127.0.0.1", 0, {BYTES: echo})
    cable = Cable(server.endpoint)
    async with cable.plugged() as endpoint:
        channel = transport.connect(endpoint)
        stream = channel.open(BYTES)
        await stream.send(b"")
        assert await stream.receive() == b""
        async with asyncio.timeout(2.0):  # before any other probe
            for _ in range(15):
                await cable.from_server.get()
                await cable.from_client.get()
        await stream.send(b"still here")
        assert await stream.receive() == b"still here"
        await channel.close()
    await server.stop()


async def test_a_full_link_lives_however_late_probes_are_answered() -> None:
    """Some 4 MB lie in buffers here each way, and take a second each."""
    transport = GrpcTransport(GrpcOptions(keepalive_idle_s=0.1, keepalive_timeout_s=0.2))
    server = await transport.serve("127.0.0.1", 0, {BYTES: echo})
    cable = Cable(server.endpoint, bytes_per_s=4e6)
    async with cable.plugged() as endpoint:
        channel = transport.connect(endpoint)
        stream = channel.open(BYTES)
        part = bytes(2_000_000)

        async def send_all() -> None:
            for _ in range(4):
                await stream.send(part)

        sending = asyncio.create_task(send_all())
        for _ in range(4):
            assert await stream.receive() == part
        await sending
        await channel.close()
    await server.stop()


async def test_a_quiet_link_that_lives_is_left_alone() -> None:
    transport = GrpcTransport(GrpcOptions(keepalive_idle_s=0.05, keepalive_timeout_s=2.0))
    server = await transport.serve("127.0.0.1", 0, {BYTES: echo})
    channel = transport.connect(server.endpoint)
    stream = channel.open(BYTES)
    await stream.send(b"")
    assert await stream.receive() == b""
    # Some ten probes: a server of gRPC's usual settings hangs up at the third.
    reading = asyncio.create_task(stream.receive())
    done, _ = await asyncio.wait({reading}, timeout=0.6)
    assert not done
    await stream.send(b"still here")
    assert await reading == b"still here"
    await channel.close()
    await server.stop()


async def test_a_server_that_accepts_and_says_nothing_is_unavailable_in_bounded_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        transport = GrpcTransport(GrpcOptions(connect_timeout_s=0.3))
        channel = transport.connect(f"127.0.0.1:{silent.getsockname()[1]}")
        async with asyncio.timeout(3.0):
            with pytest.raises(errors.Unavailable):
                await call(channel, STATUS, StatusRequest(), timeout_s=10.0)
        await channel.close()


async def test_a_port_held_by_another_program_is_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(errors.PortInUse, match=f"127.0.0.1:{port}"):
            await GrpcTransport().serve("127.0.0.1", port, {})


@pytest.mark.parametrize(
    ("host", "port"), [("192.0.2.1", 0), ("no-such-host.invalid", 0), ("127.0.0.1", 70_000)]
)
async def test_an_address_that_is_not_ours_is_a_bad_option(host: str, port: int) -> None:
    with pytest.raises(errors.BadOption, match=r"listen on|expected"):
        await OneMember().serve(host, port, {})


OTHER_HOSTS = [
    "10.0.0.7",
    "192.0.2.1",
    "0.0.0.0",
    "localhost",
    "127.1",
    "2130706433",
    "2001:db8::1",
]


@pytest.mark.parametrize("host", [*OTHER_HOSTS, "::", ""])
async def test_plaintext_is_not_served_to_others(host: str) -> None:
    with pytest.raises(errors.BadOption, match="stay on this machine"):
        await GrpcTransport().serve(host, 0, {})


@pytest.mark.parametrize(
    "endpoint",
    [
        *(format_endpoint(host, 7000) for host in OTHER_HOSTS),
        *("unix:/tmp/some.sock", "xds:///127.0.0.1:1", "127.0.0.1", "no port"),
        *("::1:7000", "127.0.0.1:7000:7000", "[127.0.0.1]x:7000", "127.0.0.1@192.0.2.1:7000"),
    ],
)
async def test_plaintext_is_not_said_to_others(endpoint: str) -> None:
    with pytest.raises(errors.BadOption, match="stay on this machine"):
        GrpcTransport().connect(endpoint)


async def test_a_channel_made_before_its_server_reaches_it_later() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    transport = GrpcTransport()
    channel = transport.connect(f"127.0.0.1:{port}")
    with pytest.raises(errors.Unavailable):
        await call(channel, STATUS, StatusRequest(), timeout_s=5.0)
    server = await transport.serve("127.0.0.1", port, {STATUS: status})
    async with asyncio.timeout(5.0):
        while True:
            try:
                reply = await call(channel, STATUS, StatusRequest(), timeout_s=5.0)
                break
            except errors.Unavailable:
                continue
    assert reply == SWARM
    await channel.close()
    await server.stop()


@pytest.mark.parametrize("target", ["unix:/tmp/some.sock", "xds:///somewhere", "no port"])
async def test_an_endpoint_cannot_choose_another_scheme(target: str) -> None:
    channel = OneMember().connect(target)
    with pytest.raises(errors.Unavailable):
        await call(channel, STATUS, StatusRequest(), timeout_s=5.0)
    await channel.close()


FEW_BYTES = replace(BYTES, request_bytes=1000)
"""The same call at a server with a smaller bound."""


async def test_a_message_over_all_bounds_ends_the_call_and_not_the_server() -> None:
    server = await GrpcTransport().serve("127.0.0.1", 0, {FEW_BYTES: echo})
    channel = GrpcTransport().connect(server.endpoint)
    stream = channel.open(BYTES)
    await stream.send(bytes(2000))
    with pytest.raises(errors.InternalError, match="larger than allowed"):
        await stream.receive()
    stream = channel.open(BYTES)
    await stream.send(b"x")
    assert await stream.receive() == b"x"
    await channel.close()
    await server.stop()


async def test_a_message_over_its_methods_bound_is_not_read() -> None:
    """Another method of the same server takes larger messages, so gRPC lets it through."""
    server = await GrpcTransport().serve("127.0.0.1", 0, {FEW_BYTES: echo, MORE_BYTES: echo})
    channel = GrpcTransport().connect(server.endpoint)
    stream = channel.open(BYTES)
    await stream.send(bytes(2000))
    with pytest.raises(errors.MalformedMessage, match="of 2003 bytes: expected 1000 at most"):
        await stream.receive()
    await channel.close()
    await server.stop()


async def test_a_message_over_this_sides_bound_is_not_sent() -> None:
    server = await GrpcTransport().serve("127.0.0.1", 0, {BYTES: echo})
    channel = GrpcTransport().connect(server.endpoint)
    stream = channel.open(FEW_BYTES)
    with pytest.raises(errors.MalformedMessage, match="1000 at most"):
        await stream.send(bytes(2000))
    await stream.send(b"x")
    assert await stream.receive() == b"x"
    await channel.close()
    await server.stop()


async def test_an_ordinary_unary_grpc_client_is_served_and_told_the_error() -> None:
    async def missing(stream: MessageStream[bytes, bytes]) -> None:
        await stream.receive()
        raise errors.NotFound("no run 'x'")

    server = await GrpcTransport().serve("127.0.0.1", 0, {STATUS: status, BYTES: missing})
    async with grpc.aio.insecure_channel(server.endpoint) as channel:
        method = channel.unary_unary(
            STATUS.path,
            request_serializer=STATUS.request.to_bytes,
            response_deserializer=STATUS.reply.from_bytes,
        )
        assert await method(StatusRequest()) == SWARM
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(BYTES.path)(b"")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert caught.value.details() == "not-found"
        assert dict(caught.value.trailing_metadata())[METADATA_KEY] == b"not-found\nno run 'x'"
    await server.stop()


async def test_an_ipv6_endpoint_has_brackets() -> None:
    try:
        server = await GrpcTransport().serve("::1", 0, {STATUS: status})
    except errors.BadOption:
        pytest.skip("this machine has no IPv6")
    assert server.endpoint.startswith("[::1]:")
    channel = GrpcTransport().connect(server.endpoint)
    await call(channel, STATUS, StatusRequest(), timeout_s=5.0)
    await channel.close()
    await server.stop()
