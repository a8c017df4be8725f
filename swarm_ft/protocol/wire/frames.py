"""What two peers say to each other, to and from protobuf: there are thousands of messages a step.

Frames and acknowledgements over a boundary, pieces of gradients between replicas. Checked here:
presence, ranges, sizes of digests and lists. Whether a frame or a piece fits the run (its shape,
its codec, its turn) is for those who know the run.
"""

from __future__ import annotations

from typing import assert_never

from google.protobuf.message import Message

from swarm_ft.errors import MalformedMessage
from swarm_ft.ids import Attempt, MicrobatchIndex, SampleId, StepNumber
from swarm_ft.proto import boundary_pb2, link_pb2, reduce_pb2
from swarm_ft.protocol.messages.boundary import (
    TENSOR_HEADER_BYTES,
    Ack,
    BoundaryHello,
    EncodedTensor,
    Frame,
    FrameKey,
    FrameKind,
    KeyFrameRequest,
)
from swarm_ft.protocol.messages.link import LinkHello, LinkMessage
from swarm_ft.protocol.messages.reduction import (
    GradientPiece,
    Phase,
    PieceAck,
    PieceKey,
    ReduceHello,
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
from swarm_ft.protocol.wire.run_wire import layers_from_wire, layers_to_wire

MAX_RECEIVED_KEYS = 1 << 16
"""Frames of one step over one boundary; a hello with more is an attack on memory."""
MAX_WINDOW_FRAMES = 1 << 16
MAX_GRADIENT_VALUES = 1 << 36
"""Of one stage."""
GRPC_PREFIX_BYTES = 5
"""gRPC puts a flag and a length in front of every message; part of a frame's cost."""


def link_to_wire(message: LinkMessage) -> link_pb2.LinkMessage:
    """What goes over a link, as protobuf."""
    match message:
        case Frame():
            frame = _frame_to_wire(message, message.tensor.to_bytes())
            return link_pb2.LinkMessage(frame=frame)
        case Ack(key):
            return link_pb2.LinkMessage(frame_ack=_key_to_wire(key))
        case GradientPiece(piece_key, tensor):
            piece = _piece_to_wire(piece_key, tensor.to_bytes())
            return link_pb2.LinkMessage(piece=piece)
        case PieceAck(piece_key):
            return link_pb2.LinkMessage(piece_ack=_piece_key_to_wire(piece_key))
        case KeyFrameRequest(key, reason):
            request = boundary_pb2.KeyFrameRequest(key=_key_to_wire(key), reason=reason)
            return link_pb2.LinkMessage(key_frame_request=request)
        case BoundaryHello():
            return link_pb2.LinkMessage(boundary_hello=_boundary_hello_to_wire(message))
        case ReduceHello():
            return link_pb2.LinkMessage(reduce_hello=_reduce_hello_to_wire(message))
        case LinkHello():
            hello = link_pb2.LinkHello(peer_id=message.peer_id, to=message.to)
            return link_pb2.LinkMessage(hello=hello)
        case _:
            assert_never(message)


def link_from_wire(message: link_pb2.LinkMessage) -> LinkMessage:
    """What came over a link, from protobuf.

    Raises:
        MalformedMessage: any field is out of its bounds.
    """
    match message.WhichOneof("body"):
        case "frame":
            return _frame_from_wire(message.frame)
        case "frame_ack":
            return Ack(_key_from_wire(message.frame_ack))
        case "piece":
            tensor = EncodedTensor.from_bytes(message.piece.tensor)
            return GradientPiece(_piece_key_from_wire(message.piece.key), tensor)
        case "piece_ack":
            return PieceAck(_piece_key_from_wire(message.piece_ack))
        case "key_frame_request":
            request = message.key_frame_request
            return KeyFrameRequest(_key_from_wire(request.key), checked_text(request.reason))
        case "boundary_hello":
            return _boundary_hello_from_wire(message.boundary_hello)
        case "reduce_hello":
            return _reduce_hello_from_wire(message.reduce_hello)
        case "hello":
            hello = message.hello
            return LinkHello(peer_id=checked_peer_id(hello.peer_id), to=checked_peer_id(hello.to))
        case _:
            raise MalformedMessage("message over a link: expected a body, got none we know")


# ---- over a boundary


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


def _boundary_hello_to_wire(hello: BoundaryHello) -> boundary_pb2.BoundaryHello:
    return boundary_pb2.BoundaryHello(
        run_id=hello.run_id,
        spec_digest=hello.spec_digest,
        boundary=hello.boundary,
        peer_id=hello.peer_id,
        attempt=hello.attempt,
        window_frames=hello.window_frames,
        received=[_key_to_wire(key) for key in sorted(hello.received)],
    )


def _boundary_hello_from_wire(hello: boundary_pb2.BoundaryHello) -> BoundaryHello:
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


# ---- between replicas


def _piece_to_wire(key: PieceKey, tensor: bytes) -> reduce_pb2.GradientPiece:
    return reduce_pb2.GradientPiece(key=_piece_key_to_wire(key), tensor=tensor)


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


def _reduce_hello_to_wire(hello: ReduceHello) -> reduce_pb2.ReduceHello:
    return reduce_pb2.ReduceHello(
        run_id=hello.run_id,
        spec_digest=hello.spec_digest,
        attempt=hello.attempt,
        peer_id=hello.peer_id,
        layers=layers_to_wire(hello.layers),
        num_values=hello.num_values,
    )


def _reduce_hello_from_wire(hello: reduce_pb2.ReduceHello) -> ReduceHello:
    return ReduceHello(
        run_id=checked_run_id(hello.run_id),
        spec_digest=checked_digest("RunSpec digest", hello.spec_digest),
        attempt=Attempt(hello.attempt),
        peer_id=checked_peer_id(hello.peer_id),
        layers=layers_from_wire(hello.layers),
        num_values=bounded("values of a gradient", hello.num_values, 0, MAX_GRADIENT_VALUES),
    )


# ---- what is counted as traffic, without a second copy of the payload


def frame_wire_bytes(frame: Frame) -> int:
    """Bytes that a frame takes on the stream, all headers of message and gRPC included."""
    return _wire_bytes(_frame_to_wire(frame, b""), frame.tensor)


def piece_wire_bytes(piece: GradientPiece) -> int:
    """Bytes that a piece takes on the stream, all headers of message and gRPC included."""
    return _wire_bytes(_piece_to_wire(piece.key, b""), piece.tensor)


def _wire_bytes(rest: Message, tensor: EncodedTensor) -> int:
    tensor_bytes = _field_bytes(TENSOR_HEADER_BYTES + len(tensor.payload))
    return _field_bytes(rest.ByteSize() + tensor_bytes) + GRPC_PREFIX_BYTES


def _field_bytes(num_bytes: int) -> int:
    """Of a field of so many bytes: its tag, its length in groups of 7 bits, and the bytes."""
    return 1 + max(1, -(-num_bytes.bit_length() // 7)) + num_bytes
