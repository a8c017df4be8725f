"""Tensors to bytes and back, by codec spec. Knows no frames' order, no buffers' place, no clock."""

from __future__ import annotations

from torch import Tensor

from swarm_ft.codec.aqsgd import DeltaCodec
from swarm_ft.codec.base import Codec
from swarm_ft.codec.quantize import QuantizingCodec
from swarm_ft.codec.raw import Float32Codec, HalfCodec
from swarm_ft.protocol.codec_spec import CodecName, CodecSpec, Direction, parse_codec_spec
from swarm_ft.protocol.frame import EncodedTensor

__all__ = ["KEY_CODEC", "Codec", "from_spec", "pack_buffer", "parse", "unpack_buffer"]

KEY_CODEC: Codec = HalfCodec(CodecSpec(CodecName.FP16, 16))
"""The codec of key frames. Its payload is also a buffer's stored form, so a key frame's payload
is the buffer that it makes."""


def from_spec(spec: CodecSpec) -> Codec:
    """The codec that `spec` names."""
    match spec.name:
        case CodecName.NONE:
            return Float32Codec(spec)
        case CodecName.FP16:
            return HalfCodec(spec)
        case CodecName.Q:
            return QuantizingCodec(spec)
        case CodecName.AQ:
            return DeltaCodec(spec)


def parse(text: str, direction: Direction = Direction.FORWARD) -> Codec:
    """The codec of a text such as `aq4`.

    Raises:
        BadCodec: unknown name, bits out of 2..8, or `aq` for gradients.
    """
    return from_spec(parse_codec_spec(text, direction))


def pack_buffer(y: Tensor) -> bytes:
    """A buffer's stored form, 16 bits a value: the same bytes at both ends of a boundary.

    Args:
        y: float32 [tokens, channels], what `decode` returned.

    Raises:
        BadFrame: y is of another shape or type.
        NonFinite: y holds an infinity or NaN.
    """
    return KEY_CODEC.encode(y).payload


def unpack_buffer(payload: bytes, tokens: int, channels: int) -> Tensor:
    """A stored buffer as float32 [tokens, channels] on the CPU; packing it gives `payload`.

    Raises:
        BadFrame: `payload` is not a stored buffer of that shape.
    """
    return KEY_CODEC.decode(EncodedTensor(KEY_CODEC.spec, tokens, channels, payload))
