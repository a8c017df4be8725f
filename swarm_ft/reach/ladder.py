"""A side of a meeting as a state machine: the ways to try, and the stream to use.

All ways but one are tried at once. The caller dials the other side's endpoints (direct), which
dials the caller's (reverse). Both leave a leg at the relay. The relay reports the outside address
of each leg to the coordinator, which sends it to the other side. Both connect from the leg's port
to that address: a router that let one out lets the other in (punched; Ford et al. 2005,
"Peer-to-Peer Communication Across Network Address Translators"). Private endpoints of a house are
dialled last. The caller uses the first stream that opens, and the relayed one only after the others
had their time. The machine has no socket and reads no clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from swarm_ft.protocol.messages.meeting import Meet, Punch, Way

MIN_PATIENCE_S = 1.0
"""Seconds, at least, that a relayed stream waits for a better one where punching may succeed."""
PATIENCE_ROUND_TRIPS = 5.0
"""Round trips to the relay to wait: one for the leg, 1.5 until both sides know, one to punch."""
DIAL_PATIENCE_S = 0.2
"""Seconds to wait where only dialling may succeed: a listening machine answers in one trip."""
DIAL_ROUND_TRIPS = 2.0
HOUSE_AFTER_S = 0.25
"""Seconds until a private endpoint is dialled, which may belong to another house."""
GIVE_UP_S = 15.0
"""Seconds until a meeting without a stream ends."""
LEGLESS_S = 3.0
"""Seconds until a meeting without a relay ends, since another relay may have a stream."""


@dataclass(frozen=True, slots=True)
class Dial:
    """Effect: connect to the other side's front."""

    endpoint: str
    way: Way


@dataclass(frozen=True, slots=True)
class OpenLeg:
    """Effect: connect to the relay from a port that can be used again, and show the ticket."""

    relay: str
    ticket: bytes


@dataclass(frozen=True, slots=True)
class Connect:
    """Effect: connect from the leg's port to the other side's address at the relay, once."""

    address: str


@dataclass(frozen=True, slots=True)
class Take:
    """Effect: use this stream, and close all others; the caller confirms it on the stream."""

    stream: int
    way: Way


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Effect: there is no way; close all streams."""

    reason: str


Effect = Dial | OpenLeg | Connect | Take | GiveUp
Effects = list[Effect]


class Ladder:
    """Ladder of one meeting; see the module's docstring.

    Args:
        meet: The coordinator's message on the meeting.
        now_s: Monotonic seconds.
        hopeless: Ways that failed for this pair recently, and get no time.
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
        """Whether the meeting has a stream, or has ended without one."""
        return self._is_over

    @property
    def due_s(self) -> float:
        """Monotonic seconds of the next `tick`, if nothing happens before."""
        due_s = self._gives_up_s
        if self._relayed is not None:
            due_s = min(due_s, self._patient_until_s)
        return min(due_s, self._began_s + HOUSE_AFTER_S) if self._house else due_s

    def begin(self) -> Effects:
        """Return the effects that begin all immediate ways."""
        meet = self._meet
        effects = self._dials(meet.endpoints)
        if meet.relay is not None:
            effects.append(OpenLeg(meet.relay, meet.ticket))
        return effects

    def on_leg_reported(self, round_trip_s: float) -> Effects:
        """Record that the leg stands, and that the relay has reported it."""
        if self._is_over:
            return []
        self._round_trip_s, self._has_leg = round_trip_s, True
        return list(self._connect())

    def lost_leg(self) -> None:
        """Record that the relay does not answer, or is gone."""
        self._is_legless = True

    def on_punch(self, punch: Punch) -> Effects:
        """Record the other side's address at the relay; only the first message counts."""
        if self._is_over or not self._may_punch or self._punch is not None:
            return []
        self._punch = punch.address
        return list(self._connect())

    def on_open(self, stream: int, way: Way, now_s: float) -> Effects:
        """Record an open stream whose other side proved that it belongs to this meeting."""
        if self._is_over or not self._meet.is_caller:
            return []  # the caller decides
        if way is not Way.RELAYED:
            return self._take(stream, way)
        self._relayed = stream
        return self.tick(now_s)

    def on_chosen(self, stream: int, way: Way) -> Effects:
        """Record that the caller uses this stream."""
        return [] if self._is_over or self._meet.is_caller else self._take(stream, way)

    def on_closed(self, stream: int) -> Effects:
        """Record that an open stream has closed."""
        if stream == self._relayed:
            self._relayed = None
        return []

    def tick(self, now_s: float) -> Effects:
        """Return the effects that are due at this time."""
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
        """Monotonic seconds until which a relayed stream waits for a better one."""
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
        # Connect only from a port whose mapping the relay has reported; before that there is no
        # hole.
        if self._has_leg and self._punch is not None and not self._has_punched:
            self._has_punched = True
            yield Connect(self._punch)

    def _take(self, stream: int, way: Way) -> Effects:
        self._is_over = True
        return [Take(stream, way)]
