"""Meter of a link's rate and round trip, by marks in its ordinary traffic.

A link keeps the order of its messages, so a ping is a mark: its reader has all bytes written before
it. Two marks around a train of bytes yield the link's rate if the link was the bottleneck: if bytes
waited to be written all the time, or if the train arrived more slowly than it left (packet trains:
C. Dovrolis et al., Packet-Dispersion Techniques and a Capacity-Estimation Methodology, 2004). Time
without bytes to send does not count, and a link that was never full has no measurement. A train
never counts as arriving faster than it left, whatever a late reading suggests (as in N. Cardwell et
al., BBR, 2016).

The meter knows no stream and no clock. Times are this side's own seconds. A pong has its ping's
arrival by the other side's clock; only differences count, up to a plausible length.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median

from swarm_ft.protocol.messages.capacity import MAX_BYTES_PER_S, MAX_SECONDS, LinkSpeed
from swarm_ft.protocol.messages.link import LinkPing, LinkPong
from swarm_ft.protocol.messages.timeline import MAX_CLOCK_US

MIN_TRAIN_BYTES, MIN_TRAIN_S = 64 << 10, 0.1
"""Bytes and seconds of a train, at least; shorter ones show only reading habits and token buckets.
"""
TRAIN_S = 2.0
"""Seconds of a train after which a part of it is measured."""
EVERY_S = 4.0
"""Seconds between a measurement's last mark and the first of the next."""
QUIET_S = 10.0
"""Seconds between pings while there is nothing to send."""
HELD_UP, HELD_UP_S = 1.25, 0.05
"""Ratio and difference of a train's times by which the link counts as the bottleneck.

A smaller ratio may come from the ends, which read late while they compute.
"""
NUM_KEPT = 9
"""Measurements in memory: half a minute of a busy link's past, or a quiet one's last ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Begin:
    """An answered mark at the begin of a train, with its arrival by the other side's clock."""

    num_bytes: int
    sent_s: float
    came_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Mark:
    """A ping, with the bytes written before it.

    Attributes:
        serial: Number of the ping.
        num_bytes: Bytes written before it.
        sent_s: Time of the ping.
        since: Mark at the begin of the train that this one ends.
        is_steady: Whether there was always something to write since then.
        opens: Whether there is something to write after it.
    """

    serial: int
    num_bytes: int
    sent_s: float
    since: _Begin | None
    is_steady: bool
    opens: bool


@dataclass(frozen=True, slots=True)
class _Train:
    """Bytes that passed the full link, and their seconds."""

    num_bytes: int
    took_s: float

    @property
    def bytes_per_s(self) -> float:
        return min(self.num_bytes / self.took_s, MAX_BYTES_PER_S)


class LinkMeter:
    """Meter of consecutive streams to the same peer.

    Methods return the ping to write now, or None.
    """

    def __init__(self) -> None:
        self._trains: deque[_Train] = deque(maxlen=NUM_KEPT)
        self._trips: deque[float] = deque(maxlen=NUM_KEPT)
        self._serial = 0
        self.reset(0.0)

    @property
    def speed(self) -> LinkSpeed:
        """Measured speed, in whole bytes a second and microseconds."""
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

    def reset(self, now_s: float) -> None:
        """Reset for a new stream; measurements stay."""
        self._began_s = self._pinged_s = self._measured_s = now_s
        self._num_bytes = 0
        self._is_resting = True
        self._is_steady = False
        self._pending: _Mark | None = None
        self._open: _Begin | None = None

    # ---- this side

    def on_written(self, num_bytes: int) -> None:
        """Count bytes that were written; later bytes follow them."""
        self._num_bytes += num_bytes

    def on_busy(self, now_s: float) -> LinkPing | None:
        """Record that there is something to write, after the returned ping."""
        self._is_resting = False
        return self.tick(now_s)

    def on_idle(self, now_s: float) -> LinkPing | None:
        """Record that there is nothing more to write."""
        self._is_resting = True
        ping = self.tick(now_s)
        self._is_steady = False
        return ping

    def tick(self, now_s: float) -> LinkPing | None:
        """Return the ping that is due by this time."""
        if self._pending is not None:
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
        self._pending = _Mark(
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

    # ---- messages of the other side

    def on_ping(self, ping: LinkPing, now_s: float) -> LinkPong:
        """Return the answer to a ping, to send at once."""
        came_us = round(1e6 * (now_s - self._began_s))
        return LinkPong(ping.serial, min(max(0, came_us), MAX_CLOCK_US))

    def on_pong(self, pong: LinkPong, now_s: float) -> LinkPing | None:
        """Process an answer; an unexpected one changes nothing."""
        mark = self._pending
        if mark is None or pong.serial != mark.serial:
            return None
        self._pending = None
        self._trips.append(min(now_s - mark.sent_s, MAX_SECONDS))
        came_s = 1e-6 * pong.came_us
        if mark.since is not None:
            self._measure(mark.since, mark, came_s, now_s)
        if mark.opens:
            begin = _Begin(num_bytes=mark.num_bytes, sent_s=mark.sent_s, came_s=came_s)
            self._open = begin
        return self.tick(now_s)

    def _measure(self, begin: _Begin, end: _Mark, came_s: float, now_s: float) -> None:
        left_s = end.sent_s - begin.sent_s
        arrived_s = min(came_s - begin.came_s, now_s - begin.sent_s)
        took_s = max(left_s, arrived_s)
        is_held_up = end.is_steady or took_s >= max(HELD_UP * left_s, left_s + HELD_UP_S)
        if is_held_up and took_s >= MIN_TRAIN_S:
            self._trains.append(_Train(end.num_bytes - begin.num_bytes, took_s))
