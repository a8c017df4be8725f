"""Messages between neighbours over a boundary, both ways, as frozen values."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, NamedTuple

from swarm_ft.errors import BadCodec, MalformedMessage
from swarm_ft.ids import Attempt, BlockIndex, MicrobatchIndex, PeerId, RunId, SampleId, StepNumber
from swarm_ft.protocol.spec.bounds import Digest, Length, Range, check_bound
from swarm_ft.protocol.spec.codec_spec import HEADER_BYTES as CODEC_HEADER_BYTES
from swarm_ft.protocol.spec.codec_spec import CodecSpec, Direction, spec_from_header
from swarm_ft.protocol.spec.run_spec import MAX_HIDDEN_SIZE, MAX_SEQ_LENGTH

# ---- a frame: one sample's activation or gradient, sent over a boundary

_SHAPE = struct.Struct("<II")
TENSOR_HEADER_BYTES = CODEC_HEADER_BYTES + _SHAPE.size


class FrameKind(IntEnum):
    """Kind of a frame, by what it builds on; the numbers are those of the wire."""

    DIRECT = 1
    """A frame that builds on nothing and leaves no buffer."""
    KEY = 2
    """A frame that builds on nothing and becomes the sample's buffer."""
    DELTA = 3
    """A frame that builds on the buffer that `base_digest` names."""


class FrameKey(NamedTuple):
    """Unique name of a frame inside its run and boundary."""

    attempt: Attempt
    step: StepNumber
    microbatch: MicrobatchIndex
    sample: SampleId
    direction: Direction


@dataclass(frozen=True, slots=True)
class EncodedTensor:
    """Tensor of one sample, encoded by a codec.

    Attributes:
        codec: The codec that wrote it, and the only one that can read it.
        tokens: Rows of the tensor.
        channels: Columns of the tensor.
        payload: Steps and codes, in the codec's own layout.
    """

    codec: CodecSpec
    tokens: int
    channels: int
    payload: bytes

    def to_bytes(self) -> bytes:
        """Return header and payload: exactly a frame's bytes of the tensor."""
        return self.codec.to_header() + _SHAPE.pack(self.tokens, self.channels) + self.payload

    @classmethod
    def from_bytes(cls, data: bytes) -> EncodedTensor:
        """Return the tensor that `to_bytes` wrote; its codec checks the payload later.

        Raises:
            MalformedMessage: The data is too short, names no codec, or has a shape out of bounds.
        """
        if len(data) < TENSOR_HEADER_BYTES:
            raise MalformedMessage(
                f"tensor: expected a header of {TENSOR_HEADER_BYTES} bytes, got {len(data)}"
            )
        try:
            codec = spec_from_header(data[:CODEC_HEADER_BYTES])
        except BadCodec as error:
            raise MalformedMessage(f"tensor: {error.message}") from error
        tokens, channels = _SHAPE.unpack_from(data, CODEC_HEADER_BYTES)
        check_bound("tokens", tokens, Range(1, MAX_SEQ_LENGTH))
        check_bound("channels", channels, Range(1, MAX_HIDDEN_SIZE))
        return cls(codec, tokens, channels, data[TENSOR_HEADER_BYTES:])


@dataclass(frozen=True, slots=True)
class Frame:
    """Neighbour to neighbour: an encoded tensor with its name, and digests of its buffers.

    Attributes:
        key: Name of the frame.
        kind: Kind of the frame.
        tensor: The encoded tensor.
        base_digest: Digest of the buffer that a DELTA builds on; empty otherwise.
        result_digest: Digest of the buffer that KEY and DELTA make, and of the payload that makes
            it; empty otherwise.
    """

    key: FrameKey
    kind: FrameKind
    tensor: EncodedTensor
    base_digest: bytes = b""
    result_digest: bytes = b""


MAX_RECEIVED_KEYS = 1 << 16
"""Frames of one step over one boundary; a hello with more would exhaust memory."""
MAX_WINDOW_FRAMES = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundaryHello:
    """Neighbour to neighbour: first message of each side, with the frames that it has received."""

    run_id: RunId
    spec_digest: Digest
    boundary: BlockIndex
    peer_id: PeerId
    attempt: Attempt
    window_frames: Annotated[int, Range(1, MAX_WINDOW_FRAMES)]
    received: Annotated[frozenset[FrameKey], Length(MAX_RECEIVED_KEYS)] = frozenset()


@dataclass(frozen=True, slots=True)
class Ack:
    """Receiver to sender of a frame: the frame was decoded, and need not be sent again."""

    key: FrameKey


@dataclass(frozen=True, slots=True)
class KeyFrameRequest:
    """Receiver to sender of a frame: its buffer is missing, or came out different."""

    key: FrameKey
    reason: str


@dataclass(frozen=True, slots=True)
class SharedBasis:
    """Sender to receiver of frames: a part of a basis for coming frames.

    Attributes:
        basis: Next bytes of the basis, as `codec.basis` writes it.
        rest_bytes: Bytes that follow in further parts.
    """

    basis: bytes
    rest_bytes: int = 0


SessionMessage = Frame | Ack | KeyFrameRequest
"""Messages of a boundary's session."""
FromNeighbour = SessionMessage | SharedBasis
"""Messages after the hellos."""
BoundaryMessage = BoundaryHello | FromNeighbour
