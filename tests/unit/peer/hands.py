"""A peer driven by hand: it sends any message of a test over a link."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from swarm_ft.ids import PeerId, RunId
from swarm_ft.peer.links import LinkStream
from swarm_ft.protocol.messages.link import ChannelHello, LinkHello, LinkMessage
from swarm_ft.transport.base import Channel, MessageStream, Transport
from swarm_ft.transport.methods import LINK
from tests.raw_calls import RAW

Received = TypeVar("Received")


class Hand:
    """The calling side of a link."""

    def __init__(self, stream: LinkStream) -> None:
        self.stream = stream

    async def send(self, *messages: LinkMessage) -> None:
        """Send these."""
        for message in messages:
            await self.stream.send(message)

    async def receive(self) -> LinkMessage | None:
        """The next message; None at the clean end."""
        return await self.stream.receive()

    async def expect(self, kind: type[Received]) -> Received:
        """The next message, which is of this kind."""
        message = await self.receive()
        assert isinstance(message, kind), message
        return message

    async def fails(self, *messages: LinkMessage) -> None:
        """Send these, then wait for the error with which the other side ends the stream."""
        await self.send(*messages)
        while await self.receive() is not None:
            pass

    async def link(self, own: str, to: str) -> None:
        """Exchange the hellos of the link."""
        await self.send(LinkHello(peer_id=PeerId(own), to=PeerId(to), run_id=RunId("run")))
        assert await self.receive() == LinkHello(
            peer_id=PeerId(to), to=PeerId(own), run_id=RunId("run")
        )


class Caller:
    """A caller of a peer under one name, each time on a connection of its own."""

    def __init__(self, transport: Transport, own: str, to: str) -> None:
        self.endpoint = ""
        self._transport = transport
        self._own, self._to = own, to
        self._channels: list[Channel] = []

    def open(self) -> LinkStream:
        """Open a stream on which nothing was sent."""
        channel = self._transport.connect(self.endpoint)
        self._channels.append(channel)
        return channel.open(LINK)

    async def link(self) -> Hand:
        """A link without channels."""
        hand = Hand(self.open())
        await hand.link(self._own, self._to)
        return hand

    async def fails(self, nonsense: bytes) -> None:
        """Send bytes as a message's first field, and wait for the error that this costs."""
        channel = self._transport.connect(self.endpoint)
        self._channels.append(channel)
        raw: Any = RAW
        method: Any = replace(LINK, request=raw)
        stream: MessageStream[bytes, LinkMessage] = channel.open(method)
        hello = LinkHello(peer_id=PeerId(self._own), to=PeerId(self._to), run_id=RunId("run"))
        wire: Any = LINK.request.to_wire(hello)
        await stream.send(wire.hello.SerializeToString())
        await stream.send(nonsense)
        while await stream.receive() is not None:
            pass

    async def greet(self, *hellos: ChannelHello) -> tuple[Hand, list[LinkMessage | None]]:
        """Open a link with these channels; return it with the hellos of the other side."""
        hand = await self.link()
        await hand.send(*hellos)
        return hand, [await hand.receive() for _ in hellos]

    async def close(self) -> None:
        """Hang up everywhere."""
        for channel in self._channels:
            await channel.close()
