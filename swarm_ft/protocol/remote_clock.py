"""Another machine's clock, as far as round trips tell. Pure: times come in, an estimate comes out.

Who asks notes when; the answer carries the other's time. That time was read somewhere in between,
so half of the round trip bounds the error, however uneven the ways there and back are (Cristian
1989, doi 10.1007/BF01784024). The bound loosens as clocks drift apart, until the next short trip.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

NUM_KEPT = 64
"""Round trips that are remembered."""
DRIFT = 1e-4
"""By how much two machines' clocks may differ in speed: 100 ppm, several times what quartz does."""


@dataclass(frozen=True, slots=True)
class ClockEstimate:
    """How far the other clock is ahead of ours, to within an error; microseconds."""

    offset_us: int
    error_us: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundTrip:
    """One question and its answer, in microseconds.

    Attributes:
        sent_us: on our clock, when we asked.
        remote_us: on the other clock, when it was read.
        received_us: on our clock, when we had the answer.
    """

    sent_us: int
    remote_us: int
    received_us: int

    def estimate(self, now_us: int) -> ClockEstimate:
        """What it tells, at a later moment of our clock."""
        middle_us = (self.sent_us + self.received_us) // 2
        half_us = -(-(self.received_us - self.sent_us) // 2)
        drifted_us = round(DRIFT * (now_us - self.sent_us))
        return ClockEstimate(self.remote_us - middle_us, half_us + drifted_us)


class RemoteClock:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._trips: deque[RoundTrip] = deque(maxlen=NUM_KEPT)

    def heard(self, trip: RoundTrip) -> None:
        """An answer came; one that came before its question is of another conversation."""
        if trip.sent_us <= trip.received_us:
            self._trips.append(trip)

    def estimate(self, now_us: int) -> ClockEstimate | None:
        """The best estimate now; None before the first answer."""
        estimates = (trip.estimate(now_us) for trip in self._trips)
        return min(estimates, key=lambda estimate: estimate.error_us, default=None)
