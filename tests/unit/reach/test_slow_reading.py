"""A front reads the connection of a flooding caller slowly, and all others as before."""

from __future__ import annotations

import asyncio
import math
import queue
import socket
import threading
from contextlib import suppress
from typing import Any

import pytest

from swarm_ft.errors import Unavailable
from swarm_ft.reach import sockets
from swarm_ft.reach.sockets import SLOW_BYTES, SLOW_S, Joint
from swarm_ft.reach.transport import FrontedTransport
from swarm_ft.transport.allowance import Allowances, Rates
from swarm_ft.transport.base import MessageStream
from swarm_ft.transport.grpc_options import GrpcOptions
from swarm_ft.transport.grpc_transport import GrpcTransport
from swarm_ft.transport.metering import Meter
from tests.doubles.clock import ManualTime
from tests.raw_calls import BYTES, MORE_BYTES

Stream = MessageStream[bytes, bytes]
WAIT_S = 20.0

pytestmark = pytest.mark.timeout(60)


class StoppedTime:
    """Substitute for the module `time`: sleepers wait for `let_go`."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept: queue.Queue[float] = queue.Queue()
        self.let_go = threading.Semaphore(0)

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept.put(seconds)
        self.let_go.acquire()


def received(sock: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        data += sock.recv(num_bytes - len(data))
    return data


@pytest.mark.usefixtures("way_of_moving")
async def test_a_slow_connection_is_read_little_by_little(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = StoppedTime()
    monkeypatch.setattr(sockets, "time", stopped)
    one, other = socket.socketpair()
    near, far = socket.socketpair()
    joint = Joint(one, near)
    joint.slow_down()
    other.sendall(b"x")
    assert stopped.slept.get(timeout=WAIT_S) == SLOW_S
    other.sendall(bytes(3 * SLOW_BYTES))
    stopped.let_go.release()
    stopped.slept.get(timeout=WAIT_S)
    assert joint.moved_bytes == 1 + SLOW_BYTES
    far.sendall(b"y")
    assert received(other, 1) == b"y", "what is sent to it passes as before"
    stopped.now_s += SLOW_S
    stopped.let_go.release()
    assert len(received(far, 1 + 3 * SLOW_BYTES)) == 1 + 3 * SLOW_BYTES
    assert stopped.slept.empty(), "its time is over"
    other.close()
    far.close()
    await joint.wait()


@pytest.mark.parametrize("kind", ["messages", "calls"])
async def test_the_connection_that_floods_is_slowed_down_and_no_other(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    time = ManualTime()
    rates = Rates(messages_per_s=1 / 16, messages_burst=1, calls_per_s=1 / 16, calls_burst=2)
    if kind == "calls":
        rates = Rates(messages_per_s=math.inf, calls_per_s=1 / 16, calls_burst=2)
    meter = Meter(Allowances(rates), time, time.sleep)
    transport = FrontedTransport(GrpcTransport(GrpcOptions(), meter), plaintext=True)
    slowed: asyncio.Queue[str] = asyncio.Queue()
    monkeypatch.setattr(transport.front, "slow_down", slowed.put_nowait)
    callers: dict[str, str] = {}

    async def read(stream: Stream) -> None:
        first = await stream.receive()
        callers[(first or b"").decode()] = stream.remote
        while await stream.receive() is not None:
            pass

    server = await transport.serve("127.0.0.1", 0, {MORE_BYTES: read, BYTES: read})
    honest, floods = (transport.connect(server.endpoint) for _ in range(2))
    await honest.open(BYTES).send(b"honest")
    flood = asyncio.create_task(pour(floods, one_call=kind == "messages"))
    async with asyncio.timeout(WAIT_S):
        assert await slowed.get() == callers["flood"]
    assert not is_slowed(slowed, callers["honest"])
    flood.cancel()
    for channel in (honest, floods):
        await channel.close()
    await server.stop()


async def pour(channel: Any, *, one_call: bool) -> None:
    """Send messages of one call, or open calls, without end."""
    calls = [channel.open(MORE_BYTES)]
    with suppress(Unavailable):
        while True:
            await calls[-1].send(b"flood")
            if not one_call:
                calls.append(channel.open(MORE_BYTES))


def is_slowed(slowed: asyncio.Queue[str], honest: str) -> bool:
    while not slowed.empty():
        if slowed.get_nowait() == honest:
            return True
    return False
