"""Values in 8 bits with a scale for each 256 of them, for optimizer state of large weights.

The codes are those of dynamic tree quantisation (Dettmers et al. 2021, arXiv 2110.02861, section
2.2). They have 7 decades, each with twice as many even steps as the one below, so that small values
keep one digit and large ones more. All computations are comparisons, products and maxima, which do
not depend on the machine or the number of threads.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

BLOCK = 256
_NUM_DECADES = 7


def num_scales(count: int) -> int:
    """Return the number of scales for `count` values."""
    return -(-count // BLOCK)


def encode(values_n: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Return the nearest code of each value, uint8 [n], and scales, float32 [num_scales(n)].

    Args:
        values_n: Values, float32 [n]; not negative unless `signed`.
        signed: Whether values may be negative. Otherwise only 0 gets the code of 0, because
            optimizers divide by the values.
    """
    scales = _largest(values_n.abs())
    spread = _spread(scales, len(values_n))
    # A block of zeros has the scale 0, and stays a block of zeros.
    shares = values_n / torch.where(spread == 0, 1.0, spread)
    borders = _tensor(_borders(signed), values_n.device)
    codes = torch.bucketize(shares, borders, out_int32=True)
    if not signed:
        codes.add_((codes == 0) & (values_n > 0))
    return codes.to(torch.uint8), scales


def decode(codes_n: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """Return the values [n] in float32 of codes and scales of `encoded`."""
    shares = _tensor(_values(signed), codes_n.device)[codes_n.int()]
    return shares.mul_(_spread(scales, len(codes_n)))


def _largest(sizes_n: Tensor) -> Tensor:
    """Return the largest value of each block; the last block may be short."""
    whole = len(sizes_n) // BLOCK * BLOCK
    largest = sizes_n[:whole].view(-1, BLOCK).amax(1)
    if whole == len(sizes_n):
        return largest
    return torch.cat([largest, sizes_n[whole:].amax(0, keepdim=True)])


def _spread(scales: Tensor, count: int) -> Tensor:
    return scales.repeat_interleave(BLOCK)[:count]


def _tensor(values: tuple[float, ...], device: torch.device) -> Tensor:
    # The tensor is created each time: a cached one could come from a rehearsal, without values.
    return torch.tensor(values, dtype=torch.float32, device=device)


@cache
def _values(signed: bool) -> tuple[float, ...]:
    """Return the values of the 256 codes, rising."""
    found = {0.0, 1.0}
    for decade in range(_NUM_DECADES):
        steps = 2 ** (decade + (0 if signed else 1))
        largest = float(f"1e{decade - _NUM_DECADES + 1}")
        middles = [0.1 + 0.9 * (step + 0.5) / steps for step in range(steps)]
        found.update(largest * one for one in middles)
        found.update(-largest * one for one in middles if signed)
    return tuple(sorted(found))


@cache
def _borders(signed: bool) -> tuple[float, ...]:
    return tuple((low + high) / 2 for low, high in pairwise(_values(signed)))
