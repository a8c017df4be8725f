"""Measurements of a link with a known rate: a line with a queue, a delay, two clocks."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_ft.protocol.machines.link_meter import (
    EVERY_S,
    MIN_TRAIN_BYTES,
    MIN_TRAIN_S,
    NUM_KEPT,
    QUIET_S,
    LinkMeter,
)
from swarm_ft.protocol.messages.capacity import MAX_BYTES_PER_S, MAX_SECONDS, LinkSpeed
from swarm_ft.protocol.messages.link import LinkPing, LinkPong
from swarm_ft.protocol.messages.timeline import MAX_CLOCK_US

Train = tuple[float, int, int]
"""A train: its time in seconds, its number of messages, and the bytes of each."""


class Line:
    """A link in simulated time, with a meter at its sender; the other end has another clock.

    Args:
        bytes_per_s: Rate of the link.
        delay_s: Delay of each way.
        room_bytes: Bytes of the buffers between the writer and the line.
        answers_late_s: Delays of the pongs, in turn and again from the first.
    """

    def __init__(
        self,
        bytes_per_s: float,
        delay_s: float,
        room_bytes: float = 0.0,
        answers_late_s: tuple[float, ...] = (0.0,),
    ) -> None:
        self.meter = LinkMeter()
        self.pings: list[float] = []
        self.most_awaited = 0
        self._awaited = 0
        self._other = LinkMeter()
        self._other.reset(-1234.5)
        self._rate, self._delay_s, self._room_s = bytes_per_s, delay_s, room_bytes / bytes_per_s
        self._late_s = answers_late_s
        self._marks: deque[LinkPing] = deque()
        self._waiting: deque[int] = deque()
        self._passed_s = 0.0
        self._is_writing = False
        self._order = count()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []

    def carry(self, trains: Iterable[Train], until_s: float) -> None:
        """Send these trains, and run the simulation until `until_s`."""
        self.meter.reset(0.0)
        for at_s, messages, num_bytes in trains:
            self._at(at_s, partial(self._put, [num_bytes] * messages))
        for tick in range(int(until_s / QUIET_S)):
            self._at(tick * QUIET_S, lambda now_s: self._mark(self.meter.tick(now_s), now_s))
        while self._events and self._events[0][0] <= until_s:
            now_s, _, happens = heapq.heappop(self._events)
            happens(now_s)

    def _at(self, when_s: float, happens: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when_s, next(self._order), happens))

    def _put(self, messages: list[int], now_s: float) -> None:
        self._waiting.extend(messages)
        self._wake(now_s)

    def _mark(self, ping: LinkPing | None, now_s: float) -> None:
        if ping is not None:
            self._marks.append(ping)
            self._wake(now_s)

    def _wake(self, now_s: float) -> None:
        if not self._is_writing:
            self._is_writing = True
            self._at(now_s, self._write)

    def _write(self, now_s: float) -> None:
        if self._waiting:
            ping = self.meter.on_busy(now_s)
        elif not self._marks:
            ping = self.meter.on_idle(now_s)
        else:
            ping = None
        if ping is not None:
            self._marks.append(ping)
        if self._marks:
            self._ping(self._marks.popleft(), now_s)
            self._at(now_s, self._write)
        elif self._waiting:
            num_bytes = self._waiting.popleft()
            self.meter.on_written(num_bytes)
            self._passed_s = max(self._passed_s, now_s) + num_bytes / self._rate
            self._at(max(now_s, self._passed_s - self._room_s), self._write)
        else:
            self._is_writing = False

    def _ping(self, ping: LinkPing, now_s: float) -> None:
        late_s = self._late_s[len(self.pings) % len(self._late_s)]
        self.pings.append(now_s)
        self._awaited += 1
        self.most_awaited = max(self.most_awaited, self._awaited)
        came_s = max(self._passed_s, now_s) + self._delay_s
        pong = self._other.on_ping(ping, came_s)
        self._at(came_s + self._delay_s + late_s, lambda now_s: self._pong(pong, now_s))

    def _pong(self, pong: LinkPong, now_s: float) -> None:
        self._awaited -= 1
        self._mark(self.meter.on_pong(pong, now_s), now_s)


# ---- whatever goes over it


trains = st.lists(
    st.tuples(st.floats(0.0, 60.0), st.integers(1, 40), st.integers(1, 1 << 20)), max_size=12
)
rates = st.floats(1e4, 1e9)
delays = st.floats(1e-4, 0.3)


@given(trains, rates, delays, st.floats(0.0, 1e7), st.lists(st.floats(0.0, 0.5), min_size=1))
def test_no_link_is_found_faster_than_it_is(
    trains: list[Train], rate: float, delay_s: float, room: float, late: list[float]
) -> None:
    """The delays of the answers do not matter."""
    line = Line(rate, delay_s, room, tuple(late))
    line.carry(trains, 100.0)
    speed = line.meter.speed
    assert speed.bytes_per_s <= speed.peak_bytes_per_s <= 1.001 * rate
    if line.pings and speed.round_trip_s:
        assert speed.round_trip_s >= speed.least_round_trip_s >= 1.999 * delay_s


@given(trains, rates, delays)
def test_one_ping_at_a_time_and_few(trains: list[Train], rate: float, delay_s: float) -> None:
    line = Line(rate, delay_s)
    line.carry(trains, 100.0)
    assert line.most_awaited <= 1
    assert len(line.pings) <= 2 * (1 + 100.0 / EVERY_S)


@given(st.floats(1e5, 1e8), delays, st.floats(0.0, 1e6), st.integers(1, 1 << 18))
def test_a_link_that_is_full_is_measured(
    rate: float, delay_s: float, room: float, size: int
) -> None:
    """Messages have any size, one of them always waits, and the buffers have any size."""
    size = max(size, round(rate / 1000))
    line = Line(rate, delay_s, room)
    line.carry([(1.0, round(30 * rate / size), size)], 60.0)
    # The meter counts whole bytes.
    assert line.meter.speed.bytes_per_s == pytest.approx(rate, abs=0.05 * rate + 1)


@given(st.floats(1e5, 1e8), st.floats(1e-4, 0.05))
def test_a_train_that_vanishes_in_buffers_is_measured_by_how_slowly_it_arrives(
    rate: float, delay_s: float
) -> None:
    size = max(MIN_TRAIN_BYTES, round(rate * max(8 * delay_s, 0.2)))
    line = Line(rate, delay_s, room_bytes=1e9)
    line.carry([(12.3 + number * 11.1, 1, size) for number in range(4)], 60.0)
    assert line.meter.speed.bytes_per_s == pytest.approx(rate, rel=0.02)


@given(st.floats(1e6, 1e9), delays, st.integers(1, 10_000))
def test_a_link_that_is_never_full_is_not_measured_and_its_round_trip_is(
    rate: float, delay_s: float, size: int
) -> None:
    line = Line(rate, delay_s, room_bytes=1e9)
    line.carry([(0.1 * number, 1, size) for number in range(600)], 60.0)
    speed = line.meter.speed
    assert speed.bytes_per_s == speed.peak_bytes_per_s == 0.0
    assert speed.least_round_trip_s == pytest.approx(2 * delay_s, rel=0.01, abs=0.02)


def test_rests_between_trains_count_for_nobody() -> None:
    """The link has nothing to send half of the time."""
    line = Line(1e6, 0.02, room_bytes=1e5)
    line.carry([(10.0 * number, 20, 250_000) for number in range(6)], 70.0)
    assert line.meter.speed.bytes_per_s == pytest.approx(1e6, rel=0.01)


def test_a_link_that_says_nothing_is_still_pinged_and_seldom() -> None:
    line = Line(1e6, 0.02)
    line.carry([(0.0, 1, 10)], 61.0)
    assert line.meter.speed.round_trip_s == pytest.approx(0.04)
    assert 4 <= len(line.pings) <= 6


def test_what_is_old_is_forgotten() -> None:
    """A slower link shows its new rate, and its old peak goes too."""
    meter, now_s = LinkMeter(), 0.0
    for rate in (*[8e6] * NUM_KEPT, *[1e6] * NUM_KEPT):
        now_s = train(meter, now_s, rate)
    assert meter.speed.peak_bytes_per_s == pytest.approx(1e6, rel=0.05)


def train(meter: LinkMeter, now_s: float, rate: float, came_us: int | None = None) -> float:
    """Send a megabyte over a link of that rate, 10 ms away; return its arrival."""
    now_s += EVERY_S
    begin = meter.on_busy(now_s)
    assert begin is not None
    meter.on_written(1_000_000)
    meter.on_pong(LinkPong(begin.serial, round(1e6 * (now_s + 0.01))), now_s + 0.02)
    end = meter.on_idle(now_s + 0.02)
    assert end is not None
    there_s = now_s + 0.01 + 1e6 / rate
    reported_us = round(1e6 * there_s) if came_us is None else came_us
    assert meter.on_pong(LinkPong(end.serial, reported_us), there_s + 0.01) is None
    return there_s + 0.01


# ---- any messages of the other side


@given(st.integers(0, MAX_CLOCK_US))
def test_whatever_time_a_pong_tells_it_makes_no_more_of_a_link_than_can_be(came_us: int) -> None:
    """The rate lies between that of the departure and that from first mark to last answer."""
    meter = LinkMeter()
    train(meter, 0.0, 2e6, came_us)
    peak = meter.speed.peak_bytes_per_s
    assert peak == 0.0 or 1e6 / 0.53 <= peak <= 1e6 / MIN_TRAIN_S


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, MAX_CLOCK_US))))
def test_pongs_that_nobody_asked_for_change_nothing(pongs: list[tuple[int, int]]) -> None:
    meter = LinkMeter()
    for serial, came_us in pongs:
        assert meter.on_pong(LinkPong(serial, came_us), 1.0) is None
    assert meter.speed == LinkSpeed()


def test_a_pong_counts_once_and_not_on_the_next_stream() -> None:
    meter = LinkMeter()
    ping = meter.tick(QUIET_S)
    assert ping is not None
    assert meter.tick(10 * QUIET_S) is None, "one at a time"
    meter.reset(100.0)
    meter.on_pong(LinkPong(ping.serial, 0), 101.0)
    assert meter.speed == LinkSpeed()
    again = meter.tick(100.0 + QUIET_S)
    assert again is not None
    assert again.serial != ping.serial
    for now_s in (110.5, 115.0):
        meter.on_pong(LinkPong(again.serial, 0), now_s)
    assert meter.speed == LinkSpeed(round_trip_s=0.5, least_round_trip_s=0.5)


def test_what_is_told_keeps_to_the_bounds_of_what_may_be_told() -> None:
    meter = LinkMeter()
    ping = meter.tick(QUIET_S)
    assert ping is not None
    again = meter.on_pong(LinkPong(ping.serial, 0), 1e9)
    assert meter.speed.round_trip_s == MAX_SECONDS
    assert again is not None
    meter.on_pong(LinkPong(again.serial, 0), 1e9)
    begin = meter.on_busy(2e9)
    assert begin is not None
    meter.on_pong(LinkPong(begin.serial, 0), 2e9)
    meter.on_written(1 << 62)
    end = meter.on_idle(2e9 + 1.0)
    assert end is not None
    meter.on_pong(LinkPong(end.serial, 0), 2e9 + 1.0)
    assert meter.speed.peak_bytes_per_s == MAX_BYTES_PER_S


def test_a_pings_time_is_counted_from_the_streams_begin() -> None:
    """The pong reveals nothing of the machine's uptime."""
    meter = LinkMeter()
    meter.reset(1e6)
    assert meter.on_ping(LinkPing(7), 1e6 + 2.5) == LinkPong(7, 2_500_000)
    assert meter.on_ping(LinkPing(8), 0.0) == LinkPong(8, 0)
