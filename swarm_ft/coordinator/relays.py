"""Relays: who is one now, and which of them a meeting gets.

A relay keeps one conversation open (rpc Relay). It receives the key that tickets are signed with,
reports every two seconds what it carries, and each leg as it comes with the address of its socket.
A relay that falls silent is gone, and no meeting gets it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from swarm_ft.errors import Busy, MalformedMessage, NotAllowed, Unavailable
from swarm_ft.log import get_logger
from swarm_ft.protocol.messages.client import RelayStatus
from swarm_ft.protocol.messages.meeting import (
    MAX_RELAYS,
    FromRelay,
    LegSeen,
    RelayCarries,
    RelayHello,
    RelayPlace,
    RelayWelcome,
)
from swarm_ft.protocol.spec.bounds import host_of, is_loopback, is_private
from swarm_ft.transport.base import Handler, MessageStream, Method
from swarm_ft.transport.grpc_options import IPV4_IN_IPV6, addresses_of, format_endpoint
from swarm_ft.transport.methods import RELAY

if TYPE_CHECKING:
    from swarm_ft.identity.keys import PrivateKey

logger = get_logger(__name__)

SILENT_S = 6.0
"""A relay that says nothing for so long is gone: before its links notice, and ask for another."""
NAME_S = 2.0
"""How long it may take to find a name's address."""
UNREACHED_S = 1e6
"""How far a relay is from a member that does not reach it."""

Distances = Mapping[str, float]
"""Seconds there and back, by a relay's endpoint; what is not in it is not reached."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Relaying:
    """A relay that is there.

    Attributes:
        name: of its key; empty: the coordinator's own.
        place: where it is.
        carries: as it last said.
    """

    name: str = ""
    place: RelayPlace
    carries: RelayCarries = RelayCarries()  # noqa: RUF009 - a value


def nearest(
    relays: Iterable[Relaying], one: Distances | None, other: Distances | None
) -> RelayPlace | None:
    """The relay for two members: of those with room, that with the least way for both together.

    Args:
        relays: those that are there, the first one preferred where nothing else decides.
        one: how far they are from one member; None: it has not said.
        other: from the other.
    """

    def round_trips_s(relay: Relaying) -> float:
        endpoint = relay.place.endpoint
        return sum(0.0 if d is None else d.get(endpoint, UNREACHED_S) for d in (one, other))

    known = tuple(relays)
    with_room = [relay for relay in known if not relay.carries.is_full]
    found = min(with_room or known, key=round_trips_s, default=None)
    return found.place if found else None


class RelayRoll:
    """See the module's docstring.

    Args:
        key: the coordinator's, as of now; signs tickets.
    """

    def __init__(self, key: Callable[[], PrivateKey]) -> None:
        self._key = key
        self._listeners: list[Callable[[], object]] = []
        self._leg_listener: Callable[[str, LegSeen], object] = lambda _relay, _leg: None
        self._own: Callable[[], Relaying] | None = None
        self._streams: dict[str, object] = {}
        self._present: dict[str, Relaying] = {}
        self._revoked: frozenset[str] = frozenset()

    @property
    def present(self) -> tuple[Relaying, ...]:
        """Those that are there, the coordinator's own first."""
        return (*([self._own()] if self._own else ()), *self._present.values())

    @property
    def statuses(self) -> tuple[RelayStatus, ...]:
        """All of them, for people."""
        return tuple(
            RelayStatus(
                name=relay.name,
                endpoint=relay.place.endpoint,
                links=relay.carries.links,
                relayed_bytes=relay.carries.relayed_bytes,
            )
            for relay in self.present
        )

    def handlers(self) -> Mapping[Method[Any, Any], Handler]:
        """What this answers, for `Transport.serve`."""
        return {RELAY: self._serve}

    def on_change(self, listener: Callable[[], object]) -> None:
        """Tell it whenever there are other relays than before."""
        self._listeners.append(listener)

    def on_leg(self, listener: Callable[[str, LegSeen], object]) -> None:
        """Call it with each leg that a relay reports, and with that relay's endpoint."""
        self._leg_listener = listener

    def have_own(self, own: Callable[[], Relaying]) -> None:
        """The coordinator has a relay of its own, from now on.

        Args:
            own: tells of it, as of now.
        """
        self._own = own
        self._changed()

    def own_leg(self, leg: LegSeen) -> None:
        """A leg came to the coordinator's own relay, in this process."""
        if self._own is not None:
            self._leg_listener(self._own().place.endpoint, leg)

    def revoke(self, names: frozenset[str]) -> None:
        """Whoever of these is a relay is none any more."""
        self._revoked = names
        if gone := names & self._present.keys():
            for name in gone:
                del self._present[name]
            self._changed()

    async def _serve(self, stream: MessageStream[RelayWelcome, FromRelay]) -> None:
        if stream.caller is None:
            raise NotAllowed("relays are for swarms with keys")
        name, hello = stream.caller.name, await stream.receive()
        if not isinstance(hello, RelayHello):
            raise MalformedMessage(f"relay {name}: expected a hello as the first message")
        host = host_of(stream.remote).removeprefix(IPV4_IN_IPV6)
        place = RelayPlace(
            endpoint=await placed(hello.endpoint, host),
            probe_endpoint=await placed(hello.probe_endpoint, host),
        )
        self._check_room(name, place)
        self._streams[name] = stream
        from swarm_ft.identity.keys import key_der  # needs cryptography

        key, now_s = key_der(self._key().public_key()), time.time()
        welcome = RelayWelcome(ticket_key=key, endpoint=place.endpoint, unix_s=now_s)
        try:
            await stream.send(welcome)
            while (report := await _report(stream)) is not None:
                self._check_current(stream, name)
                if isinstance(report, LegSeen):
                    self._leg_listener(place.endpoint, report)
                else:
                    self._heard(Relaying(name=name, place=place, carries=report))
        finally:
            if self._streams.get(name) is stream:
                del self._streams[name]
                self._gone(name)

    def _changed(self) -> None:
        for listener in self._listeners:
            listener()

    def _check_room(self, name: str, place: RelayPlace) -> None:
        known = self._present.get(name)
        if known is not None and known.place != place:
            raise Unavailable(f"relay {name} is there already, at {known.place.endpoint}")
        if known is None and len(self.present) >= MAX_RELAYS:
            raise Busy(f"this swarm has {MAX_RELAYS} relays; try again when one is gone")

    def _check_current(self, stream: object, name: str) -> None:
        if name in self._revoked:
            raise NotAllowed(f"relay {name}: its key was revoked")
        if self._streams.get(name) is not stream:
            raise Unavailable(f"relay {name} has called anew")

    def _heard(self, relay: Relaying) -> None:
        # It counts from its first word on: it has the key then, and takes legs.
        is_new = relay.name not in self._present
        self._present[relay.name] = relay
        if is_new:
            logger.info("relay %s is at %s", relay.name, relay.place.endpoint)
            self._changed()

    def _gone(self, name: str) -> None:
        relay = self._present.pop(name, None)
        if relay is not None:
            logger.info("relay %s at %s is gone", name, relay.place.endpoint)
            self._changed()


async def _report(
    stream: MessageStream[RelayWelcome, FromRelay],
) -> RelayCarries | LegSeen | None:
    """Receive the next report of a relay; None: it has ended."""
    try:
        async with asyncio.timeout(SILENT_S):
            said = await stream.receive()
    except TimeoutError:
        raise Unavailable(f"the relay at {stream.remote} was silent for {SILENT_S:g} s") from None
    if isinstance(said, RelayHello):
        raise MalformedMessage(f"{stream.remote}: a relay said hello twice")
    return said


async def placed(endpoint: str, host: str) -> str:
    """Where members find a relay whose call comes from `host`.

    There, whatever private address it has: it may not have them dial others. Only in the
    coordinator's own network, from where its public address cannot be seen, it is believed.

    Raises:
        NotAllowed: it says that it is elsewhere.
    """
    found = await addresses_of(endpoint)
    hosts = [host_of(one) for one in found]
    if host in hosts:
        return found[hosts.index(host)]
    if found and (is_private(host) or is_loopback(host)):
        return found[0]
    if found and is_private(hosts[0]):
        return format_endpoint(host, int(endpoint.rpartition(":")[2]))
    raise NotAllowed(
        f"a relay says that it is at {endpoint}, and calls from {host}: start it with "
        f"'--announce {host}', and dial the coordinator from there"
    )
