"""One side of a meeting as a state machine: which ways to try, and which stream is taken.

All ways but one are tried at once. The caller dials the other side's endpoints (direct), which
dials the caller's (reverse). Both leave a leg at the relay, which reports the outside address of
each leg to the coordinator, which sends it to the other side. Both connect from the leg's port to
that address: a router that let one out lets the other in (punched; Ford et al. 2005, "Peer-to-Peer
Communication Across Network Address Translators"). Private endpoints of a house are dialled last.
The caller takes the first stream that stands, and the relayed one only once the others had their
time. It knows no socket and reads no clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from swarm_ft.protocol.messages.meeting import Meet, Punch, Way

MIN_PATIENCE_S = 1.0
"""How long, at least, a relayed stream waits for a better one where punching may succeed."""
PATIENCE_ROUND_TRIPS = 5.0
"""To the relay: one for the leg, one and a half for both sides to hear, one to punch."""
DIAL_PATIENCE_S = 0.2
"""... where only dialling may: a machine that listens answers in one round trip."""
DIAL_ROUND_TRIPS = 2.0
HOUSE_AFTER_S = 0.25
"""How long all other ways have before a private endpoint is dialled: it may be of another house."""
GIVE_UP_S = 15.0
"""A meeting without a stream for so long is over."""
LEGLESS_S = 3.0
"""... one without a relay, which would have had a stream by then: another relay may have one."""


@dataclass(frozen=True, slots=True)
class Dial:
    """Connect to the other side's front."""

    endpoint: str
    way: Way


@dataclass(frozen=True, slots=True)
class LeaveLeg:
    """Connect to the relay, from a port that may be used again, and show the ticket."""

    relay: str
    ticket: bytes


@dataclass(frozen=True, slots=True)
class Connect:
    """Connect from the leg's port to the address where the relay sees the other side's; once."""

    address: str


@dataclass(frozen=True, slots=True)
class Take:
    """This stream it is; close all others. A caller says so on it."""

    stream: int
    way: Way


@dataclass(frozen=True, slots=True)
class GiveUp:
    """There is no way; close all."""

    reason: str


Effect = Dial | LeaveLeg | Connect | Take | GiveUp
Effects = list[Effect]


class Ladder:
    """See the module's docstring.

    Args:
        meet: what the coordinator said.
        now_s: monotonic seconds.
        hopeless: ways that did not work for this pair of late; not waited for.
    """

    def __init__(self, meet: Meet, now_s: float, hopeless: frozenset[Way] = frozenset()) -> None:
        self._meet = meet
        self._began_s = now_s
        self._round_trip_s = 0.0
        self._may_punch = meet.may_punch and Way.PUNCHED not in hopeless
        self._relayed: int | None = None
        self._has_leg, self._is_legless = False, False
        self._punch: str | None = None
        self._has_punched = False
        self._house = meet.house_endpoints
        self._is_over = False

    @property
    def is_over(self) -> bool:
        """Whether a stream was taken, or there is none."""
        return self._is_over

    @property
    def due_s(self) -> float:
        """When it is to be woken, if nothing happens before."""
        due_s = self._gives_up_s
        if self._relayed is not None:
            due_s = min(due_s, self._patient_until_s)
        return min(due_s, self._began_s + HOUSE_AFTER_S) if self._house else due_s

    def begin(self) -> Effects:
        """All ways that are tried at once."""
        meet = self._meet
        effects = self._dials(meet.endpoints)
        if meet.relay is not None:
            effects.append(LeaveLeg(meet.relay, meet.ticket))
        return effects

    def seen(self, round_trip_s: float) -> Effects:
        """The leg stands, and the relay has reported it."""
        if self._is_over:
            return []
        self._round_trip_s, self._has_leg = round_trip_s, True
        return list(self._connect())

    def lost_leg(self) -> None:
        """The relay does not answer, or is gone."""
        self._is_legless = True

    def told(self, punch: Punch) -> Effects:
        """The relay sees the other side's leg. Only the first such message counts."""
        if self._is_over or not self._may_punch or self._punch is not None:
            return []
        self._punch = punch.address
        return list(self._connect())

    def opened(self, stream: int, way: Way, now_s: float) -> Effects:
        """A stream stands, and the other side proved that it is of this meeting."""
        if self._is_over or not self._meet.is_caller:
            return []  # the caller chooses
        if way is not Way.RELAYED:
            return self._take(stream, way)
        self._relayed = stream
        return self.tick(now_s)

    def chosen(self, stream: int, way: Way) -> Effects:
        """The caller said on this stream that it takes it."""
        return [] if self._is_over or self._meet.is_caller else self._take(stream, way)

    def closed(self, stream: int) -> Effects:
        """A stream that stood is no more."""
        if stream == self._relayed:
            self._relayed = None
        return []

    def tick(self, now_s: float) -> Effects:
        """Time passes."""
        if self._is_over:
            return []
        if self._house and now_s >= self._began_s + HOUSE_AFTER_S:
            house, self._house = self._house, ()
            return [*self._dials(house), *self.tick(now_s)]
        if self._relayed is not None and now_s >= self._patient_until_s:
            return self._take(self._relayed, Way.RELAYED)
        if now_s >= self._gives_up_s:
            self._is_over = True
            took_s = now_s - self._began_s
            return [GiveUp(f"no way to {self._meet.name} was found in {took_s:.0f} s")]
        return []

    @property
    def _gives_up_s(self) -> float:
        return self._began_s + (LEGLESS_S if self._is_legless else GIVE_UP_S)

    @property
    def _patient_until_s(self) -> float:
        """Until when a relayed stream waits for a better one."""
        if self._may_punch:
            trips_s, least_s = PATIENCE_ROUND_TRIPS * self._round_trip_s, MIN_PATIENCE_S
        elif self._meet.endpoints:
            trips_s, least_s = DIAL_ROUND_TRIPS * self._round_trip_s, DIAL_PATIENCE_S
        else:
            trips_s, least_s = 0.0, 0.0
        if self._meet.house_endpoints:
            least_s = max(least_s, HOUSE_AFTER_S + DIAL_PATIENCE_S)
        return self._began_s + max(trips_s, least_s)

    def _dials(self, endpoints: tuple[str, ...]) -> Effects:
        way = Way.DIRECT if self._meet.is_caller else Way.REVERSE
        return [Dial(endpoint, way) for endpoint in endpoints]

    def _connect(self) -> Iterator[Effect]:
        # From a port whose mapping the relay made known; before that there is no hole to make.
        if self._has_leg and self._punch is not None and not self._has_punched:
            self._has_punched = True
            yield Connect(self._punch)

    def _take(self, stream: int, way: Way) -> Effects:
        self._is_over = True
        return [Take(stream, way)]
