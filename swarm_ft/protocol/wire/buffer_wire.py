"""What peers tell of their buffers, to and from protobuf, checked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from swarm_ft.proto import coordinator_pb2 as pb
from swarm_ft.protocol.messages.reports import BufferCounts, HeldBuffers, SampleSet
from swarm_ft.protocol.spec.checks import bounded, checked_boundary
from swarm_ft.protocol.spec.run_spec import MAX_SAMPLES
from swarm_ft.protocol.wire.traffic_wire import MAX_TRAFFIC_BYTES

MAX_BOUNDARIES = 2
"""Of one peer: in front of its stage and behind it."""


def held_to_wire(held: Iterable[HeldBuffers]) -> list[pb.HeldBuffers]:
    """Sets of samples by boundary, as protobuf."""
    return [pb.HeldBuffers(boundary=h.boundary, samples=h.samples.bitmap) for h in held]


def held_from_wire(held: Sequence[pb.HeldBuffers]) -> tuple[HeldBuffers, ...]:
    """Sets of samples by boundary, from protobuf.

    Raises:
        MalformedMessage: too many, or no sets of samples.
    """
    bounded("boundaries of a peer", len(held), 0, MAX_BOUNDARIES)
    return tuple(
        HeldBuffers(
            boundary=checked_boundary(h.boundary), samples=SampleSet.checked(h.samples, MAX_SAMPLES)
        )
        for h in held
    )


def counts_to_wire(counts: Iterable[BufferCounts]) -> list[pb.BufferCounts]:
    """Counts by boundary, as protobuf."""
    names = BufferCounts.__dataclass_fields__
    return [pb.BufferCounts(**{name: getattr(c, name) for name in names}) for c in counts]


def counts_from_wire(counts: Sequence[pb.BufferCounts]) -> tuple[BufferCounts, ...]:
    """Counts by boundary, from protobuf.

    Raises:
        MalformedMessage: too many, or out of all bounds.
    """
    bounded("boundaries of a peer", len(counts), 0, MAX_BOUNDARIES)
    names = [name for name in BufferCounts.__dataclass_fields__ if name != "boundary"]
    return tuple(
        BufferCounts(
            boundary=checked_boundary(c.boundary),
            **{name: bounded(name, getattr(c, name), 0, MAX_TRAFFIC_BYTES) for name in names},
        )
        for c in counts
    )
