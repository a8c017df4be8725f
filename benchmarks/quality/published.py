"""The quantiser as AQ-SGD's authors published it, for comparison: `pubqB` and `pubaqB`.

Written from a description of their code (arXiv 2206.01299), its known losses included: 1e-6 is
added to the scale where it divides and not where it multiplies, the grid has no code for the
largest positive value, the scale is a float16 that may overflow. With one sample a microbatch, as
their language-model runs have it, a scale belongs to one channel of one sample.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from swarm_ft.errors import NonFinite

_PATTERN = re.compile(r"pub(?P<delta>a?)q(?P<bits>[2-8])")


@dataclass(frozen=True, slots=True)
class PublishedTensor:
    """The encoding of the published code: codes, most significant bit first, and scales."""

    tokens: int
    channels: int
    codes: bytes
    scales: bytes

    def to_bytes(self) -> bytes:
        """All of it; the published code has no header."""
        return self.codes + self.scales


@dataclass(frozen=True, slots=True)
class PublishedCodec:
    """`pubqB` of a tensor, or `pubaqB` of its change against a base."""

    bits: int
    is_delta: bool

    def encode(self, x: Tensor, base: Tensor | None = None) -> PublishedTensor:
        """Quantise float32 [tokens, channels].

        Raises:
            NonFinite: x has infinities or NaNs, or its scale overflows a float16.
        """
        x = x.detach() - base if self.is_delta and base is not None else x.detach()
        scales = x.abs().amax(0).to(torch.float16)
        if not torch.isfinite(scales).all():
            raise NonFinite("published quantiser: a scale is not finite")
        half = 1 << (self.bits - 1)
        codes = (x / (scales + 1e-6) * half).round().nan_to_num().clamp(-half, half - 1) + half
        packed = _pack(codes.to(torch.uint8).flatten().numpy(), self.bits)
        return PublishedTensor(x.shape[0], x.shape[1], packed, scales.numpy().tobytes())

    def encode_and_decode(
        self, x: Tensor, base: Tensor | None = None
    ) -> tuple[PublishedTensor, Tensor]:
        """Both, one after the other."""
        encoded = self.encode(x, base)
        return encoded, self.decode(encoded, base, device=x.device)

    def decode(
        self,
        encoded: PublishedTensor,
        base: Tensor | None = None,
        *,
        device: torch.device | None = None,
    ) -> Tensor:
        """float32 [tokens, channels] on the device, which is the base's or else the CPU."""
        shape = encoded.tokens, encoded.channels
        codes = torch.from_numpy(_unpack(encoded.codes, self.bits, shape[0] * shape[1]))
        scales = torch.from_numpy(np.frombuffer(encoded.scales, np.float16).astype(np.float32))
        half = 1 << (self.bits - 1)
        y = (codes.view(shape) - half) / half * scales
        y = y if device is None else y.to(device)
        return y + base if self.is_delta and base is not None else y

    def next_base(
        self, encoded: PublishedTensor, value: Tensor, base: Tensor | None = None
    ) -> Tensor:
        """Return the value."""
        return value


def parse_published(text: str) -> PublishedCodec | None:
    """Parse `pubq4` or `pubaq4`; return None for other texts."""
    match = _PATTERN.fullmatch(text)
    return PublishedCodec(int(match["bits"]), bool(match["delta"])) if match else None


def _pack(codes: np.ndarray, bits: int) -> bytes:
    planes = codes[:, None] >> np.arange(bits - 1, -1, -1, dtype=np.uint8) & 1
    return np.packbits(planes).tobytes()


def _unpack(data: bytes, bits: int, count: int) -> np.ndarray:
    planes = np.unpackbits(np.frombuffer(data, np.uint8), count=count * bits).reshape(-1, bits)
    return planes @ (1 << np.arange(bits - 1, -1, -1)).astype(np.float32)
