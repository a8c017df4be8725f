"""An encoded tensor and its bytes."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from swarm_ft.codec.sizes import MAX_CHANNELS, MAX_TOKENS
from swarm_ft.codec.spec import HEADER_BYTES, CodecSpec, spec_from_header
from swarm_ft.errors import BadCodec, MalformedMessage

_SHAPE = struct.Struct("<II")
TENSOR_HEADER_BYTES = HEADER_BYTES + _SHAPE.size


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
            codec = spec_from_header(data[:HEADER_BYTES])
        except BadCodec as error:
            raise MalformedMessage(f"tensor: {error.message}") from error
        tokens, channels = _SHAPE.unpack_from(data, HEADER_BYTES)
        _check_size("tokens", tokens, MAX_TOKENS)
        _check_size("channels", channels, MAX_CHANNELS)
        return cls(codec, tokens, channels, data[TENSOR_HEADER_BYTES:])


def _check_size(name: str, size: int, most: int) -> None:
    if not 1 <= size <= most:
        raise MalformedMessage(f"{name}: expected 1 to {most}, got {size}")
