"""What peers tell of their buffers, and hand-offs of buffers, to and from protobuf, checked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from swarm_ft.ids import Attempt, SampleId
from swarm_ft.proto import coordinator_pb2 as pb
from swarm_ft.protocol.buffer_reports import BufferCounts, HeldBuffers
from swarm_ft.protocol.checks import bounded, checked_boundary, checked_peer_id, checked_run_id
from swarm_ft.protocol.coordinator_messages import FollowBuffers
from swarm_ft.protocol.peer_messages import BuffersFollowed
from swarm_ft.protocol.run_spec import MAX_SAMPLES
from swarm_ft.protocol.sample_set import SampleSet
from swarm_ft.protocol.traffic_wire import MAX_TRAFFIC_BYTES

MAX_BOUNDARIES = 2
"""Of one peer: in front of its stage and behind it."""
MAX_FOLLOWING = 1 << 16
"""Samples of one message."""
MAX_SOURCES = 64
_FOLLOWING = "samples whose buffers follow"


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


def follow_to_wire(follow: FollowBuffers) -> pb.FollowBuffers:
    """Buffers that are to follow their samples, as protobuf."""
    return pb.FollowBuffers(
        run_id=follow.run_id,
        attempt=follow.attempt,
        boundary=follow.boundary,
        samples=follow.samples,
        sources=follow.sources,
    )


def follow_from_wire(follow: pb.FollowBuffers) -> FollowBuffers:
    """Buffers that are to follow their samples, from protobuf.

    Raises:
        MalformedMessage: any field is out of its bounds.
    """
    bounded("sources of buffers", len(follow.sources), 1, MAX_SOURCES)
    return FollowBuffers(
        run_id=checked_run_id(follow.run_id),
        attempt=Attempt(follow.attempt),
        boundary=checked_boundary(follow.boundary),
        samples=checked_samples(_FOLLOWING, follow.samples),
        sources=tuple(checked_peer_id(source) for source in follow.sources),
    )


def followed_to_wire(followed: BuffersFollowed) -> pb.BuffersFollowed:
    """Buffers that followed their samples, as protobuf."""
    return pb.BuffersFollowed(
        run_id=followed.run_id,
        attempt=followed.attempt,
        boundary=followed.boundary,
        samples=followed.samples,
    )


def followed_from_wire(followed: pb.BuffersFollowed) -> BuffersFollowed:
    """Buffers that followed their samples, from protobuf.

    Raises:
        MalformedMessage: any field is out of its bounds.
    """
    return BuffersFollowed(
        run_id=checked_run_id(followed.run_id),
        attempt=Attempt(followed.attempt),
        boundary=checked_boundary(followed.boundary),
        samples=checked_samples(_FOLLOWING, followed.samples),
    )


def checked_sample(number: int) -> SampleId:
    """A sample, if a run can have it.

    Raises:
        MalformedMessage: none can.
    """
    return SampleId(bounded("sample", number, 0, MAX_SAMPLES - 1))


def checked_samples(what: str, numbers: Sequence[int]) -> tuple[SampleId, ...]:
    """Samples of one message, if they can be that.

    Raises:
        MalformedMessage: none, too many, or some that no run has.
    """
    bounded(what, len(numbers), 1, MAX_FOLLOWING)
    return tuple(checked_sample(number) for number in numbers)
