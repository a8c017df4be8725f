"""A transport that records the calls that were opened, with their endpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swarm_ft.transport.base import Channel, Handler, Method, Server, Transport


class CountingTransport:
    """See `Transport`; `opened` has the endpoint and the method's name of each call."""

    def __init__(self, inner: Transport) -> None:
        self.opened: list[tuple[str, str]] = []
        self._inner = inner

    async def serve(
        self, host: str, port: int, handlers: Mapping[Method[Any, Any], Handler]
    ) -> Server:
        """See `Transport`."""
        return await self._inner.serve(host, port, handlers)

    def connect(self, endpoint: str, name: str = "") -> Channel:
        """See `Transport`."""
        channel: Any = self._inner.connect(endpoint, name)
        plain = channel.open

        def opened(method: Method[Any, Any]) -> Any:
            self.opened.append((endpoint, method.name))
            return plain(method)

        channel.open = opened
        counted: Channel = channel
        return counted
