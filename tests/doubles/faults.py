"""Scripted faults under real streams: which message of which call breaks its stream. No chance."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeVar

from swarm_ft.errors import Unavailable
from swarm_ft.identity.roles import Caller
from swarm_ft.transport.base import Channel, Handler, MessageStream, Method, Server, Transport

Request = TypeVar("Request")
Reply = TypeVar("Reply")
Wait = Callable[[], Awaitable[object]]


class FaultyTransport:
    """A transport whose client streams break by a script.

    Args:
        inner: what really carries the messages.
        cut_sends: per method, which sends break their stream, counted from 1 over all streams
            of that method; the message itself is lost.
        cut_receives: the same for receives; the message was sent by the other side, and is lost.
        held: per method, what every receive waits for before it gives its message.
    """

    def __init__(
        self,
        inner: Transport,
        *,
        cut_sends: Mapping[Method[Any, Any], Iterable[int]] | None = None,
        cut_receives: Mapping[Method[Any, Any], Iterable[int]] | None = None,
        waits: Mapping[Method[Any, Any], Wait] | None = None,
    ) -> None:
        self._inner = inner
        self._sends = _Script(cut_sends or {})
        self._receives = _Script(cut_receives or {}, waits)

    @property
    def num_cuts(self) -> int:
        """Streams broken so far; a test that scripted three faults should see three."""
        return self._sends.num_cuts + self._receives.num_cuts

    async def serve(
        self, host: str, port: int, handlers: Mapping[Method[Any, Any], Handler]
    ) -> Server:
        """See `Transport`."""
        return await self._inner.serve(host, port, handlers)

    def connect(self, endpoint: str, name: str = "") -> Channel:
        """See `Transport`."""
        return _FaultyChannel(self._inner.connect(endpoint, name), self._sends, self._receives)


class _Script:
    """A script that counts events per method and selects those that break."""

    def __init__(
        self,
        cuts: Mapping[Method[Any, Any], Iterable[int]],
        waits: Mapping[Method[Any, Any], Wait] | None = None,
    ) -> None:
        self._cuts = {method.path: set(numbers) for method, numbers in cuts.items()}
        self._waits = {method.path: wait for method, wait in (waits or {}).items()}
        self._counts: dict[str, int] = {}
        self.num_cuts = 0

    async def pass_on(self, method: Method[Any, Any]) -> None:
        """Wait as long as messages of this method are held."""
        wait = self._waits.get(method.path)
        if wait is not None:
            await wait()

    def breaks_now(self, method: Method[Any, Any]) -> bool:
        count = self._counts[method.path] = self._counts.get(method.path, 0) + 1
        cut = count in self._cuts.get(method.path, ())
        self.num_cuts += cut
        return cut


class _FaultyChannel:
    """See `Channel`."""

    def __init__(self, inner: Channel, sends: _Script, receives: _Script) -> None:
        self._inner = inner
        self._sends = sends
        self._receives = receives

    def open(self, method: Method[Request, Reply]) -> MessageStream[Request, Reply]:
        return _FaultyStream(self._inner.open(method), method, self._sends, self._receives)

    async def close(self) -> None:
        await self._inner.close()


class _FaultyStream:
    """See `MessageStream`."""

    def __init__(
        self,
        inner: MessageStream[Any, Any],
        method: Method[Any, Any],
        sends: _Script,
        receives: _Script,
    ) -> None:
        self._inner = inner
        self._method = method
        self._sends = sends
        self._receives = receives

    @property
    def remote(self) -> str:
        return self._inner.remote

    @property
    def caller(self) -> Caller | None:
        return self._inner.caller

    async def send(self, message: Any) -> None:
        if self._sends.breaks_now(self._method):
            await self._break()
        await self._inner.send(message)

    async def receive(self) -> Any:
        message = await self._inner.receive()
        await self._receives.pass_on(self._method)
        if self._receives.breaks_now(self._method):
            await self._break()
        return message

    async def finish(self) -> None:
        await self._inner.finish()

    async def cancel(self) -> None:
        await self._inner.cancel()

    async def _break(self) -> None:
        await self._inner.cancel()
        raise Unavailable(f"{self._method}: the script broke the stream")
