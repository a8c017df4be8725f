"""One end of a gRPC call as a `MessageStream`. It knows how gRPC ends; it opens no call."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Generic, TypeVar

from google.protobuf.message import Message

from swarm_ft.errors import OutOfTurn, Unavailable
from swarm_ft.transport.handling import first_done
from swarm_ft.transport.wire import from_bytes, to_bytes

Out = TypeVar("Out", bound=Message)
In = TypeVar("In", bound=Message)
T = TypeVar("T")


class GrpcStream(ABC, Generic[Out, In]):
    """What both ends have in common: one write at a time, and operations safe to cancel.

    gRPC drops the whole call when a read or write under way is cancelled, and refuses a second
    one beside it. So each runs as a task of its own, which a cancelled caller leaves behind for
    the next caller to take up.
    """

    def __init__(self, remote: str, incoming: type[In], max_message_bytes: int) -> None:
        self._remote = remote
        self._incoming = incoming
        self._max_message_bytes = max_message_bytes
        self._one_sender = asyncio.Lock()
        self._writing: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[bytes | None] | None = None
        self._finished = False
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done when the call is no more, with the reason."""

    @property
    def remote(self) -> str:
        """See `MessageStream`."""
        return self._remote

    async def send(self, message: Out) -> None:
        """See `MessageStream`."""
        data = to_bytes(message, self._max_message_bytes)
        async with self._one_sender:
            if self._finished:
                raise OutOfTurn("send after finish: this side has said its last message")
            await self._write_under_way()
            self._writing = _begin(self._write(data))
            await self._write_under_way()

    async def receive(self) -> In | None:
        """See `MessageStream`."""
        if self._reading is None:
            self._reading = _begin(self._read())
        data = await self._result(self._reading)
        if data is None:
            return None  # the finished read stays, and says so again
        self._reading = None
        return from_bytes(self._incoming, data, self._remote)

    async def finish(self) -> None:
        """See `MessageStream`."""
        async with self._one_sender:
            await self._write_under_way()
            if not self._finished:
                self._finished = True
                self._writing = _begin(self._half_close())
            await self._write_under_way()

    async def cancel(self) -> None:
        """See `MessageStream`."""
        self.lose(f"the call with {self._remote} was cancelled")

    def lose(self, reason: str) -> None:
        """The call is no more: what waits or will be asked raises Unavailable."""
        if not self.lost.done():
            self.lost.set_result(reason)

    @abstractmethod
    async def _read(self) -> bytes | None:
        """The next message's bytes, None at the clean end; raises SwarmErrors."""

    @abstractmethod
    async def _write(self, data: bytes) -> None:
        """Write one message's bytes; raises SwarmErrors."""

    @abstractmethod
    async def _half_close(self) -> None:
        """Say that no more will be written."""

    async def _write_under_way(self) -> None:
        if self._writing is not None:
            await self._result(self._writing)

    async def _result(self, task: asyncio.Task[T]) -> T:
        await first_done(task, self.lost)
        if task.done() and not task.cancelled():
            return task.result()
        reason = self.lost.result() if self.lost.done() else f"the call with {self._remote} ended"
        raise Unavailable(reason)


def _begin(operation: Coroutine[object, object, T]) -> asyncio.Task[T]:
    task = asyncio.create_task(operation)
    # Nobody may be left to ask for its result.
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task
