"""What neighbours say to each other over a boundary, both ways, as frozen values."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, NamedTuple

from swarm_ft.errors import BadCodec, MalformedMessage
from swarm_ft.ids import Attempt, BlockIndex, MicrobatchIndex, PeerId, RunId, SampleId, StepNumber
from swarm_ft.protocol.spec.bounds import Digest, Length, Range, checked
from swarm_ft.protocol.spec.codec_spec import HEADER_BYTES as CODEC_HEADER_BYTES
from swarm_ft.protocol.spec.codec_spec import CodecSpec, Direction, spec_from_header
from swarm_ft.protocol.spec.run_spec import MAX_HIDDEN_SIZE, MAX_SEQ_LENGTH

# ---- a frame: one sample's activation or gradient on its way over a boundary

_SHAPE = struct.Struct("<II")
TENSOR_HEADER_BYTES = CODEC_HEADER_BYTES + _SHAPE.size


class FrameKind(IntEnum):
    """What a frame builds on; the numbers are those of the wire."""

    DIRECT = 1
    """Builds on nothing and leaves no buffer."""
    KEY = 2
    """Builds on nothing and becomes the sample's buffer."""
    DELTA = 3
    """Builds on the buffer that `base_digest` names."""


class FrameKey(NamedTuple):
    """Names a frame for ever inside its run and boundary."""

    attempt: Attempt
    step: StepNumber
    microbatch: MicrobatchIndex
    sample: SampleId
    direction: Direction


@dataclass(frozen=True, slots=True)
class EncodedTensor:
    """One sample's tensor as a codec wrote it.

    Attributes:
        codec: the codec that wrote it, and the only one that can read it.
        tokens: rows of the tensor.
        channels: columns of the tensor.
        payload: steps and codes, in the codec's own layout.
    """

    codec: CodecSpec
    tokens: int
    channels: int
    payload: bytes

    def to_bytes(self) -> bytes:
        """Header and payload: exactly what a frame carries of the tensor."""
        return self.codec.to_header() + _SHAPE.pack(self.tokens, self.channels) + self.payload

    @classmethod
    def from_bytes(cls, data: bytes) -> EncodedTensor:
        """What `to_bytes` wrote; only its header is checked, the payload is for the codec.

        Raises:
            MalformedMessage: too short, no codec there is, or a shape out of bounds.
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
        checked("tokens", tokens, Range(1, MAX_SEQ_LENGTH))
        checked("channels", channels, Range(1, MAX_HIDDEN_SIZE))
        return cls(codec, tokens, channels, data[TENSOR_HEADER_BYTES:])


@dataclass(frozen=True, slots=True)
class Frame:
    """An encoded tensor with its name and, for buffered codecs, the digests at both ends.

    Attributes:
        base_digest: of the buffer a DELTA builds on; empty otherwise.
        result_digest: of the buffer that KEY and DELTA make, and of the payload that makes it;
            empty otherwise.
    """

    key: FrameKey
    kind: FrameKind
    tensor: EncodedTensor
    base_digest: bytes = b""
    result_digest: bytes = b""


MAX_RECEIVED_KEYS = 1 << 16
"""Frames of one step over one boundary; a hello with more is an attack on memory."""
MAX_WINDOW_FRAMES = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundaryHello:
    """First message of either side; what the other has already is not sent again."""

    run_id: RunId
    spec_digest: Digest
    boundary: BlockIndex
    peer_id: PeerId
    attempt: Attempt
    window_frames: Annotated[int, Range(1, MAX_WINDOW_FRAMES)]
    received: Annotated[frozenset[FrameKey], Length(MAX_RECEIVED_KEYS)] = frozenset()


@dataclass(frozen=True, slots=True)
class Ack:
    """The frame of this key was decoded; its sender need not send it again."""

    key: FrameKey


@dataclass(frozen=True, slots=True)
class KeyFrameRequest:
    """The frame of this key builds on a buffer that is not here, or came out different."""

    key: FrameKey
    reason: str


@dataclass(frozen=True, slots=True)
class SharedBasis:
    """A part of a basis that frames to come are coded along.

    Attributes:
        basis: the next bytes of it, as `codec.basis` writes it.
        rest_bytes: that are still to come.
    """

    basis: bytes
    rest_bytes: int = 0


SessionMessage = Frame | Ack | KeyFrameRequest
"""What the session of a boundary is about."""
FromNeighbour = SessionMessage | SharedBasis
"""What follows the hellos."""
BoundaryMessage = BoundaryHello | FromNeighbour
