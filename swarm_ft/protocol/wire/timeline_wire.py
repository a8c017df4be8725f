"""Timelines and questions for the time, to and from protobuf, checked.

They come from peers and go through the coordinator to clients: both ends check them here.
"""

from __future__ import annotations

from swarm_ft.errors import MalformedMessage
from swarm_ft.ids import Attempt, StepNumber
from swarm_ft.proto import timeline_pb2 as pb
from swarm_ft.protocol.messages.control import ClockProbe, ClockReply
from swarm_ft.protocol.messages.timeline import (
    MAX_SPANS,
    ClockEstimate,
    PeerTimeline,
    SpanKind,
    Spans,
    StepTimeline,
)
from swarm_ft.protocol.spec.checks import bounded, checked_peer_id, checked_run_id
from swarm_ft.protocol.spec.codec_spec import Direction
from swarm_ft.protocol.spec.layers import MAX_BLOCKS
from swarm_ft.protocol.wire.run_wire import layers_from_wire, layers_to_wire
from swarm_ft.protocol.wire.traffic_wire import MAX_TRAFFIC_BYTES

MAX_CLOCK_US = 1 << 51
"""70 years; sums of a few are exact in JSON's numbers."""
MAX_NUMBER = 1 << 32
"""Whatever a neighbour's frame may be called: its receiver is not to be refused for it."""
_COLUMNS = {
    "kinds": (min(SpanKind), max(SpanKind)),
    "begin_us": (0, MAX_CLOCK_US),
    "duration_us": (0, MAX_CLOCK_US),
    "steps": (0, MAX_NUMBER),
    "microbatches": (0, MAX_NUMBER),
    "samples": (0, MAX_NUMBER),
    "boundaries": (0, MAX_BLOCKS),
    "directions": (0, max(Direction)),
    "num_bytes": (0, MAX_TRAFFIC_BYTES),
}


def timeline_to_wire(timeline: StepTimeline) -> pb.StepTimeline:
    """A peer's timeline as protobuf."""
    return pb.StepTimeline(
        run_id=timeline.run_id,
        attempt=timeline.attempt,
        step=timeline.step,
        origin_us=timeline.origin_us,
        clock_offset_us=timeline.clock.offset_us,
        clock_error_us=timeline.clock.error_us,
        num_dropped=timeline.num_dropped,
        spans=pb.Spans(**{name: getattr(timeline.spans, name) for name in _COLUMNS}),
    )


def timeline_from_wire(timeline: pb.StepTimeline) -> StepTimeline:
    """A peer's timeline from protobuf.

    Raises:
        MalformedMessage: too many spans, columns of several lengths, or a number out of bounds.
    """
    offset_us = bounded("offset", timeline.clock_offset_us, -MAX_CLOCK_US, MAX_CLOCK_US)
    error_us = bounded("error of a clock", timeline.clock_error_us, 0, MAX_CLOCK_US)
    return StepTimeline(
        run_id=checked_run_id(timeline.run_id),
        attempt=Attempt(timeline.attempt),
        step=StepNumber(timeline.step),
        origin_us=bounded("origin", timeline.origin_us, 0, MAX_CLOCK_US),
        clock=ClockEstimate(offset_us, error_us),
        num_dropped=timeline.num_dropped,
        spans=_spans_from_wire(timeline.spans),
    )


def _spans_from_wire(spans: pb.Spans) -> Spans:
    num_spans = bounded("spans", len(spans.kinds), 0, MAX_SPANS)
    columns: dict[str, tuple[int, ...]] = {}
    for name, (low, high) in _COLUMNS.items():
        column = getattr(spans, name)
        if len(column) != num_spans:
            raise MalformedMessage(f"spans: expected {num_spans} {name}, got {len(column)}")
        columns[name] = tuple(column)
        if num_spans:
            bounded(name, min(columns[name]), low, high)
            bounded(name, max(columns[name]), low, high)
    return Spans(**columns)


def peer_timeline_to_wire(timeline: PeerTimeline) -> pb.PeerTimeline:
    """A timeline and its peer as protobuf."""
    return pb.PeerTimeline(
        peer_id=timeline.peer_id,
        layers=layers_to_wire(timeline.layers),
        timeline=timeline_to_wire(timeline.timeline),
    )


def peer_timeline_from_wire(timeline: pb.PeerTimeline) -> PeerTimeline:
    """A timeline and its peer from protobuf.

    Raises:
        MalformedMessage: any field is out of its bounds.
    """
    return PeerTimeline(
        peer_id=checked_peer_id(timeline.peer_id),
        layers=layers_from_wire(timeline.layers),
        timeline=timeline_from_wire(timeline.timeline),
    )


def probe_from_wire(probe: pb.ClockProbe) -> ClockProbe:
    """A question for the time from protobuf.

    Raises:
        MalformedMessage: its time is out of bounds.
    """
    return ClockProbe(sent_us=bounded("time of a probe", probe.sent_us, 0, MAX_CLOCK_US))


def reply_from_wire(reply: pb.ClockReply) -> ClockReply:
    """The answer from protobuf.

    Raises:
        MalformedMessage: a time is out of bounds.
    """
    return ClockReply(
        sent_us=bounded("time of a probe", reply.sent_us, 0, MAX_CLOCK_US),
        coordinator_us=bounded("coordinator's time", reply.coordinator_us, 0, MAX_CLOCK_US),
    )
