"""Who may be connected to an HTTP server: so many at once, and briefly unless they are let in.

Its port may be open to strangers. Each connection costs a file, and a TLS handshake; who opens many
and says nothing is to keep nobody else out.
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

from swarm_ft.log import get_logger
from swarm_ft.protocol.spec.bounds import checked_text, cut_text
from swarm_ft.transport.admission import address_of

logger = get_logger(__name__)

MAX_CONNECTIONS = 128
"""Four for each of 32 browsers. With those to metrics they are fewer than the 256 files that are
left beside connections of members (`transport.open_files`)."""
MAX_SCRAPES = 32
"""Connections to metrics: a Prometheus has one."""
ONE_ADDRESS = 0.5
"""Of all connections, that one address may have: all browsers may be behind one tunnel."""
STRANGER_S = 10.0
"""Until the request that lets it in, a handshake included."""
CLOSING_S, IDLE_S = 0.5, 15.0
LOGGED_EVERY_S = 1.0
MAX_LINE_BYTES = 200
NO_FILES_S = 0.1


class Complaints:
    """The log of all requests: one short line a second, whatever comes and however much."""

    def __init__(self) -> None:
        self._left_out, self._logged_s = 0, -math.inf

    def log(self, words: str) -> None:
        """Log a line; or count it, and the next line tells how many were left out.

        Args:
            words: cut to a short line, and made printable.
        """
        now_s = asyncio.get_running_loop().time()
        if now_s < self._logged_s + LOGGED_EVERY_S:
            self._left_out += 1
            return
        more = f" (and {self._left_out} more since the last line)" if self._left_out else ""
        line = cut_text(checked_text(words), MAX_LINE_BYTES)
        logger.warning("page: %s%s", line, more)
        self._left_out, self._logged_s = 0, now_s


class _ByCount(logging.Handler):
    """Counts what aiohttp would log."""

    def __init__(self, complaints: Complaints) -> None:
        super().__init__(logging.WARNING)
        self._complaints = complaints

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        self._complaints.log(f"a request could not be read ({type(error).__name__})")


@dataclass(slots=True)
class _Guest:
    sock: socket.socket
    address: str
    is_taken: bool = False
    is_connected: bool = False
    let_in: asyncio.Event = field(default_factory=asyncio.Event)


class Door:
    """See the module's docstring.

    Args:
        at_most: how many are connected at once.
        complaints: log what strangers cause.
        tls: with which all speak; None: plaintext.
    """

    def __init__(
        self, at_most: int, complaints: Complaints, tls: ssl.SSLContext | None = None
    ) -> None:
        self._at_most = at_most
        self._complaints = complaints
        self._tls = tls
        self._guests: dict[asyncio.BaseProtocol, _Guest] = {}
        self._greeting: dict[asyncio.BaseProtocol, asyncio.Task[None]] = {}

    async def open(self, stack: AsyncExitStack, app: web.Application, own: socket.socket) -> None:
        """Answer at this socket until the stack is closed."""
        # aiohttp logs a traceback of each request that it cannot read; here it is counted.
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
        """Whoever sent this may stay connected."""
        guest = self._guests.get(request.protocol)
        if guest is not None:
            guest.let_in.set()

    async def _close(self, accepting: asyncio.Task[None], own: socket.socket) -> None:
        tasks = [accepting, *self._greeting.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        own.close()
        for guest in self._guests.values():
            if not guest.is_taken:  # its task was cancelled before it began
                guest.sock.close()

    async def _accept_all(self, own: socket.socket, server: web.Server) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, remote = await loop.sock_accept(own)
            except OSError as error:  # out of files, or gone before it was taken
                self._complaints.log(f"no connection is accepted: {error.strerror}")
                await asyncio.sleep(NO_FILES_S)
                continue
            self._admit(sock, address_of(remote[0]), server)
            await asyncio.sleep(0)  # those that wait already give nobody else a turn

    def _admit(self, sock: socket.socket, address: str, server: web.Server) -> None:
        self._forget_gone()
        of_address = sum(guest.address == address for guest in self._guests.values())
        if len(self._guests) >= self._at_most or of_address >= ONE_ADDRESS * self._at_most:
            sock.close()
            self._complaints.log(f"a connection from {address} is refused: too many are open")
            return
        protocol, guest = server(), _Guest(sock, address)
        self._guests[protocol] = guest
        self._greeting[protocol] = asyncio.create_task(self._greet(protocol, guest))

    async def _greet(self, protocol: web.RequestHandler, guest: _Guest) -> None:
        """Have it served; hung up on if it is not let in soon."""
        connected = asyncio.get_running_loop().connect_accepted_socket
        guest.is_taken = True  # a transport closes it from here on
        closing_s = CLOSING_S if self._tls else None  # else half a minute, uncounted
        try:
            async with asyncio.timeout(STRANGER_S):
                await connected(
                    lambda: protocol, guest.sock, ssl=self._tls, ssl_shutdown_timeout=closing_s
                )
                guest.is_connected = True
                await guest.let_in.wait()
        except OSError:  # a timeout is one too
            if isinstance(protocol.transport, asyncio.Transport):
                protocol.transport.abort()
            self._guests.pop(protocol, None)

    def _forget_gone(self) -> None:
        for protocol, guest in tuple(self._guests.items()):
            is_gone = isinstance(protocol, web.RequestHandler) and protocol.transport is None
            if guest.is_connected and is_gone:
                del self._guests[protocol]
        for protocol in tuple(self._greeting.keys() - self._guests.keys()):
            self._greeting.pop(protocol).cancel()
