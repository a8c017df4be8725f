"""Peers that run the project's own software, and whose owners alter its messages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from swarm_ft.identity.roles import Caller
from swarm_ft.peer.state.stage_state import EngineMaker
from swarm_ft.protocol.messages.control import FromPeer, ToPeer
from swarm_ft.transport.base import Channel, Handler, MessageStream, Method, Server, Transport
from tests.hostile.scene import Scene
from tests.hostile.victim import VictimPeer
from tests.local_swarm import cpu_engine

Edit = Callable[[FromPeer], FromPeer]
Overhear = Callable[[ToPeer], object]


class Altered:
    """A stream to the coordinator that alters sent messages and observes received ones."""

    def __init__(self, stream: MessageStream[Any, Any], edit: Edit, overhear: Overhear) -> None:
        self._stream = stream
        self._edit = edit
        self._overhear = overhear

    @property
    def remote(self) -> str:
        return self._stream.remote

    @property
    def caller(self) -> Caller | None:
        return self._stream.caller

    async def send(self, message: Any) -> None:
        await self._stream.send(self._edit(message))

    async def receive(self) -> Any:
        message = await self._stream.receive()
        if message is not None:
            self._overhear(message)
        return message

    async def finish(self) -> None:
        await self._stream.finish()

    async def cancel(self) -> None:
        await self._stream.cancel()


class AlteredChannel:
    """See `Altered`."""

    def __init__(self, channel: Channel, edit: Edit, overhear: Overhear) -> None:
        self._channel = channel
        self._edit = edit
        self._overhear = overhear

    def open(self, method: Method[Any, Any]) -> Any:
        return Altered(self._channel.open(method), self._edit, self._overhear)

    async def close(self) -> None:
        await self._channel.close()


class AlteredTransport:
    """See `Altered`."""

    def __init__(self, transport: Transport, edit: Edit, overhear: Overhear) -> None:
        self._transport = transport
        self._edit = edit
        self._overhear = overhear

    async def serve(
        self, host: str, port: int, handlers: Mapping[Method[Any, Any], Handler]
    ) -> Server:
        return await self._transport.serve(host, port, handlers)

    def connect(self, endpoint: str, name: str = "") -> Channel:
        return AlteredChannel(self._transport.connect(endpoint, name), self._edit, self._overhear)


@asynccontextmanager
async def wicked(
    scene: Scene,
    layers: str = "2-4",
    *,
    edit: Edit = lambda message: message,
    overhear: Overhear = lambda _: None,
    make_engine: EngineMaker = cpu_engine,
) -> AsyncIterator[VictimPeer]:
    """A peer that takes part as all others do, but for this."""
    peer = await scene.victim.add_peer(
        layers,
        make_engine=make_engine,
        wrap=lambda transport: AlteredTransport(transport, edit, overhear),
    )
    try:
        yield peer
    finally:
        await scene.victim.stop(peer)
