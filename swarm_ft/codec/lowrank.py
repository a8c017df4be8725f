"""The codec `lowrankR`: a sample as R outer products, and its strongest channels. Knows no buffers.

Payload of one sample of T tokens and C channels, m of them outliers, rank r = min(R, T, C - m);
its size follows from T, C and R alone, all numbers little-endian:

    uint16 [m]              outlier channels, rising
    bfloat16 [m], [r]       scales of the outliers, of the products
    int8 [T, m]             codes of the outliers
    int8 [r, T], [r, C - m] codes of the left and of the right factors

An outlier is code * scale. Any other value is the sum of left * right * scale over the products,
added in their order. Codes lie in -127 .. 127, so each product has at most 14 + 8 bits and is
exact in float32: every addition has one rounding, fused or not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swarm_ft.codec.base import (
    Codec,
    Payload,
    bfloat16_bytes,
    checked_peak,
    little_endian,
    peak_of,
    read_bfloat16,
    to_device,
)
from swarm_ft.errors import BadFrame
from swarm_ft.protocol.messages.boundary import EncodedTensor
from swarm_ft.protocol.spec.codec_spec import CodecSpec

_LEVELS = 127
_CHANNELS_PER_OUTLIER = 64
_MIN_CHANNELS = 8
"""A sample of fewer channels has no outliers."""
_MIN_SCALE = 2.0**-126
"""The smallest normal scale; it serves channels and products of zeros. No scale is zero."""
_MAX_OUTLIER_SCALE = 2.0**120
"""127 times it is finite."""
_MAX_SHIFT = 126
"""2^126 and 2^-126 are both normal in float32."""
_OVERSAMPLING = 8
_SEED = 2401
_FIT_TOLERANCE = 1e-3
"""Directions of a factor that are weaker than this, squared and relative, are not fitted: columns
of 8 bits that are nearly alike would get large values that cancel, and whose roundings do not.
"""
_ROWS = 256
"""Tokens decoded at a time, so that their sums stay in cache."""


class LowRankCodec(Codec):
    """`lowrankR`: the best R outer products of what is left without the strongest channels.

    A sample should be long and wide beside R, or the factors outweigh it. After the left codes are
    chosen the right ones are fitted to them, so rounding the left ones costs little. A sample with
    values beyond 2^110 may come back with its largest values cut. Computes on the CPU where it
    decodes.
    """

    has_one_size = True

    def max_payload_bytes(self, tokens: int, channels: int) -> int:
        """See `Codec.max_payload_bytes`."""
        return sum(_layout_of(self.spec, tokens, channels).part_bytes)

    def _write(self, x: Tensor, base: Tensor | None) -> Payload:
        layout = _layout_of(self.spec, *x.shape)
        shift = _shift_of(checked_peak(peak_of(x)))
        x = x * 2.0**-shift
        channels = _strongest(x, layout.outliers)
        strong = x[:, channels]
        outlier_scales = _scales_for(strong, _MAX_OUTLIER_SCALE, shift)
        others = x[:, _without(channels, layout.channels)]
        left, right, scales = _factorise(others, layout, shift)
        parts = (
            little_endian(channels, "<u2"),
            bfloat16_bytes(torch.cat([outlier_scales, scales]) * 2.0**shift),
            _write_codes(_round(strong, outlier_scales)),
            _write_codes(left.T),
            _write_codes(right.T),
        )
        return self._unread(b"".join(parts), x)

    def _read(self, encoded: EncodedTensor, base: Tensor | None, device: torch.device) -> Tensor:
        layout = _layout_of(self.spec, encoded.tokens, encoded.channels)
        parts = [
            encoded.payload[start:end]
            for start, end in pairwise(accumulate(layout.part_bytes, initial=0))
        ]
        channels = _read_channels(parts[0], layout.channels)
        outlier_scales = _read_scales(parts[1], _MAX_OUTLIER_SCALE)
        scales = _read_scales(parts[2], layout.max_scale)
        strong = _read_codes(parts[3]).view(layout.tokens, layout.outliers)
        left = _read_codes(parts[4]).view(layout.rank, layout.tokens)
        right = _read_codes(parts[5]).view(layout.rank, layout.others)
        x = torch.empty(layout.tokens, layout.channels)
        x[:, channels] = strong * outlier_scales
        x[:, _without(channels, layout.channels)] = _sum_of_products(left, right, scales)
        return to_device(x, device)


@dataclass(frozen=True, slots=True)
class _Layout:
    """What follows from a spec and a shape."""

    tokens: int
    channels: int
    outliers: int
    rank: int

    @property
    def others(self) -> int:
        return self.channels - self.outliers

    @property
    def max_scale(self) -> float:
        """A power of two; `rank` products of such scales add up to a finite sum."""
        return 2.0 ** (113 - (self.rank - 1).bit_length())

    @property
    def part_bytes(self) -> tuple[int, ...]:
        """Of outlier channels, their scales, the products' scales, and the three kinds of codes."""
        m, rank = self.outliers, self.rank
        return (2 * m, 2 * m, 2 * rank, self.tokens * m, rank * self.tokens, rank * self.others)


def _layout_of(spec: CodecSpec, tokens: int, channels: int) -> _Layout:
    outliers = max(1, channels // _CHANNELS_PER_OUTLIER) if channels >= _MIN_CHANNELS else 0
    rank = min(int(spec.number), tokens, channels - outliers)
    return _Layout(tokens, channels, outliers, rank)


def _shift_of(peak: float) -> int:
    """The n for which 2^-n brings `peak` near 1; squares and scales then stay in range."""
    return max(-_MAX_SHIFT, min(_MAX_SHIFT, math.frexp(peak)[1]))


def _strongest(x: Tensor, count: int) -> Tensor:
    """The channels of most energy: int64 [count], rising."""
    return x.square().sum(0).topk(count).indices.sort().values


def _without(channels: Tensor, count: int) -> Tensor:
    """0 .. count - 1 without `channels`."""
    kept = torch.ones(count, dtype=torch.bool, device=channels.device)
    kept[channels] = False
    return kept.nonzero().view(-1)


def _factorise(x: Tensor, layout: _Layout, shift: int) -> tuple[Tensor, Tensor, Tensor]:
    """Left codes [tokens, rank], right codes [channels, rank] and scales [rank] for x * 2^-shift.

    The second fit of each side works as one more power iteration does, and costs less.
    """
    left = _full_range(_leading(x, layout.rank))
    right = _full_range(_fit(x.T, left))
    left = _full_range(_fit(x, right))
    right = _fit(x.T, left)
    scales = _scales_for(right, layout.max_scale, shift)
    return left, _round(right, scales), scales


def _leading(x: Tensor, rank: int) -> Tensor:
    """Nearly the first left singular vectors of x: [tokens, rank].

    A randomised range finder with one power iteration and a few directions to spare (Halko,
    Martinsson, Tropp, arXiv 0909.4061, algorithm 4.4).
    """
    width = min(rank + _OVERSAMPLING, *x.shape)
    generator = torch.Generator().manual_seed(_SEED)
    basis = x @ torch.randn(x.shape[1], width, generator=generator).to(x.device)
    basis = torch.linalg.qr(x.T @ torch.linalg.qr(basis).Q).Q
    basis = torch.linalg.qr(x @ basis).Q
    image = (basis.T @ x).double()
    strongest_last = torch.linalg.eigh(image @ image.T).eigenvectors
    leading: Tensor = basis @ strongest_last[:, -rank:].float()
    return leading


def _fit(x: Tensor, factor: Tensor) -> Tensor:
    """The y [a, rank] for which y @ factor.T comes nearest to x [a, b]; factor is [b, rank]."""
    gram = factor.double().T @ factor.double()
    inverse: Tensor = torch.linalg.pinv(gram, rtol=_FIT_TOLERANCE, hermitian=True)
    return x @ (factor.double() @ inverse).float()


def _full_range(factor: Tensor) -> Tensor:
    """Codes of each column that reach from its largest magnitude down; zeros for zeros."""
    peaks = factor.abs().amax(0).clamp_min(_MIN_SCALE)
    return (factor / peaks * _LEVELS).round()


def _scales_for(values: Tensor, limit: float, shift: int) -> Tensor:
    """Scales that cover each column of values * 2^shift, as float32 [columns] * 2^-shift.

    Exactly bfloat16s, and in range after the shift.
    """
    low = _MIN_SCALE * 2.0 ** max(0, -shift)
    high = min(limit * 2.0**-shift, 2.0**127)
    scales = values.abs().amax(0) / _LEVELS
    return scales.clamp(low, high).to(torch.bfloat16).float()


def _round(values: Tensor, scales: Tensor) -> Tensor:
    return (values / scales).round().clamp(-_LEVELS, _LEVELS)


def _sum_of_products(left: Tensor, right: Tensor, scales: Tensor) -> Tensor:
    """The sum of left[r] x right[r] * scales[r], r rising: float32 [tokens, channels]."""
    total = torch.zeros(left.shape[1], right.shape[1])
    right = right * scales[:, None]  # exact, and so is its product with a code
    for start in range(0, len(total), _ROWS):
        rows = total[start : start + _ROWS]
        for column, row in zip(left[:, start : start + _ROWS], right, strict=True):
            rows.addcmul_(column[:, None], row)
    return total


def _write_codes(codes: Tensor) -> bytes:
    return codes.to(torch.int8).contiguous().cpu().numpy().tobytes()


def _read_channels(payload: bytes, count: int) -> Tensor:
    channels: NDArray[np.int64] = np.frombuffer(payload, "<u2").astype(np.int64)
    if (channels >= count).any() or (np.diff(channels) <= 0).any():
        raise BadFrame(f"frame: expected rising channels below {count}, got {channels.tolist()}")
    return torch.from_numpy(channels)


def _read_scales(payload: bytes, limit: float) -> Tensor:
    scales = read_bfloat16(payload)
    bad = scales[~((scales >= _MIN_SCALE) & (scales <= limit))]  # so that NaN is bad
    if len(bad):
        raise BadFrame(
            f"frame: expected scales of {_MIN_SCALE:.6g} to {limit:.6g}, got {bad[0]:.6g}"
        )
    return scales


def _read_codes(payload: bytes) -> Tensor:
    codes = torch.from_numpy(np.frombuffer(payload, np.int8).astype(np.float32))
    if (codes < -_LEVELS).any():
        raise BadFrame(f"frame: expected codes of {-_LEVELS} to {_LEVELS}, got {-_LEVELS - 1}")
    return codes
