"""Introductions: the coordinator tells two members of each other, so that they find a way.

Each member keeps one conversation open (rpc Introduce). `Meetings` decides; `Introductions` moves
messages. No member makes another one dial a third machine (`protocol.spec.addresses`): of the
endpoints that a member announces, the coordinator passes on those at the address from which the
member's call comes, and private ones to a member at the same address. The address of a leg is the
relay's word, and counts only where it is the member's own.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from swarm_ft.clock import Clock
from swarm_ft.coordinator.facts.ways import Home, Ways, pair_of
from swarm_ft.coordinator.relays import Distances, Relaying, RelayRoll, nearest
from swarm_ft.errors import MalformedMessage, NotAllowed, Unavailable
from swarm_ft.identity.keys import PrivateKey
from swarm_ft.identity.roles import Role
from swarm_ft.identity.tickets import Ticket, member_hash, sign_ticket
from swarm_ft.log import get_logger
from swarm_ft.protocol.machines.rate import Rate
from swarm_ft.protocol.messages.meeting import (
    MEETING_BYTES,
    FromMember,
    LegSeen,
    Linked,
    Measured,
    Meet,
    NoMeeting,
    Punch,
    Reachable,
    Relays,
    ToMember,
    Want,
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
"""How long a meeting may take; what comes of it later is void."""
MAX_WANTS, WANTS_PER_S = 64, 4.0
"""How many meetings a member may ask for at once, and how many a second in the long run."""
MAX_UNDER_WAY, MAX_WITH_ONE = 64, 16
"""Meetings of a member that nobody has ended yet: all that it asked for, and those with one other
member. Two peers may share four runs and keep a link for each, tried again every few seconds."""
UNDER_WAY_S = 20.0
"""How long a meeting counts as under way: both sides give up after 15 s."""
MAX_TRIALS = 12
"""Of the peers that came last, how many one that comes tries to reach, so that placement knows."""
BUSY_MEETINGS = 128
"""Within `MEETING_S`, after which nobody tries what nobody needs: relays have places to give."""
MAX_WAYS = 1 << 16
"""Pairs of which it is known how they met; then the oldest are forgotten."""
SECRET_BYTES = 16
MAX_QUEUED = 256
"""A member that lets more messages pile up is dropped; it may come again."""

Said = list[tuple[str, ToMember]]
"""To whom, and what."""


@dataclass(kw_only=True, slots=True)
class Present:
    """A member that can be introduced.

    Attributes:
        host: the address that its call comes from.
        reachable: what it said of itself.
        is_peer: others may have to work with it.
        distances: how far relays are from it; None: it has not said yet.
    """

    host: str
    reachable: Reachable
    is_peer: bool = False
    distances: Distances | None = None

    @property
    def home(self) -> Home:
        """What of this counts for who reaches whom."""
        hosts = {host_of(endpoint) for endpoint in self.reachable.endpoints}
        is_near = is_private(self.host)
        return Home(
            house="" if is_near else self.host,
            is_open=self.host in hosts and not is_near,
            is_open_within=any(map(is_private, hosts)),
            mapping_varies=self.reachable.mapping_varies,
        )


@dataclass(kw_only=True, slots=True)
class Meeting:
    """Two members that were told of each other.

    Attributes:
        caller: the member that asked for it.
        callee: the other one.
        began_s: when, monotonic.
        relay: endpoint of the relay that both were sent to.
        is_linked: the caller has its stream.
        punched: members that were sent to the other one's leg.
    """

    caller: str
    callee: str
    began_s: float
    relay: str | None
    is_linked: bool = False
    punched: set[str] = field(default_factory=set)

    def other(self, name: str) -> str | None:
        """The other side; None for who is of neither."""
        return {self.caller: self.callee, self.callee: self.caller}.get(name)

    def is_under_way(self, now_s: float) -> bool:
        """Whether both sides may still be at it."""
        return not self.is_linked and now_s - self.began_s < UNDER_WAY_S


@dataclass(slots=True)
class Meetings:
    """Who is there, and who is told of whom. Pure but for what it draws.

    Args:
        sign: makes a ticket.
        draw: so many random bytes.
        relays: those that are there now.
    """

    sign: Callable[[Ticket], bytes]
    draw: Callable[[int], bytes]
    relays: Callable[[], tuple[Relaying, ...]] = tuple
    present: dict[str, Present] = field(default_factory=dict)
    ways: dict[tuple[str, str], Way] = field(default_factory=dict)
    _meetings: dict[bytes, Meeting] = field(default_factory=dict)
    _known: Ways | None = None
    _hashed_with: bytes = field(init=False)
    # A member that calls anew has no more of them than before.
    _wants: Rate[str] = field(default_factory=lambda: Rate(per_s=WANTS_PER_S, burst=MAX_WANTS))

    def __post_init__(self) -> None:
        # New at each start, as the key that signs tickets is.
        self._hashed_with = self.draw(SECRET_BYTES)

    def came(self, name: str, host: str, reachable: Reachable, *, is_peer: bool = False) -> Said:
        """A member is there, or says anew where it is reached."""
        known = self.present.get(name)
        if known is not None and known.host == host:
            if reachable.endpoints != known.reachable.endpoints:
                self._forget_ways(name)
            known.reachable, self._known = reachable, None
            return []
        self.present[name] = Present(host=host, reachable=reachable, is_peer=is_peer)
        self._known = None
        return [(name, self._places())]

    def relays_changed(self) -> Said:
        """There are other relays than before: all who are there are told."""
        return [(name, self._places()) for name in self.present]

    def gone(self, name: str) -> Said:
        """A member's call ended; who waits for it in a meeting may ask for another one."""
        self.present.pop(name, None)
        self._forget_ways(name)
        callers = {m.caller for m in self._meetings.values() if m.callee == name}
        self._meetings = {n: m for n, m in self._meetings.items() if m.callee != name}
        told = NoMeeting(name=name, reason="it has lost its way to the coordinator")
        return [(caller, told) for caller in sorted(callers & self.present.keys())]

    def known(self) -> Ways:
        """Who reaches whom, as far as is known; the same value while that is the same."""
        if self._known is None:
            homes = {name: present.home for name, present in self.present.items()}
            met = MappingProxyType(dict(self.ways))
            self._known = Ways(homes=MappingProxyType(homes), met=met)
        return self._known

    def said(self, name: str, message: FromMember, now_s: float) -> Said:
        """What a member that is there said.

        Raises:
            MalformedMessage: a meeting that it is not of.
        """
        match message:
            case Reachable():
                return self.came(name, self.present[name].host, message)
            case Want(name=wanted):
                return self._wanted(name, wanted, now_s)
            case Linked(meeting=number, way=way):
                other = self._other(name, number)
                if other:
                    self._meetings[number].is_linked = True
                    self._met(pair_of(name, other), way)
                return []
            case Measured(distances=distances):
                told = {one.endpoint: one.round_trip_s for one in distances}
                is_first = self.present[name].distances is None
                self.present[name].distances = told
                return self._trials(name, now_s) if is_first else []

    def leg_seen(self, relay: str, leg: LegSeen) -> Said:
        """Send the other side to a leg, once, where it is of the member whose leg it should be.

        Args:
            relay: endpoint of the relay that reports it.
            leg: as that relay sees it.
        """
        meeting = self._meetings.get(leg.meeting)
        if meeting is None or meeting.relay != relay:
            return []
        sides = meeting.caller, meeting.callee
        owner, other = sides if leg.is_caller else reversed(sides)
        if other in meeting.punched or not {owner, other} <= self.present.keys():
            return []
        if not self._may_punch(owner, other, leg.address):
            logger.debug("relay %s: a leg of %s at %s is not passed on", relay, owner, leg.address)
            return []
        meeting.punched.add(other)
        return [(other, Punch(meeting=leg.meeting, address=leg.address))]

    def _may_punch(self, owner: str, other: str, address: str) -> bool:
        """Whether a member may be sent to this address of another one's leg."""
        is_own = is_same_site(host_of(address), self.present[owner].host)
        return is_own and may_dial_endpoint(self.present[other].host, address)

    def forget(self, now_s: float) -> None:
        """Meetings that are over."""
        self._meetings = {
            number: m for number, m in self._meetings.items() if now_s - m.began_s < MEETING_S
        }

    def _wanted(self, name: str, other: str, now_s: float) -> Said:
        refusal = self._refusal(name, other, now_s)
        if refusal is not None:
            return [(name, NoMeeting(name=other, reason=refusal))]
        return self._begin(name, other, now_s)

    def _begin(self, name: str, other: str, now_s: float) -> Said:
        number = self.draw(MEETING_BYTES)
        both = self.present[name].distances, self.present[other].distances
        place = nearest(self.relays(), *both)
        relay = place.endpoint if place else None
        self._meetings[number] = Meeting(caller=name, callee=other, began_s=now_s, relay=relay)
        return [
            (name, self._meet(number, name, other, relay, is_caller=True)),
            (other, self._meet(number, other, name, relay, is_caller=False)),
        ]

    def _trials(self, name: str, now_s: float) -> Said:
        """Meetings that nobody asked for, where nothing else tells whether two reach each other.

        Both know by now what their routers do, and each has a relay, to punch with.
        """
        own, ways = self.present[name], self.known()
        if not (own.is_peer and own.distances):
            return []
        others = [o for o, p in self.present.items() if p.is_peer and p.distances and o != name]
        room = min(MAX_TRIALS, max(0, BUSY_MEETINGS - len(self._meetings)))
        open_ones = [o for o in reversed(others) if ways.is_open_question(name, o)][:room]
        asked = [o for o in open_ones if not self._wants.wait_s(name, now_s)]
        return [said for other in asked for said in self._begin(name, other, now_s)]

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
            return f"it was asked for more than {WANTS_PER_S:g} meetings a second"
        if other == name:
            return "nobody meets itself"
        if other not in self.present:
            return "it is not there"
        own = [m for m in self._meetings.values() if m.caller == name and m.is_under_way(now_s)]
        if len(own) >= MAX_UNDER_WAY or sum(m.callee == other for m in own) >= MAX_WITH_ONE:
            return f"{len(own)} meetings of this member are under way"
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
        """The other side of a meeting; None if that is over, or the other is gone."""
        meeting = self._meetings.get(number)
        other = meeting.other(name) if meeting else None
        if meeting is not None and other is None:
            raise MalformedMessage(f"{name} speaks of a meeting that it is not of")
        return other if other in self.present else None


class Introductions:
    """The shell of `Meetings`: serves rpc Introduce, and rpc Relay with it.

    Args:
        key: the coordinator's, as of now; signs tickets.
        clock: the time.

    Attributes:
        relays: that are there.
    """

    def __init__(self, key: Callable[[], PrivateKey], clock: Clock) -> None:
        self._clock = clock
        self._queues: dict[str, asyncio.Queue[ToMember]] = {}
        self.relays = RelayRoll(key)
        self.relays.on_change(lambda: self._say(self.meetings.relays_changed()))
        self.relays.on_leg(lambda relay, leg: self._say(self.meetings.leg_seen(relay, leg)))
        self.meetings = Meetings(
            sign=lambda ticket: sign_ticket(key(), ticket, time.time()),
            draw=secrets.token_bytes,
            relays=lambda: self.relays.present,
        )

    def handlers(self) -> Mapping[Method[Any, Any], Handler]:
        """What this answers, for `Transport.serve`."""
        return {INTRODUCE: self._introduce, **self.relays.handlers()}

    async def _introduce(self, stream: MessageStream[ToMember, FromMember]) -> None:
        if stream.caller is None:
            raise NotAllowed("introductions are for members of a swarm with keys")
        name, first = stream.caller.name, await stream.receive()
        if not isinstance(first, Reachable):
            raise MalformedMessage(f"{name}: expected where it is reached, at first")
        queue: asyncio.Queue[ToMember] = asyncio.Queue(MAX_QUEUED)
        # An older call of the same member is not used any more.
        self._say(self.meetings.gone(name))
        self._queues[name] = queue
        host = host_of(stream.remote).removeprefix(IPV4_IN_IPV6)
        try:
            is_peer = stream.caller.role is Role.PEER
            self._say(self.meetings.came(name, host, first, is_peer=is_peer))
            await until_one_ends(_write(stream, queue), self._read(stream, name, queue))
        finally:
            if self._queues.get(name) is queue:
                del self._queues[name]
                self._say(self.meetings.gone(name))

    async def _read(
        self,
        stream: MessageStream[ToMember, FromMember],
        name: str,
        queue: asyncio.Queue[ToMember],
    ) -> None:
        while (message := await stream.receive()) is not None:
            if self._queues.get(name) is not queue:
                raise Unavailable(f"{name} has called anew")
            now_s = self._clock.now_s()
            self.meetings.forget(now_s)
            self._say(self.meetings.said(name, message, now_s))

    def _say(self, said: Said) -> None:
        for name, message in said:
            queue = self._queues.get(name)
            if queue is None or queue.full():
                logger.warning("introductions: %s does not read what it is told", name)
            else:
                queue.put_nowait(message)


async def _write(
    stream: MessageStream[ToMember, FromMember], queue: asyncio.Queue[ToMember]
) -> None:
    while True:
        await stream.send(await queue.get())
