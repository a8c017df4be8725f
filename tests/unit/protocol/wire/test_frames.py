"""Hand-written conversion of frequent messages: hostile frames and pieces are refused."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from swarm_ft.codec.spec import Axis, CodecName, CodecSpec, Direction
from swarm_ft.codec.tensor import EncodedTensor
from swarm_ft.errors import MalformedMessage
from swarm_ft.ids import Attempt, MicrobatchIndex, SampleId, StepNumber
from swarm_ft.protocol.messages.boundary import (
    Ack,
    Frame,
    FrameKey,
    FrameKind,
    KeyFrameRequest,
    SideInfoPart,
)
from swarm_ft.protocol.messages.reduction import GradientPiece, Phase, PieceAck, PieceKey
from swarm_ft.protocol.spec.run_spec import MAX_HIDDEN_SIZE, MAX_SEQ_LENGTH
from swarm_ft.protocol.wire.convert import WireType
from swarm_ft.protocol.wire.frames import LINK_MESSAGE

KEY = FrameKey(Attempt(1), StepNumber(2), MicrobatchIndex(0), SampleId(5), Direction.FORWARD)
TENSOR = EncodedTensor(CodecSpec(CodecName.AQ, 400, Axis.CHANNEL), 128, 64, b"payload")
HEADER = TENSOR.to_bytes()[:12]
DELTA = Frame(KEY, FrameKind.DELTA, TENSOR, b"b" * 16, b"r" * 16)
KEY_FRAME = Frame(KEY, FrameKind.KEY, TENSOR, b"", b"r" * 16)
DIRECT = Frame(KEY, FrameKind.DIRECT, TENSOR)
PIECE_KEY = PieceKey(Attempt(1), StepNumber(2), Phase.SUM, 3)
PIECE = GradientPiece(PIECE_KEY, TENSOR)


def tensor_of(
    name: int = CodecName.AQ,
    flags: int = 2,
    hundredths: int = 400,
    tokens: int = 128,
    channels: int = 64,
) -> bytes:
    """Return a tensor's bytes with any claims in its header."""
    return struct.pack("<BBHII", name, flags, hundredths, tokens, channels) + TENSOR.payload


def test_the_header_that_is_spoilt_below_is_a_good_one() -> None:
    assert tensor_of() == TENSOR.to_bytes()


def test_a_tensor_takes_twelve_bytes_beside_its_payload() -> None:
    assert len(TENSOR.to_bytes()) == 12 + len(TENSOR.payload)
    assert EncodedTensor.from_bytes(TENSOR.to_bytes()) == TENSOR


@pytest.mark.parametrize(
    ("message", "path", "value", "complaint"),
    [
        (Ack(KEY), "frame_ack.direction", 3, "direction: expected 1 to 2, got 3"),
        (KeyFrameRequest(KEY, ""), "key_frame_request.key", None, "direction"),
        (DELTA, "frame", None, "expected a known body"),
        (DELTA, "frame.key", None, "direction"),
        (DELTA, "frame.kind", 0, "frame kind: expected 1 to 3, got 0"),
        (DELTA, "frame.kind", 9, "frame kind: expected 1 to 3, got 9"),
        (DELTA, "frame.tensor", b"", "tensor: expected a header of 12 bytes, got 0"),
        (DELTA, "frame.tensor", HEADER[:11], "tensor: expected a header of 12 bytes, got 11"),
        (DELTA, "frame.tensor", tensor_of(tokens=0), "tokens: expected 1 to"),
        (DELTA, "frame.tensor", tensor_of(tokens=MAX_SEQ_LENGTH + 1), "tokens: expected 1 to"),
        (DELTA, "frame.tensor", tensor_of(tokens=2**32 - 1), "tokens: expected 1 to"),
        (DELTA, "frame.tensor", tensor_of(channels=0), "channels: expected 1 to"),
        (DELTA, "frame.tensor", tensor_of(channels=MAX_HIDDEN_SIZE + 1), "channels: expected 1"),
        (DELTA, "frame.tensor", tensor_of(channels=2**32 - 1), "channels: expected 1 to"),
        (DELTA, "frame.tensor", tensor_of(name=0), "tensor: .* names none"),
        (DELTA, "frame.tensor", tensor_of(name=14), "tensor: .* names none"),
        (
            DELTA,
            "frame.tensor",
            tensor_of(flags=0),
            "tensor: .* only q, aq, qc and aqc share steps",
        ),
        (DELTA, "frame.tensor", tensor_of(flags=5), "tensor: .* names none"),
        (DELTA, "frame.tensor", tensor_of(flags=6 << 5 | 2), "tensor: .* names none"),
        (DELTA, "frame.tensor", tensor_of(flags=2 << 5 | 2), "tensor: .* feeds its error back"),
        (DELTA, "frame.tensor", tensor_of(hundredths=900), "9 bits is outside 1 to 8"),
        (DELTA, "frame.tensor", tensor_of(CodecName.Q, hundredths=0), "0 bits is outside 1 to 8"),
        (DELTA, "frame.tensor", tensor_of(hundredths=150), "got 1.5"),
        (DELTA, "frame.tensor", tensor_of(CodecName.FP16, 0, 800), "8 bits is outside 16 to 16"),
        (DELTA, "frame.tensor", tensor_of(CodecName.QC, 2, 50), "needs an entropy stage"),
        (DELTA, "frame.tensor", tensor_of(CodecName.QK, 0, 50), "needs an entropy stage"),
        (
            DELTA,
            "frame.tensor",
            tensor_of(CodecName.AQK, 18, 50),
            "only q, aq, qc and aqc share steps",
        ),
        (DELTA, "frame.tensor", tensor_of(CodecName.QK, 16, 1), "0.01 times the spread is outside"),
        (DELTA, "frame.tensor", b"\xff" * 20, "tensor: .* names none"),
        (DELTA, "frame.base_digest", b"", "base digest: expected 16 bytes, got 0"),
        (DELTA, "frame.base_digest", b"b" * 15, "base digest: expected 16 bytes, got 15"),
        (DELTA, "frame.result_digest", b"", "result digest: expected 16 bytes, got 0"),
        (KEY_FRAME, "frame.base_digest", b"b" * 16, "KEY frame: has a digest"),
        (KEY_FRAME, "frame.result_digest", b"", "result digest: expected 16 bytes, got 0"),
        (DIRECT, "frame.base_digest", b"b" * 16, "DIRECT frame: has a digest"),
        (DIRECT, "frame.result_digest", b"r" * 16, "DIRECT frame: has a digest"),
        (PIECE, "piece", None, "expected a known body"),
        (PIECE, "piece.key", None, "phase of an all-reduce: expected 1 to 2, got 0"),
        (PIECE, "piece.key.phase", 3, "phase of an all-reduce: expected 1 to 2, got 3"),
        (PIECE, "piece.key.scope", 3, "scope of an all-reduce: expected 1 to 2, got 3"),
        (PIECE, "piece.tensor", b"", "tensor: expected a header of 12 bytes, got 0"),
        (PIECE, "piece.tensor", b"\xff" * 12, "tensor: codec header .* names none"),
        (
            PieceAck(PIECE_KEY),
            "piece_ack.phase",
            0,
            "phase of an all-reduce: expected 1 to 2, got 0",
        ),
        (
            PieceAck(PIECE_KEY),
            "piece_ack.scope",
            0,
            "scope of an all-reduce: expected 1 to 2, got 0",
        ),
    ],
)
def test_refuses_hostile_fields(message: Any, path: str, value: Any, complaint: str) -> None:
    wire: WireType[Any] = LINK_MESSAGE
    spoilt: Any = wire.to_wire(message)
    *owners, last = path.split(".")
    owner = spoilt
    for name in owners:
        owner = getattr(owner, name)
    if value is None:
        owner.ClearField(last)
    else:
        setattr(owner, last, value)
    with pytest.raises(MalformedMessage, match=complaint):
        wire.from_wire(spoilt)


@pytest.mark.parametrize("data", [b"", b"\xff" * 1000])
def test_a_basis_is_carried_as_it_is_for_who_knows_the_channels(data: bytes) -> None:
    part = SideInfoPart(data, rest_bytes=len(data))
    assert LINK_MESSAGE.from_bytes(LINK_MESSAGE.to_bytes(part)) == part


def test_the_reason_for_a_key_frame_is_cut_and_freed_of_control_characters() -> None:
    request = KeyFrameRequest(KEY, "\x1b[2J" + "x" * 2000)
    assert LINK_MESSAGE.from_bytes(LINK_MESSAGE.to_bytes(request)) == KeyFrameRequest(
        KEY, " [2J" + "x" * 996
    )
