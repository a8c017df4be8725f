"""Conversion of messages between two peers, of which there are thousands a step.

These are frames and acknowledgements over a boundary, and pieces of gradients among members. The
module checks presence, ranges, and sizes of digests and lists. Code that knows the run checks
whether a frame or a piece fits it: its shape, its codec, its turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, assert_never

from google.protobuf.message import Message

from swarm_ft.codec.spec import Direction
from swarm_ft.codec.tensor import TENSOR_HEADER_BYTES, EncodedTensor
from swarm_ft.errors import MalformedMessage
from swarm_ft.ids import Attempt, MicrobatchIndex, SampleId, StepNumber
from swarm_ft.proto import boundary_pb2, link_pb2, reduce_pb2
from swarm_ft.protocol.messages.boundary import (
    Ack,
    BoundaryHello,
    Frame,
    FrameKey,
    FrameKind,
    KeyFrameRequest,
    SideInfoPart,
)
from swarm_ft.protocol.messages.link import LinkHello, LinkMessage, LinkPing, LinkPong
from swarm_ft.protocol.messages.reduction import (
    GradientPiece,
    Phase,
    PieceAck,
    PieceKey,
    ReduceHello,
    Scope,
)
from swarm_ft.protocol.spec.bounds import DIGEST, Range, check_bound, clean_text
from swarm_ft.protocol.wire.convert import WireType, wire_type

GRPC_PREFIX_BYTES = 5
"""Bytes of gRPC's flag and length in front of every message, part of a frame's cost."""

_PLAIN: Mapping[str, WireType[Any]] = {
    "hello": wire_type(LinkHello, link_pb2.LinkHello),
    "boundary_hello": wire_type(BoundaryHello, boundary_pb2.BoundaryHello),
    "reduce_hello": wire_type(ReduceHello, reduce_pb2.ReduceHello),
    "ping": wire_type(LinkPing, link_pb2.LinkPing),
    "pong": wire_type(LinkPong, link_pb2.LinkPong),
}
"""Rare messages, which the generic converter handles, by the names of the body's fields."""
_PLAIN_NAMES = {wire.kind: name for name, wire in _PLAIN.items()}


def link_to_wire(message: LinkMessage) -> link_pb2.LinkMessage:
    """Return a link's message as protobuf."""
    match message:
        case Frame():
            frame = _frame_to_wire(message, message.tensor.to_bytes())
            return link_pb2.LinkMessage(frame=frame)
        case Ack(key):
            return link_pb2.LinkMessage(frame_ack=_key_to_wire(key))
        case GradientPiece():
            piece = _piece_to_wire(message, message.tensor.to_bytes())
            return link_pb2.LinkMessage(piece=piece)
        case PieceAck(piece_key):
            return link_pb2.LinkMessage(piece_ack=_piece_key_to_wire(piece_key))
        case KeyFrameRequest(key, reason):
            request = boundary_pb2.KeyFrameRequest(key=_key_to_wire(key), reason=reason)
            return link_pb2.LinkMessage(key_frame_request=request)
        case SideInfoPart(data, rest_bytes):
            part = boundary_pb2.SharedBasis(basis=data, rest_bytes=rest_bytes)
            return link_pb2.LinkMessage(basis=part)
        case LinkHello() | BoundaryHello() | ReduceHello() | LinkPing() | LinkPong():
            name = _PLAIN_NAMES[type(message)]
            plain: Any = _PLAIN[name].to_wire(message)
            return link_pb2.LinkMessage(**{name: plain})
        case _:
            assert_never(message)


def link_from_wire(message: link_pb2.LinkMessage) -> LinkMessage:
    """Return a link's message from protobuf.

    Raises:
        MalformedMessage: A field is out of its bounds.
        VersionMismatch: It is a hello in another version.
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
            return KeyFrameRequest(_key_from_wire(request.key), clean_text(request.reason))
        case "basis":
            return SideInfoPart(message.basis.basis, message.basis.rest_bytes)
        case None:
            raise MalformedMessage("message over a link: expected a known body, got none")
        case name:
            plain: LinkMessage = _PLAIN[name].from_wire(getattr(message, name))
            return plain


# ---- messages over a boundary


def _frame_to_wire(frame: Frame, tensor: bytes) -> boundary_pb2.Frame:
    return boundary_pb2.Frame(
        key=_key_to_wire(frame.key),
        kind=boundary_pb2.FrameKind.Name(frame.kind),
        base_digest=frame.base_digest,
        result_digest=frame.result_digest,
        tensor=tensor,
    )


def _frame_from_wire(frame: boundary_pb2.Frame) -> Frame:
    kind = FrameKind(check_bound("frame kind", frame.kind, Range(1, 3)))
    is_direct, is_delta = kind is FrameKind.DIRECT, kind is FrameKind.DELTA
    if (is_direct and frame.result_digest) or (not is_delta and frame.base_digest):
        raise MalformedMessage(f"{kind.name} frame: has a digest that its kind does not have")
    return Frame(
        key=_key_from_wire(frame.key),
        kind=kind,
        tensor=EncodedTensor.from_bytes(frame.tensor),
        base_digest=check_bound("base digest", frame.base_digest, DIGEST) if is_delta else b"",
        result_digest=check_bound("result digest", frame.result_digest, DIGEST)
        if not is_direct
        else b"",
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
        direction=Direction(check_bound("direction", key.direction, Range(1, 2))),
    )


# ---- messages of sums


def _piece_to_wire(piece: GradientPiece, tensor: bytes) -> reduce_pb2.GradientPiece:
    return reduce_pb2.GradientPiece(key=_piece_key_to_wire(piece.key), tensor=tensor)


def _piece_key_to_wire(key: PieceKey) -> reduce_pb2.PieceKey:
    return reduce_pb2.PieceKey(
        attempt=key.attempt,
        step=key.step,
        phase=reduce_pb2.ReducePhase.Name(key.phase),
        piece=key.piece,
        scope=reduce_pb2.ReduceScope.Name(key.scope),
    )


def _piece_key_from_wire(key: reduce_pb2.PieceKey) -> PieceKey:
    return PieceKey(
        attempt=Attempt(key.attempt),
        step=StepNumber(key.step),
        phase=Phase(check_bound("phase of an all-reduce", key.phase, Range(1, 2))),
        piece=key.piece,
        scope=Scope(check_bound("scope of an all-reduce", key.scope, Range(1, 2))),
    )


# ---- traffic of messages, without a second copy of the payload


def wire_bytes(message: Frame | GradientPiece | SideInfoPart) -> int:
    """Return the bytes of a message on the stream, with all headers of message and gRPC."""
    rest, num_bytes = _all_but_its_bytes(message)
    return _field_bytes(rest.ByteSize() + _field_bytes(num_bytes)) + GRPC_PREFIX_BYTES


def _all_but_its_bytes(message: Frame | GradientPiece | SideInfoPart) -> tuple[Message, int]:
    """Return the message without its one large field, and that field's bytes."""
    if isinstance(message, SideInfoPart):
        return boundary_pb2.SharedBasis(rest_bytes=message.rest_bytes), len(message.data)
    rest: Message
    if isinstance(message, Frame):
        rest = _frame_to_wire(message, b"")
    else:
        rest = _piece_to_wire(message, b"")
    return rest, TENSOR_HEADER_BYTES + len(message.tensor.payload)


def _field_bytes(num_bytes: int) -> int:
    """Return the bytes of a field: its tag, its length in groups of 7 bits, and its content."""
    return 1 + max(1, -(-num_bytes.bit_length() // 7)) + num_bytes


LINK_MESSAGE: WireType[LinkMessage] = WireType(
    LinkMessage, link_pb2.LinkMessage, link_to_wire, link_from_wire
)
