"""The codec `aqB` of AQ-SGD: what changed since the sample's last visit, quantised.

Knows a base as a tensor; where it is kept, and whether the other end has it, is others' work.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm_ft.codec.base import check_encoded, checked_sample, peak_of
from swarm_ft.codec.quantize import grid_bytes, quantize, read_grid
from swarm_ft.errors import BadFrame
from swarm_ft.protocol.codec_spec import CodecSpec
from swarm_ft.protocol.frame import EncodedTensor


@dataclass(frozen=True, slots=True)
class DeltaCodec:
    """`aqB`: m + Q(a - m) for a value a and a base m (arXiv 2206.01299, algorithm 1).

    The error is Q's relative to the change alone, so it shrinks from visit to visit as training
    settles.
    """

    spec: CodecSpec

    def encode(self, x: Tensor, base: Tensor | None = None) -> EncodedTensor:
        """See `Codec.encode`; base may be on another device than x."""
        x = checked_sample(x)
        base = self._checked_base(base, *x.shape)
        return quantize(x - base.to(x.device), self.spec)

    def decode(self, encoded: EncodedTensor, base: Tensor | None = None) -> Tensor:
        """See `Codec.decode`; base + code * scale, with the one rounding of the sum."""
        check_encoded(self, encoded)
        base = self._checked_base(base, encoded.tokens, encoded.channels)
        codes, scales = read_grid(encoded)
        x = torch.addcmul(base, codes.to(base.device), scales.to(base.device))
        if not math.isfinite(peak := peak_of(x)):
            raise BadFrame(f"frame: expected a finite base + delta, got {peak}")
        return x

    def payload_bytes(self, tokens: int, channels: int) -> int:
        """See `Codec.payload_bytes`."""
        return grid_bytes(tokens, channels, self.spec.bits)

    def _checked_base(self, base: Tensor | None, tokens: int, channels: int) -> Tensor:
        if base is None:
            raise BadFrame(f"codec {self.spec} needs the sample's buffer as base; send a key frame")
        base = checked_sample(base, "base")
        if base.shape != (tokens, channels):
            raise BadFrame(f"base: expected [{tokens}, {channels}], got {list(base.shape)}")
        return base
