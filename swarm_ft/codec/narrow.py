"""Fixed-width quantisers: `qB` and `aqB`, codes of B bits; `hqB`, the same of rotated tiles."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swarm_ft.codec.base import (
    Codec,
    as_tensor,
    check_encoded,
    check_finite,
    check_size,
    checked_base,
    checked_peak,
    checked_sample,
    peak_of,
    refuse_base,
    to_host,
)
from swarm_ft.codec.kernels import Kernels, NarrowGrid, kernels_for, packed_bytes
from swarm_ft.codec.scales import (
    SCALE_BYTES,
    choose_scales,
    read_scales,
    scale_patterns,
    scales_for,
)
from swarm_ft.protocol.messages.boundary import EncodedTensor
from swarm_ft.protocol.spec.codec_spec import CodecSpec

# ---- the codec `hqB`: tiles of a token's channels, rotated so that outliers spread over the tile
#
# Payload of one sample: that of `qB`, with a scale a tile, of the rotated values.

TILE = 64


@dataclass(frozen=True, slots=True)
class HadamardCodec:
    """Hadamard-rotated tiles, as in TAH-Quant (arXiv 2506.01352), and no buffer.

    A tile is 64 channels of one token, fewer in a narrower model; the last one of a token is
    filled up with zeros.

    Attributes:
        inner: a direct codec, for [tiles, channels of a tile].
        kernels: the backend; by default the one for the tensor's device.
    """

    spec: CodecSpec
    inner: Codec
    kernels: Kernels | None = None

    def encode(self, x: Tensor, base: Tensor | None = None) -> EncodedTensor:
        """See `Codec.encode`."""
        refuse_base(self.spec, base)
        x = checked_sample(x)
        checked_peak(peak_of(x))
        tokens, channels = x.shape
        tile = _tile(channels)
        # Divided first: so no sum of a tile can overflow.
        padded = torch.nn.functional.pad(x, (0, -channels % tile)) / tile
        kernels = self.kernels or kernels_for(x.device.type)
        rotated = kernels.hadamard(padded, tile).reshape(-1, tile)
        payload = self.inner.encode(rotated).payload
        return EncodedTensor(self.spec, tokens, channels, payload)

    def decode(self, encoded: EncodedTensor, base: Tensor | None = None) -> Tensor:
        """See `Codec.decode`; on the CPU."""
        refuse_base(self.spec, base)
        check_encoded(self, encoded)
        tokens, channels = encoded.tokens, encoded.channels
        tile, tiles = _tiling(tokens, channels)
        rotated = self.inner.decode(EncodedTensor(self.inner.spec, tiles, tile, encoded.payload))
        kernels = self.kernels or kernels_for(rotated.device.type)
        x = kernels.hadamard(rotated.view(tokens, -1), tile)
        return check_finite(x[:, :channels].contiguous())

    def max_payload_bytes(self, tokens: int, channels: int) -> int:
        """See `Codec.max_payload_bytes`."""
        tile, tiles = _tiling(tokens, channels)
        return self.inner.max_payload_bytes(tiles, tile)


def _tile(channels: int) -> int:
    return min(TILE, 1 << (channels - 1).bit_length())


def _tiling(tokens: int, channels: int) -> tuple[int, int]:
    """Channels of a tile, and the number of tiles."""
    tile = _tile(channels)
    return tile, tokens * -(-channels // tile)


# ---- the codecs `qB` and `aqB`: B-bit codes of values, or of their change against a buffer
#
# Payload of one sample: the scales of the axis, then the codes, packed.


@dataclass(frozen=True, slots=True)
class NarrowCodec:
    """Q of AQ-SGD (arXiv 2206.01299), of x or, with a base, of x - base (its algorithm 1).

    Without the faults of its published code: scales belong to one sample, not to a microbatch, and
    have the range of float32 and no epsilon; the grid is symmetric and uses all 2^B codes; up to 6
    bits its scale is the one with the least squared error, not the one that covers all.

    Attributes:
        kernels: the backend; by default the one for the tensor's device.
    """

    spec: CodecSpec
    kernels: Kernels | None = None

    def encode(self, x: Tensor, base: Tensor | None = None) -> EncodedTensor:
        """See `Codec.encode`; base may be on another device than x."""
        x = checked_sample(x)
        base = checked_base(self.spec, base, *x.shape)
        base = None if base is None else base.to(x.device)
        kernels = self.kernels or kernels_for(x.device.type)
        scales, peak = choose_scales(x, base, self.spec, kernels)
        patterns = scale_patterns(scales, self.spec.axis)
        grid = self._grid(_bytes_of(*to_host(patterns))) if self.spec.dither else self._grid()
        packed = kernels.quantize_pack(x, base, scales, grid)
        # All that a GPU has to say comes at once, so that it is waited for once.
        header, body, largest = to_host(patterns, packed, peak)
        checked_peak(float(largest[0]))
        payload = _bytes_of(header) + body.tobytes()
        return EncodedTensor(self.spec, x.shape[0], x.shape[1], payload)

    def decode(self, encoded: EncodedTensor, base: Tensor | None = None) -> Tensor:
        """See `Codec.decode`; base + units * scale, with the one rounding of the sum."""
        check_encoded(self, encoded)
        tokens, channels = encoded.tokens, encoded.channels
        check_size(encoded, self.max_payload_bytes(tokens, channels))
        base = checked_base(self.spec, base, tokens, channels)
        device = torch.device("cpu") if base is None else base.device
        kernels = self.kernels or kernels_for(device.type)
        scales = read_scales(encoded.payload, self.spec.axis, tokens, channels)
        header_bytes = self._header_bytes(tokens, channels)
        packed = as_tensor(encoded.payload[header_bytes:]).to(device)
        scales = scales.to(device)
        grid = self._grid(encoded.payload[:header_bytes])
        shape = tokens, channels
        return check_finite(kernels.unpack_dequantize(packed, shape, base, scales, grid))

    def max_payload_bytes(self, tokens: int, channels: int) -> int:
        """See `Codec.max_payload_bytes`; every payload has that size."""
        codes = packed_bytes(tokens * channels, self.spec.bits)
        return self._header_bytes(tokens, channels) + codes

    def _header_bytes(self, tokens: int, channels: int) -> int:
        return SCALE_BYTES * sum(scales_for(self.spec.axis, tokens, channels))

    def _grid(self, header: bytes = b"") -> NarrowGrid:
        # Both ends have the scales, so a seed made of them needs no room on the wire.
        return NarrowGrid(self.spec.bits, zlib.crc32(header) if self.spec.dither else None)


def _bytes_of(patterns: NDArray[np.int16]) -> bytes:
    return patterns.astype("<i2", copy=False).tobytes()
