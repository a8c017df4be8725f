"""Arithmetic of stored buffers: a step for every channel, times one for every block of a token.

All of it is exact or correctly rounded value by value, and sums are of whole numbers, so that every
backend and device returns the same bits: what packs a buffer must do alike at both ends. Here in
plain torch, for any device; `cpu_blocks` has it as loops.

Steps are floats of 3 bits of mantissa, and known by the upper 11 bits of their pattern: 8 a power
of two, in the order of the steps, 0 for 0, so about 8 log2(step) + 1016.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

BLOCK = 32
"""Channels of a token that share a step; a token's last block may have fewer."""
CUT = 20
"""Lower bits of a float32 that a step does not have."""
ONE = 127 << 3
"""The pattern of 1.0."""
LEAST = 8 << 3
"""Below this pattern a block is as good as zero: its step has no float32 for an inverse."""


class BlockKernels(Protocol):
    """A backend. Tensors are on its device, and what it returns is too."""

    def magnitudes(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Patterns of magnitudes, cut to 11 bits: a measure of each channel's logarithm.

        Args:
            x: float32 [tokens, channels], of at most 2^20 tokens.

        Returns:
            Sums of the patterns by channel, int64 [channels]; how many were not zero, int64
            [channels]; the largest magnitude, float32 [1], not finite where x is not.
        """
        ...

    def quantize_blocks(self, x: Tensor, channels: Tensor, bits: int) -> tuple[Tensor, Tensor]:
        """Blocks' steps and codes of x with its channels divided by their steps.

        A block's step is the least that brings its largest magnitude to 2^(bits - 1) - 1/2 or less.
        Codes are whole steps, to nearest even, at most 2^(bits - 1) - 1 to either side of zero.

        Args:
            x: float32 [tokens, channels].
            channels: int64 [channels], patterns of channels' steps, none of them zero.
            bits: 4 or 8.

        Returns:
            Patterns of blocks' steps, int32 [tokens, blocks], and codes, uint8 [tokens, channels],
            2^(bits - 1) for zero.
        """
        ...

    def dequantize_blocks(
        self, codes: Tensor, blocks: Tensor, channels: Tensor, bits: int
    ) -> Tensor:
        """Codes times the block's step times the channel's: one or no rounding.

        Args:
            codes: uint8 [tokens, channels].
            blocks: int32 [tokens, blocks], patterns of steps.
            channels: int64 [channels], patterns of steps.

        Returns:
            float32 [tokens, channels].
        """
        ...


class TorchBlocks(BlockKernels):
    """See `BlockKernels`."""

    def magnitudes(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `BlockKernels.magnitudes`."""
        sizes = x.abs().contiguous()
        patterns = sizes.view(torch.int32) >> CUT
        return patterns.sum(0), (patterns > 0).sum(0), sizes.amax().view(1)

    def quantize_blocks(self, x: Tensor, channels: Tensor, bits: int) -> tuple[Tensor, Tensor]:
        """See `BlockKernels.quantize_blocks`."""
        levels, padding = last_code(bits), -x.shape[1] % BLOCK
        even = torch.nn.functional.pad(x * (1 / step_of(channels)), (0, padding))
        parts = even.view(len(x), -1, BLOCK)
        covering = parts.abs().amax(2) * per_reach(bits)
        blocks = (covering.view(torch.int32) + ((1 << CUT) - 1)) >> CUT
        blocks = torch.where(blocks < LEAST, 0, blocks)
        inverse = torch.where(blocks == 0, 0.0, 1 / step_of(blocks))
        codes = (parts * inverse[:, :, None]).round().clamp(-levels, levels) + (levels + 1)
        return blocks, codes.to(torch.uint8).view(len(x), -1)[:, : x.shape[1]]

    def dequantize_blocks(
        self, codes: Tensor, blocks: Tensor, channels: Tensor, bits: int
    ) -> Tensor:
        """See `BlockKernels.dequantize_blocks`."""
        of_value = step_of(blocks).repeat_interleave(BLOCK, 1)[:, : codes.shape[1]]
        units = codes.to(torch.int32) - (last_code(bits) + 1)
        return units.float() * of_value * step_of(channels)


def last_code(bits: int) -> int:
    """Steps from zero to the last code on either side."""
    return (1 << (bits - 1)) - 1


def per_reach(bits: int) -> float:
    """One over the steps that a block reaches to either side, as a float32."""
    return torch.tensor(1 / (last_code(bits) + 0.5)).item()


def block_count(channels: int) -> int:
    """Blocks of a token."""
    return -(-channels // BLOCK)


def step_of(patterns: Tensor) -> Tensor:
    """The steps of these patterns, float32."""
    return (patterns.to(torch.int32) << CUT).view(torch.float32)
