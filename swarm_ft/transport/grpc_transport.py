"""Calls between machines, over gRPC. It puts client and server together and adds nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swarm_ft.transport.base import Handler, Method
from swarm_ft.transport.grpc_client import GrpcChannel
from swarm_ft.transport.grpc_options import GrpcOptions
from swarm_ft.transport.grpc_server import GrpcServer
from swarm_ft.transport.listening import check_address


class GrpcTransport:
    """See `Transport`."""

    def __init__(self, options: GrpcOptions | None = None) -> None:
        self._options = options or GrpcOptions()

    async def serve(
        self, host: str, port: int, handlers: Mapping[Method[Any, Any], Handler]
    ) -> GrpcServer:
        """See `Transport`."""
        await check_address(host, port)
        server = GrpcServer(self._options)
        await server.start(host, port, handlers)
        return server

    def connect(self, endpoint: str) -> GrpcChannel:
        """See `Transport`."""
        return GrpcChannel(endpoint, self._options)
