"""Front: the one public port of a process, which sorts connections by their first byte.

TLS goes to gRPC, which itself listens at a place of this process (`transport.local_places`). Every
other connection begins with a preamble (`reach.sockets`), and goes to the handler that this process
registered. A front serves plaintext only if configured so.
"""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress

from swarm_ft.base.log import get_logger
from swarm_ft.base.systems import hold_port
from swarm_ft.errors import SwarmError
from swarm_ft.protocol.machines.rate import Rate
from swarm_ft.protocol.spec.addresses import may_dial
from swarm_ft.protocol.spec.bounds import host_of
from swarm_ft.protocol.spec.version import PROTOCOL_VERSION
from swarm_ft.reach.shaping import Shape
from swarm_ft.reach.sockets import (
    BACK,
    BACK_S,
    GREETING_S,
    LEG,
    MAGIC,
    NO,
    PAIR,
    PROBE,
    QUESTION,
    UNTRIED,
    YES,
    Address,
    Joint,
    dial,
    endpoint_of,
    receive_exactly,
    send_address,
    send_text,
    tune,
)
from swarm_ft.transport.admission import MAX_PER_ADDRESS, Incoming, address_of, connections_to_drop
from swarm_ft.transport.local_places import LocalPlace
from swarm_ft.transport.open_files import max_connections, raise_open_files

logger = get_logger(__name__)

_TLS, _HTTP2 = b"\x16", b"P"
"""First bytes of a TLS handshake, and of gRPC without one."""
BACKLOG = 128
FILES_PER_CONNECTION = 6
"""Files of a connection: its socket, the one to gRPC, and a pipe each way."""
FULL = 0.75
"""Share of all connections above which those without a call make room."""

BACKS_PER_S = 1.0
"""Dials back to one address per second; an earlier request waits."""
ONE_ADDRESS = 0.25
"""Share of all connections that one address may have, however few there are."""
LOG_EVERY_S = 1.0

Visit = Callable[[socket.socket, Address], Awaitable[None]]
"""Handler of a connection whose preamble's letter was read; it owns the socket."""


class Front:
    """Public port of a process; see the module's docstring.

    Args:
        plaintext: Whether the front accepts gRPC without TLS.
        per_address: Connections that one address may have.
        shape: Rates of this machine's link.
    """

    def __init__(
        self,
        *,
        plaintext: bool = False,
        per_address: int = MAX_PER_ADDRESS,
        shape: Shape | None = None,
    ) -> None:
        self._shape = shape
        self._grpc: LocalPlace | None = None
        self._in_calls: Callable[[], Collection[str]] = tuple
        self._grpc_bytes = {_TLS, _HTTP2} if plaintext else {_TLS}
        self._visits: dict[bytes, Visit] = {
            PROBE: _send_address,
            QUESTION: self._answer,
        }
        self._back_host = ""
        self._backs: Rate[str] = Rate(per_s=BACKS_PER_S, burst=1)
        self._ports: list[int] = []
        self._listeners: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._at_most = max(1, max_connections(raise_open_files()) // FILES_PER_CONNECTION)
        self._per_address = max(1, min(per_address, int(ONE_ADDRESS * self._at_most)))
        self._present: dict[Incoming, asyncio.Task[None]] = {}
        self._dropped, self._logged_s = 0, -math.inf
        self._kept: dict[str, socket.socket] = {}
        self._joints: dict[str, Joint] = {}

    @property
    def protected(self) -> Collection[str]:
        """Other ends of connections that are in use without gRPC's knowledge."""
        self._kept = {end: sock for end, sock in self._kept.items() if sock.fileno() >= 0}
        return self._kept.keys()

    def keep(self, sock: socket.socket, remote: Address) -> None:
        """Protect a connection that showed a ticket or a meeting's proof."""
        self._kept[endpoint_of(remote)] = sock

    def pass_tls_to(self, grpc: LocalPlace, in_calls: Callable[[], Collection[str]]) -> None:
        """Pass TLS connections to gRPC from now on; before, the front refuses them.

        Args:
            grpc: Place at which gRPC listens.
            in_calls: Returns the other ends of connections with a call under way.
        """
        self._grpc, self._in_calls = grpc, in_calls

    def on_pair(self, visit: Visit) -> None:
        """Set the handler of streams of meetings."""
        self._visits[PAIR] = visit

    def on_leg(self, visit: Visit) -> None:
        """Set the handler of legs of a relay."""
        self._visits[LEG] = visit

    def dial_back_from(self, host: str) -> None:
        """Answer requests to dial a port back; without this call the front refuses them.

        A stranger may send such a request, so the front must not dial addresses that only this
        machine or its network reaches: behind a proxy, all addresses are the proxy's own.

        Args:
            host: Address at which this process is announced. The front dials loopback and private
                addresses only if this is one.
        """
        self._back_host = host
        self._visits[BACK] = self._dial_back

    async def listen(self, host: str, port: int) -> str:
        """Accept connections at one more port; return its endpoint.

        Raises:
            OSError: The port cannot be bound.
        """
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            hold_port(listener)
            listener.setblocking(False)
            listener.bind(address)
            listener.listen(BACKLOG)
        except BaseException:
            listener.close()
            raise
        self._listeners.append(listener)
        self._ports.append(listener.getsockname()[1])
        self._accepting.append(asyncio.create_task(self._accept_all(listener)))
        return endpoint_of((host, listener.getsockname()[1]))

    async def serve(self, stream: socket.socket, remote: Address, first: bytes = b"") -> None:
        """Serve gRPC on a stream of any origin, until the stream ends.

        Args:
            stream: Socket, which the front owns from now on.
            remote: Address of the other end.
            first: Bytes that were read already.

        Raises:
            OSError: gRPC does not answer.
        """
        inner: socket.socket | None = None
        try:
            inner = self._inner(remote)
            await asyncio.get_running_loop().sock_sendall(inner, first)
        except BaseException:
            stream.close()
            if inner is not None:
                inner.close()
            raise
        end, joint = endpoint_of(remote), Joint(stream, inner, shape=self._shape)
        self._joints[end] = joint
        try:
            await joint.wait()
        finally:
            if self._joints.get(end) is joint:
                del self._joints[end]

    def slow_down(self, remote: str) -> None:
        """Read the connection of this other end slowly for a moment.

        gRPC reads and decrypts bytes at once, and stores messages that no call has requested.
        Unread bytes make their sender's TCP wait.
        """
        joint = self._joints.get(remote)
        if joint is not None:
            joint.slow_down()

    async def close(self) -> None:
        """Accept no more connections, and end the present ones."""
        for listener in self._listeners:
            listener.close()
        tasks = [*self._accepting, *self._present.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept_all(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, remote = await loop.sock_accept(listener)
            except OSError as error:  # out of files, or gone before the accept
                logger.warning("front: %s", error.strerror)
                await asyncio.sleep(0.1)
                continue
            self._admit(sock, remote[:2])
            await asyncio.sleep(0)  # sock_accept does not yield if a connection is waiting

    def _admit(self, sock: socket.socket, remote: Address) -> None:
        """Admit a connection, and drop others for it, or itself.

        The front decides at each arrival. So one address never has more than its share, however
        fast its connections arrive, and all others find room.
        """
        new = Incoming(*remote, asyncio.get_running_loop().time(), in_call=False)
        dropped = self._surplus(new)
        for one in dropped:
            if one in self._present:
                self._present[one].cancel()
        self._log_dropped(dropped, new.since_s)
        if new in dropped:
            sock.close()
            return
        task = asyncio.create_task(self._greet(sock, remote))
        self._present[new] = task
        task.add_done_callback(lambda _: self._ended(new, sock))

    def _ended(self, one: Incoming, sock: socket.socket) -> None:
        if self._present.pop(one).cancelled():  # perhaps before the task began
            sock.close()

    def _log_dropped(self, dropped: list[Incoming], now_s: float) -> None:
        """Log at most one line a second, so that a flood does not fill the log."""
        self._dropped += len(dropped)
        if self._dropped and now_s >= self._logged_s + LOG_EVERY_S:
            logger.warning("connections-dropped n=%d", self._dropped)
            self._dropped, self._logged_s = 0, now_s

    def _surplus(self, new: Incoming) -> list[Incoming]:
        if len(self._present) < self._per_address:
            return []
        busy = {*self.protected, *self._in_calls()}
        known = {one._replace(in_call=endpoint_of(one[:2]) in busy): one for one in self._present}
        dropped = connections_to_drop(
            [*known, new],
            new.since_s,
            per_address=self._per_address,
            wanted=int(FULL * self._at_most),
        )
        if len(known) - len(dropped) >= self._at_most:
            dropped.append(new)
        return [known.get(one, one) for one in dropped]

    async def _greet(self, sock: socket.socket, remote: Address) -> None:
        """Read the first bytes, within a limit of time, and pass the connection on."""
        try:
            tune(sock)
            async with asyncio.timeout(GREETING_S):
                first = await receive_exactly(sock, 1)
                visit = None if first in self._grpc_bytes else await self._visit(sock, first)
            if visit is None:
                await self.serve(sock, remote, first)
            else:
                await visit(sock, remote)
        except (OSError, SwarmError, TimeoutError) as error:
            logger.debug("front: %s: %s", endpoint_of(remote), error)
            sock.close()
        except asyncio.CancelledError:
            sock.close()
            raise

    async def _answer(self, sock: socket.socket, remote: Address) -> None:
        try:
            other = self._ports[1] if len(self._ports) > 1 else 0
            text = f"{endpoint_of(remote)} {other} {time.time():.3f} {PROTOCOL_VERSION}"
            await send_text(sock, text)
        finally:
            sock.close()

    async def _dial_back(self, sock: socket.socket, remote: Address) -> None:
        """Dial the caller's own address, and no other."""
        try:
            async with asyncio.timeout(GREETING_S):
                port = int.from_bytes(await receive_exactly(sock, 2), "big")
                await self._wait_for_turn(remote[0])
            answer = await self._is_dialled(endpoint_of((remote[0], port)))
            await asyncio.get_running_loop().sock_sendall(sock, answer)
        finally:
            sock.close()

    async def _wait_for_turn(self, host: str) -> None:
        wait_s = self._backs.wait_s(address_of(host), time.monotonic())
        while wait_s:
            await asyncio.sleep(wait_s)
            wait_s = self._backs.wait_s(address_of(host), time.monotonic())

    async def _is_dialled(self, endpoint: str) -> bytes:
        if not may_dial(self._back_host, host_of(endpoint)):
            return UNTRIED
        with suppress(OSError, TimeoutError):
            (await dial(endpoint, timeout_s=BACK_S)).close()
            return YES
        return NO

    def _inner(self, remote: Address) -> socket.socket:
        """Return a connection to this process's gRPC, which learns the remote address."""
        if self._grpc is None:
            raise ConnectionRefusedError("gRPC is not served here")
        return self._grpc.connect(endpoint_of(remote))

    async def _visit(self, sock: socket.socket, first: bytes) -> Visit:
        rest = await receive_exactly(sock, len(MAGIC))
        visit = self._visits.get(rest[-1:])
        if first + rest[:-1] != MAGIC or visit is None:
            raise ConnectionRefusedError("expected TLS or a preamble of swarm-ft")
        return visit


async def _send_address(sock: socket.socket, remote: Address) -> None:
    try:
        await send_address(sock, remote)
    finally:
        sock.close()
