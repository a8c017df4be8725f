"""The two ends of a measured connection, each a command to be run on a host of a lab.

    python -m benchmarks.grpc_links.ends serve grpc|tcp ADDRESS ARGUMENTS     # prints its port
    python -m benchmarks.grpc_links.ends send grpc|tcp ENDPOINT ARGUMENTS     # prints `Figures`

ARGUMENTS are gRPC's, a JSON list of pairs; bare TCP heeds none.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from contextlib import suppress
from dataclasses import asdict

import grpc

from benchmarks.grpc_links.figures import MESSAGE_BYTES, Figures, measure

Arguments = list[tuple[str, int]]
ANSWER = b"."


class GrpcSender:
    """See `Sender`; a stream both ways."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._call = channel.stream_stream("/Links/Exchange")()

    async def send(self, message: bytes) -> None:
        """See `Sender`."""
        await self._call.write(message)

    async def answer(self) -> None:
        """See `Sender`."""
        await self._call.read()


class TcpSender:
    """See `Sender`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, message: bytes) -> None:
        """See `Sender`."""
        self._writer.write(message)
        await self._writer.drain()

    async def answer(self) -> None:
        """See `Sender`."""
        await self._reader.readexactly(len(ANSWER))


async def serve_grpc(address: str, arguments: Arguments) -> None:
    """Answer whatever comes, until killed."""

    async def exchange(_: object, context: grpc.aio.ServicerContext) -> None:
        while await context.read() is not grpc.aio.EOF:
            await context.write(ANSWER)

    server = grpc.aio.server(options=arguments)
    handler = grpc.stream_stream_rpc_method_handler(exchange)
    service = grpc.method_handlers_generic_handler("Links", {"Exchange": handler})
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port(f"{address}:0")
    await server.start()
    _print_line(str(port))
    await server.wait_for_termination()


async def serve_tcp(address: str) -> None:
    """Answer whatever comes, until killed."""

    async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError):
            while True:
                await reader.readexactly(MESSAGE_BYTES)
                writer.write(ANSWER)

    server = await asyncio.start_server(exchange, address, 0, limit=MESSAGE_BYTES)
    _print_line(str(server.sockets[0].getsockname()[1]))
    await server.serve_forever()


async def send_grpc(endpoint: str, arguments: Arguments) -> Figures:
    """Measure a stream of gRPC's."""
    async with grpc.aio.insecure_channel(endpoint, options=arguments) as channel:
        return await measure(GrpcSender(channel))


async def send_tcp(endpoint: str) -> Figures:
    """Measure a bare socket."""
    address, _, port = endpoint.rpartition(":")
    reader, writer = await asyncio.open_connection(address, int(port))
    writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return await measure(TcpSender(reader, writer))


async def main() -> None:
    """Run the command."""
    role, kind, place, arguments = sys.argv[1:]
    pairs = [(name, value) for name, value in json.loads(arguments)]
    match role, kind:
        case "serve", "grpc":
            await serve_grpc(place, pairs)
        case "serve", _:
            await serve_tcp(place)
        case "send", "grpc":
            _print_line(json.dumps(asdict(await send_grpc(place, pairs))))
        case _:
            _print_line(json.dumps(asdict(await send_tcp(place))))


def _print_line(words: str) -> None:
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main())
