"""Local places: addresses at which a process connects to its own gRPC, which accepts no socket.

A place is a path of the file system, in a folder that only this user can enter.
"""

from __future__ import annotations

import shutil
import socket
import tempfile
from pathlib import Path
from urllib.parse import unquote

from swarm_ft.base import systems

BACKLOG = 8
_NAME_BYTES = len("swarm-ft-12345678/[]:65535") + 39
"""Bytes of a socket's path below the temporary folder: its name is at most an IPv6 endpoint."""


class LocalPlace:
    """An address for a listener and for connections on behalf of remote callers.

    A connection binds a file that is named after its remote caller.

    Args:
        path: Path of the listener's socket.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def target(self) -> str:
        """Address for a gRPC server's bind, and target for a channel."""
        return f"unix:{self._path}"

    def listen(self) -> socket.socket:
        """Return a non-blocking socket that listens here."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.setblocking(False)
            listener.bind(str(self._path))
            listener.listen(BACKLOG)
        except BaseException:
            listener.close()
            raise
        return listener

    def connect(self, remote: str) -> socket.socket:
        """Return a connection to this place, on behalf of a caller at `host:port`.

        Raises:
            OSError: No socket listens, or it does not accept at once.
        """
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


def caller_of(peer: str) -> str:
    """Return the remote address on whose behalf a connection was made.

    Args:
        peer: Other end of the connection, in gRPC's form.
    """
    return unquote(peer).rpartition("/")[2]


class LocalPlaces:
    """Places of this process; `close` removes them."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._number = 0

    def new(self) -> LocalPlace:
        """Return a new place."""
        if self._folder is None:
            made = tempfile.mkdtemp(prefix="swarm-ft-", dir=systems.socket_parent(_NAME_BYTES))
            self._folder = Path(made)
        self._number += 1
        return LocalPlace(self._folder / str(self._number))

    def close(self) -> None:
        """Remove the places' remaining files."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
