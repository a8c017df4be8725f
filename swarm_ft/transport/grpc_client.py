"""The calling end of gRPC. It knows no message's meaning."""

from __future__ import annotations

from contextlib import suppress
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from swarm_ft.errors import SwarmError, Unavailable
from swarm_ft.transport.base import Method, Reply, Request
from swarm_ft.transport.grpc_options import GrpcOptions, channel_arguments
from swarm_ft.transport.grpc_stream import GrpcStream
from swarm_ft.transport.status import from_status

Out = TypeVar("Out", bound=Message)
In = TypeVar("In", bound=Message)


class GrpcChannel:
    """See `Channel`."""

    def __init__(self, endpoint: str, options: GrpcOptions) -> None:
        self._endpoint = endpoint
        self._options = options
        # `dns:///` so that no endpoint, which a stranger may have announced, can choose
        # another of gRPC's schemes, such as `unix:`.
        target, arguments = f"dns:///{endpoint}", channel_arguments(options)
        credentials = options.channel_credentials
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(target, options=arguments)
        else:
            self._channel = grpc.aio.secure_channel(target, credentials, options=arguments)

    def open(self, method: Method[Request, Reply]) -> GrpcStream[Request, Reply]:
        """See `Channel`. All kinds of rpc look alike on the wire, so all are opened alike."""
        begun = self._channel.stream_stream(method.path)(wait_for_ready=False)
        return ClientStream(begun, self._endpoint, method.reply, self._options.max_message_bytes)

    async def close(self) -> None:
        """See `Channel`."""
        await self._channel.close()


class ClientStream(GrpcStream[Out, In]):
    """The client's end of a call."""

    def __init__(
        self,
        begun: grpc.aio.StreamStreamCall,
        remote: str,
        incoming: type[In],
        max_message_bytes: int,
    ) -> None:
        super().__init__(remote, incoming, max_message_bytes)
        self._call = begun

    async def cancel(self) -> None:
        """See `MessageStream`."""
        await super().cancel()
        self._call.cancel()

    async def _read(self) -> bytes | None:
        try:
            data = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from None
        return None if data is grpc.aio.EOF else bytes(data)

    async def _write(self, data: bytes) -> None:
        try:
            await self._call.wait_for_connection()
            if self._call.done():
                raise await self._why_ended()
            # gRPC's own `write` does this too. But when it fails because the server refuses the
            # call, it puts "Internal error from Core" in place of the server's reason, if that
            # has not been read yet.
            await self._call._cython_call.send_serialized_message(data)
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from None
        except grpc.aio.InternalError:  # the call ended while this was on its way
            raise await self._why_ended() from None

    async def _half_close(self) -> None:
        # On a call that is broken there is nothing to say; the next receive tells why.
        with suppress(grpc.aio.InternalError):
            await self._call.done_writing()

    async def _why_ended(self) -> SwarmError:
        status = await self._call.code()
        if status is grpc.StatusCode.OK:
            return Unavailable(f"{self._remote} has ended the call")
        details, trailing = await self._call.details(), await self._call.trailing_metadata()
        return from_status(status, details or "", trailing, self._remote)

    def _error(self, error: grpc.aio.AioRpcError) -> SwarmError:
        details, trailing = error.details(), error.trailing_metadata()
        return from_status(error.code(), details or "", trailing, self._remote)
