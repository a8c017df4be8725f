"""Limits on connections to an HTTP server: in number, and in time until they are admitted.

The port may be open to strangers. Each connection costs a file, and a TLS handshake; idle
connections must not starve others.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import ssl
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import cast

from aiohttp import web

from swarm_ft.base.log import get_logger
from swarm_ft.protocol.spec.bounds import clean_text, cut_text
from swarm_ft.transport.admission import address_of

logger = get_logger(__name__)

MAX_CONNECTIONS = 128
"""Connections to the page: four for each of 32 browsers.

With those to metrics they are fewer than the 256 files that members' connections leave free
(`transport.open_files`).
"""
MAX_SCRAPES = 32
"""Connections to metrics; a Prometheus needs one."""
ONE_ADDRESS = 0.5
"""Share of all connections for one address: all browsers may be behind one tunnel."""
STRANGER_S = 10.0
"""Seconds until a connection's admitting request, a handshake included."""
CLOSING_S, IDLE_S = 0.5, 15.0
LOGGED_EVERY_S = 1.0
MAX_LINE_BYTES = 200
NO_FILES_S = 0.1


class RequestLog:
    """Log of bad requests: one short line a second, whatever arrives."""

    def __init__(self) -> None:
        self._left_out, self._logged_s = 0, -math.inf

    def log(self, text: str) -> None:
        """Log a line, or count it; the next line includes the count.

        Args:
            text: Text of the line, which is cut, and made printable.
        """
        now_s = asyncio.get_running_loop().time()
        if now_s < self._logged_s + LOGGED_EVERY_S:
            self._left_out += 1
            return
        more = f" (and {self._left_out} more since the last line)" if self._left_out else ""
        line = cut_text(clean_text(text), MAX_LINE_BYTES)
        logger.warning("page: %s%s", line, more)
        self._left_out, self._logged_s = 0, now_s


class _ByCount(logging.Handler):
    """Handler that counts aiohttp's warnings instead of logging each."""

    def __init__(self, complaints: RequestLog) -> None:
        super().__init__(logging.WARNING)
        self._complaints = complaints

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        self._complaints.log(f"a request could not be read ({type(error).__name__})")


@dataclass(slots=True)
class _Client:
    sock: socket.socket
    address: str
    is_taken: bool = False
    is_connected: bool = False
    admitted: asyncio.Event = field(default_factory=asyncio.Event)


class ConnectionLimiter:
    """Limiter of an HTTP server's connections; see the module's docstring.

    Args:
        at_most: Connections at once.
        complaints: Log of what strangers cause.
        tls: TLS of all connections; None: plaintext.
    """

    def __init__(
        self, at_most: int, complaints: RequestLog, tls: ssl.SSLContext | None = None
    ) -> None:
        self._at_most = at_most
        self._complaints = complaints
        self._tls = tls
        self._clients: dict[asyncio.BaseProtocol, _Client] = {}
        self._greeting: dict[asyncio.BaseProtocol, asyncio.Task[None]] = {}

    async def open(self, stack: AsyncExitStack, app: web.Application, own: socket.socket) -> None:
        """Serve the app at this socket until the stack is closed."""
        # aiohttp logs a traceback for each unreadable request; this handler counts them.
        quiet = logging.Logger("aiohttp.server")
        quiet.addHandler(_ByCount(self._complaints))
        runner = web.AppRunner(
            app,
            access_log=None,
            logger=quiet,
            shutdown_timeout=CLOSING_S,
            keepalive_timeout=IDLE_S,
        )
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        server = cast(web.Server, runner.server)  # it is set up
        own.setblocking(False)
        accepting = asyncio.create_task(self._accept_all(own, server))
        stack.push_async_callback(self._close, accepting, own)

    def let_in(self, request: web.Request) -> None:
        """Admit the connection of this request, which may stay open."""
        client = self._clients.get(request.protocol)
        if client is not None:
            client.admitted.set()

    async def _close(self, accepting: asyncio.Task[None], own: socket.socket) -> None:
        tasks = [accepting, *self._greeting.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        own.close()
        for client in self._clients.values():
            if not client.is_taken:  # its task was cancelled before it began
                client.sock.close()

    async def _accept_all(self, own: socket.socket, server: web.Server) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, remote = await loop.sock_accept(own)
            except OSError as error:  # out of files, or gone before the accept
                self._complaints.log(f"no connection is accepted: {error.strerror}")
                await asyncio.sleep(NO_FILES_S)
                continue
            self._admit(sock, address_of(remote[0]), server)
            await asyncio.sleep(0)  # sock_accept does not yield if a connection is waiting

    def _admit(self, sock: socket.socket, address: str, server: web.Server) -> None:
        self._forget_gone()
        of_address = sum(client.address == address for client in self._clients.values())
        if len(self._clients) >= self._at_most or of_address >= ONE_ADDRESS * self._at_most:
            sock.close()
            self._complaints.log(f"a connection from {address} is refused: too many are open")
            return
        protocol, client = server(), _Client(sock, address)
        self._clients[protocol] = client
        self._greeting[protocol] = asyncio.create_task(self._greet(protocol, client))

    async def _greet(self, protocol: web.RequestHandler, client: _Client) -> None:
        """Serve a connection; abort it unless a request admits it in time."""
        connected = asyncio.get_running_loop().connect_accepted_socket
        client.is_taken = True  # a transport closes the socket from here on
        closing_s = CLOSING_S if self._tls else None  # the default is half a minute, uncounted
        try:
            async with asyncio.timeout(STRANGER_S):
                await connected(
                    lambda: protocol, client.sock, ssl=self._tls, ssl_shutdown_timeout=closing_s
                )
                client.is_connected = True
                await client.admitted.wait()
        except OSError:  # a timeout is an OSError too
            if isinstance(protocol.transport, asyncio.Transport):
                protocol.transport.abort()
            self._clients.pop(protocol, None)

    def _forget_gone(self) -> None:
        for protocol, client in tuple(self._clients.items()):
            is_gone = isinstance(protocol, web.RequestHandler) and protocol.transport is None
            if client.is_connected and is_gone:
                del self._clients[protocol]
        for protocol in tuple(self._greeting.keys() - self._clients.keys()):
            self._greeting.pop(protocol).cancel()
