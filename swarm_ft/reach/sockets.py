"""TCP sockets as links want them, what is said over them first, and two of them joined.

Whoever connects to a front port without TLS says who it is in a preamble: `SFT1`, one letter, and
what belongs to it.

    O                   answered by the address that it comes from, then closed
    Q                   the same, with another port of this front's, its clock and its version
    B + port            answered by whether that port of whoever asks can be dialled from here, or
                        by `-` if the front does not dial such addresses
    L + n + ticket      a leg to a relay: answered by that address; `J` when the other is there
    P + 16 bytes        a stream of a meeting: who knows its number can make and check them

A stream of a meeting that the caller takes begins with a `U`; from then on all bytes are gRPC's.
"""

from __future__ import annotations

import _thread
import asyncio
import hashlib
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from swarm_ft.errors import MalformedMessage
from swarm_ft.protocol.spec.bounds import host_of
from swarm_ft.reach.shaping import Gate, Shape
from swarm_ft.systems import drop_after
from swarm_ft.transport.grpc_options import IPV4_IN_IPV6, format_endpoint

MAGIC = b"SFT1"
PROBE, QUESTION, BACK, LEG, PAIR = b"O", b"Q", b"B", b"L", b"P"
YES, NO, UNTRIED = b"Y", b"N", b"-"
JOINED, CHOSEN = b"J", b"U"
PROOF_BYTES = 16
GREETING_S = 5.0
"""How long a stream may take to say who it is."""
SLOW_S, SLOW_BYTES = 0.25, 1 << 12
"""A connection that is read slowly is read once in this time, and so many bytes of it."""
DEAD_AFTER_S = 8.0
"""A machine that acknowledges nothing for so long is gone, whatever is sent or not."""
PROBE_AFTER_S = 3
"""Silence after which the kernel probes the other machine; it also keeps routers' mappings."""
MAX_ADDRESS_BYTES = 100
BACK_S = 3.0
"""How long a front tries to dial back."""

Address = tuple[str, int]


# ---- sockets


def new_socket(family: int, port: int = 0) -> socket.socket:
    """A TCP socket that does not block, bound to a port that others may be bound to as well."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "SO_REUSEPORT"):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        tune(sock)
        sock.bind(("::" if family == socket.AF_INET6 else "0.0.0.0", port))
    except BaseException:
        sock.close()
        raise
    return sock


def tune(sock: socket.socket) -> None:
    """No waiting for more to send, and a dead machine is noticed; as far as the system can."""
    if sock.family not in {socket.AF_INET, socket.AF_INET6}:
        return
    tcp = socket.IPPROTO_TCP
    sock.setsockopt(tcp, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probes = int(DEAD_AFTER_S - PROBE_AFTER_S)
    for name, value in (
        ("TCP_KEEPIDLE", PROBE_AFTER_S),
        ("TCP_KEEPALIVE", PROBE_AFTER_S),  # macOS' word for it
        ("TCP_KEEPINTVL", 1),
        ("TCP_KEEPCNT", probes),
    ):
        if hasattr(socket, name):
            sock.setsockopt(tcp, getattr(socket, name), value)
    drop_after(sock, DEAD_AFTER_S)


async def dial(endpoint: str, *, port: int = 0, timeout_s: float = GREETING_S) -> socket.socket:
    """A connection to `host:port`.

    Args:
        endpoint: where.
        port: of this machine, from which; 0: any.
        timeout_s: for all of it.

    Raises:
        OSError: nobody answers there, or says no.
        TimeoutError: it takes too long.
    """
    host, _, number = endpoint.rpartition(":")
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(timeout_s):
        found = await loop.getaddrinfo(host.strip("[]"), int(number), type=socket.SOCK_STREAM)
        family, _, _, _, address = found[0]
        sock = new_socket(family, port)
        try:
            await loop.sock_connect(sock, address)
        except BaseException:
            sock.close()
            raise
    return sock


async def receive_exactly(sock: socket.socket, num_bytes: int) -> bytes:
    """So many bytes, and none more.

    Raises:
        OSError: the connection broke, or ended before.
    """
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < num_bytes:
        part = await loop.sock_recv(sock, num_bytes - len(data))
        if not part:
            raise ConnectionResetError(f"ended after {len(data)} of {num_bytes} bytes")
        data += part
    return data


def endpoint_of(address: Address) -> str:
    """`host:port`; an IPv4 address that a socket for both kinds shows as IPv6 is one of IPv4."""
    return format_endpoint(address[0].removeprefix(IPV4_IN_IPV6), address[1])


# ---- what is said first


def proof(meeting: bytes, *, is_caller: bool) -> bytes:
    """What one side of a meeting shows to the other; it does not give the number away."""
    side = b"caller" if is_caller else b"callee"
    return hashlib.blake2b(meeting, digest_size=PROOF_BYTES, person=side).digest()


async def exchange_proofs(sock: socket.socket, meeting: bytes, *, is_caller: bool) -> None:
    """Say of which meeting this stream is, and see that the other side is of the same.

    Raises:
        OSError: it is gone.
        MalformedMessage: it is somebody else.
    """
    mine = MAGIC + PAIR + proof(meeting, is_caller=is_caller)
    expected = MAGIC + PAIR + proof(meeting, is_caller=not is_caller)
    await asyncio.get_running_loop().sock_sendall(sock, mine)
    if await receive_exactly(sock, len(expected)) != expected:
        raise MalformedMessage("another machine than the one that was meant answers there")


async def send_address(sock: socket.socket, remote: Address) -> None:
    """Tell the other side where it comes from."""
    await send_text(sock, endpoint_of(remote))


async def send_text(sock: socket.socket, text: str) -> None:
    """A short text, with its length before it."""
    data = text.encode("ascii")
    await asyncio.get_running_loop().sock_sendall(sock, bytes([len(data)]) + data)


async def receive_address(sock: socket.socket) -> str:
    """Where the other side says that this one comes from.

    Raises:
        OSError: it is gone.
        MalformedMessage: it says no address.
    """
    (length,) = await receive_exactly(sock, 1)
    if not 0 < length <= MAX_ADDRESS_BYTES:
        raise MalformedMessage(f"an address of {length} bytes: expected 1 to {MAX_ADDRESS_BYTES}")
    return (await receive_exactly(sock, length)).decode("ascii", "replace")


async def outside_address(endpoint: str, *, port: int = 0) -> tuple[str, int]:
    """How a front sees this machine, and from which port of it that was.

    Raises:
        OSError, TimeoutError: it does not answer.
        MalformedMessage: it says no address.
    """
    with closing(await dial(endpoint, port=port)) as sock:
        async with asyncio.timeout(GREETING_S):
            await asyncio.get_running_loop().sock_sendall(sock, MAGIC + PROBE)
            return await receive_address(sock), sock.getsockname()[1]


@dataclass(frozen=True, slots=True)
class FrontSays:
    """What a front tells whoever asks.

    Attributes:
        address: from where the question came, `host:port`.
        own_host: from where it was sent; another one if a router is between.
        other_port: of the front; 0: it has none.
        unix_s: its clock.
        version: of what it speaks.
        took_s: from the question to the answer.
    """

    address: str
    own_host: str
    other_port: int
    unix_s: float
    version: int
    took_s: float


async def ask_front(endpoint: str) -> FrontSays:
    """Where a front sees this machine, and what else it tells.

    Raises:
        OSError, TimeoutError: it does not answer.
        MalformedMessage: it says something else.
    """
    with closing(await dial(endpoint)) as sock:
        async with asyncio.timeout(GREETING_S):
            began_s = time.monotonic()
            await asyncio.get_running_loop().sock_sendall(sock, MAGIC + QUESTION)
            words = (await receive_address(sock)).split(" ")
            took_s = time.monotonic() - began_s
        own = host_of(endpoint_of(sock.getsockname()[:2]))
    try:
        address, port, unix_s, version = words
        return FrontSays(address, own, int(port), float(unix_s), int(version), took_s)
    except ValueError:
        raise MalformedMessage(
            f"{endpoint}: expected an address, a port, a time and a version"
        ) from None


async def is_dialled_back(endpoint: str, port: int) -> bool | None:
    """Whether a front can dial this port of this machine; None if it does not try.

    Raises:
        OSError, TimeoutError: it does not answer.
    """
    with closing(await dial(endpoint)) as sock:
        async with asyncio.timeout(GREETING_S + BACK_S):
            question = MAGIC + BACK + port.to_bytes(2, "big")
            await asyncio.get_running_loop().sock_sendall(sock, question)
            return {YES: True, NO: False}.get(await receive_exactly(sock, 1))


# ---- two sockets joined


class Joint:
    """Moves all bytes that come at one socket out at the other, both ways, until both ended.

    Where the system can (Linux), no byte passes through this process (`splice`). A thread for each
    direction: the kernel blocks, and the event loop sees none of it.

    Args:
        one: a socket that this owns from now on.
        other: the same.
        bytes_per_s: how many may pass each way now; asked again and again.
        shape: of the link of this machine, if it is one end: `one` goes over it.
    """

    def __init__(
        self,
        one: socket.socket,
        other: socket.socket,
        bytes_per_s: Callable[[], float] = lambda: math.inf,
        shape: Shape | None = None,
    ) -> None:
        self._pair = one, other
        self._bytes_per_s = bytes_per_s
        self._left = 2
        self._lock = threading.Lock()
        self._slow_until_s = -math.inf
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        self._moved_bytes = {one: 0, other: 0}
        self._moved_at_s = time.monotonic()
        for sock in self._pair:
            sock.setblocking(True)
        shape = shape or Shape()
        if shape.receive_buffer_bytes is not None:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, shape.receive_buffer_bytes)
        for way in ((one, other, shape.down), (other, one, shape.up)):
            # `threading.Thread.start` waits for the new thread, and the event loop with it.
            _thread.start_new_thread(self._move, way)

    @property
    def moved_bytes(self) -> int:
        """How many passed, both ways together; counted before an end is told to who receives."""
        return sum(self._moved_bytes.values())

    @property
    def idle_s(self) -> float:
        """Seconds since the last byte passed, whichever way."""
        return time.monotonic() - self._moved_at_s

    async def wait(self) -> None:
        """Until it is over; being cancelled ends it."""
        try:
            await self._over.wait()
        finally:
            self.close()

    def slow_down(self) -> None:
        """Read `one` slowly for a moment: `SLOW_BYTES` at a time, and then a pause."""
        self._slow_until_s = time.monotonic() + SLOW_S

    def close(self) -> None:
        """End it now, both ways."""
        for sock in self._pair:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _move(self, source: socket.socket, sink: socket.socket, gate: Gate) -> None:
        try:
            most_bytes = partial(self._most_bytes, source, gate)
            for num_bytes in _moved(source, sink, gate, most_bytes):
                self._moved_bytes[source] += num_bytes  # a thread counts for itself alone
                self._moved_at_s = time.monotonic()
                rate = self._bytes_per_s()
                if rate < math.inf:
                    time.sleep(num_bytes / rate)
                if self._is_slow(source):
                    time.sleep(SLOW_S)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            self.close()
        finally:
            self._ended()

    def _most_bytes(self, source: socket.socket, gate: Gate) -> int:
        return SLOW_BYTES if self._is_slow(source) else gate.chunk_bytes

    def _is_slow(self, source: socket.socket) -> bool:
        return source is self._pair[0] and time.monotonic() < self._slow_until_s

    def _ended(self) -> None:
        with self._lock:
            self._left -= 1
            is_last = not self._left
        if is_last:
            for sock in self._pair:
                sock.close()
            with suppress(RuntimeError):  # the loop may be gone by then
                self._loop.call_soon_threadsafe(self._over.set)


def _moved(
    source: socket.socket, sink: socket.socket, gate: Gate, most_bytes: Callable[[], int]
) -> Iterator[int]:
    """Move bytes as they come, `most_bytes` at a time, until the source ends.

    Yields:
        Number of bytes, each time.
    """
    move = _spliced if hasattr(os, "splice") else _copied
    return move(source, sink, gate, most_bytes)


def _spliced(
    source: socket.socket, sink: socket.socket, gate: Gate, most_bytes: Callable[[], int]
) -> Iterator[int]:
    with _pipe() as (outlet, inlet):
        while num_bytes := os.splice(source.fileno(), inlet, most_bytes()):
            gate.wait(num_bytes)
            left = num_bytes
            while left:
                left -= os.splice(outlet, sink.fileno(), left)
            yield num_bytes


@contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    outlet, inlet = os.pipe()
    try:
        yield outlet, inlet
    finally:
        os.close(outlet)
        os.close(inlet)


def _copied(
    source: socket.socket, sink: socket.socket, gate: Gate, most_bytes: Callable[[], int]
) -> Iterator[int]:
    buffer = memoryview(bytearray(gate.chunk_bytes))
    while num_bytes := source.recv_into(buffer, most_bytes()):
        gate.wait(num_bytes)
        sink.sendall(buffer[:num_bytes])
        yield num_bytes
