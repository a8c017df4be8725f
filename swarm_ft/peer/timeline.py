"""A recorder of what this peer does when, in steps whose plan requests it.

In all other steps the recorder is off, and its calls return at once. Spans come from all threads of
the peer. They are sent once the step is committed, when no peer waits for them; by then the offset
to the coordinator's clock, measured since the step began, is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import ParamSpec, TypeVar

from swarm_ft.base.clock import Clock
from swarm_ft.ids import BlockIndex, MicrobatchIndex
from swarm_ft.protocol.messages.boundary import FrameKey
from swarm_ft.protocol.messages.control import ClockProbe, ClockReply, FromPeer, PlanStep
from swarm_ft.protocol.messages.timeline import (
    MAX_SPANS,
    RemoteClock,
    RoundTrip,
    SpanKind,
    Spans,
    StepTimeline,
)

P = ParamSpec("P")
R = TypeVar("R")

NUM_PROBES = 4
"""Clock probes, one after the other; the fastest reply is the best one."""
_OFF_S = -1.0
"""Time of the clock while the recorder is off; spans that began then are dropped."""
_Row = tuple[int, float, float, int, int, int, int, int, int]
"""A span, as the columns of `Spans`, with begin and end in seconds."""


class Timeline:
    """The recorder; see the module.

    Args:
        clock: Clock of this peer.
        say: Sends a message to the coordinator.

    Attributes:
        is_on: Whether spans are recorded now.
    """

    def __init__(self, clock: Clock, say: Callable[[FromPeer], None]) -> None:
        self.is_on = False
        self._clock = clock
        self._send = say
        self._coordinator = RemoteClock()
        self._probes_left = 0
        self._plan: PlanStep | None = None
        self._planned_s = 0.0
        self._ready_s: float | None = None
        self._rows: list[_Row] = []
        self._num_dropped = 0

    # ---- spans

    def now_s(self) -> float:
        """Return the time at which a span begins; meaningless while the recorder is off."""
        return self._clock.now_s() if self.is_on else _OFF_S

    def add(
        self,
        kind: SpanKind,
        begin_s: float,
        *,
        microbatch: MicrobatchIndex | None = None,
        num_bytes: int = 0,
    ) -> None:
        """Record a span of the present step that ends now."""
        if self.is_on and self._plan is not None:
            batch = 0 if microbatch is None else microbatch + 1
            end_s = self._clock.now_s()
            self._store((kind, begin_s, end_s, self._plan.step, batch, 0, 0, 0, num_bytes))

    def add_frame(
        self, kind: SpanKind, key: FrameKey, begin_s: float, boundary: BlockIndex, num_bytes: int
    ) -> None:
        """Record a span of one frame that ends now."""
        if self.is_on:
            name = (key.step, key.microbatch + 1, key.sample + 1, boundary, key.direction)
            self._store((kind, begin_s, self._clock.now_s(), *name, num_bytes))

    def timed(
        self, kind: SpanKind, function: Callable[P, R], microbatch: MicrobatchIndex | None = None
    ) -> Callable[P, R]:
        """Return a function that also records a span, in whichever thread it is called."""
        return partial(self._call, kind, microbatch, function) if self.is_on else function

    def _call(
        self,
        kind: SpanKind,
        microbatch: MicrobatchIndex | None,
        function: Callable[P, R],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        begin_s = self.now_s()
        result = function(*args, **kwargs)
        self.add(kind, begin_s, microbatch=microbatch)
        return result

    def _store(self, row: _Row) -> None:
        if row[1] == _OFF_S:
            return
        if len(self._rows) < MAX_SPANS:
            self._rows.append(row)
        else:
            self._num_dropped += 1

    # ---- a step

    def on_plan(self, plan: PlanStep) -> None:
        """Handle a plan: record its step if the plan requests that."""
        self.is_on, self._plan, self._ready_s = plan.traced, plan, None
        if not plan.traced:
            self._rows.clear()
        self._planned_s = self.now_s()
        self.add(SpanKind.PLAN, self._planned_s)
        self._probe(NUM_PROBES)

    def on_ready(self) -> None:
        """Register that this peer has finished its part of the step."""
        self._ready_s = self.now_s()
        self.add(SpanKind.READY, self._ready_s)
        self._probe(1)

    def on_commit(self) -> None:
        """Register that the step is committed, before it is applied."""
        if self._ready_s is not None:
            self.add(SpanKind.WAIT_COMMIT, self._ready_s)
            self.add(SpanKind.COMMIT, self.now_s())
        self._ready_s = None

    def send_spans(self) -> None:
        """Send and clear the spans; the step is applied, or its attempt over."""
        if not self.is_on or self._plan is None:
            return
        now_s, plan, self._plan = self._clock.now_s(), self._plan, None
        rows = [(SpanKind.STEP, self._planned_s, now_s, plan.step, 0, 0, 0, 0, 0), *self._rows]
        num_dropped = self._num_dropped + max(0, len(rows) - MAX_SPANS)
        self._rows, self._num_dropped = [], 0
        clock = self._coordinator.estimate(_us(now_s))
        if clock is not None:
            origin_us, spans = _columns(rows[:MAX_SPANS])
            timeline = StepTimeline(
                run_id=plan.run_id,
                attempt=plan.attempt,
                step=plan.step,
                origin_us=origin_us,
                clock=clock,
                spans=spans,
                num_dropped=num_dropped,
            )
            self._send(timeline)

    # ---- the coordinator's clock

    def on_joined(self) -> None:
        """Forget the offset to the coordinator's clock, after a new connection."""
        self._coordinator = RemoteClock()

    def on_clock_reply(self, reply: ClockReply) -> None:
        """Handle the coordinator's reply to a clock probe."""
        trip = RoundTrip(
            sent_us=reply.sent_us,
            remote_us=reply.coordinator_us,
            received_us=_us(self._clock.now_s()),
        )
        self._coordinator.add(trip)
        self._probe(self._probes_left - 1)

    def _probe(self, num_probes: int) -> None:
        """Probe the clock, at both ends of a step, when few frames delay the reply."""
        self._probes_left = num_probes
        if self.is_on and num_probes > 0:
            self._send(ClockProbe(_us(self._clock.now_s())))


def _columns(rows: Iterable[_Row]) -> tuple[int, Spans]:
    """Return the begin of the first span on this peer's clock, and all spans."""
    kinds, begins, ends, steps, microbatches, samples, boundaries, directions, num_bytes = zip(
        *rows, strict=True
    )
    begin_us = [_us(begin_s) for begin_s in begins]
    # Each end is rounded on its own, so that spans that did not overlap do not overlap now.
    ends_us = [_us(end_s) for end_s in ends]
    origin_us = min(begin_us)
    spans = Spans(
        kinds=kinds,
        begin_us=tuple(begin - origin_us for begin in begin_us),
        duration_us=tuple(end - begin for begin, end in zip(begin_us, ends_us, strict=True)),
        steps=steps,
        microbatches=microbatches,
        samples=samples,
        boundaries=boundaries,
        directions=directions,
        num_bytes=num_bytes,
    )
    return origin_us, spans


def _us(seconds: float) -> int:
    return round(1e6 * seconds)
