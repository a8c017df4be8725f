"""Connected relays, and the choice of one for a meeting.

A relay keeps one stream open (rpc Relay). It receives the key that signs tickets. It reports its
load every two seconds, and each new leg with the address of its socket. A silent relay is removed,
and no meeting uses it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from swarm_ft.base.log import get_logger
from swarm_ft.errors import Busy, MalformedMessage, NotAllowed, Unavailable
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
"""Seconds of silence after which a relay is removed: before its links notice and request
another."""
NAME_S = 2.0
"""Seconds that the resolution of a host name may take."""
UNREACHED_S = 1e6
"""Seconds that stand for the distance of a relay that a member does not reach."""

Distances = Mapping[str, float]
"""Round-trip seconds to each relay, by endpoint; a missing relay is not reached."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConnectedRelay:
    """A connected relay.

    Attributes:
        name: Name of its key; empty: the coordinator's own relay.
        place: Its endpoints.
        carries: Its last report of its load.
    """

    name: str = ""
    place: RelayPlace
    carries: RelayCarries = RelayCarries()  # noqa: RUF009 - a value


def nearest(
    relays: Iterable[ConnectedRelay], one: Distances | None, other: Distances | None
) -> RelayPlace | None:
    """Return the relay with the shortest way for two members, among those with room.

    Args:
        relays: Connected relays; the first wins ties.
        one: Distances of one member; None before its report.
        other: Distances of the other member.
    """

    def round_trips_s(relay: ConnectedRelay) -> float:
        endpoint = relay.place.endpoint
        return sum(0.0 if d is None else d.get(endpoint, UNREACHED_S) for d in (one, other))

    known = tuple(relays)
    with_room = [relay for relay in known if not relay.carries.is_full]
    found = min(with_room or known, key=round_trips_s, default=None)
    return found.place if found else None


class RelayRegistry:
    """The connected relays.

    Args:
        key: Function that returns the coordinator's present key, which signs tickets.
    """

    def __init__(self, key: Callable[[], PrivateKey]) -> None:
        self._key = key
        self._listeners: list[Callable[[], object]] = []
        self._leg_listener: Callable[[str, LegSeen], object] = lambda _relay, _leg: None
        self._own: Callable[[], ConnectedRelay] | None = None
        self._streams: dict[str, object] = {}
        self._present: dict[str, ConnectedRelay] = {}
        self._revoked: frozenset[str] = frozenset()

    @property
    def present(self) -> tuple[ConnectedRelay, ...]:
        """Connected relays, the coordinator's own first."""
        return (*([self._own()] if self._own else ()), *self._present.values())

    @property
    def statuses(self) -> tuple[RelayStatus, ...]:
        """Status of all relays, for people."""
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
        """Return the handlers for `Transport.serve`."""
        return {RELAY: self._serve}

    def on_change(self, listener: Callable[[], object]) -> None:
        """Register a callback for changes of the set of relays."""
        self._listeners.append(listener)

    def on_leg(self, listener: Callable[[str, LegSeen], object]) -> None:
        """Set the callback for legs; it receives the relay's endpoint and the leg."""
        self._leg_listener = listener

    def set_own_relay(self, own: Callable[[], ConnectedRelay]) -> None:
        """Add the coordinator's own relay.

        Args:
            own: Function that returns its present state.
        """
        self._own = own
        self._changed()

    def own_leg(self, leg: LegSeen) -> None:
        """Report a leg of the coordinator's own relay, in this process."""
        if self._own is not None:
            self._leg_listener(self._own().place.endpoint, leg)

    def revoke(self, names: frozenset[str]) -> None:
        """Remove relays whose keys are revoked."""
        self._revoked = names
        if revoked := names & self._present.keys():
            for name in revoked:
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
            endpoint=await relay_endpoint(hello.endpoint, host),
            probe_endpoint=await relay_endpoint(hello.probe_endpoint, host),
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
                    self._add_report(ConnectedRelay(name=name, place=place, carries=report))
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
            raise Unavailable(f"relay {name} is connected already, at {known.place.endpoint}")
        if known is None and len(self.present) >= MAX_RELAYS:
            raise Busy(f"this swarm has {MAX_RELAYS} relays; try again when one is gone")

    def _check_current(self, stream: object, name: str) -> None:
        if name in self._revoked:
            raise NotAllowed(f"relay {name}: its key was revoked")
        if self._streams.get(name) is not stream:
            raise Unavailable(f"relay {name} opened a new stream")

    def _add_report(self, relay: ConnectedRelay) -> None:
        # It counts from its first report on: it has the key then, and accepts legs.
        is_new = relay.name not in self._present
        self._present[relay.name] = relay
        if is_new:
            logger.info("relay %s is at %s", relay.name, relay.place.endpoint)
            self._changed()

    def _gone(self, name: str) -> None:
        relay = self._present.pop(name, None)
        if relay is not None:
            logger.info("relay %s at %s disconnected", name, relay.place.endpoint)
            self._changed()


async def _report(
    stream: MessageStream[RelayWelcome, FromRelay],
) -> RelayCarries | LegSeen | None:
    """Receive the next report of a relay; None: it has ended."""
    try:
        async with asyncio.timeout(SILENT_S):
            report = await stream.receive()
    except TimeoutError:
        raise Unavailable(f"the relay at {stream.remote} was silent for {SILENT_S:g} s") from None
    if isinstance(report, RelayHello):
        raise MalformedMessage(f"{stream.remote}: expected a report, got a second hello")
    return report


async def relay_endpoint(endpoint: str, host: str) -> str:
    """Return the endpoint at which members reach a relay that calls from `host`.

    A relay must be at the address of its call, or it could make members dial other machines. Inside
    the coordinator's own network its announced address is accepted, as its public one is not
    visible there. Behind a proxy all relays seem to be inside: the operator's invitation is then
    the only protection against a relay that announces another machine.

    Raises:
        NotAllowed: The relay announces another address.
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
        f"expected a relay at {host}, from where it calls, got {endpoint}; start it with "
        f"'--announce {host}', and dial the coordinator from there"
    )
