"""Messages between two peers to and from protobuf, by hand: there are thousands of them a step.

Frames and acknowledgements over a boundary, pieces of gradients between replicas. Checked here:
presence, ranges, sizes of digests and lists. Whether a frame or a piece fits the run (its shape,
its codec, its turn) is for those who know the run.
"""

from __future__ import annotations

from typing import Any, assert_never

from google.protobuf.message import Message

from swarm_ft.errors import MalformedMessage
from swarm_ft.ids import Attempt, MicrobatchIndex, SampleId, StepNumber
from swarm_ft.proto import boundary_pb2, reduce_pb2
from swarm_ft.protocol.messages.boundary import (
    TENSOR_HEADER_BYTES,
    Ack,
    BoundaryHello,
    BoundaryMessage,
    EncodedTensor,
    Frame,
    FrameKey,
    FrameKind,
    KeyFrameRequest,
)
from swarm_ft.protocol.messages.reduction import (
    GradientPiece,
    Phase,
    PieceAck,
    PieceKey,
    ReduceHello,
    ReduceMessage,
)
from swarm_ft.protocol.spec.checks import bounded, checked_digest, checked_text
from swarm_ft.protocol.spec.codec_spec import Direction
from swarm_ft.protocol.wire.convert import WireType, wire_type

GRPC_PREFIX_BYTES = 5
"""gRPC puts a flag and a length in front of every message; part of a frame's cost."""

_BOUNDARY_HELLO: WireType[BoundaryHello] = wire_type(BoundaryHello, boundary_pb2.BoundaryHello)
_REDUCE_HELLO: WireType[ReduceHello] = wire_type(ReduceHello, reduce_pb2.ReduceHello)


# ---- over a boundary


def boundary_to_wire(message: BoundaryMessage) -> Message:
    """A boundary message as protobuf."""
    match message:
        case Frame():
            frame = _frame_to_wire(message, message.tensor.to_bytes())
            return boundary_pb2.BoundaryMessage(frame=frame)
        case Ack(key):
            return boundary_pb2.BoundaryMessage(ack=_key_to_wire(key))
        case KeyFrameRequest(key, reason):
            request = boundary_pb2.KeyFrameRequest(key=_key_to_wire(key), reason=reason)
            return boundary_pb2.BoundaryMessage(key_frame_request=request)
        case BoundaryHello():
            hello: Any = _BOUNDARY_HELLO.to_wire(message)
            return boundary_pb2.BoundaryMessage(hello=hello)
        case _:
            assert_never(message)


def boundary_from_wire(message: boundary_pb2.BoundaryMessage) -> BoundaryMessage:
    """A boundary message from protobuf.

    Raises:
        MalformedMessage: any field is out of its bounds.
        VersionMismatch: it is a hello in another version.
    """
    match message.WhichOneof("body"):
        case "frame":
            return _frame_from_wire(message.frame)
        case "ack":
            return Ack(_key_from_wire(message.ack))
        case "key_frame_request":
            request = message.key_frame_request
            return KeyFrameRequest(_key_from_wire(request.key), checked_text(request.reason))
        case "hello":
            return _BOUNDARY_HELLO.from_wire(message.hello)
        case _:
            raise MalformedMessage("boundary message: expected a body, got none we know")


def frame_wire_bytes(frame: Frame) -> int:
    """Bytes that a frame takes on the stream, all headers of message and gRPC included."""
    return _wire_bytes(_frame_to_wire(frame, b""), frame.tensor)


def _frame_to_wire(frame: Frame, tensor: bytes) -> boundary_pb2.Frame:
    return boundary_pb2.Frame(
        key=_key_to_wire(frame.key),
        kind=boundary_pb2.FrameKind.Name(frame.kind),
        base_digest=frame.base_digest,
        result_digest=frame.result_digest,
        tensor=tensor,
    )


def _frame_from_wire(frame: boundary_pb2.Frame) -> Frame:
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


def _key_to_wire(key: FrameKey) -> boundary_pb2.FrameKey:
    return boundary_pb2.FrameKey(
        attempt=key.attempt,
        step=key.step,
        microbatch=key.microbatch,
        sample=key.sample,
        direction=boundary_pb2.Direction.Name(key.direction),
    )


def _key_from_wire(key: boundary_pb2.FrameKey) -> FrameKey:
    return FrameKey(
        attempt=Attempt(key.attempt),
        step=StepNumber(key.step),
        microbatch=MicrobatchIndex(key.microbatch),
        sample=SampleId(key.sample),
        direction=Direction(bounded("direction", key.direction, 1, 2)),
    )


# ---- between replicas


def reduce_to_wire(message: ReduceMessage) -> Message:
    """A message between replicas as protobuf."""
    match message:
        case GradientPiece(key, tensor):
            piece = reduce_pb2.GradientPiece(key=_piece_key_to_wire(key), tensor=tensor.to_bytes())
            return reduce_pb2.ReduceMessage(piece=piece)
        case PieceAck(key):
            return reduce_pb2.ReduceMessage(ack=_piece_key_to_wire(key))
        case ReduceHello():
            hello: Any = _REDUCE_HELLO.to_wire(message)
            return reduce_pb2.ReduceMessage(hello=hello)
        case _:
            assert_never(message)


def reduce_from_wire(message: reduce_pb2.ReduceMessage) -> ReduceMessage:
    """A message between replicas from protobuf.

    Raises:
        MalformedMessage: any field is out of its bounds.
        VersionMismatch: it is a hello in another version.
    """
    match message.WhichOneof("body"):
        case "piece":
            tensor = EncodedTensor.from_bytes(message.piece.tensor)
            return GradientPiece(_piece_key_from_wire(message.piece.key), tensor)
        case "ack":
            return PieceAck(_piece_key_from_wire(message.ack))
        case "hello":
            return _REDUCE_HELLO.from_wire(message.hello)
        case _:
            raise MalformedMessage("all-reduce message: expected a body, got none we know")


def piece_wire_bytes(piece: GradientPiece) -> int:
    """Bytes that a piece takes on the stream, all headers of message and gRPC included."""
    return _wire_bytes(reduce_pb2.GradientPiece(key=_piece_key_to_wire(piece.key)), piece.tensor)


def _piece_key_to_wire(key: PieceKey) -> reduce_pb2.PieceKey:
    return reduce_pb2.PieceKey(
        attempt=key.attempt,
        step=key.step,
        phase=reduce_pb2.ReducePhase.Name(key.phase),
        piece=key.piece,
    )


def _piece_key_from_wire(key: reduce_pb2.PieceKey) -> PieceKey:
    return PieceKey(
        attempt=Attempt(key.attempt),
        step=StepNumber(key.step),
        phase=Phase(bounded("phase of an all-reduce", key.phase, 1, 2)),
        piece=key.piece,
    )


# ---- sizes, without a second copy of the payload


def _wire_bytes(rest: Message, tensor: EncodedTensor) -> int:
    tensor_bytes = _field_bytes(TENSOR_HEADER_BYTES + len(tensor.payload))
    return _field_bytes(rest.ByteSize() + tensor_bytes) + GRPC_PREFIX_BYTES


def _field_bytes(num_bytes: int) -> int:
    """Of a field of so many bytes: its tag, its length in groups of 7 bits, and the bytes."""
    return 1 + max(1, -(-num_bytes.bit_length() // 7)) + num_bytes


BOUNDARY_MESSAGE: WireType[BoundaryMessage] = WireType(
    BoundaryMessage, boundary_pb2.BoundaryMessage, boundary_to_wire, boundary_from_wire
)
REDUCE_MESSAGE: WireType[ReduceMessage] = WireType(
    ReduceMessage, reduce_pb2.ReduceMessage, reduce_to_wire, reduce_from_wire
)
