"""Watches the connections that others opened to this process, and drops what is too many.

gRPC's server keeps its sockets to itself, but they are this process's: what it has open can be
listed, asked for both ends, and shut down, after which gRPC sees a connection that ended. That
costs 20 microseconds a connection twice a second, and nothing for what goes over it. A listener in
front of gRPC that passes bytes on costs each byte: 0.25 to 0.37 s of processor time a Gbit instead
of 0.16 to 0.19 for both ends on loopback, spliced or copied, and a quarter of the throughput.
"""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from swarm_ft.log import get_logger
from swarm_ft.transport.admission import Incoming, surplus
from swarm_ft.transport.grpc_options import format_endpoint

logger = get_logger(__name__)

OPEN_FILES = Path("/dev/fd")
MAX_OPEN_FILES = 1 << 16
"""Asked of the system; some give a million, for which others then make tables."""
MAX_CONNECTIONS = 4096
"""In all, where the system allows as many."""
RESERVED_FILES = 256
"""Descriptors for what this process opens itself: journal, buffers, its own connections."""
FULL = 0.75
"""Of all connections; above it those without a call make room."""
SURVEY_S = 0.5
CROWDED_SURVEY_S = 0.1
"""Between two looks, and while more than half of all connections are taken."""

IPV4_IN_IPV6 = "::ffff:"
"""How a socket for both shows an IPv4 address."""

Address = tuple[str, int]
"""Host and port of a socket's end."""


def raise_open_files() -> int:
    """Let this process open as many files as the system lets it; the number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # a system that does not: the limit stays as it was
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def max_connections(open_files: int) -> int:
    """How many connections a server takes in all, so that files are left for its process."""
    if open_files < 0:  # no limit
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, open_files - min(RESERVED_FILES, open_files // 2)))


class Guard:
    """Keeps the connections to one port within bounds, as `surplus` says.

    Args:
        port: where this process listens.
        per_address: how many one address may have.
        total: how many the server takes in all.
        in_calls: the other ends of all connections that have a call under way.
    """

    def __init__(
        self, port: int, *, per_address: int, total: int, in_calls: Callable[[], Collection[str]]
    ) -> None:
        self._port = port
        self._per_address = per_address
        self._total = total
        self._in_calls = in_calls
        self._since_s: dict[Address, float] = {}

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(CROWDED_SURVEY_S if self._is_crowded else SURVEY_S)
            with suppress(OSError):  # no descriptor left to look with: gRPC frees some
                self.survey(loop.time())

    @property
    def _is_crowded(self) -> bool:
        return len(self._since_s) > self._total // 2

    def survey(self, now_s: float) -> int:
        """Drop what is too many now; how many that were.

        Raises:
            OSError: this process has no descriptor left to look with.
        """
        found = _others(self._port)
        self._since_s = {other: self._since_s.get(other, now_s) for other in found}
        in_calls = self._in_calls()
        present = [
            Incoming(*other, since_s, format_endpoint(*other) in in_calls)
            for other, since_s in self._since_s.items()
        ]
        wanted = int(self._total * FULL)
        dropped = surplus(present, now_s, per_address=self._per_address, wanted=wanted)
        if dropped:
            _shut_down(self._port, {(one.host, one.port) for one in dropped})
            logger.warning("connections-dropped n=%d first=%s", len(dropped), dropped[0].host)
        return len(dropped)


def _others(port: int) -> list[Address]:
    """The other ends of all connections to this port."""
    return [other for _, other in _sockets(port)]


def _shut_down(port: int, others: Collection[Address]) -> None:
    for sock, other in _sockets(port):
        if other in others:
            with suppress(OSError):  # it has just ended
                sock.shutdown(socket.SHUT_RDWR)


def _sockets(port: int) -> Iterator[tuple[socket.socket, Address]]:
    """Connections to this port, each open until the next one is asked for.

    They are copies, so what gRPC opens and closes meanwhile does no harm.
    """
    for name in os.listdir(OPEN_FILES):
        with suppress(OSError), _copy(int(name)) as sock:
            other = _other_end(sock, port)
            if other is not None:
                yield sock, other


@contextmanager
def _copy(number: int) -> Iterator[socket.socket]:
    """A descriptor of its own for a socket; OSError for anything else."""
    if not stat.S_ISSOCK(os.fstat(number).st_mode):
        raise OSError(errno.ENOTSOCK, "no socket")
    copy = os.dup(number)
    try:
        sock = socket.socket(fileno=copy)
    except OSError:  # it became something else since
        os.close(copy)
        raise
    with sock:
        yield sock


def _other_end(sock: socket.socket, port: int) -> Address | None:
    """Who is at the other end, if it is a connection to this port; OSError for a listener."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
        return None
    if sock.getsockname()[1] != port:
        return None
    host, other_port = sock.getpeername()[:2]
    return str(host).removeprefix(IPV4_IN_IPV6), int(other_port)
