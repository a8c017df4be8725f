"""Idle connections at real servers: the servers drop them, and members get in."""

import asyncio
import os
import resource
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from swarm_ft.errors import Unavailable
from swarm_ft.protocol.messages.client import StatusRequest, SwarmStatus
from swarm_ft.reach.transport import FrontedTransport
from swarm_ft.transport.admission import MAX_PER_ADDRESS
from swarm_ft.transport.base import Channel, MessageStream, call
from swarm_ft.transport.grpc_options import GrpcOptions
from swarm_ft.transport.grpc_transport import GrpcTransport
from swarm_ft.transport.methods import STATUS
from swarm_ft.transport.open_files import max_connections, raise_open_files
from tests.raw_calls import BYTES

pytestmark = pytest.mark.timeout(60)

HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""First bytes of an HTTP/2 client: its preface, and empty settings."""


async def echo(stream: MessageStream[bytes, bytes]) -> None:
    while (message := await stream.receive()) is not None:
        await stream.send(message)


@asynccontextmanager
async def serving(
    options: GrpcOptions | None = None, per_address: int = MAX_PER_ADDRESS
) -> AsyncIterator[tuple[Channel, str]]:
    grpc = GrpcTransport(options or GrpcOptions())
    fronted = FrontedTransport(grpc, plaintext=True, per_address=per_address)
    server = await fronted.serve("127.0.0.1", 0, {BYTES: echo})
    channel = GrpcTransport().connect(server.endpoint)
    try:
        yield channel, server.endpoint
    finally:
        await channel.close()
        await server.stop()


async def idler(endpoint: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Yield a connection that completes HTTP/2's handshake, and makes no call."""
    host, _, port = endpoint.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(HTTP2)
    return reader, writer


async def until_dropped(reader: asyncio.StreamReader) -> None:
    with suppress(ConnectionResetError):
        while await reader.read(4096):
            pass


async def test_a_connection_without_a_call_is_dropped_and_one_with_a_call_is_not() -> None:
    async with serving(GrpcOptions(idle_s=1.0)) as (channel, endpoint):
        stream = channel.open(BYTES)
        await stream.send(b"x")
        assert await stream.receive() == b"x"
        for _ in range(2):  # one after the other: each takes as long as the call might have had
            reader, writer = await idler(endpoint)
            await until_dropped(reader)
            writer.close()
        await stream.send(b"y")
        assert await stream.receive() == b"y"


async def test_an_address_has_so_many_connections_and_those_with_calls_stay() -> None:
    async with serving(per_address=4) as (channel, endpoint):
        stream = channel.open(BYTES)
        await stream.send(b"x")
        assert await stream.receive() == b"x"
        idlers = [await idler(endpoint) for _ in range(12)]
        drops = [asyncio.create_task(until_dropped(reader)) for reader, _ in idlers]
        for num_gone, ended in enumerate(asyncio.as_completed(drops)):
            await ended
            if num_gone + 1 == 12 - 3:
                break
        await stream.send(b"y")
        assert await stream.receive() == b"y"
        for task in drops:
            task.cancel()
        for _, writer in idlers:
            writer.close()


async def test_a_call_that_says_nothing_is_ended() -> None:
    async with serving(GrpcOptions(first_message_s=0.1)) as (channel, _):
        stream = channel.open(BYTES)
        with pytest.raises(Unavailable, match="opened a call and sent nothing"):
            await stream.receive()


SERVER = """
import asyncio
from swarm_ft.protocol.messages.client import SwarmStatus
from swarm_ft.reach.transport import FrontedTransport
from swarm_ft.transport.grpc_transport import GrpcTransport
from swarm_ft.transport.methods import STATUS

async def status(stream):
    await stream.receive()
    await stream.send(SwarmStatus(members=(), runs=()))

async def main():
    fronted = FrontedTransport(GrpcTransport(), plaintext=True)
    server = await fronted.serve("127.0.0.1", 0, {STATUS: status})
    print(server.endpoint, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@asynccontextmanager
async def process_of_few_files(num_files: int) -> AsyncIterator[str]:
    """Yield the address of a server in a process with a fixed limit of open files."""
    limited = f"ulimit -n {num_files}; exec {sys.executable} -c '{SERVER}'"
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", limited, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    assert process.stdout is not None
    try:
        yield (await process.stdout.readline()).decode().strip()
    finally:
        process.kill()
        await process.wait()


async def status_of(endpoint: str) -> SwarmStatus:
    """Request the status with retries, as all members do."""
    while True:
        channel = GrpcTransport().connect(endpoint)
        try:
            return await call(channel, STATUS, StatusRequest(), timeout_s=10.0)
        except Unavailable:
            continue
        finally:
            await channel.close()


async def test_more_idle_connections_than_files_lock_nobody_out() -> None:
    """Each connection takes six files."""
    async with process_of_few_files(512) as endpoint:
        idlers = [await idler(endpoint) for _ in range(300)]
        assert await status_of(endpoint) == SwarmStatus(members=(), runs=())
        for _, writer in idlers:
            writer.close()


async def test_a_flood_from_one_address_keeps_nobody_of_another_out() -> None:
    """A caller from another address gets its answer at once, even during the flood."""
    async with serving() as (_, endpoint):
        host, _, port = endpoint.rpartition(":")
        other_address = ("127.0.0.9", 0)
        writers = []
        for num_calls in range(1, 9):
            for _ in range(MAX_PER_ADDRESS):
                opening = asyncio.open_connection(host, int(port), local_addr=other_address)
                writers.append((await opening)[1])
            channel = GrpcTransport().connect(endpoint)
            stream = channel.open(BYTES)
            await stream.send(bytes([num_calls]))
            assert await stream.receive() == bytes([num_calls])
            await channel.close()
        for writer in writers:
            writer.close()


def test_files_are_left_for_the_process_itself() -> None:
    assert max_connections(1024) == 768
    assert max_connections(64) == 32
    assert max_connections(1 << 20) == max_connections(-1) == 4096
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft <= raise_open_files() <= max(soft, hard)
    assert len(os.listdir("/dev/fd")) < raise_open_files()
