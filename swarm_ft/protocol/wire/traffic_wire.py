"""Counters of what was sent, to and from protobuf.

What a peer reports of one step is bounded, so that sums over peers and steps stay in their fields.
"""

from __future__ import annotations

from swarm_ft.proto import coordinator_pb2 as pb
from swarm_ft.protocol.messages.reports import GradientTraffic, Traffic
from swarm_ft.protocol.spec.checks import bounded, checked_boundary

MAX_TRAFFIC_BYTES, MAX_TRAFFIC_FRAMES = 1 << 50, 1 << 26
"""Of one step over one boundary; sums over peers and steps must stay in their fields."""


def traffic_to_wire(traffic: Traffic) -> pb.Traffic:
    """Counters of one boundary as protobuf."""
    return pb.Traffic(**{name: getattr(traffic, name) for name in Traffic.__dataclass_fields__})


def traffic_from_wire(traffic: pb.Traffic) -> Traffic:
    """Counters of one boundary from protobuf."""
    return Traffic(
        boundary=checked_boundary(traffic.boundary),
        forward_bytes=traffic.forward_bytes,
        backward_bytes=traffic.backward_bytes,
        forward_uncompressed_bytes=traffic.forward_uncompressed_bytes,
        backward_uncompressed_bytes=traffic.backward_uncompressed_bytes,
        key_frames=traffic.key_frames,
        delta_frames=traffic.delta_frames,
    )


def gradients_to_wire(traffic: GradientTraffic) -> pb.GradientTraffic:
    """Counters of what replicas sent each other as protobuf."""
    return pb.GradientTraffic(
        sent_bytes=traffic.sent_bytes, uncompressed_bytes=traffic.uncompressed_bytes
    )


def gradients_from_wire(traffic: pb.GradientTraffic) -> GradientTraffic:
    """Counters of what replicas sent each other from protobuf."""
    return GradientTraffic(
        sent_bytes=traffic.sent_bytes, uncompressed_bytes=traffic.uncompressed_bytes
    )


def reported_traffic_from_wire(traffic: pb.Traffic) -> Traffic:
    """Counters of one step over one boundary, as a peer reports them.

    Raises:
        MalformedMessage: any of them is out of its bounds.
    """
    for name in Traffic.__dataclass_fields__.keys() - {"boundary"}:
        high = MAX_TRAFFIC_FRAMES if name.endswith("frames") else MAX_TRAFFIC_BYTES
        bounded(name, getattr(traffic, name), 0, high)
    return traffic_from_wire(traffic)


def reported_gradients_from_wire(traffic: pb.GradientTraffic) -> GradientTraffic:
    """Counters of what a peer reports to have sent its replicas in one step.

    Raises:
        MalformedMessage: any of them is out of its bounds.
    """
    for name in GradientTraffic.__dataclass_fields__:
        bounded(f"{name} of gradients", getattr(traffic, name), 0, MAX_TRAFFIC_BYTES)
    return gradients_from_wire(traffic)
