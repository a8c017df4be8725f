"""Timelines of peers as frozen values, the source of a run's trace. No clock, no file.

Times are whole microseconds. Each peer counts them on its own clock, and reports the distance to
the coordinator's, see `RemoteClock`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, NamedTuple

from swarm_ft.codec.spec import Direction
from swarm_ft.errors import MalformedMessage
from swarm_ft.ids import Attempt, BlockIndex, MicrobatchIndex, PeerId, RunId, SampleId, StepNumber
from swarm_ft.protocol.messages.reports import MAX_TRAFFIC_BYTES
from swarm_ft.protocol.spec.bounds import Length, Range
from swarm_ft.protocol.spec.layers import MAX_BLOCKS, LayerRange

# ---- another machine's clock, estimated from round trips
#
# A round trip has the times of request and reply, and the other clock's time in between. So half of
# the round trip bounds the error, however uneven the ways there and back are (Cristian 1989, doi
# 10.1007/BF01784024). The bound loosens as clocks drift apart, until the next short trip.

MAX_CLOCK_US = 1 << 51
"""Microseconds of a clock: 70 years; sums of a few are exact in JSON's numbers."""
ClockTime = Annotated[int, Range(0, MAX_CLOCK_US)]
NUM_KEPT = 64
"""Round trips in memory."""
DRIFT = 1e-4
"""Relative drift of two machines' clocks: 100 ppm, several times that of quartz."""


@dataclass(frozen=True, slots=True)
class ClockEstimate:
    """Lead of the other clock over ours, with its error bound; microseconds."""

    offset_us: Annotated[int, Range(-MAX_CLOCK_US, MAX_CLOCK_US)]
    error_us: ClockTime


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundTrip:
    """A request with its reply, in microseconds.

    Attributes:
        sent_us: Time of the request on our clock.
        remote_us: Time on the other clock in between.
        received_us: Time of the reply on our clock.
    """

    sent_us: int
    remote_us: int
    received_us: int

    def estimate(self, now_us: int) -> ClockEstimate:
        """Return the estimate at a later moment of our clock."""
        middle_us = (self.sent_us + self.received_us) // 2
        half_us = -(-(self.received_us - self.sent_us) // 2)
        drifted_us = round(DRIFT * (now_us - self.sent_us))
        return ClockEstimate(self.remote_us - middle_us, half_us + drifted_us)


class RemoteClock:
    """Estimator of another machine's clock."""

    def __init__(self) -> None:
        self._trips: deque[RoundTrip] = deque(maxlen=NUM_KEPT)

    def add(self, trip: RoundTrip) -> None:
        """Add a round trip; ignore one of an earlier connection: its reply precedes its request."""
        if trip.sent_us <= trip.received_us:
            self._trips.append(trip)

    def estimate(self, now_us: int) -> ClockEstimate | None:
        """Return the best estimate now; None before the first round trip."""
        estimates = (trip.estimate(now_us) for trip in self._trips)
        return min(estimates, key=lambda estimate: estimate.error_us, default=None)


MAX_SPANS = 20_000
"""Spans of one timeline: a step of 2,500 frames each way. A peer counts and drops more."""


class SpanKind(IntEnum):
    """Kind of a span of time; the numbers are those of the wire."""

    FORWARD = 1
    BACKWARD = 2
    """Gradient of the input."""
    FORWARD_BACKWARD = 3
    """Forward, loss and backward in one go, at the last stage."""
    GRADIENT = 4
    """Clearing, measuring and exchanging the step's gradient."""
    OPTIMIZER = 5
    ENCODE = 6
    SEND = 7
    """Time from handing a frame to the stream until the stream took it."""
    RECEIVE = 8
    """Time from a frame's whole arrival until it waits to be decoded."""
    DECODE = 9
    WAIT_INPUT = 10
    """Idle time that the input of a microbatch ended."""
    WAIT_GRADIENT = 11
    """Idle time that the gradient of a microbatch's output ended."""
    WAIT_ACKS = 12
    """Wait for neighbours' acknowledgements after all computing."""
    WAIT_COMMIT = 13
    """Wait of a ready peer for others."""
    REDUCE = 14
    """Sum of gradients over replicas of the stage."""
    TIE = 15
    """Sum of gradients over stages that share weights, such as tied embeddings."""
    STEP = 16
    """Time from a step's plan until its commit is applied, or its attempt over."""
    PLAN = 17
    READY = 18
    COMMIT = 19
    WEIGHTS = 20
    """Gradients of the weights."""


_MAX_NUMBER = 1 << 32
"""Number of a step, microbatch or sample in a span; a neighbour chose it, so the bound is loose."""
_Kind = Annotated[int, Range(int(min(SpanKind)), int(max(SpanKind)))]
_Number = Annotated[int, Range(0, _MAX_NUMBER)]
_Boundary = Annotated[int, Range(0, MAX_BLOCKS)]
_Direction = Annotated[int, Range(0, int(max(Direction)))]
_Bytes = Annotated[int, Range(0, MAX_TRAFFIC_BYTES)]
_LENGTH = Length(MAX_SPANS)


class Span(NamedTuple):
    """A span of time at one peer.

    Attributes:
        begin_us: Microseconds since the timeline's origin.
        duration_us: Microseconds of the span; 0 for a moment.
        num_bytes: Bytes of a frame, or of all sent gradients; 0 without a transfer.
    """

    kind: SpanKind
    begin_us: int
    duration_us: int
    step: StepNumber
    microbatch: MicrobatchIndex | None = None
    sample: SampleId | None = None
    boundary: BlockIndex | None = None
    direction: Direction | None = None
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Spans:
    """Spans as columns of one length, as they travel; iteration yields single spans.

    Attributes:
        microbatches: Numbers of microbatches from 1; 0: none.
        samples: Numbers of samples from 1; 0: none.
        boundaries: Boundaries; 0: none.
        directions: Directions; 0: none.
    """

    kinds: Annotated[tuple[_Kind, ...], _LENGTH] = ()
    begin_us: Annotated[tuple[ClockTime, ...], _LENGTH] = ()
    duration_us: Annotated[tuple[ClockTime, ...], _LENGTH] = ()
    steps: Annotated[tuple[_Number, ...], _LENGTH] = ()
    microbatches: Annotated[tuple[_Number, ...], _LENGTH] = ()
    samples: Annotated[tuple[_Number, ...], _LENGTH] = ()
    boundaries: Annotated[tuple[_Boundary, ...], _LENGTH] = ()
    directions: Annotated[tuple[_Direction, ...], _LENGTH] = ()
    num_bytes: Annotated[tuple[_Bytes, ...], _LENGTH] = ()

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if len(getattr(self, name)) != len(self.kinds):
                raise MalformedMessage(
                    f"expected {len(self.kinds)} {name}, got {len(getattr(self, name))}"
                )

    def __len__(self) -> int:
        return len(self.kinds)

    def __iter__(self) -> Iterator[Span]:
        columns = (getattr(self, name) for name in self.__dataclass_fields__)
        for kind, begin, duration, step, microbatch, sample, boundary, direction, size in zip(
            *columns, strict=True
        ):
            yield Span(
                SpanKind(kind),
                begin,
                duration,
                StepNumber(step),
                MicrobatchIndex(microbatch - 1) if microbatch else None,
                SampleId(sample - 1) if sample else None,
                BlockIndex(boundary) if boundary else None,
                Direction(direction) if direction else None,
                size,
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimeline:
    """Peer to coordinator: its spans since the last report, of one step and early ones of the next.

    Attributes:
        origin_us: Time on the peer's clock from which spans count.
        clock: Distance of the peer's clock from the coordinator's.
        num_dropped: Spans above the limit.
    """

    run_id: RunId
    attempt: Attempt
    step: StepNumber
    origin_us: ClockTime
    clock: ClockEstimate
    spans: Spans
    num_dropped: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerTimeline:
    """Coordinator to client: a timeline with its peer, and the layers that the peer hosts."""

    peer_id: PeerId
    layers: LayerRange
    timeline: StepTimeline
