"""The codec `hqB`: tiles of a token's channels, rotated so that outliers spread over the tile.

Payload of one sample: that of `qB`, with a step a tile, of the rotated values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from swarm_ft.codec.base import (
    Codec,
    check_encoded,
    check_finite,
    checked_peak,
    checked_sample,
    peak_of,
    refuse_base,
)
from swarm_ft.codec.kernels import Kernels, kernels_for
from swarm_ft.protocol.codec_spec import CodecSpec
from swarm_ft.protocol.frame import EncodedTensor

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
