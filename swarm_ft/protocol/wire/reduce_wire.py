"""Messages between replicas to and from protobuf; the one place that checks what they hold.

Checked here: presence, ranges, sizes. Whether a piece fits the run and the step's division is for
those who know them.
"""

from __future__ import annotations

from typing import assert_never

from swarm_ft.errors import MalformedMessage
from swarm_ft.ids import Attempt, StepNumber
from swarm_ft.proto import reduce_pb2 as pb
from swarm_ft.protocol.messages.boundary import EncodedTensor
from swarm_ft.protocol.messages.reduction import (
    GradientPiece,
    Phase,
    PieceAck,
    PieceKey,
    ReduceHello,
    ReduceMessage,
)
from swarm_ft.protocol.spec.checks import bounded, checked_digest, checked_peer_id, checked_run_id
from swarm_ft.protocol.wire.boundary_wire import GRPC_PREFIX_BYTES
from swarm_ft.protocol.wire.run_wire import layers_from_wire, layers_to_wire

MAX_GRADIENT_VALUES = 1 << 36
"""Of one stage."""


def reduce_wire_bytes(message: pb.ReduceMessage) -> int:
    """Bytes that a message takes on the stream, gRPC's own included."""
    return message.ByteSize() + GRPC_PREFIX_BYTES


def reduce_to_wire(message: ReduceMessage) -> pb.ReduceMessage:
    """A message between replicas as protobuf."""
    match message:
        case ReduceHello():
            return pb.ReduceMessage(hello=_hello_to_wire(message))
        case GradientPiece(key, tensor):
            piece = pb.GradientPiece(key=_key_to_wire(key), tensor=tensor.to_bytes())
            return pb.ReduceMessage(piece=piece)
        case PieceAck(key):
            return pb.ReduceMessage(ack=_key_to_wire(key))
        case _:
            assert_never(message)


def reduce_from_wire(message: pb.ReduceMessage) -> ReduceMessage:
    """A message between replicas from protobuf.

    Raises:
        MalformedMessage: any field is out of its bounds.
    """
    match message.WhichOneof("body"):
        case "hello":
            return _hello_from_wire(message.hello)
        case "piece":
            tensor = EncodedTensor.from_bytes(message.piece.tensor)
            return GradientPiece(_key_from_wire(message.piece.key), tensor)
        case "ack":
            return PieceAck(_key_from_wire(message.ack))
        case _:
            raise MalformedMessage("all-reduce message: expected a body, got none we know")


def _key_to_wire(key: PieceKey) -> pb.PieceKey:
    return pb.PieceKey(
        attempt=key.attempt,
        step=key.step,
        phase=pb.ReducePhase.Name(key.phase),
        piece=key.piece,
    )


def _key_from_wire(key: pb.PieceKey) -> PieceKey:
    return PieceKey(
        attempt=Attempt(key.attempt),
        step=StepNumber(key.step),
        phase=Phase(bounded("phase of an all-reduce", key.phase, 1, 2)),
        piece=key.piece,
    )


def _hello_to_wire(hello: ReduceHello) -> pb.ReduceHello:
    return pb.ReduceHello(
        run_id=hello.run_id,
        spec_digest=hello.spec_digest,
        attempt=hello.attempt,
        peer_id=hello.peer_id,
        layers=layers_to_wire(hello.layers),
        num_values=hello.num_values,
    )


def _hello_from_wire(hello: pb.ReduceHello) -> ReduceHello:
    return ReduceHello(
        run_id=checked_run_id(hello.run_id),
        spec_digest=checked_digest("RunSpec digest", hello.spec_digest),
        attempt=Attempt(hello.attempt),
        peer_id=checked_peer_id(hello.peer_id),
        layers=layers_from_wire(hello.layers),
        num_values=bounded("values of a gradient", hello.num_values, 0, MAX_GRADIENT_VALUES),
    )
