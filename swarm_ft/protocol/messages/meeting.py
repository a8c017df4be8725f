"""How two members get a byte stream between them: what they and the coordinator say, frozen.

A member keeps one such conversation with the coordinator. It says where it is reached, asks for
others, and is told of *meetings*: for each, both sides try all ways at once (`reach.ladder`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated

from swarm_ft.protocol.spec.addresses import MAX_HOUSE_ENDPOINTS, SocketAddress
from swarm_ft.protocol.spec.bounds import Endpoint, Length, Name, Range, Text
from swarm_ft.protocol.spec.version import PROTOCOL_VERSION, Spoken

MEETING_BYTES = 16
MAX_TICKET_BYTES = 256
MAX_ENDPOINTS = 8
MAX_RELAYS = 16
MAX_KEY_BYTES = 256
MAX_LINKS = 1 << 20

MeetingId = Annotated[bytes, Length(MEETING_BYTES, MEETING_BYTES)]
"""Drawn by the coordinator. Whoever knows it is of the meeting; who it is, TLS tells afterwards."""
MemberName = Annotated[str, Name()]


class Way(IntEnum):
    """How a stream was had; the numbers are those of the wire."""

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
    """First, and whenever it changes: where this member is reached.

    Attributes:
        endpoints: of its front, IP addresses, the best first; none: nobody gets in unasked.
        mapping_varies: its router gives each destination another port ("symmetric").
    """

    endpoints: Annotated[tuple[SocketAddress, ...], Length(MAX_ENDPOINTS)] = ()
    mapping_varies: bool = False
    protocol_version: Annotated[int, Spoken("member", "coordinator")] = PROTOCOL_VERSION


@dataclass(frozen=True, kw_only=True, slots=True)
class Want:
    """Introduce me to this member."""

    name: MemberName


@dataclass(frozen=True, kw_only=True, slots=True)
class Linked:
    """The caller has its stream, this way, so long after it was told of the meeting."""

    meeting: MeetingId
    way: Way
    took_s: Annotated[float, Range(0.0, 3600.0)]


@dataclass(frozen=True, kw_only=True, slots=True)
class RelayDistance:
    """How long it takes to a relay and back."""

    endpoint: Endpoint
    round_trip_s: Annotated[float, Range(0.0, 3600.0)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """How far relays are; now and then. One that is not named is not reached."""

    distances: Annotated[tuple[RelayDistance, ...], Length(MAX_RELAYS)] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RelayPlace:
    """Where a relay is.

    Attributes:
        endpoint: of its legs.
        probe_endpoint: another port of it, by which members learn whether their mapping varies.
    """

    endpoint: Endpoint
    probe_endpoint: Endpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class Relays:
    """The swarm's relays; at first, and whenever they change."""

    places: Annotated[tuple[RelayPlace, ...], Length(MAX_RELAYS)] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Meet:
    """A meeting begins; both sides are told.

    Attributes:
        name: the other side's.
        is_caller: this side asked for it, and chooses the stream.
        endpoints: the other side's, where the coordinator sees it.
        may_punch: neither side's mapping varies.
        relay: where both leave a leg; None: there is no relay.
        ticket: for that leg.
        house_endpoints: the other side's private ones; the coordinator sees both sides at one
            public address, and does not know whether that is one house.
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
    """The relay sees the other side's leg at this address; connect to it from that port, now.

    Each side receives one at most in a meeting.
    """

    meeting: MeetingId
    address: SocketAddress


@dataclass(frozen=True, kw_only=True, slots=True)
class NoMeeting:
    """There will be no meeting with this member."""

    name: MemberName
    reason: Text


@dataclass(frozen=True, kw_only=True, slots=True)
class RelayHello:
    """A relay's first words: where it is."""

    endpoint: Endpoint
    probe_endpoint: Endpoint
    protocol_version: Annotated[int, Spoken("relay", "coordinator")] = PROTOCOL_VERSION


@dataclass(frozen=True, kw_only=True, slots=True)
class RelayCarries:
    """A relay is there, and carries so much; once it is welcome, and every two seconds.

    Attributes:
        links: that stand now.
        is_full: it takes no more of them.
        relayed_bytes: since it was started, both ways.
    """

    links: Annotated[int, Range(0, MAX_LINKS)] = 0
    is_full: bool = False
    relayed_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class LegSeen:
    """A leg of a meeting came to a relay, which sees it at this address.

    Attributes:
        is_caller: which side's leg it is.
        address: the remote address of the leg's socket.
    """

    meeting: MeetingId
    is_caller: bool
    address: SocketAddress


@dataclass(frozen=True, kw_only=True, slots=True)
class RelayWelcome:
    """What a relay has to know of this coordinator.

    Attributes:
        ticket_key: public, DER; whose tickets let anybody in, until it is told another.
        endpoint: where members are told that it is.
        unix_s: the coordinator's clock, by which tickets end.
    """

    ticket_key: Annotated[bytes, Length(MAX_KEY_BYTES, 1)]
    endpoint: Endpoint
    unix_s: Annotated[float, Range(0.0)]


FromMember = Reachable | Want | Linked | Measured
FromRelay = RelayHello | RelayCarries | LegSeen
ToMember = Relays | Meet | Punch | NoMeeting
