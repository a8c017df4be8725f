"""Buffers on their way from one peer to another, to and from protobuf, checked."""

from __future__ import annotations

from dataclasses import dataclass

from swarm_ft.errors import MalformedMessage
from swarm_ft.ids import BlockIndex, RunId, SampleId
from swarm_ft.proto import peer_pb2 as pb
from swarm_ft.protocol.buffer_wire import checked_sample, checked_samples
from swarm_ft.protocol.checks import bounded, checked_boundary, checked_digest, checked_run_id
from swarm_ft.protocol.codec_spec import Direction
from swarm_ft.protocol.digest import fingerprint_of


@dataclass(frozen=True, kw_only=True, slots=True)
class BuffersRequest:
    """Which buffers a peer wants of another."""

    run_id: RunId
    spec_digest: bytes
    boundary: BlockIndex
    samples: tuple[SampleId, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SentBuffer:
    """A buffer as one peer gives it to another.

    Attributes:
        direction: of the frames that build on it.
        digest: of the payload.
        payload: its stored form.
    """

    sample: SampleId
    direction: Direction
    digest: bytes
    payload: bytes


def request_to_wire(request: BuffersRequest) -> pb.BuffersRequest:
    """A request as protobuf."""
    return pb.BuffersRequest(
        run_id=request.run_id,
        spec_digest=request.spec_digest,
        boundary=request.boundary,
        samples=request.samples,
    )


def request_from_wire(request: pb.BuffersRequest) -> BuffersRequest:
    """A request from protobuf.

    Raises:
        MalformedMessage: any field is out of its bounds.
    """
    return BuffersRequest(
        run_id=checked_run_id(request.run_id),
        spec_digest=checked_digest("RunSpec digest", request.spec_digest),
        boundary=checked_boundary(request.boundary),
        samples=checked_samples("buffers asked for", request.samples),
    )


def buffer_to_wire(buffer: SentBuffer) -> pb.BufferRecord:
    """A buffer as protobuf."""
    return pb.BufferRecord(
        sample=buffer.sample,
        direction=buffer.direction,
        digest=buffer.digest,
        payload=buffer.payload,
    )


def buffer_from_wire(buffer: pb.BufferRecord) -> SentBuffer:
    """A buffer from protobuf; what its payload holds is for the codec.

    Raises:
        MalformedMessage: any field is out of its bounds, or the payload is not its digest's.
    """
    bounded("direction of a buffer", buffer.direction, 1, len(Direction))
    digest = checked_digest("digest of a buffer", buffer.digest)
    if fingerprint_of(buffer.payload) != digest:
        raise MalformedMessage(f"buffer of sample {buffer.sample}: damaged on its way")
    return SentBuffer(
        sample=checked_sample(buffer.sample),
        direction=Direction(buffer.direction),
        digest=digest,
        payload=buffer.payload,
    )
