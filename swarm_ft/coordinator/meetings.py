"""Introductions: the coordinator helps two members to connect directly.

Each member keeps one stream open (rpc Introduce). `Meetings` decides; `Introductions` moves
messages. No member can make another one dial a third machine (`protocol.spec.addresses`): of the
endpoints that a member announces, the coordinator forwards those at the address of the member's own
call, and private ones to members at the same address. The address of a leg comes from the relay,
and counts only if it is the member's own.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from swarm_ft.base.clock import Clock
from swarm_ft.base.log import get_logger
from swarm_ft.coordinator.facts.connectivity import Connectivity, NatInfo, pair_of
from swarm_ft.coordinator.relays import ConnectedRelay, Distances, RelayRegistry, nearest
from swarm_ft.errors import MalformedMessage, NotAllowed, Unavailable
from swarm_ft.identity.keys import PrivateKey
from swarm_ft.identity.roles import Role
from swarm_ft.identity.tickets import Ticket, member_hash, sign_ticket
from swarm_ft.protocol.machines.rate import Rate
from swarm_ft.protocol.messages.meeting import (
    MEETING_BYTES,
    FromMember,
    LegSeen,
    Linked,
    Meet,
    MeetingRequest,
    NoMeeting,
    Punch,
    Reachable,
    RelayDistances,
    Relays,
    ToMember,
    Way,
)
from swarm_ft.protocol.spec.addresses import (
    endpoints_in_house,
    endpoints_seen,
    is_same_site,
    may_dial_endpoint,
)
from swarm_ft.protocol.spec.bounds import host_of, is_private
from swarm_ft.transport.base import Handler, MessageStream, Method, until_one_ends
from swarm_ft.transport.grpc_options import IPV4_IN_IPV6
from swarm_ft.transport.methods import INTRODUCE

logger = get_logger(__name__, lines_per_s=2)

MEETING_S = 60.0
"""Seconds after which a meeting is void."""
MAX_WANTS, WANTS_PER_S = 64, 4.0
"""Meetings that a member may request at once, and per second in the long run."""
MAX_UNDER_WAY, MAX_WITH_ONE = 64, 16
"""Open meetings that a member requested: in all, and with one other member. Two peers may share
four runs and keep a link for each, which is tried again every few seconds."""
UNDER_WAY_S = 20.0
"""Seconds for which a meeting counts as under way: both sides give up after 15 s."""
MAX_TRIALS = 12
"""Newest peers that a joining peer tries to reach, so that placement knows the connectivity."""
BUSY_MEETINGS = 128
"""Meetings within `MEETING_S` above which no trials start: relays have limited places."""
MAX_WAYS = 1 << 16
"""Pairs whose connection is remembered; the oldest are dropped."""
SECRET_BYTES = 16
MAX_QUEUED = 256
"""Messages that may pile up before a member is dropped; it may reconnect."""

OutgoingMessages = list[tuple[str, ToMember]]
"""Messages with their receivers."""


@dataclass(kw_only=True, slots=True)
class ConnectedMember:
    """A connected member that can be introduced.

    Attributes:
        host: Address from which its call comes.
        reachable: Its own report of its endpoints and router.
        is_peer: Whether other members may have to work with it.
        distances: Round trips to relays; None before its report.
    """

    host: str
    reachable: Reachable
    is_peer: bool = False
    distances: Distances | None = None

    @property
    def home(self) -> NatInfo:
        """Its place in the network, for decisions about connectivity."""
        hosts = {host_of(endpoint) for endpoint in self.reachable.endpoints}
        is_near = is_private(self.host)
        return NatInfo(
            house="" if is_near else self.host,
            is_open=self.host in hosts and not is_near,
            is_open_within=any(map(is_private, hosts)),
            mapping_varies=self.reachable.mapping_varies,
        )


@dataclass(kw_only=True, slots=True)
class Meeting:
    """An introduction of two members to each other.

    Attributes:
        caller: Member that requested it.
        callee: The other member.
        began_s: Monotonic seconds of its start.
        relay: Endpoint of the relay that both use.
        is_linked: Whether the caller has its stream.
        punched: Members that were sent to the other one's leg.
    """

    caller: str
    callee: str
    began_s: float
    relay: str | None
    is_linked: bool = False
    punched: set[str] = field(default_factory=set)

    def other(self, name: str) -> str | None:
        """Return the other side; None if the name is on neither side."""
        return {self.caller: self.callee, self.callee: self.caller}.get(name)

    def is_under_way(self, now_s: float) -> bool:
        """Whether both sides may still try."""
        return not self.is_linked and now_s - self.began_s < UNDER_WAY_S


@dataclass(slots=True)
class Meetings:
    """Connected members, and their introductions. Pure except for random bytes.

    Args:
        sign: Function that signs a ticket.
        draw: Function that returns this number of random bytes.
        relays: Function that returns the connected relays.
    """

    sign: Callable[[Ticket], bytes]
    draw: Callable[[int], bytes]
    relays: Callable[[], tuple[ConnectedRelay, ...]] = tuple
    present: dict[str, ConnectedMember] = field(default_factory=dict)
    ways: dict[tuple[str, str], Way] = field(default_factory=dict)
    _meetings: dict[bytes, Meeting] = field(default_factory=dict)
    _known: Connectivity | None = None
    _hashed_with: bytes = field(init=False)
    # A new call of a member does not renew its tokens.
    _wants: Rate[str] = field(default_factory=lambda: Rate(per_s=WANTS_PER_S, burst=MAX_WANTS))

    def __post_init__(self) -> None:
        # New at each start, as the key that signs tickets is.
        self._hashed_with = self.draw(SECRET_BYTES)

    def add_member(
        self, name: str, host: str, reachable: Reachable, *, is_peer: bool = False
    ) -> OutgoingMessages:
        """Add a member, or update its reachability."""
        known = self.present.get(name)
        if known is not None and known.host == host:
            if reachable.endpoints != known.reachable.endpoints:
                self._forget_ways(name)
            known.reachable, self._known = reachable, None
            return []
        self.present[name] = ConnectedMember(host=host, reachable=reachable, is_peer=is_peer)
        self._known = None
        return [(name, self._places())]

    def relays_changed(self) -> OutgoingMessages:
        """Return messages that send the new list of relays to all members."""
        return [(name, self._places()) for name in self.present]

    def remove_member(self, name: str) -> OutgoingMessages:
        """Remove a member; callers that wait for it may request another meeting."""
        self.present.pop(name, None)
        self._forget_ways(name)
        callers = {m.caller for m in self._meetings.values() if m.callee == name}
        self._meetings = {n: m for n, m in self._meetings.items() if m.callee != name}
        ended = NoMeeting(name=name, reason="it lost its connection to the coordinator")
        return [(caller, ended) for caller in sorted(callers & self.present.keys())]

    def known(self) -> Connectivity:
        """Return the known connectivity; the same object while nothing changes."""
        if self._known is None:
            homes = {name: present.home for name, present in self.present.items()}
            met = MappingProxyType(dict(self.ways))
            self._known = Connectivity(homes=MappingProxyType(homes), met=met)
        return self._known

    def on_message(self, name: str, message: FromMember, now_s: float) -> OutgoingMessages:
        """Handle a message of a connected member.

        Raises:
            MalformedMessage: The message names a meeting without this member.
        """
        match message:
            case Reachable():
                return self.add_member(name, self.present[name].host, message)
            case MeetingRequest(name=wanted):
                return self._wanted(name, wanted, now_s)
            case Linked(meeting=number, way=way):
                other = self._other(name, number)
                if other:
                    self._meetings[number].is_linked = True
                    self._met(pair_of(name, other), way)
                return []
            case RelayDistances(distances=distances):
                is_first = self.present[name].distances is None
                self.present[name].distances = {one.endpoint: one.round_trip_s for one in distances}
                return self._trials(name, now_s) if is_first else []

    def leg_seen(self, relay: str, leg: LegSeen) -> OutgoingMessages:
        """Send the other side to a leg, once, if the leg is at the member's own address.

        Args:
            relay: Endpoint of the relay that reports it.
            leg: The leg, as that relay sees it.
        """
        meeting = self._meetings.get(leg.meeting)
        if meeting is None or meeting.relay != relay:
            return []
        sides = meeting.caller, meeting.callee
        owner, other = sides if leg.is_caller else reversed(sides)
        if other in meeting.punched or not {owner, other} <= self.present.keys():
            return []
        if not self._may_punch(owner, other, leg.address):
            logger.debug("relay %s: ignored a leg of %s at %s", relay, owner, leg.address)
            return []
        meeting.punched.add(other)
        return [(other, Punch(meeting=leg.meeting, address=leg.address))]

    def _may_punch(self, owner: str, other: str, address: str) -> bool:
        """Whether a member may be sent to this address of another one's leg."""
        is_own = is_same_site(host_of(address), self.present[owner].host)
        return is_own and may_dial_endpoint(self.present[other].host, address)

    def forget(self, now_s: float) -> None:
        """Drop meetings that are over."""
        self._meetings = {
            number: m for number, m in self._meetings.items() if now_s - m.began_s < MEETING_S
        }

    def _wanted(self, name: str, other: str, now_s: float) -> OutgoingMessages:
        refusal = self._refusal(name, other, now_s)
        if refusal is not None:
            return [(name, NoMeeting(name=other, reason=refusal))]
        return self._begin(name, other, now_s)

    def _begin(self, name: str, other: str, now_s: float) -> OutgoingMessages:
        number = self.draw(MEETING_BYTES)
        both = self.present[name].distances, self.present[other].distances
        place = nearest(self.relays(), *both)
        relay = place.endpoint if place else None
        self._meetings[number] = Meeting(caller=name, callee=other, began_s=now_s, relay=relay)
        return [
            (name, self._meet(number, name, other, relay, is_caller=True)),
            (other, self._meet(number, other, name, relay, is_caller=False)),
        ]

    def _trials(self, name: str, now_s: float) -> OutgoingMessages:
        """Start meetings of a new peer where nothing else shows how two peers connect.

        Both peers know their routers' behaviour by then, and each has a relay, to punch with.
        """
        own, ways = self.present[name], self.known()
        if not (own.is_peer and own.distances):
            return []
        others = [o for o, p in self.present.items() if p.is_peer and p.distances and o != name]
        room = min(MAX_TRIALS, max(0, BUSY_MEETINGS - len(self._meetings)))
        open_ones = [o for o in reversed(others) if ways.is_open_question(name, o)][:room]
        tried = [o for o in open_ones if not self._wants.wait_s(name, now_s)]
        return [message for other in tried for message in self._begin(name, other, now_s)]

    def _met(self, pair: tuple[str, str], way: Way) -> None:
        self.ways.pop(pair, None)
        if len(self.ways) >= MAX_WAYS:
            del self.ways[next(iter(self.ways))]
        self.ways[pair] = way
        self._known = None

    def _forget_ways(self, name: str) -> None:
        for pair in [pair for pair in self.ways if name in pair]:
            del self.ways[pair]
        self._known = None

    def _refusal(self, name: str, other: str, now_s: float) -> str | None:
        if self._wants.wait_s(name, now_s):
            return f"this member requested more than {WANTS_PER_S:g} meetings per second"
        if other == name:
            return "a member cannot meet itself"
        if other not in self.present:
            return "it is not connected"
        own = [m for m in self._meetings.values() if m.caller == name and m.is_under_way(now_s)]
        if len(own) >= MAX_UNDER_WAY or sum(m.callee == other for m in own) >= MAX_WITH_ONE:
            return f"this member has {len(own)} open meetings"
        return None

    def _places(self) -> Relays:
        return Relays(places=tuple(relay.place for relay in self.relays()))

    def _meet(
        self, number: bytes, name: str, other: str, relay: str | None, *, is_caller: bool
    ) -> Meet:
        own, theirs = self.present[name], self.present[other]
        varies = own.reachable.mapping_varies or theirs.reachable.mapping_varies
        return Meet(
            meeting=number,
            name=other,
            is_caller=is_caller,
            endpoints=endpoints_seen(own.host, theirs.host, theirs.reachable.endpoints),
            may_punch=not varies and relay is not None,
            relay=relay,
            ticket=self._ticket(number, is_caller=is_caller) if relay else b"",
            house_endpoints=endpoints_in_house(own.host, theirs.host, theirs.reachable.endpoints),
        )

    def _ticket(self, number: bytes, *, is_caller: bool) -> bytes:
        meeting = self._meetings[number]
        caller, callee = (
            member_hash(name, self._hashed_with) for name in (meeting.caller, meeting.callee)
        )
        return self.sign(Ticket(number, is_caller, caller, callee))

    def _other(self, name: str, number: bytes) -> str | None:
        """Return the other side of a meeting; None if the meeting or the other side is gone."""
        meeting = self._meetings.get(number)
        other = meeting.other(name) if meeting else None
        if meeting is not None and other is None:
            raise MalformedMessage(f"{name}: expected the number of its own meeting")
        return other if other in self.present else None


class Introductions:
    """The shell of `Meetings`: serves rpc Introduce, and rpc Relay with it.

    Args:
        key: Function that returns the coordinator's present key, which signs tickets.
        clock: Clock of the coordinator.

    Attributes:
        relays: Connected relays.
    """

    def __init__(self, key: Callable[[], PrivateKey], clock: Clock) -> None:
        self._clock = clock
        self._queues: dict[str, asyncio.Queue[ToMember]] = {}
        self.relays = RelayRegistry(key)
        self.relays.on_change(lambda: self._send(self.meetings.relays_changed()))
        self.relays.on_leg(lambda relay, leg: self._send(self.meetings.leg_seen(relay, leg)))
        self.meetings = Meetings(
            sign=lambda ticket: sign_ticket(key(), ticket, time.time()),
            draw=secrets.token_bytes,
            relays=lambda: self.relays.present,
        )

    def handlers(self) -> Mapping[Method[Any, Any], Handler]:
        """Return the handlers for `Transport.serve`."""
        return {INTRODUCE: self._introduce, **self.relays.handlers()}

    async def _introduce(self, stream: MessageStream[ToMember, FromMember]) -> None:
        if stream.caller is None:
            raise NotAllowed("introductions are for members of a swarm with keys")
        name, first = stream.caller.name, await stream.receive()
        if not isinstance(first, Reachable):
            raise MalformedMessage(f"{name}: expected its reachability as the first message")
        queue: asyncio.Queue[ToMember] = asyncio.Queue(MAX_QUEUED)
        # A new call replaces an older one of the same member.
        self._send(self.meetings.remove_member(name))
        self._queues[name] = queue
        host = host_of(stream.remote).removeprefix(IPV4_IN_IPV6)
        try:
            is_peer = stream.caller.role is Role.PEER
            self._send(self.meetings.add_member(name, host, first, is_peer=is_peer))
            await until_one_ends(_write(stream, queue), self._read(stream, name, queue))
        finally:
            if self._queues.get(name) is queue:
                del self._queues[name]
                self._send(self.meetings.remove_member(name))

    async def _read(
        self,
        stream: MessageStream[ToMember, FromMember],
        name: str,
        queue: asyncio.Queue[ToMember],
    ) -> None:
        while (message := await stream.receive()) is not None:
            if self._queues.get(name) is not queue:
                raise Unavailable(f"{name} opened a new stream")
            now_s = self._clock.now_s()
            self.meetings.forget(now_s)
            self._send(self.meetings.on_message(name, message, now_s))

    def _send(self, messages: OutgoingMessages) -> None:
        for name, message in messages:
            queue = self._queues.get(name)
            if queue is None or queue.full():
                logger.warning("introductions: %s does not read its messages", name)
            else:
                queue.put_nowait(message)


async def _write(
    stream: MessageStream[ToMember, FromMember], queue: asyncio.Queue[ToMember]
) -> None:
    while True:
        await stream.send(await queue.get())
