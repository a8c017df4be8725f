"""`blocks` on one thread of a CPU, by Numba."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swarm_ft.codec.kernels.cpu_grid import compiled, part
from swarm_ft.codec.kernels.reference import (
    BLOCK,
    CUT,
    LEAST,
    BlockKernels,
    block_count,
    last_code,
    per_reach,
    scale_of,
)

Floats = NDArray[np.float32]
Patterns = NDArray[np.int32]
Codes = NDArray[np.uint8]

_I32 = np.int32
_MAGNITUDE = np.int32(0x7FFFFFFF)
_ROUND_UP = np.int32((1 << CUT) - 1)
_ZERO, _ONE = np.float32(0), np.float32(1)


class NumbaBlocks(BlockKernels):
    """See `BlockKernels`; sizes that do not fit each other raise ValueError."""

    def magnitudes(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `BlockKernels.magnitudes`."""
        sums, counts = (np.zeros(x.shape[1], np.int32) for _ in range(2))
        largest = np.zeros(1, np.int32)
        _magnitudes(_array(x).view(np.int32), sums, counts, largest)
        peak = torch.from_numpy(largest).view(torch.float32)
        return torch.from_numpy(sums).long(), torch.from_numpy(counts).long(), peak

    def quantize_blocks(self, x: Tensor, channels: Tensor, bits: int) -> tuple[Tensor, Tensor]:
        """See `BlockKernels.quantize_blocks`."""
        _check_channels(x, channels)
        blocks = np.empty((len(x), block_count(x.shape[1])), np.int32)
        codes = np.empty(x.shape, np.uint8)
        inverse = _array(1 / scale_of(channels))
        _quantize(_array(x), inverse, np.float32(per_reach(bits)), last_code(bits), blocks, codes)
        return torch.from_numpy(blocks), torch.from_numpy(codes)

    def dequantize_blocks(
        self, codes: Tensor, blocks: Tensor, channels: Tensor, bits: int
    ) -> Tensor:
        """See `BlockKernels.dequantize_blocks`."""
        _check_channels(codes, channels)
        if blocks.shape != (len(codes), block_count(codes.shape[1])):
            raise ValueError(f"blocks: {list(blocks.shape)} do not fit {list(codes.shape)} codes")
        x = np.empty(codes.shape, np.float32)
        scales = _array(scale_of(blocks)), _array(scale_of(channels))
        _dequantize(_array(codes), *scales, last_code(bits) + 1, x)
        return torch.from_numpy(x)


@compiled
def _magnitudes(x: Patterns, sums: Patterns, counts: Patterns, largest: Patterns) -> None:
    """See `BlockKernels.magnitudes`; x as patterns."""
    peak = _I32(0)
    for t in range(x.shape[0]):
        for c in range(x.shape[1]):
            size = _I32(x[t, c] & _MAGNITUDE)
            pattern = _I32(size >> _I32(CUT))
            peak = max(peak, size)
            sums[c] = _I32(sums[c] + pattern)
            counts[c] = _I32(counts[c] + _I32(pattern > _I32(0)))
    largest[0] = peak


@part
def _pattern_of(peak: np.float32, inverse_reach: np.float32) -> np.int32:
    covering = np.float32(peak * inverse_reach).view(np.int32)
    pattern = _I32(_I32(covering + _ROUND_UP) >> _I32(CUT))
    return pattern if pattern >= _I32(LEAST) else _I32(0)


@part
def _inverse_of(pattern: np.int32) -> np.float32:
    if pattern == _I32(0):
        return _ZERO
    return _ONE / np.float32(_I32(pattern << _I32(CUT)).view(np.float32))


@compiled
def _quantize(
    x: Floats, inverse: Floats, inverse_reach: np.float32, last: int, blocks: Patterns, codes: Codes
) -> None:
    """See `BlockKernels.quantize_blocks`; a token waits in the first-level cache meanwhile."""
    tokens, channels = x.shape
    token = np.empty(channels, np.float32)
    top, middle = np.float32(last), _I32(last + 1)
    for t in range(tokens):
        for c in range(channels):
            token[c] = x[t, c] * inverse[c]
        for b in range(blocks.shape[1]):
            block = token[b * BLOCK : (b + 1) * BLOCK]
            peak = _ZERO
            for k in range(block.size):
                peak = max(peak, np.float32(abs(block[k])))
            pattern = _pattern_of(peak, inverse_reach)
            blocks[t, b] = pattern
            per_scale = _inverse_of(pattern)
            part_of = codes[t, b * BLOCK : (b + 1) * BLOCK]
            for k in range(block.size):
                code = np.rint(np.float32(block[k] * per_scale))
                code = min(max(code, -top), top)
                part_of[k] = np.uint8(_I32(code) + middle)


@compiled
def _dequantize(codes: Codes, blocks: Floats, scales: Floats, middle: int, x: Floats) -> None:
    """See `BlockKernels.dequantize_blocks`."""
    for t in range(codes.shape[0]):
        for b in range(blocks.shape[1]):
            block = blocks[t, b]
            part_of = codes[t, b * BLOCK : (b + 1) * BLOCK]
            values = x[t, b * BLOCK : (b + 1) * BLOCK]
            of_channel = scales[b * BLOCK : (b + 1) * BLOCK]
            for k in range(part_of.size):
                units = np.float32(_I32(_I32(part_of[k]) - _I32(middle)))
                values[k] = np.float32(units * block) * of_channel[k]


def _array(x: Tensor) -> NDArray[Any]:
    return x.detach().contiguous().numpy()


def _check_channels(x: Tensor, channels: Tensor) -> None:
    if len(channels) != x.shape[1]:
        raise ValueError(f"channels: {len(channels)} scales do not fit {list(x.shape)} values")
