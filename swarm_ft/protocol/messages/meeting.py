"""Messages that bring two members together for a byte stream, as frozen values.

A member keeps one stream with the coordinator. On it, it sends its endpoints, requests meetings
with others, and learns of *meetings*: in each, both sides try all ways at once (`reach.ladder`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated

from swarm_ft.protocol.spec.addresses import MAX_HOUSE_ENDPOINTS, SocketAddress
from swarm_ft.protocol.spec.bounds import Endpoint, Length, Name, Range, Text
from swarm_ft.protocol.spec.version import PROTOCOL_VERSION, VersionField

MEETING_BYTES = 16
MAX_TICKET_BYTES = 256
MAX_ENDPOINTS = 8
MAX_RELAYS = 16
MAX_KEY_BYTES = 256
MAX_LINKS = 1 << 20

MeetingId = Annotated[bytes, Length(MEETING_BYTES, MEETING_BYTES)]
"""Random number of a meeting by the coordinator.

Its knowledge proves the part in the meeting; TLS proves the identity afterwards.
"""
MemberName = Annotated[str, Name()]


class Way(IntEnum):
    """Way of a stream; the numbers are those of the wire."""

    DIRECT = 1
    """The caller dialled the other side."""
    REVERSE = 2
    """The other side dialled the caller."""
    PUNCHED = 3
    """Both dialled at once, through both their routers."""
    RELAYED = 4
    """Both dialled a relay."""

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, kw_only=True, slots=True)
class Reachable:
    """Member to coordinator: how others reach it; the first message, and at each change.

    Attributes:
        endpoints: IP addresses and ports of its front, the best first; empty: nobody can dial in.
        mapping_varies: Whether its router maps each destination to another port ("symmetric").
    """

    endpoints: Annotated[tuple[SocketAddress, ...], Length(MAX_ENDPOINTS)] = ()
    mapping_varies: bool = False
    protocol_version: Annotated[int, VersionField("member", "coordinator")] = PROTOCOL_VERSION


@dataclass(frozen=True, kw_only=True, slots=True)
class MeetingRequest:
    """Member to coordinator: a request to meet another member."""

    name: MemberName


@dataclass(frozen=True, kw_only=True, slots=True)
class Linked:
    """Caller to coordinator: it has its stream, by this way, after this time in the meeting."""

    meeting: MeetingId
    way: Way
    took_s: Annotated[float, Range(0.0, 3600.0)]


@dataclass(frozen=True, kw_only=True, slots=True)
class RelayDistance:
    """Round trip to a relay."""

    endpoint: Endpoint
    round_trip_s: Annotated[float, Range(0.0, 3600.0)]


@dataclass(frozen=True, kw_only=True, slots=True)
class RelayDistances:
    """Member to coordinator: distances of the relays that it reaches, now and then."""

    distances: Annotated[tuple[RelayDistance, ...], Length(MAX_RELAYS)] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RelayPlace:
    """Endpoints of a relay.

    Attributes:
        endpoint: Endpoint of its legs.
        probe_endpoint: Endpoint at another port, with which members check if their mapping varies.
    """

    endpoint: Endpoint
    probe_endpoint: Endpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class Relays:
    """Coordinator to member: the swarm's relays, at first and at each change."""

    places: Annotated[tuple[RelayPlace, ...], Length(MAX_RELAYS)] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Meet:
    """Coordinator to both sides: the begin of a meeting.

    Attributes:
        name: Name of the other side.
        is_caller: Whether this side requested it, and chooses the stream.
        endpoints: Endpoints of the other side, at the address that the coordinator sees.
        may_punch: Whether neither side's mapping varies.
        relay: Relay for both legs; None: there is none.
        ticket: Ticket of this side's leg.
        house_endpoints: Private endpoints of the other side. The coordinator sees both sides at
            one public address, which may be one house.
    """

    meeting: MeetingId
    name: MemberName
    is_caller: bool
    endpoints: Annotated[tuple[SocketAddress, ...], Length(MAX_ENDPOINTS)] = ()
    may_punch: bool = False
    relay: Endpoint | None = None
    ticket: Annotated[bytes, Length(MAX_TICKET_BYTES)] = b""
    house_endpoints: Annotated[tuple[SocketAddress, ...], Length(MAX_HOUSE_ENDPOINTS)] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Punch:
    """Coordinator to each side: the other leg's address; connect to it from this side's leg.

    Each side receives at most one in a meeting.
    """

    meeting: MeetingId
    address: SocketAddress


@dataclass(frozen=True, kw_only=True, slots=True)
class NoMeeting:
    """Coordinator to caller: there is no meeting with this member."""

    name: MemberName
    reason: Text


@dataclass(frozen=True, kw_only=True, slots=True)
class RelayHello:
    """Relay to coordinator: its endpoints, as the first message."""

    endpoint: Endpoint
    probe_endpoint: Endpoint
    protocol_version: Annotated[int, VersionField("relay", "coordinator")] = PROTOCOL_VERSION


@dataclass(frozen=True, kw_only=True, slots=True)
class RelayCarries:
    """Relay to coordinator: its present load, after the welcome and every two seconds.

    Attributes:
        links: Present links.
        is_full: Whether it accepts no more links.
        relayed_bytes: Bytes since its start, both ways.
    """

    links: Annotated[int, Range(0, MAX_LINKS)] = 0
    is_full: bool = False
    relayed_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class LegSeen:
    """Relay to coordinator: a leg of a meeting, with its address at the relay.

    Attributes:
        meeting: Number of the meeting.
        is_caller: Whether it is the caller's leg.
        address: Remote address of the leg's socket.
    """

    meeting: MeetingId
    is_caller: bool
    address: SocketAddress


@dataclass(frozen=True, kw_only=True, slots=True)
class RelayWelcome:
    """Coordinator to relay: facts that the relay needs.

    Attributes:
        ticket_key: Public key of tickets, DER, until the next welcome.
        endpoint: Endpoint of the relay that members receive.
        unix_s: The coordinator's clock, by which tickets expire.
    """

    ticket_key: Annotated[bytes, Length(MAX_KEY_BYTES, 1)]
    endpoint: Endpoint
    unix_s: Annotated[float, Range(0.0)]


FromMember = Reachable | MeetingRequest | Linked | RelayDistances
FromRelay = RelayHello | RelayCarries | LegSeen
ToMember = Relays | Meet | Punch | NoMeeting
