"""Buffers in their stored form: what both ends of a boundary keep of a sample, byte for byte.

Of 16 bits a value: the payload of `fp16`. Of 8 or 4: whole multiples of a scale, a channel's times
that of a block of 32 channels of one token. A channel's scale is its values' geometric mean, so one
that is always large does not hide its neighbours in a block, and a token that is large in one
channel (a massive activation, arXiv 2402.17762) costs precision only there and then. Blocks follow
the OCP microscaling formats, whose scales are powers of two.

Layout of 8 and 4 bits, little-endian: exponent int16, pattern of the largest block's scale uint16,
patterns of channels' scales uint16 each, of blocks' scales uint8 each (below the largest by 255
less the number; 0: a block of zeros), codes in planes. Patterns: see `kernels.base`.
"""

from __future__ import annotations

import math
import struct

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swarm_ft.codec.base import CPU, as_tensor, checked_peak, checked_sample, to_device, to_host
from swarm_ft.codec.kernels import kernels_for
from swarm_ft.codec.kernels.base import CUT, ONE, Kernels, block_count, packed_bytes
from swarm_ft.codec.raw import HalfCodec, times_power
from swarm_ft.errors import BadFrame
from swarm_ft.protocol.messages.boundary import EncodedTensor
from swarm_ft.protocol.spec.codec_spec import CodecName, CodecSpec

_HALVES = HalfCodec(CodecSpec(CodecName.FP16, 1600))
_HEAD = struct.Struct("<hH")
_OCTAVES = 40
"""Peaks within so many powers of two of 1 are stored as they are, others with an exponent; and a
channel's scale is at most so many below the peak. So nothing on the way over- or underflows."""
_PEAK = ONE - 8 * _OCTAVES, ONE + 8 * _OCTAVES
_EXPONENTS = -149, 127
"""Of the smallest and the largest float32."""
_MAX_FLOAT = torch.finfo(torch.float32).max
_MOST_BELOW = 255
"""Patterns from the largest block's scale to the least one that is kept, 2^-31 of it."""


def buffer_bytes(tokens: int, channels: int, bits: int) -> int:
    """The size of every buffer of that shape, in its stored form."""
    if bits == 16:
        return _HALVES.max_payload_bytes(tokens, channels)
    scales = 2 * channels + tokens * block_count(channels)
    return _HEAD.size + scales + packed_bytes(tokens * channels, bits)


def pack_buffer(y: Tensor, bits: int = 16) -> bytes:
    """A buffer's stored form: a function of y's values alone, whatever packs it.

    At 16 bits the error is at most 2^-11 of the value, or 2^-39 of the largest one, and packing
    what was unpacked gives the same bytes again. At B = 8 and 4 it is at most 0.6 * 2^-(B - 1) of
    the block's largest value, both in their channels' scales, or 2^-30 of the sample's; the bytes
    may differ when packed again.

    Args:
        y: float32 [tokens, channels], what `decode` returned.
        bits: 16, 8 or 4.

    Raises:
        BadFrame: y is of another shape or type.
        NonFinite: y holds an infinity or NaN.
    """
    if bits == 16:
        return _HALVES.encode(y).payload
    return _pack(checked_sample(y), bits)


def unpack_buffer(
    payload: bytes, tokens: int, channels: int, bits: int = 16, *, device: torch.device = CPU
) -> Tensor:
    """A stored buffer as float32 [tokens, channels] on a device; finite, whatever the bytes.

    Raises:
        BadFrame: `payload` is not a stored buffer of that shape.
    """
    if bits == 16:
        encoded = EncodedTensor(_HALVES.spec, tokens, channels, payload)
        return _HALVES.decode(encoded, device=device)
    expected = buffer_bytes(tokens, channels, bits)
    if len(payload) != expected:
        shape = f"[{tokens}, {channels}]"
        raise BadFrame(f"buffer: {bits} bits of {shape} take {expected} bytes, got {len(payload)}")
    return _unpack(payload, tokens, channels, bits, device)


def _pack(y: Tensor, bits: int) -> bytes:
    kernels = kernels_for(y.device.type)
    exponent, y, scales = _channel_scales(y, kernels)
    blocks, codes = kernels.quantize_blocks(y, scales, bits)
    largest = max(int(blocks.max()), _MOST_BELOW)
    below = (blocks - (largest - _MOST_BELOW)).clamp(min=0).to(torch.uint8)
    packed = kernels.pack(codes.reshape(-1), bits)
    of_channels, of_blocks, body = to_host(scales, below, packed)
    head = _HEAD.pack(exponent, largest) + of_channels.astype("<u2").tobytes()
    return head + of_blocks.tobytes() + body.tobytes()


def _channel_scales(y: Tensor, kernels: Kernels) -> tuple[int, Tensor, Tensor]:
    """An exponent, y without it, and patterns of channels' scales, int64 [channels]."""
    sums, counts, peak = kernels.magnitudes(y)
    exponent = _exponent(checked_peak(peak.item()))
    if exponent:
        y = times_power(y, -exponent)
        sums, counts, peak = kernels.magnitudes(y)
    largest = max(int(peak.view(torch.int32)) >> CUT, _PEAK[0])
    means = torch.where(counts > 0, sums // counts.clamp(min=1), largest)
    return exponent, y, means.clamp(min=largest - 8 * _OCTAVES)


def _exponent(peak: float) -> int:
    """0 for ordinary peaks, else that of the power of two that brings it into [1, 2)."""
    is_ordinary = peak == 0 or 2.0**-_OCTAVES <= peak < 2.0**_OCTAVES
    return 0 if is_ordinary else math.frexp(peak)[1] - 1


def _unpack(payload: bytes, tokens: int, channels: int, bits: int, device: torch.device) -> Tensor:
    exponent, largest = _HEAD.unpack_from(payload)
    scales = np.frombuffer(payload, "<u2", channels, _HEAD.size).astype(np.int64)
    _check_head(exponent, largest, scales)
    count, start = tokens * block_count(channels), _HEAD.size + 2 * channels
    below = np.frombuffer(payload, np.uint8, count, start).reshape(tokens, -1).astype(np.int32)
    blocks = np.where(below > 0, below + np.int32(largest - _MOST_BELOW), np.int32(0))
    kernels = kernels_for(device.type)
    codes = kernels.unpack(as_tensor(payload[start + count :], device), tokens * channels, bits)
    of_blocks, of_channels = (to_device(torch.from_numpy(n), device) for n in (blocks, scales))
    y = kernels.dequantize_blocks(codes.view(tokens, channels), of_blocks, of_channels, bits)
    return _restored(y, exponent) if exponent else y


def _check_head(exponent: int, largest: int, scales: NDArray[np.int64]) -> None:
    """Refuse scales that pack never writes; with those it does, everything is finite."""
    lowest, highest = _PEAK[0] - 8 * _OCTAVES, _PEAK[1]
    if not _EXPONENTS[0] <= exponent <= _EXPONENTS[1]:
        raise BadFrame(f"buffer: expected an exponent within {_EXPONENTS}, got {exponent}")
    if not _MOST_BELOW <= largest <= highest:
        raise BadFrame(f"buffer: expected a scale from {_MOST_BELOW} to {highest}, got {largest}")
    outside = scales[(scales < lowest) | (scales > highest)]
    if len(outside):
        raise BadFrame(f"buffer: expected scales from {lowest} to {highest}, got {outside[0]}")


def _restored(y: Tensor, exponent: int) -> Tensor:
    """`y` with its exponent; what rounding took beyond the largest float32 is that."""
    return times_power(y, exponent).clamp(-_MAX_FLOAT, _MAX_FLOAT)
