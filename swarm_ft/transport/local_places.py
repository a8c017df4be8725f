"""Where a process meets its own gRPC, which cannot be given a socket: a place of this machine.

A path of the file system, into whose folder nobody else gets. Where a system has no sockets with
paths that Python and gRPC know (Windows), a port of loopback: others on the machine can connect to
that, meet the same TLS as at any port, and are refused calls, since they do not come through this
process's front.
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
"""Of a socket below the folder of temporary ones: its name is an endpoint, of IPv6 at most."""


class LocalPlace(ABC):
    """One place: somebody listens there, and somebody connects there, for others."""

    @property
    @abstractmethod
    def to_bind(self) -> str:
        """What a gRPC server is told to listen at."""

    @property
    @abstractmethod
    def target(self) -> str:
        """What a gRPC channel is told to connect to."""

    @abstractmethod
    def is_bound(self, port: int) -> None:
        """A gRPC server listens here now; this is what it calls the port."""

    @abstractmethod
    def listen(self) -> socket.socket:
        """A socket that listens here; it does not block."""

    @abstractmethod
    async def connect(self, remote: str) -> socket.socket:
        """A connection to whoever listens here, made for somebody at `host:port`.

        Raises:
            OSError: nobody listens, or not at once.
        """

    @abstractmethod
    def caller(self, peer: str) -> str:
        """For whom a connection was made.

        Args:
            peer: its other end, as gRPC calls it.

        Raises:
            NotAllowed: this process did not make it.
        """


class _Path(LocalPlace):
    """Whoever connects for somebody has bound a file of that one's endpoint."""

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
    """Whoever connects for somebody has written down from which port."""

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
            raise NotAllowed("a port for this process alone: others come to its front")
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
    """Places of this process, gone when it closes them."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._number = 0

    def new(self) -> LocalPlace:
        """One more."""
        if not systems.HAS_SOCKET_PATHS:
            return _Port()
        if self._folder is None:
            made = tempfile.mkdtemp(prefix="swarm-ft-", dir=systems.socket_parent(_NAME_BYTES))
            self._folder = Path(made)
        self._number += 1
        return _Path(self._folder / str(self._number))

    def close(self) -> None:
        """Remove what is left of them in the file system."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
