"""Boundary messages to and from protobuf; the one place that checks what a neighbour sent.

Checked here: presence, ranges, sizes of digests and lists. Whether a frame fits the run (its
shape, its codec, its turn) is for those who know the run.
"""

from __future__ import annotations

from typing import assert_never

from swarm_ft.errors import MalformedMessage
from swarm_ft.ids import Attempt, MicrobatchIndex, SampleId, StepNumber
from swarm_ft.proto import boundary_pb2 as pb
from swarm_ft.protocol.messages.boundary import (
    Ack,
    BoundaryHello,
    BoundaryMessage,
    EncodedTensor,
    Frame,
    FrameKey,
    FrameKind,
    KeyFrameRequest,
)
from swarm_ft.protocol.spec.checks import (
    bounded,
    checked_boundary,
    checked_digest,
    checked_peer_id,
    checked_run_id,
    checked_text,
)
from swarm_ft.protocol.spec.codec_spec import Direction

MAX_RECEIVED_KEYS = 1 << 16
"""Frames of one step over one boundary; a hello with more is an attack on memory."""
MAX_WINDOW_FRAMES = 1 << 16
GRPC_PREFIX_BYTES = 5
"""gRPC puts a flag and a length in front of every message; part of a frame's cost."""


def frame_wire_bytes(frame: Frame) -> int:
    """Bytes that a frame takes on the stream, all headers of message and gRPC included."""
    return message_wire_bytes(boundary_to_wire(frame))


def message_wire_bytes(message: pb.BoundaryMessage) -> int:
    """Bytes that a message takes on the stream, gRPC's own included."""
    return message.ByteSize() + GRPC_PREFIX_BYTES


def boundary_to_wire(message: BoundaryMessage) -> pb.BoundaryMessage:
    """A boundary message as protobuf."""
    match message:
        case BoundaryHello():
            return pb.BoundaryMessage(hello=_hello_to_wire(message))
        case Frame():
            return pb.BoundaryMessage(frame=_frame_to_wire(message))
        case Ack(key):
            return pb.BoundaryMessage(ack=_key_to_wire(key))
        case KeyFrameRequest(key, reason):
            request = pb.KeyFrameRequest(key=_key_to_wire(key), reason=reason)
            return pb.BoundaryMessage(key_frame_request=request)
        case _:
            assert_never(message)


def boundary_from_wire(message: pb.BoundaryMessage) -> BoundaryMessage:
    """A boundary message from protobuf.

    Raises:
        MalformedMessage: any field is out of its bounds.
    """
    match message.WhichOneof("body"):
        case "hello":
            return _hello_from_wire(message.hello)
        case "frame":
            return _frame_from_wire(message.frame)
        case "ack":
            return Ack(_key_from_wire(message.ack))
        case "key_frame_request":
            request = message.key_frame_request
            return KeyFrameRequest(_key_from_wire(request.key), checked_text(request.reason))
        case _:
            raise MalformedMessage("boundary message: expected a body, got none we know")


def _key_to_wire(key: FrameKey) -> pb.FrameKey:
    return pb.FrameKey(
        attempt=key.attempt,
        step=key.step,
        microbatch=key.microbatch,
        sample=key.sample,
        direction=pb.Direction.Name(key.direction),
    )


def _key_from_wire(key: pb.FrameKey) -> FrameKey:
    return FrameKey(
        attempt=Attempt(key.attempt),
        step=StepNumber(key.step),
        microbatch=MicrobatchIndex(key.microbatch),
        sample=SampleId(key.sample),
        direction=Direction(bounded("direction", key.direction, 1, 2)),
    )


def _frame_to_wire(frame: Frame) -> pb.Frame:
    return pb.Frame(
        key=_key_to_wire(frame.key),
        kind=pb.FrameKind.Name(frame.kind),
        base_digest=frame.base_digest,
        result_digest=frame.result_digest,
        tensor=frame.tensor.to_bytes(),
    )


def _frame_from_wire(frame: pb.Frame) -> Frame:
    kind = FrameKind(bounded("frame kind", frame.kind, 1, 3))
    is_direct, is_delta = kind is FrameKind.DIRECT, kind is FrameKind.DELTA
    if (is_direct and frame.result_digest) or (not is_delta and frame.base_digest):
        raise MalformedMessage(f"{kind.name} frame: has a digest that its kind does not have")
    return Frame(
        key=_key_from_wire(frame.key),
        kind=kind,
        tensor=EncodedTensor.from_bytes(frame.tensor),
        base_digest=checked_digest("base digest", frame.base_digest, optional=not is_delta),
        result_digest=checked_digest("result digest", frame.result_digest, optional=is_direct),
    )


def _hello_to_wire(hello: BoundaryHello) -> pb.BoundaryHello:
    return pb.BoundaryHello(
        run_id=hello.run_id,
        spec_digest=hello.spec_digest,
        boundary=hello.boundary,
        peer_id=hello.peer_id,
        attempt=hello.attempt,
        window_frames=hello.window_frames,
        received=[_key_to_wire(key) for key in sorted(hello.received)],
    )


def _hello_from_wire(hello: pb.BoundaryHello) -> BoundaryHello:
    bounded("frames received", len(hello.received), 0, MAX_RECEIVED_KEYS)
    return BoundaryHello(
        run_id=checked_run_id(hello.run_id),
        spec_digest=checked_digest("RunSpec digest", hello.spec_digest),
        boundary=checked_boundary(hello.boundary),
        peer_id=checked_peer_id(hello.peer_id),
        attempt=Attempt(hello.attempt),
        window_frames=bounded("window", hello.window_frames, 1, MAX_WINDOW_FRAMES),
        received=frozenset(_key_from_wire(key) for key in hello.received),
    )
