"""The links between machines, and the connections over them: delay, loss, silence. No calls yet.

Modelled on TCP under gRPC: bytes of one direction of a connection arrive in order or not at all.
So a message cannot be lost, doubled or reordered inside a connection that lives. A connection dies
with all that is under way in it, and each side learns so in its own time, or by keepalive.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass
from random import Random

from tests.simulation.loop import Process, VirtualLoop

KEEPALIVE_S = 8.0
"""Silence after which a connection counts as dead; see `transport.grpc_options`."""
CONNECT_TIMEOUT_S = 5.0
MAX_JITTER = 0.25
"""Of a link's latency."""


@dataclass(slots=True)
class Link:
    """One direction between two machines.

    Attributes:
        latency_s: one way.
        bytes_per_s: bandwidth, shared by all connections over it.
        blocked: nothing gets through now; what was sent waits (TCP sends it again).
        free_at_s: when the last byte put on it is through.
    """

    latency_s: float
    bytes_per_s: float
    blocked: bool = False
    free_at_s: float = 0.0


class Side:
    """One end of a connection.

    Attributes:
        process: whose end it is.
        lost: why the connection is dead as far as this side knows; empty while it is not.
    """

    def __init__(self, process: Process) -> None:
        self.process = process
        self.lost = ""


class Pipe:
    """One direction of a connection: what is put in comes out later, in order."""

    def __init__(self, wires: Wires, connection: Connection, source: Side, target: Side) -> None:
        self._wires = wires
        self._connection = connection
        self._source = source
        self._target = target
        self._last_s = 0.0
        self._delayed: list[Callable[[], None]] = []

    @property
    def link(self) -> Link:
        """Return the link that it uses."""
        return self._wires.link(self._source.process.name, self._target.process.name)

    def put(self, num_bytes: int, arrive: Callable[[], None], late_s: float = 0.0) -> None:
        """Send; `arrive` is called when it is there, unless the connection dies first.

        What is `late_s` seconds late lets others overtake it, as only a broken sender does.
        """
        wires, link = self._wires, self.link
        sent_s = max(wires.loop.time(), link.free_at_s) + num_bytes / link.bytes_per_s
        link.free_at_s = sent_s
        delay_s = link.latency_s * (1 + MAX_JITTER * wires.rng.random())
        self._last_s = max(self._last_s, sent_s + delay_s)
        wires.at(self._last_s + late_s, lambda: self._come(arrive))

    def _come(self, arrive: Callable[[], None]) -> None:
        if self._connection.severed or self._target.lost or not self._target.process.alive:
            return
        if self._delayed or self._connection.stalled or self.link.blocked:
            self._delayed.append(arrive)
        else:
            arrive()

    def release(self) -> None:
        """The link works again: all that waited arrives."""
        delayed, self._delayed = self._delayed, []
        for arrive in delayed:
            self._come(arrive)


class Connection:
    """Between a client's process and a server's.

    Args:
        on_lost: called once for each side that learns of the connection's death.
    """

    def __init__(
        self,
        wires: Wires,
        client: Process,
        server: Process,
        on_lost: Callable[[Connection, Side], None],
    ) -> None:
        self.client, self.server = Side(client), Side(server)
        self.up = Pipe(wires, self, self.client, self.server)
        self.down = Pipe(wires, self, self.server, self.client)
        self.stalled = False
        self.severed = False
        self._wires = wires
        self._on_lost = on_lost
        self._silence = 0
        self._is_silent = False

    @property
    def is_over(self) -> bool:
        """Whether no side that lives believes in it any more."""
        sides = (self.client, self.server)
        return all(side.lost or not side.process.alive for side in sides)

    def lose(self, side: Side, reason: str) -> None:
        """One side learns that the connection is dead."""
        self.severed = True
        if not side.lost:
            side.lost = reason
            if side.process.alive:
                self._on_lost(self, side)

    def close(self, side: Side, reason: str) -> None:
        """One side is done with it (or was killed); the other learns so over the link."""
        other = self.server if side is self.client else self.client
        pipe = self.up if side is self.client else self.down
        pipe.put(0, lambda: self.lose(other, reason))
        side.lost = side.lost or reason

    def sever(self) -> None:
        """Cut it: what is under way is gone; one side learns soon, the other perhaps late."""
        rng = self._wires.rng
        sides = [self.client, self.server]
        rng.shuffle(sides)
        self.severed = True
        late_s = rng.choice((0.0, rng.random(), KEEPALIVE_S * rng.random()))
        now_s = self._wires.loop.time()
        for side, delay_s in zip(sides, (0.05 * rng.random(), late_s), strict=True):
            self._wires.at(now_s + delay_s, self._loser(side, "the connection was reset"))

    def _loser(self, side: Side, reason: str) -> Callable[[], None]:
        return lambda: self.lose(side, reason)

    def look(self) -> None:
        """Something about the links or the processes changed: is it silent now, or again not?"""
        is_silent = self._round_trip_is_blocked()
        if is_silent and not self._is_silent:
            self._silence += 1
            self._wires.at(self._wires.loop.time() + KEEPALIVE_S, self._keepalive_of(self._silence))
        self._is_silent = is_silent
        if not self.stalled:
            for pipe in (self.up, self.down):
                if not pipe.link.blocked:
                    pipe.release()

    def _keepalive_of(self, silence: int) -> Callable[[], None]:
        def check() -> None:
            if self._is_silent and self._silence == silence:
                for side in (self.client, self.server):
                    self.lose(side, "the connection is silent (keepalive)")

        return check

    def _round_trip_is_blocked(self) -> bool:
        asleep = any(s.process.paused or not s.process.alive for s in (self.client, self.server))
        return asleep or self.stalled or self.up.link.blocked or self.down.link.blocked


class Wires:
    """All links and connections.

    Args:
        loop: for time.
        rng: draws links and delays.
    """

    def __init__(self, loop: VirtualLoop, rng: Random) -> None:
        self.loop = loop
        self.rng = rng
        self._links: dict[tuple[str, str], Link] = {}
        self._connections: list[Connection] = []
        self._context = Context()

    def at(self, when_s: float, happen: Callable[[], None]) -> None:
        """Let something happen that belongs to no process."""
        self.loop.call_at(when_s, happen, context=self._context)

    def link(self, source: str, target: str) -> Link:
        """The link from one machine to another; drawn when it is first used."""
        link = self._links.get((source, target))
        if link is None:
            latency_s = 10 ** self.rng.uniform(-3, -1)
            link = Link(latency_s, 10 ** self.rng.uniform(5.5, 8))
            self._links[source, target] = link
        return link

    def connect(
        self, client: Process, server: Process, on_lost: Callable[[Connection, Side], None]
    ) -> Connection:
        """A new connection."""
        made = Connection(self, client, server, on_lost)
        self._connections = [*(c for c in self._connections if not c.is_over), made]
        made.look()
        return made

    def between(self, one: str, other: str) -> list[Connection]:
        """Connections between two machines, in the order they were made."""
        names = {one, other}
        return [
            c
            for c in self._connections
            if {c.client.process.name, c.server.process.name} == names and not c.severed
        ]

    def end_of(self, process: Process, *, silently: bool) -> None:
        """A process was killed: its system closes its connections, or is gone with it."""
        for connection in self._connections:
            for side in (connection.client, connection.server):
                if side.process is process and not silently:
                    connection.close(side, "the other side is gone")
        self.look()

    def look(self) -> None:
        """Links or processes changed."""
        for connection in self._connections:
            connection.look()
