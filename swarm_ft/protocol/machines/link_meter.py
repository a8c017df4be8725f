"""How fast a link is and how far its other end, by marks in what goes over it anyway.

A link keeps the order of its messages, so a ping is a mark: whoever reads it has all that was
written before. Two marks around a train of bytes tell how fast the link let it through, if the link
was what held it up: as long as something waited to be written all the time, or if the train
arrived more slowly than it left (packet trains: C. Dovrolis et al., Packet-Dispersion Techniques
and a Capacity-Estimation Methodology, 2004). Time in which there was nothing to send so counts for
nobody, and a link that was never full is not measured. No faster than it left did anything arrive,
whatever somebody's late reading makes of it (as in N. Cardwell et al., BBR, 2016).

It knows no stream and no clock. Times are this side's own seconds; a pong tells when its ping came
by the other side's clock, of which differences alone are used, and no longer ones than can be.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median

from swarm_ft.protocol.messages.capacity import MAX_BYTES_PER_S, MAX_SECONDS, LinkSpeed
from swarm_ft.protocol.messages.link import LinkPing, LinkPong
from swarm_ft.protocol.messages.timeline import MAX_CLOCK_US

MIN_TRAIN_BYTES, MIN_TRAIN_S = 64 << 10, 0.1
"""Of a train; shorter ones say how the ends read, and what buckets on the way let pass at once."""
TRAIN_S = 2.0
"""A train that takes longer is measured in parts."""
EVERY_S = 4.0
"""Between a measurement's last mark and the first of the next."""
QUIET_S = 10.0
"""Between pings while there is nothing to send."""
HELD_UP, HELD_UP_S = 1.25, 0.05
"""A train took so many times as long to arrive as to leave, and so much longer, if the link held it
up; less may be the ends, which read late while they compute."""
NUM_KEPT = 9
"""Measurements that are remembered: half a minute of a busy link's past, and whatever a quiet one's
last ones were."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Begin:
    """A mark that was answered, with which a train began; it came by the other side's clock."""

    num_bytes: int
    sent_s: float
    came_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Mark:
    """A ping, and how much was written before it.

    Attributes:
        since: the mark at which the train began that this one ends.
        is_steady: whether there was always something to write since then.
        opens: whether there is something to write behind it.
    """

    serial: int
    num_bytes: int
    sent_s: float
    since: _Begin | None
    is_steady: bool
    opens: bool


@dataclass(frozen=True, slots=True)
class _Train:
    """What the link let through, and how long it took; it was full meanwhile."""

    num_bytes: int
    took_s: float

    @property
    def bytes_per_s(self) -> float:
        return min(self.num_bytes / self.took_s, MAX_BYTES_PER_S)


class LinkMeter:
    """One side's view of one stream after the other to the same peer.

    What is to be written now is returned by each method that may have it written: a ping, or None.
    """

    def __init__(self) -> None:
        self._trains: deque[_Train] = deque(maxlen=NUM_KEPT)
        self._trips: deque[float] = deque(maxlen=NUM_KEPT)
        self._serial = 0
        self.began(0.0)

    @property
    def speed(self) -> LinkSpeed:
        """What is known by now, in whole bytes a second and microseconds."""
        all_bytes = sum(train.num_bytes for train in self._trains)
        all_s = sum(train.took_s for train in self._trains)
        usual = _Train(all_bytes, all_s).bytes_per_s if all_s else 0.0
        peak = max((train.bytes_per_s for train in self._trains), default=0.0)
        return LinkSpeed(
            bytes_per_s=round(usual, 0),
            peak_bytes_per_s=round(peak, 0),
            round_trip_s=round(median(self._trips or (0.0,)), 6),
            least_round_trip_s=round(min(self._trips, default=0.0), 6),
        )

    def began(self, now_s: float) -> None:
        """A new stream: nothing is on its way. What was measured is remembered."""
        self._began_s = self._pinged_s = self._measured_s = now_s
        self._num_bytes = 0
        self._is_resting = True
        self._is_steady = False
        self._awaited: _Mark | None = None
        self._open: _Begin | None = None

    # ---- this side

    def wrote(self, num_bytes: int) -> None:
        """So many bytes are on their way, in front of whatever is written from now on."""
        self._num_bytes += num_bytes

    def works(self, now_s: float) -> LinkPing | None:
        """There is something to write, behind what is returned."""
        self._is_resting = False
        return self.look(now_s)

    def rests(self, now_s: float) -> LinkPing | None:
        """There is nothing (more) to write."""
        self._is_resting = True
        ping = self.look(now_s)
        self._is_steady = False
        return ping

    def look(self, now_s: float) -> LinkPing | None:
        """Time has passed."""
        if self._awaited is not None:
            return None
        begin = self._open
        if begin is not None and self._num_bytes - begin.num_bytes >= MIN_TRAIN_BYTES:
            is_train = self._is_resting or now_s - begin.sent_s >= TRAIN_S
            return self._ping(begin, now_s) if is_train else None
        if self._is_resting:
            is_due = now_s - self._pinged_s >= QUIET_S
        else:
            is_due = now_s - self._measured_s >= EVERY_S
        return self._ping(None, now_s) if is_due else None

    def _ping(self, since: _Begin | None, now_s: float) -> LinkPing:
        self._serial = (self._serial + 1) % (1 << 32)
        self._awaited = _Mark(
            serial=self._serial,
            num_bytes=self._num_bytes,
            sent_s=now_s,
            since=since,
            is_steady=self._is_steady,
            opens=not self._is_resting,
        )
        self._pinged_s = now_s
        if since is not None or not self._is_resting:
            self._measured_s = now_s
        self._open = None
        self._is_steady = not self._is_resting
        return LinkPing(self._serial)

    # ---- the other side

    def pinged(self, ping: LinkPing, now_s: float) -> LinkPong:
        """The answer to a ping, to be said at once."""
        came_us = round(1e6 * (now_s - self._began_s))
        return LinkPong(ping.serial, min(max(0, came_us), MAX_CLOCK_US))

    def ponged(self, pong: LinkPong, now_s: float) -> LinkPing | None:
        """An answer; one that nobody waits for changes nothing."""
        mark = self._awaited
        if mark is None or pong.serial != mark.serial:
            return None
        self._awaited = None
        self._trips.append(min(now_s - mark.sent_s, MAX_SECONDS))
        came_s = 1e-6 * pong.came_us
        if mark.since is not None:
            self._measure(mark.since, mark, came_s, now_s)
        if mark.opens:
            begin = _Begin(num_bytes=mark.num_bytes, sent_s=mark.sent_s, came_s=came_s)
            self._open = begin
        return self.look(now_s)

    def _measure(self, begin: _Begin, end: _Mark, came_s: float, now_s: float) -> None:
        left_s = end.sent_s - begin.sent_s
        arrived_s = min(came_s - begin.came_s, now_s - begin.sent_s)
        took_s = max(left_s, arrived_s)
        is_held_up = end.is_steady or took_s >= max(HELD_UP * left_s, left_s + HELD_UP_S)
        if is_held_up and took_s >= MIN_TRAIN_S:
            self._trains.append(_Train(end.num_bytes - begin.num_bytes, took_s))
