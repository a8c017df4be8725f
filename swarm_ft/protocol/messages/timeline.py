"""What peers did when, as frozen values: what a trace of a run is made of. No clock, no file.

Times are whole microseconds. Each peer counts them on its own clock, and says how far that is from
the coordinator's, see `remote_clock`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, NamedTuple

from swarm_ft.errors import MalformedMessage
from swarm_ft.ids import Attempt, BlockIndex, MicrobatchIndex, PeerId, RunId, SampleId, StepNumber
from swarm_ft.protocol.messages.reports import MAX_TRAFFIC_BYTES
from swarm_ft.protocol.spec.bounds import Length, Range
from swarm_ft.protocol.spec.codec_spec import Direction
from swarm_ft.protocol.spec.layers import MAX_BLOCKS, LayerRange

# ---- another machine's clock, as far as round trips tell
#
# Who asks notes when; the answer carries the other's time. That time was read somewhere in
# between, so half of the round trip bounds the error, however uneven the ways there and back are
# (Cristian 1989, doi 10.1007/BF01784024). The bound loosens as clocks drift apart, until the next
# short trip.

MAX_CLOCK_US = 1 << 51
"""70 years; sums of a few are exact in JSON's numbers."""
ClockTime = Annotated[int, Range(0, MAX_CLOCK_US)]
NUM_KEPT = 64
"""Round trips that are remembered."""
DRIFT = 1e-4
"""By how much two machines' clocks may differ in speed: 100 ppm, several times what quartz does."""


@dataclass(frozen=True, slots=True)
class ClockEstimate:
    """How far the other clock is ahead of ours, to within an error; microseconds."""

    offset_us: Annotated[int, Range(-MAX_CLOCK_US, MAX_CLOCK_US)]
    error_us: ClockTime


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


MAX_SPANS = 20_000
"""Of one timeline: a step of 2,500 frames each way. A peer counts what is more, and drops it."""


class SpanKind(IntEnum):
    """What a span of time went into; the numbers are those of the wire."""

    FORWARD = 1
    BACKWARD = 2
    """The gradient of the input."""
    FORWARD_BACKWARD = 3
    """The last stage: forward, loss and backward in one go."""
    GRADIENT = 4
    """The step's gradient is cleared, measured, given to the replicas and taken from them."""
    OPTIMIZER = 5
    ENCODE = 6
    SEND = 7
    """From handing a frame to the stream until the stream took it."""
    RECEIVE = 8
    """From a frame's arrival, whole, until it waits to be decoded."""
    DECODE = 9
    WAIT_INPUT = 10
    """No task: what came next was the input of a microbatch."""
    WAIT_GRADIENT = 11
    """No task: what came next was the gradient of a microbatch's output."""
    WAIT_ACKS = 12
    """All is computed, and neighbours have yet to say that they got what they were sent."""
    WAIT_COMMIT = 13
    """This peer is ready, and others are not."""
    REDUCE = 14
    """Replicas of the stage sum their gradients."""
    TIE = 15
    """Stages sum the gradients of weights that several of them hold, such as tied embeddings."""
    STEP = 16
    """From a step's plan until its commit is applied, or its attempt over."""
    PLAN = 17
    READY = 18
    COMMIT = 19
    WEIGHTS = 20
    """The gradients of the weights."""


_MAX_NUMBER = 1 << 32
"""Whatever a neighbour's frame may be called: its receiver is not to be refused for it."""
_Kind = Annotated[int, Range(int(min(SpanKind)), int(max(SpanKind)))]
_Number = Annotated[int, Range(0, _MAX_NUMBER)]
_Boundary = Annotated[int, Range(0, MAX_BLOCKS)]
_Direction = Annotated[int, Range(0, int(max(Direction)))]
_Bytes = Annotated[int, Range(0, MAX_TRAFFIC_BYTES)]
_LENGTH = Length(MAX_SPANS)


class Span(NamedTuple):
    """One span of time at one peer.

    Attributes:
        begin_us: since the timeline's origin.
        duration_us: 0 for a moment.
        num_bytes: of a frame, or of all gradients that were sent; 0 where nothing is moved.
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
    """Spans as columns of one length, which is how they travel; iterating gives them one by one.

    Attributes:
        microbatches: counted from 1; 0: of none. So too `samples`.
        boundaries: 0: at none.
        directions: 0: none.
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
    """What a peer did since it told last: for one step, and what came early of the next.

    Attributes:
        origin_us: on the peer's clock; spans begin so much later.
        clock: how far the peer's clock is from the coordinator's.
        num_dropped: spans that were too many to keep.
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
    """A timeline with the name of its peer, and the layers that this hosts."""

    peer_id: PeerId
    layers: LayerRange
    timeline: StepTimeline
