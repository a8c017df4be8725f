"""The codec `qB`: B-bit codes on a grid of their own for every channel. Knows no buffers.

Payload of one sample: a bfloat16 scale for each channel, then a B-bit number for each value in
C order, which is the code plus `levels`. A value is code * scale, exact in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from swarm_ft.codec.base import check_encoded, checked_peak, checked_sample, refuse_base
from swarm_ft.codec.packing import pack, packed_bytes, unpack
from swarm_ft.codec.scales import (
    SCALE_BYTES,
    choose_scales,
    levels_of,
    read_scales,
    write_scales,
)
from swarm_ft.errors import BadFrame
from swarm_ft.protocol.codec_spec import CodecSpec
from swarm_ft.protocol.frame import EncodedTensor


@dataclass(frozen=True, slots=True)
class QuantizingCodec:
    """`qB`: Q of AQ-SGD (arXiv 2206.01299), without the faults of its published code.

    Scales belong to one sample, not to a microbatch; they have the range of float32 and no
    epsilon; the grid is symmetric; at 2 to 4 bits it is fitted to the channel's values.
    """

    spec: CodecSpec

    def encode(self, x: Tensor, base: Tensor | None = None) -> EncodedTensor:
        """See `Codec.encode`; the codes of x * 2^n are those of x."""
        refuse_base(self.spec, base)
        return quantize(checked_sample(x), self.spec)

    def decode(self, encoded: EncodedTensor, base: Tensor | None = None) -> Tensor:
        """See `Codec.decode`; on the CPU."""
        refuse_base(self.spec, base)
        check_encoded(self, encoded)
        codes, scales = read_grid(encoded)
        return codes.mul_(scales)

    def payload_bytes(self, tokens: int, channels: int) -> int:
        """See `Codec.payload_bytes`."""
        return grid_bytes(tokens, channels, self.spec.bits)


def grid_bytes(tokens: int, channels: int, bits: int) -> int:
    """Size of the scales and codes of [tokens, channels]."""
    return SCALE_BYTES * channels + packed_bytes(tokens * channels, bits)


def quantize(x: Tensor, spec: CodecSpec) -> EncodedTensor:
    """`x`, float32 [tokens, channels], as scales and codes of `spec.bits` bits.

    Raises:
        NonFinite: x holds an infinity or NaN.
    """
    peaks = x.abs().amax(0)
    checked_peak(peaks.max().item())
    levels = levels_of(spec.bits)
    scales = choose_scales(x, peaks, spec.bits)
    codes = (x / scales).round_().clamp_(-levels, levels).add_(levels).to(torch.uint8)
    payload = write_scales(scales) + pack(codes.cpu().numpy(), spec.bits)
    tokens, channels = x.shape
    return EncodedTensor(spec, tokens, channels, payload)


def read_grid(encoded: EncodedTensor) -> tuple[Tensor, Tensor]:
    """Codes, float32 [tokens, channels], and scales, float32 [channels], on the CPU.

    Raises:
        BadFrame: a scale or code that `quantize` does not write.
    """
    bits, channels = encoded.codec.bits, encoded.channels
    scales = read_scales(encoded.payload, channels, bits)
    stream = encoded.payload[SCALE_BYTES * channels :]
    numbers = unpack(stream, encoded.tokens * channels, bits)
    levels = levels_of(bits)
    if (largest := int(numbers.max())) > 2 * levels:
        raise BadFrame(f"frame: expected codes of 0 to {2 * levels}, got {largest}")
    codes = torch.from_numpy(numbers).view(encoded.tokens, channels).float()
    return codes.sub_(levels), scales
