"""TCP sockets with the options of links, the preambles on them, and joints of two sockets.

A connection to a front port without TLS begins with a preamble: `SFT1`, one letter, and its data.

    O                   answered by the caller's address, then closed
    Q                   the same, with another port of this front, its clock and its version
    B + port            answered by whether the front can dial that port of the caller, or by `-`
                        if the front does not dial such addresses
    L + n + ticket      a leg to a relay: answered by that address; `J` when the other is there
    P + 16 bytes        a stream of a meeting: only its two sides can make and check the bytes

The caller confirms the stream of a meeting with a `U`; from then on all bytes are gRPC's.
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

from swarm_ft.base.systems import drop_after
from swarm_ft.errors import MalformedMessage
from swarm_ft.protocol.spec.bounds import host_of
from swarm_ft.reach.shaping import Gate, Shape
from swarm_ft.transport.grpc_options import IPV4_IN_IPV6, format_endpoint

MAGIC = b"SFT1"
PROBE, QUESTION, BACK, LEG, PAIR = b"O", b"Q", b"B", b"L", b"P"
YES, NO, UNTRIED = b"Y", b"N", b"-"
JOINED, CHOSEN = b"J", b"U"
PROOF_BYTES = 16
GREETING_S = 5.0
"""Seconds until a stream has to identify itself."""
SLOW_S, SLOW_BYTES = 0.25, 1 << 12
"""Seconds between two reads of a slowed connection, and bytes of a read."""
DEAD_AFTER_S = 8.0
"""Seconds without an acknowledgement after which a machine counts as gone."""
PROBE_AFTER_S = 3
"""Seconds of silence after which the kernel probes the other machine, which keeps NAT mappings."""
MAX_ADDRESS_BYTES = 100
BACK_S = 3.0
"""Seconds that a front tries to dial back."""

Address = tuple[str, int]


# ---- sockets


def new_socket(family: int, port: int = 0) -> socket.socket:
    """Return a non-blocking TCP socket, bound to a port that other sockets may share."""
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
    """Send without delay, and detect a dead machine, as far as the system can."""
    if sock.family not in {socket.AF_INET, socket.AF_INET6}:
        return
    tcp = socket.IPPROTO_TCP
    sock.setsockopt(tcp, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probes = int(DEAD_AFTER_S - PROBE_AFTER_S)
    for name, value in (
        ("TCP_KEEPIDLE", PROBE_AFTER_S),
        ("TCP_KEEPALIVE", PROBE_AFTER_S),  # macOS' name for it
        ("TCP_KEEPINTVL", 1),
        ("TCP_KEEPCNT", probes),
    ):
        if hasattr(socket, name):
            sock.setsockopt(tcp, getattr(socket, name), value)
    drop_after(sock, DEAD_AFTER_S)


async def dial(endpoint: str, *, port: int = 0, timeout_s: float = GREETING_S) -> socket.socket:
    """Return a connection to `host:port`.

    Args:
        endpoint: Endpoint of the server.
        port: Port of this machine to connect from; 0: any.
        timeout_s: Seconds for all of it.

    Raises:
        OSError: The server does not answer, or refuses.
        TimeoutError: The connection takes too long.
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
    """Receive exactly `num_bytes` bytes.

    Raises:
        OSError: The connection broke, or ended before.
    """
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < num_bytes:
        part = await loop.sock_recv(sock, num_bytes - len(data))
        if not part:
            raise ConnectionResetError(f"ended after {len(data)} of {num_bytes} bytes")
        data += part
    return data


def endpoint_of(address: Address) -> str:
    """Return `host:port`; an IPv4 address in IPv6 form becomes plain IPv4."""
    return format_endpoint(address[0].removeprefix(IPV4_IN_IPV6), address[1])


# ---- preambles


def proof(meeting: bytes, *, is_caller: bool) -> bytes:
    """Return the proof of one side of a meeting; it does not reveal the meeting's number."""
    side = b"caller" if is_caller else b"callee"
    return hashlib.blake2b(meeting, digest_size=PROOF_BYTES, person=side).digest()


async def exchange_proofs(sock: socket.socket, meeting: bytes, *, is_caller: bool) -> None:
    """Send this side's proof of the meeting, and check the other side's.

    Raises:
        OSError: The other side is gone.
        MalformedMessage: Another process answers.
    """
    mine = MAGIC + PAIR + proof(meeting, is_caller=is_caller)
    expected = MAGIC + PAIR + proof(meeting, is_caller=not is_caller)
    await asyncio.get_running_loop().sock_sendall(sock, mine)
    if await receive_exactly(sock, len(expected)) != expected:
        raise MalformedMessage("another machine than the expected one answers at this address")


async def send_address(sock: socket.socket, remote: Address) -> None:
    """Send the other side its own address."""
    await send_text(sock, endpoint_of(remote))


async def send_text(sock: socket.socket, text: str) -> None:
    """Send a short text, with its length before it."""
    data = text.encode("ascii")
    await asyncio.get_running_loop().sock_sendall(sock, bytes([len(data)]) + data)


async def receive_address(sock: socket.socket) -> str:
    """Receive this side's address from the other side.

    Raises:
        OSError: The other side is gone.
        MalformedMessage: The bytes are no address.
    """
    (length,) = await receive_exactly(sock, 1)
    if not 0 < length <= MAX_ADDRESS_BYTES:
        raise MalformedMessage(f"an address of {length} bytes: expected 1 to {MAX_ADDRESS_BYTES}")
    return (await receive_exactly(sock, length)).decode("ascii", "replace")


async def outside_address(endpoint: str, *, port: int = 0) -> tuple[str, int]:
    """Return this machine's address as a front sees it, and the local port of that connection.

    Raises:
        OSError, TimeoutError: The front does not answer.
        MalformedMessage: The answer is no address.
    """
    with closing(await dial(endpoint, port=port)) as sock:
        async with asyncio.timeout(GREETING_S):
            await asyncio.get_running_loop().sock_sendall(sock, MAGIC + PROBE)
            return await receive_address(sock), sock.getsockname()[1]


@dataclass(frozen=True, slots=True)
class FrontReply:
    """A front's answer to `ask_front`.

    Attributes:
        address: Address of this machine at the front, `host:port`.
        own_host: Host of the local socket; it differs behind a router.
        other_port: Another port of the front; 0: it has none.
        unix_s: The front's clock.
        version: The front's version of the protocol.
        took_s: Seconds from the request to the answer.
    """

    address: str
    own_host: str
    other_port: int
    unix_s: float
    version: int
    took_s: float


async def query_front(endpoint: str) -> FrontReply:
    """Return a front's view of this machine, with its clock and version.

    Raises:
        OSError, TimeoutError: The front does not answer.
        MalformedMessage: The answer has another form.
    """
    with closing(await dial(endpoint)) as sock:
        async with asyncio.timeout(GREETING_S):
            began_s = time.monotonic()
            await asyncio.get_running_loop().sock_sendall(sock, MAGIC + QUESTION)
            fields = (await receive_address(sock)).split(" ")
            took_s = time.monotonic() - began_s
        own = host_of(endpoint_of(sock.getsockname()[:2]))
    try:
        address, port, unix_s, version = fields
        return FrontReply(address, own, int(port), float(unix_s), int(version), took_s)
    except ValueError:
        raise MalformedMessage(
            f"{endpoint}: expected an address, a port, a time and a version"
        ) from None


async def is_dialled_back(endpoint: str, port: int) -> bool | None:
    """Return whether a front can dial this port of this machine; None if it does not try.

    Raises:
        OSError, TimeoutError: The front does not answer.
    """
    with closing(await dial(endpoint)) as sock:
        async with asyncio.timeout(GREETING_S + BACK_S):
            question = MAGIC + BACK + port.to_bytes(2, "big")
            await asyncio.get_running_loop().sock_sendall(sock, question)
            return {YES: True, NO: False}.get(await receive_exactly(sock, 1))


# ---- two sockets joined


class Joint:
    """Joint of two sockets: it moves all bytes both ways, until both directions end.

    Where the system can (Linux), no byte passes through this process (`splice`). Each direction has
    a thread: the kernel blocks, and the event loop is not involved.

    Args:
        one: A socket that the joint owns from now on.
        other: The other socket, which it owns too.
        bytes_per_s: Returns the present rate of each direction; called again and again.
        shape: Rates of this machine's link, if it is one end; `one` goes over the link.
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
        """Bytes that passed, both ways together; they are counted before the receiver's end."""
        return sum(self._moved_bytes.values())

    @property
    def idle_s(self) -> float:
        """Seconds since the last byte passed, in either direction."""
        return time.monotonic() - self._moved_at_s

    async def wait(self) -> None:
        """Wait until the joint is over; cancelling this ends it."""
        try:
            await self._over.wait()
        finally:
            self.close()

    def slow_down(self) -> None:
        """Read `one` slowly for a moment: `SLOW_BYTES` at a time, with pauses."""
        self._slow_until_s = time.monotonic() + SLOW_S

    def close(self) -> None:
        """End both directions now."""
        for sock in self._pair:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _move(self, source: socket.socket, sink: socket.socket, gate: Gate) -> None:
        try:
            most_bytes = partial(self._most_bytes, source, gate)
            for num_bytes in _moved(source, sink, gate, most_bytes):
                self._moved_bytes[source] += num_bytes  # each thread has its own count
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
            with suppress(RuntimeError):  # the loop may be closed
                self._loop.call_soon_threadsafe(self._over.set)


def _moved(
    source: socket.socket, sink: socket.socket, gate: Gate, most_bytes: Callable[[], int]
) -> Iterator[int]:
    """Move bytes on arrival, `most_bytes` at a time, until the source ends.

    Yields:
        Bytes of each move.
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
