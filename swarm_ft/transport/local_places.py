"""Local places: addresses at which a process connects to its own gRPC, which accepts no socket.

A place is a path of the file system, in a folder that only this user can enter. On a system whose
Python and gRPC have no such sockets (Windows) it is a port of loopback. Others on the machine can
connect to that port. They meet the same TLS there, and the server refuses their calls, since they
do not come through this process's front.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path
from urllib.parse import unquote

from swarm_ft import systems
from swarm_ft.errors import NotAllowed

BACKLOG = 8
LOOPBACK = "127.0.0.1"
_NAME_BYTES = len("swarm-ft-12345678/[]:65535") + 39
"""Bytes of a socket's path below the temporary folder: its name is at most an IPv6 endpoint."""


class LocalPlace(ABC):
    """An address for a listener and for connections on behalf of remote callers."""

    @property
    @abstractmethod
    def to_bind(self) -> str:
        """Address for a gRPC server's bind."""

    @property
    @abstractmethod
    def target(self) -> str:
        """Target for a gRPC channel."""

    @abstractmethod
    def is_bound(self, port: int) -> None:
        """Record the port that gRPC reported for a server bound here."""

    @abstractmethod
    def listen(self) -> socket.socket:
        """Return a non-blocking socket that listens here."""

    @abstractmethod
    async def connect(self, remote: str) -> socket.socket:
        """Return a connection to this place, on behalf of a caller at `host:port`.

        Raises:
            OSError: No socket listens, or it does not accept at once.
        """

    @abstractmethod
    def caller(self, peer: str) -> str:
        """Return the remote address on whose behalf a connection was made.

        Args:
            peer: Other end of the connection, in gRPC's form.

        Raises:
            NotAllowed: This process did not make the connection.
        """


class _Path(LocalPlace):
    """Place in the file system; a connection binds a file named after its remote caller."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def to_bind(self) -> str:
        return f"unix:{self._path}"

    target = to_bind

    def is_bound(self, port: int) -> None:
        pass

    def listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        return _listening(listener, str(self._path))

    async def connect(self, remote: str) -> socket.socket:
        inner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        name = self._path.with_name(remote)
        try:
            inner.setblocking(False)
            inner.bind(str(name))
            inner.connect(str(self._path))
        except BaseException:
            inner.close()
            raise
        finally:
            name.unlink(missing_ok=True)
        return inner

    def caller(self, peer: str) -> str:
        return unquote(peer).rpartition("/")[2]


class _Port(LocalPlace):
    """Place at a loopback port; it records the port of each connection that it makes."""

    def __init__(self) -> None:
        self._port = 0
        self._made: dict[str, tuple[str, socket.socket]] = {}

    @property
    def to_bind(self) -> str:
        return f"{LOOPBACK}:0"

    @property
    def target(self) -> str:
        return f"ipv4:{LOOPBACK}:{self._port}"

    def is_bound(self, port: int) -> None:
        self._port = port

    def listen(self) -> socket.socket:
        listener = _listening(socket.socket(socket.AF_INET, socket.SOCK_STREAM), (LOOPBACK, 0))
        self._port = listener.getsockname()[1]
        return listener

    async def connect(self, remote: str) -> socket.socket:
        inner = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            inner.setblocking(False)
            inner.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            inner.bind((LOOPBACK, 0))
            self._made = {at: made for at, made in self._made.items() if made[1].fileno() >= 0}
            self._made[f"ipv4:{LOOPBACK}:{inner.getsockname()[1]}"] = remote, inner
            await asyncio.get_running_loop().sock_connect(inner, (LOOPBACK, self._port))
        except BaseException:
            inner.close()
            raise
        return inner

    def caller(self, peer: str) -> str:
        if peer not in self._made:
            raise NotAllowed("this port is for its own process; use the process's public one")
        return self._made[peer][0]


def _listening(listener: socket.socket, address: str | tuple[str, int]) -> socket.socket:
    try:
        listener.setblocking(False)
        listener.bind(address)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


class LocalPlaces:
    """Places of this process; `close` removes them."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._number = 0

    def new(self) -> LocalPlace:
        """Return a new place."""
        if not systems.HAS_SOCKET_PATHS:
            return _Port()
        if self._folder is None:
            made = tempfile.mkdtemp(prefix="swarm-ft-", dir=systems.socket_parent(_NAME_BYTES))
            self._folder = Path(made)
        self._number += 1
        return _Path(self._folder / str(self._number))

    def close(self) -> None:
        """Remove the places' remaining files."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
