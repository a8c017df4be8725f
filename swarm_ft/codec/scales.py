"""Which scale each channel gets, and its two bytes. Knows no codes on the wire and no bases.

A scale is the step of a channel's grid, over all tokens of one sample. It is a normal, positive
bfloat16: so code * scale is exact in float32, even where denormals are flushed, and no scale
divides by zero. The smallest, 2^-126, serves channels of zeros.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from swarm_ft.errors import BadFrame

SCALE_BYTES = 2

_MAX_FLOAT = torch.finfo(torch.float32).max
_MIN_SCALE = torch.finfo(torch.float32).tiny
_FIT_BITS = 4
"""With more bits the search gains little: an eighth at 5 bits for Gaussian values, 0.03 at 6."""
_MULTIPLES = (1.0, 0.8, 0.65, 0.5, 0.375, 0.25)
"""Of the covering scale. At few bits a finer grid that clips beats one that covers all."""
_ROWS = 64
"""Tokens tried at a time, so that what is computed for them stays in cache."""


def levels_of(bits: int) -> int:
    """The largest code: the grid is -levels .. levels, so it has both ends and an exact zero."""
    return (1 << (bits - 1)) - 1


def choose_scales(x: Tensor, peaks: Tensor, bits: int) -> Tensor:
    """The step of each channel's grid.

    It covers the channel's largest value; at 4 bits and fewer it is the one of a few multiples
    of that (the first, of equals) that has the least squared error. x * 2^n gets scales * 2^n.

    Args:
        x: float32 [tokens, channels], finite.
        peaks: float32 [channels], the largest magnitude of each channel.
        bits: 2 to 8.

    Returns:
        float32 [channels], each exactly a bfloat16.
    """
    levels = levels_of(bits)
    covering = _nearest_scales(peaks / levels, levels)
    if bits > _FIT_BITS:
        return covering
    best, least = covering, torch.full_like(covering, torch.inf)
    for multiple in _MULTIPLES:
        scales = _nearest_scales(covering * multiple, levels)
        # Relative to the covering scale: squares of the scales themselves could underflow.
        error = _squared_steps(x, scales, levels) * (scales / covering).square()
        best = torch.where(error < least, scales, best)
        least = torch.minimum(error, least)
    return best


def write_scales(scales: Tensor) -> bytes:
    """Scales of shape [channels] as little-endian bfloat16."""
    patterns = scales.to(torch.bfloat16).view(torch.int16).cpu().numpy()
    return patterns.astype("<i2", copy=False).tobytes()


def read_scales(payload: bytes, channels: int, bits: int) -> Tensor:
    """The scales that a payload begins with: float32 [channels], on the CPU.

    Raises:
        BadFrame: one is no scale: not positive, denormal, NaN, or too large for the largest
            code times it to be finite.
    """
    patterns = np.frombuffer(payload, "<i2", count=channels).astype(np.int16)
    scales = torch.from_numpy(patterns).view(torch.bfloat16).float()
    limit = _max_scale(levels_of(bits))
    bad = scales[~((scales >= _MIN_SCALE) & (scales <= limit))]  # so that NaN is bad
    if len(bad):
        raise BadFrame(
            f"frame: expected scales of {_MIN_SCALE:.6g} to {limit:.6g}, got {bad[0]:.6g}"
        )
    return scales


def _max_scale(levels: int) -> float:
    """The largest bfloat16 that is finite in float32 when multiplied by `levels`."""
    cut_to_bfloat16 = torch.tensor(_MAX_FLOAT / levels).view(torch.int32) & -(1 << 16)
    return cut_to_bfloat16.view(torch.float32).item()


def _nearest_scales(steps: Tensor, levels: int) -> Tensor:
    return steps.clamp(_MIN_SCALE, _max_scale(levels)).to(torch.bfloat16).float()


def _squared_steps(x: Tensor, scales: Tensor, levels: int) -> Tensor:
    """Each channel's squared error on the grid of `scales`, in squared steps of that grid."""
    total = torch.zeros_like(scales)
    for start in range(0, len(x), _ROWS):
        exact = x[start : start + _ROWS] / scales
        error = exact.round().clamp_(-levels, levels).sub_(exact)
        total += error.square_().sum(0)
    return total
