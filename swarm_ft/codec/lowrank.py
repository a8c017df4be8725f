"""The codec `lowrankR`: a sample as R outer products and its strongest channels. Uses no buffers.

Payload of one sample of T tokens and C channels, m of them outliers, rank r = min(R, T, C - m). Its
size depends on T, C and R alone; all numbers are little-endian:

    uint16 [m]              outlier channels, rising
    bfloat16 [m], [r]       scales of the outliers, of the products
    int8 [T, m]             codes of the outliers
    int8 [r, T], [r, C - m] codes of the left and of the right factors

An outlier is code * scale. Any other value is the sum of left * right * scale over the products,
added in their order. Codes lie in -127 .. 127, so each product has at most 14 + 8 bits and is exact
in float32: every addition rounds once, fused or not.
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
from swarm_ft.codec.spec import CodecSpec
from swarm_ft.codec.tensor import EncodedTensor
from swarm_ft.errors import BadFrame

_LEVELS = 127
_CHANNELS_PER_OUTLIER = 64
_MIN_CHANNELS = 8
"""Minimum number of channels of a sample with outliers."""
_MIN_SCALE = 2.0**-126
"""Smallest scale, the smallest normal float32; channels and products of zeros use it too."""
_MAX_OUTLIER_SCALE = 2.0**120
"""Largest scale of an outlier; 127 times it is finite."""
_MAX_SHIFT = 126
"""Largest shift; 2^126 and 2^-126 are both normal in float32."""
_OVERSAMPLING = 8
_SEED = 2401
_FIT_TOLERANCE = 1e-3
"""Relative squared strength below which a factor's directions are not fitted. Nearly equal columns
of 8 bits would get large values that cancel, while their roundings do not."""
_ROWS = 256
"""Tokens that are decoded at a time, so that their sums stay in the cache."""


class LowRankCodec(Codec):
    """Low-rank codec: the best R outer products of a sample without its strongest channels.

    A sample should be long and wide compared with R, or the factors outweigh it. The right factors
    are fitted to the rounded left ones, so rounding these costs little. A sample with values beyond
    2^110 may have its largest values clipped. Decodes on the CPU.
    """

    has_one_size = True

    def max_payload_bytes(self, tokens: int, channels: int) -> int:
        """Return the size of every payload of this shape."""
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
    """Sizes that follow from a spec and a shape."""

    tokens: int
    channels: int
    outliers: int
    rank: int

    @property
    def others(self) -> int:
        return self.channels - self.outliers

    @property
    def max_scale(self) -> float:
        """Largest scale of a product, a power of two; `rank` such products have a finite sum."""
        return 2.0 ** (113 - (self.rank - 1).bit_length())

    @property
    def part_bytes(self) -> tuple[int, ...]:
        """Bytes of outlier channels, their scales, the products' scales, and three codes."""
        m, rank = self.outliers, self.rank
        return (2 * m, 2 * m, 2 * rank, self.tokens * m, rank * self.tokens, rank * self.others)


def _layout_of(spec: CodecSpec, tokens: int, channels: int) -> _Layout:
    outliers = max(1, channels // _CHANNELS_PER_OUTLIER) if channels >= _MIN_CHANNELS else 0
    rank = min(int(spec.number), tokens, channels - outliers)
    return _Layout(tokens, channels, outliers, rank)


def _shift_of(peak: float) -> int:
    """Return the n for which 2^-n brings `peak` near 1; squares and scales then stay in range."""
    return max(-_MAX_SHIFT, min(_MAX_SHIFT, math.frexp(peak)[1]))


def _strongest(x: Tensor, count: int) -> Tensor:
    """Return the channels of most energy: int64 [count], rising."""
    return x.square().sum(0).topk(count).indices.sort().values


def _without(channels: Tensor, count: int) -> Tensor:
    """Return 0 .. count - 1 without `channels`."""
    remains = torch.ones(count, dtype=torch.bool, device=channels.device)
    remains[channels] = False
    return remains.nonzero().view(-1)


def _factorise(x: Tensor, layout: _Layout, shift: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return left codes [tokens, rank], right codes [channels, rank] and scales [rank].

    The product is x * 2^-shift. The second fit of each side works like another power iteration, at
    less cost.
    """
    left = _full_range(_leading(x, layout.rank))
    right = _full_range(_fit(x.T, left))
    left = _full_range(_fit(x, right))
    right = _fit(x.T, left)
    scales = _scales_for(right, layout.max_scale, shift)
    return left, _round(right, scales), scales


def _leading(x: Tensor, rank: int) -> Tensor:
    """Return approximately the first left singular vectors of x: [tokens, rank].

    A randomised range finder with one power iteration and oversampling (Halko, Martinsson, Tropp,
    arXiv 0909.4061, algorithm 4.4).
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
    """Return the y [a, rank] that minimises the error of y @ factor.T for x [a, b]."""
    gram = factor.double().T @ factor.double()
    inverse: Tensor = torch.linalg.pinv(gram, rtol=_FIT_TOLERANCE, hermitian=True)
    return x @ (factor.double() @ inverse).float()


def _full_range(factor: Tensor) -> Tensor:
    """Return codes of each column scaled to its largest magnitude; zeros for zeros."""
    peaks = factor.abs().amax(0).clamp_min(_MIN_SCALE)
    return (factor / peaks * _LEVELS).round()


def _scales_for(values: Tensor, limit: float, shift: int) -> Tensor:
    """Return scales for each column of values * 2^shift, as float32 [columns] * 2^-shift.

    They are exactly bfloat16s, and in range after the shift.
    """
    low = _MIN_SCALE * 2.0 ** max(0, -shift)
    high = min(limit * 2.0**-shift, 2.0**127)
    scales = values.abs().amax(0) / _LEVELS
    return scales.clamp(low, high).to(torch.bfloat16).float()


def _round(values: Tensor, scales: Tensor) -> Tensor:
    return (values / scales).round().clamp(-_LEVELS, _LEVELS)


def _sum_of_products(left: Tensor, right: Tensor, scales: Tensor) -> Tensor:
    """Return the sum of left[r] x right[r] * scales[r], r rising: float32 [tokens, channels]."""
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
