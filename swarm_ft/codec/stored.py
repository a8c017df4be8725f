"""Stored form of buffers, byte for byte the same at both ends of a boundary.

With 16 bits a value it is the payload of `fp16`. With 8 or 4 bits values are multiples of a
channel's scale times that of a block of 32 channels of one token. A channel's scale is the
geometric mean of its values, so a channel that is always large does not hide its neighbours in a
block. A massive activation (arXiv 2402.17762) costs precision only in its own block. Blocks follow
the OCP microscaling formats, whose scales are powers of two.

Layout with 8 and 4 bits, little-endian: exponent int16; pattern of the largest block's scale
uint16; patterns of channels' scales, uint16 each; of blocks' scales, uint8 each (relative to the
largest, which is 255; 0 is a block of zeros); codes in planes. See `kernels.base` for patterns.
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
from swarm_ft.codec.spec import CodecName, CodecSpec
from swarm_ft.codec.tensor import EncodedTensor
from swarm_ft.errors import BadFrame

_HALVES = HalfCodec(CodecSpec(CodecName.FP16, 1600))
_HEAD = struct.Struct("<hH")
_OCTAVES = 40
"""Range of peaks around 1, in powers of two, that need no exponent, and largest distance of a
channel's scale below the peak; nothing then over- or underflows."""
_PEAK = ONE - 8 * _OCTAVES, ONE + 8 * _OCTAVES
_EXPONENTS = -149, 127
"""Exponents of the smallest and the largest float32."""
_MAX_FLOAT = torch.finfo(torch.float32).max
_MOST_BELOW = 255
"""Number of patterns from the largest block's scale to the smallest stored one, 2^-31 of it."""


def buffer_bytes(tokens: int, channels: int, bits: int) -> int:
    """Return the size of every stored buffer of this shape."""
    if bits == 16:
        return _HALVES.max_payload_bytes(tokens, channels)
    scales = 2 * channels + tokens * block_count(channels)
    return _HEAD.size + scales + packed_bytes(tokens * channels, bits)


def pack_buffer(y: Tensor, bits: int = 16) -> bytes:
    """Return the stored form of a buffer; it depends on y's values alone, not on the machine.

    With 16 bits the error is at most 2^-11 of the value, or 2^-39 of the largest one, and packing
    an unpacked buffer gives the same bytes. With B = 8 or 4 bits it is at most 0.6 * 2^-(B - 1) of
    the block's largest value, both relative to their channels' scales, or 2^-30 of the sample's;
    packing again may change the bytes.

    Args:
        y: Decoded value, float32 [tokens, channels].
        bits: 16, 8 or 4.

    Raises:
        BadFrame: y has a wrong shape or type.
        NonFinite: y has an infinity or NaN.
    """
    if bits == 16:
        return _HALVES.encode(y).payload
    return _pack(checked_sample(y), bits)


def unpack_buffer(
    payload: bytes, tokens: int, channels: int, bits: int = 16, *, device: torch.device = CPU
) -> Tensor:
    """Return a stored buffer as float32 [tokens, channels] on a device; finite for any bytes.

    Raises:
        BadFrame: `payload` is not a stored buffer of this shape.
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
    """Return an exponent, y without it, and the patterns of channels' scales, int64 [channels]."""
    sums, counts, peak = kernels.magnitudes(y)
    exponent = _exponent(checked_peak(peak.item()))
    if exponent:
        y = times_power(y, -exponent)
        sums, counts, peak = kernels.magnitudes(y)
    largest = max(int(peak.view(torch.int32)) >> CUT, _PEAK[0])
    means = torch.where(counts > 0, sums // counts.clamp(min=1), largest)
    return exponent, y, means.clamp(min=largest - 8 * _OCTAVES)


def _exponent(peak: float) -> int:
    """Return 0 for ordinary peaks, else the exponent that brings the peak into [1, 2)."""
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
    """Refuse scales that `_pack` never writes; all others decode to finite values."""
    lowest, highest = _PEAK[0] - 8 * _OCTAVES, _PEAK[1]
    if not _EXPONENTS[0] <= exponent <= _EXPONENTS[1]:
        raise BadFrame(f"buffer: expected an exponent within {_EXPONENTS}, got {exponent}")
    if not _MOST_BELOW <= largest <= highest:
        raise BadFrame(f"buffer: expected a scale from {_MOST_BELOW} to {highest}, got {largest}")
    outside = scales[(scales < lowest) | (scales > highest)]
    if len(outside):
        raise BadFrame(f"buffer: expected scales from {lowest} to {highest}, got {outside[0]}")


def _restored(y: Tensor, exponent: int) -> Tensor:
    """Return `y` times its exponent, clamped to the largest float32."""
    return times_power(y, exponent).clamp(-_MAX_FLOAT, _MAX_FLOAT)
